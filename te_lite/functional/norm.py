"""LayerNorm and RMSNorm: alone, and in front of a linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_lite.functional.linear import as_matrix, as_output, in_dtype
from te_lite.functional.plan import LinearPlan
from te_lite.functional.saved import without_amp
from te_lite.ops import source
from te_lite.ops.norm import norm_backward, norm_forward, norm_stats
from te_lite.ops.nvtx import nvtx_range
from te_lite.ops.source import Source


@dataclass(frozen=True, slots=True)
class NormSpec:
    """y = (x - mean) * rstd * gamma + beta over the last dimension; rms: no mean, no beta; zero_centered: 1 + gamma."""

    eps: float
    rms: bool
    zero_centered: bool


def norm_source(
    spec: NormSpec,
    plan: LinearPlan,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    output_shape: tuple[int, ...] | None,
) -> tuple[Source, Tensor | None, Tensor, Tensor | None]:
    """(what the linear reads, mean[M], rstd[M], y in output_shape when that is given).

    A fused quantizer normalises as it reads, so y is made only when somebody wants it. The linear reads a view of the
    y that is returned: autograd then notices when the caller writes to it before backward.
    """
    quantizer = plan.operands.fprop.a
    with nvtx_range("te_lite.norm"):
        if output_shape is not None or not (quantizer.fused and plan.operands.wgrad.b.fused):
            y, mean, rstd = norm_forward(x, gamma, beta, spec.eps, spec.rms, spec.zero_centered)
            y = as_output(y, output_shape or tuple(y.shape), None)
            return source.plain(y.view(x.shape)), mean, rstd, y
        mean, rstd, amax = norm_stats(x, gamma, beta, spec.eps, spec.rms, spec.zero_centered, quantizer.needs_amax)
    made = source.norm(x, mean, rstd, gamma, beta, spec.zero_centered)
    return made._replace(amax=amax), mean, rstd, None


class NormFunction(torch.autograd.Function):
    """The norm alone: y[..., K] = norm(x[..., K])."""

    @staticmethod
    @without_amp
    def forward(ctx: Any, spec: NormSpec, grad: bool, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        flat = as_matrix(x, x.dtype)
        with nvtx_range("te_lite.norm"):
            y, mean, rstd = norm_forward(flat, gamma, beta, spec.eps, spec.rms, spec.zero_centered)
        if grad:
            ctx.save_for_backward(flat, mean, rstd, gamma, beta)
            ctx.spec, ctx.shape = spec, x.shape
        return as_output(y, tuple(x.shape), None)

    @staticmethod
    @once_differentiable
    @without_amp
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, gamma, beta = ctx.saved_tensors
        with nvtx_range("te_lite.norm_backward"):
            dy = as_matrix(dy, x.dtype)
            dx, dgamma, dbeta = norm_backward(dy, x, mean, rstd, gamma, ctx.spec.zero_centered)
        return None, None, dx.view(ctx.shape), in_dtype(dgamma, gamma), None if beta is None else in_dtype(dbeta, beta)
