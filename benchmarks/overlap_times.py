"""How long all-gather + GEMM and GEMM + reduce-scatter take by each schedule: docs/notebook/overlap-model.md.

    collective    | NCCL | GEMM |                   or    | GEMM | NCCL |
    ring          | own | rank+1 | rank+2 | ...          | to rank+1 | to rank+2 | ... | own | sum |
    copies          | rank+1 | rank+2 | ...                         | rank+1    | rank+2 | ...
    fused         | own tiles | rank+1's | ... |          | others' tiles | others' and own, summed | own |

All ranks do the same at the same time: what the i-th push of one rank brings is what each waits for as its i-th. Copies
and GEMMs do not slow each other here. Times are microseconds, bandwidths GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapreplace

from te_lite._C import MOST_FUSED_RANKS
from te_lite.ops.gemm_fused import ROWS
from te_lite.ops.gemm_gather import tile_columns as gather_columns
from te_lite.ops.gemm_scatter import blocks, lag
from te_lite.ops.gemm_scatter import tile_columns as scatter_columns
from te_lite.overlap.ring import cuts

# cuBLAS's tiles, height and width.
TILES = tuple((h, w) for h in (64, 128) for w in (64, 96, 128, 160, 192, 224, 256))
ITEMSIZE = {"bf16": 2, "fp8": 1}
WIRE = 2  # bytes of a partial sum on its way, and of a result
NARROW = 33 / 32  # of a partial sum in fp8 (ub_cfgs' fp8_buf), with its part of a scale


@dataclass(frozen=True)
class Machine:
    """An H200. "fitted": to gemm, copies and collective of overlap_gemms_h200.json; `stores` alone to a fused row."""

    sms: int = 132
    tflops: tuple[float, float] = (830.0, 1590.0)  # fitted: bf16, fp8, of full waves of 128 x 256 tiles
    tile_end: float = 1.5  # fitted: the end of such a tile, which the next one does not hide
    launch: float = 4.0  # fitted: what a kernel costs beside its tiles
    traffic: float = 45.2  # of 1 / height + 1 / width: a tile of 128 x 128 has 0.85 of the rate, as it had in Triton
    bandwidth: float = 389.0  # copy engines, each pushing to one peer, all ranks at once: the slope of copies
    start: float = 10.0  # fitted: from the main stream to the copy stream
    transfer: float = 6.5  # a push and its flag, what cutting three of them in two costs
    stores: float = 0.82  # of bandwidth, by multiprocessors in place of copy engines: fitted to fused RS proj 70b fp8
    flag: float = 5.0  # from a tile's last byte to its block's flag: across the links (docs/notebook/schedules.md)
    wait: float = 3.0  # a kernel that waits for flags (docs/notebook/schedules.md)
    nccl_share: float = 0.81  # fitted at tp 4: of bandwidth
    nccl: float = 27.0  # fitted at tp 4, and taken the same at every tp
    memory: float = 4270.0  # a plain copy, and
    reduction: float = 3800.0  # a sum over ranks (te_lite/ops/reduce.py)


@dataclass(frozen=True)
class Problem:
    """op "AG" or "RS"; m tokens of all ranks, k and n of the local GEMM [m, k] x [n, k]^T. wire: bytes of a partial sum
    on its way."""

    op: str
    tp: int
    m: int
    k: int
    n: int
    dtype: str
    wire: float = WIRE

    @property
    def rows(self) -> int:
        return self.m // self.tp

    @property
    def shard_bytes(self) -> int:
        """What goes from each rank to each other."""
        return self.rows * (self.k * ITEMSIZE[self.dtype] if self.op == "AG" else self.n * self.wire)


def us(count: float, giga: float) -> float:
    return count / giga / 1e3


def tile(machine: Machine, p: Problem, height: int, width: int) -> float:
    """A tile of the GEMM on one multiprocessor."""
    slower = 1 + machine.traffic * (1 / height + 1 / width - 1 / 128 - 1 / 256)
    rate = machine.tflops[list(ITEMSIZE).index(p.dtype)] * 1e3 / machine.sms
    return us(2 * height * width * p.k, rate) * slower + machine.tile_end * height * width / (128 * 256)


def tiles(p: Problem, rows: int, height: int, width: int) -> int:
    return -(-rows // height) * -(-p.n // width)


def whole_waves(machine: Machine, p: Problem, rows: int) -> tuple[float, tuple[int, int]]:
    """(microseconds, tile) of the tile that takes least, of cuBLAS's."""
    return min((-(-tiles(p, rows, *t) // machine.sms) * tile(machine, p, *t), t) for t in TILES)


def gemm(machine: Machine, p: Problem, rows: int | None = None) -> float:
    """cuBLAS, of all rows or so many."""
    return machine.launch + whole_waves(machine, p, rows or p.m)[0]


def walk(clocks: list[float], ready: float, count: int, each: float) -> None:
    """So many tiles more, one after the other by the program that is done first, from when they are ready on. clocks: a
    heap."""
    for _ in range(count):
        heapreplace(clocks, max(clocks[0], ready) + each)


def pushed(machine: Machine, p: Problem) -> list[float]:
    """When each peer's shard has arrived: after the wait for room, one copy after the other."""
    first, each = machine.wait + machine.start, machine.transfer + us(p.shard_bytes, machine.bandwidth)
    return [first + (peer + 1) * each for peer in range(p.tp - 1)]


def copies(machine: Machine, p: Problem) -> float:
    return pushed(machine, p)[-1] + machine.wait


def limit(machine: Machine, p: Problem) -> float:
    """The longer of the GEMM and the bytes at full bandwidth: no schedule takes less."""
    return max(gemm(machine, p), us((p.tp - 1) * p.shard_bytes, machine.bandwidth))


def collective(machine: Machine, p: Problem) -> float:
    return gemm(machine, p) + machine.nccl + us((p.tp - 1) * p.shard_bytes, machine.bandwidth * machine.nccl_share)


def push_others(machine: Machine, p: Problem) -> tuple[float, list[list[float]]]:
    """The clocks of the main stream and of the copy stream until the others' rows are done: (when the own rows' GEMM
    begins, when each flag of each peer is set)."""
    pieces = cuts(p.tp, p.rows, p.n, p.k * ITEMSIZE[p.dtype])
    clock, link, flags = machine.wait, 0.0, []
    for cut in pieces:
        arrivals = []
        for _ in range(cut):
            clock += gemm(machine, p, p.rows // cut)
            link = max(link, clock + machine.start) + machine.transfer + us(p.shard_bytes / cut, machine.bandwidth)
            arrivals.append(link)
        flags.append([arrivals[flag * cut // max(pieces)] for flag in range(max(pieces))])
    return clock, flags


def ring(machine: Machine, p: Problem) -> float:
    """te_lite/overlap/ring.py. A gather's GEMMs take turns on two streams: each begins on the multiprocessors that the
    one before is done with, its wait and its launch on the first of them (not on one that was idle before)."""
    if p.op == "AG":
        _, shape = whole_waves(machine, p, p.rows)
        clocks, free = [0.0] * machine.sms, 0.0
        for arrived in (0.0, *pushed(machine, p)):  # the first wait is for room
            ready = max(free, arrived) + machine.wait + machine.launch
            walk(clocks, ready, tiles(p, p.rows, *shape), tile(machine, p, *shape))
            free = min(clock for clock in clocks if clock > ready)
        return max(clocks)
    clock, flags = push_others(machine, p)
    clock = max(clock + gemm(machine, p, p.rows), flags[-1][-1]) + machine.wait
    moved = p.rows * p.n * ((p.tp - 1) * WIRE + 4 + WIRE)  # the others' partials, the own in fp32, the sum
    return clock + machine.launch + us(moved, machine.reduction)


def fused(machine: Machine, p: Problem) -> float:
    """te_lite/overlap/fused.py, pair of tiles by pair; a ring where there is no kernel."""
    if p.tp > MOST_FUSED_RANKS:
        return ring(machine, p)
    return fused_gather(machine, p) if p.op == "AG" else fused_scatter(machine, p)


def fused_narrow(machine: Machine, p: Problem) -> float:
    """A fused scatter whose partial sums travel in fp8. What rounding them takes is not in it."""
    return fused(machine, replace(p, wire=NARROW))


def fused_gather(machine: Machine, p: Problem) -> float:
    """The clock of each cluster of te_lite/csrc/gemm_fused.cu: pairs of tiles, shard by shard. A tile is stored while
    the next one is multiplied, but rounded before: it has an end as cuBLAS's has."""
    clusters = machine.sms // 2
    wide = gather_columns(p.rows, p.n, p.tp, False, clusters)
    clocks = [machine.wait + machine.launch] * clusters
    for arrived in (0.0, *pushed(machine, p)):
        walk(clocks, arrived, tiles(p, p.rows, ROWS, wide), tile(machine, p, ROWS // 2, wide))
    return max(clocks)


def fused_scatter(machine: Machine, p: Problem) -> float:
    """The clock of each cluster of te_lite/csrc/gemm_fused.cu. A pair for another rank goes out while the next one is
    multiplied: three quarters into that its last box leaves, or as soon as the link has room."""
    clusters = machine.sms // 2
    wide, count = scatter_columns(p.rows, p.n, p.tp, clusters), blocks(p.rows)
    pairs = -(-p.rows // ROWS) // count * -(-p.n // wide)  # of one rank's rows in a block
    others = (p.tp - 1) * pairs
    behind = lag(others, count, clusters)
    each = tile(machine, p, ROWS // 2, wide)
    sent = us(p.shard_bytes / count / pairs, machine.bandwidth * machine.stores)
    summed = us(clusters * ROWS * wide * p.wire * (p.tp - 1), machine.memory)  # by all at once: the slots
    clocks, link, flags = [machine.wait + machine.launch] * clusters, 0.0, []
    for block in range(count + behind):
        arrived = 0.0
        for _ in range(others if block < count else 0):
            done = clocks[0] + each
            heapreplace(clocks, done)
            link = max(link, done) + sent
            arrived = max(link, done + 0.75 * each)
        flags.append(arrived + machine.flag)
        if block >= behind:
            walk(clocks, flags[block - behind] - each, pairs, each + summed)  # waits after the product
    return max(clocks)
