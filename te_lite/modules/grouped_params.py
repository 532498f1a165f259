"""Weights of a GroupedLinear that are kept quantized (te.quantized_model_init): one QuantizedTensor an expert."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn

from te_lite.functional.saved import backward_method, forward_method, without_amp
from te_lite.quantize.grouped import Operand, Rule
from te_lite.quantize.params import weight_quantizer
from te_lite.quantize.qtensor import Layout, TensorFormat
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.recipe import Recipe
from te_lite.tables import warn_once


class _Joined(torch.autograd.Function):
    """[G, N, K] of G weights; backward hands each its gradient. dequantized: with their numbers; else with a shape
    alone, which takes no memory."""

    @forward_method
    def forward(ctx: Any, dequantized: bool, *weights: QuantizedTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count, first = len(weights), weights[0]
        if dequantized:
            return torch.stack([weight.dequantize() for weight in weights])
        return torch.empty((), dtype=first.dtype, device=first.device).expand(ctx.count, *first.shape)

    @backward_method
    def backward(ctx: Any, dw: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *((None,) * ctx.count if dw is None else dw.unbind())


def all_quantized(weights: Sequence[Tensor]) -> TypeGuard[tuple[QuantizedTensor, ...]]:
    """Whether these are weights kept quantized; all are or none."""
    return isinstance(weights[0], QuantizedTensor)


def read_as_they_are(module: nn.Module, weights: Sequence[Tensor], rule: Rule, recipe: Recipe) -> bool:
    """Whether the GEMMs of this recipe, which run by `rule`, read the bytes that the weights hold. Warns where they
    quantize other bytes instead; RuntimeError where some weights are quantized and others not."""
    formats = [weight.q.format if isinstance(weight, QuantizedTensor) else None for weight in weights]
    kept = [format for format in formats if format is not None]
    if len(kept) not in (0, len(formats)):
        raise RuntimeError(
            "GroupedLinear with some of its weights quantized: they are one operand; quantize all or none, by "
            "quantized_model_init"
        )
    if not kept or rule.kind == "none":  # bf16, or sizes that fp8 does not take
        return False
    read = None
    with suppress(ValueError):  # each GEMM by a quantizer of its own
        read = weight_quantizer(recipe).format
    other = [format.label for format in kept if format != read]
    if other:
        warn_once(
            ref(module), f"{type(module).__name__}(name={module.name!r}) quantizes its weights anew in each call by "
            f"{recipe.name!r}: they are kept in {other[0]}, another format than that of its GEMMs; use the recipe of "
            "quantized_model_init"
        )  # fmt: skip
    return not other


def join_quantized(weights: tuple[QuantizedTensor, ...], dequantized: bool) -> Tensor:
    """[G, N, K] in the weights' dtype, through which they get their gradients. dequantized: with their numbers, for
    GEMMs that quantize them anew or not at all; else without, for GEMMs that read operands()."""
    made: Any = _Joined.apply(dequantized, *weights)
    return made


@without_amp  # which would have stacked bytes in another dtype
def operands(weights: Sequence[QuantizedTensor], rule: Rule, grad: bool) -> tuple[Operand, Operand]:
    """quantize/grouped.py's weights_for_both of what the weights hold: a copy of their bytes, expert behind expert.
    grad: x gets a gradient, which the second is for; else that is empty."""
    return _stacked(weights, rule, "row"), _stacked(weights, rule, "col") if grad else Operand(torch.empty(0))


def _stacked(weights: Sequence[QuantizedTensor], rule: Rule, layout: Layout) -> Operand:
    held = []
    for weight in weights:  # which holds the layout from now on
        weight.update_usage(rowwise_usage=True, columnwise_usage=layout == "col" or None)
        held.append(weight.q)
    if rule.kind == "mx":  # multiplied in high precision
        format: TensorFormat = held[0].format
        return Operand(torch.stack([format.dequantize(q, layout) for q in held]))
    data, scales = zip(*[q.operand(layout) for q in held], strict=True)
    inverse = torch.stack(scales)
    return Operand(torch.stack(data), inverse.flatten() if rule.kind == "group" else inverse)  # [G]: one each
