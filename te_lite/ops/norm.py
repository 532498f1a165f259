"""LayerNorm and RMSNorm over the last dimension of x[M, N]: forward, also to fp8, statistics alone, backward.

Everything is computed in fp32, whatever the input's dtype, and rounded once at the store. Formulas: Ba et
al., "Layer Normalization" (arXiv 1607.06450, eq. 4) and Zhang & Sennrich, "Root Mean Square Layer
Normalization" (arXiv 1910.07467, eq. 4); the gradients follow by the chain rule, see `norm_backward`.
With zero_centered the stored weight is gamma - 1, so the weight used is 1 + gamma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_lite.ops import norm_kernels as kernels
from te_lite.ops.cast import amax_ref, cast_ref
from te_lite.ops.launch import launch, sm_count
from te_lite.ops.nvtx import ranged
from te_lite.ops.reduce import check_slots, reduce_slots, reduce_slots_ref
from te_lite.ops.registry import register
from te_lite.ops.scalars import new_scalar
from te_lite.ops.source import Source, produce_ref
from te_lite.ops.sums import column_sums

Formula = tuple[Tensor, Tensor | None, float, bool, bool]  # gamma, beta, eps, rms, zero_centered

MAX_FEATURES = 32768  # one row lives in one program's registers
MAX_PARTIALS = 1024  # every consumer of partial maxima reads all of them
HELD_FEATURES = 8192  # up to here backward holds x, dy and both accumulators in registers
MOST_SLOTS = 5  # ranks whose slots, 16 bit, of two rows fit into shared memory beside x: 192 of 227 KB


# -------------------------------------------------------------------------------------------- launchers


def _check(x: Tensor, gamma: Tensor) -> None:
    n = x.shape[-1]
    if x.dim() != 2 or gamma.dim() != 1 or gamma.shape[0] != n:
        raise ValueError(
            f"norm of x {tuple(x.shape)} with gamma {tuple(gamma.shape)}: x must be [M, N] and gamma [N]; "
            f"flatten the leading dimensions of x and give the module the size of its last dimension"
        )
    if not 1 <= n <= MAX_FEATURES:
        raise ValueError(
            f"norm over {n} features: a row must fit in one program, 1 to {MAX_FEATURES} features; "
            f"split the features or use torch.nn.functional.layer_norm"
        )


def _rows(x: Tensor) -> Tensor:
    """The kernels walk rows by a stride (0 for an expanded tensor) but need neighbours side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def _forward_cuda(x, gamma, beta, eps, rms, zero_centered, scale=None, dtype=None, scale_inv=None, amax_out=None):
    x = _rows(x)
    m, n = x.shape
    y, mean, rstd = _forward_outputs(x, gamma, beta, eps, rms, zero_centered, scale, dtype)
    if m or scale is not None:  # scale_inv is written too
        block_m, block_n, warps, *_ = kernels.forward_launch(n)
        launch(
            kernels.forward_kernel, max(1, -(-m // block_m)), (amax_out, scale),
            (x, gamma, beta, y, mean, rstd, scale_inv), (m, n, x.stride(0), eps),
            (rms, zero_centered, block_m, block_n, block_n == n), warps,
        )  # fmt: skip
    return y, mean, rstd


def _stats_programs(m: int, n: int, rms: bool, device: torch.device) -> int:
    block_m, *_, per_sm = kernels.stats_launch(n, rms)
    return min(-(-m // block_m), per_sm * sm_count(device), MAX_PARTIALS)


def _stats_cuda(x, gamma, beta, eps, rms, zero_centered, want_amax):
    x = _rows(x)
    m, n = x.shape
    mean, rstd, amax = _stats_outputs(x, gamma, beta, eps, rms, zero_centered, want_amax)
    if not m:
        return mean, rstd, amax.zero_()
    block_m, block_n, warps, *_ = kernels.stats_launch(n, rms)
    launch(
        kernels.stats_kernel, _stats_programs(m, n, rms, x.device), (),
        (x, gamma, beta, mean, rstd, amax), (m, n, x.stride(0), eps),
        (rms, zero_centered, want_amax, block_m, block_n, block_n == n), warps,
    )  # fmt: skip
    return mean, rstd, amax


def _backward_cuda(dy, x, mean, rstd, gamma, zero_centered, slots=None, rank=0):
    m, n = x.shape
    ranks = 0 if slots is None else slots.shape[0]
    held = n <= HELD_FEATURES and n % 16 == 0 and ranks <= MOST_SLOTS  # else nothing would be loaded ahead
    held = held and kernels.backward_launch(n).block_m == 1  # several rows' sums would be added in another order
    if ranks and not (held and slots.dtype == dy.dtype and dy.element_size() == 2):
        dy, slots, ranks = reduce_slots(slots, dy, None, rank, slots.dtype), None, 0
    dy, x = _rows(dy), _rows(x)
    rms = mean is None
    dx = torch.empty((m, n), dtype=x.dtype, device=x.device)
    block_m, block_n, warps, _, per_sm = kernels.backward_launch(n)
    # At least four rows a program: a partial row costs as much traffic as two rows of bf16.
    programs = min(-(-m // (4 * block_m)), per_sm * sm_count(x.device))
    wide = block_n > HELD_FEATURES
    in_kernel = not (rms or wide)  # a wide row leaves no registers for a second accumulator
    dgamma = torch.empty((programs, n), dtype=torch.float32, device=x.device)
    dbeta = torch.empty((programs, n), dtype=torch.float32, device=x.device) if in_kernel else gamma.new_empty(0)
    launch(
        kernels.backward_kernel, programs, (),
        (dy, x, mean, rstd, gamma, dx, dgamma, dbeta, slots), (m, n, dy.stride(0), x.stride(0), rank),
        (rms, zero_centered, in_kernel, wide, block_m, block_n, block_n == n, ranks, 3 if ranks else None), warps,
    )  # fmt: skip
    if in_kernel:
        dbeta = column_sums(dbeta, torch.empty_like(gamma))
    elif not rms:
        dbeta = dy.sum(0, dtype=torch.float32).to(gamma.dtype)
    return dx, column_sums(dgamma, torch.empty_like(gamma)), dbeta


# ---------------------------------------------------------------------------------------------- oracles


def norm_forward_ref(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool, zero_centered: bool,
    scale: Tensor | None = None, dtype: torch.dtype | None = None, scale_inv: Tensor | None = None,
    amax_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Oracle of `norm_forward`, and with a scale that of `norm_cast`."""
    mean, rstd, made = _made_ref(x, gamma, beta, eps, rms, zero_centered)
    if scale is None:
        return produce_ref(made).to(x.dtype), mean, rstd
    row = torch.empty(x.shape, dtype=dtype, device=x.device)
    cast_ref(*made.flat, scale, *[None] * 4, 0.0, False, None, row, None, scale_inv, *[None] * 4, amax_out)
    return row, mean, rstd


def norm_stats_ref(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool, zero_centered: bool, want_amax: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Oracle of `norm_stats`; one partial."""
    mean, rstd, made = _made_ref(x, gamma, beta, eps, rms, zero_centered)
    return mean, rstd, amax_ref(made) if want_amax else None


def _made_ref(x, gamma, beta, eps, rms, zero_centered):
    """mean, rstd, and the norm with them."""
    mean = None if rms else x.float().mean(1)
    centred = x.float() if rms else x.float() - mean[:, None]
    rstd = 1.0 / torch.sqrt(centred.square().mean(1) + eps)
    return mean, rstd, Source("norm", x, None, mean, rstd, gamma, beta, zero_centered)


def norm_backward_ref(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, gamma: Tensor, zero_centered: bool,
    slots: Tensor | None = None, rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Oracle of `norm_backward`."""
    dy32 = (dy if slots is None else reduce_slots_ref(slots, dy, None, rank, slots.dtype)).float()
    x_hat = (x.float() if mean is None else x.float() - mean[:, None]) * rstd[:, None]
    weighted = dy32 * (gamma.float() + 1.0 if zero_centered else gamma.float())
    dx = weighted - x_hat * (weighted * x_hat).mean(1, keepdim=True)
    if mean is not None:
        dx = dx - weighted.mean(1, keepdim=True)
    dx = dx * rstd[:, None]
    dgamma = (dy32 * x_hat).sum(0).to(gamma.dtype)
    return dx.to(x.dtype), dgamma, None if mean is None else dy32.sum(0).to(gamma.dtype)


# -------------------------------------------------------------------------------------------------- ops


def _cpu_outputs(*values: Tensor | None) -> tuple[Tensor, ...]:
    """An op returns contiguous tensors, whatever strides its inputs have; what is not there is an empty one."""
    out = []
    for v in values:
        out.append(torch.empty(0, device="cpu") if v is None else v.contiguous())
    return tuple(out)


def _stats_outputs(x, gamma, beta, eps, rms, zero_centered, want_amax):
    m, n = x.shape
    partials = 0
    if want_amax:
        partials = 1 if x.device.type == "cpu" or m == 0 else _stats_programs(m, n, rms, x.device)
    return tuple(x.new_empty(size, dtype=torch.float32) for size in (0 if rms else m, m, partials))


def _forward_outputs(x, gamma, beta, eps, rms, zero_centered, scale=None, dtype=None, scale_inv=None, amax_out=None):
    m = x.shape[0]
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    return y, *(x.new_empty(size, dtype=torch.float32) for size in (0 if rms else m, m))


def _backward_fake(dy, x, mean, rstd, gamma, zero_centered, slots=None, rank=0):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, torch.empty_like(gamma), gamma.new_empty(0 if mean is None else x.shape[1])


_forward_op = register(
    "norm_forward(Tensor x, Tensor gamma, Tensor? beta, float eps, bool rms, bool zero_centered, Tensor? scale=None,"
    " ScalarType? dtype=None, Tensor(a!)? scale_inv=None, Tensor(b!)? amax_out=None)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    cpu=lambda *args: _cpu_outputs(*norm_forward_ref(*args)),
    cuda=_forward_cuda,
    fake=_forward_outputs,
)
_stats_op = register(
    "norm_stats(Tensor x, Tensor gamma, Tensor? beta, float eps, bool rms, bool zero_centered,"
    " bool want_amax) -> (Tensor mean, Tensor rstd, Tensor amax)",
    cpu=lambda *args: _cpu_outputs(*norm_stats_ref(*args)),
    cuda=_stats_cuda,
    fake=_stats_outputs,
)
_backward_op = register(
    "norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor gamma, bool zero_centered,"
    " Tensor(a!)? slots=None, int rank=0) -> (Tensor dx, Tensor dgamma, Tensor dbeta)",
    cpu=lambda *args: _cpu_outputs(*norm_backward_ref(*args)),
    cuda=_backward_cuda,
    fake=_backward_fake,
)


@ranged("te_lite.norm")
def norm_forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool, zero_centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x[M, N], gamma[N], beta[N] or None -> y[M, N] in x.dtype, mean fp32 [M] (None if rms), rstd fp32 [M].

    mean = x.mean(1)                                    # rms: 0
    rstd = 1 / sqrt(((x - mean) ** 2).mean(1) + eps)
    y    = (x - mean) * rstd * weight + beta            # weight = gamma, or 1 + gamma if zero_centered

    One read of x. Raises ValueError if gamma is not [N] or N is not in 1 to 32768.
    """
    _check(x, gamma)
    y, mean, rstd = _forward_op(x, gamma, beta, eps, rms, zero_centered)
    return y, None if rms else mean, rstd


@ranged("te_lite.norm")
def norm_cast(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool, zero_centered: bool,
    scale: Tensor, dtype: torch.dtype, amax_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """x[M, N] -> fp8 [M, N] of `dtype`, its fp32 inverse scale [1], mean and rstd as of `norm_forward`. Unfused:

        mean, rstd, _ = norm_stats(x, gamma, beta, eps, rms, zero_centered, False)
        y = source.norm(x, mean, rstd, gamma, beta, zero_centered)
        out = transform(y, fp8_dtype=dtype, row=True, scale=scale, amax_out=amax_out)      # row, scale_inv

    One read of x. The same bits for 16-bit x; of fp32 x the statistics may be summed in another order.
    """
    _check(x, gamma)
    scale_inv = new_scalar(x)
    row, mean, rstd = _forward_op(x, gamma, beta, eps, rms, zero_centered, scale, dtype, scale_inv, amax_out)
    return row, scale_inv, None if rms else mean, rstd


@ranged("te_lite.norm")
def norm_stats(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, rms: bool, zero_centered: bool, want_amax: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The statistics of `norm_forward` without its output: mean, rstd, and amax with want_amax.

    amax: fp32 [P], P <= 1024, partial maxima of |y| before rounding; a nan counts as inf, so it is not lost.
    """
    _check(x, gamma)
    mean, rstd, amax = _stats_op(x, gamma, beta, eps, rms, zero_centered, want_amax)
    return None if rms else mean, rstd, amax if want_amax else None


@ranged("te_lite.norm_backward")
def norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, gamma: Tensor, zero_centered: bool,
    slots: Tensor | None = None, rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dy[M, N], x[M, N], mean[M] (None: rms), rstd[M], gamma[N] -> dx in x.dtype, dgamma, dbeta (rms: None).

    x_hat  = (x - mean) * rstd
    g      = dy * weight                                # weight = gamma, or 1 + gamma if zero_centered
    dx     = rstd * (g - g.mean(1) - x_hat * (g * x_hat).mean(1))     # rms: without g.mean(1)
    dgamma = (dy * x_hat).sum(0)                        # [N] in gamma.dtype, one rounding; same bits on every run
    dbeta  = dy.sum(0)                                  # likewise

    slots[R, M, N]: dy is reduce_slots(slots, dy, None, rank, slots.dtype), with the same bits; where it can be, it is
    summed as it is read. Errors: ValueError, as there.
    """
    if slots is not None:
        check_slots(slots, dy)
    dx, dgamma, dbeta = _backward_op(dy, x, mean, rstd, gamma, zero_centered, slots, rank)
    return dx, dgamma, None if mean is None else dbeta
