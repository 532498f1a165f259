"""Where backward runs.

torch runs the backward of CUDA nodes on a thread of its own, one a device. With one device in the process it gains
nothing, and Python code that takes turns on two cores drags its objects from one cache to the other: a te_lite step
whose kernels are small took 1.4 to 1.9 times as long as on one thread (docs/notebook/host-time.md, host time).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def _wanted() -> bool:
    """One CUDA device in this process: all there is, or this rank's. TE_LITE_BACKWARD_THREAD=1 keeps torch's thread."""
    if os.environ.get("TE_LITE_BACKWARD_THREAD", "0") not in ("", "0"):
        return False
    return torch.cuda.device_count() == 1 or (dist.is_available() and dist.is_initialized())


def backward_on_calling_thread() -> None:
    """From now on the calling thread runs the backwards that it starts (torch.autograd.set_multithreading_enabled)."""
    if torch._C._is_multithreading_enabled() and _wanted():
        torch._C._set_multithreading_enabled(False)
