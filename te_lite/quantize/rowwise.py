"""Rowwise scaling: E4M3 with one scale for each row of an operand, along the inner dimension of each GEMM.

Scheme: torchao's "rowwise" and "rowwise_with_gw_hp" float8 recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.cast import transform
from te_lite.ops.gemm_scaled import gemm_fp8_rowwise
from te_lite.ops.row_cast import E4M3, row_cast, vector_amax, vector_scales
from te_lite.ops.row_kernels import MOST_COLUMNS
from te_lite.ops.source import Source, SumDtype
from te_lite.ops.transpose import transpose
from te_lite.quantize.identity import Identity
from te_lite.quantize.per_tensor import Current
from te_lite.quantize.qtensor import Fp8Format, Held, Layout, QTensor, Scaled
from te_lite.quantize.quantizer import GemmOperands, GemmQuantizers, Quantized, Quantizer, Site
from te_lite.recipe import RowwiseScaling
from te_lite.watch import all_reduce_max


@dataclass(frozen=True, slots=True)
class RowFormat(Fp8Format):
    """Inverse scales in fp32: row data [M, K] with row_scale [M], col data [K, Mp] with col_scale [K].

    flat: a shard that is gathered; its col data is [M, K], and its col_scale is agreed on by all ranks. One scale in
    place of a vector serves the whole tensor.
    """

    label: ClassVar[str] = "e4m3 row"
    gemm: str = "fp8_rowwise"
    scales_product: bool = True
    col_from_row: bool = False
    flat: bool = False

    def dequantize(self, q: Held, layout: Layout) -> Tensor:
        if layout == "col" and self.flat:
            return (q.col.float() * q.col_scale).to(q.dtype)
        return Fp8Format.dequantize(self, q, layout)

    def wire(self, q: Held, layout: Layout) -> tuple[Tensor, ...]:
        return (q.row, q.row_scale) if layout == "row" else (q.col,)

    def from_wire(self, parts: tuple[Tensor, ...], layout: Layout, like: QTensor, rows: int) -> QTensor:
        parts = parts if layout == "row" else (transpose(parts[0]),)
        return Fp8Format.from_wire(ROWS, parts, layout, like, rows)

    def matmul(self, a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
               out: Tensor | None = None) -> Tensor:  # fmt: skip
        return gemm_fp8_rowwise(a[0], b[0], a[1], b[1], out_dtype, bias, fast_accum, out)


ROWS, FLAT_ROWS = RowFormat(), RowFormat(flat=True)


@dataclass(frozen=True, slots=True)
class Rows(Quantizer):
    """Each row by its own amax, and for the col layout each column by its own.

    A column's amax is reduced over `amax_group` where the tokens of v are sharded over its ranks.
    """

    recordable: ClassVar[bool] = True

    format: RowFormat
    fused: bool = True
    pow2: bool = True
    amax_group: dist.ProcessGroup | None = None

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        q = QTensor(self.format, (source.rows, source.cols), source.dtype)
        if not (col or bias_grad) and source.cols <= MOST_COLUMNS:
            q.row, q.row_scale = row_cast(source, self.pow2)
            return q, None
        amax, rows = vector_amax(source, row, col), source.rows if row else 0
        if col and self.amax_group is not None:
            all_reduce_max("amax of columns", amax[rows:], self.amax_group)
        row_scale = col_scale = sums = None
        # Apart, so that none keeps the memory of both, and each starts where cuBLAS reads scales.
        if row:
            row_scale, q.row_scale = vector_scales(amax[:rows], self.pow2)
        if col:
            col_scale, q.col_scale = vector_scales(amax[rows:], self.pow2)
        by_col = col and not self.format.flat
        if row or by_col:
            made = transform(
                source, fp8_dtype=E4M3, row=row, col=by_col, row_scale=row_scale,
                col_scale=col_scale if by_col else None, bias_grad=bias_grad,
            )  # fmt: skip
            q.row, q.col, sums = made.row, made.col, made.bias_grad
        if col and self.format.flat:
            left = None if row else bias_grad
            made = transform(source, fp8_dtype=E4M3, row=True, col_scale=col_scale, bias_grad=left)
            q.col, sums = made.row, sums if row else made.bias_grad
        return q, sums


def operands(recipe: RowwiseScaling, site: Site) -> GemmOperands:
    """x, w, dy rowwise in every GEMM; with high_precision_wgrad, w tensorwise in dgrad and wgrad unquantized."""

    def rows(gathered: bool = False) -> Rows:
        group = site.tp.group if gathered else None
        return Rows(FLAT_ROWS if gathered else ROWS, pow2=recipe.use_power_2_scales, amax_group=group)

    x, w, dy = rows(site.tp.gathers_input), rows(), rows(site.tp.gathers_grad)
    fprop = GemmQuantizers(x, w, fast_accum=True)
    if not recipe.high_precision_wgrad:
        return GemmOperands(fprop, GemmQuantizers(dy, w), GemmQuantizers(dy, x))
    plain = Identity(target=site.dtype)
    tensorwise = Current(ROWS, pow2=recipe.use_power_2_scales)
    return GemmOperands(fprop, GemmQuantizers(dy, tensorwise), GemmQuantizers(plain, plain))
