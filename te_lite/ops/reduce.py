"""The end of a reduce-scatter: one sum over the ranks' partial results, in an order that only the rank decides.

out = staging[rank+1] + staging[rank+2] + ... + residual + own + bias         # cyclically, in fp32, rounded once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops.launch import begin, launch, sm_count
from te_lite.ops.registry import register

_STEP, _PER_SM, _WARPS = 4096, 4, 8  # elements a step; programs an SM: 3.8 of 4.27 TB/s where a naive kernel has 2.5


@triton.jit
def sum_of_slots(slots, own, at, size, rank, mask, RANKS: tl.constexpr, OTHER: tl.constexpr, residual=None):
    """The elements `at` of all ranks' partial results, added in the module's order. size: elements of a slot. OTHER:
    what counts outside of the mask."""
    total = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(RANKS - 1):
        slot = slots + ((rank + 1 + i) % RANKS).to(tl.int64) * size
        total += tl.load(slot + at, mask=mask, other=OTHER, eviction_policy="evict_first").to(tl.float32)
    if residual is not None:
        total += tl.load(residual + at, mask=mask, other=OTHER).to(tl.float32)
    return total + tl.load(own + at, mask=mask, other=OTHER, eviction_policy="evict_first").to(tl.float32)


@triton.jit(do_not_specialize=["rank"])
def reduce_kernel(
    staging, own, out, bias, residual, total, n, rank, RANKS: tl.constexpr, VECTOR: tl.constexpr, STEP: tl.constexpr
):
    """VECTOR: elements side by side that lie in one row, so that 16 bytes are loaded at once."""
    begin()
    group = tl.arange(0, STEP // VECTOR)[:, None]
    lane = tl.arange(0, VECTOR)[None, :]
    for start in tl.range(tl.program_id(0) * STEP, total, tl.num_programs(0) * STEP):
        first = start + group * VECTOR
        at = first + lane
        mask = at < total
        value = sum_of_slots(staging, own, at, total, rank, mask, RANKS, None, residual)
        if bias is not None:
            column = tl.multiple_of(first % n, (VECTOR, VECTOR)) + lane
            value += tl.load(bias + column, mask=mask).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


def reduce_slots_ref(
    staging: Tensor, own: Tensor, bias: Tensor | None, rank: int, out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The oracle of `reduce_slots`, in its order."""
    ranks = staging.shape[0]
    total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
    for step in range(1, ranks):
        total += staging[(rank + step) % ranks]
    if residual is not None:
        total += residual
    total += own
    return (total if bias is None else total + bias.float()).to(out_dtype)


def _reduce_cuda(staging, own, bias, rank, out_dtype, residual=None):
    out = own.new_empty(own.shape, dtype=out_dtype)
    total, n = own.numel(), own.shape[1]
    programs = min(-(-total // _STEP), _PER_SM * sm_count(own.device))
    constants = (staging.shape[0], 8 if n % 8 == 0 else 1, _STEP)
    launch(reduce_kernel, programs, (), (staging, own, out, bias, residual), (total, n, rank), constants, _WARPS)
    return out


_reduce_op = register(
    "reduce_slots(Tensor(a!) staging, Tensor own, Tensor? bias, int rank, ScalarType out_dtype, Tensor? residual=None)"
    " -> Tensor",
    cpu=reduce_slots_ref,
    cuda=_reduce_cuda,
    fake=lambda staging, own, bias, rank, out_dtype, residual=None: own.new_empty(own.shape, dtype=out_dtype),
)


def check_slots(staging: Tensor, own: Tensor, residual: Tensor | None = None) -> None:
    """ValueError unless they are [R, m, N], [m, N] and [m, N], contiguous, and a kernel can count the elements of a
    slot."""
    residual = own if residual is None else residual
    fits = own.dim() == 2 and staging.shape[1:] == own.shape == residual.shape
    if not (fits and staging.is_contiguous() and own.is_contiguous() and residual.is_contiguous()):
        raise ValueError(
            f"staging {tuple(staging.shape)}, own {tuple(own.shape)}, residual {tuple(residual.shape)}: must be "
            f"contiguous [R, m, N], [m, N] and [m, N]; pass views of the slots as they lie"
        )
    if own.numel() >= 2**31 - _STEP * _PER_SM * 256:
        raise ValueError(f"{own.numel()} elements a slot: must be below 2^31; reduce by pieces")


def reduce_slots(
    staging: Tensor, own: Tensor, bias: Tensor | None, rank: int, out_dtype: torch.dtype,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[m, N]: staging[R, m, N] but for staging[rank], residual[m, N], own[m, N] and bias[N], added as the module
    says.

    staging: the wire's type, in the arena: filled by others, so declared as mutated. own: fp32 or the wire's type.
    One pass at copy speed, no flags. The same bits on every run and on the CPU. Errors: ValueError.
    """
    check_slots(staging, own, residual)
    return _reduce_op(staging, own, bias, rank, out_dtype, residual)
