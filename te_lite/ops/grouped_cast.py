"""Casts of all groups in one launch: tokens x[M, C] in the groups of a layout, or weights [G, N, C].

Each group is cast as if it were a matrix of its own: with a scale of its own, or with one for each of its rows and
columns, or in blocks that start where it starts. Rows lie as in x. Columns of tokens are [C, P], P = capacity(M, G):
group g's begin at its padded start, zeros follow its tokens. Columns of weights are [G, C, N].

`layout` is that of ops/grouped_layout.py; for weights it is None, and x is [G, N, C].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from te_lite.ops import grouped_cast_kernels as kernels
from te_lite.ops.block_cast import BLOCK, E4M3, _cast_ref
from te_lite.ops.cast import FP8_MAX, saturated, scale_from_amax_ref
from te_lite.ops.grouped_layout import capacity, lanes, spans
from te_lite.ops.launch import launch
from te_lite.ops.registry import register
from te_lite.ops.source import Form
from te_lite.ops.transpose import transpose_into_ref

PLAIN = Form("plain")


class Cast(NamedTuple):
    """What was written; the forms that were not asked for are None. Scales are inverse ones."""

    row: Tensor | None = None  # [M, C] or [G, N, C]
    row_scale: Tensor | None = None
    col: Tensor | None = None  # [C, P] or [G, C, N]
    col_scale: Tensor | None = None


class Shape(NamedTuple):
    """The sizes of what a kernel reads, as one matrix [rows, cols]. padded: row length of its columns. per_group: rows
    of each group where all have the same. stride: from one group's columns to the next one's."""

    groups: int
    rows: int
    cols: int
    padded: int
    per_group: int = 0
    stride: int = 0

    @property
    def column_shape(self) -> tuple[int, ...]:
        return (self.groups, self.cols, self.padded) if self.per_group else (self.cols, self.padded)

    def numbers(self) -> tuple[int, int, int]:
        return self.groups, self.per_group, self.cols

    def programs(self, config: Any) -> int:
        rows = self.groups * -(-self.per_group // config.block_m) if self.per_group else self.padded // config.block_m
        return rows * -(-self.cols // config.block_n)

    def constants(self, config: Any) -> tuple[int, int, int]:
        return config.block_m, config.block_n, lanes(self.groups)

    def launch(self, kernel: Any, config: Any, tensors: tuple[Any, ...], *constants: Any) -> None:
        """A kernel that takes no numbers but numbers(). constants: in front of constants()."""
        given = (*constants, *self.constants(config))
        launch(kernel, self.programs(config), (), tensors, self.numbers(), given, config.num_warps)

    def spans(self, layout: Tensor | None) -> list[tuple[int, int, int, int]]:
        """As ops/grouped_layout.py's."""
        if layout is not None:
            return spans(layout, self.groups)
        n = self.per_group
        return [(g * n, (g + 1) * n, 0, self.padded) for g in range(self.groups)]


def shape_of(x: Tensor, layout: Tensor | None) -> Shape:
    if layout is not None:
        groups = layout.shape[1] - 2
        return Shape(groups, x.shape[0], x.shape[1], capacity(x.shape[0], groups))
    groups, n, cols = x.shape
    return Shape(groups, groups * n, cols, n, n, n * cols)


def _columns(col: Tensor, g: int) -> Tensor:
    return col[g] if col.dim() == 3 else col


def group_amax(x: Tensor, layout: Tensor | None) -> Tensor:
    """fp32 [G]: the largest |x| of each group, 0 of an empty one; nan counts as inf."""
    out = x.new_zeros((shape_of(x, layout).groups,), dtype=torch.float32)
    _amax_op(x, layout, out, None, None)
    return out


def group_vector_amax(x: Tensor, layout: Tensor | None, row: bool) -> tuple[Tensor | None, Tensor]:
    """(fp32 [M] or [G, N]: the largest |x| of each row where `row`, fp32 [G, C]: of each group's columns)."""
    shape = shape_of(x, layout)
    by_row = x.new_zeros(x.shape[:-1], dtype=torch.float32) if row else None
    by_col = x.new_zeros((shape.groups, shape.cols), dtype=torch.float32)
    _amax_op(x, layout, None, by_row, by_col)
    return by_row, by_col


def _amax_ref(
    x: Tensor, layout: Tensor | None, by_group: Tensor | None, by_row: Tensor | None, by_col: Tensor | None
) -> None:
    shape = shape_of(x, layout)
    v = torch.nan_to_num(x.reshape(-1, shape.cols).float().abs(), nan=torch.inf, posinf=torch.inf)
    for g, (first, end, *_) in enumerate(shape.spans(layout)):
        if end > first:
            if by_group is not None:
                by_group[g] = v[first:end].max()
            if by_row is not None:
                by_row.view(-1)[first:end] = v[first:end].amax(1)
            if by_col is not None:
                by_col[g] = v[first:end].amax(0)


def _amax_cuda(
    x: Tensor, layout: Tensor | None, by_group: Tensor | None, by_row: Tensor | None, by_col: Tensor | None
) -> None:
    config = kernels.VECTOR_AMAX_CONFIG if by_group is None else kernels.GROUP_AMAX_CONFIG
    shape_of(x, layout).launch(kernels.group_amax_kernel, config, (x, layout, by_group, by_row, by_col))


_amax_op = register(
    "group_amax(Tensor x, Tensor? layout, Tensor(a!)? by_group, Tensor(b!)? by_row, Tensor(c!)? by_col) -> ()",
    cpu=_amax_ref,
    cuda=_amax_cuda,
)


def group_rows(x: Tensor, layout: Tensor | None, pow2: bool, col_amax: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(E4M3 as x, inverse scales fp32, one a row; fp32 [G, C]: largest |x| of each group's columns, where `col_amax`).

    One launch and one read, of at most MOST_COLUMNS (ops/row_kernels.py) columns.
    """
    shape, empty = shape_of(x, layout), x.new_empty
    row, row_scale = empty(x.shape, dtype=E4M3), empty(x.shape[:-1], dtype=torch.float32)
    amax = x.new_zeros((shape.groups, shape.cols), dtype=torch.float32) if col_amax else None
    _rows_op(x, layout, pow2, row, row_scale, amax)
    return row, row_scale, amax


def _rows_ref(x, layout, pow2, row, row_scale, col_amax):
    shape, v = shape_of(x, layout), x.reshape(-1, x.shape[-1]).float()
    by_row = torch.zeros_like(row_scale)
    _amax_ref(x, layout, None, by_row, col_amax)
    scale = scale_from_amax_ref(by_row.view(-1), 448.0, 0.0, pow2)
    for first, end, *_ in shape.spans(layout):
        part = scale[first:end]
        row_scale.view(-1)[first:end] = 1.0 / part
        row.view(-1, shape.cols)[first:end] = saturated(v[first:end] * part[:, None], 448.0).to(E4M3)


def _rows_cuda(x, layout, pow2, row, row_scale, col_amax):
    shape = shape_of(x, layout)
    rows = kernels.WEIGHT_ROWS if layout is None else kernels.TOKEN_ROWS
    programs = shape.groups * -(-shape.per_group // rows) if layout is None else shape.padded // rows
    block_n = triton.next_power_of_2(shape.cols)
    constants = (pow2, rows, block_n, lanes(shape.groups))
    tensors, warps = (x, layout, row, row_scale, col_amax), min(16, max(4, block_n // 1024))
    launch(kernels.group_row_kernel, programs, (), tensors, shape.numbers(), constants, warps)


_rows_op = register(
    "group_rows(Tensor x, Tensor? layout, bool pow2, Tensor(a!) row, Tensor(b!) row_scale, Tensor(c!)? col_amax) -> ()",
    cpu=_rows_ref,
    cuda=_rows_cuda,
)


def group_cast(
    x: Tensor, layout: Tensor | None, fp8_dtype: torch.dtype, *, row: bool, col: bool, scale: Tensor | None = None,
    amax: Tensor | None = None, amax_out: Tensor | None = None, pow2: bool = False, eps: float = 0.0,
    row_scale: Tensor | None = None, col_scale: Tensor | None = None,
) -> Cast:  # fmt: skip
    """fp8 of x, a group's values times its scale, saturated; one read, one launch.

    scale: fp32 [G], or amax: fp32 [G], from which it follows as in current scaling: the inverse scales, fp32 [G], are
    then those of both layouts. Or row_scale: fp32, one a row, and col_scale: fp32 [G, C], of which no inverse is made.
    amax_out: fp32 [G], any stride, becomes the larger of itself and each group's amax.
    """
    shape = shape_of(x, layout)
    by_group = scale is not None or amax is not None
    inverse = x.new_empty((shape.groups,), dtype=torch.float32) if by_group else None
    rows = x.new_empty(x.shape, dtype=fp8_dtype) if row else None
    columns = x.new_empty(shape.column_shape, dtype=fp8_dtype) if col else None
    _cast_op(x, layout, scale, amax, row_scale, col_scale, eps, pow2, rows, columns, inverse, amax_out)
    return Cast(rows, inverse, columns, inverse)


def _group_cast_ref(x, layout, scale, amax, row_scale, col_scale, eps, pow2, row, col, scale_inv, amax_out):
    shape = shape_of(x, layout)
    dtype = (col if row is None else row).dtype
    largest, v = FP8_MAX[dtype], x.reshape(-1, shape.cols).float()
    if scale_inv is not None:
        scale = scale_from_amax_ref(amax, largest, eps, pow2) if scale is None else scale
        scale_inv.copy_(1.0 / scale)
    if amax_out is not None:
        found = torch.zeros_like(amax_out)
        _amax_ref(x, layout, found, None, None)
        torch.maximum(amax_out, found, out=amax_out)
    for g, (first, end, out0, out_end) in enumerate(shape.spans(layout)):
        values = v[first:end]
        if row is not None:
            by_row = scale[g] if row_scale is None else row_scale.view(-1)[first:end, None]
            row.view(-1, shape.cols)[first:end] = saturated(values * by_row, largest).to(dtype)
        if col is not None:
            q = saturated(values * (scale[g] if col_scale is None else col_scale[g]), largest).to(dtype)
            transpose_into_ref(q, _columns(col, g)[:, out0:out_end])


def _group_cast_cuda(x, layout, scale, amax, row_scale, col_scale, eps, pow2, row, col, scale_inv, amax_out):
    shape, config = shape_of(x, layout), kernels.CAST_CONFIG
    tensors = (x, layout, scale, amax, row_scale, col_scale, row, col, scale_inv)
    numbers = (eps, *shape.numbers(), shape.padded, shape.stride, 0 if amax_out is None else amax_out.stride(0))
    constants = (FP8_MAX[(col if row is None else row).dtype], pow2, PLAIN, *shape.constants(config))
    kernel, programs = kernels.group_cast_kernel, shape.programs(config)
    launch(kernel, programs, (amax_out,), tensors, numbers, constants, config.num_warps, config.registers)


_cast_op = register(
    "group_cast(Tensor x, Tensor? layout, Tensor? scale, Tensor? amax, Tensor? row_scale, Tensor? col_scale, "
    "float eps, bool pow2, Tensor(a!)? row, Tensor(b!)? col, Tensor(c!)? scale_inv, Tensor(d!)? amax_out) -> ()",
    cpu=_group_cast_ref,
    cuda=_group_cast_cuda,
)


def group_blocks(
    x: Tensor, layout: Tensor | None, *, square: bool, row: bool, col: bool, pow2: bool = True, eps: float = 0.0
) -> Cast:
    """E4M3 in blocks of 128, as block_cast of each group. Inverse scales in fp32.

    row: 1 x 128, scales [M, C/128]. col: 128 x 1, scales [P/128, C]. square, of weights: 128 x 128 for both, scales
    [G, N/128, C/128] by row and transposed by column.
    """
    shape = shape_of(x, layout)
    blocks, empty = -(-shape.cols // BLOCK), x.new_empty
    rows = empty(x.shape, dtype=E4M3) if row else None
    columns = empty(shape.column_shape, dtype=E4M3) if col else None
    if not square:
        row_scale = empty((blocks, shape.rows), dtype=torch.float32).t() if row else None
        col_scale = empty((shape.padded // BLOCK, shape.cols), dtype=torch.float32) if col else None
    else:
        row_scale = empty((shape.groups, -(-shape.per_group // BLOCK), blocks), dtype=torch.float32)
        col_scale = row_scale.transpose(1, 2)
    _blocks_op(x, layout, square, pow2, eps, rows, row_scale, columns, None if square else col_scale)
    return Cast(rows, row_scale, columns, col_scale)


def _blocks_ref(x, layout, square, pow2, eps, row, row_scale, col, col_scale):
    shape, v = shape_of(x, layout), x.reshape(-1, x.shape[-1]).float()
    rule = (False, eps, pow2, torch.finfo(x.dtype).max)
    for g, (first, end, out0, out_end) in enumerate(shape.spans(layout)):
        values = v[first:end]
        if row is not None or square:
            q, stored = _cast_ref(values, (BLOCK if square else 1, BLOCK), *rule)
            if square:
                row_scale[g] = stored
            else:
                row_scale[first:end] = stored
            if row is not None:
                row.view(-1, shape.cols)[first:end] = q
        if col is not None:
            if not square:
                q, stored = _cast_ref(torch.nn.functional.pad(values, (0, 0, 0, out_end - out0 - len(values))),
                                      (BLOCK, 1), *rule)  # fmt: skip
                col_scale[out0 // BLOCK : out_end // BLOCK] = stored
                q = q[: end - first]
            transpose_into_ref(q, _columns(col, g)[:, out0:out_end])


def _blocks_cuda(x, layout, square, pow2, eps, row, row_scale, col, col_scale):
    shape, config = shape_of(x, layout), kernels.BLOCK_CONFIG
    largest = torch.finfo(x.dtype).max
    cap = 255 - 127 - math.frexp(largest)[1] if pow2 else largest
    by_row = (0, 0) if row_scale is None else row_scale.stride()[-2:]
    by_col = (0, 0) if col_scale is None else col_scale.stride()
    numbers = (eps, *shape.numbers(), shape.padded, shape.stride, *by_row, *by_col)
    numbers += (row_scale.stride(0) if square else 0,)
    constants = (square, cap, pow2, PLAIN, *shape.constants(config))
    tensors = (x, layout, row, row_scale, col, col_scale)
    launch(kernels.group_block_kernel, shape.programs(config), (), tensors, numbers, constants, config.num_warps)


_blocks_op = register(
    "group_blocks(Tensor x, Tensor? layout, bool square, bool pow2, float eps, Tensor(a!)? row, "
    "Tensor(b!)? row_scale, Tensor(c!)? col, Tensor(d!)? col_scale) -> ()",
    cpu=_blocks_ref,
    cuda=_blocks_cuda,
)
