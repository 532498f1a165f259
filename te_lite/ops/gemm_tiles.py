"""What the GEMMs of fused schedules share: how tiles are walked, multiplied and finished, and which tile to take.

A walk goes shard by shard; a tile lies in one shard. Hopper: operands by the tensor-copy unit, wgmma, one loop over
tiles and K (flatten), so that the next tile's operands are on their way while a tile is finished. Triton 3.6 pipelines
such a loop only when no value but the tile's number is carried from tile to tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_lite.ops.gemm import _check_fp8

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ALIGNMENT = 16  # bytes, the tensor-copy unit's rule for addresses and rows


class Config(NamedTuple):
    """A tile of block_m x block_n (x block_k), `group` rows of tiles in work at once, per_sm programs on an SM."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    per_sm: int = 1


# Speed of a tile's arithmetic against 128 x 256, a first guess: what an SM must load for a product grows as
# 1 / block_m + 1 / block_n.
_TILES = {(128, 256): (8, 1, 1.0), (128, 128): (8, 1, 0.85), (64, 128): (4, 2, 0.65), (64, 64): (4, 2, 0.45)}


def choose(m: int, ranks: int, n: int, itemsize: int, sms: int) -> Config:
    """The tile whose rounds over the device take least. m: rows of a shard.

    A function of the shape and the device alone, hence the same on every rank.
    """

    def cost(tile: tuple[int, int]) -> float:
        block_m, block_n = tile
        _, per_sm, speed = _TILES[tile]
        tiles = ranks * -(-m // block_m) * -(-n // block_n)
        return -(-tiles // (sms * per_sm)) * per_sm * block_m * block_n / speed

    block_m, block_n = min(_TILES, key=cost)
    warps, per_sm, _ = _TILES[block_m, block_n]
    return Config(block_m, block_n, 128 // itemsize, warps, 4, 8, per_sm)


def check(name: str, a: Tensor, b: Tensor, shard: int, ranks: int) -> None:
    """ValueError or TypeError unless these kernels can multiply a, `ranks` shards of `shard` rows, and b."""
    (m, k), (n, k_b) = a.shape, b.shape
    if a.dtype in FP8 or b.dtype in FP8:
        _check_fp8(a, b)
    elif a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{name} of {a.dtype} and {b.dtype}: must both be bfloat16, float16 or fp8; cast them")
    if k != k_b or not k or k * a.element_size() % ALIGNMENT:
        raise ValueError(
            f"{name} of a [{m}, {k}] and b [{n}, {k_b}]: the last dimensions must be equal, not 0, and a row "
            f"a multiple of {ALIGNMENT} bytes; pad the features, or take a schedule with a plain GEMM"
        )
    if m != shard * ranks:
        raise ValueError(f"{name}: {m} rows for {ranks} ranks with {shard} each: must be the product; pass all shards")
    for what, t, rows in (("a", a, a), ("b", b, b.t() if transposed(b) else b)):
        misaligned = rows.shape[1] * t.element_size() % ALIGNMENT or (t.is_cuda and t.data_ptr() % ALIGNMENT)
        if misaligned or not rows.is_contiguous():
            raise ValueError(
                f"{name}: {what} {list(t.shape)} has strides {t.stride()}: must be contiguous, each row at a multiple "
                f"of {ALIGNMENT} bytes; pad it"
            )


def transposed(b: Tensor) -> bool:
    """Whether b[N, K] lies as [K, N], which tensor cores read as well where elements have 16 bits."""
    return b.element_size() == 2 and not b.is_contiguous() and b.t().is_contiguous()


def described(b: Tensor, block_n: int, block_k: int) -> TensorDescriptor:
    """b[N, K] for `multiply`, as it lies."""
    n, k = b.shape
    if transposed(b):
        return TensorDescriptor(b, (k, n), (n, 1), [block_k, block_n])
    return TensorDescriptor(b, (n, k), (k, 1), [block_n, block_k])


def scale_kinds(a_scale: Tensor | None, b_scale: Tensor | None, m: int, n: int, ranks: int = 0) -> tuple[str, str]:
    """What the scales of a [m, K] and b [n, K] are: "none", "tensor" (one for all), "shard" (one a rank) or "row"."""
    if a_scale is None and b_scale is None:
        return "none", "none"
    # Of one row only, or of as many ranks as rows, the meanings agree.
    known_a, known_b = {m: "row", ranks: "shard", 1: "tensor"}, {n: "row", 1: "tensor"}
    for what, scale, known in (("a", a_scale, known_a), ("b", b_scale, known_b)):
        if scale is None or scale.dtype != torch.float32 or not scale.is_contiguous() or scale.numel() not in known:
            found = None if scale is None else (scale.dtype, tuple(scale.shape))
            raise ValueError(
                f"scales of {what}: {found}; must be contiguous fp32 with so many elements: {sorted(known)}, and given "
                f"for both or none; pass what the quantizer made"
            )
    return known_a[a_scale.numel()], known_b[b_scale.numel()]


def scaled_product_ref(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
    """fp32 (a[M, K] @ b[N, K]^T) * a_scale * b_scale; scales of one element, of one a row, or one a block of rows."""
    out = a.float() @ b.float().t()
    if a_scale is not None:
        out = out * a_scale.reshape(-1, 1).repeat_interleave(a.shape[0] // a_scale.numel(), 0)
    return out if b_scale is None else out * b_scale.reshape(1, -1)


@triton.jit
def tile_at(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, group):
    """(shard's place in the walk, first row within the shard, first column) of a tile of shards [m, n].

    `group` rows of tiles are walked column by column: about group x (programs / group) tiles are in work at once.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    t = tile % (tiles_m * tiles_n)
    first = t // (group * tiles_n) * group
    rows = min(tiles_m - first, group)
    t = t % (group * tiles_n)
    return tile // (tiles_m * tiles_n), (first + t % rows) * BLOCK_M, t // rows * BLOCK_N


@triton.jit
def halves(x):
    """The left and the right half of the columns of x."""
    return tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)).split()


@triton.jit
def multiply(
    a_desc, b_desc, row, col, k, B_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """fp32 a[row:, :k] @ b[col:, :k]^T of a tile. B_T: b lies as [k, n]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        a = a_desc.load([row, step * BLOCK_K])
        if B_T:
            total = tl.dot(a, b_desc.load([step * BLOCK_K, col]), total)
        else:
            total = tl.dot(a, b_desc.load([col, step * BLOCK_K]).T, total)
    return total


@triton.jit
def scaled(part, a_scale, b_scale, row, col, m, n, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr):
    """part * a_scale * b_scale, for rows from `row` and columns from `col` on. a_scale: of this shard's rows."""
    if A_SCALE != "none":
        if A_SCALE == "row":
            r = row + tl.arange(0, part.shape[0])
            factor = tl.load(a_scale + r, mask=r < m)[:, None]
        else:
            factor = tl.load(a_scale)
        if B_SCALE == "row":
            c = col + tl.arange(0, part.shape[1])
            factor = factor * tl.load(b_scale + c, mask=c < n)[None, :]
        else:
            factor = factor * tl.load(b_scale)
        part = part * factor
    return part


@triton.jit
def plus_bias(part, bias, col, n):
    """part + bias[col:], fp32; bias may be None."""
    if bias is not None:
        c = col + tl.arange(0, part.shape[1])
        part += tl.load(bias + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
    return part
