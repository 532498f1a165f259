"""The linear layer's math, forward and backward, once for the whole library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_lite.functional.plan import LinearPlan
from te_lite.functional.recordings import Body
from te_lite.functional.saved import backward_method, forward_method, load, save
from te_lite.ops.cast import transform
from te_lite.ops.nvtx import ranged
from te_lite.ops.source import Source, plain
from te_lite.overlap.epilogues import Epilogue, Operand
from te_lite.overlap.exchange import Gemm
from te_lite.quantize.delayed import Pools
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Quantizer
from te_lite.quantize.tensor import QuantizedTensor

# What a linear keeps for backward: its quantized input (a shard where the exchange gathers it again), or None where no
# weight gradient is wanted; the quantized weight, cached or its col layout. Of either perhaps just the seed to quantize
# it again.
Kept = tuple[QTensor | None, QTensor | None]
# A gradient y[M, N] quantized: for dgrad, for wgrad, and its sums over tokens, fp32 [N]; None where it is not wanted.
Grad = tuple[QTensor | None, QTensor | None, Tensor | None]


@ranged("te_lite.quantize")
def _quantize(
    plan: LinearPlan, x: Operand, weight: Tensor, need_w: bool, cached: QTensor | None, keeps_w: bool,
    for_dw: Source | None,
) -> tuple[QTensor, QTensor | None, QTensor]:  # fmt: skip
    """(x for fprop, what is kept of it for wgrad, the weight). The arguments are linear_forward's."""
    operands, by_row, kept = plan.operands, plan.keeps_rows, None
    keep = need_w and not plan.keep_original
    if isinstance(x, QTensor):
        q = x
    elif keep and not plan.x_is_wgrads:
        kept, _ = operands.wgrad.b.quantize(x if for_dw is None else for_dw, row=by_row, col=not by_row)
        q, _ = operands.fprop.a.quantize(x)
    else:
        q, _ = operands.fprop.a.quantize(x, row=True, col=keep and not by_row)
    if keep and kept is None:
        kept = q.only("row" if by_row else "col")
    if cached is not None:
        return q, kept, cached
    source = Source("plain", weight) if weight.is_contiguous() else plain(weight, name="weight")  # refuses it
    return q, kept, operands.fprop.b.quantize(source, row=True, col=keeps_w)[0]


def linear_forward(
    plan: LinearPlan, x: Operand, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool], cached: QTensor | None,
    epilogue: Epilogue | None = None, keeps_w: bool = False, residual: Tensor | None = None,
    for_dw: Source | None = None, x_again: bool = False,
) -> tuple[Any, Kept]:  # fmt: skip
    """y[M, N] = x[M, K] @ weight[N, K]^T + bias[N] + residual, over the plan's ranks; or the epilogue's result of y.

    needs: whether dx will be wanted, whether dw. cached: the quantized weight to use, or None. keeps_w: by
    plan.keeps_weight. residual[..., N]: of M rows. for_dw: x as wgrad's quantizer is to read it, where that is another
    than fprop's and x is written for it. x_again: keep x's seed alone, for backward quantizes x again.
    """
    (need_x, need_w), fprop = needs, plan.operands.fprop
    need_w = need_w and not (x_again and plan.x_leaves_seed)
    xq, kept, wq = _quantize(plan, x, weight, need_w, cached, keeps_w, for_dw)
    if x_again:
        kept = (kept or xq).seed_only()
    bias = None if bias is None else bias.to(plan.dtype).contiguous()
    residual = None if residual is None else as_matrix(residual, plan.dtype)
    gemm = Gemm(wq, "row", plan.dtype, fprop.fast_accum, "te_lite.fprop", bias, residual, epilogue)
    y = plan.parallel.forward(gemm, xq)
    if not need_x:
        return y, (kept, None)
    if keeps_w:
        return y, (kept, wq.only("col"))
    return y, (kept, wq.seed_only() if cached is None else wq)


@ranged("te_lite.quantize")
def quantize_grad(plan: LinearPlan, dy: Tensor | Operand, columns: int, needs: tuple[bool, bool, bool]) -> Grad:
    """dy as linear_backward takes it. columns: of dx. needs: as there.

    A copy of what autograd gave is free again when this returns, before the products."""
    need_x, need_w, need_b = needs
    if isinstance(dy, Tensor):
        dy = as_operand(dy, plan, grad=True)
    if isinstance(dy, QTensor):
        return dy, dy, dy.dequantize().sum(0, dtype=torch.float32) if need_b else None
    if not (need_x or need_w):
        return None, None, transform(dy, bias_grad=True).bias_grad if need_b else None
    quantizer, for_wgrad = plan.operands.dgrad.a, plan.operands.wgrad.a
    by_row = plan.gathers_dy and for_wgrad.format.col_from_row  # the gathered rows give the col layout
    if plan.dy_is_wgrads:
        gathers = plan.parallel.gathers_columns
        col = not by_row or (need_x and gathers(quantizer.format, dy.rows, dy.cols, columns))
        both, sums = quantizer.quantize(dy, row=need_x or by_row, col=need_w and col, bias_grad=need_b)
        return both, both, sums
    q, sums = quantizer.quantize(dy, bias_grad=need_b) if need_x else (None, None)
    if not need_w:
        return q, None, sums
    q_w, sums_w = for_wgrad.quantize(dy, row=by_row, col=not by_row, bias_grad=need_b and q is None)
    return q, q_w, sums_w if q is None else sums


@ranged("te_lite.quantize")
def _weight_for_dgrad(plan: LinearPlan, kept: Any, weight: Tensor) -> QTensor:
    quantizer, same = plan.operands.dgrad.b, plan.w_is_dgrads
    if kept.col is not None or (same and kept.row is not None):
        return kept
    source = Source("plain", weight.contiguous())
    return quantizer.again(source, kept) if same else quantizer.quantize(source, row=False, col=True)[0]


def linear_backward(
    plan: LinearPlan, kept: Kept, weight: Tensor, param: Tensor, grad: Grad, needs: tuple[bool, bool, bool],
    epilogue: Epilogue | None = None,
) -> tuple[Any, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx[M, K] = dy @ weight, dw[N, K] = dy^T @ x by the plan's sink, db[N] = sum of dy over tokens, fp32).

    weight: its values, as saved; only for dx. param: the parameter itself, whose gradient dw is. grad: dy, by
    quantize_grad(). needs: which of the three. epilogue: of dx, whose result is then in its place.
    """
    (need_x, need_w, _), (x, w), (dq, dq_wgrad, db) = needs, kept, grad
    if not (need_x or need_w):
        return None, None, db
    dgrad = wgrad = None
    if need_x:
        wq = _weight_for_dgrad(plan, w, weight)
        dgrad = Gemm(wq, "col", plan.dtype, plan.operands.dgrad.fast_accum, "te_lite.dgrad", None, None, epilogue)
    if need_w:
        wgrad = partial(plan.put_wgrad, param)
    return *plan.parallel.backward(dgrad, wgrad, dq, dq_wgrad, x), db


@dataclass(slots=True)
class Call:
    """What a module decided for one call: one plan a linear, its weight parameter, a quantized weight to reuse or None.

    grad: a backward may follow. first: this is the pass's first fp8 module, whose backward closes the pass. pools: of
    a pass under delayed scaling.
    output, grad_input: quantizers of y and dx when the caller takes them quantized. parts: parameters that the weight
    was joined from, where it was; versions: theirs in forward. note: of replay.Outstanding, to be held as long as the
    call's graph.
    """

    plans: tuple[LinearPlan, ...]
    weights: tuple[Tensor, ...]
    cached: tuple[QTensor | None, ...]
    grad: bool
    first: bool = False
    output: Quantizer | None = None
    grad_input: Quantizer | None = None
    pools: Pools | None = None
    parts: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()
    note: Any = None


def recorded_forward(
    call: Call, decided: tuple, x: Tensor, others: tuple[Any, ...], body: Body
) -> Sequence[Any]:  # fmt: skip
    """Recordings.run of a module's forward. others: what it reads beside x and call.cached."""
    cached = [t for q in call.cached if q is not None for t in q.tensors]
    recordings: Any = call.plans[0].recordings
    for plan in call.plans:
        plan.parallel.rows = x.numel() // max(1, x.shape[-1])
    return recordings.run(("forward", decided), (x, *others, *cached), body)


def recorded_backward(
    call: Call, decided: tuple, dy: Tensor, saved: list[Tensor | None], body: Body
) -> Sequence[Any]:  # fmt: skip
    """Recordings.run of a module's backward. saved: by load()."""
    written = [plan.sink.where(weight) for plan, weight in zip(call.plans, call.weights, strict=True)]
    inputs = dy, *[target for target, _ in written], *saved
    recordings: Any = call.plans[0].recordings
    return recordings.run(("backward", decided, *[how for _, how in written]), inputs, body)


PLAIN = (Tensor, torch.nn.Parameter)  # what is read without asking for its class
_unsafe_view = torch.ops.aten._unsafe_view.default  # a view that is no view: autograd sees no base


def as_matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] -> [M, K], plain, contiguous, in `dtype`."""
    x = x.dequantize() if isinstance(x, QuantizedTensor) else x
    if x.dim() == 2 and x.dtype == dtype and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()


def as_operand(x: Tensor, plan: LinearPlan, *, grad: bool) -> Operand:
    """x[..., K], or dy[..., N] with grad, as a GEMM's quantizer takes it; what is in its format is used as it is.

    A tensor that will be gathered is quantized anew: its ranks may have chosen different scales. What the caller can
    write to is copied where it is read after backward.
    """
    if x.__class__ in PLAIN and x.dim() == 2 and x.dtype == plan.dtype and x.is_contiguous():
        return Source("plain", x)
    if isinstance(x, QuantizedTensor):
        quantizer = plan.operands.dgrad.a if grad else plan.operands.fprop.a
        gathered = plan.gathers_dy if grad else plan.gathers_x
        whole = x.q.row is not None and (x.q.col is not None or x.q.format.col_from_row)
        if x.q.format == quantizer.format and whole and not gathered:
            return x.q.map(Tensor.clone) if plan.sink.late and x.quantizer is not None else x.q
    return plain(as_matrix(x, plan.dtype))


def output_shape(x_shape: torch.Size, features: int, plan: LinearPlan | None) -> tuple[int, ...]:
    """Of y for x of x_shape. plan: of the linear, where a gather or a scatter of tokens changes the first dimension."""
    leading = list(x_shape[:-1])
    if plan is not None and plan.gathers_x:
        leading[0] *= plan.tp.size
    elif plan is not None and plan.gathers_dy:
        leading[0] //= plan.tp.size
    return (*leading, features)


def as_output(
    y: Tensor, x_shape: torch.Size, quantizer: Quantizer | None = None, plan: LinearPlan | None = None
) -> Tensor:
    """y[M, N] as [..., N] with the leading dimensions of x_shape, not a view of anything; quantized when a quantizer is
    given. plan: as of output_shape."""
    if quantizer is None and len(x_shape) == 2:
        return y
    shape = output_shape(x_shape, y.shape[-1], plan)
    if quantizer is not None:
        return QuantizedTensor(quantizer.quantize(plain(y))[0], shape)
    return _unsafe_view(y, shape)


def residual_grad(dy: Tensor) -> Tensor:
    """The residual's gradient, which is y's, as a plain tensor."""
    return dy.dequantize() if isinstance(dy, QuantizedTensor) else dy


def _forward(
    plan: LinearPlan, x: Operand, needs: tuple[bool, bool], cached: QTensor | None, weight: Tensor,
    bias: Tensor | None, residual: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """linear_forward()'s results side by side."""
    y, kept = linear_forward(plan, x, weight, bias, needs, cached, residual=residual)
    return y, *kept


def _backward(
    plan: LinearPlan, kept: Any, weight: Any, original: Tensor | None, param: Tensor, dy: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Any, Tensor | None, Tensor | None]:  # fmt: skip
    """linear_backward() of dy. original: x[..., K], where it was kept in place of what wgrad reads of it."""
    if original is not None:
        quantizer = plan.operands.wgrad.b
        by_row = quantizer.format.col_from_row
        x, _ = quantizer.quantize(plain(as_matrix(original, plan.dtype)), row=by_row, col=not by_row)
        kept = x, kept[1]
    grad = quantize_grad(plan, dy, param.shape[1], needs)
    return linear_backward(plan, kept, weight, param, grad, needs)


class LinearFunction(torch.autograd.Function):
    """y[..., N] = x[..., K] @ weight[N, K]^T + bias[N] + residual[..., N].

    Here as in the other functions autograd casts gradients to the dtypes of what they belong to.
    """

    @forward_method
    def forward(ctx: Any, call: Call, x: Tensor, *params: Any) -> Tensor:
        (plan,), weight, (cached,) = call.plans, params[0], call.cached
        needs = need_x, need_w = call.grad and x.requires_grad, call.grad and weight.requires_grad
        operand = as_operand(x, plan, grad=False)
        body = partial(_forward, plan, operand, needs, cached, *params)
        if plan.recordings is None or not isinstance(operand, Source) or operand.x.__class__ not in PLAIN:
            y, *kept = body()
        else:
            y, *kept = recorded_forward(call, needs, operand.x, params, body)
        if call.grad:
            original = x if need_w and plan.keep_original else None
            save(ctx, *kept, weight if need_x or need_w else None, original)
            ctx.call, ctx.needs, ctx.x_shape = call, needs, x.shape
        return as_output(y, x.shape, call.output, plan)

    @backward_method
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, grads = ctx.call, ctx.needs_input_grad
        (plan,), (param,), ((*kept, weight, original), saved) = call.plans, call.weights, load(ctx)
        needs = *ctx.needs, grads[3]
        body = partial(_backward, plan, kept, weight, original, param, dy, needs)
        if plan.recordings is None or dy.__class__ is not Tensor:
            dx, dw, db = body()
        else:
            dx, dw, db = recorded_backward(call, needs, dy, saved, body)
        if ctx.needs[1] and plan.sink.answers:
            dw = plan.sink.answer(dw, param)
        if call.pools is not None:
            call.pools.close(call.first)
        if dx is not None:
            dx = as_output(dx, ctx.x_shape, call.grad_input)
        return None, dx, dw, db, residual_grad(dy) if grads[4] else None
