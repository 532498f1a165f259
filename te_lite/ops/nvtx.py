"""Named ranges for profilers, free unless asked for: set TE_LITE_NVTX=1."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_ENABLED = os.environ.get("TE_LITE_NVTX", "0") not in ("", "0")
_NOTHING = nullcontext()  # stateless, so one serves all


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """`with nvtx_range("Linear.fprop"):` names what runs inside; without CUDA for torch's profiler only."""
    if not _ENABLED:
        return _NOTHING
    return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else torch.profiler.record_function(name)
