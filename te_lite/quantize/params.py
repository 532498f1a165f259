"""Quantized parameters: the quantizer that a recipe gives to weights which are kept quantized."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from te_lite.ops.source import plain
from te_lite.parallel import TensorParallel
from te_lite.quantize.per_tensor import FORMATS, Current
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import GemmOperands, Quantizer, Site, operands_for
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.recipe import DelayedScaling, Recipe


def weight_quantizer(recipe: Recipe) -> Quantizer:
    """The one quantizer through which every GEMM of `recipe` reads a weight.

    Delayed scaling: the weight's own amax each time that it is written, since its scale must fit these very numbers.
    Raises ValueError for a recipe that has no such quantizer.
    """
    if isinstance(recipe, DelayedScaling):
        return Current(FORMATS[recipe.fp8_format.forward_dtype])
    reason = "its quantizers are the user's own" if recipe.custom() else ""
    if not reason:
        operands = operands_for(recipe, Site(0, torch.bfloat16, TensorParallel(), lambda direction: None, None))
        in_fprop, in_dgrad = operands.fprop.b, operands.dgrad.b
        if in_fprop == in_dgrad and in_fprop.format.label:
            return in_fprop
        reason = "its GEMMs read weights in high precision or each through a quantizer of its own"
    raise ValueError(
        f"quantized_model_init(recipe={recipe.name!r}): {reason}, so no quantized weight serves all of them; keep "
        "parameters in high precision, or choose another recipe"
    )


def reads_own_bytes(weight: Tensor, operands: GemmOperands) -> TypeGuard[QuantizedTensor]:
    """Whether `weight` is a quantized parameter in the very format that fprop reads."""
    return isinstance(weight, QuantizedTensor) and operands.fprop.b.format == weight.q.format


def parameter_operand(weight: Tensor, operands: GemmOperands, grad: bool, in_graph: bool = False) -> QTensor | None:
    """A quantized parameter as the GEMMs take it, None for any other.

    Its own bytes where fprop reads it in its format, else its numbers quantized for this call. in_graph: the parameter
    stays as it is, and backward makes the columnwise data that it lacks.
    """
    if not isinstance(weight, QuantizedTensor):
        return None
    if reads_own_bytes(weight, operands):
        late = in_graph and weight.q.format.col_from_row
        weight.update_usage(rowwise_usage=True, columnwise_usage=(grad and not late) or None)
        return replace(weight.q) if in_graph else weight.q
    return operands.fprop.b.quantize(plain(weight.dequantize().detach()), row=True, col=grad)[0]
