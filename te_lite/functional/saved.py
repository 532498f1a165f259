"""What a forward keeps for its backward.

It goes through autograd's save_for_backward, so that saved-tensor hooks, checkpoints and version checks see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

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
    """Decorates its backward likewise. It refuses create_graph=True: there is no second derivative, and torch's
    once_differentiable lets pass what takes its gradients for constants."""
    plain = without_amp(method)

    @wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "te_lite computes no second derivatives, its backward is once_differentiable: leave out "
                "create_graph=True, or put torch's module in the place of te_lite's where they are needed"
            )
        return plain(ctx, *args) if torch._C._is_any_autocast_enabled() else method(ctx, *args)

    return staticmethod(run)


def wants(ctx: Any, at: int) -> bool:
    """In a backward: whether the gradient of the argument `at` of forward goes anywhere, a tensor that requires one.
    torch.autograd.grad() and backward(inputs=...) may ask for less than there is."""
    node = [node for node, _ in ctx.next_functions if node is not None][sum(ctx.needs_input_grad[:at])]
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf for which torch.autograd.grad() is asked
        return True


Item = QTensor | Tensor | None
# For each item what is left of it without its tensors. None: nothing, for the item is None. (): nothing, for it is one
# Tensor. Of a QTensor: (format, shape, dtype, which of its five tensors are there).
Specs = list[Any]


def flatten(items: Iterable[Item]) -> tuple[list[Tensor], Specs]:
    """(the tensors of `items` in one list, a spec for each item). unflatten() puts the items together again.

    RuntimeError for memory that belongs to a userbuffer: it cannot be kept for backward, for peers write there."""
    tensors: list[Tensor] = []
    specs: Specs = []
    for item in items:
        if isinstance(item, QTensor):
            if item.borrowed:
                raise RuntimeError(
                    f"a borrowed tensor of shape {item.shape} would be kept for backward: it lies in a userbuffer that "
                    "peers overwrite; copy it first"
                )
            present = []
            for part in (item.row, item.row_scale, item.col, item.col_scale, item.seed):  # no comprehension: a call
                present.append(part is not None)
                if part is not None:
                    tensors.append(part)
            specs.append((item.format, item.shape, item.dtype, tuple(present)))
        elif item is None:
            specs.append(None)
        else:
            tensors.append(item)
            specs.append(())
    return tensors, specs


def unflatten(specs: Specs, saved: Iterable[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """(the items that flatten() took apart, their tensors). saved: the tensors as autograd gives them back.

    Saved-tensor hooks may have put them anywhere. Data and scales of QTensors are copied where cuBLAS cannot read them.
    """
    tensors, at, items = list(saved), 0, list[Any]()
    for spec in specs:
        if not spec:
            items.append(None if spec is None else tensors[at])
            at += spec is not None
            continue
        *described, present = spec
        parts: list[Tensor | None] = []
        for i, there in enumerate(present):
            if there and i < 4 and tensors[at].is_cuda:
                tensors[at] = placed(tensors[at])
            parts.append(tensors[at] if there else None)
            at += there
        items.append(QTensor(*described, *parts))
    return items, tensors


def not_before(event: Tensor, t: Tensor) -> Tensor:
    """t itself, of which a compiled graph cannot use anything before `event` is there, one element of what follows from
    dy. A compiler would compute what does not follow from dy in forward, and keep it."""
    return torch.where(event > 0.0, t, t)
