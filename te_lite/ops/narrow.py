"""Partial sums for a narrower wire: E4M3 with a power of two for every 128 values of a row.

Half of bf16's bytes, and 1/32 of that for scales. Of a value v in a block with largest magnitude `a` the error is at
most 2^-4 |v|, half a unit of three mantissa bits, or where that is less a / 224 * 2^-10, half of E4M3's smallest step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops import tiles
from te_lite.ops.launch import begin, launch
from te_lite.ops.registry import register

BLOCK = 128  # columns that share a scale
_ROWS, _WARPS = 32, 4  # of a program, which takes one block of each
_BLOCK, _INFINITE = tl.constexpr(BLOCK), tl.constexpr(0x7F800000)


@triton.jit
def narrow_kernel(x, data, scales, rows, n, ROWS: tl.constexpr):
    begin()
    block = tl.program_id(0) % (n // _BLOCK)
    row = tl.program_id(0) // (n // _BLOCK) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * n + (block * _BLOCK + tl.arange(0, _BLOCK))[None, :]
    v = tl.load(x + at, mask=(row < rows)[:, None], other=0.0).to(tl.float32)
    bits = tl.minimum(tl.max(tiles.magnitude_bits(v), axis=1), _INFINITE)
    e = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)  # 448 is 1.75 * 2^8: a mantissa above 1.75 carries
    q = tiles.to_fp8_bytes(v * ((254 - e) << 23).to(tl.float32, bitcast=True)[:, None], False)
    tl.store(data.to(tl.pointer_type(tl.uint8)) + at, q, mask=(row < rows)[:, None])
    scale = tl.where(bits < _INFINITE, e << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(scales + block.to(tl.int64) * rows + row, scale, mask=row < rows)


def _allocate(x: Tensor) -> tuple[Tensor, Tensor]:
    data = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    return data, x.new_empty((x.shape[1] // BLOCK, x.shape[0]), dtype=torch.float32)


def narrow_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle of `narrow`."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    bits = blocks.abs().amax(2).view(torch.int32).clamp(max=0x7F800000)
    e = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    data = blocks * ((254 - e) << 23).view(torch.float32).unsqueeze(2)
    scales = torch.where(bits < 0x7F800000, e << 23, 0x7FC00000).view(torch.float32)
    return data.to(torch.float8_e4m3fn).view(x.shape), scales.t().contiguous()


def _narrow_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = _allocate(x)
    programs = -(-x.shape[0] // _ROWS) * scales.shape[0]
    if programs:
        launch(narrow_kernel, programs, (), (x, data, scales), tuple(x.shape), (_ROWS,), _WARPS)
    return data, scales


_narrow_op = register("narrow(Tensor x) -> (Tensor, Tensor)", cpu=narrow_ref, cuda=_narrow_cuda, fake=_allocate)


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """(data E4M3 [M, N], scales fp32 [N/128, M]): x[m, n] is about data[m, n] * scales[n // 128, m].

    x: bf16, fp16 or fp32, contiguous, N a multiple of 128. The scale is the least power of two by which no value of the
    block is above 448, and nan where one is infinite or nan: then the whole block arrives as nan. Errors: ValueError.
    """
    if x.dim() != 2 or x.shape[1] % BLOCK or not x.is_contiguous():
        raise ValueError(f"x {list(x.shape)}, strides {x.stride()}: must be contiguous [M, N], N a multiple of {BLOCK}")
    return _narrow_op(x)


def widened(data: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., M, N] of data[..., M, N] and scales[..., N/128, M], exact."""
    return data.float() * scales.mT.repeat_interleave(BLOCK, -1)
