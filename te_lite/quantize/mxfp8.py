"""MXFP8: E4M3, or dy in E5M2, in blocks of 32 along the inner dimension of each GEMM, with E8M0 scales.

Format: OCP Microscaling Formats (MX) specification v1.0. Hopper has no tensor cores for it: operands are written
out in bf16 in front of the GEMM, which is exact, so the product is that of the dequantized operands summed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from te_lite.ops.block_cast import E4M3, MX_BLOCK
from te_lite.quantize.blockwise import BlockFormat, Blocks
from te_lite.quantize.quantizer import GemmOperands, GemmQuantizers, Site
from te_lite.recipe import MXFP8BlockScaling


@dataclass(frozen=True, slots=True)
class MXFormat(BlockFormat):
    """row: data [M, K], scale uint8 [M, K/32]. col: data [M, K] (not transposed), scale uint8 [M/32, K]."""

    block: ClassVar[int] = MX_BLOCK
    scale_bytes: ClassVar[int] = 1
    gemm: str = ""
    flat: bool = True

    @property
    def label(self) -> str:  # type: ignore[override]
        return "mxfp8" if self.dtype == E4M3 else "mxfp8 e5m2"


@dataclass(frozen=True, slots=True)
class MX(Blocks):
    """Each block of 32 by its own amax, by row and by column from the same high-precision values."""

    recordable: ClassVar[bool] = True

    format: BlockFormat = MXFormat()


def operands(recipe: MXFP8BlockScaling, site: Site) -> GemmOperands:
    """Blocks run along the inner dimension of each GEMM."""
    one, dy = MX(), MX(MXFormat(dtype=recipe.fp8_format.backward_dtype))
    return GemmOperands(GemmQuantizers(one, one), GemmQuantizers(dy, one), GemmQuantizers(dy, one))
