"""Norm, linear, activation, linear."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from te_lite.functional.layer import Backward, Call, as_output
from te_lite.functional.linear import Needs, linear_backward, linear_forward, quantize_grad, sum_dtypes
from te_lite.functional.norm import NO_GRADIENTS, NormGrad, NormSpec, norm_output, norm_source
from te_lite.functional.plan import LinearPlan, inf_to_nan
from te_lite.ops.activation import Activation
from te_lite.ops.nvtx import ranged
from te_lite.ops.source import Source
from te_lite.overlap.epilogues import Activate, ActivateGrad
from te_lite.quantize.qtensor import QTensor


@ranged("te_lite.quantize")
def _grad_and_again(plan: LinearPlan, dh: Source, needs: Needs, a: QTensor) -> Any:
    """(quantize_grad(plan, dh), a = activation(h) by column) from one read of h; a: what forward kept of it."""
    need_x, need_w, sums_in = needs
    q, sums, a = plan.operands.dgrad.a.quantize_and_again(dh, need_x, need_w, sums_in, a)
    return (q, q, sums), a


class ActivationPlan(NamedTuple):
    """Which kernel computes a = activation(h), and which its gradient dh: the epilogue of a GEMM, or a pass over h.
    Forward and backward of one call compute the same plan.

    want_a, want_dh: what fc1's fprop is to leave of a, and fc2's dgrad of dh, as Epilogue.want; "" where a pass over h
    computes it. a_again: a is not kept, backward computes it again; one_read: in the pass that computes dh.
    """

    want_a: str
    want_dh: str
    a_again: bool
    one_read: bool


class MLPLayer:
    """h = norm(x) @ w1^T + b1;  y = activation(h) @ w2^T + b2 + residual; also norm(x) itself where the spec says so.

    Kept for backward: x and the norm's statistics, norm(x) as fc1's GEMM read it, h, a = activation(h) as fc2's GEMM
    read it; or just a's seed, where backward computes a again from h: before fc2's GEMMs, or between them in the one
    read that gives the gradient of h (see _activation_plan). Under fp8 that gradient is quantized as it is computed;
    only a wgrad that is not quantized reads it in high precision.
    """

    weights = (1, 5), (3, 7)

    def __init__(self, spec: NormSpec, activation: Activation) -> None:
        self.spec, self.activation = spec, activation

    def needs(self, call: Call, x: Tensor, params: Sequence[Any]) -> tuple[Any, ...]:
        """Which gradients are wanted: of the norm, w1, h and w2; of b1 and b2, for each its dtype or None."""
        gamma, beta, w1, b1, w2, b2, _ = params
        sums1, sums2 = sum_dtypes(call, b1, b2)
        need_ln = call.grad and (x.requires_grad or gamma.requires_grad or (beta is not None and beta.requires_grad))
        need_w1 = call.grad and w1.requires_grad
        need_h = need_ln or need_w1 or sums1 is not None
        return need_ln, need_w1, need_h, call.grad and w2.requires_grad, sums1, sums2

    def _activation_plan(self, call: Call, needs: Any, tokens: int, w1: Tensor, w2: Tensor) -> ActivationPlan:
        """The same in forward and backward. tokens: rows of h on this rank. w1, w2: whole; in backward those of `call`
        may be parts."""
        (plan1, plan2), (need_ln, need_w1, need_h, need_w2, sums1, _) = call.plans, needs
        # What the GEMMs' kernels leave: where they can, and where it is faster at this size. Of gathered tokens the
        # exchange decides.
        want_a = want_dh = ""
        if self.activation.fused and plan1.makes[0]:
            want_a = plan2.x_from_gemm
        if want_a and not plan1.gathers_x:
            want_a = plan1.from_gemm(want_a, tokens, w1)
        # A bias' gradient sums dh over tokens, which no GEMM does.
        if self.activation.fused and plan2.makes[1] and need_h and sums1 is None:
            want_dh = plan1.dy_from_gemm
        if want_dh == "fp8" and not (need_ln and need_w1):
            want_dh = ""
        if want_dh and not plan2.gathers_dy:
            want_dh = plan2.from_gemm(want_dh, tokens, w2, grad=True)

        a_again = need_h and need_w2 and plan2.recomputes_x
        one_read = a_again and plan2.one_read and (need_ln or need_w1)
        if one_read and want_dh not in ("", "amax"):
            a_again, one_read = plan2.recomputes_apart, False  # no pass reads h
        return ActivationPlan(want_a, want_dh, a_again, one_read)

    def forward(self, call: Call, needs: Any, x: Tensor, params: Sequence[Any]) -> tuple[Any, ...]:
        (plan1, plan2), (need_ln, need_w1, need_h, need_w2, *_) = call.plans, needs
        (gamma, beta, w1, b1, w2, b2, residual), spec, activation = params, self.spec, self.activation
        (cached1, cached2), needs1, needs2 = call.cached, (need_ln, need_w1), (need_h, need_w2)
        operand, for_dw, norm_saved, ln = norm_source(spec, call, x, gamma, beta, need_w1)
        tokens, width = x.numel() // x.shape[-1], w2.shape[1]
        gathered = tokens * plan1.tp.size if plan1.gathers_x else tokens
        want_a, _, a_again, _ = self._activation_plan(call, needs, gathered, w1, w2)
        epilogue = Activate(plan2.operands.fprop.a, activation, want_a, col=need_w2 and not a_again)
        saved = plan1.bytes_saved(tokens, x.shape[-1]) if need_w1 and not spec.returned else 0
        if need_w2 and not (a_again or plan2.recomputes_x):  # else keeping a is what they are spent on
            saved += plan2.bytes_saved(gathered, width)
        keeps_w1 = need_ln and cached1 is None and plan1.weight_bytes <= saved
        left = saved - plan1.weight_bytes if keeps_w1 else saved
        keeps_w2 = need_h and cached2 is None and plan2.weight_bytes <= left
        (h, a), kept1 = linear_forward(plan1, operand, w1, b1, needs1, cached1, epilogue, keeps_w1, None, for_dw)
        y, kept2 = linear_forward(plan2, a, w2, b2, needs2, cached2, None, keeps_w2, residual, x_again=a_again)
        a, h = None, h if need_h else None  # free before norm(x) is gathered
        y = y if x.dim() == 2 else as_output(y, x.shape)
        ln = ln if ln is None else norm_output(spec, call, ln)
        return y, ln, *kept1, w1, *kept2, w2, h, *(norm_saved if need_ln else ())

    def backward(self, back: Backward, kept: list[Any], dy: Tensor, dln: Tensor | None) -> tuple[Any, ...]:
        call, (need_ln, need_w1, need_h, need_w2, sums1, sums2) = back.call, back.needs
        (plan1, plan2), (param1, param2) = call.plans, call.weights
        x1, q1, w1, a, q2, w2, h, *norm_saved = kept
        kept.clear()
        needs1 = need_ln, need_w1, sums1
        activate_grad = norm_grad = dx = dw1 = db1 = None
        a_again = one_read = False
        if need_h:
            _, want_dh, a_again, one_read = self._activation_plan(call, back.planned, h.shape[0], w1, w2)
            a_again, one_read = a_again and need_w2, one_read and need_w2 and (need_ln or need_w1)
            activate_grad = ActivateGrad(plan1.operands.dgrad.a, self.activation, want_dh, h)
        grad: Any = quantize_grad(plan2, dy, param2.shape[1], (need_h, need_w2, sums2))
        if a_again and not one_read:
            a = plan2.operands.wgrad.b.again(Source("act", h, activation=self.activation), a)
        needs = need_h, need_w2 and not one_read, sums2
        dh, dw2, db2 = linear_backward(plan2, (a, q2), w2, param2, grad, needs, activate_grad)
        if plan1.hides_overflow and isinstance(dh, Source) and dh.dy is not None:
            dh = dh._replace(dy=inf_to_nan(dh.dy))
        if one_read:
            grad1, a = _grad_and_again(plan1, dh, needs1, a)
        else:
            a = None  # where it was computed again, nobody else holds it
            grad1 = quantize_grad(plan1, dh, param1.shape[1], needs1) if need_h else None
        dh = activate_grad = h = None  # the size of h, not needed beside the products
        if one_read:
            _, dw2 = plan2.parallel.backward(None, partial(plan2.put_wgrad, param2), None, grad[1], a)
        a = grad = None
        if grad1 is not None:
            norm_grad = NormGrad(self.spec, back, norm_saved, dln) if need_ln else None
            dx, dw1, db1 = linear_backward(plan1, (x1, q1), w1, param1, grad1, needs1, norm_grad)
        return *(dx or NO_GRADIENTS), dw1, db1, dw2, db2
