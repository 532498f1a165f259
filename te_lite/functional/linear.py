"""The linear layer's math, forward and backward, once for the whole library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_lite.functional.plan import LinearPlan
from te_lite.functional.saved import backward_method, forward_method, load, save
from te_lite.ops.cast import transform
from te_lite.ops.nvtx import nvtx_range
from te_lite.ops.source import Source, plain
from te_lite.overlap.schedule import Activated, Backward, Product
from te_lite.parallel import TensorParallel
from te_lite.quantize.delayed import Pools
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Quantizer
from te_lite.quantize.tensor import QuantizedTensor

Input = Source | QTensor  # what is quantized for a GEMM, or is already
# What a linear keeps for backward: its quantized input (a shard where the schedule gathers it again), or None where no
# weight gradient is wanted; the quantized weight, cached or its col layout, or just the seed to quantize it again.
Kept = tuple[QTensor | None, QTensor | None]
# A gradient y[M, N] quantized: for dgrad, for wgrad, and its sums over tokens, fp32 [N]; None where it is not wanted.
Grad = tuple[QTensor | None, QTensor | None, Tensor | None]


def keeps_rows(plan: LinearPlan) -> bool:
    """Whether x is kept for wgrad by row: the shard of this rank, which backward gathers again."""
    return plan.tp.gathers_input and plan.operands.wgrad.b.format.col_from_row


def _quantize_input(plan: LinearPlan, x: Input, keep: bool, for_dw: Source | None) -> tuple[QTensor, QTensor | None]:
    """(x for fprop, what is kept of it for wgrad). for_dw: as of linear_forward."""
    quantizer, for_wgrad = plan.operands.fprop.a, plan.operands.wgrad.b
    keep, shard = keep and not plan.keep_original, keeps_rows(plan)
    if keep and for_wgrad is not quantizer and not isinstance(x, QTensor):
        kept, _ = for_wgrad.quantize(x if for_dw is None else for_dw, row=shard, col=not shard)
        return quantizer.quantize(x)[0], kept
    q = x if isinstance(x, QTensor) else quantizer.quantize(x, row=True, col=keep and not shard)[0]
    return q, q.only("row" if shard else "col") if keep else None


def linear_forward(
    plan: LinearPlan, x: Input, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool], cached: QTensor | None,
    then: Activated | None = None, keeps_w: bool = False, residual: Tensor | None = None, for_dw: Source | None = None,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """y[M, N] = x[M, K] @ weight[N, K]^T + bias[N] + residual, communication by the plan's schedule.

    needs: whether dx will be wanted, whether dw. cached: the quantized weight to use, or None. then: what may be
    computed of y with it. keeps_w: by plan.keeps_weight. residual[..., N]: of M rows. for_dw: x as wgrad's quantizer is
    to read it, where that is another than fprop's and x is written for it.
    """
    (need_x, need_w), fprop = needs, plan.operands.fprop
    with nvtx_range("te_lite.quantize"):
        xq, kept = _quantize_input(plan, x, need_w, for_dw)
        wq = cached if cached is not None else fprop.b.quantize(plain(weight, name="weight"), row=True, col=keeps_w)[0]
    if bias is not None:
        bias = bias.to(plan.dtype).contiguous()

    plan.schedule.rows = xq.shape[0] * (plan.tp.size if plan.tp.gathers_input else 1)
    residual = None if residual is None else as_matrix(residual, plan.dtype)
    in_gemm, *in_sum = (bias, None, None) if plan.bias_in_gemm else (None, bias, residual)
    gemm = Product(wq, "row", plan.dtype, in_gemm, fprop.fast_accum, "te_lite.fprop", *in_sum, then)
    y = plan.schedule.fprop(gemm, xq)
    if residual is not None and plan.bias_in_gemm:
        y.add_(residual)
    if not need_x:
        return y, (kept, None)
    if keeps_w:
        return y, (kept, wq.only("col"))
    return y, (kept, wq if cached is not None else wq.seed_only())


def quantize_grad(plan: LinearPlan, dy: Input, columns: int, needs: tuple[bool, bool, bool]) -> Grad:
    """dy as linear_backward takes it. columns: of dx. needs: as there.

    Callers do not hold dy, which may be a copy of what autograd gave: its memory is free before the products."""
    with nvtx_range("te_lite.quantize"):
        return _quantize_grad(plan, dy, columns, *needs)


def _quantize_grad(plan: LinearPlan, dy: Input, columns: int, need_x: bool, need_w: bool, need_b: bool) -> Grad:
    if isinstance(dy, QTensor):
        return dy, dy, dy.dequantize().sum(0, dtype=torch.float32) if need_b else None
    if not (need_x or need_w):
        return None, None, transform(dy, bias_grad=True).bias_grad if need_b else None
    quantizer, for_wgrad = plan.operands.dgrad.a, plan.operands.wgrad.a
    by_row = plan.tp.gathers_grad and for_wgrad.format.col_from_row  # the gathered rows give the col layout
    if for_wgrad is quantizer:
        col = not by_row or (need_x and plan.schedule.gathers_columns(quantizer.format, dy.rows, dy.cols, columns))
        q, sums = quantizer.quantize(dy, row=need_x or by_row, col=need_w and col, bias_grad=need_b)
        return q, q, sums
    q, sums = quantizer.quantize(dy, bias_grad=need_b) if need_x else (None, None)
    if not need_w:
        return q, None, sums
    q_w, sums_w = for_wgrad.quantize(dy, row=by_row, col=not by_row, bias_grad=need_b and q is None)
    return q, q_w, sums_w if q is None else sums


def _weight_for_dgrad(plan: LinearPlan, kept: QTensor, weight: Tensor) -> QTensor:
    quantizer, same = plan.operands.dgrad.b, plan.operands.dgrad.b is plan.operands.fprop.b
    if kept.col is not None or (same and kept.row is not None):
        return kept
    source = plain(weight, name="weight")
    return quantizer.again(source, kept) if same else quantizer.quantize(source, row=False, col=True)[0]


def linear_backward(
    plan: LinearPlan, kept: Kept, weight: Tensor, param: Tensor, grad: Grad, needs: tuple[bool, bool, bool],
    take_slots: Callable[[Tensor, Tensor, int], Any] | None = None, then: Activated | None = None,
) -> tuple[Any, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx[M, K] = dy @ weight, dw[N, K] = dy^T @ x by the plan's sink, db[N] = sum of dy over tokens, fp32).

    weight: its values, as saved; only for dx. param: the parameter itself, whose gradient dw is. grad: dy, by
    quantize_grad(). needs: which of the three.
    take_slots: as of a Product; where the schedule uses it, dx is its result. then: what may be computed of dx with it,
    which then may be None.
    """
    (need_x, need_w, _), (x, w), (dq, dq_wgrad, db) = needs, kept, grad
    with nvtx_range("te_lite.quantize"):
        wq = _weight_for_dgrad(plan, w, weight) if need_x else None
    if not (need_x or need_w):
        return None, None, db

    def wgrad(dy_full: QTensor, x_full: QTensor) -> Tensor | None:
        with nvtx_range("te_lite.wgrad"):
            return plan.sink(param, dy_full, x_full, plan.operands.wgrad.fast_accum)

    fast_accum = plan.operands.dgrad.fast_accum
    dgrad = Product(wq, "col", plan.dtype, None, fast_accum, "te_lite.dgrad", then=then, take_slots=take_slots)
    dx, dw = plan.schedule.backward(Backward(dgrad if need_x else None, wgrad if need_w else None, dq, dq_wgrad, x))
    return dx, dw, db


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


_unsafe_view = torch.ops.aten._unsafe_view.default  # a view that is no view: autograd sees no base


def as_matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] -> [M, K], plain, contiguous, in `dtype`."""
    x = x.dequantize() if isinstance(x, QuantizedTensor) else x
    if x.dim() == 2 and x.dtype == dtype and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()


def as_operand(x: Tensor, plan: LinearPlan, *, grad: bool) -> Input:
    """x[..., K], or dy[..., N] with grad, as a GEMM's quantizer takes it; what is in its format is used as it is.

    A tensor that will be gathered is quantized anew: its ranks may have chosen different scales. What the caller can
    write to is copied where it is read after backward.
    """
    if isinstance(x, QuantizedTensor):
        quantizer = plan.operands.dgrad.a if grad else plan.operands.fprop.a
        gathered = plan.tp.gathers_grad if grad else plan.tp.gathers_input
        whole = x.q.row is not None and (x.q.col is not None or x.q.format.col_from_row)
        if x.q.format == quantizer.format and whole and not gathered:
            return x.q.map(Tensor.clone) if plan.sink.late and x.quantizer is not None else x.q
    return plain(as_matrix(x, plan.dtype))


def output_shape(x_shape: torch.Size, features: int, tp: TensorParallel | None) -> tuple[int, ...]:
    """Of y for x of x_shape. tp: of the linear, where a gather or a scatter of tokens changes the first dimension."""
    leading = list(x_shape[:-1])
    if tp is not None and tp.gathers_input:
        leading[0] *= tp.size
    elif tp is not None and tp.gathers_grad:
        leading[0] //= tp.size
    return (*leading, features)


def as_output(
    y: Tensor, x_shape: torch.Size, quantizer: Quantizer | None = None, tp: TensorParallel | None = None
) -> Tensor:
    """y[M, N] as [..., N] with the leading dimensions of x_shape, not a view of anything; quantized when a quantizer is
    given. tp: as of output_shape."""
    shape = output_shape(x_shape, y.shape[-1], tp)
    if quantizer is not None:
        return QuantizedTensor(quantizer.quantize(plain(y))[0], shape)
    return y if y.shape == shape else _unsafe_view(y, shape)


def close_pass(call: Call) -> None:
    """After a module's backward."""
    if call.pools is not None:
        call.pools.close(call.first)


def in_dtype(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient as a plain tensor in the dtype of what it belongs to, where there is one."""
    grad = grad.dequantize() if isinstance(grad, QuantizedTensor) else grad
    return None if grad is None or like is None else grad.to(like.dtype)


class LinearFunction(torch.autograd.Function):
    """y[..., N] = x[..., K] @ weight[N, K]^T + bias[N] + residual[..., N]."""

    @forward_method
    def forward(ctx: Any, call: Call, x: Tensor, *params: Tensor | None) -> Tensor:
        (plan,), (weight, bias, residual) = call.plans, params
        need_x, need_w = call.grad and x.requires_grad, call.grad and weight.requires_grad
        operand = as_operand(x, plan, grad=False)
        y, kept = linear_forward(plan, operand, weight, bias, (need_x, need_w), call.cached[0], residual=residual)
        if call.grad:
            original = x if need_w and plan.keep_original else None
            save(ctx, *kept, weight if need_x or need_w else None, bias, original)
            ctx.call, ctx.needs, ctx.x_shape, ctx.x_dtype = call, (need_x, need_w), x.shape, x.dtype
        return as_output(y, x.shape, call.output, plan.tp)

    @backward_method
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, (need_x, need_w) = ctx.call, ctx.needs
        (plan,) = call.plans
        x, w, weight, bias, original = load(ctx)
        if original is not None:
            quantizer = plan.operands.wgrad.b
            by_row = quantizer.format.col_from_row
            x, _ = quantizer.quantize(plain(as_matrix(original, plan.dtype)), row=by_row, col=not by_row)
        param, needs = call.weights[0], (need_x, need_w, bias is not None and ctx.needs_input_grad[3])
        grad = quantize_grad(plan, as_operand(dy, plan, grad=True), param.shape[1], needs)
        dx, dw, db = linear_backward(plan, (x, w), weight, param, grad, needs)
        close_pass(call)
        if dx is not None:
            dx = as_output(dx, ctx.x_shape, call.grad_input).to(ctx.x_dtype)
        return None, dx, dw, in_dtype(db, bias), in_dtype(dy if ctx.needs_input_grad[4] else None, dy)
