"""Epilogues: what becomes of a GEMM's product. A value that always runs, and whose result is what the GEMM gives.

Calling an epilogue is the unfused program. A kernel that computes the same beside the GEMM is asked for it by
capability: `want` for those of ops/gemm_gather.py, `of_slots` for a sum that is read where ranks have left its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_lite.ops.activation import Activation
from te_lite.ops.cast import amax, transform
from te_lite.ops.reduce import reduce_slots
from te_lite.ops.source import Source
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Quantizer

GemmInput = Source | QTensor  # what is quantized for the next GEMM, or is already


class Epilogue:
    """What becomes of a product[M, n], or of the sum of products over ranks."""

    want = ""  # what a kernel may leave in place of the product, see Wanted in ops/gemm_gather.py; "": nothing

    def __call__(self, product: Tensor) -> Any:
        raise NotImplementedError

    def of_slots(self, slots: Tensor, own: Tensor, rank: int) -> Any:
        """The result for a sum over ranks that is still in parts, slots[R, M, n] and own[M, n], as ops/reduce.py adds
        them."""
        return self(reduce_slots(slots, own, None, rank, slots.dtype, None))


@dataclass(slots=True)
class Activate(Epilogue):
    """(product h[M, 2F] or [M, F], v = activation(h)[M, F] as `quantizer` takes it for the next GEMM).

    h: that of an ActivateGrad. some_scale: fp32 [1], where only the time counts: no state of the quantizer is touched.
    col: v is wanted by column too, should a kernel quantize it.
    """

    quantizer: Quantizer
    activation: Activation
    want: str = ""
    h: Tensor | None = None
    some_scale: Tensor | None = None
    col: bool = True

    def __call__(self, product: Tensor) -> tuple[Tensor, GemmInput]:
        return product, Source("act", product, activation=self.activation)

    def source(self, product: Tensor) -> Source:
        """v, to be computed from the product."""
        return Source("act", product, activation=self.activation)

    def given(self, product: Tensor | None, v: GemmInput) -> Any:
        """The result where a kernel has computed v."""
        return product, v


class ActivateGrad(Activate):
    """v = the gradient of h, where the product is that of activation(h), as `quantizer` takes it for the next GEMMs."""

    h: Tensor

    def __call__(self, product: Tensor) -> Any:
        return Source("dact", self.h, product, activation=self.activation)

    source = __call__

    def given(self, product: Tensor | None, v: GemmInput) -> Any:
        return v


def run_unfused(epilogue: Activate, v: GemmInput) -> None:
    """What is left of the epilogue's `want` where its result is v, by kernels of its own, to be timed."""
    if not isinstance(v, Source) or v.kind == "plain" or v.amax is not None:
        return  # a kernel has computed it
    if epilogue.want == "high precision":
        transform(v, hp_dtype=v.dtype)
    elif epilogue.want == "amax":
        amax(v)
    else:
        format: Any = epilogue.quantizer.format  # an Fp8Format
        transform(v, fp8_dtype=format.dtype, row=True, col=epilogue.col, scale=epilogue.some_scale)
