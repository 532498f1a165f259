"""The linear layer's math, forward and backward, once for the whole library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_lite.functional.layer import PLAIN, Backward, Call, as_matrix, as_operand, as_output, run_layer
from te_lite.functional.plan import LinearPlan
from te_lite.functional.saved import not_before
from te_lite.ops.cast import transform
from te_lite.ops.nvtx import ranged
from te_lite.ops.recorder import OPEN
from te_lite.ops.source import Source, SumDtype, plain
from te_lite.overlap.epilogues import Epilogue, GemmInput
from te_lite.overlap.exchange import Gemm
from te_lite.quantize.qtensor import QTensor

# What a linear keeps for backward: its quantized input (a shard where the exchange gathers it again), or None where no
# weight gradient is wanted or x itself is kept; the quantized weight, cached or its col layout. Of either perhaps just
# the seed to quantize it again.
Kept = tuple[QTensor | None, QTensor | None]
Needs = tuple[bool, bool, SumDtype]  # of linear_backward
# A gradient y[M, N] quantized: for dgrad, for wgrad, and its sums over tokens [N]; None where it is not wanted.
Grad = tuple[QTensor | None, QTensor | None, Tensor | None]


@ranged("te_lite.quantize")
def _quantize(
    plan: LinearPlan, x: GemmInput, weight: Tensor, need_w: bool, cached: QTensor | None, keeps_w: bool,
    for_dw: Source | None,
) -> tuple[QTensor, QTensor | None, QTensor]:  # fmt: skip
    """(x for fprop, what is kept of it for wgrad, the weight). The arguments are linear_forward's."""
    operands, by_row, kept = plan.operands, plan.keeps_rows, None
    keep = need_w and not plan.keep_original
    if isinstance(x, QTensor):
        q = x
    elif keep and not plan.x_is_wgrads:
        kept, _ = operands.wgrad.b.quantize(x if for_dw is None else for_dw, row=by_row, col=not by_row)
        q, _ = operands.fprop.a.quantize(x)
    else:
        q, _ = operands.fprop.a.quantize(x, row=True, col=keep and not by_row)
    if keep and kept is None:
        kept = q.only("row" if by_row else "col")
    if cached is not None:
        return q, kept, cached
    source = Source("plain", weight) if weight.is_contiguous() else plain(weight, name="weight")  # refuses it
    return q, kept, operands.fprop.b.quantize(source, row=True, col=keeps_w)[0]


def linear_forward(
    plan: LinearPlan, x: GemmInput, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool],
    cached: QTensor | None, epilogue: Epilogue | None = None, keeps_w: bool = False, residual: Tensor | None = None,
    for_dw: Source | None = None, x_again: bool = False,
) -> tuple[Any, Kept]:  # fmt: skip
    """y[M, N] = x[M, K] @ weight[N, K]^T + bias[N] + residual, over the plan's ranks; or the epilogue's result of y.

    needs: whether dx will be wanted, whether dw. cached: the quantized weight to use, or None. keeps_w: by
    plan.weight_bytes. residual[..., N]: of M rows. for_dw: x as wgrad's quantizer is to read it, where that is another
    than fprop's and x is written for it. x_again: keep x's seed alone, for backward quantizes x again.
    """
    (need_x, need_w), fprop = needs, plan.operands.fprop
    need_w = need_w and not (x_again and plan.x_leaves_seed)
    xq, kept, wq = _quantize(plan, x, weight, need_w, cached, keeps_w, for_dw)
    if x_again:
        kept = (kept or xq).seed_only()
    bias = None if bias is None else bias.to(plan.dtype).contiguous()
    residual = None if residual is None else as_matrix(residual, plan.dtype)
    gemm = Gemm(wq, "row", plan.dtype, fprop.fast_accum, "te_lite.fprop", bias, residual, epilogue)
    y = plan.parallel.forward(gemm, xq)
    if not need_x:
        return y, (kept, None)
    if keeps_w:
        return y, (kept, wq.only("col"))
    return y, (kept, wq.seed_only() if cached is None else wq)


@ranged("te_lite.quantize")
def quantize_grad(plan: LinearPlan, dy: Tensor | GemmInput, columns: int, needs: Needs) -> Grad:
    """dy as linear_backward takes it. columns: of dx. needs: as there.

    A copy of what autograd gave is free again when this returns, before the products."""
    need_x, need_w, sums_in = needs
    if isinstance(dy, Tensor):
        dy = as_operand(dy, plan, grad=True)
    if isinstance(dy, QTensor):
        return dy, dy, dy.dequantize().sum(0, dtype=torch.float32).to(sums_in) if sums_in else None
    if not (need_x or need_w):
        return None, None, transform(dy, bias_grad=sums_in).bias_grad if sums_in else None
    quantizer, for_wgrad = plan.operands.dgrad.a, plan.operands.wgrad.a
    by_row = plan.gathers_dy and for_wgrad.format.col_from_row  # the gathered rows give the col layout
    if plan.dy_is_wgrads:
        wants = plan.parallel.wants_columns
        col = not by_row or (need_x and wants(quantizer.format, dy.rows, dy.cols, columns))
        both, sums = quantizer.quantize(dy, row=need_x or by_row, col=need_w and col, bias_grad=sums_in)
        return both, both, sums
    q, sums = quantizer.quantize(dy, bias_grad=sums_in) if need_x else (None, None)
    if not need_w:
        return q, None, sums
    q_w, sums_w = for_wgrad.quantize(dy, row=by_row, col=not by_row, bias_grad=sums_in if q is None else None)
    return q, q_w, sums_w if q is None else sums


@ranged("te_lite.quantize")
def _weight_for_dgrad(plan: LinearPlan, kept: Any, weight: Tensor, dq: Any) -> QTensor:
    quantizer, same = plan.operands.dgrad.b, plan.w_is_dgrads
    if kept.col is not None or (same and kept.row is not None):
        return kept
    source = Source("plain", weight.contiguous())
    if plan.compiled and kept.seed is not None and dq.row_scale is not None:
        kept = replace(kept, seed=not_before(dq.row_scale.view(-1)[:1], kept.seed))
    return quantizer.again(source, kept) if same else quantizer.quantize(source, row=False, col=True)[0]


def linear_backward(
    plan: LinearPlan, kept: Kept, weight: Tensor, param: Tensor, grad: Grad, needs: Needs,
    epilogue: Epilogue | None = None,
) -> tuple[Any, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx[M, K] = dy @ weight, dw[N, K] = dy^T @ x by the plan's sink, db[N] = sum of dy over tokens, see Grad).

    weight: its values, as saved; only for dx. param: the parameter itself, whose gradient dw is. grad: dy, by
    quantize_grad(). needs: whether dx, whether dw, and the dtype of db. epilogue: of dx, whose result is then
    in its place.
    """
    (need_x, need_w, _), (x, w), (dq, dq_wgrad, db) = needs, kept, grad
    if not (need_x or need_w):
        return None, None, db
    dgrad = wgrad = None
    if need_x:
        wq = _weight_for_dgrad(plan, w, weight, dq)
        dgrad = Gemm(wq, "col", plan.dtype, plan.operands.dgrad.fast_accum, "te_lite.dgrad", None, None, epilogue)
    if need_w:
        wgrad = partial(plan.put_wgrad, param)
    return *plan.parallel.backward(dgrad, wgrad, dq, dq_wgrad, x), db


def sum_dtypes(call: Call, *biases: Tensor | None) -> list[SumDtype]:
    """The dtypes of the biases' gradients; None for one that is not wanted."""
    found: list[SumDtype] = []
    for bias in biases:  # no comprehension: a call in Python 3.11
        found.append(bias.dtype if call.grad and bias is not None and bias.requires_grad else None)
    return found


class LinearLayer:
    """y[..., N] = x[..., K] @ weight[N, K]^T + bias[N] + residual[..., N]."""

    weights = ((1, 3),)

    def needs(self, call: Call, x: Tensor, params: Sequence[Any]) -> Needs:
        """Which gradients are wanted: of x, the weight and the bias; for the bias its dtype or None."""
        weight, bias, _ = params
        return call.grad and x.requires_grad, call.grad and weight.requires_grad, sum_dtypes(call, bias)[0]

    def forward(self, call: Call, needs: Needs, x: Tensor, params: Sequence[Any]) -> tuple[Any, ...]:
        (plan,), (cached,), (weight, bias, residual) = call.plans, call.cached, params
        operand = as_operand(x, plan, grad=False)
        if plan.shared is not None and OPEN.recorder is None and isinstance(operand, Source):
            shared, reader = plan.shared
            col = needs[1] and not plan.keep_original
            operand = shared.quantize(reader, x, operand, plan.operands.fprop.a, col)
        keeps_w = False
        if plan.weight_bytes < math.inf and cached is None and needs[0] and needs[1]:
            keeps_w = plan.weight_bytes <= plan.bytes_saved(x.numel() // x.shape[-1], x.shape[-1])
        y, kept = linear_forward(plan, operand, weight, bias, needs[:2], cached, None, keeps_w, residual)
        original = x if needs[1] and plan.keep_original else None
        if call.output is not None or x.dim() != 2:
            y = as_output(y, x.shape, call.output, plan)
        return y, None, *kept, weight if any(needs[:2]) else None, original

    def backward(self, back: Backward, kept: list[Any], dy: Tensor, dln: Tensor | None) -> tuple[Tensor | None, ...]:
        (plan,), (param,), needs = back.call.plans, back.call.weights, back.needs
        x, w, weight, original = kept
        if original is not None:  # it was kept in place of what wgrad reads of it
            quantizer = plan.operands.wgrad.b
            by_row = quantizer.format.col_from_row
            x, _ = quantizer.quantize(plain(as_matrix(original, plan.dtype)), row=by_row, col=not by_row)
        grad = quantize_grad(plan, dy, param.shape[1], needs)
        dx, dw, db = linear_backward(plan, (x, w), weight, param, grad, needs)
        if dx is not None and (back.call.grad_input is not None or len(back.x_shape) != 2):
            dx = as_output(dx, back.x_shape, back.call.grad_input)
        return dx, dw, db


LINEAR = LinearLayer()


def run_linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y. torch's own linear computes it where te_lite adds nothing to it, and its backward closes no pass of delayed
    scaling: the products are the same, and autograd's nodes take the host less time than a Function."""
    (plan,) = call.plans
    if call.closes_pass or not (plan.is_torchs and residual is None and _is_torchs(call, plan.dtype, x, weight, bias)):
        return run_layer(LINEAR, call, x, weight, bias, residual)
    matrix = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    y = torch.nn.functional.linear(matrix, weight, bias)
    plan.parallel.rows = y.shape[0]
    return as_output(y, x.shape)


def _is_torchs(call: Call, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call of a plan that is_torchs can be torch's too. A weight that is kept in its own precision is the
    weight itself. Hooks may belong to somebody who computes the call again, and then asks what it followed: Call's
    note, which a Function of te_lite holds."""
    plain = x.__class__ in PLAIN and weight.__class__ in PLAIN and x.is_contiguous() and not call.parts
    same = x.dtype == weight.dtype == dtype and (bias is None or bias.dtype == dtype)
    asked = call.output is not None or call.grad_input is not None
    return plain and same and not asked and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
