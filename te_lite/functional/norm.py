"""LayerNorm and RMSNorm: alone, and in front of a linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_lite.functional.layer import Backward, Call, as_matrix, as_output
from te_lite.functional.saved import backward_method, forward_method
from te_lite.ops import source
from te_lite.ops.norm import norm_backward, norm_forward, norm_stats
from te_lite.ops.source import Source
from te_lite.overlap.collective import all_gather, reduce_scatter
from te_lite.overlap.epilogues import Epilogue, GemmInput


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
) -> tuple[GemmInput, Source | None, tuple[Tensor | None, ...], Tensor | None]:
    """(what the linear reads, what its wgrad reads where y is written for that alone, what NormGrad needs, y[..., K]
    where it is an output, of this rank) of x[..., K].

    A fused quantizer normalises as it reads, so y is made only when somebody wants it; where it can and rows are all
    that is needed, it computes the statistics in the same read. Where y is written for wgrad alone, fprop's quantizer
    still normalises x as it reads it. The linear reads a view of the y that is returned: autograd then notices when the
    caller writes to it before backward. need_w: whether dw of the linear will be wanted.
    """
    plan, out, written = call.plans[0], None, None
    operand: GemmInput
    quantizer, flat = plan.operands.fprop.a, as_matrix(x, plan.dtype)
    formula = gamma, beta, spec.eps, spec.rms, spec.zero_centered
    rows_alone = not need_w or (plan.x_is_wgrads and plan.keeps_rows)
    if spec.returned or not quantizer.fused or (need_w and not plan.operands.wgrad.b.fused):
        y, mean, rstd = norm_forward(flat, *formula)
        y = as_output(y, x.shape)
        operand = source.plain(y.view(flat.shape))
        out = y if spec.returned else None
        if out is None and quantizer.fused:
            operand, written = source.norm(flat, mean, rstd, gamma, beta, spec.zero_centered), operand
    elif rows_alone and (normed := quantizer.norm_rows(flat, *formula)) is not None:
        operand, mean, rstd = normed
    else:
        mean, rstd, amax = norm_stats(flat, *formula, quantizer.needs_amax)
        operand = Source("norm", flat, None, mean, rstd, gamma, beta, spec.zero_centered, amax=amax)
        if not (gamma.is_contiguous() and (beta is None or beta.is_contiguous())):
            source.norm(flat, mean, rstd, gamma, beta)  # refuses them
    return operand, written, (flat, mean, rstd, gamma), out


def norm_output(spec: NormSpec, call: Call, y: Tensor) -> Tensor:
    """What the caller gets of norm_source's y; to be called last, for a gathered y is large."""
    return all_gather(y, call.plans[0].tp.group) if spec.gathered else y


@dataclass(slots=True)
class NormGrad(Epilogue):
    """The norm's backward, of the gradient dln of its output: (dx[..., K], dgamma, dbeta).

    saved: by norm_source. dln_out: gradient of the output that the caller was given, which is added. A sum over ranks
    is read where they left its parts.
    """

    spec: NormSpec
    back: Backward
    saved: Sequence[Any]
    dln_out: Tensor | None

    def __call__(self, dln: Tensor, slots: Tensor | None = None, rank: int = 0) -> Gradients:
        """slots, rank: dln is a summand, as of_slots has it."""
        spec, call, dln_out = self.spec, self.back.call, self.dln_out
        x, mean, rstd, gamma = self.saved
        if dln_out is not None:
            dln_out = as_matrix(dln_out, x.dtype)
            dln += reduce_scatter(dln_out, call.plans[0].tp.group) if spec.gathered else dln_out
        dx, dgamma, dbeta = norm_backward(dln, x, mean, rstd, gamma, spec.zero_centered, slots, rank)
        if call.grad_input is not None or len(self.back.x_shape) != 2:
            dx = as_output(dx, self.back.x_shape, call.grad_input)
        return dx, dgamma, dbeta

    def of_slots(self, slots: Tensor, own: Tensor, rank: int) -> Gradients:
        return self(own, slots, rank) if self.dln_out is None else super(NormGrad, self).of_slots(slots, own, rank)


NO_GRADIENTS: Gradients = (None, None, None)


class NormFunction(torch.autograd.Function):
    """The norm alone: y[..., K] = norm(x[..., K])."""

    @forward_method
    def forward(ctx: Any, spec: NormSpec, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        flat = as_matrix(x, x.dtype)
        y, mean, rstd = norm_forward(flat, gamma, beta, spec.eps, spec.rms, spec.zero_centered)
        if ctx is not None:
            ctx.save_for_backward(flat, mean, rstd, gamma)
            ctx.spec, ctx.shape = spec, x.shape
        return as_output(y, x.shape)

    @backward_method
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, gamma = ctx.saved_tensors
        dx, dgamma, dbeta = norm_backward(as_matrix(dy, x.dtype), x, mean, rstd, gamma, ctx.spec.zero_centered)
        return None, dx.view(ctx.shape), dgamma, dbeta
