"""Fused: a persistent GEMM that waits for its operand's shards, or for what the others add to its result, by flags.

On GPUs, for number formats whose product is scaled by tensor, shard or row. Where a refusal is given, Ring runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_lite.ops.gemm_gather import gemm_gather
from te_lite.ops.gemm_reduce import gemm_reduce
from te_lite.ops.gemm_tiles import ALIGNMENT
from te_lite.overlap.buffers import Gather, Scatter
from te_lite.overlap.ring import push_others
from te_lite.overlap.schedule import Product
from te_lite.quantize.qtensor import QTensor

# Each push costs the copy stream 11 us beside its bytes, and the next shard is there before one has been multiplied:
# only very large shards are cut.
PIECE_BYTES = 32 << 20


def refusal(gemm: Product, a: QTensor) -> str:
    """Why the fused kernels do not take this product, or ""."""
    data, other = a.operand("row")[0], gemm.b.operand(gemm.b_layout)[0]
    if not data.is_cuda:
        return "fused kernels need a GPU"
    if not (a.format.scales_product and gemm.b.format.scales_product and a.format.multiplies(gemm.b.format)):
        return f"no fused kernel for {a.format.label or data.dtype}"
    if a.shape[0] % a.format.shard_multiple:
        return f"a rank's tokens are not a multiple of {a.format.shard_multiple}"
    if data.dtype == torch.float32:
        return "no fused kernel for fp32"
    if not (data.is_contiguous() and other.is_contiguous()):
        return "an operand of the fused kernel is transposed"
    if data.shape[1] * data.element_size() % ALIGNMENT or gemm.columns * gemm.dtype.itemsize % ALIGNMENT:
        return f"rows are not multiples of {ALIGNMENT} bytes"
    return ""


def loss(gemm: Product, a: QTensor, scatters: bool) -> str:
    """Why a ring is faster, or "": reduce-scatters are (docs/performance.md), and split accumulation costs the fused
    kernels more than cuts cost cuBLAS (What was tried, there)."""
    if scatters:
        return "a ring is faster at reduce-scatters"
    split = a.operand("row")[0].element_size() == 1 and not gemm.fast_accum
    return "the fused kernel is slow with split accumulation" if split else ""


def pieces(a: QTensor, most: int) -> int:
    """In how many pieces a shard is gathered."""
    data = a.operand("row")[0]
    return max(1, min(most, data.nbytes // PIECE_BYTES))


def _scales(a: QTensor, gemm: Product) -> tuple[Tensor | None, Tensor | None]:
    a_scale, b_scale = a.operand("row")[1], gemm.b.operand(gemm.b_layout)[1]
    return (None, None) if a_scale is None else (a_scale.reshape(-1), b_scale.reshape(-1))


def gather_gemm(gemm: Product, own: QTensor, gather: Gather) -> Tensor:
    """gemm of the gathered tensor [R*m, k] -> [R*m, n], each tile once the shard that it reads has arrived."""
    group, buffer = gather.group, gather.buffer
    own_scale, b_scale = _scales(own, gemm)
    data, *scales = gather.parts_of_all()
    word, delta = buffer.epoch(gather.slot, gather.epoch)
    return gemm_gather(
        own.row,
        data.view(own.row.dtype),
        gemm.b.operand(gemm.b_layout)[0],
        buffer.ready_flags(gather.slot),
        word,
        delta,
        group.abort,
        group.rank,
        gather.rows_per_piece,
        own_scale,
        scales[0].reshape(-1) if scales else own_scale,
        b_scale,
        gemm.bias,
        gemm.dtype,
        gemm.fast_accum,
    )


def gemm_scatter(gemm: Product, a: QTensor, scatter: Scatter) -> Tensor:
    """Sum over ranks of gemm(a[R*m, k]), this rank's rows [m, n]: the others' are computed and pushed as in a ring,
    this rank's come last and take up what has arrived in registers."""
    push_others(gemm, a, scatter)
    group, buffer, m = scatter.group, scatter.buffer, scatter.shape[0]
    own = a.rows(group.rank * m, (group.rank + 1) * m)
    word, delta = buffer.epoch(scatter.slot, scatter.epoch)
    out = gemm_reduce(
        own.row,
        gemm.b.operand(gemm.b_layout)[0],
        scatter.staging,
        buffer.ready_flags(scatter.slot),
        word,
        delta,
        group.abort,
        group.rank,
        m,
        *_scales(own, gemm),
        gemm.bias,
        gemm.dtype,
        gemm.fast_accum,
    )
    scatter.close()
    return out
