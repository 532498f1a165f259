"""Tiles of fp32 values in Triton kernels: read as quarters, rounded to fp8, stored by row and by column.

A tile is read as four interleaved quarters, rows m0 + 4i + r for r = 0..3: four bytes of one column are then one 32-bit
word of the transposed copy, and it crosses shared memory in words, not in bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_lite.ops.launch import INTERPRETED
from te_lite.ops.source import produce


def pack(kind: str, a: str, b: str, c: str, d: str) -> tl.constexpr:
    """Assembler: four fp32 values, operands in this order, to the four bytes of a register, lowest first."""
    return tl.constexpr(f"""{{ .reg .b16 low, high;
        cvt.rn.satfinite.{kind}x2.f32 low, ${b}, ${a};
        cvt.rn.satfinite.{kind}x2.f32 high, ${d}, ${c};
        mov.b32 $0, {{low, high}}; }}""")


_PACK_E4M3, _PACK_E5M2 = pack("e4m3", *"1234"), pack("e5m2", *"1234")
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitude_bits(v):
    """|v| of fp32 values as their bits, which order like the magnitudes; nan comes out above inf."""
    return v.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _byte(q, E5M2: tl.constexpr):
    """The interpreter's fp8 byte: numpy's rounding, not the hardware's."""
    largest = 57344.0 if E5M2 else 448.0
    q = tl.clamp(q, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    b = q.to(tl.float8e5) if E5M2 else q.to(tl.float8e4nv)
    return b.to(tl.uint8, bitcast=True)


@triton.jit
def to_fp8_bytes(q, E5M2: tl.constexpr):
    """fp32 -> the bytes of its fp8 value, nearest even; nan stays, what is too large saturates, inf too.

    In assembler because ptxas 12.8 (Triton 3.6's) miscompiles what Triton makes of `.to(fp8)` once single bytes of the
    result are used: it moves the shift that takes the second byte of a pair before the conversion. Four values in one
    32-bit register leave no such shift. Not pure: Triton would compute the value twice rather than move its layout.
    """
    if INTERPRETED:
        q8 = _byte(q, E5M2)
    else:
        q8 = tl.inline_asm_elementwise(_PACK_E5M2 if E5M2 else _PACK_E4M3, "=r,r,r,r,r", [q], tl.uint8, False, 4)
    return q8


@triton.jit
def to_fp8_words(q, E5M2: tl.constexpr):
    """Four fp32 tiles -> one tile of words whose bytes, lowest first, are their fp8 values."""
    if INTERPRETED:
        w = _byte(q[0], E5M2).to(tl.int32)
        for r in tl.static_range(1, 4):
            w = w | (_byte(q[r], E5M2).to(tl.int32) << (8 * r))
    else:
        w = tl.inline_asm_elementwise(_PACK_E5M2 if E5M2 else _PACK_E4M3, "=r,r,r,r,r", q, tl.int32, False, 1)
    return w


@triton.jit
def tile_of_program(cols, BLOCK_N: tl.constexpr, LAST_FIRST: tl.constexpr, SHARED: tl.constexpr = 1):
    """(row of tiles, first column, tiles in a row of tiles) of this program's tile; programs start in their order.
    SHARED: so many neighbours have the same tile.

    LAST_FIRST: for a source that a kernel has read directly before, from its first row to its last: the end of what
    does not fit into the L2 cache is still there, and a reading that starts there finds it.
    """
    program, tiles_n = tl.program_id(0) // SHARED, tl.maximum(tl.cdiv(cols, BLOCK_N), 1)
    tile_m = program // tiles_n
    if LAST_FIRST:
        tile_m = tl.num_programs(0) // SHARED // tiles_n - 1 - tile_m
    return tile_m, (program % tiles_n) * BLOCK_N, tiles_n


@triton.jit
def quarters(source, m0, n0, rows, cols, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The four interleaved quarters of produce()'s tile of BLOCK_M rows, those of its second and of its third tile."""
    Q: tl.constexpr = BLOCK_M // 4
    made = [produce(source, m0 + r, n0, rows, cols, FORM, Q, BLOCK_N, 4) for r in (0, 1, 2, 3)]
    return [each[0] for each in made], [each[1] for each in made], [each[2] for each in made]


@triton.jit
def store_quarter(out, v, m0, n0, n_out, rows, cols, width):
    """One quarter, whose first row is m0, into columns n_out.. of `out`, a matrix `width` wide."""
    m = tl.arange(0, v.shape[0]) * 4
    n = tl.arange(0, v.shape[1])
    mask = (m0 + m < rows)[:, None] & (n0 + n < cols)[None, :]
    tl.store(out + m0.to(tl.int64) * width + n_out + (m[:, None] * width + n[None, :]), v, mask=mask)


@triton.jit
def store_quarters(out, v, m0, n0, n_out, rows, cols, width):
    """The four quarters of a tile."""
    for r in tl.static_range(4):
        store_quarter(out, v[r], m0 + r, n0, n_out, rows, cols, width)


@triton.jit
def store_words(col, w, m0, n0, n_out, rows, cols, padded):
    """A tile of words, four rows each, into the transposed copy [width, padded] of bytes; zeros from `rows` on.

    Transposed in registers first, so that neighbouring threads store neighbouring rows m.
    """
    i = tl.arange(0, w.shape[0])
    n = tl.arange(0, w.shape[1])
    left = tl.minimum(tl.maximum(rows - m0 - 4 * i, 0), 4)
    # Masked whatever the scale is: with one of inf or nan, 0 * scale is not 0.
    w = w & tl.where(left == 4, -1, (1 << (8 * left)) - 1)[:, None]
    out = col.to(tl.pointer_type(tl.int32)) + (n_out.to(tl.int64) * padded + m0) // 4
    # padded and m0 are multiples of 16. Triton has to know, to see a mask that is the same for four words: 16 bytes.
    known = i < tl.multiple_of((padded - m0) // 4, 4)
    tl.store(
        out + (n[:, None] * (padded // 4) + i[None, :]), tl.trans(w), mask=(n0 + n < cols)[:, None] & known[None, :]
    )


@triton.jit
def largest_of(v):
    """Elementwise largest magnitude of four tiles, as bits."""
    a = tl.maximum(magnitude_bits(v[0]), magnitude_bits(v[1]))
    return tl.maximum(a, tl.maximum(magnitude_bits(v[2]), magnitude_bits(v[3])))


@triton.jit
def record_amax(amax_out, largest):
    """amax_out = max(amax_out, largest), given as bits; nan counts as inf. Nothing where amax_out is None."""
    if amax_out is not None:
        most = tl.minimum(largest, 0x7F800000)
        word = amax_out.to(tl.pointer_type(tl.int32))
        # Thousands of atomics on one word queue up in the L2; after the first few hardly any program has a
        # larger value. A stale read is a smaller one and costs an atomic, never a lost maximum.
        if most > tl.load(word, cache_modifier=".cg"):
            tl.atomic_max(word, most, sem="relaxed")


@triton.jit
def sum_of(v):
    """Elementwise sum of four tiles."""
    return (v[0] + v[1]) + (v[2] + v[3])


@triton.jit
def store_sums(partial, total, total2, split, n0, cols, width, TWO: tl.constexpr):
    """Column sums of a program's tiles into its row of partial [splits, width]."""
    n = tl.arange(0, total.shape[1])
    out = partial + split.to(tl.int64) * width + n0 + n
    tl.store(out, tl.sum(total, axis=0), mask=n0 + n < cols)
    if TWO:
        tl.store(out + cols, tl.sum(total2, axis=0), mask=n0 + n < cols)
