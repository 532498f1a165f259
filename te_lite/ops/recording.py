"""A recording, which a Recorder makes of a body that it sees run: what the body issued, for other tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.steps import EpochCounter, View

_ALIGNED = 512  # bytes: as torch's own allocations

Fetch = Callable[[], tuple[Tensor | None, ...]]


class NotNow(Exception):
    """A replay has begun nothing, and its body must run by itself."""


class NoRoom(NotNow, torch.OutOfMemoryError):
    """A replay asks for its memory in one piece and at once, where a body may do with less."""


class Moved(Exception):
    """A replay has begun nothing: what it fetches lies elsewhere now, and its body must be recorded anew."""


class Called(NamedTuple):
    """What Python calls between two sequences. tensors: (slot, how it lies there)."""

    function: Callable[..., object]
    tensors: list[tuple[int, View]]


class Recording:
    """A body as launches. Each replay fills one table, of whose entries the steps take addresses and epochs, by index.
    The code calls an entry a slot (it is none of an arena):

        inputs | fetched | results that a replay allocates | block | 0 | epochs

    block: one allocation for all that only the launches see, where there is any. 0: from where addresses that never
    change are counted. epochs: one for each turn, of `counters` in their order.
    """

    def __init__(
        self, parts: list[_C.Sequence | Called], device: torch.device, fetches: list[Fetch],
        made: list[tuple[torch.Size, torch.dtype]], block: int, results: list[tuple[int, View | None]],
        counters: Sequence[EpochCounter] = (),
    ) -> None:  # fmt: skip
        self._parts, self.device, self._fetches, self._results = parts, device.index, fetches, results
        self._counters = counters
        allocations = [*made, (torch.Size((block,)), torch.uint8)] if block else made
        # Of at most one element in memory: empty_like() of them takes half the time of empty().
        self._made = [like_of(shape, dtype, device) for shape, dtype in allocations]

    def run(self, inputs: tuple[Tensor | None, ...]) -> list[Tensor]:
        """The body's results for inputs that are described() alike. Raises NotNow (NoRoom) or Moved."""
        slots: list[Any] = [*inputs]
        try:
            made = [*map(torch.empty_like, self._made)]
        except torch.OutOfMemoryError as error:
            raise NoRoom(*error.args) from None
        for fetch in self._fetches:
            slots += fetch()
        slots += made
        epochs = [counter.turn() for counter in self._counters]
        for part in self._parts:
            if isinstance(part, Called):
                part.function(*[view.of(slots[slot]) for slot, view in part.tensors])
            else:
                part.run(torch._C._cuda_getCurrentRawStream(self.device), slots, epochs)
        return [slots[slot] if view is None else view.of(slots[slot]) for slot, view in self._results]


def like_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of which empty_like() has the strides of empty(shape), which are part of backward's key. In memory it
    has at most one element.

    An expanded tensor of fewer than two elements counts as dense, and empty_like() would take over its strides of 0."""
    return torch.empty(shape if shape.numel() < 2 else (), dtype=dtype, device=device).expand(shape)


def packed(uses: list[tuple[int, Tensor, int, int]]) -> tuple[dict[int, int], int]:
    """(an offset for each allocation of (key, tensor, first, last step) in one block, the block's bytes): what no step
    uses together may lie in the same place."""
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # (start, stop, last step)
    end = 0
    for key, t, first, last in sorted(uses, key=lambda use: use[2]):
        size = -(-t.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
        taken = sorted(use for use in taken if use[2] >= first)
        start = 0
        for begin, stop, _ in taken:
            if begin - start >= size:
                break
            start = max(start, stop)
        offsets[key] = start
        taken.append((start, start + size, last))
        end = max(end, start + size)
    return offsets, end
