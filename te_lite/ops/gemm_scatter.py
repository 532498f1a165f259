"""GEMM + reduce-scatter in one kernel: it hands over what the others need first and adds what it gets to its own.

    y = a[R * m, K] @ b[N, K]^T * a_scale * b_scale            # this rank's part of a sum over ranks
    out[m, N] = reduce_scatter(y) + bias

    kernel    | rank+1's rows | rank+2's rows | ... | own rows: wait for a piece's flags, add the others' slots, round |
    copies            | piece 0 | piece 1 | ...                  (or no copies: tiles stored into the peers' memory)

While it waits it occupies every multiprocessor, as in ops/gemm_gather.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_lite.ops import gemm_tiles as tiles
from te_lite.ops.flags import arrive, signed, wait_flags
from te_lite.ops.launch import sm_count
from te_lite.ops.reduce import reduce_slots_ref
from te_lite.ops.registry import register

PIECE_ROWS = 128  # a piece is a multiple of these, so that every tile lies in one piece
_DELAY = tl.constexpr(4)  # steps of K


def destination_order(rank: int, ranks: int) -> list[int]:
    """The ranks whose rows are computed, in that order: rank+1, rank+2, ..., rank, cyclically."""
    return [(rank + 1 + step) % ranks for step in range(ranks)]


@triton.jit
def _within(part, row, col, m, n):
    """(offsets of part's elements in a matrix with n columns from its first on, whether they are in [m, n])."""
    r, c = tl.arange(0, part.shape[0]), tl.arange(0, part.shape[1])
    return r[:, None] * n + c[None, :], (r < m - row)[:, None] & (c < n - col)[None, :]


@triton.jit
def _push(part, slot, a_scale, b_scale, row, col, m, n, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr):
    """slot[row:, col:] = part, scaled, rounded to the wire's type."""
    part = tiles.scaled(part, a_scale, b_scale, row, col, m, n, A_SCALE, B_SCALE).to(slot.dtype.element_ty)
    at, mask = _within(part, row, col, m, n)
    tl.store(slot + (row.to(tl.int64) * n + col) + at, part, mask=mask)


@triton.jit
def _sum(
    part, staging, out, a_scale, b_scale, bias, rank, row, col, m, n, RANKS: tl.constexpr, A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
):  # fmt: skip
    """out[row:, col:] = staging[rank+1] + staging[rank+2] + ... + part, scaled, + bias; rounded once."""
    at, mask = _within(part, row, col, m, n)
    first = row.to(tl.int64) * n + col
    total = tl.zeros(part.shape, tl.float32)
    for i in tl.static_range(RANKS - 1):
        slot = staging + (((rank + 1 + i) % RANKS).to(tl.int64) * m * n + first)
        total += tl.load(slot + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    total += tiles.scaled(part, a_scale, b_scale, row, col, m, n, A_SCALE, B_SCALE)
    tl.store(out + first + at, tiles.plus_bias(total, bias, col, n).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _count(step, steps, args, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Counts the stores of `tile`, if there was one, some steps after they were issued: by then they have landed.

    At once, the release would hold up the tensor cores for its whole latency, 5% of the time at K = 2048.
    """
    tile, signals, counters, epoch, m, n, rank, rows_per_piece, pieces, ranks, group = args
    DIRECT: tl.constexpr = signals.dtype.element_ty == tl.int64
    if (step == min(_DELAY, steps - 1)) & (tile >= 0):
        shard, row, _ = tiles.tile_at(tile, m, n, BLOCK_M, BLOCK_N, group)
        to = (rank + 1 + shard) % ranks
        piece = row // rows_per_piece
        if DIRECT:
            flag = tl.load(signals + to).to(tl.pointer_type(tl.int32)) + piece
        else:
            flag = signals + to * pieces + piece
        total = tl.cdiv(min(m - piece * rows_per_piece, rows_per_piece), BLOCK_M) * tl.cdiv(n, BLOCK_N)
        arrive(counters + to * pieces + piece, total, flag, epoch, DIRECT)


_WORDS = ["signals", "counters", "ready", "epoch", "abort", "a_scale", "b_scale", "bias"]


@triton.jit(do_not_specialize=["delta", "m", "rank", "rows_per_piece", "pieces"], do_not_specialize_on_alignment=_WORDS)
def scatter_kernel(
    a_desc, b_desc, slots, signals, counters, staging, ready, out, epoch, abort, a_scale, b_scale, bias, delta, m, n, k,
    rank, rows_per_piece, pieces, RANKS: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    SPLIT: tl.constexpr, FINE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Program p of P takes tiles p, p + P, ... of the walk in `destination_order`.

    Two loops: rows of the others, stored for them and counted by piece; then own rows, added to what the others sent.
    FINE: own tiles in eighths instead of quarters, where registers are short.
    """
    tl.assume(k > 0)
    programs = tl.num_programs(0)
    per_shard = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    reached = tl.load(epoch) + delta
    first = tl.program_id(0)
    for mine in tl.static_range(2):
        end = per_shard * RANKS if mine else per_shard * (RANKS - 1)
        finished = first - programs  # counted a second time: what a tile's end needs must not come from its beginning
        for tile in tl.range(first, end, programs, flatten=True):
            step, row, col = tiles.tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
            row += (rank + 1 + step) % RANKS * m
            left, right = tiles.multiply(
                a_desc, b_desc, row, col, k,
                (finished, signals, counters, reached, m, n, rank, rows_per_piece, pieces, RANKS, GROUP),
                SPLIT, None if mine else _count, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            finished += programs
            step, row, col = tiles.tile_at(finished, m, n, BLOCK_M, BLOCK_N, GROUP)
            to = (rank + 1 + step) % RANKS
            scale = a_scale
            if A_SCALE == "row":
                scale += to * m
            if mine:
                piece, new = tiles.next_piece(finished, first, m, n, rows_per_piece, BLOCK_M, BLOCK_N, GROUP)
                wait_flags(ready + piece, pieces, RANKS * new, rank, reached, abort)
            elif slots.dtype.element_ty == tl.int64:
                slot = tl.multiple_of(tl.load(slots + to).to(staging.dtype), 16)
            else:
                slot = slots + to.to(tl.int64) * m * n
            for quarter in tl.static_range(4):
                part = tiles.halves(left if quarter < 2 else right)[quarter % 2]
                c = col + quarter * (BLOCK_N // 4)
                if not mine:
                    _push(part, slot, scale, b_scale, row, c, m, n, A_SCALE, B_SCALE)
                else:
                    if FINE:
                        part, other = tiles.halves(part)
                        _sum(part, staging, out, scale, b_scale, bias, rank, row, c, m, n, RANKS, A_SCALE, B_SCALE)
                        part, c = other, c + BLOCK_N // 8
                    _sum(part, staging, out, scale, b_scale, bias, rank, row, c, m, n, RANKS, A_SCALE, B_SCALE)
        if not mine:
            last = (finished, signals, counters, reached, m, n, rank, rows_per_piece, pieces, RANKS, GROUP)
            _count(0, 1, last, BLOCK_M, BLOCK_N)
        first += tl.cdiv(max(end - first, 0), programs) * programs


def scatter_config(a: Tensor, b: Tensor, ranks: int) -> tiles.Config:
    """The tile that `gemm_scatter` takes for these operands."""
    return tiles.choose(a.shape[0] // ranks, ranks, b.shape[0], a.element_size(), sm_count(a.device))


def run_scatter(config: tiles.Config, a, b, slots, signals, counters, staging, ready, epoch, delta, abort, rank,
                rows_per_piece, a_scale, b_scale, bias, out_dtype, fast_accum) -> Tensor:  # fmt: skip
    """`gemm_scatter` on a CUDA device with a tile of one's own choice."""
    ranks, m, n = staging.shape
    k, pieces = a.shape[1], ready.shape[1]
    out = a.new_empty((m, n), dtype=out_dtype)
    if not out.numel():
        return out
    split = a.dtype in tiles.FP8 and not fast_accum
    a_kind, b_kind = tiles.scale_kinds(a_scale, b_scale, ranks * m, n)
    block_m, block_n, block_k, warps, stages, group, per_sm = config
    # In smaller parts where registers are short, or those of the main loop would spill.
    fine = block_n == 256 and (split or staging.dtype == torch.float32 or a_kind == "row" or ranks > 4)
    scatter_kernel[(min(per_sm * sm_count(a.device), ranks * -(-m // block_m) * -(-n // block_n)),)](
        TensorDescriptor(a, (ranks * m, k), (k, 1), [block_m, block_k]),
        TensorDescriptor(b, (n, k), (k, 1), [block_n // 2 if split else block_n, block_k]),
        slots, signals, counters, staging, ready, out, epoch, abort, a_scale, b_scale, bias, signed(delta), m, n, k,
        rank, rows_per_piece, pieces, ranks, a_kind, b_kind, split, fine, block_m, block_n, block_k, group,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _scatter_cuda(a, b, slots, signals, counters, staging, *rest) -> Tensor:
    return run_scatter(scatter_config(a, b, staging.shape[0]), a, b, slots, signals, counters, staging, *rest)


def gemm_scatter_ref(a, b, slots, signals, counters, staging, ready, epoch, delta, abort, rank, rows_per_piece, a_scale,
                     b_scale, bias, out_dtype, fast_accum) -> Tensor:  # fmt: skip
    """Oracle of `gemm_scatter`, of slots that have been filled: fp32 throughout, one rounding each way."""
    if slots.dtype == torch.int64:
        raise ValueError("gemm_scatter with a table of addresses: works on CUDA devices; pass a local tensor of slots")
    ranks, m, _ = staging.shape
    partial = tiles.scaled_product_ref(a, b, a_scale, b_scale)
    for to in destination_order(rank, ranks)[:-1]:
        slots[to] = partial[to * m : (to + 1) * m]
        signals[to] = epoch + signed(delta)
    return reduce_slots_ref(staging, partial[rank * m : (rank + 1) * m], bias, rank, out_dtype)


_scatter_op = register(
    "gemm_scatter(Tensor a, Tensor b, Tensor(a!) slots, Tensor(b!) signals, Tensor(c!) counters, Tensor(d!) staging,"
    " Tensor(e!) ready, Tensor epoch, int delta, Tensor abort, int rank, int rows_per_piece, Tensor? a_scale,"
    " Tensor? b_scale, Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    cpu=gemm_scatter_ref,
    cuda=_scatter_cuda,
    fake=lambda a, b, slots, signals, counters, staging, *rest: a.new_empty(staging.shape[1:], dtype=rest[-2]),
)


def gemm_scatter(
    a: Tensor, b: Tensor, slots: Tensor, signals: Tensor, counters: Tensor, staging: Tensor, ready: Tensor,
    epoch: Tensor, delta: int, abort: Tensor, rank: int, rows_per_piece: int, a_scale: Tensor | None = None,
    b_scale: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """out[m, N] = this rank's rows of (a[R * m, K] @ b[N, K]^T * scales) summed over ranks, + bias[N]; rounded once.

    The rows of the others are rounded to the wire's type, staging's, and stored
      by copy engines: slots[R, m, N] and signals int32 [R, P] are local; signals[d, p] reaches the epoch once piece p
        (rows p * rows_per_piece ...) of slots[d] is complete, for a copy that waits for it;
      directly: slots and signals are int64 [R], the addresses at rank d of this rank's slot [m, N], multiples of 16,
        and of its P flags.
    counters: int32 [R, P], zero between calls. rows_per_piece: a multiple of PIECE_ROWS, or P = 1.
    staging[R, m, N], ready int32 [R, P]: what the others sent, by rank; used once the flags have reached
    epoch[0] + delta (ops/flags.py), in the order of ops/reduce.py: the same bits on every run. Garbage after an abort.
    Scales: fp32 inverses, both or none; a_scale [1] or [R * m], b_scale [1] or [N]. a, b and fast_accum: as in
    ops/gemm_gather.py. out: bf16, fp16 or fp32. On the CPU slots are taken as they are. Errors: ValueError, TypeError.
    """
    ranks, m, n = staging.shape
    tiles.check("GEMM and scatter", a, b, m, ranks)
    pieces = ready.shape[1]
    if rows_per_piece * pieces < m or (pieces > 1 and rows_per_piece % PIECE_ROWS):
        raise ValueError(
            f"{pieces} pieces of {rows_per_piece} rows: must cover the {m} rows of a shard and be a multiple of "
            f"{PIECE_ROWS} rows, or one piece; lay the flags out so"
        )
    if n != b.shape[0] or not staging.is_contiguous() or counters.numel() < ranks * pieces:
        raise ValueError(
            f"staging {tuple(staging.shape)} and {counters.numel()} counters for b {tuple(b.shape)}: must be "
            f"contiguous [R, m, N], and R * P = {ranks * pieces} counters; reserve them for this layer's N"
        )
    return _scatter_op(
        a, b, slots, signals, counters, staging, ready, epoch, delta, abort, rank, rows_per_piece, a_scale, b_scale,
        bias, out_dtype, fast_accum,
    )  # fmt: skip
