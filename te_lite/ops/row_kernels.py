"""The Triton kernels of `row_cast.py`: scales of rows and of columns."""

from __future__ import annotations

import triton
import triton.language as tl

from te_lite.ops.cast_kernels import _FLOAT_MAX, Config, scale_of
from te_lite.ops.launch import begin
from te_lite.ops.source import produce
from te_lite.ops.tiles import magnitude_bits, tile_of_program, to_fp8_bytes

VECTOR_AMAX_CONFIG = Config(16, 128, 1)
MOST_COLUMNS = 32768  # a row that one program holds
ROW_WARPS = (4, 8)  # of a plain tensor, of a source that is computed


@triton.jit
def _max_into(out, bits, at, mask):
    """out[at] = max(out[at], bits), nan counting as inf."""
    tl.atomic_max(out.to(tl.pointer_type(tl.int32)) + at, tl.minimum(bits, 0x7F800000), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["row_amax", "col_amax"])
def vector_amax_kernel(
    row_amax, col_amax, x, dy, mean, rstd, gamma, beta, rows, cols,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """row_amax[m], col_amax[n] = max with the largest |value| of each row and column, as bits; one tile a program."""
    begin()
    TWO: tl.constexpr = FORM.two
    tile_m, n0, _ = tile_of_program(cols, BLOCK_N, False)
    m0 = tile_m * BLOCK_M
    source = (x, dy, mean, rstd, gamma, beta)
    v, v2, _ = produce(source, m0, n0, rows, cols, FORM, BLOCK_M, BLOCK_N, 1)
    v, v2 = magnitude_bits(v), magnitude_bits(v2)
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    if row_amax is not None:
        _max_into(row_amax, tl.max(tl.maximum(v, v2) if TWO else v, axis=1), m, m < rows)
    if col_amax is not None:
        _max_into(col_amax, tl.max(v, axis=0), n, n < cols)
        if TWO:
            _max_into(col_amax, tl.max(v2, axis=0), n + cols, n < cols)


@triton.jit
def row_kernel(
    x, dy, mean, rstd, gamma, beta, row, row_scale, rows, cols,
    FORM: tl.constexpr, POW2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """E4M3 with one scale a row, in one read: a program holds BLOCK_M whole rows, BLOCK_N >= cols."""
    begin()
    TWO: tl.constexpr = FORM.two
    width = cols * 2 if TWO else cols
    m0 = tile_of_program(cols, BLOCK_N, FORM.kind == "norm")[0] * BLOCK_M
    source = (x, dy, mean, rstd, gamma, beta)
    v, v2, _ = produce(source, m0, 0, rows, cols, FORM, BLOCK_M, BLOCK_N, 1)
    bits = tl.max(magnitude_bits(v), axis=1)
    if TWO:
        bits = tl.maximum(bits, tl.max(magnitude_bits(v2), axis=1))
    s = scale_of(tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True), 0.0, 448.0, _FLOAT_MAX, POW2)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    tl.store(row_scale + m0 + m, tl.div_rn(1.0, s), mask=m0 + m < rows)
    mask = (m0 + m < rows)[:, None] & (n < cols)[None, :]
    out = row.to(tl.pointer_type(tl.uint8)) + m0.to(tl.int64) * width + m[:, None] * width + n[None, :]
    tl.store(out, to_fp8_bytes(v * s[:, None], False), mask=mask)
    if TWO:
        tl.store(out + cols, to_fp8_bytes(v2 * s[:, None], False), mask=mask)


@triton.jit
def vector_scales_kernel(amax, scale, inverse, n, POW2: tl.constexpr, BLOCK: tl.constexpr):
    """scale_of each amax, and its inverse."""
    begin()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = scale_of(tl.load(amax + i, mask=i < n, other=0.0), 0.0, 448.0, _FLOAT_MAX, POW2)
    tl.store(scale + i, s, mask=i < n)
    tl.store(inverse + i, tl.div_rn(1.0, s), mask=i < n)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def spread_kernel(scale, out, n, BLOCK: tl.constexpr):
    """out[i] = scale."""
    begin()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.zeros([BLOCK], tl.float32) + tl.load(scale), mask=i < n)
