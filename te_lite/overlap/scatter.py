"""A reduce-scatter through userbuffers (buffers.py has the protocol)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.narrow import BLOCK, narrow
from te_lite.ops.reduce import reduce_slots
from te_lite.overlap.buffers import COPY, MAIN, WORD, Buffer, expect_all, following, free_all, part_offsets

if TYPE_CHECKING:
    from te_lite.overlap.group import Group


def _targets(buffer: Buffer, slot: int, sizes: tuple[int, ...]) -> tuple[list[int], ...]:
    """Addresses, of each rank: this one's first ready flag; and for each part, of `sizes` bytes, of a partial, where
    this one's for it goes."""
    arena, ranks = buffer.arena, range(buffer.arena.size)
    places = [offset + arena.rank * size for offset, size in zip(part_offsets(sizes, len(ranks)), sizes, strict=True)]
    parts = ([arena.address(buffer.name, slot, rank) + place for rank in ranks] for place in places)
    return [buffer.ready(slot, rank, arena.rank) for rank in ranks], *parts


def _scatter_program(
    buffer: Buffer, slot: int, sizes: tuple[int, ...], blocks: int, cuts: tuple[int, ...], pieces: int
) -> _C.Program:
    """Segments: 0 wait for room; then cuts[0] times: push the arguments, a piece of a partial, to rank + 1, and so on
    for rank + 2, ...; then those of Scatter: push the arguments, all ranks' partials; wait for all; free all; a kernel
    of the caller's waits, also for room.

    sizes: bytes of the parts of a partial, each an argument: its rows, and where they are narrow their scales, of which
    each of the `blocks` of columns has a row. A piece sets all the flags of its share of the rows."""
    rank, size = buffer.arena.rank, buffer.arena.size
    arrived, *to = _targets(buffer, slot, sizes)

    def push(peer: int, index: int, cut: int, first: int, whole: int) -> None:
        """Piece `index` of `cut`, the first of whose rows is number `first` of `whole` in the arguments; in pieces."""
        for argument, (places, part) in enumerate(zip(to, sizes, strict=True)):
            rows = blocks if argument else 1
            piece, pitch = part // cut // rows, part // rows
            place, offset = places[peer] + index * piece, first * piece
            program.copy(COPY, -1, place, argument, offset, piece, rows, pitch, whole * piece)
        for flag in range(index * pieces // cut, (index + 1) * pieces // cut):
            program.set(COPY, arrived[peer] + WORD * flag, 0)

    program = _C.Program(f"reduce-scatter in {buffer.name}[{slot}]")
    for peer in following(rank, size):
        program.wait(MAIN, buffer.free(slot, rank, peer), -1, peer, "room at")
    program.cut()
    for peer, cut in zip(following(rank, size), cuts, strict=bool(cuts)):
        for index in range(cut):
            program.after(COPY, MAIN)
            push(peer, index, cut, 0, 1)
            program.cut()
    program.after(COPY, MAIN)
    for peer in following(rank, size):
        push(peer, 0, 1, peer, size)
    program.cut()
    for source in following(rank, size):
        program.wait(MAIN, buffer.ready(slot, rank, source, pieces - 1), 0, source, "data from")
    program.cut()
    free_all(program, [buffer.free(slot, source, rank) for source in following(rank, size)], buffer, pushed=bool(cuts))
    expect_all(program, buffer, slot, pieces - 1)
    for peer in following(rank, size):
        program.expect(buffer.free(slot, rank, peer), -1, peer, "room at")
    return program


class Scatter:
    """A reduce-scatter in flight: every rank's partial [m, N] for every other, summed by its owner.

    cuts: in how many pieces of equally many rows each partial is pushed, in the order of `following`; divisors of m and
    of the largest of them, which is at most the buffer's flags a source.
    blocks: a kernel of the caller's stores the partials instead, once there is room, and sets so many flags of each.
    narrow: they travel as ops/narrow.py makes them; m and N are multiples of its blocks.
    The owner r sums in fp32 in the order r+1, r+2, ..., r, whatever arrives first, and rounds once.
    """

    def __init__(
        self, group: Group, shape: tuple[int, int], dtype: torch.dtype, cuts: Sequence[int] = (), blocks: int = 0,
        narrow: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.shape, self.dtype, self.narrow = group, shape, dtype, narrow
        self.cuts = () if blocks else tuple(cuts) or (1,) * (group.size - 1)
        pieces = blocks or max(self.cuts)
        self.buffer = group.buffer("scatter")
        assert pieces <= self.buffer.pieces and not any(shape[0] % cut or pieces % cut for cut in self.cuts)
        elements, columns = shape[0] * shape[1], shape[1] // BLOCK
        self.sizes = (elements, columns * shape[0] * 4) if narrow else (elements * dtype.itemsize,)
        self.slot, self.epoch = self.buffer.take()
        self.program = self.buffer.cached(_scatter_program, self.slot, self.sizes, columns, self.cuts, pieces)
        self.sent = sum(self.sizes) * (group.size - 1)
        self._whole, self._wait, self._free, self._expect = range(1 + sum(self.cuts), 5 + sum(self.cuts))  # segments
        self._pushed: list[Tensor] = []
        if not blocks:
            self._issue(0)

    def _issue(self, segment: int, partials: Tensor | None = None) -> None:
        parts = () if partials is None else narrow(partials) if self.narrow else (partials,)
        self._pushed.extend(parts)
        self.group.issue(self, segment, tuple(part.data_ptr() for part in parts) or (0,) * len(self.sizes))

    def push(self, partial: Tensor, destination: int, piece: int = 0) -> None:
        """A piece of destination's rows [m / cut, N], to be on its way once the caller's stream has computed it."""
        step = (destination - self.group.rank - 1) % self.group.size
        shape = (self.shape[0] // self.cuts[step], self.shape[1])
        assert partial.shape == shape and partial.dtype == self.dtype and partial.is_contiguous()
        self._issue(1 + sum(self.cuts[:step]) + piece, partial)

    def push_all(self, partials: Tensor) -> None:
        """partials[R*m, N] of all ranks, in one call, to be on their way once the caller's stream has computed them."""
        assert partials.shape == (self.shape[0] * self.group.size, self.shape[1])
        assert partials.dtype == self.dtype and partials.is_contiguous()
        self._issue(self._whole, partials)

    @property
    def staging(self) -> tuple[Tensor, Tensor | None]:
        """What the others push to this rank, [R, m, N] by source, and where that is narrow its scales, [R, N/128, m].
        This rank's own entries are not used."""
        memory = self.buffer.arena.view(self.buffer.name, self.slot, self.group.rank)
        size, (m, n) = self.group.size, self.shape
        if not self.narrow:
            return memory[: self.sizes[0] * size].view(self.dtype).view(size, m, n), None
        _, first = part_offsets(self.sizes, size)
        scales = memory[first : first + self.sizes[1] * size].view(torch.float32).view(size, n // BLOCK, m)
        return memory[: size * m * n].view(torch.float8_e4m3fn).view(size, m, n), scales

    @property
    def targets(self) -> tuple[list[int], ...]:
        return self.buffer.cached(_targets, self.slot, self.sizes)

    def reduce(self, own: Tensor, bias: Tensor | None = None, take: Callable[[Tensor, Tensor, int], Any] | None = None):
        """The sum of all ranks' partials of this rank's rows and bias[N], in the wire's dtype; own[m, N] may be wider.
        take: what reads them instead, unless they are narrow; its result is returned. Closes."""
        self._issue(self._wait)
        assert take is None or bias is None
        (staging, scales), rank = self.staging, self.group.rank
        takes = take is not None and scales is None
        out = take(staging, own, rank) if takes else reduce_slots(staging, own, bias, rank, self.dtype, scales)
        self.close()
        return out

    def expect(self) -> None:
        """As of a Gather."""
        self._issue(self._expect)

    def close(self) -> None:
        """What has been pushed has been read."""
        self._issue(self._free)
        self._pushed.clear()
