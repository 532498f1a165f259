"""What a tile kernel reads, as a plain value, and how an fp32 tile is produced from it.

A `Source` stands for a matrix of `rows` x `cols` fp32 values that need not exist in memory: a tensor, the
output of a norm whose statistics are known, an activation, or the gradient of an activation. `produce_ref`
computes the whole matrix in plain torch; `produce` computes one tile of it inside a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops import activation as activations
from te_lite.ops.activation import NONE, Activation

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# A Source, field by field, without its amax, in an op's schema.
FLAT = (
    "str kind, Tensor x, Tensor? dy, Tensor? mean, Tensor? rstd, Tensor? gamma, Tensor? beta, "
    "bool zero_centered, str activation, float[] parameters"
)


class Form(NamedTuple):
    """All of a Source but its tensors: what the kernels that read it are compiled for.

    kind: "plain", "norm", "act", "dact", see the constructors; for kernels also "words", the int32 values of x.
    """

    kind: str
    activation: Activation = NONE
    zero_centered: bool = False

    @property
    def two(self) -> bool:
        """Whether produce() returns two tiles: the gradients of gate and up."""
        return self.kind == "dact" and self.activation.glu


WORDS = Form("words")
SumDtype = torch.dtype | None  # of the column sums that a cast gives beside; None (or False): they are not wanted


class Source(NamedTuple):
    """A matrix [rows, cols] of fp32 values, described by what it is computed from. See the constructors."""

    kind: str
    x: Tensor
    dy: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None
    zero_centered: bool = False
    activation: Activation = NONE
    amax: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def cols(self) -> int:
        return self.x.shape[1] if self.kind == "dact" else self.tile_cols

    @property
    def tile_cols(self) -> int:
        """Columns of the tiles of produce(): half of x's for a glu, whose halves are read side by side."""
        return self.x.shape[1] // (2 if self.activation.glu else 1)

    @property
    def form(self) -> Form:
        return Form(self.kind, self.activation, self.zero_centered)

    @property
    def tensors(self) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
        """As kernels take them: x, dy, mean, rstd, gamma, beta."""
        return self[1:7]

    @property
    def flat(self) -> tuple[Any, ...]:
        """As ops take it: FLAT."""
        return *self[:8], *self.activation[:2]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device


def of_source(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """implementation(source, ...) as an op calls it: the Source is given as in FLAT."""
    make: Any = Source  # mypy cannot count what a slice has
    return lambda *args: implementation(make(*args[:8], activations.built(args[8], tuple(args[9]))), *args[10:])


def _check_matrix(x: Tensor, name: str) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}: must be bfloat16, float16 or float32; convert it first")
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, strides {x.stride()}: must be a contiguous matrix [M, K]; "
            f"pass {name}.reshape(-1, K).contiguous()"
        )


def plain(x: Tensor, amax: Tensor | None = None, name: str = "x") -> Source:
    """x [M, N] itself. amax: fp32 [P] partial maxima of |x| where an earlier pass computed them. name: in errors."""
    _check_matrix(x, name)
    return Source("plain", x, amax=amax)


def norm(
    x: Tensor, mean: Tensor | None, rstd: Tensor, gamma: Tensor, beta: Tensor | None = None, zero_centered: bool = False
) -> Source:
    """(x [M, N] - mean [M]) * rstd [M] * (gamma [N] + zero_centered) + beta [N]; no mean is RMSNorm.

    mean and rstd are fp32.
    """
    _check_matrix(x, "x")
    m, n = x.shape
    for name, v, size in (("mean", mean, m), ("rstd", rstd, m), ("gamma", gamma, n), ("beta", beta, n)):
        if v is not None and (v.shape != (size,) or not v.is_contiguous() or v.device != x.device):
            raise ValueError(
                f"{name} has shape {tuple(v.shape)} on {v.device}: must be contiguous, of shape [{size}] and on "
                f"{x.device} for an input of shape {tuple(x.shape)}; pass the tensor made for this input"
            )
    if rstd.dtype != torch.float32 or (mean is not None and mean.dtype != torch.float32):
        raise TypeError(f"rstd has dtype {rstd.dtype}: statistics must be float32; pass those of norm_stats")
    return Source("norm", x, None, mean, rstd, gamma, beta, zero_centered)


def act(h: Tensor, activation: Activation) -> Source:
    """activation(h): [M, F], of h [M, F], or of a glu's h [M, 2F]."""
    _check_matrix(h, "h")
    if activation.glu and h.shape[1] % 2:
        raise ValueError(
            f"h has {h.shape[1]} columns: {activation.name} needs an even number, [gate | up]; pass both halves"
        )
    return Source("act", h, activation=activation)


def dact(dy: Tensor, h: Tensor, activation: Activation) -> Source:
    """Gradient of `act(h, activation)` with respect to h: shape of h [M, F] or [M, 2F], from dy [M, F]."""
    _check_matrix(h, "h")
    _check_matrix(dy, "dy")
    width = dy.shape[1] * (2 if activation.glu else 1)
    if dy.dtype != h.dtype or h.shape != (dy.shape[0], width) or dy.device != h.device:
        raise ValueError(
            f"dy {tuple(dy.shape)} {dy.dtype} on {dy.device} and h {tuple(h.shape)} {h.dtype} on {h.device}: "
            f"{activation.name} needs h of shape {(dy.shape[0], width)} in dy's dtype, on its device; cast dy"
        )
    return Source("dact", h, dy, activation=activation)


def produce_ref(source: Source) -> Tensor:
    """The whole matrix, fp32 [rows, cols], in plain torch and fp32 math. May alias an fp32 source.x."""
    x = source.x.float()
    if source.kind == "plain":
        return x
    if source.kind == "norm":
        assert source.rstd is not None and source.gamma is not None
        y = (x if source.mean is None else x - source.mean[:, None]) * source.rstd[:, None]
        y = y * (source.gamma.float() + 1.0 if source.zero_centered else source.gamma.float())
        return y if source.beta is None else y + source.beta.float()
    activation = source.activation
    gate, up = x.chunk(2, dim=1) if activation.glu else (x, x)
    if source.kind == "act":
        if activation.glu:
            return activations.glu_ref(gate, up, activation)
        return activations.value_ref(x, activation)
    assert source.dy is not None
    dy = source.dy.float()
    if not activation.glu:
        return dy * activations.slope_ref(x, activation)
    return torch.cat(activations.glu_grads_ref(dy, gate, up, activation), dim=1)


@triton.jit
def produce(
    source, m0, n0, rows, cols, FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr
):
    """produce_ref's rows m0, m0 + STEP, ..., BLOCK_M of them, and columns n0 : n0 + BLOCK_N as an fp32 tile, zero
    outside rows x cols.

    source: its tensors; rows, cols: its rows and tile_cols. Returns three tiles from one read: where FORM.two the first
    two are the gradients of gate and up; of a "dact" the third is the activation itself. Others are to be ignored.
    """
    KIND: tl.constexpr = FORM.kind
    ACTIVATION: tl.constexpr = FORM.activation
    GLU: tl.constexpr = ACTIVATION.glu
    x, dy, mean, rstd, gamma, beta = source
    m = tl.arange(0, BLOCK_M) * STEP
    n = tl.arange(0, BLOCK_N)
    in_m = m0 + m < rows
    in_n = n0 + n < cols
    mask = in_m[:, None] & in_n[None, :]
    # The tile's origin is 64 bit, the offsets in it are 32 bit: M * N may pass 2^31, BLOCK_M * N may not.
    first = m0.to(tl.int64)
    width = 2 * cols if GLU else cols
    h = x + first * width + n0
    inside = m[:, None] * width + n[None, :]
    v = tl.load(h + inside, mask=mask, other=0)
    if KIND != "words":
        v = v.to(tl.float32)
    v2 = v
    activated = v
    if KIND == "norm":
        if mean is not None:
            v = v - tl.load(mean + m0 + m, mask=in_m, other=0.0)[:, None]
        v = v * tl.load(rstd + m0 + m, mask=in_m, other=0.0)[:, None]
        g = tl.load(gamma + n0 + n, mask=in_n, other=0.0).to(tl.float32)
        if FORM.zero_centered:
            g = g + 1.0
        v = v * g[None, :]
        if beta is not None:
            v = v + tl.load(beta + n0 + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        v = tl.where(mask, v, 0.0)
    elif KIND == "act":
        if GLU:
            up = tl.load(h + cols + inside, mask=mask, other=0.0).to(tl.float32)
            v = activations.glu(v, up, ACTIVATION)
        else:
            v = activations.value(v, ACTIVATION)
    elif KIND == "dact":
        dy += first * cols + n0
        d = tl.load(dy + m[:, None] * cols + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if GLU:
            up = tl.load(h + cols + inside, mask=mask, other=0.0).to(tl.float32)
            activated = activations.glu(v, up, ACTIVATION)
            v, v2 = activations.glu_grads(d, v, up, ACTIVATION)
        else:
            activated = activations.value(v, ACTIVATION)
            v = d * activations.slope(v, ACTIVATION)
    return v, v2, activated
