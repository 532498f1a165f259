"""What a recorder notes of a body, and how tensors lie in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from te_lite import _C

BETWEEN = -1  # in place of a stream: a step that orders two of them


class Address(NamedTuple):
    """slot: of the table that a replay fills (see Recording). offset: in bytes."""

    slot: int
    offset: int


class EpochArgument(NamedTuple):
    """Where a launch takes an epoch. word: as of Recorder.turn()."""

    position: int  # among its arguments
    epoch: int
    word: Tensor


class EpochCounter(Protocol):
    """A Buffer or a Maximum, whose uses come in the same order on every rank."""

    def turn(self) -> int:
        """Takes the next use, and gives its epoch."""


class Turn(NamedTuple):
    counter: EpochCounter
    epoch: int  # in the run that is seen
    word: Tensor


class Step(NamedTuple):
    add: Callable[[_C.Sequence, list[tuple[int, int, int]], list[tuple[int, int]]], None]  # to a sequence
    tensors: tuple[tuple[int, Tensor], ...] = ()  # (position of its address, the tensor)
    unaligned: int = 0  # for the addresses of so many of the first it was compiled for no alignment
    epochs: tuple[tuple[int, int], ...] = ()  # (position, which turn's)
    use: object = None  # of a buffer: until its last step the tensors of all of them are read
    stream: int = 0  # its handle; 0: that of the body
    called: Callable[..., object] | None = None  # by Python, in place of `add`


class View(NamedTuple):
    """How a tensor lies in a base: a result that is no whole allocation, or what Python calls something for. offset: in
    elements, from the first one of its base."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        base = base if base.dtype == self.dtype else base.view(self.dtype)
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


def view_of(t: Tensor, base: Tensor | None) -> View:
    offset: Any = t.storage_offset()
    return View(t.dtype, t.shape, t.stride(), offset - (0 if base is None else base.storage_offset()))


def is_whole(t: Tensor) -> bool:
    return t.is_contiguous() and t.storage_offset() == 0 and t.nbytes == t.untyped_storage().nbytes()


def holds(given: Tensor, at: int) -> bool:
    """Whether the address lies in what the tensor spans."""
    extent = 1 + sum((size - 1) * step for size, step in zip(given.shape, given.stride(), strict=True))
    return given.data_ptr() <= at < given.data_ptr() + extent * given.element_size() and given.numel() > 0


def is_view(func: Any) -> bool:
    """An op that computes nothing: its results alias its arguments."""
    returned = func._schema.returns
    aliases = bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    return (aliases and not func._schema.is_mutable) or func is torch.ops.aten._unsafe_view.default
