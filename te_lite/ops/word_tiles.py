"""Tiles of a plain bf16 or fp16 tensor, held as the 32-bit words in which it lies in memory: two columns each.

Half the registers of an fp32 tile, so that twice as many tiles are on their way; one instruction compares two pairs of
values, and with one scale the transposed copy takes its bytes from the row-wise one. Four quarters as in `tiles.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_lite.ops.launch import INTERPRETED
from te_lite.ops.source import Source
from te_lite.ops.tiles import magnitude_bits, pack, quarters, to_fp8_words

_PAIRS_E4M3, _PAIRS_E5M2 = pack("e4m3", *"1324"), pack("e5m2", *"1324")  # $1, $2 are even columns, $3, $4 odd ones
# Four rows of pairs, two columns of them in each register -> words of four rows: even columns, then odd ones.
_TURN = tl.constexpr("""{ .reg .b32 a, b, c, d;
    prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362;
    prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, c, d, 0x5410; prmt.b32 $2, a, b, 0x7632; prmt.b32 $3, c, d, 0x7632; }""")
# One block, because ptxas needs fewer registers for it than for its instructions one after the other.
_LARGEST = tl.constexpr("""{ .reg .b32 a, b, c, d;
    and.b32 a, $1, 0x7FFF7FFF; and.b32 b, $2, 0x7FFF7FFF; and.b32 c, $3, 0x7FFF7FFF; and.b32 d, $4, 0x7FFF7FFF;
    max.u16x2 a, a, b; max.u16x2 c, c, d; max.u16x2 $0, a, c; }""")


def words_fit(source: Source) -> bool:
    """Whether it can be read so. A single row is left to kernels that ptxas is known to translate: one_row_kernel."""
    x = source.x
    aligned = x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0
    return source.kind == "plain" and x.element_size() == 2 and x.shape[0] > 1 and aligned


@triton.jit
def word_quarters(x, m0, n0, rows, cols, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The four interleaved quarters of a tile; zero outside rows x cols."""
    source = (x.to(tl.pointer_type(tl.int32)), None, None, None, None, None)
    w, _, _ = quarters(source, m0, n0 // 2, rows, cols // 2, FORM, BLOCK_M, BLOCK_N // 2)
    return w


@triton.jit
def _values(w, FP16: tl.constexpr):
    """fp32 values of a word's even column and of its odd one."""
    if FP16:
        even = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = (w << 16).to(tl.float32, bitcast=True)
        odd = (w & -65536).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def _larger(a, b):
    """Elementwise larger halves of two words without signs."""
    if INTERPRETED:
        w = (tl.maximum(a >> 16, b >> 16) << 16) | tl.maximum(a & 0xFFFF, b & 0xFFFF)
    else:
        w = tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)
    return w


@triton.jit
def largest_words(w):
    """Elementwise largest magnitudes of four tiles, still two a word."""
    if INTERPRETED:
        w = [x & 0x7FFF7FFF for x in w]
        largest = _larger(_larger(w[0], w[1]), _larger(w[2], w[3]))
    else:
        largest = tl.inline_asm_elementwise(_LARGEST, "=r,r,r,r,r", w, tl.int32, True, 1)
    return largest


@triton.jit
def largest_bits(w, FP16: tl.constexpr):
    """magnitude_bits of the larger half of words without signs."""
    v, _ = _values(tl.maximum(w >> 16, w & 0xFFFF), FP16)
    return magnitude_bits(v)


@triton.jit
def row_bits(w, FP16: tl.constexpr):
    """magnitude_bits of the largest value of each row."""
    return largest_bits(tl.reduce(w & 0x7FFF7FFF, 1, _larger), FP16)


@triton.jit
def column_bits(w, FP16: tl.constexpr):
    """magnitude_bits of the largest value of each even column, of each odd one."""
    even, odd = _values(tl.reduce(largest_words(w), 0, _larger), FP16)
    return magnitude_bits(even), magnitude_bits(odd)


@triton.jit
def to_fp8_pairs(w, s, FP16: tl.constexpr, E5M2: tl.constexpr):
    """The fp8 bytes of two columns, times s, as one 16-bit value: to be stored as a matrix of half as many columns."""
    even, odd = _values(w, FP16)
    even, odd = even * s, odd * s
    if INTERPRETED:
        h = to_fp8_words((even, odd, even, odd), E5M2).to(tl.int16)
    else:
        asm: tl.constexpr = _PAIRS_E5M2 if E5M2 else _PAIRS_E4M3
        h = tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [even, odd], tl.int16, False, 2)
    return h


@triton.jit
def turned(h):
    """Four quarters of pairs -> words of four rows, as store_words takes them."""
    if INTERPRETED:
        even, odd = h[0].to(tl.int32) & 0xFF, (h[0].to(tl.int32) >> 8) & 0xFF
        for r in tl.static_range(1, 4):
            pair = h[r].to(tl.int32)
            even, odd = even | ((pair & 0xFF) << (8 * r)), odd | (((pair >> 8) & 0xFF) << (8 * r))
    else:
        even, odd = tl.inline_asm_elementwise(_TURN, "=r,=r,=r,=r,r,r,r,r", h, (tl.int32, tl.int32), False, 2)
    return tl.reshape(tl.join(even, odd), [h[0].shape[0], 2 * h[0].shape[1]])


@triton.jit
def column_words(w, even, odd, FP16: tl.constexpr):
    """E4M3 words of four rows, as store_words takes them, of columns times the scales `even` and `odd`."""
    pairs = [_values(x, FP16) for x in w]
    e = to_fp8_words([pair[0] * even for pair in pairs], False)
    o = to_fp8_words([pair[1] * odd for pair in pairs], False)
    return tl.reshape(tl.join(e, o), [w[0].shape[0], 2 * w[0].shape[1]])
