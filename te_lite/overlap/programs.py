"""What a buffer's uses do with data and flags, step by step: see _C.pyi's Program and the protocol in buffers.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from te_lite import _C
from te_lite.overlap.arena import aligned

if TYPE_CHECKING:
    from te_lite.overlap.buffers import Buffer

MAIN, COPY = 0, 1  # streams of a program: the caller's, and that of the copy engine
WORD = 4  # bytes of a flag


def following(rank: int, size: int) -> list[int]:
    """The other ranks in the order in which `rank` reads from them: rank + 1, rank + 2, ... (mod size)."""
    return [(rank + i) % size for i in range(1, size)]


def part_offsets(sizes: Sequence[int], ranks: int) -> list[int]:
    """Where in a slot each part of a gathered tensor begins; sizes: bytes of one rank's shard of each part."""
    return list(accumulate((aligned(size * ranks) for size in sizes), initial=0))[:-1]


def gathered_bytes(sizes: Sequence[int], ranks: int) -> int:
    """What a gather of shards of these parts takes of a slot."""
    return sum(aligned(size * ranks) for size in sizes)


def gather_program(
    buffer: Buffer, slot: int, sizes: tuple[int, ...], rows: int, own: bool, awaited: bool
) -> _C.Program:  # fmt: skip
    """Segments: 0 push the shard to the others, and to this rank's own slot where that is wanted; i = 1 .. R-1 wait for
    rank + i; R wait for all; R+1 free all.

    sizes: bytes of each part of a shard; argument i is part i of the own. rows: in how many rows it is put beside the
    others' parts; 1: it follows them. awaited: as of a Gather.

    The own shard goes last: it may have to wait for multiprocessors, and a kernel that occupies all of them while it
    waits for others, on any rank, must find their pushes under way.
    """
    arena, rank, size = buffer.arena, buffer.arena.rank, buffer.arena.size
    program = _C.Program(f"all-gather in {buffer.name}[{slot}]")
    # The reader that comes to this rank's data first is the one before it.
    readers = [*reversed(following(rank, size))]
    for peer in [*readers, rank]:
        program.wait(buffer.free(slot, rank, peer), -1, peer, "room at")
    program.after(COPY)
    own_by = COPY if buffer.words is None else MAIN
    for peer, stream in [*((peer, COPY) for peer in readers), *[(rank, own_by)] * own]:
        base = arena.address(buffer.name, slot, peer)
        for part, (offset, n) in enumerate(zip(part_offsets(sizes, size), sizes, strict=True)):
            width, to = n // rows, base + offset + rank * (n // rows)
            if n:
                program.copy(stream, to, part, 0, width, rows, width * size)
        program.set(stream, buffer.ready(slot, peer, rank), 0)
    if awaited:
        _expect(program, buffer, slot, 0)
    for source in following(rank, size):
        program.cut()
        program.wait(buffer.ready(slot, rank, source), 0, source, "data from")
    program.cut()
    for source in [*following(rank, size), *[rank] * own]:
        program.wait(buffer.ready(slot, rank, source), 0, source, "data from")
    program.cut()
    _free(program, [buffer.free(slot, source, rank) for source in range(size)], buffer)
    return program


def _free(program: _C.Program, flags: list[int], buffer: Buffer, pushed: bool = True) -> None:
    """Tells the writers that what they have sent has been read; and what was pushed from here has left, so that its
    memory may be used again. The copy stream sets the flags, for a write across the links takes the caller's some
    microseconds; not in a graph, which ends with the caller's stream."""
    stream = COPY if buffer.words is None else MAIN
    if pushed:
        program.after(MAIN)
    if stream == COPY:
        program.after(COPY)
    for flag in flags:
        program.set(stream, flag, 0)


def _expect(program: _C.Program, buffer: Buffer, slot: int, piece: int) -> None:
    """Has the time watched which a kernel of the caller's waits for data."""
    for source in following(buffer.arena.rank, buffer.arena.size):
        program.expect(buffer.ready(slot, buffer.arena.rank, source, piece), 0, source, "data from")


def targets(buffer: Buffer, slot: int, size_bytes: int) -> tuple[list[int], list[int]]:
    """(where this rank's partial for each rank goes, that rank's first ready flag for it): addresses, one a rank."""
    arena, ranks = buffer.arena, range(buffer.arena.size)
    to = [arena.address(buffer.name, slot, rank) + arena.rank * size_bytes for rank in ranks]
    return to, [buffer.ready(slot, rank, arena.rank) for rank in ranks]


def scatter_program(
    buffer: Buffer, slot: int, size_bytes: int, rows: int, cuts: tuple[int, ...], pieces: int
) -> _C.Program:
    """Segments: cuts[0] times: push argument 0, a piece of it, to rank + 1, and so on for rank + 2, ...; then those of
    Scatter: push argument 0, all ranks' partials; wait for all; free all; a kernel of the caller's waits, for room too.

    The first push waits for room. A piece sets all the flags of its share of the rows."""
    assert not any(rows % cut or pieces % cut for cut in cuts)
    rank, others = buffer.arena.rank, following(buffer.arena.rank, buffer.arena.size)
    to, arrived = targets(buffer, slot, size_bytes)
    program = _C.Program(f"reduce-scatter in {buffer.name}[{slot}]")

    def wait_for_room() -> None:
        for peer in others:
            program.wait(buffer.free(slot, rank, peer), -1, peer, "room at")

    def push(peer: int, offset: int, piece: int, cut: int) -> None:
        """Piece of so many of the partial for peer, from `offset` bytes behind argument 0."""
        size = size_bytes // cut
        program.copy(COPY, to[peer] + piece * size, 0, offset, size)
        for flag in range(piece * pieces // cut, (piece + 1) * pieces // cut):
            program.set(COPY, arrived[peer] + WORD * flag, 0)

    if cuts:
        wait_for_room()
    for peer, cut in zip(others, cuts, strict=bool(cuts)):
        for piece in range(cut):
            program.after(COPY)
            push(peer, 0, piece, cut)
            program.cut()
    wait_for_room()
    program.after(COPY)
    for peer in others:
        push(peer, peer * size_bytes, 0, 1)
    program.cut()
    for source in others:
        program.wait(buffer.ready(slot, rank, source, pieces - 1), 0, source, "data from")
    program.cut()
    _free(program, [buffer.free(slot, source, rank) for source in others], buffer, pushed=bool(cuts))
    program.cut()
    _expect(program, buffer, slot, pieces - 1)
    for peer in others:
        program.expect(buffer.free(slot, rank, peer), -1, peer, "room at")
    return program
