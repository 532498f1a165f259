"""Symmetric memory for users: tensors that every rank of a group has at the same place of its arena and can map.

    tensor, memory = te.symmetric_empty(shape, dtype, group)     # collective, out of initialize_ub(symmetric_bytes=...)
    memory.put(peer, x, channel=0)                               # writes x into the peer's tensor, then signals
    memory.wait(peer)                                            # until the peer has put here; then tensor may be read

Space is reserved once, committed by initialize_ub, and only handed out here: no call allocates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.registry import capturing
from te_lite.overlap.arena import aligned
from te_lite.overlap.programs import MAIN, WORD, following

if TYPE_CHECKING:
    from te_lite.overlap.group import Group

CHANNELS = 4  # of signals from one rank to another, for each tensor
MOST_TENSORS = 64  # of a group: the signals of each have a slot of their own


class SymmetricMemory:
    """The handle of a symmetric tensor: the same tensor on every rank of the group, and signals between them.

    rank, size: this rank's place in the group and its size; ranks count within the group. All calls follow the caller's
    stream: run them on a stream of your own to overlap them with other work. A signal counts: the n-th wait() for a
    rank and channel returns after the n-th signal() from there, so no signal is lost and none needs to be reset.
    """

    def __init__(self, group: Group, offset: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group
        part = slice(offset, offset + math.prod(shape) * dtype.itemsize)
        whole = [group.arena.view("symmetric", 0, rank) for rank in range(group.size)]
        self._views = [memory[part].view(dtype).view(shape) for memory in whole]
        self._index = index
        self._signals: dict[tuple, tuple[_C.Program, count[int]]] = {}  # with the epochs of those to come

    def _place(self, rank: int, channel: int = 0) -> int:
        """`rank`, checked."""
        for name, value, most in (("rank", rank, self.size), ("channel", channel, CHANNELS)):
            if type(value) is not int or not 0 <= value < most:
                raise ValueError(f"{name}={value!r}: must be an integer within [0, {most}); ranks count in the group")
        if self._group.closed:
            raise RuntimeError("destroy_ub() has ended the userbuffers of this symmetric memory; use it before that")
        return rank

    def peer(self, rank: int) -> Tensor:
        """The tensor of `rank`, mapped here: read and write it as any tensor, between signals that say when."""
        return self._views[self._place(rank)]

    def put(self, rank: int, tensor: Tensor, index: Any = ..., *, channel: int | None = None) -> None:
        """peer(rank)[index] = tensor; then, with a channel, signal(rank, channel)."""
        self.peer(rank)[index].copy_(tensor.detach())
        if channel is not None:
            self.signal(rank, channel)

    def signal(self, rank: int, channel: int = 0) -> None:
        """Tells `rank` that what the caller's stream has written there so far may be read."""
        self._issue("signal", rank, channel)

    def wait(self, rank: int, channel: int = 0) -> None:
        """The caller's stream (a CPU rank: the caller) goes on after the next signal from `rank`. RuntimeError on all
        ranks where it does not come within TE_LITE_UB_TIMEOUT, or a rank has failed."""
        self._issue("wait", rank, channel)

    def barrier(self, channel: int = 0) -> None:
        """A signal to every other rank and a wait for each."""
        for rank in following(self.rank, self.size):
            self.signal(rank, channel)
        for rank in following(self.rank, self.size):
            self.wait(rank, channel)

    def _issue(self, kind: str, rank: int, channel: int) -> None:
        group, key = self._group, (kind, self._place(rank, channel), channel)
        if group.cuda and capturing():
            raise RuntimeError("signals of symmetric memory count on the host: keep them out of CUDA graphs")
        if key not in self._signals:
            program = _C.Program(f"symmetric memory, channel {channel}")
            self._signals[key] = program, count(1)
            at, source = (rank, self.rank) if kind == "signal" else (self.rank, rank)
            flag = group.arena.address("signals", self._index, at) + WORD * (source * CHANNELS + channel)
            if kind == "signal":
                program.set(MAIN, flag, 0)
            else:
                program.wait(flag, 0, rank, "a signal from")
        program, epochs = self._signals[key]
        main = torch.cuda.current_stream(group.device).cuda_stream if group.cuda else 0
        group.executor.issue(program, 0, next(epochs) & 0xFFFFFFFF, main, ())


class Space:
    """What a group has reserved for symmetric tensors, handed out in the order of calls, the same on every rank."""

    def __init__(self, group: Group) -> None:
        self._group, self.bytes, self.used, self.tensors = group, group.arena.slot_bytes("symmetric"), 0, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, SymmetricMemory]:
        """See symmetric_empty in userbuffers.py. Collective."""
        group, shape = self._group, tuple(shape)
        what = f"symmetric_empty({list(shape)}, {dtype})"
        group.meet(what)
        needed, left = aligned(max(1, math.prod(shape) * dtype.itemsize)), self.bytes - self.used
        if needed > left or self.tensors == MOST_TENSORS:
            raise RuntimeError(
                f"{what} needs {needed} bytes; {left} of {self.bytes} are left, with {self.tensors} of {MOST_TENSORS} "
                "tensors made. Space is reserved once and comes back with destroy_ub(): call initialize_ub(..., "
                f"symmetric_bytes={self.used + needed}) or more, or make fewer tensors and cut them"
            )
        memory = SymmetricMemory(group, self.used, self.tensors, shape, dtype)
        self.used, self.tensors = self.used + needed, self.tensors + 1
        return memory.peer(group.rank), memory
