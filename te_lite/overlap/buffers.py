"""The protocol of userbuffers: slots, flags, epochs, and the two exchanges that everything is made of.

A flag is a 32-bit word that only grows, compared cyclically. Slot s of a buffer is used for epoch 1, 2, ...; in the
arena of every rank it has
    ready[source, piece]  set by the source when its data is there
    free[reader]          set by the reader of this rank's data when it is done with it
A writer waits for free >= epoch - 1 before it writes, a reader for ready >= epoch before it reads. So a slot is never
written while anybody may still read it, whichever layers share it, and no barrier is paid. Ranks push: they write into
their peers' arenas and read only their own. The copy stream waits for no flag: a wait is a kernel, for which a GEMM
that fills the device and waits for that copy would leave no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.gemm import placed
from te_lite.ops.reduce import reduce_slots
from te_lite.overlap.arena import Arena, aligned
from te_lite.quantize.qtensor import Layout, QTensor

if TYPE_CHECKING:
    from te_lite.overlap.group import Group

T = TypeVar("T")

MAIN, COPY = 0, 1  # streams of a program: the caller's, and that of the copy engine
WORD = 4  # bytes of a flag
MOST_PROGRAMS = 512  # kept; each token count makes some, and a run with ever new ones must not fill the memory


def following(rank: int, size: int) -> list[int]:
    """The other ranks in the order in which `rank` reads from them: rank + 1, rank + 2, ... (mod size)."""
    return [(rank + i) % size for i in range(1, size)]


class Buffer:
    """One kind of traffic: `slots` slots of the arena's buffer `name`, their flags from word `first_flag` on.

    words: under CUDA graphs the epochs lie in device memory, one word a slot, because a captured number is frozen.
    """

    def __init__(
        self, arena: Arena, name: str, slots: int, pieces: int, first_flag: int, first_epoch: int, words: Tensor | None
    ) -> None:
        self.arena, self.name, self.slots, self.pieces, self.words = arena, name, slots, pieces, words
        self.capacity = arena.slot_bytes(name)
        self.zero = torch.zeros(1, dtype=torch.int32, device=arena.device)
        self.programs: dict[tuple, Any] = {}
        self.counters = torch.zeros(slots, arena.size * pieces + 1, dtype=torch.int32, device=arena.device)
        self._first_flag = first_flag
        self._epochs = [(first_epoch - 1) & 0xFFFFFFFF] * slots
        self._next = 0

    @staticmethod
    def flags_needed(size: int, slots: int, pieces: int) -> int:
        """Words of flags of one buffer in a group of `size` ranks."""
        return slots * size * (pieces + 1)

    def take(self) -> tuple[int, int]:
        """(slot, epoch) of the next use. All ranks take in the same order, so both agree everywhere."""
        slot = self._next
        self._next = (slot + 1) % self.slots
        self._epochs[slot] = (self._epochs[slot] + 1) & 0xFFFFFFFF
        if self.words is not None:
            self.words[slot : slot + 1].add_(1)  # captured with the use; an int32, which wraps around
        return slot, self._epochs[slot]

    def _flag(self, slot: int, rank: int, index: int) -> int:
        size = self.arena.size
        word = self._first_flag + slot * size * (self.pieces + 1) + index
        return self.arena.address("flags", 0, rank) + WORD * word

    def ready(self, slot: int, rank: int, source: int, piece: int = 0) -> int:
        """Address, in `rank`'s arena, of the flag that `source` sets when its data is there."""
        return self._flag(slot, rank, source * self.pieces + piece)

    def flags(self, slot: int) -> tuple[Tensor, Tensor]:
        """This rank's flags of a slot: (ready, int32 [R, pieces]; free, [R])."""
        size, words = self.arena.size, self.arena.view("flags", 0, self.arena.rank).view(torch.int32)
        first = self._first_flag + slot * size * (self.pieces + 1)
        ready, free = words[first : first + size * (self.pieces + 1)].split([size * self.pieces, size])
        return ready.view(size, self.pieces), free

    def epoch(self, slot: int, epoch: int) -> tuple[Tensor, int]:
        """(word, delta) whose sum is the epoch of this use, for kernels: under CUDA graphs the word alone."""
        return (self.zero, epoch) if self.words is None else (self.words[slot : slot + 1], 0)

    def free(self, slot: int, rank: int, reader: int) -> int:
        """Address, in `rank`'s arena, of the flag that `reader` sets when it is done with rank's data."""
        return self._flag(slot, rank, self.arena.size * self.pieces + reader)

    def cached(self, build: Callable[..., T], *args: Any) -> T:
        """build(self, *args), made once for each."""
        key = (build, *args)
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= MOST_PROGRAMS:
                self.programs.clear()
            program = self.programs[key] = build(self, *args)
        return program


def part_offsets(sizes: Sequence[int], ranks: int) -> list[int]:
    """Where in a slot each part of a gathered tensor begins; sizes: bytes of one rank's shard of each part."""
    return list(accumulate((aligned(size * ranks) for size in sizes), initial=0))[:-1]


def gathered_bytes(sizes: Sequence[int], ranks: int) -> int:
    """What a gather of shards of these parts takes of a slot."""
    return sum(aligned(size * ranks) for size in sizes)


def _gather_program(buffer: Buffer, slot: int, sizes: tuple[int, ...], rows: int, own: bool) -> _C.Program:
    """Segments: 0 push the shard to the others, and to this rank's own slot where that is wanted; i = 1 .. R-1 wait for
    rank + i; R wait for all; R+1 free all; R+2 a kernel of the caller's waits.

    sizes: bytes of each part of a shard; argument i is part i of the own. rows: in how many rows it is put beside the
    others' parts; 1: it follows them.

    The own shard goes last: it may have to wait for multiprocessors, and a kernel that occupies all of them while it
    waits for others, on any rank, must find their pushes under way.
    """
    arena, rank, size = buffer.arena, buffer.arena.rank, buffer.arena.size
    program = _C.Program(f"all-gather in {buffer.name}[{slot}]")
    # The reader that comes to this rank's data first is the one before it.
    readers = [*reversed(following(rank, size))]
    for peer in [*readers, rank]:
        program.wait(MAIN, buffer.free(slot, rank, peer), -1, peer, "room at")
    program.after(COPY, MAIN)
    own_by = COPY if buffer.words is None else MAIN
    for peer, stream in [*((peer, COPY) for peer in readers), *[(rank, own_by)] * own]:
        base = arena.address(buffer.name, slot, peer)
        for part, (offset, n) in enumerate(zip(part_offsets(sizes, size), sizes, strict=True)):
            width, to = n // rows, base + offset + rank * (n // rows)
            if n:
                program.copy(stream, -1, to, part, 0, width, rows, width * size, width)
        program.set(stream, buffer.ready(slot, peer, rank), 0)
    for source in following(rank, size):
        program.cut()
        program.wait(MAIN, buffer.ready(slot, rank, source), 0, source, "data from")
    program.cut()
    for source in [*following(rank, size), *[rank] * own]:
        program.wait(MAIN, buffer.ready(slot, rank, source), 0, source, "data from")
    program.cut()
    _free(program, [buffer.free(slot, source, rank) for source in range(size)], buffer)
    _expect(program, buffer, slot, 0)
    return program


def _free(program: _C.Program, flags: list[int], buffer: Buffer, pushed: bool = True) -> None:
    """Tells the writers that what they have sent has been read; and what was pushed from here has left, so that its
    memory may be used again. The copy stream sets the flags, for a write across the links takes the caller's some
    microseconds; not in a graph, which ends with the caller's stream."""
    stream = COPY if buffer.words is None else MAIN
    if pushed:
        program.after(MAIN, COPY)
    program.after(stream, MAIN)
    for flag in flags:
        program.set(stream, flag, 0)


def _expect(program: _C.Program, buffer: Buffer, slot: int, piece: int) -> None:
    """A segment that has the time watched which a kernel of the caller's waits for data."""
    program.cut()
    for source in following(buffer.arena.rank, buffer.arena.size):
        program.expect(buffer.ready(slot, buffer.arena.rank, source, piece), 0, source, "data from")


class Gather:
    """An all-gather in flight: the wire format of `q` from every rank, in rank order.

    own: this rank's shard is wanted in the buffer too (else it is used where it is). A shard has arrived once the first
    flag of its source is set. Between the constructor and close() the data may be read; QTensors made from it are
    borrowed. Where the format gathers_columns, shards of the col layout are put side by side as they arrive.
    """

    def __init__(self, group: Group, q: QTensor, layout: Layout, *, own: bool) -> None:
        self.group, self.q, self.layout = group, q, layout
        self.buffer = group.buffer("gather")
        self._wire = [part.contiguous() for part in q.wire(layout)]
        sizes = tuple(part.nbytes for part in self._wire)
        self.offsets = part_offsets(sizes, group.size)
        self.slot, self.epoch = self.buffer.take()
        self._dim = int(layout == "col" and q.format.gathers_columns(q.shape[0]))  # along which shards are put together
        self.program = self.buffer.cached(_gather_program, self.slot, sizes, q.shape[1] if self._dim else 1, own)
        self.own = own
        self.sent = sum(sizes) * (group.size - 1)  # bytes
        self._addresses = tuple(part.data_ptr() for part in self._wire)
        self._issue(0)

    def _issue(self, segment: int) -> None:
        self.group.issue(self, segment, self._addresses)

    def parts(self, source: int | None = None) -> tuple[Tensor, ...]:
        """The parts of one source, or of all, as they lie in the arena, arrived or not."""
        memory = self.buffer.arena.view(self.buffer.name, self.slot, self.group.rank)
        views = []
        for part, offset in zip(self._wire, self.offsets, strict=True):
            shape, own = list(part.shape), part.shape[self._dim]
            shape[self._dim] *= self.group.size
            whole = memory[offset : offset + part.nbytes * self.group.size].view(part.dtype).view(shape)
            # A vector of scales of an odd number of rows begins where no GEMM may read it.
            views.append(placed(whole if source is None else whole.narrow(self._dim, source * own, own)))
        return tuple(views)

    def shard(self, source: int) -> QTensor:
        """The shard of another rank, once it has arrived."""
        self._issue((source - self.group.rank) % self.group.size)
        return replace(self.q.from_wire(self.parts(source), self.layout, self.q.shape[0]), borrowed=True)

    def whole(self) -> QTensor:
        """The gathered tensor, once all of it has arrived."""
        assert self.own
        self._issue(self.group.size)
        return replace(self.q.from_wire(self.parts(), self.layout, self.q.shape[0] * self.group.size), borrowed=True)

    def expect(self) -> None:
        """A kernel that is to come waits for the shards: should it wait for too long, the group breaks."""
        self._issue(self.group.size + 2)

    def close(self) -> None:
        """What has been read will not be read again, and this rank's shard has left."""
        self._issue(self.group.size + 1)


def _targets(buffer: Buffer, slot: int, size_bytes: int) -> tuple[list[int], list[int]]:
    """Of each rank, where this one's partial for it goes, and its first ready flag: addresses."""
    arena, ranks = buffer.arena, range(buffer.arena.size)
    to = [arena.address(buffer.name, slot, rank) + arena.rank * size_bytes for rank in ranks]
    return to, [buffer.ready(slot, rank, arena.rank) for rank in ranks]


def _scatter_program(buffer: Buffer, slot: int, size_bytes: int, cuts: tuple[int, ...], pieces: int) -> _C.Program:
    """Segments: 0 wait for room; then cuts[0] times: push argument 0, a piece of it, to rank + 1, and so on for
    rank + 2, ...; then those of Scatter: push argument 0, all ranks' partials; wait for all; free all; a kernel of the
    caller's waits, also for room.

    A piece sets all the flags of its share of the rows."""
    rank, size = buffer.arena.rank, buffer.arena.size
    to, arrived = _targets(buffer, slot, size_bytes)
    program = _C.Program(f"reduce-scatter in {buffer.name}[{slot}]")
    for peer in following(rank, size):
        program.wait(MAIN, buffer.free(slot, rank, peer), -1, peer, "room at")
    program.cut()
    for peer, cut in zip(following(rank, size), cuts, strict=bool(cuts)):
        base, piece = to[peer], size_bytes // cut
        for index in range(cut):
            program.after(COPY, MAIN)
            program.copy(COPY, -1, base + index * piece, 0, 0, piece)
            for flag in range(index * pieces // cut, (index + 1) * pieces // cut):
                program.set(COPY, arrived[peer] + WORD * flag, 0)
            program.cut()
    program.after(COPY, MAIN)
    for peer in following(rank, size):
        program.copy(COPY, -1, to[peer], 0, peer * size_bytes, size_bytes)
        for flag in range(pieces):
            program.set(COPY, arrived[peer] + WORD * flag, 0)
    program.cut()
    for source in following(rank, size):
        program.wait(MAIN, buffer.ready(slot, rank, source, pieces - 1), 0, source, "data from")
    program.cut()
    _free(program, [buffer.free(slot, source, rank) for source in following(rank, size)], buffer, pushed=bool(cuts))
    _expect(program, buffer, slot, pieces - 1)
    for peer in following(rank, size):
        program.expect(buffer.free(slot, rank, peer), -1, peer, "room at")
    return program


class Scatter:
    """A reduce-scatter in flight: every rank's partial [m, N] for every other, summed by its owner.

    cuts: in how many pieces of equally many rows each partial is pushed, in the order of `following`; divisors of m and
    of the largest of them, which is at most the buffer's flags a source.
    blocks: a kernel of the caller's stores the partials instead, once there is room, and sets so many flags of each.
    The owner r sums in fp32 in the order r+1, r+2, ..., r, whatever arrives first, and rounds once.
    """

    def __init__(
        self, group: Group, shape: tuple[int, int], dtype: torch.dtype, cuts: Sequence[int] = (), blocks: int = 0
    ) -> None:
        self.group, self.shape, self.dtype = group, shape, dtype
        self.cuts = () if blocks else tuple(cuts) or (1,) * (group.size - 1)
        pieces = blocks or max(self.cuts)
        self.buffer = group.buffer("scatter")
        assert pieces <= self.buffer.pieces and not any(shape[0] % cut or pieces % cut for cut in self.cuts)
        self.bytes = shape[0] * shape[1] * dtype.itemsize
        self.slot, self.epoch = self.buffer.take()
        self.program = self.buffer.cached(_scatter_program, self.slot, self.bytes, self.cuts, pieces)
        self.sent = self.bytes * (group.size - 1)
        self._whole, self._wait, self._free, self._expect = range(1 + sum(self.cuts), 5 + sum(self.cuts))  # segments
        self._pushed: list[Tensor] = []
        if not blocks:
            self._issue(0)

    def _issue(self, segment: int, address: int = 0) -> None:
        self.group.issue(self, segment, (address,))

    def push(self, partial: Tensor, destination: int, piece: int = 0) -> None:
        """A piece of destination's rows [m / cut, N], to be on its way once the caller's stream has computed it."""
        step = (destination - self.group.rank - 1) % self.group.size
        shape = (self.shape[0] // self.cuts[step], self.shape[1])
        assert partial.shape == shape and partial.dtype == self.dtype and partial.is_contiguous()
        self._pushed.append(partial)
        self._issue(1 + sum(self.cuts[:step]) + piece, partial.data_ptr())

    def push_all(self, partials: Tensor) -> None:
        """partials[R*m, N] of all ranks, in one call, to be on their way once the caller's stream has computed them."""
        assert partials.shape == (self.shape[0] * self.group.size, self.shape[1])
        assert partials.dtype == self.dtype and partials.is_contiguous()
        self._pushed.append(partials)
        self._issue(self._whole, partials.data_ptr())

    @property
    def staging(self) -> Tensor:
        """What the others push to this rank, [R, m, N] by source; its own entry is not used."""
        memory = self.buffer.arena.view(self.buffer.name, self.slot, self.group.rank)
        return memory[: self.bytes * self.group.size].view(self.dtype).view(self.group.size, *self.shape)

    @property
    def targets(self) -> tuple[list[int], list[int]]:
        return self.buffer.cached(_targets, self.slot, self.bytes)

    def reduce(self, own: Tensor, bias: Tensor | None = None, take: Callable[[Tensor, Tensor, int], Any] | None = None):
        """The sum of all ranks' partials of this rank's rows and bias[N], in the wire's dtype; own[m, N] may be wider.
        take: what reads them instead; its result is returned. Closes."""
        self._issue(self._wait)
        assert take is None or bias is None
        rank = self.group.rank
        out = take(self.staging, own, rank) if take else reduce_slots(self.staging, own, bias, rank, self.dtype)
        self.close()
        return out

    def expect(self) -> None:
        """As of a Gather."""
        self._issue(self._expect)

    def close(self) -> None:
        """What has been pushed has been read."""
        self._issue(self._free)
        self._pushed.clear()
