"""Partial sums on a narrower wire: E4M3 with a power of two for every 128 values of a row, by csrc/gemm_slots.h.

Half of bf16's bytes, and 1/32 of that for scales. Of a value v in a block with largest magnitude `a` the error is at
most 2^-4 |v|, half a unit of three mantissa bits, or where that is less max(a / 224, 2^-126) * 2^-10, half of E4M3's
smallest step. Only above 2^127.9 may v arrive as infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # columns that share a scale; also the rows that a tile of the kernel has
E4M3 = torch.float8_e4m3fn


def narrow_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """(data E4M3 [M, N], scales fp32 [N/128, M]): fp32 x[m, n] is about data[m, n] * scales[n // 128, m].

    The scale is the least power of two by which no value of the block is above 448, and nan where one is infinite or
    nan: then the whole block arrives as nan.
    """
    blocks = x.float().unflatten(1, (x.shape[1] // BLOCK, BLOCK))
    bits = blocks.abs().amax(2).view(torch.int32).clamp(max=0x7F800000)
    e = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=1)  # 448 is 1.75 * 2^8: a mantissa above 1.75 carries
    data = blocks * ((254 - e) << 23).view(torch.float32).unsqueeze(2)
    scales = torch.where(bits < 0x7F800000, e << 23, 0x7FC00000).view(torch.float32)
    return data.to(E4M3).view(x.shape), scales.t().contiguous()


def widened_ref(data: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., M, N] of data[..., M, N] and scales[..., N/128, M], exact."""
    return data.float() * scales.mT.repeat_interleave(BLOCK, -1)
