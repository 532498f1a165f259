"""All-gather + GEMM in one kernel: it multiplies the shards of the other ranks as they arrive.

    a[R * m, K] = all_gather(own[m, K])                  # here: copies into `gathered`, with flags
    out[R * m, N] = a @ b[N, K]^T * a_scale * b_scale + bias

    copies    | rank+1, piece 0 | rank+1, piece 1 | rank+2, piece 0 | ...
    kernel    | own shard             | rank+1 | rank+2 | ...             (polls ready[source, piece] where it changes)

The kernel occupies every multiprocessor while it waits: what sets the flags must not need one (copy engines do not).
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
from te_lite.ops.registry import register


def source_order(rank: int, ranks: int) -> list[int]:
    """The ranks whose shards are multiplied, in that order: rank, rank+1, rank+2, ... cyclically."""
    return [(rank + step) % ranks for step in range(ranks)]


@triton.jit
def _finish(
    part, out_desc, a_scale, b_scale, bias, source, row, col, m, n, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr
):
    part = tiles.scaled(part, a_scale, b_scale, row, col, m, n, A_SCALE, B_SCALE)
    part = tiles.plus_bias(part, bias, col, n).to(out_desc.dtype)
    out_desc.store([source, row, col], part.reshape(1, part.shape[0], part.shape[1]))


@triton.jit(
    do_not_specialize=["delta", "m", "rank", "rows_per_piece", "pieces"],
    do_not_specialize_on_alignment=["ready", "epoch", "abort", "own_scale", "gathered_scale", "b_scale", "bias"],
)
def gather_kernel(
    own, gathered, b_desc, out_desc, ready, epoch, abort, own_scale, gathered_scale, b_scale, bias, delta, m, n, k,
    rank, rows_per_piece, pieces, RANKS: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Program p of P takes tiles p, p + P, ... of the walk in `source_order`. PARTS: how many stores finish a tile.

    Two loops, one over the own shard and one over the others', since a loop reads through one descriptor.
    out_desc: [R, m, N], so that no store reaches the next shard.
    """
    tl.assume(k > 0)
    programs = tl.num_programs(0)
    per_shard = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    reached = tl.load(epoch) + delta
    first = tl.program_id(0)
    for others in tl.static_range(2):
        end = per_shard * RANKS if others else per_shard
        finished = first - programs  # counted a second time: what a tile's end needs must not come from its beginning
        for tile in tl.range(first, end, programs, flatten=True):
            step, row, col = tiles.tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
            if others:
                source = (rank + step) % RANKS
                piece, new = tiles.next_piece(tile, first, m, n, rows_per_piece, BLOCK_M, BLOCK_N, GROUP)
                wait_flags(ready + source * pieces + piece, 0, new, -1, reached, abort)
                row += source * m
            a_desc = gathered if others else own
            left, right = tiles.multiply(a_desc, b_desc, row, col, k, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K)
            finished += programs
            step, row, col = tiles.tile_at(finished, m, n, BLOCK_M, BLOCK_N, GROUP)
            source = (rank + step) % RANKS
            scale = own_scale
            if others:
                if A_SCALE == "row":
                    scale = gathered_scale + source * m
                elif A_SCALE == "shard":
                    scale = gathered_scale + source
            for half in tl.static_range(2):
                part, c = left if half == 0 else right, col + half * (BLOCK_N // 2)
                if PARTS == 4:
                    part, other = tiles.halves(part)
                    _finish(part, out_desc, scale, b_scale, bias, source, row, c, m, n, A_SCALE, B_SCALE)
                    part, c = other, c + BLOCK_N // 4
                _finish(part, out_desc, scale, b_scale, bias, source, row, c, m, n, A_SCALE, B_SCALE)
        first += tl.cdiv(max(end - first, 0), programs) * programs


def gather_config(own: Tensor, b: Tensor, ranks: int) -> tiles.Config:
    """The tile that `gemm_gather` takes for these operands."""
    return tiles.choose(own.shape[0], ranks, b.shape[0], own.element_size(), sm_count(own.device))


def run_gather(config: tiles.Config, own, gathered, b, ready, epoch, delta, abort, rank, rows_per_piece,
               own_scale, gathered_scale, b_scale, bias, out_dtype, fast_accum) -> Tensor:  # fmt: skip
    """`gemm_gather` on a CUDA device with a tile of one's own choice."""
    (m, k), (n, _), (ranks, pieces) = own.shape, b.shape, ready.shape
    out = own.new_empty((ranks * m, n), dtype=out_dtype)
    if not out.numel():
        return out
    split = own.dtype in tiles.FP8 and not fast_accum
    a_kind, b_kind = tiles.scale_kinds(gathered_scale, b_scale, ranks * m, n, ranks)
    # Four stores a tile where two would take too much shared memory, or too many registers for scales.
    parts = 4 if out_dtype == torch.float32 or b_kind == "row" else 2
    block_m, block_n, block_k, warps, stages, group, per_sm = config
    gather_kernel[(min(per_sm * sm_count(own.device), ranks * -(-m // block_m) * -(-n // block_n)),)](
        TensorDescriptor(own, (m, k), (k, 1), [block_m, block_k]),
        TensorDescriptor(gathered, (ranks * m, k), (k, 1), [block_m, block_k]),
        TensorDescriptor(b, (n, k), (k, 1), [block_n // 2 if split else block_n, block_k]),
        TensorDescriptor(out, (ranks, m, n), (m * n, n, 1), [1, block_m, block_n // parts]),
        ready, epoch, abort, own_scale, gathered_scale, b_scale, bias, signed(delta), m, n, k, rank, rows_per_piece,
        pieces, ranks, a_kind, b_kind, split, parts, block_m, block_n, block_k, group,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _gather_cuda(own, gathered, b, ready, *rest) -> Tensor:
    return run_gather(gather_config(own, b, ready.shape[0]), own, gathered, b, ready, *rest)


def gemm_gather_ref(own, gathered, b, ready, epoch, delta, abort, rank, rows_per_piece, own_scale, gathered_scale,
                    b_scale, bias, out_dtype, fast_accum) -> Tensor:  # fmt: skip
    """Oracle of `gemm_gather`, of data that has arrived: fp32 throughout, one rounding."""
    ranks, a, a_scale = ready.shape[0], gathered.clone(), own_scale
    a.view(ranks, *own.shape)[rank] = own
    if own_scale is not None and gathered_scale.numel() == ranks * own_scale.numel():
        a_scale = gathered_scale.clone()
        a_scale.view(ranks, -1)[rank] = own_scale
    out = tiles.scaled_product_ref(a, b, a_scale, b_scale)
    return (out if bias is None else out + bias.float()).to(out_dtype)


_gather_op = register(
    "gemm_gather(Tensor own, Tensor(a!) gathered, Tensor b, Tensor(b!) ready, Tensor epoch, int delta, Tensor abort,"
    " int rank, int rows_per_piece, Tensor? own_scale, Tensor? gathered_scale, Tensor? b_scale, Tensor? bias,"
    " ScalarType out_dtype, bool fast_accum) -> Tensor",
    cpu=gemm_gather_ref,
    cuda=_gather_cuda,
    fake=lambda own, gathered, b, ready, *rest: own.new_empty(
        (own.shape[0] * ready.shape[0], b.shape[0]), dtype=rest[-2]
    ),
)


def gemm_gather(
    own: Tensor, gathered: Tensor, b: Tensor, ready: Tensor, epoch: Tensor, delta: int, abort: Tensor, rank: int,
    rows_per_piece: int, own_scale: Tensor | None = None, gathered_scale: Tensor | None = None,
    b_scale: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """out[R * m, N] = all shards [R * m, K] @ b[N, K]^T * scales + bias[N], rounded once to bf16, fp16 or fp32.

    own[m, K]: this rank's shard. gathered[R * m, K]: the others', in rank order; its rows of this rank are not read.
    ready int32 [R, P]: rows p * rows_per_piece ... of shard s, and all before them, with their scales, are there once
    ready[s, p] has reached epoch[0] + delta (ops/flags.py). Result garbage if abort[0] becomes nonzero.
    Scales, fp32 inverses, all three or none. A scale of a for all: own_scale [1], gathered_scale the same tensor; one a
    shard: [1], [R]; one a row: [m], [R * m]. b_scale: [1] or [N]. gathered_scale is read after the flags.
    a, b: both bf16, both fp16, or fp8 with at most one E5M2. fast_accum: see ops/gemm.py.
    Waits on CUDA devices only; CPU tensors are taken as they are. Errors: ValueError, TypeError.
    """
    tiles.check("gather and GEMM", gathered, b, own.shape[0], ready.shape[0])
    if rows_per_piece * ready.shape[1] < own.shape[0]:
        raise ValueError(
            f"{ready.shape[1]} pieces of {rows_per_piece} rows: must cover the {own.shape[0]} rows of a shard; "
            f"pass the rows_per_piece that the flags were laid out with"
        )
    if b.shape[0] * out_dtype.itemsize % tiles.ALIGNMENT:
        raise ValueError(f"N={b.shape[0]}: a row of the output must be a multiple of {tiles.ALIGNMENT} bytes; pad N")
    return _gather_op(
        own, gathered, b, ready, epoch, delta, abort, rank, rows_per_piece, own_scale, gathered_scale, b_scale, bias,
        out_dtype, fast_accum,
    )  # fmt: skip
