"""The col layout of fp8 data from its row layout: a transpose of the bytes, zero padded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops.launch import begin, launch
from te_lite.ops.registry import register

PAD = 16  # a col layout has its rows' count M rounded up to what an fp8 GEMM needs of its inner dimension

_TILE = (128, 128, 8)  # rows, columns, warps


@triton.jit
def transpose_kernel(data, out, rows, cols, padded, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[n, m] = data[m, n], zero for rows <= m < padded; bytes."""
    begin()
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


def padded_rows(rows: int) -> int:
    """Mp: the columns of the col layout [N, Mp] of a matrix with `rows` rows."""
    return (rows + PAD - 1) // PAD * PAD


def transpose(data: Tensor) -> Tensor:
    """data.t() of one-byte values [M, N], zero padded to [N, Mp]. Errors: ValueError."""
    if data.dim() != 2 or data.element_size() != 1 or not data.is_contiguous():
        raise ValueError(
            f"data is {data.dtype} {tuple(data.shape)}, strides {data.stride()}: must be a contiguous matrix "
            f"[M, N] of one-byte values; pass fp8 data or its uint8 view"
        )
    return _transpose_op(data)


def transpose_ref(data: Tensor) -> Tensor:
    """The oracle of `transpose`: plain torch on any device."""
    out = _allocate(data)
    transpose_into_ref(data, out)
    return out


def transpose_into_ref(data: Tensor, out: Tensor) -> None:
    """out [N, Mp] = data [M, N] transposed, zeros from column M on; bytes, whatever their type."""
    data, out = data.view(torch.uint8), out.view(torch.uint8)
    out[:, : data.shape[0]] = data.t()
    out[:, data.shape[0] :] = 0


def _allocate(data: Tensor) -> Tensor:
    return data.new_empty((data.shape[1], padded_rows(data.shape[0])))


def _transpose_cuda(data: Tensor) -> Tensor:
    rows, cols = data.shape
    out = _allocate(data)
    block_m, block_n, num_warps = _TILE
    tiles = -(-rows // block_m) * -(-cols // block_n)
    tensors = (data.view(torch.uint8), out.view(torch.uint8))
    launch(transpose_kernel, tiles, (), tensors, (rows, cols, out.shape[1]), (block_m, block_n), num_warps)
    return out


_transpose_op = register("transpose(Tensor data) -> Tensor", cpu=transpose_ref, cuda=_transpose_cuda, fake=_allocate)
