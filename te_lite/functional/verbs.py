"""Several linears that read one gathered tensor: te.all_gather_linear. te.linear_reduce_scatter runs in linear.py,
te.all_gather and te.reduce_scatter in transfers.py; modules/verbs.py has what callers call.

There is one all-gather in forward, one in backward, and one reduce-scatter of dx:

    copies        | x_shard to the others |                                                              forward
    compute       | y_0 = x @ w_0^T       | y_1 = x @ w_1^T | ...
    copies        | x_shard to the others             | sums of dx to the others          |              backward
    compute       | sum over i of dy_i @ w_i          | dw_0 = dy_0^T x | dw_1 | ...      | sum of dx
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_lite.functional import linear
from te_lite.functional.layer import Call, as_operand, as_output
from te_lite.functional.parallel import LocalGemms, Read, Wgrad, parallel_linear
from te_lite.functional.plan import inf_to_nan
from te_lite.functional.saved import backward_method, flatten, forward_method, unflatten
from te_lite.overlap.exchange import Gemm
from te_lite.overlap.userbuffers import Exchanges
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor


class Prepared(LocalGemms):
    """A linear that shares its exchanges: what linear_forward and linear_backward would run is given back instead."""

    def __init__(self, tp: TensorParallel, exchanges: Exchanges) -> None:
        super().__init__(tp, exchanges)
        self.shared = parallel_linear(tp, exchanges)

    def forward(self, gemm: Gemm, x: QTensor) -> Any:
        return gemm, x

    def backward(self, dgrad: Gemm | None, wgrad: Wgrad | None, dy: Read, dy_wgrad: Read, x: Read) -> Any:
        return dgrad, wgrad

    def all_gather_gemms(self, gemms: Sequence[Gemm], x: QTensor) -> list[Tensor]:
        """[gemm(all_gather(x)) for gemm in gemms]; the gather hides behind the widest, the others read the result."""
        if not self.tp.active:
            return [gemm(x) for gemm in gemms]
        widest = max(gemms, key=lambda gemm: gemm.columns)
        exchange = self.fprop.settled(x, widest, "row")
        with self.fprop.operation("fprop", x, widest):
            gathering = exchange.all_gather(x, "row", multiplied=True)
            first = exchange.all_gather_gemm(widest, gathering)
            whole = gathering.whole()
            ys = [first if gemm is widest else gemm(whole) for gemm in gemms]
            gathering.close()
        return ys


@dataclass(slots=True)
class Sum(Gemm):
    """A product that is the sum of several, added in fp32; its other fields are those of the first."""

    terms: Sequence[tuple[Gemm, QTensor]] = ()

    def product(
        self, a: QTensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """sum of a_i @ b_i^T; `a` is the first a_i."""
        (first, a), *others = self.terms
        total = first.product(a, None, torch.float32)
        for gemm, other in others:
            total += gemm.product(other, None, torch.float32)
        return total.to(dtype or self.dtype)


class GatherLinears(torch.autograd.Function):
    """y_i[M, N_i] = all_gather(x_shard_m)[M, K] @ weight_i[N_i, K]^T + bias_i[N_i]; params: weights, then biases."""

    @forward_method
    def forward(ctx: Any, call: Call, x: Tensor, *params: Any) -> tuple[Tensor, ...]:
        plans, n = call.plans, len(call.plans)
        need_x, need_ws = call.grad and x.requires_grad, [call.grad and weight.requires_grad for weight in params[:n]]
        operand, gemms, kept = as_operand(x, plans[0], grad=False), list[Gemm](), list[QTensor | None]()
        for plan, weight, bias in zip(plans, params[:n], params[n:], strict=True):
            needs = need_x, any(need_ws) and not gemms
            (gemm, operand), (kept_x, kept_w) = linear.linear_forward(plan, operand, weight, bias, needs, None)
            gemms.append(gemm)
            kept += [kept_x, kept_w]
        ys = plans[0].parallel.all_gather_gemms(gemms, operand)  # type: ignore[attr-defined]  # a Prepared
        if call.grad:
            tensors, ctx.specs = flatten((*kept, *params[:n]))
            ctx.save_for_backward(*tensors)
            ctx.call, ctx.needs, ctx.x_shape = call, (need_x, *need_ws), x.shape
            ctx.sums_in = linear.sum_dtypes(call, *params[n:])
        return tuple([as_output(y, x.shape, None, plans[0]) for y in ys])

    @backward_method
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        call, (need_x, *need_ws), sums_in, n = ctx.call, ctx.needs, ctx.sums_in, len(dys)
        saved, _ = unflatten(ctx.specs, ctx.saved_tensors)
        terms, wgrads, dbs, firsts = list[Any](), list[Any](), list[Tensor | None](), [None, None]
        for i, plan in enumerate(call.plans):
            w, weight, param = saved[2 * i + 1], saved[2 * n + i], call.weights[i]
            needs = need_x, need_ws[i], sums_in[i]
            dy = inf_to_nan(dys[i]) if plan.hides_overflow else dys[i]
            grad: Any = linear.quantize_grad(plan, dy, param.shape[1], needs)
            dgrad, wgrad, db = linear.linear_backward(plan, (None, w), weight, param, grad, needs)
            terms.append((dgrad, grad[0]))
            wgrads.append(None if wgrad is None else (wgrad, grad[1]))
            dbs.append(db)
            firsts = [mine if first is None else first for first, mine in zip(firsts, grad, strict=False)]
        summed = None
        if need_x:
            first = terms[0][0]
            summed = Sum(first.b, "col", first.dtype, first.fast_accum, "te_lite.dgrad", terms=terms)

        def wgrad_all(_: QTensor, x_full: QTensor) -> Any:
            return [one and one[0](one[1], x_full) for one in wgrads]

        dx = dws = None
        if any(ctx.needs):
            shared = call.plans[0].parallel.shared
            dx, dws = shared.backward(summed, wgrad_all if any(need_ws) else None, *firsts, saved[0])
        if call.pools is not None:
            call.pools.close(call.closes_pass)
        return None, None if dx is None else as_output(dx, ctx.x_shape), *(dws or [None] * n), *dbs
