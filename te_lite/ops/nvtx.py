"""Named ranges for profilers, free unless asked for: TE_LITE_NVTX=1 when te_lite is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_WORD = os.environ.get("TE_LITE_NVTX", "0")
if _WORD not in ("", "0", "1"):
    raise ValueError(f"TE_LITE_NVTX={_WORD!r}: must be 0 or 1; leave it out for 0")
ENABLED = _WORD == "1"


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """`with nvtx_range("te_lite.fprop"):` names what runs inside; without CUDA for torch's profiler only."""
    return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else torch.profiler.record_function(name)


def ranged(name: str = "") -> Callable[[F], F]:
    """Decorates what runs in a range of that name, or of its first argument's label. Off: the function itself."""

    def decorate(function: F) -> F:
        if not ENABLED:
            return function

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with nvtx_range(name or args[0].label):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]  # of F's signature

    return decorate
