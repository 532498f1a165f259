"""Norm, linear, activation, linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_lite.functional.linear import (
    Call,
    as_operand,
    as_output,
    close_pass,
    in_dtype,
    linear_backward,
    linear_forward,
    quantize_grad,
)
from te_lite.functional.norm import NormSpec, norm_grad, norm_output, norm_source, norm_take
from te_lite.functional.plan import LinearPlan
from te_lite.functional.saved import backward_method, forward_method, load, save
from te_lite.ops.activation import Activation
from te_lite.ops.source import act, dact
from te_lite.overlap.schedule import Activated
from te_lite.quantize.quantizer import Quantizer


def _then(
    plan: LinearPlan, of: Quantizer, wgrads: Quantizer, activation: Activation, both: bool, h: Tensor | None = None
) -> Activated | None:
    """What the GEMM before may compute of what `of` quantizes for `plan`: of its linear's input, or, with h, of the
    gradient of its output h. wgrads: the quantizer for wgrad. both: rows and columns will be wanted, as fp8 comes."""
    want = of.wants_from_gemm(plan.dtype) if activation.fused and of is wgrads else ""
    return Activated(of, want, activation, h) if want and (both or want != "fp8") else None


class LayerNormMLPFunction(torch.autograd.Function):
    """h = norm(x) @ w1^T + b1;  y = activation(h) @ w2^T + b2 + residual; also norm(x) itself where the spec says so.

    Kept for backward: x and the norm's statistics, norm(x) as fc1's GEMM read it, h, activation(h) as fc2's GEMM read
    it. The gradient of h is never written in high precision under fp8: it is quantized as it is computed.
    """

    @forward_method
    def forward(
        ctx: Any, call: Call, spec: NormSpec, activation: Activation, x: Tensor, *params: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        (plan1, plan2), (gamma, beta, w1, b1, w2, b2, residual) = call.plans, params
        need_w1, need_w2 = call.grad and w1.requires_grad, call.grad and w2.requires_grad
        made, for_dw, norm_saved, ln = norm_source(spec, call, x, gamma, beta, need_w1)
        need_ln = bool(norm_saved)
        need_h = need_ln or need_w1 or (call.grad and b1 is not None and b1.requires_grad)
        then = _then(plan2, plan2.operands.fprop.a, plan2.operands.wgrad.b, activation, need_w2)
        tokens, ranks = x.numel() // x.shape[-1], plan1.tp.size if plan1.tp.gathers_input else 1
        saved = plan1.bytes_saved(tokens, x.shape[-1], need_w1 and not spec.returned)
        saved += plan2.bytes_saved(tokens * ranks, w2.shape[1], need_w2)
        keeps_w1 = plan1.keeps_weight(saved, w1, call.cached[0], need_ln)
        keeps_w2 = plan2.keeps_weight(saved - keeps_w1 * w1.numel(), w2, call.cached[1], need_h)
        h, kept1 = linear_forward(plan1, made, w1, b1, (need_ln, need_w1), call.cached[0], then, keeps_w1, None, for_dw)
        a = act(h, activation) if then is None or then.result is None else then.result
        y, kept2 = linear_forward(plan2, a, w2, b2, (need_h, need_w2), call.cached[1], None, keeps_w2, residual)
        if call.grad:
            save(ctx, *kept1, w1, b1, *kept2, w2, b2, h if need_h else None, *norm_saved)
            ctx.call, ctx.spec, ctx.activation = call, spec, activation
            ctx.needs, ctx.x_shape, ctx.x_dtype = (need_ln, need_w1, need_h, need_w2), x.shape, x.dtype
        return as_output(y, x.shape), norm_output(spec, call, ln)

    @backward_method
    def backward(ctx: Any, dy: Tensor | None, dln_out: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (need_ln, need_w1, need_h, need_w2) = ctx.call, ctx.needs
        plan1, plan2 = call.plans
        x1, q1, w1, b1, x2, q2, w2, b2, h, *norm_saved = load(ctx)
        grads = ctx.needs_input_grad
        needs, param2 = (need_h, need_w2, b2 is not None and grads[9]), call.weights[1]
        needs1 = need_ln, need_w1, b1 is not None and grads[7]
        then = None
        if need_h and not needs1[2]:  # a bias' gradient sums that of h over tokens, which no GEMM does
            of = plan1.operands
            then = _then(plan1, of.dgrad.a, of.wgrad.a, ctx.activation, need_ln and need_w1, h)
        grad = quantize_grad(plan2, as_operand(dy, plan2, grad=True), param2.shape[1], needs)
        da, dw2, db2 = linear_backward(plan2, (x2, q2), w2, param2, grad, needs, then=then)
        dln = dw1 = db1 = None
        if need_h:
            dh = dact(da, h, ctx.activation) if then is None or then.result is None else then.result
            take = norm_take(ctx, norm_saved, dln_out)
            grad = quantize_grad(plan1, dh, call.weights[0].shape[1], needs1)
            del da, dh  # the size of h, not needed beside the products
            dln, dw1, db1 = linear_backward(plan1, (x1, q1), w1, call.weights[0], grad, needs1, take)
        below = norm_grad(ctx, norm_saved, dln, dln_out)
        close_pass(call)
        dres = in_dtype(dy if grads[10] else None, dy)
        return None, None, None, *below, dw1, in_dtype(db1, b1), dw2, in_dtype(db2, b2), dres
