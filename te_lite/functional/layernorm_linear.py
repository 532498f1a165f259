"""Norm, then linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_lite.functional.linear import Call, as_output, linear_backward, linear_forward, quantize_grad, residual_grad
from te_lite.functional.norm import NO_GRADIENTS, NormGrad, NormSpec, norm_output, norm_source
from te_lite.functional.saved import backward_method, forward_method, load, save


class LayerNormLinearFunction(torch.autograd.Function):
    """y = norm(x) @ weight^T + bias; also norm(x) itself where the spec says so."""

    @forward_method
    def forward(ctx: Any, call: Call, spec: NormSpec, x: Tensor, *params: Any) -> tuple[Tensor, Tensor | None]:
        (plan,), (gamma, beta, weight, bias, residual) = call.plans, params
        need_w = call.grad and weight.requires_grad
        operand, for_dw, norm_saved, ln = norm_source(spec, call, x, gamma, beta, need_w)
        needs = bool(norm_saved), need_w
        saved = plan.bytes_saved(x.numel() // x.shape[-1], x.shape[-1]) if need_w and not spec.returned else 0
        keeps_w = needs[0] and plan.keeps_weight(saved, weight, call.cached[0])
        y, kept = linear_forward(plan, operand, weight, bias, needs, call.cached[0], None, keeps_w, residual, for_dw)
        if call.grad:
            save(ctx, *kept, weight if any(needs) else None, *norm_saved)
            ctx.call, ctx.spec, ctx.needs, ctx.x_shape = call, spec, needs, x.shape
        return as_output(y, x.shape, call.output, plan), norm_output(spec, call, ln)

    @backward_method
    def backward(ctx: Any, dy: Tensor, dln_out: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (need_ln, need_w), grads = ctx.call, ctx.needs, ctx.needs_input_grad
        (plan,) = call.plans
        x, w, weight, *norm_saved = load(ctx)
        needs, param = (need_ln, need_w, grads[6]), call.weights[0]
        norm_grad = NormGrad(ctx, norm_saved, dln_out) if need_ln else None
        grad = quantize_grad(plan, dy, param.shape[1], needs)
        dx, dw, db = linear_backward(plan, (x, w), weight, param, grad, needs, norm_grad)
        if call.pools is not None:
            call.pools.close(call.first)
        return None, None, *(dx or NO_GRADIENTS), dw, db, residual_grad(dy) if grads[7] else None
