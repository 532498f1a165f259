"""The Triton kernels of `block_cast.py`: scales of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from te_lite.ops import tiles
from te_lite.ops.cast_kernels import Config, scale_of
from te_lite.ops.launch import begin
from te_lite.ops.source import Form
from te_lite.ops.word_tiles import column_bits, column_words, row_bits, to_fp8_pairs, word_quarters

# (block length, row wanted, col wanted) -> tile, one block high: columns of blocks need no second one. Square blocks
# take that of both, whichever is wanted.
BLOCK_CONFIGS: dict[tuple[int, bool, bool], Config] = {
    (32, True, False): Config(32, 256, 4),
    (32, False, True): Config(32, 64, 1),
    (32, True, True): Config(32, 64, 1, registers=128),
    (128, True, False): Config(128, 128, 8),
    (128, False, True): Config(128, 64, 4),
    (128, True, True): Config(128, 128, 4),
}
# Tiles of words in blocks of 128, with columns; row wanted -> Config. With 80 registers three tiles fit at once; what
# Triton 3.7 makes of it spills with fewer than 104.
_FEWEST = 80 if triton.__version__.startswith("3.6.") else 104
WORD_BLOCK_CONFIGS = {False: Config(128, 64, 4), True: Config(128, 128, 8, registers=_FEWEST)}


def block_config(
    block: int, square: bool, row: bool, col: bool, form: Form, pow2: bool, sums: bool
) -> tuple[Config, bool]:  # fmt: skip
    """(the Config of a kernel, by the tables above; whether it goes by halves). sums: of columns are wanted too.

    By halves: each of the two tiles of a gated activation's gradient gets a program of its own. In both layouts, not of
    square blocks, not with column sums. Where one program makes both, and for MX, what is computed gets a warp for 1024
    values: with a plain tensor's the tiles spill up to 6 KB a thread (read from the compiler for sm_90).
    """
    halves = form.two and row and col and not (square or sums)
    if form.kind == "words":
        config = WORD_BLOCK_CONFIGS[row]
        return config if pow2 else config._replace(registers=None), halves  # divisions would spill
    config = BLOCK_CONFIGS[block, row or square, col or square]
    if form.kind != "plain" and (block != 128 or (form.two and not halves)):
        config = Config(config.block_m, config.block_n, config.block_m * config.block_n // 1024)
    elif form.kind != "plain" and row and col:
        # With at most 128 registers two tiles in both layouts fit at once, and one loads while the other stores.
        config = Config(128, 128, 8, 128 if pow2 and not sums else None)
    return config, halves


DEQUANTIZE_CONFIG = Config(32, 256, 4)
_MX_BLOCK = tl.constexpr(32)


@triton.jit
def _scales(bits, eps, E8M0: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr, E5M2: tl.constexpr = False):
    """(scale, what is stored of it: the E8M0 byte or the fp32 inverse) of largest magnitudes, given as bits.

    CAP: what an infinite scale becomes; with POW2 the exponent field of its inverse.
    """
    # The exponent field of amax / F rounded up to a power of two. F is 1.75 * 2^8, of E5M2 1.75 * 2^15: a mantissa
    # above 1.75 carries.
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    EXPONENT: tl.constexpr = 15 if E5M2 else 8
    e = ((bits + 0x1FFFFF) >> 23) - EXPONENT
    if E8M0:
        e = tl.maximum(e, 0)
        special = bits >= 0x7F800000
        nan = bits > 0x7F800000
        s = tl.where(special, tl.where(nan, 0x7FC00000, 0x00400000), (254 - e) << 23).to(tl.float32, bitcast=True)
        stored = tl.where(special, tl.where(nan, 255, 254), e).to(tl.uint8)
    elif POW2:
        a = bits.to(tl.float32, bitcast=True)
        bits = tl.where(a < eps, eps, a).to(tl.int32, bitcast=True)
        e = ((bits + 0x1FFFFF) >> 23) - EXPONENT
        e = tl.where(e < 0, CAP, e)  # F / amax is infinite
        e = tl.where((bits == 0) | (bits >= 0x7F800000), 127, e)
        s = ((254 - e) << 23).to(tl.float32, bitcast=True)
        stored = tl.where(e == 0, 0x00400000, e << 23).to(tl.float32, bitcast=True)
    else:
        s = scale_of(bits.to(tl.float32, bitcast=True), eps, LARGEST, CAP, False)
        stored = tl.div_rn(1.0, s)
    return s, stored


@triton.jit
def _row_blocks(
    v, row, row_scale, eps, m0, n0, n_out, rows, cols, width, scale_m, scale_n, CAP: tl.constexpr, POW2: tl.constexpr
):
    """A tile in blocks along its rows."""
    Q: tl.constexpr = v[0].shape[0]
    B: tl.constexpr = 4 * Q
    NB: tl.constexpr = v[0].shape[1] // B
    E5M2: tl.constexpr = row.dtype.element_ty == tl.float8e5
    for r in tl.static_range(4):
        blocks = tl.reshape(v[r], [Q, NB, B])
        s, stored = _scales(tl.max(tiles.magnitude_bits(blocks), axis=2), eps, B == _MX_BLOCK, CAP, POW2, E5M2)
        q = tiles.to_fp8_bytes(tl.reshape(blocks * s[:, :, None], v[r].shape), E5M2)
        tiles.store_quarter(row.to(tl.pointer_type(tl.uint8)), q, m0 + r, n0, n_out, rows, cols, width)
        m = m0 + r + tl.arange(0, Q) * 4
        b = tl.arange(0, NB)
        at = m[:, None].to(tl.int64) * scale_m + (n_out // B + b)[None, :].to(tl.int64) * scale_n
        tl.store(row_scale + at, stored, mask=(m < rows)[:, None] & (n0 + b * B < cols)[None, :])


@triton.jit
def _scaled_quarters(v, c, out, m0, n0, n_out, rows, cols, width, padded, FLAT: tl.constexpr):
    """A tile times c, into the transposed copy, or as it lies when FLAT."""
    E5M2: tl.constexpr = out.dtype.element_ty == tl.float8e5
    if FLAT:
        q = [tiles.to_fp8_bytes(part * c, E5M2) for part in v]
        tiles.store_quarters(out.to(tl.pointer_type(tl.uint8)), q, m0, n0, n_out, rows, cols, width)
    else:
        w = tiles.to_fp8_words([part * c for part in v], E5M2)
        tiles.store_words(out, w, m0, n0, n_out, rows, cols, padded)


@triton.jit
def _emit_blocks(
    v, outputs, strides, eps, m0, n0, n_out, rows, cols, width, padded,
    SQUARE: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Write the fp32 tile, columns n_out.. of outputs `width` wide, by row and by column."""
    row, row_scale, col, col_scale = outputs
    row_scale_m, row_scale_n, col_scale_m, col_scale_n = strides
    largest = tiles.largest_of(v)
    B: tl.constexpr = 4 * largest.shape[0]
    n = tl.arange(0, largest.shape[1])
    E5M2: tl.constexpr = (col if row is None else row).dtype.element_ty == tl.float8e5
    if SQUARE:
        s, stored = _scales(tl.max(largest), eps, False, CAP, POW2, E5M2)
        at_m, at_n = m0 // B, n_out // B
        if row is not None:
            tl.store(row_scale + at_m.to(tl.int64) * row_scale_m + at_n * row_scale_n, stored)
            _scaled_quarters(v, s, row, m0, n0, n_out, rows, cols, width, padded, True)
        if col is not None:
            tl.store(col_scale + at_m.to(tl.int64) * col_scale_m + at_n * col_scale_n, stored)
            _scaled_quarters(v, s, col, m0, n0, n_out, rows, cols, width, padded, False)
    else:
        if row is not None:
            _row_blocks(v, row, row_scale, eps, m0, n0, n_out, rows, cols, width, row_scale_m, row_scale_n, CAP, POW2)
        if col is not None:
            s, stored = _scales(tl.max(largest, axis=0), eps, B == _MX_BLOCK, CAP, POW2, E5M2)
            at = (m0 // B).to(tl.int64) * col_scale_m + (n_out + n).to(tl.int64) * col_scale_n
            tl.store(col_scale + at, stored, mask=n0 + n < cols)
            _scaled_quarters(v, s[None, :], col, m0, n0, n_out, rows, cols, width, padded, FLAT)


@triton.jit
def _block_tile(
    source, outputs, strides, tile_m, n0, eps, rows, cols, width, padded,
    FORM: tl.constexpr, SQUARE: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of block_kernel, both where there are two: sums of four rows, and those of the second tile."""
    m0 = tile_m * BLOCK_M
    a, b, _ = tiles.quarters(source, m0, n0, rows, cols, FORM, BLOCK_M, BLOCK_N)
    for i in tl.static_range(1 + FORM.two):
        v, n_out = (a, b)[i], n0 + i * cols
        _emit_blocks(v, outputs, strides, eps, m0, n0, n_out, rows, cols, width, padded, SQUARE, CAP, POW2, FLAT)
    return tiles.sum_of(a), tiles.sum_of(b)


@triton.jit
def _half_tile(
    source, outputs, strides, tile_m, n0, eps, rows, cols, width, padded,
    FORM: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One of two tiles of block_kernel, the first for programs with even numbers. What it reads is in L2 for the other
    one; a branch each, so that nothing is computed for the one that is not written."""
    m0 = tile_m * BLOCK_M
    for i in tl.static_range(2):
        if tl.program_id(0) % 2 == i:
            v = tiles.quarters(source, m0, n0, rows, cols, FORM, BLOCK_M, BLOCK_N)[i]
            n_out = n0 + i * cols
            _emit_blocks(v, outputs, strides, eps, m0, n0, n_out, rows, cols, width, padded, False, CAP, POW2, FLAT)


@triton.jit
def _word_row(w, row, m0, n0, rows, cols, eps, FP16: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr):
    """One quarter with a scale a row, which is returned as it is to be stored."""
    s, stored = _scales(row_bits(w, FP16), eps, False, CAP, POW2)
    h = to_fp8_pairs(w, s[:, None], FP16, False)
    row = row.to(tl.pointer_type(tl.int16))
    tiles.store_quarter(row, h, m0, n0 // 2, n0 // 2, rows, cols // 2, cols // 2)
    return stored


@triton.jit
def _word_tile(
    x, outputs, strides, tile_m, n0, eps, rows, cols, padded,
    FORM: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """_block_tile of words with a transposed copy. Blocks are as long as the tile is high; with rows it is as wide."""
    row, row_scale, col, col_scale = outputs
    row_scale_m, row_scale_n, col_scale_m, col_scale_n = strides
    FP16: tl.constexpr = x.dtype.element_ty == tl.float16
    m0 = tile_m * BLOCK_M
    w = word_quarters(x, m0, n0, rows, cols, FORM, BLOCK_M, BLOCK_N)
    # Columns' scales first: they wait for all four quarters, so that the loads are issued together.
    even, odd = column_bits(w, FP16)
    even, stored_even = _scales(even, eps, False, CAP, POW2)
    odd, stored_odd = _scales(odd, eps, False, CAP, POW2)
    n = n0 + tl.arange(0, BLOCK_N)
    stored = tl.reshape(tl.join(stored_even, stored_odd), [BLOCK_N])
    tl.store(col_scale + tile_m.to(tl.int64) * col_scale_m + n * col_scale_n, stored, mask=n < cols)
    if row is not None:
        s = [_word_row(w[r], row, m0 + r, n0, rows, cols, eps, FP16, CAP, POW2) for r in (0, 1, 2, 3)]
        m = m0 + tl.arange(0, BLOCK_M)
        stored = tl.reshape(tl.join(tl.join(s[0], s[2]), tl.join(s[1], s[3])), [BLOCK_M])  # row 4i + r from quarter r
        tl.store(row_scale + (n0 // BLOCK_N).to(tl.int64) * row_scale_n + m * row_scale_m, stored, mask=m < rows)
        # Zero, which the compiler does not know: else it keeps the tile as fp32 values, for both passes at once.
        zero = rows >> 31
        w = [pairs ^ zero for pairs in w]
    w = column_words(w, even[None, :], odd[None, :], FP16)
    tiles.store_words(col, w, m0, n0, n0, rows, cols, padded)


@triton.jit
def block_kernel(
    x, dy, mean, rstd, gamma, beta, row, row_scale, col, col_scale, partial,
    eps, rows, cols, padded, row_scale_m, row_scale_n, col_scale_m, col_scale_n,
    FORM: tl.constexpr, SQUARE: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOP: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """One read of the source: fp8 in blocks along its rows, along its columns (or square ones), column sums.

    row [rows, width]; col [width, padded], or [rows, width] when FLAT; scales at the strides given. Blocks are as long
    as a tile is high, BLOCK_M; those of 32 are MX's.
    Programs and tiles as in transform_kernel; with HALVES (block_config) two programs for the tiles of one place.
    """
    begin()
    TWO: tl.constexpr = FORM.two
    width = cols * 2 if TWO else cols
    source, outputs = (x, dy, mean, rstd, gamma, beta), (row, row_scale, col, col_scale)
    strides = (row_scale_m, row_scale_n, col_scale_m, col_scale_n)
    split, n0, tiles_n = tiles.tile_of_program(cols, BLOCK_N, FORM.kind == "norm", 1 + HALVES)
    if FORM.kind == "words":
        _word_tile(x, outputs, strides, split, n0, eps, rows, cols, padded, FORM, CAP, POW2, BLOCK_M, BLOCK_N)
    elif HALVES:
        _half_tile(
            source, outputs, strides, split, n0, eps, rows, cols, width, padded,
            FORM, CAP, POW2, FLAT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    elif not LOOP:
        total, total2 = _block_tile(
            source, outputs, strides, split, n0, eps, rows, cols, width, padded,
            FORM, SQUARE, CAP, POW2, FLAT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_M // 4, BLOCK_N], tl.float32)
        total2 = tl.zeros([BLOCK_M // 4, BLOCK_N], tl.float32)
        for tile_m in tl.range(split, tl.cdiv(rows, BLOCK_M), tl.num_programs(0) // tiles_n):
            a, b = _block_tile(
                source, outputs, strides, tile_m, n0, eps, rows, cols, width, padded,
                FORM, SQUARE, CAP, POW2, FLAT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            total += a
            if TWO:
                total2 += b
    if partial is not None:
        tiles.store_sums(partial, total, total2, split, n0, cols, width, TWO)


@triton.jit
def _mx_inverse(stored):
    """What the E8M0 byte stands for, fp32; 0: 2^-127."""
    e = stored.to(tl.int32)
    return tl.where(e == 0, 0x00400000, tl.where(e == 255, 0x7FC00000, e << 23)).to(tl.float32, bitcast=True)


@triton.jit
def dequantize_kernel(
    data, scale, out, rows, cols, scale_m, scale_n,
    ROW_B: tl.constexpr, COL_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[m, n] = data[m, n] * scale[m // ROW_B, n // COL_B], fp8 to bf16, fp16 or fp32; one rounding."""
    begin()
    MB: tl.constexpr = BLOCK_M // ROW_B
    NB: tl.constexpr = BLOCK_N // COL_B
    tile_m, n0, _ = tiles.tile_of_program(cols, BLOCK_N, False)
    m0 = tile_m * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    mask = (m < rows)[:, None] & (n < cols)[None, :]
    inside = m[:, None].to(tl.int64) * cols + n[None, :]
    v = tl.load(data + inside, mask=mask, other=0.0).to(tl.float32)
    bm = m0 // ROW_B + tl.arange(0, MB)
    bn = n0 // COL_B + tl.arange(0, NB)
    known = (bm * ROW_B < rows)[:, None] & (bn * COL_B < cols)[None, :]
    s = tl.load(scale + bm[:, None].to(tl.int64) * scale_m + bn[None, :].to(tl.int64) * scale_n, mask=known, other=0)
    if s.dtype == tl.uint8:
        s = _mx_inverse(s)
    v = tl.reshape(v, [MB, ROW_B, NB, COL_B]) * s[:, None, :, None]
    tl.store(out + inside, tl.reshape(v, [BLOCK_M, BLOCK_N]).to(out.dtype.element_ty), mask=mask)
