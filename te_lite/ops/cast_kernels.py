"""The Triton kernels of `cast.py`, and the sizes of the tiles they run with."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl

from te_lite.ops import tiles
from te_lite.ops.launch import begin
from te_lite.ops.source import produce
from te_lite.ops.word_tiles import largest_bits, largest_words, to_fp8_pairs, turned, word_quarters

MOST_PARTIALS = 1024  # partial maxima that every program of a cast reduces again, in one load
_PARTIALS = tl.constexpr(MOST_PARTIALS)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_INF_BITS = tl.constexpr(0x7F800000)
_E5M2_MAX = tl.constexpr(57344.0)


class Config(NamedTuple):
    """A tile; registers a thread, at most; programs a multiprocessor of a kernel whose programs share all tiles."""

    block_m: int
    block_n: int
    num_warps: int
    registers: int | None = None
    programs_per_sm: int = 0


FEW = 1 << 22  # elements; below this, tiles of the larger kind do not fill 132 multiprocessors
# Tiles of words; row wanted -> Config.
WORD_CONFIGS = {True: Config(128, 64, 4), False: Config(256, 64, 8)}


@cache
def cast_config(col: bool, computed: bool, few: bool, hp: bool, sums: bool, act: bool = False) -> Config:
    """col: writes a transposed copy. computed: does more than a cast. few: has at most FEW elements. hp, sums: writes a
    high-precision copy, column sums; with registers counted those would spill. act: of 16 bits, without those, also an
    activation's transposed copy, by one tile a program: four of them fit, where 130 registers would leave three."""
    if not col:
        return Config(16 if few else 32, 128 if computed else 256, 4)
    if computed or few:
        return Config(64, 64, 4, registers=128 if act else None)
    return Config(128, 64, 4, registers=None if hp or sums else 96)


# Reads only: exactly the programs that fit at once, each leaving one partial maximum.
AMAX_CONFIG = Config(16, 256, 4, programs_per_sm=8)


@triton.jit
def scale_of(a, eps, LARGEST: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr):
    """scale_from_amax_ref, elementwise. IEEE division, no flush to zero."""
    a = tl.where(a < eps, eps, a)
    s = tl.div_rn(LARGEST, a)
    s = tl.where(s == float("inf"), CAP, s)
    s = tl.where((a > 0.0) & (a < float("inf")), s, 1.0)  # false for nan too
    if POW2:
        s = (s.to(tl.int32, bitcast=True) & _INF_BITS).to(tl.float32, bitcast=True)
    return s


@triton.jit
def _scale(scale, amax, scale_inv, scale_out, count, eps, FP8_MAX: tl.constexpr, POW2: tl.constexpr):
    """The scale of the whole matrix, given or from `count` partial maxima; 1 where there is none. Program 0 writes its
    inverse, and itself where it is not given."""
    s = 1.0
    if scale_inv is not None:
        if scale is not None:
            s = tl.load(scale)
        else:
            i = tl.arange(0, _PARTIALS)
            partial = tl.load(amax + i, mask=i < count, other=0.0)
            a = tl.max(tiles.magnitude_bits(partial)).to(tl.float32, bitcast=True)
            s = scale_of(a, eps, FP8_MAX, _FLOAT_MAX, POW2)
        if tl.program_id(0) == 0:
            tl.store(scale_inv, tl.div_rn(1.0, s))
            if scale_out is not None:
                tl.store(scale_out, s)
    return s


@triton.jit
def _emit(v, scales, outputs, m0, n0, n_out, rows, cols, width, padded, E5M2: tl.constexpr):
    """Write the fp32 tile, columns n_out.. of outputs `width` wide, in every format that is wanted."""
    s, row_scale, col_scale = scales
    hp, row, col = outputs
    if hp is not None:
        rounded = [part.to(hp.dtype.element_ty) for part in v]
        tiles.store_quarters(hp, rounded, m0, n0, n_out, rows, cols, width)
    if row is not None:
        factors = (s, s, s, s)
        if row_scale is None and col is None and col_scale is not None:  # columns' scales, and no transposition
            n = n0 + tl.arange(0, v[0].shape[1])
            c = tl.load(col_scale + (n_out - n0) + n, mask=n < cols, other=1.0)[None, :]
            factors = (c, c, c, c)
        if row_scale is not None:
            m = m0 + tl.arange(0, v[0].shape[0]) * 4
            # A tuple to Triton, which mypy does not know.
            factors = [tl.load(row_scale + m + r, mask=m + r < rows, other=1.0)[:, None] for r in (0, 1, 2, 3)]  # type: ignore[assignment]
        q = [tiles.to_fp8_bytes(v[r] * factors[r], E5M2) for r in (0, 1, 2, 3)]
        tiles.store_quarters(row.to(tl.pointer_type(tl.uint8)), q, m0, n0, n_out, rows, cols, width)
    if col is not None:
        c = s
        if col_scale is not None:
            n = n0 + tl.arange(0, v[0].shape[1])
            c = tl.load(col_scale + (n_out - n0) + n, mask=n < cols, other=1.0)[None, :]
        w = tiles.to_fp8_words([part * c for part in v], E5M2)
        tiles.store_words(col, w, m0, n0, n_out, rows, cols, padded)


@triton.jit
def _emit_activated(v, act_scale, act, act_scale_inv, m0, n0, rows, cols, padded):
    """The activation whose gradient is cast: with a scale by column in fp8, otherwise by row in high precision."""
    if act is not None:
        if act_scale is None:
            _emit(v, (1.0, None, None), (act, None, None), m0, n0, n0, rows, cols, cols, padded, False)
        else:
            s = _scale(act_scale, None, act_scale_inv, None, 0, 0.0, 1.0, False)
            col = (None, None, act)
            _emit(v, (s, None, None), col, m0, n0, n0, rows, cols, cols, padded, act.dtype.element_ty == tl.float8e5)


@triton.jit
def _transform_tile(
    source, outputs, activated, tile_m, n0, scales, eps, rows, cols, width, padded, count,
    FORM: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of transform_kernel: (its largest magnitude as bits, sums of four rows, those of the second tile)."""
    TWO: tl.constexpr = FORM.two
    E5M2: tl.constexpr = FP8_MAX == _E5M2_MAX
    m0 = tile_m * BLOCK_M
    scale, amax, row_scale, col_scale, scale_inv, scale_out = scales
    act_scale, act, act_scale_inv = activated
    a, b, c = tiles.quarters(source, m0, n0, rows, cols, FORM, BLOCK_M, BLOCK_N)
    s = _scale(scale, amax, scale_inv, scale_out, count, eps, FP8_MAX, POW2)  # while the tile is on its way
    _emit_activated(c, act_scale, act, act_scale_inv, m0, n0, rows, cols, padded)
    # Reduced before anything else is stored: a tile of maxima would occupy registers until the end.
    largest = tiles.largest_of(a)
    if TWO:
        largest = tl.maximum(largest, tiles.largest_of(b))
    largest = tl.max(largest)
    for i in tl.static_range(1 + TWO):
        factors = (s, row_scale, col_scale)
        _emit((a, b)[i], factors, outputs, m0, n0, n0 + i * cols, rows, cols, width, padded, E5M2)
    return largest, tiles.sum_of(a), tiles.sum_of(b)


@triton.jit
def _word_tile(
    tile_m, n0, x, scale, amax, row, col, scale_inv, scale_out, eps, rows, cols, padded, count,
    FORM: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """_transform_tile of words, with one scale and neither hp nor sums: its largest magnitude."""
    FP16: tl.constexpr = x.dtype.element_ty == tl.float16
    m0 = tile_m * BLOCK_M
    w = word_quarters(x, m0, n0, rows, cols, FORM, BLOCK_M, BLOCK_N)
    s = _scale(scale, amax, scale_inv, scale_out, count, eps, FP8_MAX, POW2)
    largest = tl.max(largest_bits(largest_words(w), FP16))
    h = [to_fp8_pairs(pairs, s, FP16, FP8_MAX == _E5M2_MAX) for pairs in w]
    if row is not None:
        row = row.to(tl.pointer_type(tl.int16))
        n = n0 // 2
        tiles.store_quarters(row, h, m0, n, n, rows, cols // 2, cols // 2)
    if col is not None:
        tiles.store_words(col, turned(h), m0, n0, n0, rows, cols, padded)
    return largest


_UNALIGNED = ["amax_out", "scale", "act_scale"]


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def transform_kernel(
    amax_out, scale, act_scale, x, dy, mean, rstd, gamma, beta, amax, row_scale, col_scale, hp, row, col, scale_inv,
    scale_out, partial, act, act_scale_inv, eps, rows, cols, padded, count,
    FORM: tl.constexpr, FP8_MAX: tl.constexpr, POW2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """One read of the source, every output in it. Absent outputs are None; cols is F for a gated activation.

    hp, row [rows, width], col [width, padded], partial [splits, width] column sums. row_scale [rows], col_scale
    [width]: scales of rowwise quantization, in place of one scale. act: of a "dact" the activation, [rows, cols], or
    with act_scale fp8 [cols, padded]. A program does one tile, or with LOOP every splits-th tile of its columns:
    straight-line code takes 40 registers fewer (77 against 81 us at 8192 x 8192).
    """
    begin()
    TWO: tl.constexpr = FORM.two
    # Maxima, and statistics of a norm, come from a reading of the same source directly before.
    READ: tl.constexpr = (FORM.kind == "norm" or amax is not None) or (row_scale is not None or col_scale is not None)
    width = cols * 2 if TWO else cols
    split, n0, tiles_n = tiles.tile_of_program(cols, BLOCK_N, READ)
    source, outputs, activated = (x, dy, mean, rstd, gamma, beta), (hp, row, col), (act_scale, act, act_scale_inv)
    scales = (scale, amax, row_scale, col_scale, scale_inv, scale_out)
    if FORM.kind == "words":
        largest = _word_tile(
            split, n0, x, scale, amax, row, col, scale_inv, scale_out, eps, rows, cols, padded, count,
            FORM, FP8_MAX, POW2, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    elif not LOOP:
        largest, total, total2 = _transform_tile(
            source, outputs, activated, split, n0, scales, eps, rows, cols, width, padded, count,
            FORM, FP8_MAX, POW2, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        largest = 0
        total = tl.zeros([BLOCK_M // 4, BLOCK_N], tl.float32)
        total2 = tl.zeros([BLOCK_M // 4, BLOCK_N], tl.float32)
        for tile_m in tl.range(split, tl.cdiv(rows, BLOCK_M), tl.num_programs(0) // tiles_n):
            most, a, b = _transform_tile(
                source, outputs, activated, tile_m, n0, scales, eps, rows, cols, width, padded, count,
                FORM, FP8_MAX, POW2, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            largest = tl.maximum(largest, most)
            total += a
            if TWO:
                total2 += b
    if partial is not None:
        tiles.store_sums(partial, total, total2, split, n0, cols, width, TWO)
    tiles.record_amax(amax_out, largest)


# Triton makes an integer that is 1 a constant. With rows = 1 the pad is then a constant too, and ptxas 12.8 folds its
# conversion to garbage. Only there: not knowing that rows is a multiple of 16 costs 10 to 48 registers a thread.
one_row_kernel = triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_UNALIGNED)(transform_kernel.fn)


@triton.jit
def amax_kernel(
    x, dy, mean, rstd, gamma, beta, partials, rows, cols,
    FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """partials[program] = largest |value| of the program's tiles; nan counts as inf, no tiles as 0."""
    begin()
    program = tl.program_id(0)
    tiles_n = tl.cdiv(cols, BLOCK_N)
    source = (x, dy, mean, rstd, gamma, beta)
    largest = 0
    for tile in tl.range(program, tl.cdiv(rows, BLOCK_M) * tiles_n, tl.num_programs(0)):
        m0 = (tile // tiles_n) * BLOCK_M
        n0 = (tile % tiles_n) * BLOCK_N
        v, v2, _ = produce(source, m0, n0, rows, cols, FORM, BLOCK_M, BLOCK_N, 1)
        largest = tl.maximum(largest, tl.max(tiles.magnitude_bits(v)))
        if FORM.two:
            largest = tl.maximum(largest, tl.max(tiles.magnitude_bits(v2)))
    tl.store(partials + program, tl.minimum(largest, _INF_BITS).to(tl.float32, bitcast=True))
