"""The largest value of a group's ranks through userbuffers: what a small all-reduce would give, in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.flags import signed
from te_lite.ops.group_max import MOST_VALUES, SLOTS, compiled_group_max, group_max, group_maxima
from te_lite.ops.recorder import OPEN
from te_lite.overlap.arena import Arena
from te_lite.overlap.programs import WORD, following

if TYPE_CHECKING:
    from te_lite.overlap.group import Group


class Maximum:
    """On GPUs: what R ranks need to send each other values and to take the largest. On each rank's arena lie

        slots[SLOTS, R, V]   64-bit words, each a value in fp32 (lower half) and the epoch of its call (upper half)

    In epoch e rank r writes its value i to slots[e % SLOTS, r, i] of every rank. V, the values of a rank in a slot, is

        1             by default: a rank takes partials[P], of any P, and sends the largest of them
        MOST_VALUES   elementwise: a rank takes and sends values[N], N <= V

    V is fixed, since the arena is reserved once and peers compute addresses from it, whatever N is. It is limited,
    since it takes 16 bytes of each arena for each value and rank. With more values ranks use a collective.

    graph: for calls captured in CUDA graphs, whose epochs are counted on the device; they must follow each other.
    """

    def __init__(self, arena: Arena, graph: bool, elementwise: bool) -> None:
        rank, size, device = arena.rank, arena.size, arena.device
        name, values_per_rank = self._region(graph, elementwise)
        bases = [arena.address(name, 0, peer) for peer in range(size)]
        self._slots = arena.view(name, 0).view(torch.int64)[: SLOTS * size * values_per_rank]
        self._zero = torch.zeros(1, dtype=torch.int32, device=device)
        self._done = torch.zeros(2, dtype=torch.int32, device=device)
        row = 2 * WORD * values_per_rank  # bytes of one rank in one slot
        self._targets = torch.tensor([address + row * rank for address in bases], device=device)
        self._epoch, self._graph, self._op = 0, graph, group_maxima if elementwise else group_max
        # They move nothing. They tell the watcher what the kernel waits for, which names the rank after a time-out.
        self._programs = [_C.Program("the maximum over all ranks") for _ in range(SLOTS)]
        for slot, program in enumerate(self._programs):
            for source in following(rank, size):
                epoch = bases[rank] + row * (slot * size + source) + WORD  # the upper half of value 0
                program.expect(epoch, 0, source, "data from")
        self.fixed = [self._zero, self._done, self._targets]  # and its slots, in the arena
        compiled_group_max(device, size, values_per_rank)
        torch.cuda.synchronize(device)  # the words above are there, whichever stream reads them

    @staticmethod
    def _region(graph: bool, elementwise: bool) -> tuple[str, int]:
        """(its name in the arena, V)."""
        return f"{'maxima' if elementwise else 'maximum'}{'.graph' * graph}", MOST_VALUES if elementwise else 1

    @classmethod
    def reserve(cls, arena: Arena, graph: bool, elementwise: bool) -> None:
        """Room for the slots, before the arena is committed."""
        name, values_per_rank = cls._region(graph, elementwise)
        arena.reserve(name, 2 * WORD * SLOTS * arena.size * values_per_rank)

    def release(self) -> None:
        """Lets go of the arena's memory, also where recordings keep this."""
        del self._slots

    @property
    def next(self) -> int:
        """Which slot the next turn takes."""
        return (self._epoch + 1) % SLOTS

    def turn(self) -> int:
        """The epoch of the next call."""
        self._epoch = (self._epoch + 1) & 0xFFFFFFFF
        return self._epoch

    def of(self, values: Tensor, group: Group) -> Tensor | None:
        """fp32 [1], the largest of all ranks' values, once they have come. Elementwise it gives None, and value i has
        become the largest value i of all ranks."""
        word, delta = self._done, 1
        if not self._graph:
            epoch = self.turn()
            stream, program = torch._C._cuda_getCurrentRawStream(group.device.index), self._programs[epoch % SLOTS]
            group.executor.issue(program, 0, epoch, stream, ())
            if OPEN.recorder is not None:
                OPEN.recorder.turn(self, epoch, self._zero)
                OPEN.recorder.issue(group.executor, program, 0, epoch, self._zero, 0, (), None)
            word, delta = self._zero, signed(epoch)
        return self._op(values, self._slots, self._targets, self._done, word, delta, group.abort)
