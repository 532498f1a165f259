"""A linear for each group of tokens: forward and backward of te.scaled_grouped_mm and GroupedLinear.

y[m]  = x[m] @ w[g]^T + bias[g]                            for the tokens m of group g
dx[m] = dy[m] @ w[g]
dw[g] = sum over its tokens of dy[m]^T x[m],  dbias[g] = sum over its tokens of dy[m]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.functional.plan import inf_to_nan
from te_lite.functional.saved import backward_method, forward_method, wants, without_amp
from te_lite.ops.grouped_gemm import group_product, group_wgrad, group_wgrad_accumulate_
from te_lite.ops.grouped_layout import group_layout, group_sums
from te_lite.quantize.grouped import (
    Given,
    Operand,
    Rule,
    quantize_tokens,
    quantize_weights,
    weights_for_dgrad,
    wgrad_input,
)


class GroupedWgrad(NamedTuple):
    """functional/plan.py's PendingWgrad for all groups: dy and x for wgrad."""

    rule: Rule
    dy: Operand
    x: Operand
    layout: Tensor
    dtype: torch.dtype
    sizes: Sequence[int] | None = None

    def operands(self) -> tuple[Any, ...]:
        """As ops/grouped_gemm.py takes them: dy, x, layout, their scales, and how they are scaled."""
        x = wgrad_input(self.rule, self.x, self.layout, self.dtype)
        return self.dy.data, x.data, self.layout, self.dy.scale, x.scale, self.rule.wgrad_scaling

    def __call__(self, dtype: torch.dtype) -> Tensor:
        """dw[G, N, K] in dtype."""
        rule = self.rule
        return group_wgrad(*self.operands(), dtype, rule.wgrad_scaling == "none", rule.fast[2], self.sizes)

    def write(self, add: bool, *outs: Tensor) -> None:
        """outs += dw, or without add outs = dw: one [N, K] for each group, or one [G, N, K]."""
        rule, each = self.rule, list(outs[0].unbind()) if outs[0].dim() == 3 else list(outs)
        group_wgrad_accumulate_(each, *self.operands(), rule.wgrad_scaling == "none", rule.fast[2], self.sizes, add)

    def keep(self, copies_dy: bool, copies_x: bool) -> GroupedWgrad:
        if self.rule.kind != "none" and not self.rule.hp_wgrad:
            return self  # quantized
        copied = zip((self.dy, self.x), (copies_dy, copies_x), strict=True)
        dy, x = (one._replace(data=one.data.clone()) if copy else one for one, copy in copied)
        return self._replace(dy=dy, x=x)


class GroupedCall(NamedTuple):
    """What was decided for one call.

    grad: a backward may follow. weights: quantized ones to use, by row and for dgrad. given: under delayed scaling the
    scales of "x", "w", "dy", when they are used. sink: what becomes of the weight gradient, in place of its value.
    after: what follows backward. note: of replay.Outstanding, to be held as long as the call's graph. original: x
    itself is kept for wgrad, and quantized again. fresh: raises where the weights were written to since forward.
    sizes: the tokens of each group, all of x together, where the host knows them.
    """

    rule: Rule
    grad: bool
    weights: tuple[Operand, Operand] | None = None
    given: Callable[[str], Given | None] | None = None
    sink: Callable[[GroupedWgrad], Tensor | None] | None = None
    after: Callable[[], None] | None = None
    note: Any = None
    original: bool = False
    fresh: Callable[[], None] | None = None
    sizes: Sequence[int] | None = None


def _given(call: GroupedCall, name: str) -> Given | None:
    return None if call.given is None else call.given(name)


class GroupedFunction(torch.autograd.Function):
    """y[M, N] of x[M, K], w[G, N, K], bias[G, N] or None, offs int32 [G]: the module docstring."""

    @forward_method
    def forward(ctx: Any, call: GroupedCall, x: Tensor, w: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
        rule = call.rule
        need_x, need_w = call.grad and x.requires_grad, call.grad and w.requires_grad
        layout = group_layout(offs, x.shape[0])
        by_row, kept = quantize_tokens(rule, x, layout, False, True, need_w and not call.original, _given(call, "x"))
        assert by_row is not None
        if need_w and call.original:
            kept = Operand(x)
        if call.weights is None:
            of_w, seed = quantize_weights(rule, w, need_x, _given(call, "w"))
        else:
            of_w, seed = call.weights[0], None
        scaling, fast = rule.scaling, rule.fast[0]
        scales = by_row.scale, of_w.scale
        y = group_product(by_row.data, of_w.data, layout, *scales, scaling, bias, x.dtype, False, fast, call.sizes)
        if call.grad:
            kept_w = call.weights[1] if need_x and call.weights is not None else (None, None)
            data, scale = (None, None) if kept is None else kept
            again = w if need_x and call.weights is None else None
            ctx.save_for_backward(layout, data, scale, again, seed if need_x else None, *kept_w)
            ctx.call = call._replace(weights=None)  # what backward reads of them is saved
            ctx.needs, ctx.dtypes = (need_x, need_w), (x.dtype, w.dtype)
        return y

    @backward_method
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, rule, (need_x, need_w) = ctx.call, ctx.call.rule, ctx.needs
        layout, data, scale, again, seed, *of_w = ctx.saved_tensors
        need_w = need_w and (call.sink is None or wants(ctx, 2))
        dy = dy.to(ctx.dtypes[0]).contiguous()
        if dy.dtype is torch.float16 and rule.kind != "none":
            dy = inf_to_nan(dy)
        dx = dw = db = None
        by_row: Any = None
        by_col: Any = None
        if need_x or need_w:
            by_row, by_col = quantize_tokens(rule, dy, layout, True, need_x, need_w, _given(call, "dy"))
        if need_x:
            if call.fresh is not None and again is not None:
                call.fresh()
            w = Operand(*of_w) if again is None else weights_for_dgrad(rule, again, seed)
            given = (by_row.data, w.data, layout, by_row.scale, w.scale, rule.scaling, None, ctx.dtypes[0])
            dx = group_product(*given, rule.inner_first, rule.fast[1], call.sizes)
        if need_w:
            x: Any = (
                quantize_tokens(rule, data, layout, False, False, True)[1] if call.original else Operand(data, scale)
            )
            wgrad = GroupedWgrad(rule, by_col, x, layout, ctx.dtypes[0], call.sizes)
            dw = wgrad(ctx.dtypes[1]) if call.sink is None else call.sink(wgrad)
        if ctx.needs_input_grad[3]:
            db = group_sums(dy, layout)  # autograd casts it to the bias' dtype
        if call.after is not None:
            call.after()
        return None, dx, dw, db, None


@without_amp
def grouped_wgrad(rule: Rule, dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """dw[G, N, K] of dy[M, N] and x[M, K], quantized as in the backward of GroupedFunction."""
    layout = group_layout(offs, x.shape[0])
    of_x = quantize_tokens(rule, x, layout, False, False, True)[1]
    of_dy = quantize_tokens(rule, dy, layout, True, False, True)[1]
    assert of_x is not None and of_dy is not None
    return GroupedWgrad(rule, of_dy, of_x, layout, x.dtype)(x.dtype)
