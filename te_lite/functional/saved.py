"""What a forward keeps for its backward.

It goes through autograd's save_for_backward, so that saved-tensor hooks, checkpoints and version checks see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_lite.ops.gemm import placed
from te_lite.quantize.qtensor import QTensor


def without_amp(method: Callable) -> Callable:
    """For an autograd.Function's methods: torch.amp.autocast is off inside, where every dtype is chosen by the plan."""

    @wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return method(ctx, *args)
        with torch.amp.autocast("cpu", enabled=False), torch.amp.autocast("cuda", enabled=False):
            return method(ctx, *args)

    return run


def forward_method(method: Callable) -> staticmethod:
    """Decorates the forward of an autograd.Function: torch.amp.autocast is off inside."""
    return staticmethod(without_amp(method))


def backward_method(method: Callable) -> staticmethod:
    """Decorates its backward likewise, of which no gradient can be taken."""
    return staticmethod(once_differentiable(without_amp(method)))


def save(ctx: Any, *items: QTensor | Tensor | None) -> None:
    """Keeps `items` for load(ctx). Memory that belongs to a userbuffer is refused: peers write there."""
    tensors: list[Tensor | None] = []
    ctx.shells = []  # of each QTensor; None for a Tensor
    for item in items:
        quantized = isinstance(item, QTensor)
        if quantized and item.borrowed:
            raise RuntimeError(
                f"a borrowed tensor of shape {item.shape} would be kept for backward: it lies in a userbuffer that "
                "peers overwrite; copy it first"
            )
        tensors += item.tensors if quantized else (item,)
        ctx.shells.append((item.format, item.shape, item.dtype) if quantized else None)
    ctx.save_for_backward(*tensors)


def load(ctx: Any) -> list[QTensor | Tensor | None]:
    """The items of save(ctx, ...), in order. Of QTensors, which saved-tensor hooks may have put anywhere, data and
    scales are where cuBLAS can read them. Autograd checks versions of what it saved; a joined weight has one of its
    own, whatever is written to its parts."""
    if ctx.call.parts and any(ctx.needs) and tuple([part._version for part in ctx.call.parts]) != ctx.call.versions:
        raise RuntimeError(
            "a split weight was written to between forward and backward, which still needed it; run backward before "
            "the optimizer's step"
        )
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors) if shell is None else QTensor(*shell, *map(placed, islice(tensors, 4)), next(tensors))
        for shell in ctx.shells
    ]
