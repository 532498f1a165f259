"""The Triton kernels of `grouped_cast.py`. A program does one tile, whose rows are of one group."""

from __future__ import annotations

import triton
import triton.language as tl

from te_lite.ops import tiles
from te_lite.ops.block_kernels import _mx_inverse, _row_blocks, _scaled_quarters, _scales
from te_lite.ops.cast_kernels import _E5M2_MAX, _FLOAT_MAX, Config, _emit, scale_of
from te_lite.ops.grouped_layout import place
from te_lite.ops.launch import begin
from te_lite.ops.row_kernels import _max_into

GROUP_AMAX_CONFIG = Config(32, 256, 4)
VECTOR_AMAX_CONFIG = Config(16, 128, 1)
WEIGHT_ROWS, TOKEN_ROWS = 64, 16  # a program of group_row_kernel; tokens are fewer
CAST_CONFIG = Config(128, 64, 4, registers=104)
BLOCK_CONFIG = Config(128, 128, 8)
MX_CONFIG = Config(32, 64, 1)
MX_VALUES_CONFIG = Config(32, 256, 4)  # a tile is as high as a block


@triton.jit
def _read(x, m0, n0, end, cols, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The four interleaved quarters of a tile of x, rows from `end` on as zero."""
    v, _, _ = tiles.quarters((x, None, None, None, None, None), m0, n0, end, cols, FORM, BLOCK_M, BLOCK_N)
    return v


@triton.jit(do_not_specialize=["groups"])
def group_amax_kernel(
    x, layout, by_group, by_row, by_col, groups, per_group, cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """by_group[g], by_row[m], by_col[g, n] = max with the largest |x| of each group, each row, each group's column."""
    begin()
    tile, n0, _ = tiles.tile_of_program(cols, BLOCK_N, False)
    group, m0, end, _ = place(layout, groups, tile, per_group, BLOCK_M, GROUPS)
    if group < groups and m0 < end:
        m, n = tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        mask = (m0 + m < end)[:, None] & (n < cols)[None, :]
        at = x + m0.to(tl.int64) * cols + (m[:, None] * cols + n[None, :])
        v = tiles.magnitude_bits(tl.load(at, mask=mask, other=0.0).to(tl.float32))
        if by_group is not None:
            tiles.record_amax(by_group + group, tl.max(v))
        if by_row is not None:
            _max_into(by_row, tl.max(v, axis=1), m0 + m, m0 + m < end)
        if by_col is not None:
            _max_into(by_col + group.to(tl.int64) * cols, tl.max(v, axis=0), n, n < cols)


@triton.jit
def _group_scale(scale, amax, scale_inv, group, first, eps, FP8_MAX: tl.constexpr, POW2: tl.constexpr):
    """The group's scale, given or from its amax; its inverse is written where this is the group's first tile."""
    s = 1.0
    if scale_inv is not None:
        if scale is not None:
            s = tl.load(scale + group)
        else:
            s = scale_of(tl.load(amax + group), eps, FP8_MAX, _FLOAT_MAX, POW2)
        if first:
            tl.store(scale_inv + group, tl.div_rn(1.0, s))
    return s


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["amax_out"])
def group_cast_kernel(
    amax_out, x, layout, scale, amax, row_scale, col_scale, row, col, scale_inv,
    eps, groups, per_group, cols, padded, group_stride, amax_stride,
    FP8_MAX: tl.constexpr, POW2: tl.constexpr, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """One read of x: fp8 by row [rows, cols] and by column [cols, padded], group g's from col + g * group_stride on.

    scale or amax [G]: a group's; or row_scale [rows] and col_scale [G, cols]. amax_out [G], amax_stride apart: raised
    to each group's.
    """
    begin()
    E5M2: tl.constexpr = FP8_MAX == _E5M2_MAX
    tile, n0, _ = tiles.tile_of_program(cols, BLOCK_N, False)
    group, m0, end, out0 = place(layout, groups, tile, per_group, BLOCK_M, GROUPS)
    if group < groups:
        v = _read(x, m0, n0, end, cols, FORM, BLOCK_M, BLOCK_N)
        if layout is None:
            starts = out0 == 0
        else:
            starts = m0 == tl.load(layout + group)
        s = _group_scale(scale, amax, scale_inv, group, starts & (n0 == 0), eps, FP8_MAX, POW2)
        if amax_out is not None:
            tiles.record_amax(amax_out + group * amax_stride, tl.max(tiles.largest_of(v)))
        _emit(v, (s, row_scale, None), (None, row, None), m0, n0, n0, end, cols, cols, padded, E5M2)
        if col is not None:
            col += group.to(tl.int64) * group_stride
            if col_scale is not None:
                col_scale += group.to(tl.int64) * cols
            outputs = (None, None, col)
            _emit(v, (s, None, col_scale), outputs, out0, n0, n0, out0 + end - m0, cols, cols, padded, E5M2)


@triton.jit(do_not_specialize=["groups"])
def group_row_kernel(
    x, layout, row, row_scale, col_amax, groups, per_group, cols,
    POW2: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One read of x: E4M3 by row, a scale a row, its inverse to row_scale; col_amax [G, cols] as group_amax_kernel's
    by_col. A program does ROWS rows, whole ones, BLOCK_N >= cols."""
    begin()
    group, m0, end, _ = place(layout, groups, tl.program_id(0), per_group, ROWS, GROUPS)
    if group < groups:
        n = tl.arange(0, BLOCK_N)
        known = n < cols
        most = tl.zeros([BLOCK_N], tl.int32)
        for i in tl.range(0, tl.minimum(ROWS, end - m0)):
            m = m0 + i
            at = m.to(tl.int64) * cols
            v = tl.load(x + at + n, mask=known, other=0.0).to(tl.float32)
            bits = tiles.magnitude_bits(v)
            if col_amax is not None:
                most = tl.maximum(most, bits)
            a = tl.minimum(tl.max(bits), 0x7F800000).to(tl.float32, bitcast=True)
            s = scale_of(a, 0.0, 448.0, _FLOAT_MAX, POW2)
            tl.store(row_scale + m, tl.div_rn(1.0, s))
            tl.store(row.to(tl.pointer_type(tl.uint8)) + at + n, tiles.to_fp8_bytes(v * s, False), mask=known)
        if col_amax is not None:
            _max_into(col_amax + group.to(tl.int64) * cols, most, n, known)


@triton.jit(do_not_specialize=["groups"])
def group_block_kernel(
    x, layout, row, row_scale, col, col_scale,
    eps, groups, per_group, cols, padded, group_stride, row_scale_m, row_scale_n, col_scale_m, col_scale_n, square_g,
    SQUARE: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr, FORM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """As group_cast_kernel in blocks: 1 x B along rows, B x 1 along columns, counted from each group's padded start;
    SQUARE: B x B, whose scales, the same for both layouts, are row_scale [G, rows / B, cols / B]. B: BLOCK_M."""
    begin()
    tile, n0, _ = tiles.tile_of_program(cols, BLOCK_N, False)
    group, m0, end, out0 = place(layout, groups, tile, per_group, BLOCK_M, GROUPS)
    if group < groups:
        v = _read(x, m0, n0, end, cols, FORM, BLOCK_M, BLOCK_N)
        largest = tiles.largest_of(v)
        out_end = out0 + end - m0
        if col is not None:
            col += group.to(tl.int64) * group_stride
        if SQUARE:
            s, stored = _scales(tl.max(largest), eps, False, CAP, POW2)
            at = group.to(tl.int64) * square_g + out0 // BLOCK_M * row_scale_m + n0 // BLOCK_M * row_scale_n
            tl.store(row_scale + at, stored)
            if row is not None:
                _scaled_quarters(v, s, row, m0, n0, n0, end, cols, cols, padded, True)
            if col is not None:
                _scaled_quarters(v, s, col, out0, n0, n0, out_end, cols, cols, padded, False)
        else:
            if row is not None:
                _row_blocks(v, row, row_scale, eps, m0, n0, n0, end, cols, cols, row_scale_m, row_scale_n, CAP, POW2)
            if col is not None:
                s, stored = _scales(tl.max(largest, axis=0), eps, False, CAP, POW2)
                n = n0 + tl.arange(0, BLOCK_N)
                at = (out0 // BLOCK_M).to(tl.int64) * col_scale_m + n.to(tl.int64) * col_scale_n
                tl.store(col_scale + at, stored, mask=n < cols)
                _scaled_quarters(v, s[None, :], col, out0, n0, n0, out_end, cols, cols, padded, False)


@triton.jit
def _mx_values(v, s, stored):
    """The fp32 values of v * s rounded to E4M3, times the inverse that was stored."""
    q = tiles.to_fp8_bytes(v * s, False).to(tl.float8e4nv, bitcast=True)
    return q.to(tl.float32) * _mx_inverse(stored)


@triton.jit(do_not_specialize=["groups"])
def group_mx_kernel(
    x, layout, row_values, col, col_scale, col_values, groups, per_group, cols,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One read of x in MX blocks of B = BLOCK_M: row_values, col_values [rows, cols] what blocks along rows and along
    columns hold, in 16 or 32 bits; col [rows, cols] E4M3 and col_scale [padded / B, cols] E8M0 of those along columns.
    """
    begin()
    Q: tl.constexpr = BLOCK_M // 4
    NB: tl.constexpr = BLOCK_N // BLOCK_M
    tile, n0, _ = tiles.tile_of_program(cols, BLOCK_N, False)
    group, m0, end, out0 = place(layout, groups, tile, per_group, BLOCK_M, GROUPS)
    if group < groups and m0 < end:
        v = _read(x, m0, n0, end, cols, FORM, BLOCK_M, BLOCK_N)
        if row_values is not None:
            for r in tl.static_range(4):
                blocks = tl.reshape(v[r], [Q, NB, BLOCK_M])
                s, stored = _scales(tl.max(tiles.magnitude_bits(blocks), axis=2), 0.0, True, 0, True)
                values = tl.reshape(_mx_values(blocks, s[:, :, None], stored[:, :, None]), [Q, BLOCK_N])
                values = values.to(row_values.dtype.element_ty)
                tiles.store_quarter(row_values, values, m0 + r, n0, n0, end, cols, cols)
        if col is not None or col_values is not None:
            s, stored = _scales(tl.max(tiles.largest_of(v), axis=0), 0.0, True, 0, True)
            if col is not None:
                n = n0 + tl.arange(0, BLOCK_N)
                start = out0
                if layout is None:
                    start += group * tl.cdiv(per_group, BLOCK_M) * BLOCK_M
                tl.store(col_scale + (start // BLOCK_M).to(tl.int64) * cols + n, stored, mask=n < cols)
                _scaled_quarters(v, s[None, :], col, m0, n0, n0, end, cols, cols, cols, True)
            if col_values is not None:
                values = [_mx_values(part, s[None, :], stored[None, :]).to(col_values.dtype.element_ty) for part in v]
                tiles.store_quarters(col_values, values, m0, n0, n0, end, cols, cols)


@triton.jit(do_not_specialize=["groups"])
def group_mx_values_kernel(
    data, layout, scale, out, groups, per_group, cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out = what col and col_scale of group_mx_kernel hold."""
    begin()
    tile, n0, _ = tiles.tile_of_program(cols, BLOCK_N, False)
    group, m0, end, out0 = place(layout, groups, tile, per_group, BLOCK_M, GROUPS)
    if group < groups and m0 < end:
        m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        start = out0
        if layout is None:
            start += group * tl.cdiv(per_group, BLOCK_M) * BLOCK_M
        at = (start // BLOCK_M).to(tl.int64) * cols + n
        stored = tl.load(scale + at, mask=n < cols, other=0)
        mask = (m < end)[:, None] & (n < cols)[None, :]
        inside = m[:, None].to(tl.int64) * cols + n[None, :]
        v = tl.load(data + inside, mask=mask, other=0.0).to(tl.float32) * _mx_inverse(stored)[None, :]
        tl.store(out + inside, v.to(out.dtype.element_ty), mask=mask)
