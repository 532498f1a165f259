"""Norm, linear, activation, linear."""

from __future__ import annotations

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
from te_lite.functional.plan import LinearPlan
from te_lite.functional.saved import backward_method, forward_method, load, save
from te_lite.ops.activation import Activation
from te_lite.ops.nvtx import ranged
from te_lite.ops.source import Source
from te_lite.overlap.epilogues import Activate, ActivateGrad
from te_lite.quantize.qtensor import QTensor


@ranged("te_lite.quantize")
def _grad_and_again(plan: LinearPlan, dh: Source, needs: tuple[bool, bool, bool], a: QTensor) -> Any:
    """(quantize_grad(plan, dh), a = activation(h) by column) from one read of h; a: what forward kept of it."""
    q, sums, a = plan.operands.dgrad.a.quantize_and_again(dh, *needs, a)
    return (q, q, sums), a


Needs = tuple[bool, bool, bool, bool]  # of gradients: the norm's, w1's, h's, w2's


def _forward(
    call: Call, spec: NormSpec, activation: Activation, needs: Needs, a_again: bool, x: Tensor, gamma: Tensor,
    beta: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, residual: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """(y[M, N], norm(x) where it is an output, what is kept). a_again: backward computes activation(h) again."""
    (plan1, plan2), (need_ln, need_w1, need_h, need_w2) = call.plans, needs
    operand, for_dw, norm_saved, ln = norm_source(spec, call, x, gamma, beta, need_w1)
    want = plan2.x_from_gemm if activation.fused else ""
    epilogue = Activate(plan2.operands.fprop.a, activation, want if need_w2 or want != "fp8" else "")
    tokens, width = x.numel() // x.shape[-1], w2.shape[1]
    saved = plan1.bytes_saved(tokens, x.shape[-1]) if need_w1 and not spec.returned else 0
    if need_w2 and not a_again:
        saved += plan2.bytes_saved(tokens * plan1.tp.size if plan1.gathers_x else tokens, width)
    keeps_w1 = need_ln and plan1.keeps_weight(saved, w1, call.cached[0])
    keeps_w2 = need_h and plan2.keeps_weight(saved - keeps_w1 * w1.numel(), w2, call.cached[1])
    (h, a), kept1 = linear_forward(
        plan1, operand, w1, b1, (need_ln, need_w1), call.cached[0], epilogue, keeps_w1, None, for_dw
    )
    y, kept2 = linear_forward(
        plan2, a, w2, b2, (need_h, need_w2), call.cached[1], None, keeps_w2, residual, x_again=a_again
    )
    return y, ln, *kept1, w1, *kept2, w2, h if need_h else None, *(norm_saved if need_ln else ())


def _backward(
    ctx: Any, kept: list[Any], dy: Tensor, dln_out: Tensor | None, need_b1: bool, need_b2: bool
) -> tuple[Any, ...]:
    """The gradients of x, gamma, beta, w1, b1, w2 and b2. kept: emptied, so that what is read for the last time is
    free."""
    call, (need_ln, need_w1, need_h, need_w2) = ctx.call, ctx.needs
    (plan1, plan2), (param1, param2) = call.plans, call.weights
    x1, q1, w1, a, q2, w2, h, *norm_saved = kept
    kept.clear()
    needs1 = need_ln, need_w1, need_b1
    activate_grad = norm_grad = dx = dw1 = db1 = None
    one_read = ctx.a_again and plan2.one_read and (need_ln or need_w1)
    if need_h:
        want = plan1.dy_from_gemm if ctx.activation.fused and not one_read else ""
        if needs1[2] or (want == "fp8" and not (need_ln and need_w1)):
            want = ""  # a bias' gradient sums that of h over tokens, which no GEMM does; fp8 comes in both layouts
        activate_grad = ActivateGrad(plan1.operands.dgrad.a, ctx.activation, want, h)
    grad: Any = quantize_grad(plan2, dy, param2.shape[1], (need_h, need_w2, need_b2))
    if ctx.a_again and not one_read:
        a = plan2.operands.wgrad.b.again(Source("act", h, activation=ctx.activation), a)
    needs = need_h, need_w2 and not one_read, need_b2
    dh, dw2, db2 = linear_backward(plan2, (a, q2), w2, param2, grad, needs, activate_grad)
    if one_read:
        grad1, a = _grad_and_again(plan1, dh, needs1, a)
    else:
        a = None  # where it was computed again, nobody else holds it
        grad1 = quantize_grad(plan1, dh, param1.shape[1], needs1) if need_h else None
    dh = activate_grad = h = None  # the size of h, not needed beside the products
    if one_read:
        _, dw2, _ = linear_backward(plan2, (a, None), w2, param2, grad, (False, True, False))
    a = grad = None
    if grad1 is not None:
        norm_grad = NormGrad(ctx, norm_saved, dln_out) if need_ln else None
        dx, dw1, db1 = linear_backward(plan1, (x1, q1), w1, param1, grad1, needs1, norm_grad)
    return *(dx or NO_GRADIENTS), dw1, db1, dw2, db2


class LayerNormMLPFunction(torch.autograd.Function):
    """h = norm(x) @ w1^T + b1;  y = activation(h) @ w2^T + b2 + residual; also norm(x) itself where the spec says so.

    Kept for backward: x and the norm's statistics, norm(x) as fc1's GEMM read it, h, a = activation(h) as fc2's GEMM
    read it; or just a's seed, where backward computes a again from h: before fc2's GEMMs, or where plan.one_read
    between them, as it computes the gradient of h. That is never written in high precision under fp8: it is quantized
    as it is computed.
    """

    @forward_method
    def forward(
        ctx: Any, call: Call, spec: NormSpec, activation: Activation, x: Tensor, *params: Any
    ) -> tuple[Tensor, Tensor | None]:
        gamma, beta, w1, b1, w2, *_ = params
        need_ln, need_w1 = norm_wanted(call, x, gamma, beta), call.grad and w1.requires_grad
        need_h = need_ln or need_w1 or (call.grad and b1 is not None and b1.requires_grad)
        needs = need_ln, need_w1, need_h, call.grad and w2.requires_grad
        a_again = need_h and needs[3] and call.plans[1].recomputes_x
        body = partial(_forward, call, spec, activation, needs, a_again, x, *params)
        if call.plans[0].recordings is None or x.__class__ not in PLAIN:
            y, ln, *kept = body()
        else:
            y, ln, *kept = recorded_forward(call, (needs, spec, activation), x, params, body)
        if call.grad:
            save(ctx, *kept)
            ctx.call, ctx.spec, ctx.activation, ctx.a_again = call, spec, activation, a_again
            ctx.needs, ctx.x_shape = needs, x.shape
        return as_output(y, x.shape), norm_output(spec, call, ln)

    @backward_method
    def backward(ctx: Any, dy: Tensor, dln_out: Tensor | None) -> tuple[Tensor | None, ...]:
        call, grads, (kept, saved) = ctx.call, ctx.needs_input_grad, load(ctx)
        (plan1, plan2), (param1, param2), needs = call.plans, call.weights, (grads[7], grads[9])
        body = partial(_backward, ctx, kept, dy, dln_out, *needs)
        records = plan1.recordings is not None and plan1.recordings.may_serve(dy)
        if not records or dy.__class__ is not Tensor or dln_out is not None:
            del saved
            dx, dgamma, dbeta, dw1, db1, dw2, db2 = body()
        else:
            decided = needs, ctx.needs, ctx.x_shape, ctx.spec, ctx.activation
            dx, dgamma, dbeta, dw1, db1, dw2, db2 = recorded_backward(call, decided, dy, saved, body)
        if ctx.needs[1] and plan1.sink.answers:
            dw1 = plan1.sink.answer(dw1, param1)
        if ctx.needs[3] and plan2.sink.answers:
            dw2 = plan2.sink.answer(dw2, param2)
        if call.pools is not None:
            call.pools.close(call.first)
        return None, None, None, dx, dgamma, dbeta, dw1, db1, dw2, db2, residual_grad(dy) if grads[10] else None
