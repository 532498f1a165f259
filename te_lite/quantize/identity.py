"""High precision behind the quantizers' contract: data stays in the activations' dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_lite.ops.cast import amax, transform
from te_lite.ops.gemm import gemm_accumulate_
from te_lite.ops.source import Source, SumDtype
from te_lite.quantize.delayed import ScaleState
from te_lite.quantize.qtensor import Held, Layout, QTensor, Scaled, TensorFormat
from te_lite.quantize.quantizer import Both, GemmOperands, GemmQuantizers, Quantized, Quantizer, Site
from te_lite.recipe import Recipe


@dataclass(frozen=True, slots=True)
class HighPrecisionFormat(TensorFormat):
    """bf16, fp16 or fp32; the col layout is a view."""

    gemm: str = "high_precision"
    scales_product: bool = True

    def dequantize(self, q: Any, layout: Layout) -> Tensor:
        return q.keep().row.to(q.dtype)  # memory that belongs to a userbuffer is not given out as it lies

    def make_col(self, q: Held) -> tuple[Tensor, None]:
        return q.row.t(), None

    def wire(self, q: Held, layout: Layout) -> tuple[Tensor, ...]:
        return (q.row,)

    def accumulate_(self, out: Tensor, a: Scaled, b: Scaled, fast_accum: bool) -> None:
        gemm_accumulate_(out, a[0].t(), b[0].t())


HIGH_PRECISION = HighPrecisionFormat()


@dataclass(frozen=True, slots=True)
class Identity(Quantizer):
    """v in `target` precision; the input itself when it is there already."""

    from_gemm: ClassVar[str] = "high precision"
    recordable: ClassVar[bool] = True

    format: TensorFormat = HIGH_PRECISION
    target: torch.dtype = torch.bfloat16

    def wants_from_gemm(self, dtype: torch.dtype) -> str:
        return Quantizer.wants_from_gemm(self, dtype) if dtype == self.target else ""

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        data: Any
        if source.kind == "plain":
            data = source.x.to(self.target)
            sums = transform(source, bias_grad=bias_grad).bias_grad if bias_grad else None
        else:
            result = transform(source, hp_dtype=self.target, bias_grad=bias_grad)
            data, sums = result.hp, result.bias_grad
        return QTensor(self.format, (data.shape[0], data.shape[1]), self.target, row=data), sums

    def again(self, source: Source, earlier: QTensor) -> QTensor:
        return Identity.quantize(self, source)[0]  # a subclass has noted the source before

    def gives_again(self, x: Quantizer) -> bool:
        return type(self) is Identity and self == x

    def quantize_and_again(self, grad: Source, row: bool, col: bool, bias_grad: SumDtype, x: QTensor) -> Both:
        made: Any = transform(grad, hp_dtype=self.target, act_dtype=self.target, bias_grad=bias_grad)
        q = QTensor(self.format, (grad.rows, grad.cols), self.target, row=made.hp)
        return q, made.bias_grad, QTensor(self.format, x.shape, self.target, row=made.act)


@dataclass(frozen=True, slots=True)
class Calibrating(Identity):
    """High precision that records the amax a delayed-scaling quantizer would have seen."""

    from_gemm: ClassVar[str] = ""

    state: ScaleState = None  # type: ignore[assignment]  # there wherever it quantizes
    slot: int = 0

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        q, sums = Identity.quantize(self, source, row=row, col=col, bias_grad=bias_grad)
        cell = self.state.amax_at(self.slot)
        if cell is not None:
            torch.maximum(cell, amax(source).amax().view(1), out=cell)
        return q, sums


def operands(recipe: Recipe, site: Site) -> GemmOperands:
    """All operands in high precision."""
    one = Identity(target=site.dtype)  # one object: a tensor that two GEMMs read is made once
    plain = GemmQuantizers(one, one)
    return GemmOperands(plain, plain, plain)
