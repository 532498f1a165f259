"""te.scaled_grouped_mm: checks, and the recipe that a call follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_lite.autocast import Pass, State, current
from te_lite.functional.grouped import GroupedCall, GroupedFunction, grouped_wgrad
from te_lite.modules import checks
from te_lite.ops.grouped_layout import MOST_GROUPS
from te_lite.ops.source import DTYPES
from te_lite.quantize import replay
from te_lite.quantize.grouped import Rule, rule_of
from te_lite.quantize.quantizer import observer
from te_lite.recipe import HighPrecision, Recipe, as_recipe
from te_lite.tables import warn_once

_NAME = "te.scaled_grouped_mm"
_outstanding = replay.Outstanding()


def check_offs(owner: str, offs: Any, device: torch.device, groups: int | None = None) -> None:
    """What can be said of the groups' ends without reading them."""
    good = isinstance(offs, Tensor) and offs.dtype == torch.int32 and offs.dim() == 1 and offs.device == device
    if not good or not 0 < offs.shape[0] <= MOST_GROUPS or (groups is not None and offs.shape[0] != groups):
        given = f"{offs.dtype} {list(offs.shape)} on {offs.device}" if isinstance(offs, Tensor) else type(offs).__name__
        count = f"[{groups}]" if groups is not None else f"of 1 to {MOST_GROUPS} elements"
        raise ValueError(
            f"{owner} got offs {given}: must be int32 {count} on {device}, the end of each group; pass "
            "torch.cumsum(tokens of each expert, 0, dtype=torch.int32)"
        )


def _check(x: Any, w: Any, offs: Any, bias: Any) -> None:
    shapes = [f"{t.dtype} {list(t.shape)} on {t.device}" if isinstance(t, Tensor) else type(t).__name__ for t in (x, w)]
    if not isinstance(x, Tensor) or not isinstance(w, Tensor) or x.dim() != 2 or w.dim() not in (2, 3):
        raise TypeError(
            f"{_NAME} got {shapes[0]} and {shapes[1]}: must be tensors [M, K] and [G, K, N], or two matrices"
        )
    if x.shape[1] != w.shape[-2]:
        raise ValueError(
            f"{_NAME} got {shapes[0]} and {shapes[1]}: the last dimension of the first is the last but one of the "
            "second; of weights [G, N, K] pass weights.mT"
        )
    if x.dtype != w.dtype or x.dtype not in DTYPES or x.device != w.device:
        raise TypeError(
            f"{_NAME} got {shapes[0]} and {shapes[1]}: both must be bfloat16, float16 or float32, the same, on one "
            "device; cast or move one"
        )
    check_offs(_NAME, offs, x.device, w.shape[0] if w.dim() == 3 else None)
    if bias is not None:
        wanted = (w.shape[0], w.shape[2]) if w.dim() == 3 else None
        given = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        if given != wanted or bias.device != x.device:
            raise ValueError(f"{_NAME} got bias {given}: must be {wanted}, [G, N], on {x.device}, or None")
        if bias.dtype not in DTYPES:
            raise TypeError(f"{_NAME} got bias of {bias.dtype}: must be bfloat16, float16 or float32; cast it")


def fitting(owner: Any, rule: Rule, recipe: Recipe, n: int, k: int) -> Rule:
    """rule, or high precision, with a warning, where the features are not what fp8 GEMMs take. Warns where statistics
    are taken, too."""
    if observer() is not None and recipe.is_fp8 and not torch.compiler.is_compiling():
        warn_once(f"{owner}", f"te.collect_statistics leaves out {owner}: it has no rows of groups")
    multiple = recipe.feature_multiple
    if not (n % multiple or k % multiple):
        return rule
    if not torch.compiler.is_compiling():
        what = f"{owner} of weights [G, {n}, {k}] runs in high precision, not by {recipe.name!r}"
        warn_once(f"{owner}", f"{what}: features are not multiples of {multiple}; pad them, or pass recipe='bf16'")
    return Rule()


def _followed(recipe: Recipe | str | None) -> tuple[Recipe, State | None]:
    """The recipe of this call, and the autocast that it comes from."""
    if recipe is not None:
        return as_recipe(recipe), None
    state = current()
    if not torch.compiler.is_compiling() and replay.may_repeat():
        state = checks.followed(f"state of {_NAME}", _NAME, _outstanding, state)
    if state is None or not state.enabled:
        return HighPrecision(), state
    return state.recipe, state


def scaled_grouped_mm(
    x: Tensor, w_t: Tensor, offs: Tensor, *, recipe: Recipe | str | None = None, bias: Tensor | None = None
) -> Tensor:
    """y[M, N]: y[m] = x[m] @ w_t[g] + bias[g] for the tokens m of group g, the expert that they were sent to.

    x [M, K]: tokens sorted by group. w_t [G, K, N]: a transposed view of weights [G, N, K] (other strides are copied).
    offs: int32 [G] on x's device, the end of each group, as torch._grouped_mm takes it; groups of any size, none too.
    Rows from offs[-1] on belong to no group: y and the gradient of x are zero there. recipe: a te.recipe object or
    name; None: that of the open te.autocast, else high precision. Every group is quantized as a matrix of its own.
    bias: [G, N]. x, w_t, bias: bfloat16, float16 or float32. Differentiable in all three, once.

    x [N, M], w_t [M, K]: the second form, of a weight gradient: out[G, N, K], out[g] the product over group g's columns
    of x and rows of w_t, quantized as in backward, x as the gradient. It has no gradient.

    The host never waits for offs, and a CUDA graph may be replayed with others. On a GPU they are not read before the
    kernels run: ends that decrease or lie beyond M make y nan. On the CPU they raise ValueError, as do shapes that do
    not fit; TypeError: dtypes. Delayed scaling raises ValueError: its scales live in te.GroupedLinear.
    """
    compiling = torch.compiler.is_compiling()
    used, state = _followed(recipe)
    if used.delayed():
        raise ValueError(
            f"{_NAME} under delayed scaling: its scales must live between the calls; use te.GroupedLinear, or another "
            "recipe, such as 'current'"
        )
    amp = checks.amp_dtype(x) if isinstance(x, Tensor) else None
    if amp is not None:
        x, w_t = x.to(amp), w_t.to(amp)
    _check(x, w_t, offs, bias)
    if not compiling:
        checks.check_recipe(used, x.device, False)
        Pass.any_module = True
    n, k = (w_t.shape[2], w_t.shape[1]) if w_t.dim() == 3 else (x.shape[0], w_t.shape[1])
    rule = fitting(_NAME, rule_of(used), used, n, k)
    grad, note = torch.is_grad_enabled(), None
    if w_t.dim() == 2:
        if grad and (x.requires_grad or w_t.requires_grad):
            raise NotImplementedError(
                f"{_NAME} of two matrices, a weight gradient, has no gradient; call it under torch.no_grad(), or "
                "detach both"
            )
        return grouped_wgrad(rule, x.mT.contiguous(), w_t.contiguous(), offs.contiguous())
    if recipe is None and not compiling:  # computed again, a call with recipe= follows that
        _outstanding.start(state)
        note = _outstanding.note(state, grad)
    call = GroupedCall(rule, grad, note=note)
    return GroupedFunction.apply(call, x.contiguous(), w_t.mT.contiguous(), bias, offs.contiguous())
