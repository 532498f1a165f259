"""The end of GEMM + reduce-scatter in one kernel: this rank's rows of the product, added to what the others have sent.

    out[m, N] = staging[rank+1] + staging[rank+2] + ... + a[m, K] @ b[N, K]^T * a_scale * b_scale + bias

    copies    | from rank-1 | from rank-2 | ...
    kernel    | own tiles: multiply, wait for the flags of a piece, add the slots in registers, round |

While it waits it occupies every multiprocessor, as in ops/gemm_gather.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_lite.ops import gemm_tiles as tiles
from te_lite.ops.flags import signed, wait_flags
from te_lite.ops.launch import sm_count
from te_lite.ops.reduce import reduce_slots_ref
from te_lite.ops.registry import register


@triton.jit
def _sum(
    part, staging, out, a_scale, b_scale, bias, rank, row, col, m, n, RANKS: tl.constexpr, A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
):  # fmt: skip
    """out[row:, col:] = staging[rank+1] + staging[rank+2] + ... + part, scaled, + bias; rounded once."""
    r, c = tl.arange(0, part.shape[0]), tl.arange(0, part.shape[1])
    at, mask = r[:, None] * n + c[None, :], (r < m - row)[:, None] & (c < n - col)[None, :]
    first = row.to(tl.int64) * n + col
    total = tl.zeros(part.shape, tl.float32)
    for i in tl.static_range(RANKS - 1):
        slot = staging + (((rank + 1 + i) % RANKS).to(tl.int64) * m * n + first)
        total += tl.load(slot + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    total += tiles.scaled(part, a_scale, b_scale, row, col, m, n, A_SCALE, B_SCALE)
    tl.store(out + first + at, tiles.plus_bias(total, bias, col, n).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _next_piece(tile, first, m, n, rows_per_piece, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(last piece that the tile's rows lie in, 1 if this program's tile before it lay in another)."""
    _, row, _ = tiles.tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
    piece = (min(row + BLOCK_M, m) - 1) // rows_per_piece
    _, row, _ = tiles.tile_at(max(tile - tl.num_programs(0), 0), m, n, BLOCK_M, BLOCK_N, GROUP)
    same = ((min(row + BLOCK_M, m) - 1) // rows_per_piece == piece) & (tile > first)
    return piece, 1 - same.to(tl.int32)


MOST_RANKS = 31  # a bit each, in an int32
_WORDS = ["ready", "epoch", "abort", "a_scale", "b_scale", "bias"]


@triton.jit(do_not_specialize=["delta", "m", "rank", "rows_per_piece", "pieces"], do_not_specialize_on_alignment=_WORDS)
def gemm_reduce_kernel(
    a_desc, b_desc, staging, ready, out, epoch, abort, a_scale, b_scale, bias, delta, m, n, k, rank, rows_per_piece,
    pieces, RANKS: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, FINE: tl.constexpr,
    B_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program p of P takes tiles p, p + P, ... FINE: sums in eighths instead of quarters, where registers are short."""
    tl.assume(k > 0)
    programs = tl.num_programs(0)
    reached = tl.load(epoch) + delta
    first = tl.program_id(0)
    finished = first - programs  # counted a second time: what a tile's end needs must not come from its beginning
    for tile in tl.range(first, tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N), programs, flatten=True):
        _, row, col = tiles.tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        left, right = tiles.halves(tiles.multiply(a_desc, b_desc, row, col, k, B_T, BLOCK_M, BLOCK_N, BLOCK_K))
        finished += programs
        _, row, col = tiles.tile_at(finished, m, n, BLOCK_M, BLOCK_N, GROUP)
        piece, new = _next_piece(finished, first, m, n, rows_per_piece, BLOCK_M, BLOCK_N, GROUP)
        wait_flags(ready + piece, pieces, (((1 << RANKS) - 1) ^ (1 << rank)) * new, reached, abort)
        for quarter in tl.static_range(4):
            part = tiles.halves(left if quarter < 2 else right)[quarter % 2]
            c = col + quarter * (BLOCK_N // 4)
            if FINE:
                part, other = tiles.halves(part)
                _sum(part, staging, out, a_scale, b_scale, bias, rank, row, c, m, n, RANKS, A_SCALE, B_SCALE)
                part, c = other, c + BLOCK_N // 8
            _sum(part, staging, out, a_scale, b_scale, bias, rank, row, c, m, n, RANKS, A_SCALE, B_SCALE)


def run_reduce(config: tiles.Config, a, b, staging, ready, epoch, delta, abort, rank, rows_per_piece, a_scale, b_scale,
               bias, out_dtype) -> Tensor:  # fmt: skip
    """`gemm_reduce` on a CUDA device with a tile of one's own choice."""
    (ranks, m, n), k = staging.shape, a.shape[1]
    out = a.new_empty((m, n), dtype=out_dtype)
    if not out.numel():
        return out
    a_kind, b_kind = tiles.scale_kinds(a_scale, b_scale, m, n)
    block_m, block_n, block_k, warps, stages, group, per_sm = config
    # In smaller parts where registers are short, or those of the main loop would spill.
    fine = block_n == 256 and (staging.dtype == torch.float32 or a_kind == "row" or ranks > 4)
    gemm_reduce_kernel[(min(per_sm * sm_count(a.device), -(-m // block_m) * -(-n // block_n)),)](
        TensorDescriptor(a, (m, k), (k, 1), [block_m, block_k]),
        tiles.described(b, block_n, block_k),
        staging, ready, out, epoch, abort, a_scale, b_scale, bias, signed(delta), m, n, k, rank, rows_per_piece,
        ready.shape[1], ranks, a_kind, b_kind, fine, tiles.transposed(b), block_m, block_n, block_k, group,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _reduce_cuda(a, b, *rest) -> Tensor:
    return run_reduce(tiles.choose(a.shape[0], 1, b.shape[0], a.element_size(), sm_count(a.device)), a, b, *rest)


def gemm_reduce_ref(a, b, staging, ready, epoch, delta, abort, rank, rows_per_piece, a_scale, b_scale, bias,
                    out_dtype) -> Tensor:  # fmt: skip
    """Oracle of `gemm_reduce`, of slots that have been filled: fp32 throughout, one rounding."""
    return reduce_slots_ref(staging, tiles.scaled_product_ref(a, b, a_scale, b_scale), bias, rank, out_dtype)


_reduce_op = register(
    "gemm_reduce(Tensor a, Tensor b, Tensor(a!) staging, Tensor(b!) ready, Tensor epoch, int delta, Tensor abort,"
    " int rank, int rows_per_piece, Tensor? a_scale, Tensor? b_scale, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    cpu=gemm_reduce_ref,
    cuda=_reduce_cuda,
    fake=lambda a, b, staging, *rest: a.new_empty(staging.shape[1:], dtype=rest[-1]),
)


def gemm_reduce(
    a: Tensor, b: Tensor, staging: Tensor, ready: Tensor, epoch: Tensor, delta: int, abort: Tensor, rank: int,
    rows_per_piece: int, a_scale: Tensor | None = None, b_scale: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """out[m, N] = the others' slots + a[m, K] @ b[N, K]^T * scales + bias[N], in fp32, rounded once.

    a: this rank's rows. staging[R, m, N]: what each rank has sent for them; its own entry is not read. ready int32
    [R, P]: rows p * rows_per_piece ... of slot s, and all before them, are there once ready[s, p] has reached
    epoch[0] + delta (ops/flags.py). Added in the order of ops/reduce.py: the same bits on every run. Garbage after an
    abort. Scales: fp32 inverses, both or none; a_scale [1] or [m], b_scale [1] or [N]. a, b: as in
    ops/gemm_gather.py. out: bf16, fp16 or fp32. On the CPU slots are taken as they are. Errors: ValueError, TypeError.
    """
    ranks, m, n = staging.shape
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks} ranks: at most {MOST_RANKS} flags are waited for at once; take a ring")
    tiles.check("GEMM and reduction", a, b, m, 1)
    if rows_per_piece * ready.shape[1] < m:
        raise ValueError(
            f"{ready.shape[1]} pieces of {rows_per_piece} rows: must cover the {m} rows of a slot; pass the "
            "rows_per_piece that the flags were laid out with"
        )
    if n != b.shape[0] or not staging.is_contiguous() or ready.shape[0] != ranks:
        raise ValueError(
            f"staging {tuple(staging.shape)} and flags {tuple(ready.shape)} for b {tuple(b.shape)}: must be contiguous "
            "[R, m, N] and [R, P]; reserve them for this layer's N"
        )
    return _reduce_op(
        a, b, staging, ready, epoch, delta, abort, rank, rows_per_piece, a_scale, b_scale, bias, out_dtype,
    )  # fmt: skip
