"""The contract of a quantizer, and the table of quantizers that one linear uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite import epoch
from te_lite.ops.norm import Formula
from te_lite.ops.source import Source, SumDtype
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor, TensorFormat
from te_lite.recipe import HighPrecision, Recipe

Quantized = tuple[QTensor, Tensor | None]  # and the column sums of the values, where they were asked for
Both = tuple[QTensor, Tensor | None, Any]  # and another QTensor from the same read


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Turns what a Source produces, v[M, K], into a QTensor. A value: the layouts wanted are arguments.

    format: the number format of the result.
    fused: quantize() reads any Source in one pass, so that v itself never needs to exist in memory.
    needs_amax: a pass that computes v's statistics anyway should leave partial maxima in Source.amax.
    from_gemm: what a GEMM should leave of v where it can, see Wanted in ops/gemm_gather.py; "": nothing.
    recordable: in a class' own body: quantize() and again() run te_lite's ops alone, chosen by shapes and dtypes.
    """

    from_gemm: ClassVar[str] = ""
    recordable: ClassVar[bool] = False

    format: TensorFormat
    fused: bool = False
    needs_amax: bool = False

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        """(quantized v; column sums of v [K], added in fp32, in the dtype bias_grad, None where that is None)."""
        raise NotImplementedError

    def take_scale(self) -> tuple[Tensor, Tensor | None]:
        """Where from_gemm is "fp8": (scale, fp32 [1] to take the amax into) of what will be quantized now."""
        raise NotImplementedError

    def wants_from_gemm(self, dtype: torch.dtype) -> str:
        """from_gemm, where this quantizer's quantize() would give just that of values in `dtype`; else ""."""
        defined = [next(c for c in type(self).__mro__ if name in vars(c)) for name in ("from_gemm", "quantize")]
        return self.from_gemm if defined[0] is defined[1] else ""

    def norm_rows(self, x: Tensor, *formula: *Formula) -> tuple[QTensor, Tensor | None, Tensor] | None:
        """(norm of x[M, K] quantized by row, its mean, its rstd) from one read of x, the bits of quantize() after
        norm_stats(x, *formula, False); None where that takes two."""
        return None

    def again(self, source: Source, earlier: QTensor) -> QTensor:
        """The col layout that quantize() would have given with `earlier`, from the same source; bit for bit the numbers
        of `earlier` where format.col_from_row."""
        return self.quantize(source, row=False, col=True)[0]

    def quantize_for_all(self, source: Source, col: bool) -> tuple[QTensor, Any]:
        """(quantize() by row and where `col` by column; what adopts() of others takes with it)."""
        return self.quantize(source, row=True, col=col)[0], None

    def adopts(self, other: Quantizer, q: QTensor, noted: Any) -> bool:
        """Whether what `other` has made just now by quantize_for_all() serves in place of what quantize() would make of
        the same values; then what quantize() would note of them is noted."""
        return self == other

    def gives_again(self, x: Quantizer) -> bool:
        """Whether quantize_and_again() is there for what x quantized."""
        return False

    def quantize_and_again(self, grad: Source, row: bool, col: bool, bias_grad: SumDtype, x: QTensor) -> Both:
        """(*quantize(grad), again(activation of h, x)) from one read of h; grad: the gradient of an activation of h.
        again: of the quantizer that x was quantized by."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class GemmQuantizers:
    """Quantizers of one GEMM's two operands, and whether it may accumulate fast."""

    a: Quantizer
    b: Quantizer
    fast_accum: bool = False


@dataclass(frozen=True, slots=True)
class GemmOperands:
    """Which quantizer each operand of each GEMM uses: fprop (x, w), dgrad (dy, w), wgrad (dy, x).

    output, grad_input: quantizers of y and dx for callers who ask for fp8_output or fp8_grad; None: not offered.
    """

    fprop: GemmQuantizers
    dgrad: GemmQuantizers
    wgrad: GemmQuantizers
    output: Quantizer | None = None
    grad_input: Quantizer | None = None

    def labels(self, plain: str) -> tuple[str, str, str]:
        """Number formats of the operands of fprop, dgrad and wgrad, in words; plain: name of the high precision."""
        gemms = (self.fprop, self.dgrad, self.wgrad)
        fprop, dgrad, wgrad = (f"{g.a.format.label or plain} x {g.b.format.label or plain}" for g in gemms)
        return fprop, dgrad, wgrad


@dataclass(frozen=True, slots=True)
class Site:
    """Where a linear stands, for factories that turn a recipe into quantizers.

    gemm: index of the linear in its module. dtype: of the activations. state(direction): the ScaleState of
    the module, "forward" or "backward". calibrating: record statistics without quantizing.
    """

    gemm: int
    dtype: torch.dtype
    tp: TensorParallel
    state: Callable[[str], Any]
    amax_group: dist.ProcessGroup | None
    calibrating: bool = False


class Observer(Protocol):
    """Is shown the quantizers of every linear when its plan is built."""

    def watch(self, operands: GemmOperands, module: Any, linear: str) -> GemmOperands:
        """What is used in their place, with the same results. linear: its name in `module`."""


_observer: Observer | None = None


def observer() -> Observer | None:
    """Who observes this process just now."""
    return _observer


def observe(by: Observer | None) -> None:
    """From now on `by` observes, or nobody does; plans are built again."""
    global _observer
    _observer = by
    epoch.advance()


def operands_for(recipe: Recipe, site: Site) -> GemmOperands:
    """The quantizers of one linear under `recipe`, from the factory that the recipe names."""
    stateless = site.calibrating and not recipe.delayed()  # nothing to record
    return resolve_name((HighPrecision if stateless else recipe).factory)(recipe, site)
