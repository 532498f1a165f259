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
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from te_lite.ops.arrange import contiguous
from te_lite.ops.gemm import placed
from te_lite.ops.gemm_scatter import MOST_BLOCKS
from te_lite.ops.recorder import OPEN
from te_lite.ops.reduce import reduce_slots
from te_lite.overlap.arena import Arena
from te_lite.overlap.programs import WORD, gather_program, part_offsets, scatter_program, targets
from te_lite.quantize.qtensor import Layout, QTensor

if TYPE_CHECKING:
    from te_lite.overlap.group import Group

T = TypeVar("T")

SLOTS = 2  # of each buffer: a second use may fill while the first is read
PIECES = MOST_BLOCKS  # flags a source: a reduce-scatter sends a partial in at most so many pieces (ring.counts: 4)
_NO_ADDRESS = (0,)
MOST_MADE = 4096  # programs and views kept; each token count makes some, and ever new ones must not fill the memory


class Buffer:
    """One kind of traffic: the slots of the arena's buffer `name`, and beside them those of its flags.

    graph: for calls captured in CUDA graphs. The epochs of these lie in device memory, one of `words` a slot, because a
    captured number is frozen.
    """

    def __init__(self, arena: Arena, name: str, graph: bool) -> None:
        self.arena, self.name = arena, name
        self.capacity = arena.slot_bytes(name)
        self.zero = torch.zeros(1, dtype=torch.int32, device=arena.device)
        self.words = torch.zeros(SLOTS, dtype=torch.int32, device=arena.device) if graph else None
        self._made: dict[tuple, Any] = {}
        self.counters = torch.zeros(SLOTS, arena.size * PIECES + 1, dtype=torch.int32, device=arena.device)
        self._epochs = [0] * SLOTS
        self.held: dict[int, Callable[[], Any]] = {}  # slots of uses that wait for their callers, and what ends them
        self.next = 0  # slot

    def turn(self) -> int:
        """The epoch of the next use, in slot `next`. All ranks take turns in the same order: both agree everywhere."""
        slot = self.next
        if slot in self.held:
            self.held.pop(slot)()
        self.next = (slot + 1) % SLOTS
        self._epochs[slot] = (self._epochs[slot] + 1) & 0xFFFFFFFF
        if self.words is not None:
            self.words[slot : slot + 1].add_(1)  # captured with the use; an int32, which wraps around
        return self._epochs[slot]

    def release(self) -> None:
        """Lets go of the arena's memory, also where recordings keep this."""
        self._made.clear()
        self.held.clear()

    def _flag(self, slot: int, rank: int, index: int) -> int:
        return self.arena.address(f"{self.name}.flags", slot, rank) + WORD * index

    def ready(self, slot: int, rank: int, source: int, piece: int = 0) -> int:
        """Address, in `rank`'s arena, of the flag that `source` sets when its data is there."""
        return self._flag(slot, rank, source * PIECES + piece)

    def flags(self, slot: int) -> tuple[Tensor, Tensor]:
        """This rank's flags of a slot: (ready, int32 [R, pieces]; free, [R])."""
        return self.cached(_flag_views, slot)

    def epoch(self, slot: int, epoch: int) -> tuple[Tensor, int]:
        """(word, delta) whose sum is the epoch of this use, for kernels: under CUDA graphs the word alone."""
        return (self.zero, epoch) if self.words is None else (self.words[slot : slot + 1], 0)

    def free(self, slot: int, rank: int, reader: int) -> int:
        """Address, in `rank`'s arena, of the flag that `reader` sets when it is done with rank's data."""
        return self._flag(slot, rank, self.arena.size * PIECES + reader)

    def cached(self, build: Callable[..., T], *args: Any) -> T:
        """build(self, *args), made once for each."""
        key = (build, *args)
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= MOST_MADE:
                self._made.clear()
            made = self._made[key] = build(self, *args)
        return made


def _flag_views(buffer: Buffer, slot: int) -> tuple[Tensor, Tensor]:
    size, flags = buffer.arena.size, buffer.arena.view(f"{buffer.name}.flags", slot).view(torch.int32)
    ready, free = flags[: size * (PIECES + 1)].split([size * PIECES, size])
    return ready.view(size, PIECES), free


def _parts(
    buffer: Buffer, slot: int, source: int | None, dim: int, kinds: tuple[tuple[torch.dtype, torch.Size], ...]
) -> tuple[Tensor, ...]:  # fmt: skip
    """The parts of a gathered tensor, of one source or of all, where they lie. kinds: type and shape of each part
    in a shard. dim: along which shards are concatenated."""
    memory, ranks, views = buffer.arena.view(buffer.name, slot), buffer.arena.size, []
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in kinds]
    for (dtype, shape), offset, size in zip(kinds, part_offsets(sizes, ranks), sizes, strict=True):
        whole = memory[offset : offset + size * ranks].view(dtype)
        whole = whole.view(*shape[:dim], ranks * shape[dim], *shape[dim + 1 :])
        views.append(whole if source is None else whole.narrow(dim, source * shape[dim], shape[dim]))
    return tuple(views)


class Gather:
    """An all-gather in flight: the wire format of `q` from every rank, in rank order.

    own: this rank's shard is wanted in the buffer too (else it is used where it is). awaited: a kernel of the caller's
    waits for the shards; should it wait for too long, the group breaks. A shard has arrived once the first flag of its
    source is set. Between the constructor and close() the data may be read; QTensors made from it are
    borrowed. Where the format gathers_columns, shards of the col layout are put side by side as they arrive.
    """

    def __init__(self, group: Group, q: QTensor, layout: Layout, *, own: bool, awaited: bool = False) -> None:
        self.group, self.q, self.layout = group, q, layout
        self.buffer = buffer = group.buffer("gather")
        wire = q.format.wire(q, layout)
        if not all(map(Tensor.is_contiguous, wire)):
            wire = tuple(map(contiguous, wire))
        sizes = tuple(map(attrgetter("nbytes"), wire))
        self._wire, self._addresses = wire, tuple(map(Tensor.data_ptr, wire))
        self.slot, self.epoch = buffer.next, buffer.turn()
        if OPEN.recorder is not None:
            OPEN.recorder.turn(buffer, self.epoch, buffer.zero)
        dim = int(layout == "col" and q.format.gathers_columns(q.shape[0]))  # along which shards are concatenated
        self._kinds = dim, tuple(map(attrgetter("dtype", "shape"), wire))
        self.program = buffer.cached(gather_program, self.slot, sizes, q.shape[1] if dim else 1, own, awaited)
        self.own, self.awaited = own, awaited
        self.sent = sum(sizes) * (group.size - 1)  # bytes
        group.issue(self, 0, self._addresses, self._wire)

    def parts(self, source: int | None = None) -> tuple[Tensor, ...]:
        """The parts of one source, or of all, as they lie in the arena, arrived or not."""
        views = self.buffer.cached(_parts, self.slot, source, *self._kinds)
        # A vector of scales of an odd number of rows begins where no GEMM may read it.
        return tuple([placed(view) for view in views]) if self.group.cuda else views

    def shard(self, source: int) -> QTensor:
        """The shard of another rank, once it has arrived."""
        group, q = self.group, self.q
        group.issue(self, (source - group.rank) % group.size, self._addresses, self._wire)
        arrived = q.format.from_wire(self.parts(source), self.layout, q, q.shape[0])
        arrived.borrowed = True
        return arrived

    def whole(self) -> QTensor:
        """The gathered tensor, once all of it has arrived."""
        assert self.own
        group, q = self.group, self.q
        group.issue(self, group.size, self._addresses, self._wire)
        arrived = q.format.from_wire(self.parts(), self.layout, q, q.shape[0] * group.size)
        arrived.borrowed = True
        return arrived

    def close(self) -> None:
        """What has been read will not be read again, and this rank's shard has left."""
        self.group.issue(self, self.group.size + 1, self._addresses, self._wire)


def _staging(buffer: Buffer, slot: int, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
    memory, ranks = buffer.arena.view(buffer.name, slot), buffer.arena.size
    return memory[: ranks * shape[0] * shape[1] * dtype.itemsize].view(dtype).view(ranks, *shape)


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
        self.group, self.shape, self.dtype, self.blocks = group, shape, dtype, blocks
        self.cuts = () if blocks else tuple(cuts) or (1,) * (group.size - 1)
        pieces = blocks or max(self.cuts)
        self.buffer = group.buffer("scatter")
        self.bytes = shape[0] * shape[1] * dtype.itemsize
        self.slot, self.epoch = self.buffer.next, self.buffer.turn()
        if OPEN.recorder is not None:
            OPEN.recorder.turn(self.buffer, self.epoch, self.buffer.zero)
        self.program = self.buffer.cached(scatter_program, self.slot, self.bytes, shape[0], self.cuts, pieces)
        self.sent = self.bytes * (group.size - 1)
        self._whole, self._wait, self._free, self._expect = range(sum(self.cuts), 4 + sum(self.cuts))  # segments
        self._pushed: list[Tensor] = []

    def push(self, partial: Tensor, destination: int, piece: int = 0) -> None:
        """A piece of destination's rows [m / cut, N], to be on its way once the caller's stream has computed it."""
        step = (destination - self.group.rank - 1) % self.group.size
        shape = (self.shape[0] // self.cuts[step], self.shape[1])
        assert partial.shape == shape and partial.dtype == self.dtype and partial.is_contiguous()
        assert self._pushed or step == piece == 0  # the first waits for room
        self._pushed.append(partial)
        self.group.issue(self, sum(self.cuts[:step]) + piece, (partial.data_ptr(),), (partial,))

    def push_all(self, partials: Tensor) -> None:
        """partials[R*m, N] of all ranks, in one call, to be on their way once the caller's stream has computed them."""
        assert partials.shape == (self.shape[0] * self.group.size, self.shape[1])
        assert partials.dtype == self.dtype and partials.is_contiguous()
        self._pushed.append(partials)
        self.group.issue(self, self._whole, (partials.data_ptr(),), (partials,))

    @property
    def staging(self) -> Tensor:
        """What the others push to this rank, [R, m, N] by source; its own entry is not used."""
        return self.buffer.cached(_staging, self.slot, self.dtype, self.shape)

    @property
    def targets(self) -> tuple[list[int], list[int]]:
        return self.buffer.cached(targets, self.slot, self.bytes)

    def reduce(
        self, own: Tensor, bias: Tensor | None = None, take: Callable[[Tensor, Tensor, int], Any] | None = None,
        residual: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The sum of all ranks' partials of this rank's rows, residual[m, N] and bias[N], in the wire's dtype; own[m,
        N] may be wider. take: what reads the partials instead; its result is returned. Closes."""
        self.group.issue(self, self._wait, _NO_ADDRESS)
        assert take is None or bias is residual is None
        staging, rank = self.buffer.cached(_staging, self.slot, self.dtype, self.shape), self.group.rank
        out = take(staging, own, rank) if take else reduce_slots(staging, own, bias, rank, self.dtype, residual)
        self.group.issue(self, self._free, _NO_ADDRESS)
        self._pushed.clear()
        return out

    def expect(self) -> None:
        """A kernel that is to come waits for the partials: should it wait for too long, the group breaks."""
        self.group.issue(self, self._expect, _NO_ADDRESS)

    def close(self) -> None:
        """What has been pushed has been read."""
        self.group.issue(self, self._free, _NO_ADDRESS)
        self._pushed.clear()
