"""Grouped GEMMs in Triton, for what torch's do not take: E5M2, blocks of scales, fp16 and fp32, bias, accumulation.

    rows_kernel     out[m, n] = sum_k a[m, k] * b[g, n, k]       m in group g: fprop and dgrad
    groups_kernel   out[g, n, k] = sum_m a[m, n] * b[m, k]       over the m of group g: wgrad

A program goes through tiles program, program + programs, ..., which are found from the layout on the device: a tile of
128 padded rows is one of rows_kernel's rows of tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from te_lite.ops.grouped_layout import place
from te_lite.ops.launch import begin


class GemmConfig(NamedTuple):
    """A tile of the product and of the inner dimension. group_m: rows of tiles done together, for the L2 cache.
    persistent: programs a multiprocessor, each with many tiles; 0: a program for each tile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    persistent: int = 1


@triton.jit
def _load(source, row, col, rows, cols, stride, TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """source[row : row + ROWS, col : col + COLS]. By pointers zero from `rows` and `cols` on; a descriptor knows the
    whole matrix alone."""
    if TMA:
        tile = source.load([row, col])
    else:
        m, n = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        at = source + m[:, None].to(tl.int64) * stride + n[None, :]
        tile = tl.load(at, mask=(m < rows)[:, None] & (n < cols)[None, :], other=0.0)
    return tile


@triton.jit
def _write(out, acc, row, col, rows, cols, ADD: tl.constexpr):
    """out[row :, col :] = acc, or += acc, within rows x cols; a quarter of the columns after the other: the addresses
    of a whole tile, and what is added to, would not fit into registers."""
    Q: tl.constexpr = acc.shape[1] // 4
    m, n = tl.arange(0, acc.shape[0]), tl.arange(0, Q)
    halves = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0], 2, 2 * Q]), [0, 2, 1]))
    out += row.to(tl.int64) * cols + col
    for half in tl.static_range(2):
        quarters = tl.split(tl.permute(tl.reshape(halves[half], [acc.shape[0], 2, Q]), [0, 2, 1]))
        for i in tl.static_range(2):
            n0 = (2 * half + i) * Q
            at = out + (m[:, None] * cols + n0 + n[None, :])
            mask = (row + m < rows)[:, None] & (col + n0 + n < cols)[None, :]
            v = quarters[i]
            if ADD:
                v += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, v.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _step(acc, ta, tb, a_scale, b_scale, SCALES: tl.constexpr, EXACT: tl.constexpr):
    """acc + ta @ tb. EXACT: so many products at most are summed before they are added in fp32; 0: any number."""
    if SCALES == "blocks":
        acc += tl.dot(ta, tb) * a_scale[:, None] * b_scale[None, :]
    elif EXACT:
        acc = tl.dot(ta, tb, acc, max_num_imprecise_acc=EXACT)
    else:
        acc = tl.dot(ta, tb, acc, input_precision="ieee")
    return acc


@triton.jit
def _swizzle(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of the tile-th of tiles_m * tiles_n tiles: columns of GROUP_M tiles, one after the other."""
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["groups"])
def rows_kernel(
    a, b, a_scale, b_scale, bias, out, layout,
    groups, n, k, lda, ldb, b_rows, a_scale_g, a_scale_m, a_scale_k, b_scale_g, b_scale_n, b_scale_k,
    TMA: tl.constexpr, INNER_FIRST: tl.constexpr, SCALES: tl.constexpr, B_BLOCK: tl.constexpr, EXACT: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """a [M, k], b [groups * b_rows, ...]: group g's from row g * b_rows on, [n, k] or INNER_FIRST [k, n]; out [M, n].

    SCALES: "none"; "outer", of a's rows and b's, applied to the sum; "blocks" along k of BLOCK_K. A scale of a is at
    group * a_scale_g + row * a_scale_m + block * a_scale_k, of b likewise with column // B_BLOCK.
    """
    begin()
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_m = tl.load(layout + 2 * groups + 2) // BLOCK_M
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _swizzle(tile, tiles_m, tiles_n, GROUP_M)
        group, m0, end, _ = place(layout, groups, tile_m, 0, BLOCK_M, GROUPS)
        n0 = tile_n * BLOCK_N
        if m0 < end:
            rm, rn = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
            if SCALES != "none":
                a_at = a_scale + group.to(tl.int64) * a_scale_g + rm.to(tl.int64) * a_scale_m
                b_at = b_scale + group.to(tl.int64) * b_scale_g + rn // B_BLOCK * b_scale_n
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            b0 = group * b_rows
            for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
                k0 = step * BLOCK_K
                ta = _load(a, m0, k0, end, k, lda, TMA, BLOCK_M, BLOCK_K)
                if INNER_FIRST:
                    tb = _load(b, b0 + k0, n0, b0 + b_rows, n, ldb, TMA, BLOCK_K, BLOCK_N)
                else:
                    tb = _load(b, b0 + n0, k0, b0 + b_rows, k, ldb, TMA, BLOCK_N, BLOCK_K).T
                sa, sb = 0.0, 0.0
                if SCALES == "blocks":
                    sa = tl.load(a_at + step * a_scale_k, mask=rm < end, other=0.0)
                    sb = tl.load(b_at + step * b_scale_k, mask=rn < n, other=0.0)
                acc = _step(acc, ta, tb, sa, sb, SCALES, EXACT)
            if SCALES == "outer":
                acc *= tl.load(a_at, mask=rm < end, other=0.0)[:, None]
                acc *= tl.load(b_at, mask=rn < n, other=0.0)[None, :]
            if bias is not None:
                acc += tl.load(bias + group.to(tl.int64) * n + rn, mask=rn < n, other=0.0).to(tl.float32)[None, :]
            _write(out, acc, m0, n0, end, n, False)


@triton.jit(do_not_specialize=["groups"])
def groups_kernel(
    a, b, a_scale, b_scale, out, layout,
    groups, n, k, lda, ldb, out_g, a_scale_g, a_scale_n, a_scale_m, b_scale_g, b_scale_k, b_scale_m,
    TMA: tl.constexpr, INNER_FIRST: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[g] [n, k], from out + g * out_g on, in tiles of BLOCK_M x BLOCK_N; with ADD added to what is there.

    INNER_FIRST: a [M, n], b [M, k] as they lie; else their columns, a [n, P], b [k, P], each group padded with zeros to
    whole tiles of BLOCK_K. SCALES as in rows_kernel; blocks are of BLOCK_K padded rows.
    """
    begin()
    tiles_n, tiles_k = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    for tile in tl.range(tl.program_id(0), groups * tiles_n * tiles_k, tl.num_programs(0)):
        group = tile // (tiles_n * tiles_k)
        tile_n, tile_k = _swizzle(tile % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_M)
        n0, k0 = tile_n * BLOCK_M, tile_k * BLOCK_N
        first, end = tl.load(layout + group), tl.load(layout + group + 1)
        padded = tl.load(layout + groups + 2 + group)
        rn, rk = n0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_N)
        if SCALES != "none":
            a_at = a_scale + group.to(tl.int64) * a_scale_g + rn * a_scale_n
            b_at = b_scale + group.to(tl.int64) * b_scale_g + rk * b_scale_k
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in tl.range(0, tl.cdiv(end - first, BLOCK_K)):
            m0 = padded + step * BLOCK_K
            if INNER_FIRST:
                m0 = first + step * BLOCK_K
                ta = _load(a, m0, n0, end, n, lda, TMA, BLOCK_K, BLOCK_M).T
                tb = _load(b, m0, k0, end, k, ldb, TMA, BLOCK_K, BLOCK_N)
            else:
                ta = _load(a, n0, m0, n, m0 + BLOCK_K, lda, TMA, BLOCK_M, BLOCK_K)
                tb = _load(b, k0, m0, k, m0 + BLOCK_K, ldb, TMA, BLOCK_N, BLOCK_K).T
            sa, sb = 0.0, 0.0
            if SCALES == "blocks":
                block = (m0 // BLOCK_K).to(tl.int64)
                sa = tl.load(a_at + block * a_scale_m, mask=rn < n, other=0.0)
                sb = tl.load(b_at + block * b_scale_m, mask=rk < k, other=0.0)
            acc = _step(acc, ta, tb, sa, sb, SCALES, EXACT)
        if SCALES == "outer":
            acc *= tl.load(a_at, mask=rn < n, other=0.0)[:, None]
            acc *= tl.load(b_at, mask=rk < k, other=0.0)[None, :]
        _write(out + group.to(tl.int64) * out_g, acc, n0, k0, n, k, ADD)
