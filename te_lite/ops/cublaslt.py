"""GEMMs by cublasLt itself, the one that torch has loaded: out[M, N] = a[M, K] @ b[N, K]^T.

torch makes descriptors and asks for an algorithm at each call. Here they are kept for each problem, in
csrc/cublaslt.h. The algorithm is the heuristic's first, asked for as torch asks, or one with its bits
(ops/algorithms.py), so the bits are those of torch's calls. cublasLt also adds to `out`, which torch offers for no fp8
product.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops import algorithms
from te_lite.ops.flops import launched
from te_lite.ops.recorder import OPEN
from te_lite.ops.registry import capturing

# How operands are scaled, a's and b's: cublasLtMatmulMatrixScale_t.
TENSOR, ROWS, BLOCKS, SQUARES = (0, 0), (3, 3), (4, 4), (4, 5)  # SQUARES: of 128 x 128 in b
UNSCALED = (-1, -1)  # 16-bit operands
_TYPES = {  # cudaDataType_t
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
# Bytes of workspace, by whether torch calls cublasLt too; with others another algorithm may come first. Products of
# 16 bits without a bias are cuBLAS's in torch, which gives it 32 MiB on Hopper.
_MOST_WORKSPACE = {True: 1 << 20, False: 32 << 20}
_PLANS: dict[tuple, _C.GemmPlan | None] = {}
# Those of several algorithms that were called only once: a problem that comes again is worth measuring.
_NEW: set[_C.GemmPlan] = set()
_MOST = 4096  # entries; each token count makes some


@cache
def library(device: torch.device) -> _C.Cublaslt | None:
    """cublasLt for the current device, which is `device`; None where torch has not loaded one that te_lite can call."""
    try:
        return _C.Cublaslt(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except RuntimeError:
        return None


def _make(key: tuple) -> _C.GemmPlan | None:
    """What computes the problem; None where cublasLt does not."""
    device, (m, k), (n, _), *types, (a_scale, b_scale), at_a, at_b, bias, fast, accumulate, align = key
    lt = library(device)
    if lt is not None and _TYPES.keys() >= set(types) and m * n * k:
        a, b, out = (_TYPES[dtype] for dtype in types)
        with suppress(RuntimeError):
            return _C.GemmPlan(
                lt, m, n, k, a, b, out, a_scale, b_scale, at_a[0], at_a[1], at_b[0], at_b[1], bias, fast, accumulate,
                align, _MOST_WORKSPACE[a_scale >= 0 or bias], algorithms.most_algorithms(m, n, k),
            )  # fmt: skip
    return None


def _plan(key: tuple) -> _C.GemmPlan | None:
    """_make(), and its answer kept."""
    plan = _make(key)
    if len(_PLANS) >= _MOST:
        _PLANS.clear()
        _NEW.clear()
    _PLANS[key] = plan
    if plan is not None and plan.algorithms > 1:
        _NEW.add(plan)
    return plan


def _lies(t: Tensor, scaled: tuple[int, int]) -> tuple[bool, int]:
    """(whether t lies as its transpose, elements from one row to the next, 0 where it is not read)."""
    if t.is_contiguous():
        return False, t.shape[1]
    if scaled is UNSCALED:
        return True, t.shape[0] if t.t().is_contiguous() else 0
    apart, step = t.stride()
    return False, apart if step == 1 and apart >= t.shape[1] and apart % 16 == 0 else 0


def product(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaled: tuple[int, int],
    bias: Tensor | None = None, fast: bool = False, accumulate: bool = False,
) -> bool:  # fmt: skip
    """out[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]), or out += that. False where cublasLt does not compute it, or
    shapes do not fit: nothing is written then.

    a, b: fp8, their rows contiguous and perhaps farther apart than they are long, by a multiple of 16; or of 16 bits,
    UNSCALED, and then perhaps views .t() of contiguous matrices. scaled: one of the pairs above, by a_scale and b_scale
    as cublasLt reads them. bias: of out's dtype. fast: sums are not promoted to fp32 as they grow. accumulate: out is
    fp32; to a matrix of 16 bits cublasLt adds a rounded product.
    """
    device, at, last = out.device, out.data_ptr(), 0 if bias is None else bias.data_ptr()
    left, right = a.data_ptr(), b.data_ptr()
    scales = (0, 0) if a_scale is None or b_scale is None else (a_scale.data_ptr(), b_scale.data_ptr())
    low = (at | left | right | last) & 255
    if a.shape[1] != b.shape[1] or out.shape != (a.shape[0], b.shape[0]):
        return False
    if bias is not None and (bias.shape != (b.shape[0],) or not bias.is_contiguous()):
        return False
    lies_a, lies_b = _lies(a, scaled), _lies(b, scaled)
    if (low | scales[0] | scales[1]) & 15 or not out.is_contiguous() or not (lies_a[1] and lies_b[1]):
        return False
    if not out.is_cuda or device.index != torch._C._cuda_getDevice():
        return False
    types = a.dtype, b.dtype, out.dtype
    align = 16 if low else 256
    key = (device, a.shape, b.shape, *types, scaled, lies_a, lies_b, bias is not None, fast, accumulate, align)
    if (plan := _PLANS.get(key)) is None:
        if key in _PLANS or (plan := _plan(key)) is None:
            return False
    elif plan in _NEW and not capturing():
        _NEW.discard(plan)
        algorithms.choose(plan, partial(_make, key), out, a, b, (a_scale, b_scale), bias)
    size, stream = plan.workspace, torch._C._cuda_getCurrentRawStream(device.index)
    # Of this call and stream alone, so that streams and CUDA graphs do not meet in it; kept until the call is issued.
    space = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    workspace = 0 if space is None else space.data_ptr()
    try:
        plan.run(left, right, at, *scales, last, workspace, stream)
    except RuntimeError:  # the heuristic may accept what the call refuses
        _PLANS[key] = None
        _NEW.discard(plan)
        return False
    if OPEN.recorder is not None:
        OPEN.recorder.gemm(plan, (a, b, out, a_scale, b_scale, bias, space))
    launched(a, b)
    return True
