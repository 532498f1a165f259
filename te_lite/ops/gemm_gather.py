"""All-gather + GEMM in one kernel: it multiplies the shards of the other ranks as they arrive.

    a[R * m, K] = all_gather(own[m, K])                  # here: copies into `gathered`, with flags
    out[R * m, N] = a @ b[N, K]^T * a_scale * b_scale + bias

    copies    | from rank+1 | from rank+2 | ...
    kernel    | own shard | rank+1 | rank+2 | ...             (polls ready[source, 0] where the source changes)

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


@triton.jit
def _store(
    part, out_desc, a_scale, b_scale, bias, source, row, col, m, n, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr
):
    part = tiles.scaled(part, a_scale, b_scale, row, col, m, n, A_SCALE, B_SCALE)
    part = tiles.plus_bias(part, bias, col, n).to(out_desc.dtype)
    out_desc.store([source, row, col], part.reshape(1, part.shape[0], part.shape[1]))


@triton.jit
def _finish(
    part, out_desc, a_scale, b_scale, bias, source, row, col, m, n, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Stores half a tile, of which PARTS stores make a whole one."""
    if PARTS == 4:
        part, right = tiles.halves(part)
        _store(right, out_desc, a_scale, b_scale, bias, source, row, col + part.shape[1], m, n, A_SCALE, B_SCALE)
    _store(part, out_desc, a_scale, b_scale, bias, source, row, col, m, n, A_SCALE, B_SCALE)


@triton.jit
def _scale_of(gathered_scale, source, m, A_SCALE: tl.constexpr):
    """Where the scales of a shard begin."""
    if A_SCALE == "row":
        return gathered_scale + source * m
    elif A_SCALE == "shard":
        return gathered_scale + source
    else:
        return gathered_scale


@triton.jit(
    do_not_specialize=["delta", "m", "rank", "stride", "tail"],
    do_not_specialize_on_alignment=["ready", "epoch", "abort", "own_scale", "gathered_scale", "b_scale", "bias"],
)
def gather_kernel(
    own, gathered, b_desc, b_tail, out_desc, ready, epoch, abort, own_scale, gathered_scale, b_scale, bias, delta, m, n,
    k, rank, stride, tail, RANKS: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, PARTS: tl.constexpr,
    B_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program p of P takes tiles p, p + P, ... of the walk over the shards of rank, rank+1, rank+2, ... (mod R).

    Two loops, one over the own shard and one over the others', since a loop reads through one descriptor. tail: so many
    tiles at the end are taken in halves, through b_tail, where that keeps more programs busy.
    out_desc: [R, m, N], so that no store reaches the next shard. stride: from one source's flag to the next's. PARTS:
    how many stores finish a tile.
    """
    tl.assume(k > 0)
    programs = tl.num_programs(0)
    per_shard = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    reached = tl.load(epoch) + delta
    first = tl.program_id(0)
    for others in tl.static_range(2):
        end = per_shard * RANKS - tail if others else per_shard
        finished = first - programs  # counted a second time: what a tile's end needs must not come from its beginning
        for tile in tl.range(first, end, programs, flatten=True):
            step, row, col = tiles.tile_at(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
            if others:
                source = (rank + step) % RANKS
                new = (tile - programs) // per_shard != step  # also at the first: none was before it, or one of step 0
                wait_flags(ready + source * stride, 0, new.to(tl.int32), reached, abort)
                row += source * m
            a_desc = gathered if others else own
            left, right = tiles.halves(tiles.multiply(a_desc, b_desc, row, col, k, B_T, BLOCK_M, BLOCK_N, BLOCK_K))
            finished += programs
            step, row, col = tiles.tile_at(finished, m, n, BLOCK_M, BLOCK_N, GROUP)
            source = (rank + step) % RANKS
            scale = own_scale
            if others and A_SCALE != "none":
                scale = _scale_of(gathered_scale, source, m, A_SCALE)
            for half in tl.static_range(2):
                part, c = left if half == 0 else right, col + half * (BLOCK_N // 2)
                _finish(part, out_desc, scale, b_scale, bias, source, row, c, m, n, A_SCALE, B_SCALE, PARTS)
        first += tl.cdiv(max(end - first, 0), programs) * programs
    if BLOCK_N == 256:
        half = tl.program_id(0)
        if half < 2 * tail:
            step, row, col = tiles.tile_at(per_shard * RANKS - tail + half // 2, m, n, BLOCK_M, BLOCK_N, GROUP)
            source, col = (rank + step) % RANKS, col + half % 2 * (BLOCK_N // 2)
            wait_flags(ready + source * stride, 0, 1, reached, abort)
            part = tiles.multiply(gathered, b_tail, row + source * m, col, k, B_T, BLOCK_M, BLOCK_N // 2, BLOCK_K)
            scale = gathered_scale
            if A_SCALE != "none":
                scale = _scale_of(gathered_scale, source, m, A_SCALE)
            _finish(part, out_desc, scale, b_scale, bias, source, row, col, m, n, A_SCALE, B_SCALE, PARTS)


def gather_config(own: Tensor, b: Tensor, ranks: int) -> tiles.Config:
    """The tile that `gemm_gather` takes for these operands."""
    return tiles.choose(own.shape[0], ranks, b.shape[0], own.element_size(), sm_count(own.device))


def run_gather(config: tiles.Config, own, gathered, b, ready, epoch, delta, abort, rank, own_scale, gathered_scale,
               b_scale, bias, out_dtype) -> Tensor:  # fmt: skip
    """`gemm_gather` on a CUDA device with a tile of one's own choice."""
    (m, k), (n, _), (ranks, stride) = own.shape, b.shape, ready.shape
    out = own.new_empty((ranks * m, n), dtype=out_dtype)
    if not out.numel():
        return out
    a_kind, b_kind = tiles.scale_kinds(gathered_scale, b_scale, ranks * m, n, ranks)
    # Four stores a tile where two would take too much shared memory, or too many registers for scales.
    parts = 4 if out_dtype == torch.float32 or b_kind == "row" else 2
    block_m, block_n, block_k, warps, stages, group, per_sm = config
    per_shard, most = -(-m // block_m) * -(-n // block_n), per_sm * sm_count(own.device)
    rest = ranks * per_shard % most  # tiles of the last round; of the others' shards, if they are to be halved
    tail = rest if 2 * rest <= most and rest <= (ranks - 1) * per_shard and block_n == 256 else 0
    gather_kernel[(min(most, ranks * per_shard),)](
        TensorDescriptor(own, (m, k), (k, 1), [block_m, block_k]),
        TensorDescriptor(gathered, (ranks * m, k), (k, 1), [block_m, block_k]),
        tiles.described(b, block_n, block_k),
        tiles.described(b, block_n // 2, block_k),
        TensorDescriptor(out, (ranks, m, n), (m * n, n, 1), [1, block_m, block_n // parts]),
        ready, epoch, abort, own_scale, gathered_scale, b_scale, bias, signed(delta), m, n, k, rank, stride, tail,
        ranks, a_kind, b_kind, parts, tiles.transposed(b), block_m, block_n, block_k, group,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _gather_cuda(own, gathered, b, ready, *rest) -> Tensor:
    return run_gather(gather_config(own, b, ready.shape[0]), own, gathered, b, ready, *rest)


def gemm_gather_ref(own, gathered, b, ready, epoch, delta, abort, rank, own_scale, gathered_scale, b_scale, bias,
                    out_dtype) -> Tensor:  # fmt: skip
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
    " int rank, Tensor? own_scale, Tensor? gathered_scale, Tensor? b_scale, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    cpu=gemm_gather_ref,
    cuda=_gather_cuda,
    fake=lambda own, gathered, b, ready, *rest: own.new_empty(
        (own.shape[0] * ready.shape[0], b.shape[0]), dtype=rest[-1]
    ),
)


def gemm_gather(
    own: Tensor, gathered: Tensor, b: Tensor, ready: Tensor, epoch: Tensor, delta: int, abort: Tensor, rank: int,
    own_scale: Tensor | None = None, gathered_scale: Tensor | None = None, b_scale: Tensor | None = None,
    bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """out[R * m, N] = all shards [R * m, K] @ b[N, K]^T * scales + bias[N], rounded once to bf16, fp16 or fp32.

    own[m, K]: this rank's shard. gathered[R * m, K]: the others', in rank order; its rows of this rank are not read.
    ready int32 [R, P]: shard s with its scales is there once ready[s, 0] has reached epoch[0] + delta (ops/flags.py).
    Result garbage if abort[0] becomes nonzero.
    Scales, fp32 inverses, all three or none. A scale of a for all: own_scale [1], gathered_scale the same tensor; one a
    shard: [1], [R]; one a row: [m], [R * m]. b_scale: [1] or [N]. gathered_scale is read after the flags.
    a, b: both bf16, both fp16, where b may also lie as [K, N]; or fp8 with at most one E5M2, with fast accumulation
    (ops/gemm.py).
    Waits on CUDA devices only; CPU tensors are taken as they are. Errors: ValueError, TypeError.
    """
    tiles.check("gather and GEMM", gathered, b, own.shape[0], ready.shape[0])
    if b.shape[0] * out_dtype.itemsize % tiles.ALIGNMENT:
        raise ValueError(f"N={b.shape[0]}: a row of the output must be a multiple of {tiles.ALIGNMENT} bytes; pad N")
    return _gather_op(
        own, gathered, b, ready, epoch, delta, abort, rank, own_scale, gathered_scale, b_scale, bias, out_dtype,
    )  # fmt: skip
