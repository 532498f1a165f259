"""fp8 GEMMs with vectors and blocks of scales: out[M, N] = a[M, K] @ b[N, K]^T, both operands E4M3 and K-major.

By cuBLAS: outer-vector scales (a scale a row of each operand) and blocks of 128 along K. See ops/gemm.py for split and
fast accumulation. And fp8 products of any scales that are added to a matrix.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from te_lite.ops.arrange import contiguous
from te_lite.ops.block_cast import BLOCK, dequantize_blocks_ref
from te_lite.ops.cublaslt import BLOCKS, ROWS, SQUARES, TENSOR, product
from te_lite.ops.flops import product_flops
from te_lite.ops.gemm import check_fp8, gemm_fp8, gemm_ref, placed, register_product, scaled_mm, with_epilogue, written
from te_lite.ops.launch import launch
from te_lite.ops.registry import register
from te_lite.ops.row_kernels import spread_kernel

_FUSED = (torch.bfloat16,)
ROWS_OF_SCALES = 4  # cuBLAS reads the scales of 1 x 128 blocks in 16-byte steps along M and N


def _check(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, shapes: tuple) -> None:
    if a.dtype != torch.float8_e4m3fn or b.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"fp8 GEMM of a {a.dtype} and b {b.dtype}: both must be float8_e4m3fn; quantize both along the dimension "
            "to sum over"
        )
    check_fp8(a, b)
    if tuple(a_scale.shape) not in shapes[0] or tuple(b_scale.shape) not in shapes[1]:
        raise ValueError(
            f"scales of shape {tuple(a_scale.shape)} and {tuple(b_scale.shape)}: must be one of {shapes[0]} and one of "
            f"{shapes[1]}; pass those that the quantizer made"
        )


def gemm_fp8_rowwise_ref(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    """Oracle of `gemm_fp8_rowwise`: fp32 throughout, one rounding."""
    return gemm_ref(a.float() * a_scale.reshape(-1, 1), b.float() * b_scale.reshape(-1, 1), out_dtype, bias)


def _vector(scale: Tensor, length: int) -> Tensor:
    """One scale for each of `length` rows, at an address that cuBLAS takes; a slice may begin at any row."""
    if scale.numel() == length:
        return placed(scale.reshape(-1).contiguous())
    assert scale.numel() == 1
    return one_for_all(scale, length)


def one_for_all(scale: Tensor, length: int) -> Tensor:
    """[length] of a scale [1], by a kernel of te_lite's, which a recording can repeat."""
    out = scale.new_empty((length,))
    launch(spread_kernel, -(-length // 1024), (scale,), (out,), (length,), (1024,), 4)
    return out


def _rowwise_cuda(a, b, a_scale, b_scale, out_dtype, bias, fast_accum, out=None):
    scales = _vector(a_scale, a.shape[0]).view(-1, 1), _vector(b_scale, b.shape[0]).view(1, -1)
    return scaled_mm(a, b, *scales, out_dtype, bias, fast_accum, _FUSED, out, ROWS)


_rowwise_op = register_product("gemm_fp8_rowwise", gemm_fp8_rowwise_ref, _rowwise_cuda, ", bool fast_accum")


def gemm_fp8_rowwise(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None,
    fast_accum: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[m, n] = sum_k a[m, k] * b[n, k] * a_scale[m] * b_scale[n] + bias[n], rounded once to out_dtype.

    a_scale: fp32 [M] or [1], b_scale: fp32 [N] or [1], inverse scales. M any, K and N multiples of 16. out: as in
    gemm_fp8. ValueError.
    """
    _check(a, b, a_scale, b_scale, (((a.shape[0],), (1,)), ((b.shape[0],), (1,))))
    if out is not None and a.is_cuda:
        return _rowwise_cuda(a, b, a_scale, b_scale, out_dtype, bias, fast_accum, out)
    return _rowwise_op(a, b, a_scale, b_scale, out_dtype, bias, fast_accum)


def gemm_fp8_blockwise_ref(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Oracle of `gemm_fp8_blockwise`: fp32 throughout, one rounding."""
    b_rows = 1 if b_scale.shape[0] == b.shape[0] else BLOCK
    a = dequantize_blocks_ref(a, a_scale, 1, BLOCK, torch.float32)
    return gemm_ref(a, dequantize_blocks_ref(b, b_scale, b_rows, BLOCK, torch.float32), out_dtype, bias)


def _vectors(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(data, scales of 1 x 128 blocks) with rows padded as cuBLAS reads the scales, which lie outer dimension first."""
    pad = -data.shape[0] % ROWS_OF_SCALES
    if pad:
        data = F.pad(data.view(torch.uint8), (0, 0, 0, pad)).view(data.dtype)
        scale = F.pad(scale, (0, 0, 0, pad))
    if scale.stride() != (1, data.shape[0]):
        # Of one block only, a transposed copy may call its strides (1, 1).
        scale = contiguous(scale.t()).as_strided(scale.shape, (1, data.shape[0]))
    return data, placed(scale)  # scales of one block may be a slice, which begins at any row


def _squares(scale: Tensor) -> Tensor:
    """Scales of 128 x 128 blocks [N/128, K/128] as cuBLAS takes them: [K/128 padded to fours, N/128], K contiguous."""
    whole = scale.shape[0], -(-scale.shape[1] // 4) * 4
    if scale.stride() != (whole[1], 1) or scale.untyped_storage().nbytes() < 4 * (scale.storage_offset() + prod(whole)):
        made = scale.new_zeros(whole)
        made[:, : scale.shape[1]] = scale
        scale = made
    return scale.as_strided(whole, (whole[1], 1)).t()  # block_cast leaves room at the end of each row


def _blockwise_cuda(a, b, a_scale, b_scale, out_dtype, bias, out=None):
    kinds, square = F.ScalingType, b_scale.shape[0] != b.shape[0]

    def multiply(bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        padded, scale = _vectors(a, a_scale)
        scale_b = _squares(b_scale) if square else _vectors(b, b_scale)[1]
        if len(padded) == len(a):
            to = written(out, a, b, dtype)
            if product(to, a, b, scale, scale_b, SQUARES if square else BLOCKS, bias):
                return to
        of_a, of_b = kinds.BlockWise1x128, kinds.BlockWise128x128 if square else kinds.BlockWise1x128
        made = F.scaled_mm(
            padded, b.t(), scale_a=scale, scale_recipe_a=of_a, scale_b=scale_b, scale_recipe_b=of_b, bias=bias,
            output_dtype=dtype, use_fast_accum=False,
        )  # fmt: skip
        # No view: callers may replace what a result holds.
        return made if len(made) == len(a) else made[: len(a)].clone()

    return with_epilogue(multiply, a, b, out_dtype, bias, _FUSED)


_blockwise_op = register_product("gemm_fp8_blockwise", gemm_fp8_blockwise_ref, _blockwise_cuda)


def gemm_fp8_blockwise(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[m, n] = sum_k a[m, k] * b[n, k] * a_scale[m, k // 128] * b_scale[n or n // 128, k // 128] + bias[n].

    Inverse scales, fp32: a_scale [M, K/128], b_scale [N, K/128] or [N/128, K/128] (square blocks). Each block's sum is
    scaled and added in fp32; one rounding to out_dtype. M any, K and N multiples of 16. out: as in gemm_fp8.
    Errors: ValueError.
    """
    blocks, n = -(-a.shape[1] // BLOCK), b.shape[0]
    shapes = (((a.shape[0], blocks),), ((n, blocks), (-(-n // BLOCK), blocks)))
    _check(a, b, a_scale, b_scale, shapes)
    if out is not None and a.is_cuda:
        return _blockwise_cuda(a, b, a_scale, b_scale, out_dtype, bias, out)
    return _blockwise_op(a, b, a_scale, b_scale, out_dtype, bias)


def _product_fp32(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
    if a_scale.numel() == b_scale.numel() == 1:
        return gemm_fp8(a, b, a_scale, b_scale, torch.float32, None, fast)
    if a_scale.dim() == 2:
        return gemm_fp8_blockwise(a, b, a_scale, b_scale, torch.float32)
    return gemm_fp8_rowwise(a, b, a_scale, b_scale, torch.float32, None, fast)


def gemm_scaled_accumulate_ref_(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool
) -> None:
    """Oracle of `gemm_scaled_accumulate_`: the product in fp32, added in fp32, one rounding into out."""
    out.add_(_product_fp32(a, b, a_scale, b_scale, fast))


def _as_read(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(a_scale, b_scale, how they scale) as cublasLt reads them. a: without rows to pad."""
    if a_scale.numel() == b_scale.numel() == 1:
        return a_scale, b_scale, TENSOR
    if a_scale.dim() != 2:
        return _vector(a_scale, a.shape[0]), _vector(b_scale, b.shape[0]), ROWS
    if b_scale.shape[0] == b.shape[0]:
        return _vectors(a, a_scale)[1], _vectors(b, b_scale)[1], BLOCKS
    return _vectors(a, a_scale)[1], _squares(b_scale), SQUARES


def _accumulate_cuda(out, a, b, a_scale, b_scale, fast):
    if out.dtype == torch.float32 and not a.shape[0] % ROWS_OF_SCALES:
        *scales, scaled = _as_read(a, b, a_scale, b_scale)
        if product(out, a, b, *scales, scaled, None, fast, accumulate=True):
            return
    gemm_scaled_accumulate_ref_(out, a, b, a_scale, b_scale, fast)


_accumulate_op = register(
    "gemm_scaled_accumulate_(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, bool fast) -> ()",
    cpu=gemm_scaled_accumulate_ref_,
    cuda=_accumulate_cuda,
)
register_flop_formula(_accumulate_op.overload.overloadpacket)(lambda out, *operands, **_: product_flops(*operands))


def gemm_scaled_accumulate_(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast_accum: bool = False
) -> None:
    """out[M, N] += the fp32 product of a[M, K] and b[N, K], with the bits of the two one after the other.

    The shapes of the scales say which product: gemm_fp8's (one each), gemm_fp8_rowwise's or gemm_fp8_blockwise's, whose
    rules hold. out: fp32, to which cublasLt adds, or 16-bit, which is rounded once. Empty operands add nothing.
    """
    if a.numel() and b.numel():
        _accumulate_op(out, a, b, a_scale, b_scale, fast_accum)
