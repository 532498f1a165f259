"""Column sums of a tall matrix of partial sums: the second stage of every deterministic reduction over tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops.launch import begin, launch

MOST_SPLITS = 512  # rows of partial sums; a program of a matrix that is higher does several tiles
_ROWS, _COLUMNS = 64, 32  # 128 bytes of a row; small blocks, so that a few thousand columns occupy many programs


@triton.jit
def _column_sums_kernel(partial, out, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    begin()
    n = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for first in range(0, rows, 4 * BLOCK_R):  # four loads on their way at once
        r = [first + i * BLOCK_R + tl.arange(0, BLOCK_R) for i in (0, 1, 2, 3)]
        masks = [(each < rows)[:, None] & (n < cols)[None, :] for each in r]
        a, b, c, d = [tl.load(partial + r[i][:, None] * cols + n, mask=masks[i], other=0.0) for i in (0, 1, 2, 3)]
        total = total + a + b + c + d
    tl.store(out + n, tl.sum(total, 0).to(out.dtype.element_ty), mask=n < cols)


def partial_sums(out: Tensor | None, tiles_m: int) -> tuple[int, Tensor | None]:
    """(rows of programs for a matrix of tiles_m rows of tiles, their sums fp32 [P, N] for out[N], None without it)."""
    if out is None:
        return tiles_m, None
    splits = min(tiles_m, MOST_SPLITS)
    return splits, out.new_empty((splits, out.shape[0]), dtype=torch.float32)


def column_sums(partial: Tensor, out: Tensor) -> Tensor:
    """out[N] = partial[P, N].sum(0): fp32 sums in an order that depends on the shape alone, rounded once. CUDA only."""
    rows, cols = partial.shape
    launch(_column_sums_kernel, -(-cols // _COLUMNS), (), (partial, out), (rows, cols), (_ROWS, _COLUMNS), 4)
    return out
