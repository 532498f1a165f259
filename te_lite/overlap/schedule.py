"""Schedules: who communicates what, and when, for one linear's whole forward and backward.

A schedule is handed the GEMMs as functions of quantized tensors and owns every byte that travels between ranks. The
program of a linear without communication is `Local`; `Collective` (collective.py) is the specification with it, and
`Overlapped` (overlapped.py) hides it behind the GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.ops.activation import Activation
from te_lite.ops.cast import amax, transform
from te_lite.ops.nvtx import nvtx_range
from te_lite.ops.source import Source, act, dact
from te_lite.quantize.qtensor import Layout, QTensor, TensorFormat, matmul
from te_lite.quantize.quantizer import Quantizer


@dataclass(slots=True)
class Activated:
    """v = activation(a GEMM's product), or with h[M, 2F] the gradient of h where the product is that of activation(h):
    what the GEMM may compute at its end as `quantizer` wants it.

    want: "high precision", "amax" or "fp8", see ops/gemm_gather.py. result: what the next linear takes for v, set by
    the GEMM if it did. some_scale: fp32 [1], where only the time counts: no state of the quantizer is touched.
    """

    quantizer: Quantizer
    want: str
    activation: Activation
    h: Tensor | None = None
    result: Source | QTensor | None = None
    some_scale: Tensor | None = None

    def source(self, product: Tensor) -> Source:
        """v, to be computed from the product."""
        return act(product, self.activation) if self.h is None else dact(product, self.h, self.activation)

    def apart(self, product: Tensor) -> None:
        """What the GEMM spares, by kernels of its own, to be timed."""
        source = self.source(product)
        if self.want == "high precision":
            transform(source, hp_dtype=product.dtype)
        elif self.want == "amax":
            amax(source)
        else:
            fp8 = self.quantizer.format.dtype
            transform(source, fp8_dtype=fp8, row=True, col=True, scale=self.some_scale)


@dataclass(slots=True)  # frozen takes thrice as long to make
class Product:
    """A GEMM with its second operand in place: product(a) = a.row[M, k] @ b^T[k, n] (+ bias[n]), in `dtype`.

    b_layout: the layout of b whose last dimension is k. label: of its range in profilers. sum_bias[n], residual: what a
    schedule that sums products over ranks adds to the sum, of whose shape residual is. then: an activation of the
    product that may be computed with it.
    take_slots(slots, own, rank): what may take the place of reduce_slots where the sum is the last thing a schedule
    does; its result is then handed on in place of the sum.
    """

    b: QTensor
    b_layout: Layout
    dtype: torch.dtype
    bias: Tensor | None
    fast_accum: bool
    label: str
    sum_bias: Tensor | None = None
    residual: Tensor | None = None
    then: Activated | None = None
    take_slots: Callable[[Tensor, Tensor, int], Any] | None = None

    @property
    def columns(self) -> int:
        """n."""
        return self.b.shape[0 if self.b_layout == "row" else 1]

    def __call__(self, a: QTensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The product, in another dtype where one is given; written to `out` where that is given."""
        with nvtx_range(self.label):
            return matmul(a, "row", self.b, self.b_layout, dtype or self.dtype, self.bias, self.fast_accum, out)


Gradients = tuple[Tensor | None, Tensor | None]  # dx of this rank, whatever wgrad returned


class Backward(NamedTuple):
    """What a linear's backward is made of. dy_wgrad is dy itself unless wgrad uses another number format.

    dgrad(dy) is dy.row @ w.col^T, wgrad(dy, x) is dy.col @ x.col^T; None where that gradient is not wanted.
    """

    dgrad: Product | None
    wgrad: Callable[[QTensor, QTensor], Tensor | None] | None
    dy: QTensor | None
    dy_wgrad: QTensor | None
    x: QTensor | None

    @property
    def one_gather(self) -> bool:
        """Whether the rows of dy that are gathered for dgrad serve wgrad too."""
        return self.wgrad is not None and self.dy_wgrad is self.dy and self.dy.format.col_from_row


class Note(NamedTuple):
    """What a GEMM's communication was like in the newest call. sent: bytes that this rank sent to others."""

    method: str
    sent: int
    reason: str = ""


class Schedule:
    """For the report: name, of what a GEMM that has not run will do, methods of GEMMs that will do another; remarks on
    GEMMs; and of the newest call notes of its GEMMs, rows: M of the forward GEMM.
    """

    name: str

    def __init__(self) -> None:
        self.notes: dict[str, Note] = {}
        self.methods: Mapping[str, str] = {}
        self.remarks: Mapping[str, str] = {}
        self.rows = 0

    def gathers_columns(self, format: TensorFormat, rows: int, width: int, columns: int) -> bool:
        """Whether dy[rows, width] of this rank had better be quantized by column too, to be gathered so for wgrad.
        columns: of dx."""
        return False

    def fprop(self, gemm: Product, x: QTensor) -> Tensor:
        """y of this rank from x of this rank; gemm(x) is x.row @ w.row^T."""
        raise NotImplementedError

    def backward(self, of: Backward) -> Gradients:
        """dx and dw from dy and x of this rank."""
        raise NotImplementedError


class Local(Schedule):
    """No communication."""

    name = "local"

    def fprop(self, gemm: Product, x: QTensor) -> Tensor:
        return gemm(x)

    def backward(self, of: Backward) -> Gradients:
        dx = None if of.dgrad is None else of.dgrad(of.dy)
        dw = None if of.wgrad is None else of.wgrad(of.dy_wgrad, of.x)
        return dx, dw
