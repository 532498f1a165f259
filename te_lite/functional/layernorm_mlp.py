"""Norm, linear, activation, linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_lite.functional.layernorm_linear import norm_grad, norm_output
from te_lite.functional.linear import (
    Call,
    Kept,
    as_matrix,
    as_operand,
    as_output,
    close_pass,
    in_dtype,
    linear_backward,
    linear_forward,
)
from te_lite.functional.norm import NormSpec, norm_source
from te_lite.functional.saved import load, save, without_amp
from te_lite.ops.source import act, dact


class LayerNormMLPFunction(torch.autograd.Function):
    """h = norm(x) @ w1^T + b1;  y = activation(h) @ w2^T + b2; also norm(x) itself when return_norm.

    Kept for backward: x and the norm's statistics, norm(x) as fc1's GEMM read it, h, activation(h) as fc2's GEMM read
    it. The gradient of h is never written in high precision under fp8: it is quantized as it is computed.
    """

    @staticmethod
    @without_amp
    def forward(
        ctx: Any,
        call: Call,
        spec: NormSpec,
        activation: str,
        return_norm: bool,
        gather: dist.ProcessGroup | None,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        plan1, plan2 = call.plans
        flat = as_matrix(x, plan1.dtype)
        need_ln = call.grad and any(t is not None and t.requires_grad for t in (x, gamma, beta))
        need_w1, need_w2 = call.grad and w1.requires_grad, call.grad and w2.requires_grad
        need_h = need_ln or need_w1 or (call.grad and b1 is not None and b1.requires_grad)
        made, mean, rstd, ln = norm_source(spec, plan1, flat, gamma, beta, tuple(x.shape) if return_norm else None)
        h, kept1 = linear_forward(plan1, made, w1, b1, keep_x=need_w1, keep_w=need_ln, cached_weight=call.cached[0])
        y, kept2 = linear_forward(
            plan2, act(h, activation), w2, b2, keep_x=need_w2, keep_w=need_h, cached_weight=call.cached[1]
        )
        if call.grad:
            norm_saved = (flat, mean, rstd, gamma, beta) if need_ln else (None,) * 5
            save(ctx, kept1.x, kept1.w, w1, b1, kept2.x, kept2.w, w2, b2, h if need_h else None, *norm_saved)
            ctx.call, ctx.spec, ctx.gather, ctx.activation = call, spec, gather, activation
            ctx.needs = (need_ln, need_w1, need_h, need_w2)
            ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        out = as_output(y, tuple(x.shape), None)
        return out, norm_output(ln, gather) if return_norm else None

    @staticmethod
    @once_differentiable
    @without_amp
    def backward(ctx: Any, dy: Tensor | None, dln_out: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (need_ln, need_w1, need_h, need_w2) = ctx.call, ctx.needs
        plan1, plan2 = call.plans
        x1, q1, w1, b1, x2, q2, w2, b2, h, *norm_saved = load(ctx)
        grads = ctx.needs_input_grad
        da, dw2, db2 = linear_backward(
            plan2,
            Kept(x2, q2),
            w2,
            call.weights[1],
            as_operand(dy, plan2, plan2.operands.dgrad.a, plan2.tp.gathers_grad),
            need_x=need_h,
            need_w=need_w2,
            need_b=b2 is not None and grads[11],
        )
        dln = dw1 = db1 = None
        if need_h:
            dln, dw1, db1 = linear_backward(
                plan1,
                Kept(x1, q1),
                w1,
                call.weights[0],
                dact(da, h, ctx.activation),
                need_x=need_ln,
                need_w=need_w1,
                need_b=b1 is not None and grads[9],
            )
        below = norm_grad(ctx, norm_saved, dln, dln_out)
        close_pass(call)
        return None, None, None, None, None, *below, dw1, in_dtype(db1, b1), dw2, in_dtype(db2, b2)
