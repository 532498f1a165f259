"""Blockwise scaling: fp8 with a scale for 1 x 128 values of x and dy and for 128 x 128 of w; E4M3, or dy in E5M2.

Scheme: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3; scales by docs/background/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_lite.ops.block_cast import BLOCK, E4M3, block_cast, dequantize_blocks
from te_lite.ops.gemm_scaled import gemm_fp8_blockwise
from te_lite.ops.source import Source, SumDtype
from te_lite.ops.transpose import transpose
from te_lite.quantize.identity import HIGH_PRECISION
from te_lite.quantize.qtensor import Fp8Format, Held, Layout, QTensor, Scaled, TensorFormat
from te_lite.quantize.quantizer import GemmOperands, GemmQuantizers, Quantized, Quantizer, Site
from te_lite.recipe import Float8BlockScaling, QParams


@dataclass(frozen=True, slots=True)
class BlockFormat(Fp8Format):
    """Inverse scales in fp32; data [M, K] by row and transposed [K, Mp] by column.

    vectors (x, dy): row_scale [M, K/128], col_scale [K, M/128]; `flat`, for a shard that is gathered: col data [M, K]
    and col_scale [M/128, K]. squares (w): row_scale [M/128, K/128], and the col layout is the transpose of both.
    dtype: of the data. No GEMM takes blocks of E5M2: both operands are dequantized first. Vectors of E5M2 are flat.
    """

    gemm: str = "fp8_blockwise"
    col_from_row: bool = False
    square: bool = False
    flat: bool = False
    block: ClassVar[int] = BLOCK
    scale_bytes: ClassVar[int] = 4

    @property
    def label(self) -> str:  # type: ignore[override]  # of the class in the base, which costs its readers nothing
        return f"{'e4m3' if self.dtype == E4M3 else 'e5m2'} {'128x128' if self.square else '1x128'}"

    def dequantize(self, q: Held, layout: Layout) -> Tensor:
        if layout == "col" and self.flat:
            return dequantize_blocks(q.col, q.col_scale, self.block, 1, q.dtype)
        data, scale = (q.row, q.row_scale) if layout == "row" else (q.col, q.col_scale)
        v = dequantize_blocks(data, scale, self.block if self.square else 1, self.block, q.dtype)
        return v if layout == "row" else v[:, : q.shape[0]].t().contiguous()

    @property
    def col_scales(self) -> tuple[float, int]:  # type: ignore[override]  # as label
        return self.scale_bytes / (self.block if self.square else 1), self.block

    def multiplies(self, other: TensorFormat) -> bool:
        return TensorFormat.multiplies(self, other) and not self.square  # cuBLAS takes squares on one side only

    def part(self, q: Held, start: int, stop: int) -> QTensor | None:
        if not self.square:
            return q.rows(start, stop)
        if start % self.block:
            return None
        scale = q.row_scale[start // self.block : -(-stop // self.block)]
        return QTensor(self, (stop - start, q.shape[1]), q.dtype, q.row[start:stop], scale)

    def make_col(self, q: Held) -> tuple[Tensor, Tensor]:
        return transpose(q.row), q.row_scale.t().contiguous()  # as cuBLAS reads it, save for padding

    def from_wire(self, parts: tuple[Tensor, ...], layout: Layout, like: QTensor, rows: int) -> QTensor:
        (data, scale), shape = parts, (rows, like.shape[1])
        whole = VECTORS if self.gemm else self  # what no GEMM multiplies stays as it is
        if layout == "row":
            return QTensor(whole, shape, like.dtype, data, scale)
        if like.shape[0] % self.block:  # each shard has blocks of its own, which do not lie over the rows of the whole
            shards = rows // like.shape[0]
            pairs = zip(data.chunk(shards), scale.chunk(shards), strict=True)
            own: Any = like  # held by column
            values = [self.dequantize(replace(own, col=d, col_scale=s), "col") for d, s in pairs]
            return QTensor(HIGH_PRECISION, shape, like.dtype, torch.cat(values))
        if self.gemm:
            data, scale = transpose(data), scale.t()
        return QTensor(whole, shape, like.dtype, col=data, col_scale=scale)

    def matmul(self, a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
               out: Tensor | None = None) -> Tensor:  # fmt: skip
        return gemm_fp8_blockwise(a[0], b[0], a[1], b[1], out_dtype, bias, out)


VECTORS, FLAT_VECTORS = BlockFormat(), BlockFormat(flat=True, shard_multiple=BLOCK)
SQUARES = BlockFormat(col_from_row=True, square=True)
E5M2_VECTORS = BlockFormat(gemm="", dtype=torch.float8_e5m2, flat=True)
E5M2_SQUARES = BlockFormat(gemm="", dtype=torch.float8_e5m2, col_from_row=True, square=True)
BLOCK_FORMATS = {E4M3: (VECTORS, SQUARES), torch.float8_e5m2: (E5M2_VECTORS, E5M2_SQUARES)}


@dataclass(frozen=True, slots=True)
class Blocks(Quantizer):
    """Each block by its own amax, by row and by column from the same high-precision values."""

    recordable: ClassVar[bool] = True

    format: BlockFormat
    fused: bool = True
    pow2: bool = True
    eps: float = 0.0

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        square, flat = self.format.square, self.format.flat
        data, scale, col_data, col_scale, sums = block_cast(
            source, block=self.format.block, square=square, pow2=self.pow2, eps=self.eps, row=row, col=col, flat=flat,
            bias_grad=bias_grad, dtype=self.format.dtype,
        )  # fmt: skip
        if col_scale is not None and not (square or flat):
            col_scale = col_scale.t()
        shape = (source.rows, source.cols)
        return QTensor(self.format, shape, source.dtype, data, scale, col_data, col_scale), sums


def operands(recipe: Float8BlockScaling, site: Site) -> GemmOperands:
    """x and dy in 1 x 128 along each GEMM's inner dimension, w in 128 x 128."""

    def blocks(format: BlockFormat, params: QParams) -> Blocks:
        return Blocks(format, pow2=params.power_2_scale, eps=params.amax_epsilon)

    x = blocks(FLAT_VECTORS if site.tp.gathers_input else VECTORS, recipe.fp8_quant_fwd_inp)
    w = blocks(SQUARES, recipe.fp8_quant_fwd_weight)
    e4m3 = FLAT_VECTORS if site.tp.gathers_grad else VECTORS
    dy = blocks(e4m3 if recipe.fp8_format.backward_dtype == E4M3 else E5M2_VECTORS, recipe.fp8_quant_bwd_grad)
    return GemmOperands(GemmQuantizers(x, w), GemmQuantizers(dy, w), GemmQuantizers(dy, x))
