"""Casts to E4M3 with one scale a row, or one a column for the transposed copy.

A row's scale needs the whole row, a column's the whole column: rows alone take one launch and one read (`row_cast`),
anything with columns takes two reads: `vector_amax`, `vector_scales`, then `transform` with both vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from te_lite.ops import row_kernels as kernels
from te_lite.ops.cast import saturated, scale_from_amax_ref
from te_lite.ops.launch import launch
from te_lite.ops.registry import register
from te_lite.ops.source import FLAT, Source, of_source, produce_ref

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0


def vector_amax(source: Source, row: bool, col: bool, op: Callable[..., None] | None = None) -> Tensor:
    """fp32 [M + N]: largest |v| of each row, then of each column, of v = produce_ref(source) [M, N].

    Only M or N of them when the other is not wanted. nan counts as inf. op: the oracle, in its place.
    """
    rows = source.rows if row else 0
    out = source.x.new_zeros((rows + source.cols if col else rows,), dtype=torch.float32)
    by_row, by_col = out[:rows] if row else None, out[rows:] if col else None
    (op or _vector_amax_op)(*source.flat, by_row, by_col)
    return out


def vector_amax_ref(source: Source, row: bool, col: bool) -> Tensor:
    """The oracle of `vector_amax`."""
    return vector_amax(source, row, col, op=_amax_ref)


@of_source
def _amax_ref(source: Source, row_amax: Tensor | None, col_amax: Tensor | None) -> None:
    v = produce_ref(source).abs()
    v = torch.nan_to_num(v, nan=float("inf"), posinf=float("inf"))
    if not v.numel():
        return
    if row_amax is not None:
        row_amax.copy_(v.amax(1))
    if col_amax is not None:
        col_amax.copy_(v.amax(0))


@of_source
def _amax_cuda(source: Source, row_amax: Tensor | None, col_amax: Tensor | None) -> None:
    rows, cols = source.rows, source.tile_cols
    block_m, block_n, num_warps, *_ = kernels.VECTOR_AMAX_CONFIG
    programs = -(-rows // block_m) * -(-cols // block_n)
    constants = (source.form, block_m, block_n)
    amaxes = (row_amax, col_amax)
    launch(kernels.vector_amax_kernel, programs, amaxes, source.tensors, (rows, cols), constants, num_warps)


_vector_amax_op = register(
    f"vector_amax({FLAT}, Tensor(a!)? row_amax, Tensor(b!)? col_amax) -> ()", cpu=_amax_ref, cuda=_amax_cuda
)


def vector_scales_ref(amax: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """The oracle of `vector_scales`."""
    scale = scale_from_amax_ref(amax, E4M3_MAX, 0.0, pow2)
    return scale, 1.0 / scale


def _vector_scales_cuda(amax: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    n = amax.numel()
    launch(kernels.vector_scales_kernel, -(-n // 1024), (), (amax, scale, inverse), (n,), (pow2, 1024), 4)
    return scale, inverse


# (scale, 1 / scale) of scale_from_amax_ref(amax, 448, 0.0, pow2), elementwise; contiguous fp32.
vector_scales = register(
    "vector_scales(Tensor amax, bool pow2) -> (Tensor, Tensor)",
    cpu=vector_scales_ref,
    cuda=_vector_scales_cuda,
    fake=lambda amax, pow2: (torch.empty_like(amax), torch.empty_like(amax)),
)


def row_cast(source: Source, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """(E4M3 [M, N], fp32 inverse scales [M]) of v = produce_ref(source), one scale a row.

    One launch and one read of the source, of at most MOST_COLUMNS (ops/row_kernels.py) columns.
    """
    return _row_cast_op(*source.flat, pow2)


def row_cast_ref(source: Source, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """The oracle of `row_cast`."""
    v = produce_ref(source)
    scale, inverse = vector_scales_ref(vector_amax_ref(source, True, False), pow2)
    return saturated(v * scale[:, None], E4M3_MAX).to(E4M3), inverse


def _row_outputs(source: Source, pow2: bool) -> tuple[Tensor, Tensor]:
    empty, rows = source.x.new_empty, source.rows
    return empty((rows, source.cols), dtype=E4M3), empty((rows,), dtype=torch.float32)


@of_source
def _row_cast_cuda(source: Source, pow2: bool) -> tuple[Tensor, Tensor]:
    row, inverse = _row_outputs(source, pow2)
    if row.numel():
        rows, cols, num_warps = source.rows, source.tile_cols, kernels.ROW_WARPS[source.kind != "plain"]
        constants = (source.form, pow2, 1, triton.next_power_of_2(cols))
        launch(kernels.row_kernel, rows, (), (*source.tensors, row, inverse), (rows, cols), constants, num_warps)
    return row, inverse


_row_cast_op = register(
    f"row_cast({FLAT}, bool pow2) -> (Tensor, Tensor)",
    cpu=of_source(row_cast_ref),
    cuda=_row_cast_cuda,
    fake=of_source(_row_outputs),
)
