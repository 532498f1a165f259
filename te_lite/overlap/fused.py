"""Fused: a persistent GEMM that waits for its operand's shards, or for what the others add to its result, by flags.

On GPUs, for number formats whose product is scaled by tensor, shard or row. Where a refusal is given, Ring runs. The
address of a tensor is no reason for one, for it may differ by rank: it is copied where that is needed (`placed`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_lite._C import MOST_FUSED_RANKS
from te_lite.ops import source
from te_lite.ops.gemm import placed
from te_lite.ops.gemm_fused import ALIGNMENT, ROWS, transposed
from te_lite.ops.gemm_gather import NOTHING, Epilogue, Wanted, act_refusal, gemm_gather
from te_lite.ops.gemm_scatter import Narrow, blocks
from te_lite.ops.gemm_scatter import gemm_scatter as run_scatter
from te_lite.ops.narrow import BLOCK, E4M3
from te_lite.ops.source import Source
from te_lite.overlap.buffers import Gather, Scatter
from te_lite.overlap.group import Group
from te_lite.overlap.schedule import Product
from te_lite.quantize.qtensor import QTensor


def refusal(gemm: Product, a: QTensor, group: Group) -> str:
    """Why the fused kernels do not take this product, or "". The same on every rank."""
    data, other = a.operand("row")[0], gemm.b.operand(gemm.b_layout)[0]
    if not data.is_cuda:
        return "fused kernels need a GPU"
    if not (a.format.scales_product and gemm.b.format.scales_product and a.format.multiplies(gemm.b.format)):
        return f"no fused kernel for {a.format.label or data.dtype}"
    if a.shape[0] % a.format.shard_multiple:
        return f"a rank's tokens are not a multiple of {a.format.shard_multiple}"
    if torch.float32 in (data.dtype, gemm.dtype):
        return "no fused kernel for fp32"
    if not (data.is_contiguous() and (other.is_contiguous() or transposed(other))):
        return "an operand of the fused kernel is transposed"
    if data.shape[1] * data.element_size() % ALIGNMENT or gemm.columns * gemm.dtype.itemsize % ALIGNMENT:
        return f"rows are not multiples of {ALIGNMENT} bytes"
    if group.size > MOST_FUSED_RANKS:
        return f"fused kernels take at most {MOST_FUSED_RANKS} ranks"
    return group.no_fused


def _scales(a: QTensor, gemm: Product) -> tuple[Tensor | None, Tensor | None]:
    a_scale, b_scale = a.operand("row")[1], gemm.b.operand(gemm.b_layout)[1]
    return _flat(a_scale), _flat(b_scale)


def _flat(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dim() == 1 else scale.reshape(-1)


def _flags(exchange: Gather | Scatter) -> tuple[Tensor, Tensor, Tensor, int, Tensor, int]:
    """What a kernel that waits for this exchange must know: (ready, free flags, epoch, delta, abort word, rank)."""
    group, buffer = exchange.group, exchange.buffer
    return *buffer.flags(exchange.slot), *buffer.epoch(exchange.slot, exchange.epoch), group.abort, group.rank


def gather_gemm(gemm: Product, own: QTensor, gather: Gather) -> Tensor | None:
    """gemm of the gathered tensor [R*m, k] -> [R*m, n], each tile once the shard that it reads has arrived; None where
    only what gemm.then makes of it is left."""
    assert gather.awaited
    own_scale, b_scale = _scales(own, gemm)
    a, *scales = gather.parts()
    scale = _flat(scales[0]) if scales else own_scale
    b = placed(gemm.b.operand(gemm.b_layout)[0])
    ready, _, *rest = _flags(gather)
    counters = gather.buffer.counters[gather.slot]
    wanted = _wanted(gemm, own)
    out, made = gemm_gather(
        placed(own.row), a, b, ready, counters, *rest, own_scale, scale, b_scale, gemm.bias, gemm.dtype,
        gemm.fast_accum, wanted,
    )  # fmt: skip
    if wanted.act:
        gemm.then.result = _result(gemm, out, made, wanted.scale)
    return out


def _wanted(gemm: Product, own: QTensor) -> Wanted:
    then, split = gemm.then, own.row.element_size() == 1 and not gemm.fast_accum
    if then is None or act_refusal(own.shape[0], gemm.columns, then.want, then.h is not None, split):
        return NOTHING
    if then.want != "fp8":
        return Wanted(then.want, placed(then.h), activation=then.activation)
    scale, amax = then.quantizer.take_scale() if then.some_scale is None else (then.some_scale, None)
    return Wanted("fp8", placed(then.h), scale, amax, then.quantizer.format.dtype, then.activation)


def _result(gemm: Product, out: Tensor | None, made: Epilogue, scale: Tensor | None) -> Source | QTensor:
    if made.amax is not None:
        return gemm.then.source(out)._replace(amax=made.amax)
    if made.data_t is None:
        return source.plain(made.data)
    format, inverse = gemm.then.quantizer.format, made.scale_inv
    return QTensor(format, tuple(made.data.shape), gemm.dtype, made.data, inverse, made.data_t, inverse, scale)


def counts(gemm: Product, a: QTensor, size: int) -> tuple[int, ...]:
    """What "auto" tries beside the rule: other numbers of blocks of a scatter's rows."""
    m = a.shape[0] // size
    return tuple(count for count in (4, 2) if count < blocks(m) and not -(-m // ROWS) % count)


def begin_scatter(gemm: Product, a: QTensor, group: Group, narrow: bool = False, count: int = 0) -> Scatter:
    """What gemm_scatter of a[R*m, k] sends by. narrow: as ops/narrow.py has it, where its blocks divide m and n. count:
    of blocks; 0: by rule."""
    m = a.shape[0] // group.size
    narrow = narrow and not (m % BLOCK or gemm.columns % BLOCK)
    scatter = Scatter(group, (m, gemm.columns), E4M3 if narrow else gemm.dtype, blocks=count or blocks(m))
    scatter.sent += scatter.sent // 32 * narrow  # scales
    return scatter


def _narrow(gemm: Product, scatter: Scatter) -> Narrow | None:
    """Scales lie behind the partials of all ranks."""
    if scatter.dtype != E4M3:
        return None
    group, (m, n), name, slot = scatter.group, scatter.shape, scatter.buffer.name, scatter.slot
    first, size = scatter.bytes * group.size, scatter.bytes // 32
    memory = group.arena.view(name, slot)[first : first + size * group.size]
    to = [group.arena.address(name, slot, rank) + first + group.rank * size for rank in range(group.size)]
    return Narrow(memory.view(torch.float32).view(group.size, n // BLOCK, m), to, gemm.dtype)


def gemm_scatter(gemm: Product, a: QTensor, scatter: Scatter) -> Tensor:
    """Sum over ranks of gemm(a[R*m, k]), sum_bias and residual, this rank's rows [m, n], in one launch: the others' are
    stored where they belong, this rank's take up what has arrived in registers."""
    counters, narrow = scatter.buffer.counters[scatter.slot], _narrow(gemm, scatter)
    residual, later = (None, gemm.residual) if narrow else (placed(gemm.residual), None)
    scatter.expect()
    ready, free, *rest = _flags(scatter)
    out = run_scatter(
        placed(a.operand("row")[0]), placed(gemm.b.operand(gemm.b_layout)[0]), *scatter.targets, scatter.staging,
        ready, free, counters, *rest, *_scales(a, gemm), gemm.sum_bias, gemm.fast_accum, narrow, residual,
        scatter.blocks,
    )  # fmt: skip
    scatter.close()
    return out if later is None else out.add_(later)
