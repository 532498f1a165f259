"""Norm, then linear."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_lite.functional.linear import (
    PLAIN,
    Call,
    as_output,
    linear_backward,
    linear_forward,
    quantize_grad,
    recorded_backward,
    recorded_forward,
    residual_grad,
)
from te_lite.functional.norm import NO_GRADIENTS, NormGrad, NormSpec, norm_output, norm_source, norm_wanted
from te_lite.functional.saved import backward_method, forward_method, load, save


def _forward(
    call: Call, spec: NormSpec, needs: tuple[bool, bool], x: Tensor, gamma: Tensor, beta: Tensor | None,
    weight: Tensor, bias: Tensor | None, residual: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """(y[M, N], norm(x) where it is an output, what is kept). needs: whether the norm's gradients will be wanted,
    whether the weight's."""
    (plan,), (need_ln, need_w) = call.plans, needs
    operand, for_dw, norm_saved, ln = norm_source(spec, call, x, gamma, beta, need_w)
    saved = plan.bytes_saved(x.numel() // x.shape[-1], x.shape[-1]) if need_w and not spec.returned else 0
    keeps_w = need_ln and plan.keeps_weight(saved, weight, call.cached[0])
    y, kept = linear_forward(plan, operand, weight, bias, needs, call.cached[0], None, keeps_w, residual, for_dw)
    return y, ln, *kept, weight if need_ln or need_w else None, *(norm_saved if need_ln else ())


def _backward(
    ctx: Any, param: Tensor, kept: Sequence[Any], dy: Tensor, dln_out: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Any, ...]:
    """The gradients of x, gamma, beta, weight and bias."""
    (plan,), (x, w, weight, *norm_saved) = ctx.call.plans, kept
    norm_grad = NormGrad(ctx, norm_saved, dln_out) if needs[0] else None
    grad = quantize_grad(plan, dy, param.shape[1], needs)
    dx, dw, db = linear_backward(plan, (x, w), weight, param, grad, needs, norm_grad)
    return *(dx or NO_GRADIENTS), dw, db


class LayerNormLinearFunction(torch.autograd.Function):
    """y = norm(x) @ weight^T + bias; also norm(x) itself where the spec says so."""

    @forward_method
    def forward(ctx: Any, call: Call, spec: NormSpec, x: Tensor, *params: Any) -> tuple[Tensor, Tensor | None]:
        (plan,), (gamma, beta, weight, *_) = call.plans, params
        needs = norm_wanted(call, x, gamma, beta), call.grad and weight.requires_grad
        body = partial(_forward, call, spec, needs, x, *params)
        if plan.recordings is None or x.__class__ not in PLAIN:
            y, ln, *kept = body()
        else:
            y, ln, *kept = recorded_forward(call, (needs, spec), x, params, body)
        if call.grad:
            save(ctx, *kept)
            ctx.call, ctx.spec, ctx.needs, ctx.x_shape = call, spec, needs, x.shape
        return as_output(y, x.shape, call.output, plan), norm_output(spec, call, ln)

    @backward_method
    def backward(ctx: Any, dy: Tensor, dln_out: Tensor | None) -> tuple[Tensor | None, ...]:
        call, grads, (kept, saved) = ctx.call, ctx.needs_input_grad, load(ctx)
        (plan,), (param,) = call.plans, call.weights
        needs = *ctx.needs, grads[6]
        body = partial(_backward, ctx, param, kept, dy, dln_out, needs)
        if plan.recordings is None or dy.__class__ is not Tensor or dln_out is not None or call.grad_input is not None:
            dx, dgamma, dbeta, dw, db = body()
        else:
            dx, dgamma, dbeta, dw, db = recorded_backward(call, (needs, ctx.x_shape, ctx.spec), dy, saved, body)
        if needs[1] and plan.sink.answers:
            dw = plan.sink.answer(dw, param)
        if call.pools is not None:
            call.pools.close(call.first)
        return None, None, dx, dgamma, dbeta, dw, db, residual_grad(dy) if grads[7] else None
