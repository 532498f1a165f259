"""Scales put into the order that a wire or a GEMM reads them in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops.launch import begin, launch

_TILE = (32, 32, 4)  # rows, columns, warps


@triton.jit(do_not_specialize_on_alignment=["data"])
def arrange_kernel(data, out, rows, cols, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[m, n] = data[m * stride_m + n * stride_n], out contiguous."""
    begin()
    tiles_n = tl.cdiv(cols, BLOCK_N)
    m = ((tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = ((tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (m < rows) & (n < cols)
    tl.store(out + m * cols + n, tl.load(data + m * stride_m + n * stride_n, mask=mask), mask=mask)


def contiguous(data: Tensor) -> Tensor:
    """data.contiguous(). A matrix in fp32 on a GPU by a kernel of te_lite's, which a recording can repeat."""
    if data.is_contiguous():
        return data
    if not data.is_cuda or data.dim() != 2 or data.dtype != torch.float32:
        return data.contiguous()
    rows, cols = data.shape
    out = data.new_empty((rows, cols))
    block_m, block_n, num_warps = _TILE
    tiles = -(-rows // block_m) * -(-cols // block_n)
    numbers = (rows, cols, *data.stride())
    launch(arrange_kernel, tiles, (data,), (out,), numbers, (block_m, block_n), num_warps)
    return out
