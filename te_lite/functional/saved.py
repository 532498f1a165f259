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


def forward_method(method: Callable) -> Any:
    """Decorates the forward of an autograd.Function: torch.amp.autocast is off inside."""
    return staticmethod(without_amp(method))


def backward_method(method: Callable) -> Any:
    """Decorates its backward likewise, of which no gradient can be taken."""
    return staticmethod(once_differentiable(without_amp(method)))


def save(ctx: Any, *items: QTensor | Tensor | None) -> None:
    """Keeps `items` for load(ctx). Memory that belongs to a userbuffer is refused: peers write there."""
    tensors: list[Tensor | None] = []
    shells: list[Any] = []  # of each QTensor; None for a Tensor
    ctx.shells = shells
    for item in items:
        if not isinstance(item, QTensor):
            tensors.append(item)
            shells.append(None)
            continue
        if item.borrowed:
            raise RuntimeError(
                f"a borrowed tensor of shape {item.shape} would be kept for backward: it lies in a userbuffer that "
                "peers overwrite; copy it first"
            )
        tensors += (item.row, item.row_scale, item.col, item.col_scale, item.seed)
        shells.append((item.format, item.shape, item.dtype))
    ctx.save_for_backward(*tensors)


def load(ctx: Any) -> list[Any]:
    """The items of save(ctx, ...), in order. Of QTensors, which saved-tensor hooks may have put anywhere, data and
    scales are where cuBLAS can read them. Autograd checks versions of what it saved; a joined weight has one of its
    own, whatever is written to its parts."""
    if ctx.call.parts and any(ctx.needs) and tuple([part._version for part in ctx.call.parts]) != ctx.call.versions:
        raise RuntimeError(
            "a split weight was written to between forward and backward, which still needed it; run backward before "
            "the optimizer's step"
        )
    tensors, items = iter(ctx.saved_tensors), []
    for shell in ctx.shells:
        if shell is None:
            items.append(next(tensors))
            continue
        parts = list(islice(tensors, 5))
        for i, part in enumerate(parts[:4]):
            if part is not None and part.is_cuda:
                parts[i] = placed(part)
        items.append(QTensor(*shell, *parts))
    return items
