"""GEMMs, by cuBLAS. Every one is out[M, N] = a[M, K] @ b[N, K]^T: both operands K-major.

High precision goes through torch, fp8 through ops/cublaslt.py, or torch._scaled_mm where that cannot.
fp8: per-tensor scales, split accumulation unless fast_accum (tensor cores keep about 14
bits of a sum of fp8 products; split accumulation promotes it to fp32 registers every few steps).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from te_lite.ops.cublaslt import TENSOR, UNSCALED, product
from te_lite.ops.flops import counts_product
from te_lite.ops.recorder import OPEN
from te_lite.ops.registry import PLAIN, Op, register, unwatched

FP8_ALIGNMENT = 16  # bytes, cuBLAS's rule for the leading dimensions of fp8 operands and of its output
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PAIRS = ((FP8[0], FP8[0]), (FP8[1], FP8[0]), (FP8[0], FP8[1]))  # of types that tensor cores multiply
_LOW = (torch.bfloat16, torch.float16)
Maybe = TypeVar("Maybe", Tensor, Tensor | None)


def placed(t: Maybe) -> Maybe:
    """t, as it lies, where cuBLAS and the tensor-copy unit can read it: on a GPU at a multiple of 16 bytes."""
    return t if t is None or not t.is_cuda or type(t) not in PLAIN or t.data_ptr() % 16 == 0 else t.clone()


def apart(scale: Tensor) -> list[Tensor]:
    """Each element as a tensor [1] that starts where cuBLAS reads a scale: at a multiple of 16 bytes."""
    return list(scale.view(-1, 1).expand(-1, 4).contiguous()[:, :1].unbind(0))


def check_fp8(a: Tensor, b: Tensor) -> None:
    """TypeError, ValueError unless a[M, K] and b[N, K] are what cuBLAS multiplies."""
    if a.dtype not in FP8 or b.dtype not in FP8:
        raise TypeError(
            f"fp8 GEMM of {a.dtype} and {b.dtype}: both operands must be float8_e4m3fn or float8_e5m2; "
            f"quantize both, or call gemm for high precision"
        )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError(
            "fp8 GEMM of float8_e5m2 and float8_e5m2: tensor cores take at most one E5M2 operand; "
            "quantize activations and weights to E4M3 (Format.HYBRID keeps E5M2 for gradients)"
        )
    (m, k), (n, k_b) = a.shape, b.shape
    if k != k_b:
        raise ValueError(
            f"fp8 GEMM of a [{m}, {k}] and b [{n}, {k_b}]: the last dimensions must be equal; "
            f"pass the layout whose last dimension is the one to sum over"
        )
    if k % FP8_ALIGNMENT or n % FP8_ALIGNMENT:
        raise ValueError(
            f"fp8 GEMM with M={m}, K={k}, N={n}: K and N must be multiples of {FP8_ALIGNMENT}; "
            f"pad the features, or keep this layer in high precision"
        )


def gemm_fp8_ref(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Oracle of `gemm_fp8`: fp32 throughout, one rounding. fast_accum is the hardware's affair."""
    out = (a.float() @ b.float().t()) * (a_scale_inv.reshape(()) * b_scale_inv.reshape(()))
    return (out if bias is None else out + bias.float()).to(out_dtype)


def with_epilogue(
    multiply: Callable[[Tensor | None, torch.dtype], Tensor], a: Tensor, b: Tensor, out_dtype: torch.dtype,
    bias: Tensor | None, fused: tuple[torch.dtype, ...],
) -> Tensor:  # fmt: skip
    """multiply(bias, dtype), a[M, K] @ b[N, K]^T by cuBLAS, for empty operands and any bias too.

    fused: types of output and bias that cuBLAS's epilogue adds; any other bias is added in fp32 before rounding.
    """
    if not (a.shape[0] and a.shape[1] and b.shape[0]):
        # cuBLAS refuses empty operands. A sum over nothing is 0, and what is left is the bias.
        out = torch.zeros((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
        return out if bias is None else out + bias.to(out_dtype)
    if bias is None or (bias.dtype == out_dtype and out_dtype in fused):
        return multiply(bias, out_dtype)
    return multiply(None, torch.float32).add_(bias).to(out_dtype)


def written(out: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """What cuBLAS writes a @ b^T to: `out` where it can, else a new tensor."""
    if out is not None and out.dtype == dtype and out.is_contiguous() and out.data_ptr() % 16 == 0:
        return out
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, bias: Tensor | None,
    fast_accum: bool, fused: tuple[torch.dtype, ...], out: Tensor | None, scaled: tuple[int, int],
) -> Tensor:  # fmt: skip
    """cuBLAS's fp8 GEMM in `with_epilogue`, written to `out` where it is of the dtype that cuBLAS writes. scaled: as in
    ops/cublaslt.py."""

    def multiply(bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        to = written(out, a, b, dtype)
        if product(to, a, b, a_scale, b_scale, scaled, bias, fast_accum):
            return to
        return torch._scaled_mm(a, b.t(), placed(a_scale), placed(b_scale), bias, None, dtype, fast_accum, out=to)

    return with_epilogue(multiply, a, b, out_dtype, bias, fused)


def _product_fake(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, *rest) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def register_product(name: str, cpu: Callable[..., Tensor], cuda: Callable[..., Tensor], more: str = "") -> Op:
    """The op of a product of scaled operands. more: arguments after those that all have."""
    scaled = "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType out_dtype, Tensor? bias"
    return counts_product(register(f"{name}({scaled}{more}) -> Tensor", cpu=cpu, cuda=cuda, fake=_product_fake))


def _gemm_fp8_cuda(a, b, a_scale_inv, b_scale_inv, out_dtype, bias, fast_accum, out=None):
    return scaled_mm(a, b, a_scale_inv, b_scale_inv, out_dtype, bias, fast_accum, _LOW, out, TENSOR)


_gemm_fp8_op = register_product("gemm_fp8", gemm_fp8_ref, _gemm_fp8_cuda, ", bool fast_accum")


def gemm_fp8(
    a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None,
    fast_accum: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[M, N] = (a * a_scale_inv)[M, K] @ (b * b_scale_inv)[N, K]^T + bias[N], rounded once to out_dtype.

    a, b: contiguous fp8, at most one of them E5M2; K and N multiples of 16, M any, 0 included. Scale
    inverses: fp32, one element. out: where to write it, unless something must be done to it first: see what is
    returned. Raises TypeError on other dtypes, ValueError on other shapes or two E5M2.
    """
    k = a.shape[-1]
    if (k | b.shape[0]) % FP8_ALIGNMENT or k != b.shape[-1] or (a.dtype, b.dtype) not in _PAIRS:
        check_fp8(a, b)
    if out is not None and a.is_cuda:
        return _gemm_fp8_cuda(a, b, a_scale_inv, b_scale_inv, out_dtype, bias, fast_accum, out)
    return _gemm_fp8_op(a, b, a_scale_inv, b_scale_inv, out_dtype, bias, fast_accum)


def gemm_ref(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, bias: Tensor | None = None) -> Tensor:
    """Oracle of `gemm`: fp32 throughout, one rounding."""
    out = a.float() @ b.float().t()
    return (out if bias is None else out + bias.float()).to(out_dtype or a.dtype)


_fp16_reduces_low = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
_bf16_reduces_low = torch._C._get_cublas_allow_bf16_reduced_precision_reduction


def reduces_low() -> bool:
    """Whether partial sums of a 16-bit product may be of 16 bits: torch's default, and cublasLt's."""
    return _bf16_reduces_low() in (True, (True, True)) and _fp16_reduces_low() in (True, (True, True))


def _gemm_cuda(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None, out: Tensor | None) -> Tensor | None:
    """gemm() by cublasLt itself, of 16-bit operands where nobody watches torch's ops; None where that cannot."""
    seen = (OPEN.recorder is None and not unwatched()) or type(a) not in PLAIN or type(b) not in PLAIN
    casts = (out is not None and out.dtype != dtype) or (bias is not None and bias.dtype != dtype)
    if seen or casts or not reduces_low():
        return None
    made = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype) if out is None else out
    return made if product(made, a, b, None, None, UNSCALED, bias) else None


def gemm(
    a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """out[M, N] = a[M, K] @ b[N, K]^T + bias[N] in high precision, any strides; out_dtype defaults to a's.

    fp32 accumulation. a and b have the same dtype (torch raises RuntimeError otherwise); a bias of another
    dtype than the output's is cast to it. out: where to write it, of the dtype asked for.
    """
    made = _gemm_cuda(a, b, out_dtype or a.dtype, bias, out) if a.is_cuda and a.dtype in _LOW else None
    if made is not None:
        return made
    if out_dtype is None or out_dtype == a.dtype:
        if bias is None:
            return torch.mm(a, b.t(), out=out)
        return torch.addmm(bias if bias.dtype == a.dtype else bias.to(a.dtype), a, b.t(), out=out)
    if out is not None:
        return out.copy_(gemm(a, b, out_dtype, bias))
    if a.dtype in _LOW:  # rounded once, to out_dtype
        out = torch.mm(a, b.t(), out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.t().float())
    else:
        out = torch.mm(a, b.t())
    return (out if bias is None else out.add_(bias)).to(out_dtype)


def gemm_accumulate_ref_(out: Tensor, dy: Tensor, x: Tensor) -> None:
    """Oracle of `gemm_accumulate_`: fp32 throughout, one rounding."""
    out.copy_(out.float() + dy.float().t() @ x.float())


def _gemm_accumulate_cuda(out: Tensor, dy: Tensor, x: Tensor) -> None:
    dy_t = dy.t()
    if dy.dtype in _LOW and out.dtype == torch.float32 and type(dy) in PLAIN and reduces_low():
        if product(out, dy_t, x.t(), None, None, UNSCALED, accumulate=True):
            return
    if out.dtype == dy.dtype:
        out.addmm_(dy_t, x)
    elif dy.dtype not in _LOW:
        out.add_(torch.mm(dy_t, x))
    elif out.dtype == torch.float32:  # without a temporary
        torch.addmm(out, dy_t, x, out_dtype=torch.float32, out=out)
    else:
        out.add_(torch.mm(dy_t, x, out_dtype=torch.float32))


_gemm_accumulate_op = register(
    "gemm_accumulate_(Tensor(a!) out, Tensor dy, Tensor x) -> ()", cpu=gemm_accumulate_ref_, cuda=_gemm_accumulate_cuda
)
register_flop_formula(_gemm_accumulate_op.overload.overloadpacket)(lambda out, dy, x, **_: 2 * dy[0] * dy[1] * x[1])


def gemm_accumulate_(out: Tensor, dy: Tensor, x: Tensor) -> None:
    """out[N, K] += dy[M, N]^T @ x[M, K], accumulated in fp32, one rounding into out (fp32, or 16-bit)."""
    if dy.shape[0]:
        _gemm_accumulate_op(out, dy, x)
