"""Casts to fp8 with a scale a block: MX blocks of 32 with E8M0 scales, blocks of 128 and 128 x 128 with fp32 ones.

MX: OCP Microscaling Formats (MX) specification v1.0, the scale rounded up so that no value saturates. Blocks of 128:
DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.ops.block_kernels import DEQUANTIZE_CONFIG, block_config, block_kernel, dequantize_kernel
from te_lite.ops.cast import FP8_MAX, saturated, scale_from_amax_ref, transform
from te_lite.ops.launch import launch
from te_lite.ops.registry import register
from te_lite.ops.source import FLAT, WORDS, Source, SumDtype, of_source, plain, produce_ref
from te_lite.ops.sums import column_sums, partial_sums
from te_lite.ops.transpose import padded_rows, transpose_into_ref
from te_lite.ops.word_tiles import words_fit

E4M3, MX_BLOCK, BLOCK = torch.float8_e4m3fn, 32, 128


class Blocks(NamedTuple):
    """What `block_cast` wrote; the forms that were not asked for are None. B is the block length."""

    row: Tensor | None  # fp8 [M, N]
    row_scale: Tensor | None  # MX: uint8 [M, N/B]; else fp32 inverse scales [M, N/B], or [M/B, N/B] of square blocks
    col: Tensor | None  # fp8 [M, N] when flat, else transposed [N, Mp]
    col_scale: Tensor | None  # [M/B, N], or [N/B, M/B] of square blocks
    bias_grad: Tensor | None  # [N]


def e8m0_ref(amax: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """The E8M0 byte of blocks with largest magnitude `amax`: the exponent of amax / F, rounded up to a power of two. F:
    the largest value of `dtype`, 448 or, of E5M2, 57344.

    inf gives 0xFE, nan 0xFF, zero 0x00.
    """
    bits = amax.float().abs().view(torch.int32)
    # F is 1.75 * 2^8 or 1.75 * 2^15: a mantissa above 1.75 carries.
    e = (((bits + 0x1FFFFF) >> 23) - int(math.log2(FP8_MAX[dtype]))).clamp(0, 253)
    e = torch.where(bits == 0x7F800000, 254, e)
    return torch.where(bits > 0x7F800000, 255, e).to(torch.uint8)


def _scales_ref(
    amax: Tensor, dtype: torch.dtype, mx: bool, eps: float, pow2: bool, largest: float
) -> tuple[Tensor, Tensor]:
    """(what values are multiplied by, what is stored)."""
    if mx:
        stored = e8m0_ref(amax, dtype)
        return (254 - stored).view(torch.float8_e8m0fnu).float(), stored  # nan's 255 stays 255
    scale = scale_from_amax_ref(amax, FP8_MAX[dtype], eps, pow2, largest)  # 1 for inf and for nan
    return scale, 1.0 / scale


def _cast_ref(v: Tensor, block: tuple[int, int], *rule: Any, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """(`dtype` [M, N], stored scales [M/block[0], N/block[1]]) of fp32 v[M, N]."""
    (m, n), (bm, bn) = v.shape, block
    padded = torch.nn.functional.pad(v, (0, -n % bn, 0, -m % bm))
    tiles = padded.view(padded.shape[0] // bm, bm, padded.shape[1] // bn, bn)
    scale, stored = _scales_ref(tiles.abs().amax((1, 3)), dtype, *rule)
    q = saturated((tiles * scale[:, None, :, None]).view(padded.shape)[:m, :n], FP8_MAX[dtype])
    return q.to(dtype), stored


def _allocate(
    source: Source, block: int, square: bool, row: bool, col: bool, flat: bool, bias_grad: SumDtype,
    dtype: torch.dtype = E4M3,
) -> Blocks:  # fmt: skip
    x, (m, n) = source.x, (source.rows, source.cols)
    mb, nb = -(-m // block), -(-n // block)
    kind = torch.uint8 if block == MX_BLOCK else torch.float32

    def empty(*shape: int, dtype: torch.dtype = kind) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    def squares(outer: int, inner: int) -> Tensor:
        # cuBLAS wants rows of a multiple of four scales, along the inner dimension.
        new = x.new_zeros if inner % 4 else x.new_empty
        return new((outer, -(-inner // 4) * 4), dtype=kind)[:, :inner]

    row_data = row_scale = col_data = col_scale = None
    if row:
        row_data = empty(m, n, dtype=dtype)
        row_scale = squares(mb, nb) if square else empty(m, nb) if block == MX_BLOCK else empty(nb, m).t()
    if col:
        col_data = empty(m, n, dtype=dtype) if flat else empty(n, padded_rows(m), dtype=dtype)
        col_scale = squares(nb, mb) if square else empty(mb, n)
    sums = empty(n, dtype=bias_grad) if bias_grad else None
    return Blocks(row_data, row_scale, col_data, col_scale, sums)


def block_cast(
    source: Source, *, block: int, square: bool = False, pow2: bool = True, eps: float = 0.0, row: bool = True,
    col: bool = False, flat: bool = False, bias_grad: SumDtype = None, dtype: torch.dtype = E4M3,
    op: Callable[..., None] | None = None,
) -> Blocks:  # fmt: skip
    """Unfused, with v = produce_ref(source), fp32 [M, N], and B = block, 32 or 128; square ones of 128, not flat:

        row: blocks of 1 x B, col: blocks of B x 1; square: one scale for B x B in both; F: the largest value of dtype
        MX (B = 32): stored = e8m0_ref(amax of the block, dtype), q = (v / 2^(stored - 127)).to(dtype), saturating
        B = 128:     s = scale_from_amax_ref(amax, F, eps, pow2), inf becoming the largest value of source.x's type;
                     q = (v * s).to(dtype), saturating; stored = 1 / s

    flat: col data is not transposed. One read of the source, one launch (two with bias_grad). op: the oracle, in its
    place. Errors: ValueError.
    """
    if not (row or col):
        raise ValueError("row=False, col=False: ask for at least one layout")
    largest = torch.finfo(source.x.dtype).max
    if op is None and source.dy is not None and source.form.two and source.dy.shape[1] % block:
        # A block would lie across the halves, which a tile computes apart; fp32 in between changes no bit.
        exact: Any = transform(source, hp_dtype=torch.float32).hp
        source = plain(exact)
    out = _allocate(source, block, square, row, col, flat, bias_grad, dtype)
    (op or _block_cast_op)(*source.flat, block, square, pow2, eps, largest, flat, *out)
    return out


def block_cast_ref(source: Source, **wanted: Any) -> Blocks:
    """The oracle of `block_cast`, of the same arguments: plain torch on any device."""
    return block_cast(source, **wanted, op=_write_ref)


@of_source
def _write_ref(source, block, square, pow2, eps, largest, flat, row, row_scale, col, col_scale, bias_grad):
    v = produce_ref(source)
    rule, dtype = (block == MX_BLOCK, eps, pow2, largest), (col if row is None else row).dtype
    if bias_grad is not None:
        bias_grad.copy_(v.sum(0))
    if row is not None:
        q, stored = _cast_ref(v, (block if square else 1, block), *rule, dtype=dtype)
        row.copy_(q)
        row_scale.copy_(stored)
    if col is not None:
        q, stored = _cast_ref(v, (block, block if square else 1), *rule, dtype=dtype)
        col_scale.copy_(stored.t() if square else stored)
        if flat:
            col.copy_(q)
        else:
            transpose_into_ref(q, col)


@of_source
def _block_cast_cuda(source, block, square, pow2, eps, largest, flat, row, row_scale, col, col_scale, bias_grad):
    rows, cols, form = source.rows, source.tile_cols, source.form
    by_words = block == BLOCK and col is not None and not (square or flat) and col.dtype == E4M3
    if by_words and bias_grad is None and words_fit(source):
        form = WORDS
    by_row, by_col, sums = row is not None, col is not None, bias_grad is not None
    config, halves = block_config(block, square, by_row, by_col, form, pow2, sums)
    block_m, block_n, num_warps, registers, _ = config
    tiles_n, tiles_m = -(-cols // block_n), -(-rows // block_m)
    splits, partial = partial_sums(bias_grad, tiles_m)
    strides = (0, 0) if row is None else row_scale.stride()
    strides += (0, 0) if col is None else col_scale.stride()[:: -1 if square else 1]
    cap = 255 - 127 - math.frexp(largest)[1] if pow2 else largest
    tensors = (*source.tensors, row, row_scale, col, col_scale, partial)
    constants = (form, square, cap, pow2, flat, block_m, block_n, tiles_m > splits, halves)
    numbers = (eps, rows, cols, padded_rows(rows), *strides)
    launch(block_kernel, tiles_n * splits * (1 + halves), (), tensors, numbers, constants, num_warps, registers)
    if partial is not None:
        column_sums(partial, bias_grad)


_block_cast_op = register(
    f"block_cast({FLAT}, int block, bool square, bool pow2, float eps, float largest, bool flat, Tensor(a!)? row, "
    "Tensor(b!)? row_scale, Tensor(c!)? col, Tensor(d!)? col_scale, Tensor(e!)? bias_grad) -> ()",
    cpu=_write_ref,
    cuda=_block_cast_cuda,
)


def dequantize_blocks_ref(data: Tensor, scale: Tensor, block_m: int, block_n: int, dtype: torch.dtype) -> Tensor:
    """The oracle of `dequantize_blocks`."""
    value = scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale
    value = value.repeat_interleave(block_m, 0)[: data.shape[0]].repeat_interleave(block_n, 1)[:, : data.shape[1]]
    return (data.float() * value).to(dtype)


def _dequantize_cuda(data: Tensor, scale: Tensor, block_m: int, block_n: int, dtype: torch.dtype) -> Tensor:
    rows, cols = data.shape
    out = data.new_empty(data.shape, dtype=dtype)
    tile_m, tile_n, num_warps, *_ = DEQUANTIZE_CONFIG
    tile_m = max(tile_m, block_m)
    programs = -(-rows // tile_m) * -(-cols // tile_n)
    numbers = (rows, cols, *scale.stride())
    launch(dequantize_kernel, programs, (), (data, scale, out), numbers, (block_m, block_n, tile_m, tile_n), num_warps)
    return out


# out[m, n] = data[m, n] * scale[m // block_m, n // block_n], rounded once to dtype; data fp8, contiguous.
#
# scale: E8M0 bytes (uint8) or fp32. Blocks 1 x 32, 32 x 1, 1 x 128, 128 x 1, 128 x 128. Exact in bf16 for MX, since
# an fp8 value has at most four significant bits, unless the result is below 2^-126.
dequantize_blocks = register(
    "dequantize_blocks(Tensor data, Tensor scale, int block_m, int block_n, ScalarType dtype) -> Tensor",
    cpu=dequantize_blocks_ref,
    cuda=_dequantize_cuda,
    fake=lambda data, scale, block_m, block_n, dtype: data.new_empty(data.shape, dtype=dtype),
)
