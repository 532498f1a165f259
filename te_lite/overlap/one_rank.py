"""A GEMM and its epilogue in one launch where nothing is gathered, by the kernel of fused gathers.

Else cublasLt writes the product, and a pass reads it again to make the activation, or h's gradient, and to quantize it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.ops.gemm_gather import act_refusal
from te_lite.ops.nvrtc import unavailable
from te_lite.ops.registry import PLAIN, capturing
from te_lite.overlap.exchange import Gemm
from te_lite.overlap.fused import computes, multiplied, product_refusal, run_gather
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import GemmOperands, GemmQuantizers


class Span(NamedTuple):
    """Products of [M, K] and [N, K], from `least` M * N * K on and up to `deepest` K: a pass grows with M * N alone."""

    least: int = 1
    deepest: int = 1 << 62


# Where one kernel was faster than cublasLt and a pass on an H100, by what is wanted of the product and whether it is a
# gradient: lines of benchmarks/alone.py.
FASTER: Mapping[tuple[str, bool], Span] = {
    ("high precision", False): Span(962072674304, 8192),
    ("high precision", True): Span(481036337152, 4096),
    ("fp8", False): Span(962072674304, 8192),
    ("fp8", True): Span(481036337152, 4096),
    ("amax", False): Span(962072674304, 8192),
    ("amax", True): Span(481036337152, 4096),
}
ANYWHERE = {(want, grad): Span() for want in ("high precision", "amax", "fp8") for grad in (False, True)}
_BY_WORD: dict[str, Mapping[tuple[str, bool], Span]] = {"": FASTER, "0": {}, "1": ANYWHERE}


class FusedProduct:
    """What the kernel had better make of one of a linear's products: fprop's, or (grad) dgrad's."""

    def __init__(self, spans: Mapping[tuple[str, bool], Span], gemm: GemmQuantizers, grad: bool) -> None:
        fits = multiplied(gemm.a.format, gemm.b.format)
        self.spans = {want: span for (want, of), span in spans.items() if of == grad and fits}
        self._split, self._grad = bool(gemm.a.format.label) and not gemm.fast_accum, grad

    def __call__(self, want: str, m: int, n: int, k: int) -> str:
        """want, or "" where a pass of its own had better make it of the product of [m, k] and [n, k]."""
        span = self.spans.get(want)
        if span is None or m * n * k < span.least or k > span.deepest:
            return ""
        return "" if act_refusal(m, n, want, self._grad, self._split) else want


FusedProducts = tuple[FusedProduct, FusedProduct]  # of fprop, of dgrad


def fused_products(operands: GemmOperands, dtype: torch.dtype, device: torch.device) -> FusedProducts:
    """TE_LITE_EPILOGUES decides: 0 nowhere, 1 wherever the kernel can, else by FASTER."""
    word = os.environ.get("TE_LITE_EPILOGUES", "")
    if word not in _BY_WORD:
        raise ValueError(f"TE_LITE_EPILOGUES={word!r}: must be 0 or 1; leave it out for what measured faster")
    spans = _BY_WORD[word]
    if spans and (dtype == torch.float32 or unavailable(device)):
        spans = {}
    return FusedProduct(spans, operands.fprop, False), FusedProduct(spans, operands.dgrad, True)


# What _words() gives, by device and stream: of one stream a launch touches its words when the one before has ended.
_WORDS: dict[tuple[int, int], Tensor] = {}


def _words(device: torch.device) -> Tensor:
    """int32 [2]: a counter that the kernel leaves at zero, and a zero. A CUDA graph has its own: it may run beside
    others on any stream."""
    if capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    found = _WORDS.get(key)
    return _WORDS.setdefault(key, torch.zeros(2, dtype=torch.int32, device=device)) if found is None else found


def multiply(gemm: Gemm, a: QTensor) -> Any:
    """gemm(a); in one launch where its epilogue wants something of the product that the kernel makes."""
    row, b = a.operand("row")[0], gemm.b.operand(gemm.layout)[0]
    data = type(row) in PLAIN and type(b) in PLAIN  # not fake
    if not data or not computes(gemm, a) or product_refusal(gemm, a) or row.device.index != torch.cuda.current_device():
        return gemm(a)
    words: Any = _words(row.device)
    zero = words[1:]  # the only rank waits for nothing
    return run_gather(gemm, a, (), zero.view(1, 1), words[:1], zero, 0, zero, 0)  # type: ignore[arg-type]  # has rows
