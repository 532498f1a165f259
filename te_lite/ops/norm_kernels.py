"""The Triton kernels of norm.py and how each is cut. A row stays in one program's registers.

A program holds block_m whole rows of block_n >= N elements at a time. Those of a persistent grid must all be resident
at once, or the last ones start late.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from te_lite.ops.cast_kernels import Config
from te_lite.ops.launch import begin
from te_lite.ops.reduce import sum_of_slots
from te_lite.ops.tiles import magnitude_bits, record_amax, to_fp8_bytes


@cache
def forward_launch(n: int) -> Config:
    """16 to 64 elements a thread. bf16 registers at sm_90: 56 to 64 for N = 4096 to 16384, 128 at 32768."""
    block_n = max(16, triton.next_power_of_2(n))
    return Config(max(1, 2048 // block_n), block_n, min(16, max(4, block_n // 1024)))


@cache
def stats_launch(n: int, rms: bool) -> Config:
    """As the forward, persistent. bf16 registers at sm_90, N = 4096 to 16384: 72 to 81 (rms), 96 to 115."""
    config = forward_launch(n)
    return config._replace(programs_per_sm=max(1, (28 if rms else 20) // config.num_warps))


@cache
def backward_launch(n: int) -> Config:
    """16 elements a thread: x, dy, dgamma and dbeta of 8192 columns fill one SM's registers (128 a thread).

    Wider rows are read twice instead of being held: 112 registers at N = 16384; at 32768 accumulators spill.
    """
    config = forward_launch(n)
    warps = min(16, config.block_m * config.block_n // 512)
    return config._replace(num_warps=warps, programs_per_sm=16 // warps)


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
def _load(pointers, mask, EVICTION: tl.constexpr):
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION)


@triton.jit
def _weight(gamma, ZERO_CENTERED: tl.constexpr):
    gamma = gamma.to(tl.float32)
    if ZERO_CENTERED:
        gamma = gamma + 1.0
    return gamma


@triton.jit
def _affine(x_hat, gamma_ptr, beta_ptr, cols, in_row, ZERO_CENTERED: tl.constexpr):
    y = x_hat * _weight(_load(gamma_ptr + cols, in_row, ""), ZERO_CENTERED)
    if beta_ptr is not None:
        y = y + _load(beta_ptr + cols, in_row, "").to(tl.float32)
    return y


@triton.jit(do_not_specialize_on_alignment=["amax_out", "scale"])
def forward_kernel(
    amax_out, scale, x_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, rstd_ptr, scale_inv,
    M, N, stride_x, eps,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program, BLOCK_M rows: not persistent, because the scheduler already overlaps one row's reduction
    with the loads of the other programs on the SM. gamma comes from L1, and only after the reductions: loaded
    before them it takes 23 to 50 registers a thread more, and a third of the rows in flight with them.

    scale: y is fp8, cast as transform_kernel does it."""
    begin()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    live = rows < M
    in_row = (cols < N)[None, :] if not EVEN else tl.full([1, BLOCK_N], 1, tl.int1)
    mask = live[:, None] & in_row
    wide = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + wide * stride_x + cols[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    centred, mean, rstd = _row_stats(x.to(tl.float32), mask, N, eps, RMS, EVEN)
    y = _affine(centred * rstd[:, None], gamma_ptr, beta_ptr, cols[None, :], in_row, ZERO_CENTERED)
    if scale is None:
        tl.store(y_ptr + wide * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        s = tl.load(scale)
        if tl.program_id(0) == 0:
            tl.store(scale_inv, tl.div_rn(1.0, s))
        q = to_fp8_bytes(y * s, y_ptr.dtype.element_ty == tl.float8e5)
        # In eights, as a thread holds a row of 16-bit values: a store of sixteens would have x loaded in sixteens too,
        # and its sums added in another order than in stats_kernel.
        eights = tl.arange(0, BLOCK_N // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        kept = live[:, None, None] & (eights < N)
        out = y_ptr.to(tl.pointer_type(tl.uint8)) + wide[:, :, None] * N + eights
        tl.store(out, tl.reshape(q, [BLOCK_M, BLOCK_N // 8, 8]), mask=kept)
        largest = tl.max(tl.max(tl.where(live[:, None], magnitude_bits(y), 0), 1), 0)
        record_amax(amax_out, largest)
    if not RMS:
        tl.store(mean_ptr + rows, mean, mask=live)
    tl.store(rstd_ptr + rows, rstd, mask=live)


@triton.jit
def stats_kernel(
    x_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr, amax_ptr,
    M, N, stride_x, eps,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, WANT_AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Persistent: a program walks rows, keeps one running maximum and writes one partial."""
    begin()
    cols = tl.arange(0, BLOCK_N)
    in_row = (cols < N)[None, :] if not EVEN else tl.full([1, BLOCK_N], 1, tl.int1)
    # Eight neighbours share a running maximum: they sit in one thread, so folding them needs no exchange.
    peak = tl.zeros([BLOCK_M, BLOCK_N // 8], tl.float32)
    step = tl.num_programs(0) * BLOCK_M
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    x = _load(x_ptr + rows.to(tl.int64)[:, None] * stride_x + cols[None, :], (rows < M)[:, None] & in_row, "")
    for _ in range(tl.program_id(0) * BLOCK_M, M, step):
        live = rows < M
        ahead = rows + step  # the next rows are in flight while these are reduced
        at = ahead.to(tl.int64)[:, None] * stride_x + cols[None, :]
        x_ahead = _load(x_ptr + at, (ahead < M)[:, None] & in_row, "")
        mask = live[:, None] & in_row
        centred, mean, rstd = _row_stats(x.to(tl.float32), mask, N, eps, RMS, EVEN)
        if WANT_AMAX:
            x_hat = centred * rstd[:, None]
            y = tl.abs(_affine(x_hat, gamma_ptr, beta_ptr, cols[None, :], in_row, ZERO_CENTERED))
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


@triton.jit(do_not_specialize=["rank"])
def backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, dgamma_ptr, dbeta_ptr, slots,
    M, N, stride_dy, stride_x, rank,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, DBETA: tl.constexpr, REREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, RANKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent: a program walks rows, keeps its share of dgamma and dbeta in registers and writes one
    partial row of each, so the sum over programs has a fixed order.

    REREAD: a wide row's x and dy do not fit in registers beside the accumulators; they are loaded again
    after the reductions, from L1, where the first reading left them. The two readings must differ in their
    eviction policy, or the compiler makes one of them. DBETA: accumulate dbeta too.

    slots [RANKS, M, N]: dy is the sum of the others' with dy_ptr's, of the same type. So many rows do not fit in
    registers while they are on their way: with STAGES = 3 those of two rows come to shared memory while the row before
    them is reduced. With 2 nothing would be under way then: the compiler loads at a row's end.
    """
    begin()
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
    if slots is None and not REREAD:
        x_in = _load(x_ptr + wide * stride_x + cols, mask, "")
        dy_in = _load(dy_ptr + wide * stride_dy + cols, mask, "")
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    mean = tl.zeros_like(rstd)
    if not RMS:
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    for _ in tl.range(tl.program_id(0) * BLOCK_M, M, step, num_stages=STAGES):
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
        elif slots is not None:
            x_in = _load(x_ptr + wide * stride_x + cols, mask, "")
            total = sum_of_slots(slots, dy_ptr, wide * N + cols, N.to(tl.int64) * M, rank, mask, RANKS, 0.0)
            dy_in = total.to(dy_ptr.dtype.element_ty)  # as reduce_kernel rounds it
        else:
            mask_ahead = (ahead < M)[:, None] & in_row
            wide_ahead = ahead.to(tl.int64)[:, None]
            x_ahead = _load(x_ptr + wide_ahead * stride_x + cols, mask_ahead, "")
            dy_ahead = _load(dy_ptr + wide_ahead * stride_dy + cols, mask_ahead, "")
        weight = _weight(gamma, ZERO_CENTERED)
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
            weight = _weight(_load(gamma_ptr + cols, in_row, "evict_first"), ZERO_CENTERED)
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
        if slots is None and not REREAD:
            x_in = x_ahead
            dy_in = dy_ahead
    out = tl.program_id(0).to(tl.int64) * N + tl.arange(0, BLOCK_N)
    keep = tl.arange(0, BLOCK_N) < N
    tl.store(dgamma_ptr + out, tl.sum(dgamma, 0), mask=keep)
    if DBETA:
        tl.store(dbeta_ptr + out, tl.sum(dbeta, 0), mask=keep)
