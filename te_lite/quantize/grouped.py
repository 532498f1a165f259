"""How a recipe quantizes the operands of a grouped linear: every group as if it were a linear of its own.

    recipe                scales
    current, delayed      one for a group's tokens, one for an expert's weight (Transformer Engine's: each of its GEMMs
                          has quantizers of its own; an expert with outliers leaves the others alone)
    rowwise               x and dy: a token's; w: an output row's; for wgrad a column's within its group
    rowwise_with_gw_hp    as rowwise; w in dgrad one an expert; wgrad unquantized
    blockwise             1 x 128, w 128 x 128; for wgrad 128 x 1 within a group, counted from its first token
    mxfp8                 1 x 32, for wgrad and of w in dgrad 32 x 1, likewise; multiplied in high precision

A Rule says this in plain constants, which a trace of torch.compile holds. Scale formulas: docs/background/numerics.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.ops.grouped_cast import group_amax, group_blocks, group_cast, group_rows, group_vector_amax
from te_lite.ops.grouped_mx import group_mx, group_mx_values
from te_lite.ops.row_cast import vector_scales
from te_lite.ops.row_kernels import MOST_COLUMNS
from te_lite.recipe_base import Format
from te_lite.tables import warn_once

E4M3 = torch.float8_e4m3fn


class Scaling(NamedTuple):
    """How one operand is scaled. pow2: by powers of two only. eps: the least amax that is believed."""

    pow2: bool = False
    eps: float = 0.0


class Rule(NamedTuple):
    """kind: "none", "group" (a scale for each), "rows", "blocks", "mx". forward, backward: fp8 types. x, w, dy: how
    each is scaled. fast: whether fprop, dgrad, wgrad accumulate fast. hp_wgrad: wgrad is not quantized, and dgrad takes
    w with one scale an expert. delayed: scales are given."""

    kind: str = "none"
    forward: torch.dtype = E4M3
    backward: torch.dtype = E4M3
    x: Scaling = Scaling()
    w: Scaling = Scaling()
    dy: Scaling = Scaling()
    fast: tuple[bool, bool, bool] = (False, False, False)
    hp_wgrad: bool = False
    delayed: bool = False

    @property
    def scaling(self) -> str:
        """As ops/grouped_gemm.py calls it."""
        return "none" if self.kind == "mx" else self.kind

    @property
    def inner_first(self) -> bool:
        """Whether dgrad and wgrad read their operands as they lie, not a transposed copy."""
        return self.scaling == "none"

    @property
    def wgrad_scaling(self) -> str:
        return "none" if self.hp_wgrad else self.scaling


def rule_of(recipe: Any) -> Rule:
    """The rule of a recipe. NotImplementedError for one of the caller's own."""
    if not recipe.is_fp8:
        return Rule()
    if (recipe.mxfp8() or recipe.float8_block_scaling()) and recipe.fp8_format is Format.HYBRID:
        warn_once("grouped", f"{recipe.name} with HYBRID: in grouped linears dy is E4M3 in blocks, not E5M2")
    if recipe.mxfp8():
        return Rule("mx")
    if recipe.delayed():
        format = recipe.fp8_format
        return Rule("group", format.forward_dtype, format.backward_dtype, fast=(True, False, False), delayed=True)
    if recipe._kind == "rowwise":
        each = Scaling(recipe.use_power_2_scales)
        return Rule("rows", E4M3, E4M3, each, each, each, (True, False, False), recipe.high_precision_wgrad)
    if not (recipe.float8_current_scaling() or recipe.float8_block_scaling()):
        raise NotImplementedError(
            f"recipe {recipe.name!r} for a grouped linear: its quantizers know no groups; use one of 'bf16', "
            "'delayed', 'current', 'rowwise', 'rowwise_with_gw_hp', 'blockwise', 'mxfp8', or one te.Linear an expert"
        )
    gemms = recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad
    fprop, dgrad, wgrad = (not gemm.use_split_accumulator for gemm in gemms)
    given = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
    x, w, dy = (Scaling(one.power_2_scale, one.amax_epsilon) for one in given)
    kind, format = ("group", recipe.fp8_format) if recipe.float8_current_scaling() else ("blocks", Format.E4M3)
    return Rule(kind, format.forward_dtype, format.backward_dtype, x, w, dy, (fprop, dgrad, wgrad))


class Operand(NamedTuple):
    """Data of a GEMM, and its inverse scales, None in high precision."""

    data: Tensor
    scale: Tensor | None = None


class Given(NamedTuple):
    """Delayed scaling's: the scales, fp32 [G], and where amaxes are recorded, fp32 [G]; None: nowhere."""

    scale: Tensor
    amax: Tensor | None


Maybe = Operand | None


def quantize_tokens(
    rule: Rule, x: Tensor, layout: Tensor, grad: bool, row: bool, col: bool, given: Given | None = None
) -> tuple[Maybe, Maybe]:
    """(x[M, K] for fprop or dgrad where `row`, for wgrad where `col`). grad: it is dy.

    For wgrad: columns as ops/grouped_cast.py writes them; of mxfp8 the data and scales along columns, unless it is dy,
    whose values are given at once.
    """
    plain = Operand(x)
    made: Any
    if rule.kind == "none":
        return plain if row else None, plain if col else None
    if rule.kind == "mx":
        made = group_mx(x, layout, row=row, col=col, values=grad)
        data = made.col_values if grad else made.col
        by_row = None if made.row_values is None else Operand(made.row_values)
        return by_row, None if data is None else Operand(data, made.col_scale)
    if rule.hp_wgrad:
        by_row = quantize_tokens(rule._replace(hp_wgrad=False), x, layout, grad, row, False)[0] if row else None
        return by_row, plain if col else None
    how, dtype = (rule.dy, rule.backward) if grad else (rule.x, rule.forward)
    if rule.kind == "rows":
        by_row, amax = _rows(x, layout, how.pow2, col) if row else (None, group_vector_amax(x, layout, False)[1])
        return by_row, columns_of(x, layout, amax, how.pow2) if col else None
    return _cast(rule, how, dtype, x, layout, row, col, **_scales(rule, x, layout, given))


def _scales(rule: Rule, x: Tensor, layout: Tensor | None, given: Given | None) -> dict[str, Any]:
    """What _cast makes the scales from."""
    if rule.kind == "blocks":
        return {}
    return {"amax": group_amax(x, layout)} if given is None else {"scale": given.scale, "amax_out": given.amax}


def _cast(
    rule: Rule, how: Scaling, dtype: torch.dtype, x: Tensor, layout: Tensor | None, row: bool, col: bool, **scales: Any
) -> tuple[Maybe, Maybe]:  # fmt: skip
    """One read of x: with a scale a group, or in blocks."""
    common: Any = {"row": row, "col": col, "pow2": how.pow2, "eps": how.eps}
    if rule.kind == "blocks":
        made = group_blocks(x, layout, square=layout is None, **common)
    else:
        made = group_cast(x, layout, dtype, **common, **scales)
    by_row = None if made.row is None else Operand(made.row, made.row_scale)
    if made.col is None or made.col_scale is None:
        return by_row, None
    # Those of square blocks come as a transposed view, of which each group's GEMM would make a copy.
    return by_row, Operand(made.col, made.col_scale.contiguous() if layout is None else made.col_scale)


def _rows(x: Tensor, layout: Tensor | None, pow2: bool, col: bool) -> tuple[Operand, Tensor | None]:
    """Rows with a scale each; and where `col`, the amax of each group's columns from the same read, fp32 [G, C]."""
    if x.shape[-1] <= MOST_COLUMNS:
        data, inverse, amax = group_rows(x, layout, pow2, col)
        return Operand(data, inverse), amax
    found: Any = group_vector_amax(x, layout, True)
    scale, inverse = vector_scales(found[0], pow2)
    made: Any = group_cast(x, layout, E4M3, row=True, col=False, row_scale=scale)
    return Operand(made.row, inverse), found[1] if col else None


def columns_of(x: Tensor, layout: Tensor | None, amax: Any, pow2: bool) -> Operand:
    """Columns with a scale each, from their amax, fp32 [G, C]."""
    scale, inverse = vector_scales(amax, pow2)
    data: Any = group_cast(x, layout, E4M3, row=False, col=True, col_scale=scale).col
    return Operand(data, inverse)


def quantize_weights(rule: Rule, w: Tensor, col: bool, given: Given | None = None) -> tuple[Operand, Tensor | None]:
    """(w[G, N, K] for fprop, the seed from which weights_for_dgrad goes on where `col`, None if it needs none)."""
    how = rule.w
    if rule.kind == "none":
        return Operand(w), None
    if rule.kind == "mx":
        values: Any = group_mx(w, None, row=True).row_values
        return Operand(values), None
    if rule.kind == "rows":
        return _rows(w, None, how.pow2, col and not rule.hp_wgrad)
    scales = _scales(rule, w, None, given)
    by_row: Any = _cast(rule, how, rule.forward, w, None, True, False, **scales)[0]
    return by_row, scales.get("scale", scales.get("amax"))


def weights_for_dgrad(rule: Rule, w: Tensor, seed: Tensor | None) -> Operand:
    """w[G, N, K] for dgrad: [G, K, N], or where rule.inner_first as it lies. seed: quantize_weights's."""
    how = rule.w
    if rule.kind == "none":
        return Operand(w)
    made: Any
    if rule.kind == "mx":
        made = group_mx(w, None, col=True, values=True)
        return Operand(made.col_values)
    if rule.kind == "rows" and not rule.hp_wgrad:
        return columns_of(w, None, group_vector_amax(w, None, False)[1] if seed is None else seed, how.pow2)
    scales = _scales(rule, w, None, None) if seed is None else {"scale" if rule.delayed else "amax": seed}
    by_col: Any = _cast(rule, how, rule.forward, w, None, False, True, **scales)[1]
    return by_col


def weights_for_both(rule: Rule, w: Tensor, given: Given | None = None) -> tuple[Operand, Operand]:
    """(quantize_weights's, weights_for_dgrad's), in one read where one scale serves both."""
    if rule.kind in ("group", "blocks"):
        both: Any = _cast(rule, rule.w, rule.forward, w, None, True, True, **_scales(rule, w, None, given))
        return both
    of_w, seed = quantize_weights(rule, w, True, given)
    return of_w, weights_for_dgrad(rule, w, seed)


def wgrad_input(rule: Rule, x: Operand, layout: Tensor, dtype: torch.dtype) -> Operand:
    """What quantize_tokens kept of x for wgrad, as the GEMM reads it."""
    if rule.kind != "mx":
        return x
    data, scale = x
    assert scale is not None
    return Operand(group_mx_values(data, layout, scale, dtype))
