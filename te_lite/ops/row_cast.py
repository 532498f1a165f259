"""Casts to E4M3 with one scale a row, or one a column for the transposed copy.

A row's scale needs the whole row, a column's the whole column: rows alone take one launch and one read (`row_cast`),
anything with columns takes two reads: `vector_amax`, `vector_scales`, then `transform` with both vectors.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from te_lite.ops.cast import saturate_, scale_from_amax_ref
from te_lite.ops.launch import launch
from te_lite.ops.registry import register
from te_lite.ops.row_kernels import (
    MOST_COLUMNS,
    ROW_WARPS,
    VECTOR_AMAX_CONFIG,
    row_kernel,
    vector_amax_kernel,
    vector_scales_kernel,
)
from te_lite.ops.source import ACTIVATIONS, FLAT, Source, produce_ref

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0


def _cols_of_tiles(x: Tensor, activation: str) -> int:
    return x.shape[1] // 2 if ACTIVATIONS[activation][1] else x.shape[1]


def vector_amax(source: Source, row: bool, col: bool) -> Tensor:
    """fp32 [M + N]: largest |v| of each row, then of each column, of v = produce_ref(source) [M, N].

    Only M or N of them when the other is not wanted. nan counts as inf.
    """
    out = source.x.new_zeros((source.rows * row + source.cols * col,), dtype=torch.float32)
    _vector_amax_op(*source[:-1], out[: source.rows] if row else None, out[source.rows * row :] if col else None)
    return out


def vector_amax_ref(source: Source, row: bool, col: bool) -> Tensor:
    """The oracle of `vector_amax`."""
    out = source.x.new_zeros((source.rows * row + source.cols * col,), dtype=torch.float32)
    _amax_ref(*source[:-1], out[: source.rows] if row else None, out[source.rows * row :] if col else None)
    return out


def _amax_ref(kind, x, dy, mean, rstd, gamma, beta, zero_centered, activation, row_amax, col_amax) -> None:
    v = produce_ref(Source(kind, x, dy, mean, rstd, gamma, beta, zero_centered, activation)).abs()
    v = torch.nan_to_num(v, nan=float("inf"), posinf=float("inf"))
    if not v.numel():
        return
    if row_amax is not None:
        row_amax.copy_(v.amax(1))
    if col_amax is not None:
        col_amax.copy_(v.amax(0))


def _amax_cuda(kind, x, dy, mean, rstd, gamma, beta, zero_centered, activation, row_amax, col_amax) -> None:
    rows, cols = x.shape[0], _cols_of_tiles(x, activation)
    base, glu = ACTIVATIONS[activation]
    block_m, block_n, num_warps, *_ = VECTOR_AMAX_CONFIG
    programs = -(-rows // block_m) * -(-cols // block_n)
    if programs:
        launch(
            vector_amax_kernel,
            programs,
            (row_amax, col_amax),
            (x, dy, mean, rstd, gamma, beta),
            (rows, cols),
            (kind, base, glu, zero_centered, block_m, block_n),
            num_warps,
        )


_vector_amax_op = register(
    f"vector_amax({FLAT}, Tensor(a!)? row_amax, Tensor(b!)? col_amax) -> ()",
    cpu=_amax_ref,
    cuda=_amax_cuda,
    fake=lambda *args: None,
)


def vector_scales_ref(amax: Tensor, eps: float, pow2: bool) -> tuple[Tensor, Tensor]:
    """The oracle of `vector_scales`."""
    scale = scale_from_amax_ref(amax, E4M3_MAX, eps, pow2)
    return scale, 1.0 / scale


def _vector_scales_cuda(amax: Tensor, eps: float, pow2: bool) -> tuple[Tensor, Tensor]:
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    n = amax.numel()
    if n:
        launch(vector_scales_kernel, -(-n // 1024), (), (amax, scale, inverse), (eps, n), (pow2, 1024), 4)
    return scale, inverse


_vector_scales_op = register(
    "vector_scales(Tensor amax, float eps, bool pow2) -> (Tensor, Tensor)",
    cpu=vector_scales_ref,
    cuda=_vector_scales_cuda,
    fake=lambda amax, eps, pow2: (torch.empty_like(amax), torch.empty_like(amax)),
)


def vector_scales(amax: Tensor, eps: float = 0.0, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) of scale_from_amax_ref(amax, 448, eps, pow2), elementwise; contiguous fp32."""
    return _vector_scales_op(amax, eps, pow2)


def row_cast(source: Source, eps: float = 0.0, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """(E4M3 [M, N], fp32 inverse scales [M]) of v = produce_ref(source), one scale a row.

    One launch and one read of the source, of at most MOST_COLUMNS (ops/row_kernels.py) columns.
    """
    return _row_cast_op(*source[:-1], eps, pow2)


def row_cast_ref(source: Source, eps: float = 0.0, pow2: bool = True) -> tuple[Tensor, Tensor]:
    """The oracle of `row_cast`."""
    v = produce_ref(source)
    scale, inverse = vector_scales_ref(vector_amax_ref(source, True, False), eps, pow2)
    return saturate_(v * scale[:, None], E4M3_MAX).to(E4M3), inverse


def _row_outputs(kind, x, dy, mean, rstd, gamma, beta, zero_centered, activation, eps, pow2) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape[0], x.shape[1] if kind == "dact" else _cols_of_tiles(x, activation)
    return x.new_empty((rows, cols), dtype=E4M3), x.new_empty((rows,), dtype=torch.float32)


def _row_cast_cuda(kind, x, dy, mean, rstd, gamma, beta, zero_centered, activation, eps, pow2):
    row, inverse = _row_outputs(kind, x, dy, mean, rstd, gamma, beta, zero_centered, activation, eps, pow2)
    cols = _cols_of_tiles(x, activation)
    if row.numel():
        base, glu = ACTIVATIONS[activation]
        block_n = triton.next_power_of_2(cols)
        launch(
            row_kernel,
            x.shape[0],
            (),
            (x, dy, mean, rstd, gamma, beta, row, inverse),
            (eps, x.shape[0], cols),
            (kind, base, glu, zero_centered, pow2, 1, block_n),
            ROW_WARPS[kind != "plain"],
        )
    return row, inverse


_row_cast_op = register(
    f"row_cast({FLAT}, float eps, bool pow2) -> (Tensor, Tensor)",
    cpu=lambda *args: row_cast_ref(Source(*args[:-2]), *args[-2:]),
    cuda=_row_cast_cuda,
    fake=_row_outputs,
)


def rows_fit(source: Source) -> bool:
    """True where `row_cast` can hold a row."""
    return source.cols <= MOST_COLUMNS
