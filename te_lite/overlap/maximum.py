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
    """On GPUs. Each of its 64-bit words, which lie among the flags, is a value and its epoch.

    graph: for calls captured in CUDA graphs, whose epochs are counted on the device; they must follow each other.
    many: of values one by one, in place.
    """

    def __init__(self, arena: Arena, graph: bool, many: bool) -> None:
        rank, size, device, width = arena.rank, arena.size, arena.device, MOST_VALUES if many else 1
        name = self._name(graph, many)
        bases = [arena.address(name, 0, peer) for peer in range(size)]
        self._slots = arena.view(name, 0).view(torch.int64)[: SLOTS * size * width]
        self._zero = torch.zeros(1, dtype=torch.int32, device=device)
        self._done = torch.zeros(2, dtype=torch.int32, device=device)
        self._targets = torch.tensor([address + 2 * WORD * rank * width for address in bases], device=device)
        self._epoch, self._graph, self._op = 0, graph, group_maxima if many else group_max
        # They move nothing. They tell the watcher what the kernel waits for, which names the rank after a time-out.
        self._programs = [_C.Program("the maximum over all ranks") for _ in range(SLOTS)]
        for slot, program in enumerate(self._programs):
            for source in following(rank, size):
                epoch = bases[rank] + 2 * WORD * (slot * size + source) * width + WORD  # the upper half
                program.expect(epoch, 0, source, "data from")
        self.fixed = [self._zero, self._done, self._targets]  # and its words, in the arena
        compiled_group_max(device, size, width)
        torch.cuda.synchronize(device)  # the words above are there, whichever stream reads them

    @staticmethod
    def _name(graph: bool, many: bool) -> str:
        return f"{'maxima' if many else 'maximum'}{'.graph' * graph}"

    @classmethod
    def reserve(cls, arena: Arena, graph: bool, many: bool) -> None:
        """Room for the words, before the arena is committed."""
        arena.reserve(cls._name(graph, many), 2 * WORD * SLOTS * arena.size * (MOST_VALUES if many else 1))

    def release(self) -> None:
        """Lets go of the arena's memory, also where recordings keep this."""
        del self._slots

    @property
    def next(self) -> int:
        """Which of its words the next turn takes."""
        return (self._epoch + 1) % SLOTS

    def turn(self) -> int:
        """The epoch of the next call."""
        self._epoch = (self._epoch + 1) & 0xFFFFFFFF
        return self._epoch

    def of(self, partials: Tensor, group: Group) -> Tensor | None:
        """fp32 [1]: the largest of all ranks' partials, once they have come. Of many the partials themselves become the
        largest, one by one, and it gives None."""
        word, delta = self._done, 1
        if not self._graph:
            epoch = self.turn()
            stream, program = torch._C._cuda_getCurrentRawStream(group.device.index), self._programs[epoch % SLOTS]
            group.executor.issue(program, 0, epoch, stream, ())
            if OPEN.recorder is not None:
                OPEN.recorder.turn(self, epoch, self._zero)
                OPEN.recorder.issue(group.executor, program, 0, epoch, self._zero, 0, (), None)
            word, delta = self._zero, signed(epoch)
        return self._op(partials, self._slots, self._targets, self._done, word, delta, group.abort)
