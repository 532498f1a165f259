"""Per-tensor casts: what a `Source` stands for, read once, written in every form that is wanted.

Current scaling is two launches without a host sync: `amax` leaves at most 1024 partial maxima on the device,
which each program of `transform` reduces again to compute the scale itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.ops import cast_kernels as kernels
from te_lite.ops.launch import launch, sm_count
from te_lite.ops.registry import PLAIN, register, returns_nothing
from te_lite.ops.scalars import new_scalar
from te_lite.ops.source import FLAT, WORDS, Source, SumDtype, of_source, produce_ref
from te_lite.ops.sums import column_sums, partial_sums
from te_lite.ops.transpose import PAD, padded_rows, transpose_into_ref
from te_lite.ops.word_tiles import words_fit

FP8_MAX: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_FLOAT_MAX = torch.finfo(torch.float32).max


class Transformed(NamedTuple):
    """What `transform` wrote; the forms that were not asked for are None."""

    hp: Tensor | None  # [M, N]
    row: Tensor | None  # fp8 [M, N]
    col: Tensor | None  # fp8 [N, Mp], Mp = M rounded up to a multiple of 16, zero bytes from M on
    scale_inv: Tensor | None  # fp32 [1]
    scale: Tensor | None  # fp32 [1], where it was not given
    bias_grad: Tensor | None  # [N]
    act: Tensor | None  # high precision [M, F], or fp8 [F, Mp]
    act_scale_inv: Tensor | None  # fp32 [1]


def scale_from_amax_ref(
    amax: Tensor, fp8_max: float, eps: float = 0.0, pow2: bool = False, largest: float = _FLOAT_MAX
) -> Tensor:
    """Scale of current scaling, elementwise, fp32 (the rule is Transformer Engine's, bit for bit).

    a = eps where amax < eps; s = 1 where a is 0, inf or nan, else fp8_max / a by IEEE division, and `largest`
    where that overflows; with pow2 the mantissa bits of s are cleared.
    """
    a = torch.where(amax < eps, eps, amax)
    s = torch.full_like(a, fp8_max) / a
    s = torch.where(s == torch.inf, largest, s)
    s = torch.where((a > 0) & (a < torch.inf), s, 1.0)
    return (s.view(torch.int32) & 0x7F800000).view(torch.float32) if pow2 else s


def transform(
    source: Source, *, hp_dtype: torch.dtype | None = None, fp8_dtype: torch.dtype | None = None, row: bool = False,
    col: bool = False, scale: Tensor | None = None, amax: Tensor | None = None, amax_out: Tensor | None = None,
    pow2: bool = False, eps: float = 0.0, bias_grad: SumDtype = None, row_scale: Tensor | None = None,
    col_scale: Tensor | None = None, act_dtype: torch.dtype | None = None, act_scale: Tensor | None = None,
    op: Callable[..., None] | None = None,
) -> Transformed:  # fmt: skip
    """Unfused, with v = produce_ref(source), fp32 [M, N]:

        s         = scale, or scale_from_amax_ref(max(amax), largest value of fp8_dtype, eps, pow2)
        q         = (v * s).clamp(-largest, largest).to(fp8_dtype)   # nearest even; nan stays, inf saturates
        hp        = v.to(hp_dtype)
        row       = q                                                # [M, N]
        col       = q.t(), zero padded to [N, Mp]
        scale_inv = 1 / s                                            # a new fp32 [1]
        scale     = s                                                # likewise, of amax
        bias_grad = v.sum(0).to(bias_grad)                           # [N], the same bits on every run
        amax_out  = max(amax_out, |v|.max()), nan counting as inf    # in place; one element of any tensor

    act_dtype: of a gradient of act(h) [M, F] alone, from the same read: act(h) in that dtype, or with act_scale, fp32
    [1], the col and the scale_inv that transform(act(h), fp8_dtype=act_dtype, scale=act_scale, col=True) gives.
    row_scale, col_scale: fp32 [M], [N]: scales of row and col in place of s, and no scale_inv; row without a row_scale
    and without col takes col_scale.
    scale: fp32 [1]. amax: fp32 [P], P <= 1024; one of them with fp8_dtype, unless there are vectors. One read of the
    source, one launch (two with bias_grad). op: the oracle, in its place. Errors: ValueError, TypeError: fp8 without a
    layout or a scale; a scale that is not fp32; act_dtype for another source.
    """
    if fp8_dtype is not None:
        if not (row or col):
            raise ValueError(f"fp8_dtype {fp8_dtype} with row=False, col=False: ask for at least one layout")
        given = amax if scale is None else scale
        if given is None and row_scale is None and col_scale is None:
            raise ValueError(f"fp8_dtype {fp8_dtype} without a scale: pass scale, amax, row_scale or col_scale")
        if given is not None and (given.dtype != torch.float32 or given.numel() > kernels.MOST_PARTIALS):
            raise TypeError(
                f"a scale or amax of {given.dtype} {tuple(given.shape)}: must be float32, at most "
                f"{kernels.MOST_PARTIALS} elements; reduce it first"
            )
    x, (m, n), act = source.x, source.x.shape, None
    options: Any = scale, amax, row_scale, col_scale, act_scale, eps, pow2
    if op is None and amax_out is None and type(x) not in PLAIN:
        # A compiler takes two calls with the same arguments for one where they write to nothing that they are given.
        flat = *source[:8], *source.activation[:2]
        made = iter(_transformed_op(*flat, *options, hp_dtype, fp8_dtype, row, col, bias_grad or None, act_dtype))
        scaled = scale is not None or amax is not None
        there = hp_dtype, row, col, scaled, amax is not None, bias_grad, act_dtype, act_scale is not None
        return Transformed(*[next(made) if one else None for one in there])
    scalar = new_scalar if op is None else _new_scalar  # CUDA graphs of a compiler own what its ops return
    if act_dtype is not None:
        if source.kind != "dact":
            raise ValueError(f"act_dtype={act_dtype} for a source of kind {source.kind!r}: pass a gradient, by dact()")
        width = source.tile_cols
        act = x.new_empty((m, width) if act_scale is None else (width, -(-m // PAD) * PAD), dtype=act_dtype)
    elif source.kind == "act" and source.activation.glu:
        n //= 2
    out = Transformed(
        None if hp_dtype is None else x.new_empty((m, n), dtype=hp_dtype),
        x.new_empty((m, n), dtype=fp8_dtype) if row else None,
        x.new_empty((n, -(-m // PAD) * PAD), dtype=fp8_dtype) if col else None,
        None if scale is None and amax is None else scalar(x),
        None if amax is None else scalar(amax),
        x.new_empty((n,), dtype=bias_grad) if bias_grad else None,
        act,
        None if act_scale is None else scalar(act_scale),
    )
    (op or _transform_op)(*source[:8], *source.activation[:2], *options, *out, amax_out)
    return out


def _new_scalar(like: Tensor) -> Tensor:
    return like.new_empty((1,), dtype=torch.float32)


def transform_ref(source: Source, **wanted: Any) -> Transformed:
    """The oracle of `transform`, of the same arguments: plain torch on any device."""
    return transform(source, **wanted, op=cast_ref)


@of_source
def cast_ref(source, scale, amax, row_scale, col_scale, act_scale, eps, pow2, hp, row, col, scale_inv, scale_out,
             bias_grad, act, act_scale_inv, amax_out):  # fmt: skip
    v = produce_ref(source)
    if act is not None:
        outputs = (act, None, None, None) if act_scale is None else (None, None, act, act_scale_inv)
        activated = source._replace(kind="act", dy=None)
        cast_ref(*activated.flat, act_scale, *[None] * 4, 0.0, False, *outputs, *[None] * 5)
    if hp is not None:
        hp.copy_(v)
    if bias_grad is not None:
        bias_grad.copy_(v.sum(0))
    if amax_out is not None:
        amax_out.copy_(torch.maximum(amax_out, _amax_of(v).view(amax_out.shape)))
    by_row, by_col = col_scale if row_scale is None else row_scale[:, None], col_scale
    if scale_inv is not None:
        largest = FP8_MAX[(col if row is None else row).dtype]
        s = scale_from_amax_ref(amax.abs().max(), largest, eps, pow2) if scale is None else scale.view(())
        scale_inv.copy_(1.0 / s)
        if scale_out is not None:
            scale_out.copy_(s)
        by_row = by_col = s
    if row is not None:
        row.copy_(saturated(v * by_row, FP8_MAX[row.dtype]))
    if col is not None:
        q = row if row is not None and by_row is by_col else saturated(v * by_col, FP8_MAX[col.dtype]).to(col.dtype)
        transpose_into_ref(q, col)


def saturated(q: Tensor, largest: float) -> Tensor:
    """A copy of q within [-largest, largest], ready for a cast to fp8: whether torch's own cast saturates differs by
    version and type. A nan becomes the positive one, as the hardware's conversion does."""
    return torch.nan_to_num(q, nan=float("nan"), posinf=largest, neginf=-largest).clamp_(-largest, largest)


def _amax_of(v: Tensor) -> Tensor:
    if v.numel() == 0:
        return v.new_zeros(1)
    return torch.nan_to_num(v.abs().max().view(1), nan=torch.inf, posinf=torch.inf)


@of_source
def _transform_cuda(source, scale, amax, row_scale, col_scale, act_scale, eps, pow2, hp, row, col, scale_inv, scale_out,
                    bias_grad, act, act_scale_inv, amax_out):  # fmt: skip
    rows, cols, form = source.rows, source.tile_cols, source.form
    few, hp_too, sums = rows * cols <= kernels.FEW, hp is not None, bias_grad is not None
    words = col is not None and scale_inv is not None and not (few or hp_too or sums) and words_fit(source)
    act_col = act_scale is not None
    counted = act_col and not (hp_too or sums) and source.x.element_size() == 2
    config = kernels.cast_config(col is not None or act_col, source.kind != "plain", few, hp_too, sums, counted)
    if words:
        form, config = WORDS, kernels.WORD_CONFIGS[row is not None]
    block_m, block_n, num_warps, registers, _ = config
    tiles_n, tiles_m = -(-cols // block_n), -(-rows // block_m)
    splits, partial = partial_sums(bias_grad, max(1, tiles_m))
    q = col if row is None else row
    fp8_max = 0.0 if q is None else FP8_MAX[q.dtype]
    kernel = kernels.one_row_kernel if rows == 1 else kernels.transform_kernel
    programs = tiles_n * splits or 1  # M = 0 needs one: scale_inv is written too
    outputs = (hp, row, col, scale_inv, scale_out, partial, act, act_scale_inv)
    tensors = (*source.tensors, amax, row_scale, col_scale, *outputs)
    numbers = (eps, rows, cols, padded_rows(rows), 0 if amax is None else amax.numel())
    constants = (form, fp8_max, pow2, block_m, block_n, tiles_m > splits)
    registers = None if tiles_m > splits else registers  # a loop needs more
    launch(kernel, programs, (amax_out, scale, act_scale), tensors, numbers, constants, num_warps, registers)
    if partial is not None:
        column_sums(partial, bias_grad)


_OPTIONS = "Tensor? scale, Tensor? amax, Tensor? row_scale, Tensor? col_scale, Tensor? act_scale, float eps, bool pow2"
# Outputs are arguments: an absent one costs nothing, where returning an empty tensor in its place takes 3 us.
_transform_op = register(
    f"transform({FLAT}, {_OPTIONS}, Tensor(a!)? hp, Tensor(b!)? row, Tensor(c!)? col, Tensor(d!)? scale_inv, "
    "Tensor(e!)? scale_out, Tensor(f!)? bias_grad, Tensor(g!)? act, Tensor(h!)? act_scale_inv, Tensor(i!)? amax_out) "
    "-> ()",
    cpu=cast_ref,
    cuda=_transform_cuda,
)


def _returning(op: Callable[..., None]) -> Callable[..., list[Tensor]]:
    """transform() by `op`, as an op that returns what there is of a Transformed."""

    @of_source
    def run(source, scale, amax, row_scale, col_scale, act_scale, eps, pow2, hp_dtype, fp8_dtype, row, col, bias_grad,
            act_dtype):  # fmt: skip
        out = transform(
            source, hp_dtype=hp_dtype, fp8_dtype=fp8_dtype, row=row, col=col, scale=scale, amax=amax,
            bias_grad=bias_grad, eps=eps, pow2=pow2, row_scale=row_scale, col_scale=col_scale, act_dtype=act_dtype,
            act_scale=act_scale, op=op,
        )  # fmt: skip
        return [t for t in out if t is not None]

    return run


_transformed_op = register(
    f"transformed({FLAT}, {_OPTIONS}, ScalarType? hp_dtype, ScalarType? fp8_dtype, bool row, bool col, "
    "ScalarType? bias_grad, ScalarType? act_dtype) -> Tensor[]",
    cpu=_returning(cast_ref),
    cuda=_returning(_transform_cuda),
    fake=_returning(returns_nothing),
)


def amax(source: Source) -> Tensor:
    """|produce_ref(source)|.max() as fp32 [P] partial maxima, nan counting as inf; their maximum is the amax.

    P <= 1024. One launch, no atomics. Returns source.amax where an earlier pass left it there.
    """
    return _amax_op(*source.flat) if source.amax is None else source.amax


def amax_ref(source: Source) -> Tensor:
    """The oracle of `amax`: one partial maximum, fp32 [1]."""
    return _amax_of(produce_ref(source)) if source.amax is None else source.amax


def _amax_programs(device: torch.device) -> int:
    # Of the device alone, not of the shape, so that fake tensors of unknown size have a known result.
    return min(kernels.AMAX_CONFIG.programs_per_sm * sm_count(device), kernels.MOST_PARTIALS)


@of_source
def _amax_cuda(source: Source) -> Tensor:
    partials = source.x.new_empty((_amax_programs(source.device),), dtype=torch.float32)
    block_m, block_n, num_warps, *_ = kernels.AMAX_CONFIG
    tensors, numbers = (*source.tensors, partials), (source.rows, source.tile_cols)
    constants = (source.form, block_m, block_n)
    launch(kernels.amax_kernel, partials.shape[0], (), tensors, numbers, constants, num_warps)
    return partials


def _amax_fake(kind, x, *rest) -> Tensor:
    return x.new_empty((_amax_programs(x.device) if x.device.type == "cuda" else 1,), dtype=torch.float32)


_amax_op = register(f"amax({FLAT}) -> Tensor", cpu=of_source(amax_ref), cuda=_amax_cuda, fake=_amax_fake)
