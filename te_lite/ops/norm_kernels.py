"""The Triton kernels of norm.py and how each is cut. A row stays in one program's registers."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl


class Launch(NamedTuple):
    """How a kernel is cut: a program holds block_m whole rows of block_n >= N elements at a time."""

    block_m: int
    block_n: int
    num_warps: int
    programs_per_sm: int  # of a persistent grid; all must be resident at once, or the last ones start late


@cache
def forward_launch(n: int) -> Launch:
    """16 to 64 elements a thread. bf16 registers at sm_90: 56 to 64 for N = 4096 to 16384, 128 at 32768."""
    block_n = max(16, triton.next_power_of_2(n))
    if block_n <= 2048:
        return Launch(2048 // block_n, block_n, 4, 1)
    return Launch(1, block_n, min(16, block_n // 1024), 1)


@cache
def stats_launch(n: int, rms: bool) -> Launch:
    """As the forward, persistent. bf16 registers at sm_90, N = 4096 to 16384: 72 to 81 (rms), 96 to 115."""
    block_m, block_n, warps, _ = forward_launch(n)
    return Launch(block_m, block_n, warps, max(1, (28 if rms else 20) // warps))


@cache
def backward_launch(n: int) -> Launch:
    """16 elements a thread: x, dy, dgamma and dbeta of 8192 columns fill one SM's registers (128 a thread).

    Wider rows are read twice instead of being held: 112 registers at N = 16384; at 32768 accumulators spill.
    """
    block_n = max(16, triton.next_power_of_2(n))
    if block_n <= 2048:
        return Launch(2048 // block_n, block_n, 4, 4)
    warps = min(16, block_n // 512)
    return Launch(1, block_n, warps, 16 // warps)


@triton.jit
def _row_stats(x, mask, N, eps, RMS: tl.constexpr, EVEN: tl.constexpr):
    """fp32 x[rows, N] -> centred x, mean[rows], rstd[rows]. Two passes over registers, so no cancellation."""
    if RMS:
        mean = tl.zeros([x.shape[0]], tl.float32)
        centred = x
    else:
        mean = tl.sum(x, 1) / N
        centred = x - mean[:, None]
        if not EVEN:
            centred = tl.where(mask, centred, 0.0)
    var = tl.sum(centred * centred, 1) / N
    # IEEE root and quotient, once a row: the approximate ones would cost the statistics two more ulp.
    rstd = tl.div_rn(1.0, tl.sqrt_rn(var + eps))
    return centred, mean, rstd


@triton.jit
def _affine(gamma_ptr, beta_ptr, cols, in_row, ZERO_CENTERED: tl.constexpr, HAS_BETA: tl.constexpr):
    gamma = tl.load(gamma_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gamma = gamma + 1.0
    beta = tl.zeros_like(gamma)
    if HAS_BETA:
        beta = tl.load(beta_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    return gamma, beta


@triton.jit
def forward_kernel(
    x_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, rstd_ptr,
    M, N, stride_x, eps,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program, BLOCK_M rows: not persistent, because the scheduler already overlaps one row's reduction
    with the loads of the other programs on the SM. gamma comes from L1, and only after the reductions: loaded
    before them it takes 23 to 50 registers a thread more, and a third of the rows in flight with them."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    live = rows < M
    in_row = (cols < N)[None, :] if not EVEN else tl.full([1, BLOCK_N], 1, tl.int1)
    mask = live[:, None] & in_row
    wide = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + wide * stride_x + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    centred, mean, rstd = _row_stats(x.to(tl.float32), mask, N, eps, RMS, EVEN)
    gamma, beta = _affine(gamma_ptr, beta_ptr, cols[None, :], in_row, ZERO_CENTERED, HAS_BETA)
    y = centred * rstd[:, None] * gamma
    if HAS_BETA:
        y = y + beta
    tl.store(y_ptr + wide * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if not RMS:
        tl.store(mean_ptr + rows, mean, mask=live)
    tl.store(rstd_ptr + rows, rstd, mask=live)


@triton.jit
def stats_kernel(
    x_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, amax_ptr,
    M, N, stride_x, eps,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, WANT_AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Persistent: a program walks rows, keeps one running maximum and writes one partial."""
    cols = tl.arange(0, BLOCK_N)
    in_row = (cols < N)[None, :] if not EVEN else tl.full([1, BLOCK_N], 1, tl.int1)
    # Eight neighbours share a running maximum: they sit in one thread, so folding them needs no exchange.
    peak = tl.zeros([BLOCK_M, BLOCK_N // 8], tl.float32)
    step = tl.num_programs(0) * BLOCK_M
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride_x + cols[None, :],
                mask=(rows < M)[:, None] & in_row, other=0.0)  # fmt: skip
    for _ in range(tl.program_id(0) * BLOCK_M, M, step):
        live = rows < M
        ahead = rows + step  # the next rows are in flight while these are reduced
        x_ahead = tl.load(x_ptr + ahead.to(tl.int64)[:, None] * stride_x + cols[None, :],
                          mask=(ahead < M)[:, None] & in_row, other=0.0)  # fmt: skip
        mask = live[:, None] & in_row
        centred, mean, rstd = _row_stats(x.to(tl.float32), mask, N, eps, RMS, EVEN)
        if WANT_AMAX:
            gamma, beta = _affine(gamma_ptr, beta_ptr, cols[None, :], in_row, ZERO_CENTERED, HAS_BETA)
            y = centred * rstd[:, None] * gamma
            if HAS_BETA:
                y = y + beta
            y = tl.abs(y)
            y = tl.where(y == y, y, float("inf"))
            y = tl.where(mask, y, 0.0)
            peak = tl.maximum(peak, tl.max(tl.reshape(y, [BLOCK_M, BLOCK_N // 8, 8]), 2))
        if not RMS:
            tl.store(mean_ptr + rows, mean, mask=live)
        tl.store(rstd_ptr + rows, rstd, mask=live)
        rows = ahead
        x = x_ahead
    if WANT_AMAX:
        tl.store(amax_ptr + tl.program_id(0), tl.max(tl.max(peak, 1), 0))


@triton.jit
def _sum_pair(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _load(pointers, mask, EVICTION: tl.constexpr):
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, dgamma_ptr, dbeta_ptr,
    M, N, stride_dy, stride_x,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, DBETA: tl.constexpr, REREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Persistent: a program walks rows, keeps its share of dgamma and dbeta in registers and writes one
    partial row of each, so the sum over programs has a fixed order.

    REREAD: a wide row's x and dy do not fit in registers beside the accumulators; they are loaded again
    after the reductions, from L1, where the first reading left them. The two readings must differ in their
    eviction policy, or the compiler makes one of them. DBETA: accumulate dbeta too.
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = cols < N if not EVEN else tl.full([1, BLOCK_N], 1, tl.int1)
    dgamma = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DBETA:
        dbeta = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    step = tl.num_programs(0) * BLOCK_M
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide = rows.to(tl.int64)[:, None]
    mask = (rows < M)[:, None] & in_row
    if not REREAD:
        gamma = _load(gamma_ptr + cols, in_row, "")
        x_in = _load(x_ptr + wide * stride_x + cols, mask, "")
        dy_in = _load(dy_ptr + wide * stride_dy + cols, mask, "")
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    mean = tl.zeros_like(rstd)
    if not RMS:
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    for _ in range(tl.program_id(0) * BLOCK_M, M, step):
        wide = rows.to(tl.int64)[:, None]
        mask = (rows < M)[:, None] & in_row
        ahead = rows + step  # the next rows are in flight while these are reduced
        rstd_ahead = tl.load(rstd_ptr + ahead, mask=ahead < M, other=0.0)
        mean_ahead = mean
        if not RMS:
            mean_ahead = tl.load(mean_ptr + ahead, mask=ahead < M, other=0.0)
        if REREAD:
            gamma = _load(gamma_ptr + cols, in_row, "evict_last")
            x_in = _load(x_ptr + wide * stride_x + cols, mask, "evict_last")
            dy_in = _load(dy_ptr + wide * stride_dy + cols, mask, "evict_last")
        else:
            mask_ahead = (ahead < M)[:, None] & in_row
            wide_ahead = ahead.to(tl.int64)[:, None]
            x_ahead = _load(x_ptr + wide_ahead * stride_x + cols, mask_ahead, "")
            dy_ahead = _load(dy_ptr + wide_ahead * stride_dy + cols, mask_ahead, "")
        weight = gamma.to(tl.float32)
        if ZERO_CENTERED:
            weight = weight + 1.0
        # Outside the mask dy is 0, so neither the sums nor the accumulators see what x_hat is there.
        x_hat = (x_in.to(tl.float32) - mean[:, None]) * rstd[:, None]
        weighted = dy_in.to(tl.float32) * weight
        if RMS:
            along_x = tl.sum(weighted * x_hat, 1)[:, None] / N
            along_1 = 0.0
        else:
            along_1, along_x = tl.reduce((weighted, weighted * x_hat), 1, _sum_pair)
            along_1 = along_1[:, None] / N
            along_x = along_x[:, None] / N
        if REREAD:
            x_in = _load(x_ptr + wide * stride_x + cols, mask, "evict_first")
            dy_in = _load(dy_ptr + wide * stride_dy + cols, mask, "evict_first")
            weight = _load(gamma_ptr + cols, in_row, "evict_first")
            weight = weight.to(tl.float32)
            if ZERO_CENTERED:
                weight = weight + 1.0
            x_hat = (x_in.to(tl.float32) - mean[:, None]) * rstd[:, None]
            weighted = dy_in.to(tl.float32) * weight
        dx = (weighted - along_1 - x_hat * along_x) * rstd[:, None]
        tl.store(dx_ptr + wide * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dgamma += dy_in.to(tl.float32) * x_hat
        if DBETA:
            dbeta += dy_in.to(tl.float32)
        rows = ahead
        rstd = rstd_ahead
        mean = mean_ahead
        if not REREAD:
            x_in = x_ahead
            dy_in = dy_ahead
    out = tl.program_id(0).to(tl.int64) * N + tl.arange(0, BLOCK_N)
    keep = tl.arange(0, BLOCK_N) < N
    tl.store(dgamma_ptr + out, tl.sum(dgamma, 0), mask=keep)
    if DBETA:
        tl.store(dbeta_ptr + out, tl.sum(dbeta, 0), mask=keep)
