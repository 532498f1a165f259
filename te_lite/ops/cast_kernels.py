"""The Triton kernels of `cast.py`, and the tiles they run with."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from te_lite.ops.source import produce

MOST_PARTIALS = 1024  # partial maxima that every program of a cast reduces again, in one load
_PARTIALS = tl.constexpr(MOST_PARTIALS)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PACK = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
_PACK_E4M3 = tl.constexpr(_PACK.format("e4m3"))
_PACK_E5M2 = tl.constexpr(_PACK.format("e5m2"))
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_INF_BITS = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


class Config(NamedTuple):
    """A tile and how many programs share the tiles: at most programs_per_sm * multiprocessors."""

    block_m: int
    block_n: int
    num_warps: int
    programs_per_sm: int


# Problem: (writes a transposed copy, computes more than a cast, has few elements) -> Config.
# A transposed copy wants 128 rows, since a full 128-byte line of it is 128 fp8 values of one column; but
# where there is math, 128 x 64 needs 112 to 193 registers a thread on sm_90 (norm spills), 64 x 64 64 to 127.
FEW = 1 << 22  # elements; below this, tiles of the larger kind do not fill 132 multiprocessors
CONFIGS: dict[tuple[bool, bool, bool], Config] = {
    (False, False, False): Config(32, 256, 8, 16),
    (False, False, True): Config(16, 256, 4, 16),
    (False, True, False): Config(32, 128, 8, 16),
    (False, True, True): Config(16, 128, 4, 16),
    (True, False, False): Config(128, 64, 8, 16),
    (True, False, True): Config(64, 64, 4, 16),
    (True, True, False): Config(64, 64, 8, 16),
    (True, True, True): Config(64, 64, 8, 16),
}
# Reads only: exactly the programs that fit at once, each leaving one partial maximum.
AMAX_CONFIG = Config(32, 256, 8, 4)
TRANSPOSE_CONFIG = Config(128, 128, 8, 0)


@triton.jit
def magnitude_bits(v):
    """|v| of fp32 values as their bits, which order like the magnitudes; nan comes out above inf."""
    return v.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def scale_from_amax(amax, count, eps, FP8_MAX: tl.constexpr, POW2: tl.constexpr):
    """scale_from_amax_ref of the largest of `count` partial maxima. IEEE division, no flush to zero."""
    i = tl.arange(0, _PARTIALS)
    partial = tl.load(amax + i, mask=i < count, other=0.0)
    a = tl.max(magnitude_bits(partial)).to(tl.float32, bitcast=True)
    a = tl.where(a < eps, eps, a)
    s = tl.minimum(tl.div_rn(FP8_MAX, a), _FLOAT_MAX)
    s = tl.where((a > 0.0) & (a < float("inf")), s, 1.0)  # false for nan too
    if POW2:
        s = (s.to(tl.int32, bitcast=True) & _INF_BITS).to(tl.float32, bitcast=True)
    return s


@triton.jit
def to_fp8_bytes(q, E5M2: tl.constexpr):
    """fp32 in range -> the bytes of its fp8 value, nearest even.

    In assembler because ptxas 12.8 (Triton 3.6's) miscompiles what Triton makes of `.to(fp8)` once single bytes of the
    result are used, as a transposition does: it moves the shift that takes the second byte of a pair before the
    conversion. Four values in one 32-bit register leave no such shift.
    """
    if _INTERPRETED:
        if E5M2:
            q8 = q.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            q8 = q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif E5M2:
        q8 = tl.inline_asm_elementwise(_PACK_E5M2, "=r,r,r,r,r", [q], tl.uint8, True, 4)
    else:
        q8 = tl.inline_asm_elementwise(_PACK_E4M3, "=r,r,r,r,r", [q], tl.uint8, True, 4)
    return q8


@triton.jit
def _emit(
    v, s, hp, row, col, m0, n0, n_out, rows, cols, width, padded,
    FP8_MAX: tl.constexpr, E5M2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the fp32 tile v, columns n_out.. of outputs `width` wide, in every form that is wanted."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    in_n = n0 + n < cols
    mask = (m0 + m < rows)[:, None] & in_n[None, :]
    first = m0.to(tl.int64) * width + n_out
    inside = m[:, None] * width + n[None, :]
    if hp is not None:
        tl.store(hp + first + inside, v.to(hp.dtype.element_ty), mask=mask)
    if row is not None or col is not None:
        # Zero in the pad whatever s is: with a scale of inf or nan 0 * s is not.
        q = tl.clamp(tl.where(mask, v * s, 0.0), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        q8 = to_fp8_bytes(q, E5M2)
        if row is not None:
            tl.store(row.to(tl.pointer_type(tl.uint8)) + first + inside, q8, mask=mask)
        if col is not None:
            # Transposed in registers first, so that neighbouring threads store neighbouring rows m.
            first_t = n_out.to(tl.int64) * padded + m0
            inside_t = n[:, None] * padded + m[None, :]
            mask_t = in_n[:, None] & (m0 + m < padded)[None, :]
            tl.store(col.to(tl.pointer_type(tl.uint8)) + first_t + inside_t, tl.trans(q8), mask=mask_t)


@triton.jit(do_not_specialize_on_alignment=["amax_out", "scale"])
def transform_kernel(
    amax_out, scale, x, dy, mean, rstd, gamma, beta, amax, hp, row, col, scale_inv, partial,
    eps, rows, cols, padded, count,
    KIND: tl.constexpr, ACT: tl.constexpr, GLU: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    FP8_MAX: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One read of the source, every output in it. Absent outputs are None; cols is F for a gated activation.

    hp, row [rows, width], col [width, padded], partial [splits, width] column sums. A program owns BLOCK_N columns and
    every splits-th tile of their rows, so that maxima and sums stay in registers until its last tile.
    """
    program = tl.program_id(0)
    s = 1.0
    if scale_inv is not None:
        if scale is not None:
            s = tl.load(scale)
        else:
            s = scale_from_amax(amax, count, eps, FP8_MAX, POW2)
        if program == 0:
            tl.store(scale_inv, tl.div_rn(1.0, s))
    TWO: tl.constexpr = GLU and KIND == "dact"
    width = cols * 2 if TWO else cols
    tiles_n = tl.maximum(tl.cdiv(cols, BLOCK_N), 1)
    splits = tl.num_programs(0) // tiles_n
    split = program // tiles_n
    n0 = (program % tiles_n) * BLOCK_N
    largest = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile_m in tl.range(split, tl.cdiv(rows, BLOCK_M), splits):
        m0 = tile_m * BLOCK_M
        v, v2 = produce(
            x, dy, mean, rstd, gamma, beta, m0, n0, rows, cols,
            KIND, ACT, GLU, ZERO_CENTERED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if amax_out is not None:
            largest = tl.maximum(largest, magnitude_bits(v))
            if TWO:
                largest = tl.maximum(largest, magnitude_bits(v2))
        if partial is not None:
            total += v
            if TWO:
                total2 += v2
        _emit(
            v, s, hp, row, col, m0, n0, n0, rows, cols, width, padded, FP8_MAX, E5M2, BLOCK_M, BLOCK_N
        )  # fmt: skip
        if TWO:
            _emit(
                v2, s, hp, row, col, m0, n0, n0 + cols, rows, cols, width, padded, FP8_MAX, E5M2, BLOCK_M, BLOCK_N
            )  # fmt: skip
    if partial is not None:
        n = tl.arange(0, BLOCK_N)
        out = partial + split.to(tl.int64) * width + n0 + n
        tl.store(out, tl.sum(total, axis=0), mask=n0 + n < cols)
        if TWO:
            tl.store(out + cols, tl.sum(total2, axis=0), mask=n0 + n < cols)
    if amax_out is not None:
        most = tl.minimum(tl.max(largest), _INF_BITS)  # nan counts as inf
        word = amax_out.to(tl.pointer_type(tl.int32))
        # Thousands of atomics on one word queue up in the L2; after the first few hardly any program has a
        # larger value. A stale read is a smaller one and costs an atomic, never a lost maximum.
        if most > tl.load(word, cache_modifier=".cg"):
            tl.atomic_max(word, most, sem="relaxed")


# Triton makes an integer that is 1 a constant. With rows = 1 the pad is then a constant too, and ptxas 12.8 folds its
# conversion to garbage. Only there: not knowing that rows is a multiple of 16 costs 10 to 48 registers a thread.
one_row_kernel = triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["amax_out", "scale"])(
    transform_kernel.fn
)


@triton.jit
def amax_kernel(
    x, dy, mean, rstd, gamma, beta, partials,
    rows, cols,
    KIND: tl.constexpr, ACT: tl.constexpr, GLU: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """partials[program] = largest |value| of the program's tiles; nan counts as inf, no tiles as 0."""
    program = tl.program_id(0)
    tiles_n = tl.cdiv(cols, BLOCK_N)
    largest = 0
    for tile in tl.range(program, tl.cdiv(rows, BLOCK_M) * tiles_n, tl.num_programs(0)):
        m0 = (tile // tiles_n) * BLOCK_M
        n0 = (tile % tiles_n) * BLOCK_N
        v, v2 = produce(
            x, dy, mean, rstd, gamma, beta, m0, n0, rows, cols,
            KIND, ACT, GLU, ZERO_CENTERED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(magnitude_bits(v)))
        if GLU and KIND == "dact":
            largest = tl.maximum(largest, tl.max(magnitude_bits(v2)))
    tl.store(partials + program, tl.minimum(largest, _INF_BITS).to(tl.float32, bitcast=True))


@triton.jit
def transpose_kernel(data, out, rows, cols, padded, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[n, m] = data[m, n], zero for rows <= m < padded; bytes."""
    tiles_n = tl.cdiv(cols, BLOCK_N)
    m0 = (tl.program_id(0) // tiles_n) * BLOCK_M
    n0 = (tl.program_id(0) % tiles_n) * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    in_n = n0 + n < cols
    mask = (m0 + m < rows)[:, None] & in_n[None, :]
    data += m0.to(tl.int64) * cols + n0
    tile = tl.load(data + m[:, None] * cols + n[None, :], mask=mask, other=0)
    out += n0.to(tl.int64) * padded + m0
    mask_t = in_n[:, None] & (m0 + m < padded)[None, :]
    tl.store(out + n[:, None] * padded + m[None, :], tl.trans(tile), mask=mask_t)
