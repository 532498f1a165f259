"""New one-element tensors for scales, cut from blocks: an allocation is 5 us of host time, a cut is below 1."""

from __future__ import annotations

import torch
from torch import Tensor

from te_lite.ops.registry import capturing, unwatched

_PER_BLOCK = 256
_blocks: dict[tuple[torch.device, int], list[Tensor]] = {}


def new_scalar(like: Tensor) -> Tensor:
    """An uninitialised fp32 [1] on the device of `like`, never handed out twice; 16-byte aligned.

    The block lives as long as any tensor cut from it. Blocks belong to a stream, as allocations do; a CUDA graph under
    capture and anything that watches ops get an allocation of their own.
    """
    if not like.is_cuda or not unwatched() or capturing():
        return like.new_empty((1,), dtype=torch.float32)
    device = like.device
    key = (device, torch._C._cuda_getCurrentRawStream(device.index))
    try:
        return _blocks[key].pop()  # one step: threads share streams
    except (KeyError, IndexError):
        with torch.inference_mode(False):  # training may follow, and take the next ones
            rows = like.new_empty((_PER_BLOCK, 4), dtype=torch.float32)[:, :1].unbind(0)
            # .data: each has a version counter of its own, or a write to one would look like a write to all.
            first, *block = [row.data for row in rows]
        _blocks[key] = block
        return first
