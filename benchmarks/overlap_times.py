"""How long all-gather + GEMM and GEMM + reduce-scatter take by each schedule, as a model (docs/overlap.md).

    collective    | NCCL | GEMM |                            or    | GEMM | NCCL |
    ring          | own | rank+1 | rank+2 | ... | cat |             | to rank+1 | to rank+2 | ... | own | sum |
    copies          | rank+1 | rank+2 | ...                                    | rank+1    | rank+2 | ...
    fused         | own tiles | rank+1's, by piece | ... |          | rank+1's tiles, stored there | ... | own, sum |

All ranks do the same at the same time: what the i-th push of one rank brings is what each waits for as its i-th. Copies
and GEMMs do not slow each other here. Times are microseconds, bandwidths GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

from te_lite.ops.gemm_tiles import choose
from te_lite.overlap.group import PIECES

# cuBLAS's tiles, height and width. With 128 x 256 alone the ring at qkv 70b would take 753 us; measured are 494.
TILES = tuple((h, w) for h in (64, 128) for w in (64, 96, 128, 160, 192, 224, 256))
ITEMSIZE = {"bf16": 2, "fp8": 1}
WIRE = 2  # bytes of a partial sum on its way, and of a result

PIECE_BYTES = 4 << 20  # of the fused all-gather and, as the ring's concatenation, of the tree that the rows measured


@dataclass(frozen=True)
class Machine:
    """An H200. "fitted": to the rows gemm, copies, collective of overlap_gemms.json, never to a ring or fused one."""

    sms: int = 132
    tflops: tuple[float, float] = (830.0, 1590.0)  # fitted: bf16, fp8, of full waves of 128 x 256 tiles
    tile_end: float = 1.5  # fitted: the end of such a tile, which the next one does not hide
    launch: float = 4.0  # fitted: what a kernel costs beside its tiles
    traffic: float = 45.2  # of 1 / height + 1 / width: a tile of 128 x 128 has 0.85 of the rate (ops/gemm_tiles.py)
    fused: float = 0.97  # of cuBLAS's rate, alone and with all data there (docs/performance.md)
    bandwidth: float = 389.0  # copy engines, each pushing to one peer, all ranks at once: the slope of copies
    transfer: float = 11.0  # fitted: a push and its flag
    wait: float = 3.0  # a kernel that waits for a flag (docs/performance.md)
    nccl_share: float = 0.81  # fitted: of bandwidth
    nccl: float = 27.0  # fitted at tp 4, and taken the same at every tp
    memory: float = 4270.0  # a plain copy, and
    reduction: float = 3800.0  # a sum over ranks (te_lite/ops/reduce.py)


@dataclass(frozen=True)
class Problem:
    """op "AG" or "RS"; m tokens of all ranks, k and n of the local GEMM [m, k] x [n, k]^T."""

    op: str
    tp: int
    m: int
    k: int
    n: int
    dtype: str

    @property
    def rows(self) -> int:
        return self.m // self.tp

    @property
    def shard_bytes(self) -> int:
        """What goes from each rank to each other."""
        return self.rows * (self.k * ITEMSIZE[self.dtype] if self.op == "AG" else self.n * WIRE)


def us(count: float, giga: float) -> float:
    return count / giga / 1e3


def tile(machine: Machine, p: Problem, height: int, width: int) -> float:
    """A tile of the GEMM on one multiprocessor."""
    slower = 1 + machine.traffic * (1 / height + 1 / width - 1 / 128 - 1 / 256)
    rate = machine.tflops[list(ITEMSIZE).index(p.dtype)] * 1e3 / machine.sms
    return us(2 * height * width * p.k, rate) * slower + machine.tile_end * height * width / (128 * 256)


def gemm(machine: Machine, p: Problem, rows: int | None = None) -> float:
    """cuBLAS, of all rows or so many: whole waves of the tile that takes least."""
    counts = {(h, w): -(-(rows or p.m) // h) * -(-p.n // w) for h, w in TILES}
    return machine.launch + min(-(-count // machine.sms) * tile(machine, p, *size) for size, count in counts.items())


def pushed(machine: Machine, p: Problem, pieces: int = 1) -> list[list[float]]:
    """When each piece of each peer's shard has arrived: after the waits for room, one copy after the other."""
    first, each = (p.tp - 1) * machine.wait, machine.transfer + us(p.shard_bytes / pieces, machine.bandwidth)
    return [[first + (peer * pieces + piece + 1) * each for piece in range(pieces)] for peer in range(p.tp - 1)]


def copies(machine: Machine, p: Problem) -> float:
    return pushed(machine, p)[-1][-1] + machine.wait


def limit(machine: Machine, p: Problem) -> float:
    """The longer of the GEMM and the bytes at full bandwidth: no schedule takes less."""
    return max(gemm(machine, p), us((p.tp - 1) * p.shard_bytes, machine.bandwidth))


def collective(machine: Machine, p: Problem) -> float:
    return gemm(machine, p) + machine.nccl + us((p.tp - 1) * p.shard_bytes, machine.bandwidth * machine.nccl_share)


def ring(machine: Machine, p: Problem) -> float:
    """te_lite/overlap/ring.py, step by step: the clocks of the main stream and of the copy stream."""
    clock = link = (p.tp - 1) * machine.wait
    cut = gemm(machine, p, p.rows)
    if p.op == "AG":
        clock += cut
        for [arrived] in pushed(machine, p):
            clock = max(clock, arrived) + machine.wait + cut
        return clock + machine.launch + us(2 * p.m * p.n * WIRE, machine.memory)  # torch.cat reads and writes all
    arrivals = []
    for _ in range(p.tp - 1):
        clock += cut
        link = max(link, clock) + machine.transfer + us(p.shard_bytes, machine.bandwidth)
        arrivals.append(link)
    clock += cut
    for arrived in arrivals:
        clock = max(clock, arrived) + machine.wait
    moved = p.rows * p.n * ((p.tp - 1) * WIRE + 4 + WIRE)  # the others' partials, the own in fp32, the sum
    return clock + machine.launch + us(moved, machine.reduction)


def fused(machine: Machine, p: Problem, pieces: int | None = None) -> float:
    """The clock of each program, tile by tile, and that of the link, as of the tree that the rows measured.

    Its fused reduce-scatter stored tiles at their owners; since then they are pushed as in a ring.
    """
    config = choose(p.rows, p.tp, p.n, ITEMSIZE[p.dtype], machine.sms)
    high, wide = -(-p.rows // config.block_m), -(-p.n // config.block_n)
    pieces = pieces or (max(1, min(PIECES, p.shard_bytes // PIECE_BYTES)) if p.op == "AG" else PIECES)
    ready = [[0.0] * pieces, *pushed(machine, p, pieces)]  # AG: by step and piece
    arrived = [0.0] * pieces  # RS: this rank's rows, from the rank that comes to them last
    link = (p.tp - 1) * machine.wait
    clocks = [link + machine.launch] * (machine.sms * config.per_sm)
    each = tile(machine, p, config.block_m, config.block_n) * config.per_sm / machine.fused
    stored = config.block_m * config.block_n * WIRE
    summed = us(len(clocks) * stored * (p.tp - 1), machine.reduction)
    for number in range(p.tp * high * wide):
        step, at = divmod(number, high * wide)
        group = at // (config.group * wide) * config.group
        row = group + at % (config.group * wide) % min(high - group, config.group)
        piece = (min((row + 1) * config.block_m, p.rows) - 1) // -(-p.rows // pieces)
        program = number % len(clocks)
        if p.op == "AG":
            clocks[program] = max(clocks[program], ready[step][piece]) + each
        elif step < p.tp - 1:
            clocks[program] += each
            link = arrived[piece] = max(link, clocks[program]) + us(stored, machine.bandwidth)
        else:
            clocks[program] = max(clocks[program] + each, arrived[piece]) + summed
    return max(clocks)
