"""Norm, then linear."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_lite.functional.linear import (
    Call,
    Kept,
    as_matrix,
    as_operand,
    as_output,
    close_pass,
    in_dtype,
    leading_shape,
    linear_backward,
    linear_forward,
)
from te_lite.functional.norm import NormSpec, norm_source
from te_lite.functional.saved import load, save, without_amp
from te_lite.ops.norm import norm_backward
from te_lite.ops.nvtx import nvtx_range
from te_lite.overlap.collective import all_gather, reduce_scatter


def norm_output(y: Tensor, gather: dist.ProcessGroup | None) -> Tensor:
    """The norm's output for the caller, y in x's shape; gathered along its first dimension over `gather` when given."""
    return y if gather is None else all_gather(y, gather)


def norm_grad(
    ctx: Any, saved: list[Tensor | None], dln: Tensor | None, dln_out: Tensor | None
) -> tuple[Tensor | None, ...]:
    """(dx, dgamma, dbeta) from the linear's input gradient `dln` plus the gradient `dln_out` of the returned output.

    saved: x, mean, rstd, gamma, beta; None each where nothing below wants a gradient, which gives None."""
    x, mean, rstd, gamma, beta = saved
    if x is None:
        return None, None, None
    if dln_out is not None:
        dln_out = as_matrix(dln_out, x.dtype)
        dln_out = dln_out if ctx.gather is None else reduce_scatter(dln_out, ctx.gather)
        dln = dln_out if dln is None else dln + dln_out
    with nvtx_range("te_lite.norm_backward"):
        dx, dgamma, dbeta = norm_backward(dln, x, mean, rstd, gamma, ctx.spec.zero_centered)
    dx = as_output(dx, tuple(ctx.x_shape), ctx.call.grad_input).to(ctx.x_dtype)
    return dx, in_dtype(dgamma, gamma), None if beta is None else in_dtype(dbeta, beta)


class LayerNormLinearFunction(torch.autograd.Function):
    """y = norm(x) @ weight^T + bias; also norm(x) itself when return_norm, gathered over `gather` when given."""

    @staticmethod
    @without_amp
    def forward(
        ctx: Any,
        call: Call,
        spec: NormSpec,
        return_norm: bool,
        gather: dist.ProcessGroup | None,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        (plan,) = call.plans
        flat = as_matrix(x, plan.dtype)
        below = x.requires_grad or gamma.requires_grad or (beta is not None and beta.requires_grad)
        need_w, need_ln = call.grad and weight.requires_grad, call.grad and below
        made, mean, rstd, ln = norm_source(spec, plan, flat, gamma, beta, tuple(x.shape) if return_norm else None)
        y, kept = linear_forward(plan, made, weight, bias, keep_x=need_w, keep_w=need_ln, cached_weight=call.cached[0])
        if call.grad:
            norm_saved = (flat, mean, rstd, gamma, beta) if need_ln else (None,) * 5
            save(ctx, kept.x, kept.w, weight if need_ln or need_w else None, bias, *norm_saved)
            ctx.call, ctx.spec, ctx.gather, ctx.needs = call, spec, gather, (need_ln, need_w)
            ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        out = as_output(y, (*leading_shape(x, plan.tp), y.shape[-1]), call.output)
        return out, norm_output(ln, gather) if return_norm else None

    @staticmethod
    @once_differentiable
    @without_amp
    def backward(ctx: Any, dy: Tensor | None, dln_out: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (need_ln, need_w) = ctx.call, ctx.needs
        (plan,) = call.plans
        x, w, weight, bias, *norm_saved = load(ctx)
        dln, dw, db = linear_backward(
            plan,
            Kept(x, w),
            weight,
            call.weights[0],
            as_operand(dy, plan, plan.operands.dgrad.a, plan.tp.gathers_grad),
            need_x=need_ln,
            need_w=need_w,
            need_b=bias is not None and ctx.needs_input_grad[8],
        )
        below = norm_grad(ctx, norm_saved, dln, dln_out)
        close_pass(call)
        return None, None, None, None, *below, dw, in_dtype(db, bias)
