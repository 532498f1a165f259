"""Norm, then linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from te_lite.functional.layer import Backward, Call, as_output
from te_lite.functional.linear import Needs, linear_backward, linear_forward, quantize_grad, sum_dtypes
from te_lite.functional.norm import NO_GRADIENTS, NormGrad, NormSpec, norm_output, norm_source


class NormLinearLayer:
    """y = norm(x) @ weight^T + bias + residual; also norm(x) itself where the spec says so."""

    weights = ((1, 5),)

    def __init__(self, spec: NormSpec) -> None:
        self.spec = spec

    def needs(self, call: Call, x: Tensor, params: Sequence[Any]) -> Needs:
        """Which gradients are wanted: of the norm, the weight and the bias; for the bias its dtype or None."""
        gamma, beta, weight, bias, _ = params
        need_ln = call.grad and (x.requires_grad or gamma.requires_grad or (beta is not None and beta.requires_grad))
        return need_ln, call.grad and weight.requires_grad, sum_dtypes(call, bias)[0]

    def forward(self, call: Call, needs: Needs, x: Tensor, params: Sequence[Any]) -> tuple[Any, ...]:
        (plan,), (cached,), (need_ln, need_w, _) = call.plans, call.cached, needs
        gamma, beta, weight, bias, residual = params
        operand, for_dw, norm_saved, ln = norm_source(self.spec, call, x, gamma, beta, need_w)
        saved = plan.bytes_saved(x.numel() // x.shape[-1], x.shape[-1]) if need_w and not self.spec.returned else 0
        keeps_w = need_ln and cached is None and plan.weight_bytes <= saved
        y, kept = linear_forward(plan, operand, weight, bias, needs[:2], cached, None, keeps_w, residual, for_dw)
        y = as_output(y, x.shape, call.output, plan)
        ln = ln if ln is None else norm_output(self.spec, call, ln)
        return y, ln, *kept, weight if need_ln or need_w else None, *(norm_saved if need_ln else ())

    def backward(self, back: Backward, kept: list[Any], dy: Tensor, dln: Tensor | None) -> tuple[Any, ...]:
        (plan,), (param,), needs = back.call.plans, back.call.weights, back.needs
        x, w, weight, *norm_saved = kept
        norm_grad = NormGrad(self.spec, back, norm_saved, dln) if needs[0] else None
        grad = quantize_grad(plan, dy, param.shape[1], needs)
        dx, dw, db = linear_backward(plan, (x, w), weight, param, grad, needs, norm_grad)
        return *(dx or NO_GRADIENTS), dw, db
