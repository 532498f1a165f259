"""The update of delayed scaling: amax histories roll, scales follow. One launch for all n columns.

Formula: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), in the form of Transformer
Engine's DelayedScaling, bit for bit, except that here a non-finite amax enters the history as 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops.launch import begin, launch
from te_lite.ops.registry import register

FP32_MAX = torch.finfo(torch.float32).max
_FP32_MAX = tl.constexpr(FP32_MAX)
_COLUMNS = 8  # 32 bytes of a row, the least that memory moves
_ROWS = 1024  # with 8 columns 64 elements a thread; TE's usual history in one step


@triton.jit
def _delayed_update_kernel(
    history_ptr, scale_ptr, out_ptr, L, n, stride_row, stride_col, stride_scale, stride_out, fp8_max,
    MOST_RECENT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    begin()
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_cols = cols < n
    column_ptr = history_ptr + cols.to(tl.int64) * stride_col
    current = tl.load(column_ptr, mask=in_cols, other=0.0)
    before = tl.load(scale_ptr + cols.to(tl.int64) * stride_scale, mask=in_cols, other=0.0)
    finite = tl.abs(current) <= _FP32_MAX  # false for nan
    current = tl.where(finite, current, 0.0)
    rolls = in_cols & (current != 0.0)
    amax = current
    for first in range(0, L, BLOCK_L):
        rows = first + tl.arange(0, BLOCK_L)
        source = rows + 1  # row 0 comes last, and is the one row that an earlier step has overwritten
        # Also of columns that do not roll, which are known later.
        old = tl.load(column_ptr[None, :] + source.to(tl.int64)[:, None] * stride_row,
                      mask=in_cols[None, :] & (source < L)[:, None], other=0.0)  # fmt: skip
        new = tl.where((source == L)[:, None], current[None, :], old)
        if not MOST_RECENT:
            # A maximum would drop a nan; inf ends the same way, at the previous scale.
            seen = tl.where(old == old, old, float("inf"))
            amax = tl.maximum(amax, tl.max(seen, 0))
        new = tl.where((rows == 0)[:, None], 0.0, new)
        # Every thread's row i + 1 must be in registers before another thread stores there.
        tl.debug_barrier()
        mask = (rows < L)[:, None] & rolls[None, :]
        tl.store(column_ptr[None, :] + rows.to(tl.int64)[:, None] * stride_row, new, mask=mask)
    tl.store(column_ptr, tl.zeros([BLOCK_C], tl.float32), mask=in_cols & (rolls == 0))
    scale = tl.div_rn(tl.zeros([BLOCK_C], tl.float32) + fp8_max, tl.where(rolls, amax, 1.0))
    scale = tl.minimum(scale, _FP32_MAX)
    update = rolls & (amax <= _FP32_MAX) & (amax > 0.0)
    tl.store(out_ptr + cols.to(tl.int64) * stride_out, tl.where(update, scale, before), mask=in_cols)


def _delayed_update_cuda(history: Tensor, scale: Tensor, fp8_max: float, algo: str, out: Tensor | None = None) -> None:
    out = scale if out is None else out
    length, n = history.shape
    block_l = min(_ROWS, triton.next_power_of_2(length))
    launch(
        _delayed_update_kernel, -(-n // _COLUMNS), (), (history, scale, out),
        (length, n, history.stride(0), history.stride(1), scale.stride(0), out.stride(0), fp8_max),
        (algo == "most_recent", block_l, _COLUMNS), 8 if block_l > 256 else 4,
    )  # fmt: skip


def delayed_update_ref(history: Tensor, scale: Tensor, fp8_max: float, algo: str, out: Tensor | None = None) -> None:
    """Oracle of `delayed_update`."""
    current = torch.where(history[0].isfinite(), history[0], 0.0)
    rolls = current != 0
    history[0] = current
    amax = history.amax(0) if algo == "max" else current
    rolled = history.roll(-1, 0)
    rolled[0] = 0.0
    history.copy_(torch.where(rolls, rolled, history))
    # tensor / tensor: a Python number over a tensor is a reciprocal and a product in torch, off by an ulp.
    new_scale = (torch.full_like(amax, fp8_max) / amax).clamp(max=FP32_MAX)
    (scale if out is None else out).copy_(torch.where(rolls & amax.isfinite() & (amax > 0), new_scale, scale))


# history fp32 [L, n], perhaps strided, in place; out fp32 [n] from scale fp32 [n], which it may be. Column by column:
#
#     current = history[0] if finite else 0               # the amax of the step that ends
#     if current == 0: history[0] = 0 and nothing else changes; out = scale
#     amax    = max(current, history[1:])                 # or current, with algo "most_recent"
#     history = [0, history[2], ..., history[L-1], current]
#     out     = fp8_max / amax                            # IEEE division; inf becomes fp32 max
#                                                         # a non-finite amax leaves the previous scale
#
# fp8_max: the format's largest value times 2^-margin. algo: "max" or "most_recent"; the recipe has refused others.
delayed_update = register(
    "delayed_update(Tensor(a!) history, Tensor(b!) scale, float fp8_max, str algo, Tensor(c!)? out=None) -> ()",
    cpu=delayed_update_ref,
    cuda=_delayed_update_cuda,
)
