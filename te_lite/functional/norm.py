"""LayerNorm and RMSNorm: alone, and in front of a linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_lite.functional.linear import Call, as_matrix, as_output, in_dtype
from te_lite.functional.saved import backward_method, forward_method
from te_lite.ops import source
from te_lite.ops.norm import norm_backward, norm_forward, norm_stats
from te_lite.ops.nvtx import nvtx_range
from te_lite.ops.source import Source
from te_lite.overlap.collective import all_gather, reduce_scatter
from te_lite.overlap.epilogues import Epilogue, Operand


@dataclass(frozen=True, slots=True)
class NormSpec:
    """y = (x - mean) * rstd * gamma + beta over the last dimension; rms: no mean, no beta; zero_centered: 1 + gamma.

    In front of a linear, returned: y is an output too; gathered: along its first dimension over the linear's group.
    """

    eps: float
    rms: bool
    zero_centered: bool
    returned: bool = False
    gathered: bool = False


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, gamma and beta


def norm_source(
    spec: NormSpec, call: Call, x: Tensor, gamma: Tensor, beta: Tensor | None, need_w: bool
) -> tuple[Operand, Source | None, tuple[Tensor | None, ...], Tensor | None]:
    """(what the linear reads, what its wgrad reads where y is written for that alone, what norm_grad needs, y[..., K]
    where it is an output, of this rank) of x[..., K].

    A fused quantizer normalises as it reads, so y is made only when somebody wants it; where it can and rows are all
    that is needed, it computes the statistics in the same read. Where y is written for wgrad alone, fprop's quantizer
    still normalises x as it reads it. The linear reads a view of the y that is returned: autograd then notices when the
    caller writes to it before backward. need_w: whether dw of the linear will be wanted.
    """
    plan, out, written = call.plans[0], None, None
    quantizer, flat = plan.operands.fprop.a, as_matrix(x, plan.dtype)
    formula = gamma, beta, spec.eps, spec.rms, spec.zero_centered
    rows_alone = not need_w or (plan.x_is_wgrads and plan.keeps_rows)
    with nvtx_range("te_lite.norm"):
        if spec.returned or not quantizer.fused or (need_w and not plan.operands.wgrad.b.fused):
            y, mean, rstd = norm_forward(flat, *formula)
            y = as_output(y, x.shape)
            made = source.plain(y.view(flat.shape))
            out = y if spec.returned else None
            if out is None and quantizer.fused:
                made, written = source.norm(flat, mean, rstd, gamma, beta, spec.zero_centered), made
        elif rows_alone and (normed := quantizer.norm_rows(flat, *formula)) is not None:
            made, mean, rstd = normed
        else:
            mean, rstd, amax = norm_stats(flat, *formula, quantizer.needs_amax)
            made = source.norm(flat, mean, rstd, gamma, beta, spec.zero_centered, amax)
    wanted = call.grad and any(t is not None and t.requires_grad for t in (x, gamma, beta))
    return made, written, (flat, mean, rstd, gamma, beta) if wanted else (), out


def norm_output(spec: NormSpec, call: Call, y: Tensor | None) -> Tensor | None:
    """What the caller gets of norm_source's y; to be called last, for a gathered y is large."""
    return all_gather(y, call.plans[0].tp.group) if spec.gathered and y is not None else y


class NormGrad(Epilogue):
    """The norm's backward, of the gradient dln of its output: (dx[..., K], dgamma, dbeta).

    saved: by norm_source. dln_out: gradient of the output that the caller was given, which is added. A sum over ranks
    is read where they left its parts.
    """

    def __init__(self, ctx: Any, saved: Sequence[Tensor | None], dln_out: Tensor | None) -> None:
        self.ctx, self.saved, self.dln_out = ctx, saved, dln_out

    def __call__(self, dln: Tensor) -> Gradients:
        ctx, dln_out = self.ctx, self.dln_out
        if dln_out is not None:
            dln_out = as_matrix(dln_out, self.saved[0].dtype)
            dln += reduce_scatter(dln_out, ctx.call.plans[0].tp.group) if ctx.spec.gathered else dln_out
        return self._result(dln)

    def of_slots(self, slots: Tensor, own: Tensor, rank: int) -> Gradients:
        return super().of_slots(slots, own, rank) if self.dln_out is not None else self._result(own, slots, rank)

    def _result(self, dln: Tensor, slots: Tensor | None = None, rank: int = 0) -> Gradients:
        ctx, gamma, beta = self.ctx, self.saved[3], self.saved[4]
        dx, dgamma, dbeta = _backward(ctx, self.saved, dln, slots, rank)
        dx = as_output(dx, ctx.x_shape, ctx.call.grad_input).to(ctx.x_dtype)
        return dx, in_dtype(dgamma, gamma), in_dtype(dbeta, beta)


NO_GRADIENTS: Gradients = (None, None, None)


def _backward(
    ctx: Any, saved: Sequence[Tensor | None], dln: Tensor, slots: Tensor | None = None, rank: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    with nvtx_range("te_lite.norm_backward"):
        return norm_backward(dln, *saved[:4], ctx.spec.zero_centered, slots, rank)


class NormFunction(torch.autograd.Function):
    """The norm alone: y[..., K] = norm(x[..., K])."""

    @forward_method
    def forward(ctx: Any, spec: NormSpec, grad: bool, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        flat = as_matrix(x, x.dtype)
        with nvtx_range("te_lite.norm"):
            y, mean, rstd = norm_forward(flat, gamma, beta, spec.eps, spec.rms, spec.zero_centered)
        if grad:
            ctx.save_for_backward(flat, mean, rstd, gamma, beta)
            ctx.spec, ctx.shape = spec, x.shape
        return as_output(y, x.shape)

    @backward_method
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, _, _, gamma, beta = saved
        dx, dgamma, dbeta = _backward(ctx, saved, as_matrix(dy, x.dtype))
        return None, None, dx.view(ctx.shape), in_dtype(dgamma, gamma), in_dtype(dbeta, beta)
