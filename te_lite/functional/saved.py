"""What a forward keeps for its backward.

It goes through autograd's save_for_backward, so that saved-tensor hooks, checkpoints and version checks see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

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


def save(ctx: Any, *items: QTensor | Tensor | None) -> None:
    """Keeps `items` for load(ctx). Memory that belongs to a userbuffer is refused: peers write there."""
    tensors: list[Tensor | None] = []
    shells: list[tuple | None] = []
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
        tensors.extend(item.tensors)
        shells.append((item.format, item.shape, item.dtype))
    ctx.save_for_backward(*tensors)
    ctx.shells = shells


def load(ctx: Any) -> list[QTensor | Tensor | None]:
    """The items of save(ctx, ...), in order."""
    tensors = ctx.saved_tensors
    items: list[QTensor | Tensor | None] = []
    at = 0
    for shell in ctx.shells:
        if shell is None:
            items.append(tensors[at])
            at += 1
        else:
            items.append(QTensor(*shell, *tensors[at : at + 5]))
            at += 5
    return items
