"""MXFP8: E4M3 in blocks of 32 along the inner dimension of each GEMM, with E8M0 scales.

Format: OCP Microscaling Formats (MX) specification v1.0. Hopper has no tensor cores for it: operands are written
out in bf16 in front of the GEMM, which is exact, so the product is that of the dequantized operands summed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from te_lite.ops.block_cast import MX_BLOCK, block_cast, dequantize_blocks
from te_lite.ops.source import Source
from te_lite.quantize.identity import HIGH_PRECISION
from te_lite.quantize.qtensor import Layout, QTensor, TensorFormat
from te_lite.quantize.quantizer import GemmOperands, GemmQuantizers, Quantized, Quantizer, Site
from te_lite.recipe import MXFP8BlockScaling


@dataclass(frozen=True, slots=True)
class MXFormat(TensorFormat):
    """row: data [M, K], scale uint8 [M, K/32]. col: data [M, K] (not transposed), scale uint8 [M/32, K]."""

    label: ClassVar[str] = "mxfp8"
    col_from_row: bool = False

    def dequantize(self, q: QTensor, layout: Layout) -> Tensor:
        if layout == "row":
            return dequantize_blocks(q.row, q.row_scale, 1, MX_BLOCK, q.dtype)
        return dequantize_blocks(q.col, q.col_scale, MX_BLOCK, 1, q.dtype)

    def from_wire(self, parts: tuple[Tensor, ...], layout: Layout, like: QTensor, rows: int) -> QTensor:
        data, scale = parts[0].view(torch.float8_e4m3fn), parts[1]
        if layout == "row":
            return QTensor(self, (rows, like.shape[1]), like.dtype, data, scale)
        whole = QTensor(self, (rows, like.shape[1]), like.dtype, col=data, col_scale=scale)
        return whole if like.shape[0] % MX_BLOCK == 0 else unpadded(whole, like)


def unpadded(whole: QTensor, like: QTensor) -> QTensor:
    """Gathered columns of blocks whose shards [m, K] do not end with a block, in high precision.

    Each shard has blocks of its own, so the scales of `whole` do not lie over its rows as they would in one tensor.
    """
    shards = whole.shape[0] // like.shape[0]
    parts = zip(whole.col.chunk(shards), whole.col_scale.chunk(shards), strict=True)
    values = [QTensor(like.format, like.shape, like.dtype, col=data, col_scale=scale) for data, scale in parts]
    return QTensor(HIGH_PRECISION, whole.shape, whole.dtype, torch.cat([value.dequantize("col") for value in values]))


@dataclass(frozen=True, slots=True)
class MX(Quantizer):
    """Each block of 32 by its own amax, by row and by column from the same high-precision values."""

    format: TensorFormat = MXFormat()
    fused: bool = True

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: bool = False) -> Quantized:
        *tensors, sums = block_cast(source, block=MX_BLOCK, row=row, col=col, flat=True, bias_grad=bias_grad)
        return QTensor(self.format, (source.rows, source.cols), source.dtype, *tensors), sums


def operands(recipe: MXFP8BlockScaling, site: Site) -> GemmOperands:
    """The same for every operand: blocks run along the inner dimension of each GEMM."""
    one = MX()
    pair = GemmQuantizers(one, one)
    return GemmOperands(pair, pair, pair)
