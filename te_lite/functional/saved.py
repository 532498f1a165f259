"""What a forward keeps for its backward.

It goes through autograd's save_for_backward, so that saved-tensor hooks, checkpoints and version checks see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


_aliases: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]

Item = QTensor | Tensor | None
Shells = list[Any]  # of each QTensor what it has beside tensors; None for a Tensor


def taken_apart(items: Iterable[Item]) -> tuple[list[Tensor | None], Shells]:
    """The tensors of `items`, and what put_together() makes of them the items again."""
    tensors: list[Tensor | None] = []
    shells: Shells = []
    for item in items:
        if isinstance(item, QTensor):
            tensors += (item.row, item.row_scale, item.col, item.col_scale, item.seed)
            shells.append((item.format, item.shape, item.dtype))
        else:
            tensors.append(item)
            shells.append(None)
    return tensors, shells


def put_together(shells: Shells, tensors: Iterable[Tensor | None]) -> list[Any]:
    """The items of taken_apart()."""
    each = iter(tensors)
    return [next(each) if shell is None else QTensor(*shell, *islice(each, 5)) for shell in shells]


def save(ctx: Any, *items: Item) -> None:
    """Keeps `items` for load(ctx). Memory that belongs to a userbuffer is refused: peers write there. ctx has its call.

    A weight that is a copy of its parts is not kept: they are, and load() joins them again. FSDP frees them meanwhile.
    """
    for item in items:
        if isinstance(item, QTensor) and item.borrowed:
            raise RuntimeError(
                f"a borrowed tensor of shape {item.shape} would be kept for backward: it lies in a userbuffer that "
                "peers overwrite; copy it first"
            )
    tensors, ctx.shells = taken_apart(items)
    call, ctx.joined = ctx.call, []
    if call.parts and not _aliases(whole := call.weights[0], call.parts[0]):
        same = [t is not None and t.shape == whole.shape and _aliases(t, whole) for t in tensors]
        ctx.joined = [i for i, one in enumerate(same) if one]
        tensors = [None if one else t for one, t in zip(same, tensors, strict=True)]
        tensors += call.parts if ctx.joined else ()
        call.weights = call.parts[0], *call.weights[1:]  # of which backward asks the dtype and the columns alone
    ctx.save_for_backward(*tensors)


def load(ctx: Any) -> tuple[list[Any], list[Tensor | None]]:
    """The items of save(ctx, ...), in order, and their tensors. Of QTensors, which saved-tensor hooks may have put
    anywhere, data and scales are where cuBLAS can read them. Autograd checks versions of what it saved; a joined weight
    has one of its own, whatever is written to its parts."""
    if ctx.call.parts and any(ctx.needs) and tuple([part._version for part in ctx.call.parts]) != ctx.call.versions:
        raise RuntimeError(
            "a split weight was written to between forward and backward, which still needed it; run backward before "
            "the optimizer's step"
        )
    tensors, at, items = list(ctx.saved_tensors), 0, []
    if ctx.joined:
        count = len(ctx.call.parts)
        whole = torch.cat(tensors[-count:])
        tensors = [whole if i in ctx.joined else tensor for i, tensor in enumerate(tensors[:-count])]
    for shell in ctx.shells:
        if shell is None:
            items.append(tensors[at])
            at += 1
            continue
        for i in range(at, at + 4):
            part = tensors[i]
            if part is not None and part.is_cuda:
                tensors[i] = placed(part)
        items.append(QTensor(*shell, *tensors[at : at + 5]))
        at += 5
    return items, tensors
