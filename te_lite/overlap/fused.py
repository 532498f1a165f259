"""Fused: a persistent GEMM that waits for its operand's shards, or for what the others add to its result, by flags.

    copies        | from rank+1 | from rank+2 | ...
    one kernel    | own shard | rank+1's | rank+2's | ...                 polls a flag where the source changes
    one kernel    | others' rows, stored across the links | own rows, once the others' partial sums are there

On GPUs, for number formats whose product is scaled by tensor, shard or row. Where a refusal is given, Ring runs. The
address of a tensor is no reason for one, for it may differ by rank: it is copied where that is needed (`placed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_lite._C import MOST_FUSED_RANKS
from te_lite.ops import source
from te_lite.ops.gemm import placed
from te_lite.ops.gemm_fused import ALIGNMENT, ROWS, transposed
from te_lite.ops.gemm_gather import NOTHING, Computed, Wanted, act_refusal, gemm_gather
from te_lite.ops.gemm_scatter import Narrow, blocks, gemm_scatter
from te_lite.ops.narrow import BLOCK, E4M3
from te_lite.overlap.buffers import Buffer, Gather, Scatter
from te_lite.overlap.collective import Collective
from te_lite.overlap.epilogues import Activate, GemmInput
from te_lite.overlap.exchange import Gemm
from te_lite.overlap.group import Group
from te_lite.overlap.ring import Ring
from te_lite.quantize.qtensor import Held, Layout, QTensor, TensorFormat


def product_refusal(gemm: Gemm, a: QTensor) -> str:
    """Why the fused kernels do not multiply these operands, or ""."""
    data, other = a.operand("row")[0], gemm.b.operand(gemm.layout)[0]
    if not data.is_cuda:
        return "fused kernels need a GPU"
    if not multiplied(a.format, gemm.b.format):
        return f"no fused kernel for {a.format.label or data.dtype}"
    if a.shape[0] % a.format.shard_multiple:
        return f"a rank's tokens are not a multiple of {a.format.shard_multiple}"
    if torch.float32 in (data.dtype, gemm.dtype):
        return "no fused kernel for fp32"
    if not (data.is_contiguous() and (other.is_contiguous() or transposed(other))):
        return "an operand of the fused kernel is transposed"
    if data.shape[1] * data.element_size() % ALIGNMENT or gemm.columns * gemm.dtype.itemsize % ALIGNMENT:
        return f"rows are not multiples of {ALIGNMENT} bytes"
    return ""


def multiplied(a: TensorFormat, b: TensorFormat) -> bool:
    """Whether the fused kernels multiply operands of these formats."""
    return a.scales_product and b.scales_product and a.multiplies(b)


def refusal(gemm: Gemm, a: QTensor, group: Group) -> str:
    """Why the fused kernels do not take this product over the ranks of a group, or "". The same on every rank."""
    if why := product_refusal(gemm, a):
        return why
    if group.size > MOST_FUSED_RANKS:
        return f"fused kernels take at most {MOST_FUSED_RANKS} ranks"
    return group.no_fused


def _scales(a: QTensor, gemm: Gemm) -> tuple[Tensor | None, Tensor | None]:
    a_scale, b_scale = a.operand("row")[1], gemm.b.operand(gemm.layout)[1]
    return _flat(a_scale), _flat(b_scale)


def _flat(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dim() == 1 else scale.reshape(-1)


def _flags(exchange: Gather | Scatter) -> tuple[Tensor, Tensor, Tensor, int, Tensor, int]:
    """What a kernel that waits for this exchange must know: (ready, free flags, epoch, delta, abort word, rank)."""
    group, buffer = exchange.group, exchange.buffer
    return *buffer.flags(exchange.slot), *buffer.epoch(exchange.slot, exchange.epoch), group.abort, group.rank


def _narrow(buffer: Buffer, slot: int, shape: tuple[int, int], dtype: torch.dtype) -> Narrow:
    """The scales of E4M3 partials [m, n], which lie behind the partials of all ranks. dtype: of the sum."""
    arena, ranks, (m, n) = buffer.arena, buffer.arena.size, shape
    first, size = m * n * ranks, m * n // 32
    memory = arena.view(buffer.name, slot)[first : first + size * ranks]
    to = [arena.address(buffer.name, slot, rank) + first + arena.rank * size for rank in range(ranks)]
    return Narrow(memory.view(torch.float32).view(ranks, n // BLOCK, m), to, dtype)


def computes(gemm: Gemm, own: QTensor) -> bool:
    """Whether the kernel of gathers computes gemm's epilogue. own: this rank's shard."""
    epilogue, row = gemm.epilogue, own.row
    if not isinstance(epilogue, Activate) or not epilogue.want or gemm.residual is not None or row is None:
        return False
    split = row.element_size() == 1 and not gemm.fast_accum
    return not act_refusal(own.shape[0], gemm.columns, epilogue.want, epilogue.h is not None, split)


def _wanted(gemm: Gemm, own: QTensor) -> Wanted:
    """What the kernel computes of the epilogue."""
    if not computes(gemm, own):
        return NOTHING
    epilogue: Any = gemm.epilogue  # an Activate
    if epilogue.want != "fp8":
        return Wanted(epilogue.want, placed(epilogue.h), activation=epilogue.activation)
    quantizer, scale, amax = epilogue.quantizer, epilogue.some_scale, None
    format: Any = quantizer.format  # an Fp8Format
    if scale is None:
        scale, amax = quantizer.take_scale()
    return Wanted("fp8", placed(epilogue.h), scale, amax, format.dtype, epilogue.activation, epilogue.col)


def _operand(epilogue: Activate, dtype: torch.dtype, out: Any, v: Computed, scale: Tensor | None) -> GemmInput:
    """What the kernel left, as the next GEMM's quantizer takes it."""
    if v.amax is not None:
        return epilogue.source(out)._replace(amax=v.amax)
    data: Any = v.data
    if v.scale_inv is None:
        return source.plain(data)
    format, inverse = epilogue.quantizer.format, v.scale_inv
    col_scale = None if v.data_t is None else inverse
    return QTensor(format, (data.shape[0], data.shape[1]), dtype, data, inverse, v.data_t, col_scale, scale)


def run_gather(
    gemm: Gemm, own: Held, parts: Sequence[Tensor], ready: Tensor, counters: Tensor, epoch: Tensor, delta: int,
    abort: Tensor, rank: int,
) -> Any:  # fmt: skip
    """gemm of all ranks' shards, with its epilogue. parts: of the gathered tensor as its format's wire has them; none
    where there is one rank. The rest as of gemm_gather."""
    own_scale, b_scale = _scales(own, gemm)
    row, wanted = placed(own.row), _wanted(gemm, own)
    a, *scales = parts or (row,)
    scale = _flat(scales[0]) if scales else own_scale
    out: Any
    out, v = gemm_gather(
        row, a, placed(gemm.b.operand(gemm.layout)[0]), ready, counters, epoch, delta, abort, rank, own_scale, scale,
        b_scale, gemm.bias, gemm.dtype, gemm.fast_accum, wanted,
    )  # fmt: skip
    if not wanted.act:
        return gemm.finish(out)
    epilogue: Any = gemm.epilogue
    return epilogue.given(out, _operand(epilogue, gemm.dtype, out, v, wanted.scale))


class Fused(Ring):
    """count: blocks of a scatter's rows, each with a flag of its own; 0: by rule."""

    name = "fused"
    awaits = True

    def _fallback(self, a: QTensor, gemm: Gemm | None, layout: Layout | None) -> Collective:
        found = super()._fallback(a, gemm, layout)
        why = refusal(gemm, a, self.group) if found is self and gemm is not None else ""
        return Ring(self.place, why) if why else found

    def all_gather_gemm(self, gemm: Gemm, gathering: Any) -> Any:
        """Each tile once the shard that it reads has arrived. gathering: a Gather."""
        assert gathering.awaited
        ready, _, epoch, delta, abort, rank = _flags(gathering)
        counters = gathering.buffer.counters[gathering.slot]
        return run_gather(gemm, gathering.q, gathering.parts(), ready, counters, epoch, delta, abort, rank)

    def counts(self, gemm: Gemm, a: QTensor) -> tuple[int, ...]:
        """What `Auto` tries beside the rule: other numbers of blocks of a scatter's rows."""
        m = a.shape[0] // self.tp.size
        return tuple(count for count in (4, 2) if count < blocks(m) and not -(-m // ROWS) % count)

    def scatter(self, gemm: Gemm, a: QTensor) -> Scatter:
        """What the partial sums of gemm(a[R*m, k]) travel by; as ops/narrow.py has them, where that is asked for and
        its blocks divide m and n."""
        m, remark = a.shape[0] // self.group.size, ""
        narrow = self.place.narrow and not (m % BLOCK or gemm.columns % BLOCK)
        dtype, count = E4M3 if narrow else gemm.dtype, self.count or blocks(m)
        scatter = Scatter(self.group, (m, gemm.columns), dtype, blocks=count)
        scatter.sent += scatter.sent // 32 * narrow  # scales
        if self.place.narrow and not narrow:
            remark = f"fp8_buf is for multiples of {BLOCK}, not {list(scatter.shape)}"
        self.note(scatter.sent, remark)
        return scatter

    def gemm_reduce_scatter(self, gemm: Gemm, a: QTensor) -> Any:
        """In one launch: the others' rows are stored where they belong, this rank's take up what has arrived in
        registers."""
        scatter = self.scatter(gemm, a)
        buffer, slot, narrow = scatter.buffer, scatter.slot, None
        if scatter.dtype == E4M3:
            narrow = buffer.cached(_narrow, slot, scatter.shape, gemm.dtype)
        residual, later = (None, gemm.residual) if narrow else (placed(gemm.residual), None)
        scatter.expect()
        ready, free, epoch, delta, abort, rank = _flags(scatter)
        out = gemm_scatter(
            placed(a.operand("row")[0]), placed(gemm.b.operand(gemm.layout)[0]), *scatter.targets, scatter.staging,
            ready, free, buffer.counters[slot], epoch, delta, abort, rank, *_scales(a, gemm), gemm.bias,
            gemm.fast_accum, narrow, residual, scatter.blocks,
        )  # fmt: skip
        scatter.close()
        total = out if later is None else out.add_(later)
        return total if gemm.epilogue is None else gemm.epilogue(total)
