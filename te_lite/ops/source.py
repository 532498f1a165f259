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

from te_lite.arguments import remedy

# TE's names; the gated one takes h = [gate | up] halves and computes act(gate) * up.
_GATED = {"gelu": "geglu", "qgelu": "qgeglu", "relu": "reglu", "srelu": "sreglu", "silu": "swiglu"}
# Name -> (the activation without its gate, gated).
ACTIVATIONS = {"": ("", False)} | {name: (name, False) for name in _GATED} | {_GATED[a]: (a, True) for a in _GATED}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Derivatives multiply x by s * (1 - s), which is 0 in fp32 beyond |x| = 104: the clamp turns inf * 0 into 0.
_LIMIT = tl.constexpr(128.0)
_GELU_B = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi): tanh(u) is 2 * sigmoid(2u) - 1
_GELU_C = tl.constexpr(0.044715)
_QGELU = tl.constexpr(1.702)


# A Source, field by field, without its amax, in an op's schema.
FLAT = (
    "str kind, Tensor x, Tensor? dy, Tensor? mean, Tensor? rstd, Tensor? gamma, Tensor? beta, "
    "bool zero_centered, str activation"
)


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
    activation: str = ""
    amax: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def cols(self) -> int:
        width = self.x.shape[1]
        return width // 2 if self.kind == "act" and ACTIVATIONS[self.activation][1] else width

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device


def tiled(x: Tensor, activation: str) -> tuple[int, int, str, bool]:
    """(rows, columns of the tiles, the activation without its gate, gated) of a kernel that reads x by produce().

    A gated activation's halves are read side by side, so its tiles have half of x's columns.
    """
    (rows, width), (base, glu) = x.shape, ACTIVATIONS[activation]
    return rows, width // 2 if glu else width, base, glu


def of_source(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """oracle(source, ...) as an op calls it: the Source is given as in FLAT."""
    return lambda *args: oracle(Source(*args[:9]), *args[9:])


def is_glu(activation: str) -> bool:
    """True where h holds [gate | up] halves."""
    if activation not in ACTIVATIONS or not activation:
        known = [name for name in ACTIVATIONS if name]
        near = remedy("activation", activation, known)
        raise ValueError(f"activation {activation!r}: must be one of {', '.join(known)}; {near}")
    return ACTIVATIONS[activation][1]


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
    x: Tensor, mean: Tensor | None, rstd: Tensor, gamma: Tensor, beta: Tensor | None = None,
    zero_centered: bool = False, amax: Tensor | None = None,
) -> Source:  # fmt: skip
    """(x [M, N] - mean [M]) * rstd [M] * (gamma [N] + zero_centered) + beta [N]; no mean is RMSNorm.

    mean and rstd are fp32. amax: as for `plain`, of the normalised output.
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
    return Source("norm", x, None, mean, rstd, gamma, beta, zero_centered, "", amax)


def act(h: Tensor, activation: str) -> Source:
    """activation(h [M, F]), or for a gated one act(h[:, :F]) * h[:, F:] of h [M, 2F]; the value is [M, F]."""
    _check_matrix(h, "h")
    if is_glu(activation) and h.shape[1] % 2:
        raise ValueError(
            f"h has {h.shape[1]} columns: {activation} needs an even number, [gate | up]; pass both halves"
        )
    return Source("act", h, activation=activation)


def dact(dy: Tensor, h: Tensor, activation: str) -> Source:
    """Gradient of `act(h, activation)` with respect to h: shape of h [M, F] or [M, 2F], from dy [M, F]."""
    _check_matrix(h, "h")
    _check_matrix(dy, "dy")
    width = dy.shape[1] * (2 if is_glu(activation) else 1)
    if dy.dtype != h.dtype or h.shape != (dy.shape[0], width) or dy.device != h.device:
        raise ValueError(
            f"dy {tuple(dy.shape)} {dy.dtype} on {dy.device} and h {tuple(h.shape)} {h.dtype} on {h.device}: "
            f"{activation} needs h of shape {(dy.shape[0], width)} in dy's dtype, on its device; cast dy"
        )
    return Source("dact", h, dy, activation=activation)


def _gate_ref(base: str, x: Tensor) -> Tensor:
    """What gelu (the tanh approximation), qgelu and silu multiply x by."""
    if base == "gelu":
        x = _GELU_B.value * (x + _GELU_C.value * x * x * x)
    elif base == "qgelu":
        x = _QGELU.value * x
    return torch.sigmoid(x)


def activation_ref(base: str, x: Tensor) -> Tensor:
    """The activation itself, in x's own dtype, without a gate."""
    if base not in ("relu", "srelu"):
        return x * _gate_ref(base, x)
    y = torch.relu(x)
    return y * y if base == "srelu" else y


def activation_grad_ref(base: str, x: Tensor) -> Tensor:
    """d activation / d x in x's own dtype."""
    if base in ("relu", "srelu"):
        return 2.0 * torch.relu(x) if base == "srelu" else torch.where(x <= 0, 0.0, 1.0).to(x.dtype)
    s, xc = _gate_ref(base, x), x.clamp(-_LIMIT.value, _LIMIT.value)
    slope = (_QGELU.value * xc if base == "qgelu" else xc) * s * (1 - s)
    return s + (slope * (_GELU_B.value * (1 + 3 * _GELU_C.value * xc * xc)) if base == "gelu" else slope)


def produce_ref(source: Source) -> Tensor:
    """The whole matrix, fp32 [rows, cols], in plain torch and fp32 math. May alias an fp32 source.x."""
    x = source.x.float()
    if source.kind == "plain":
        return x
    if source.kind == "norm":
        y = (x if source.mean is None else x - source.mean[:, None]) * source.rstd[:, None]
        y = y * (source.gamma.float() + 1.0 if source.zero_centered else source.gamma.float())
        return y if source.beta is None else y + source.beta.float()
    base, glu = ACTIVATIONS[source.activation]
    gate, up = x.chunk(2, dim=1) if glu else (x, None)
    if source.kind == "act":
        y = activation_ref(base, gate)
        return y * up if glu else y
    dy = source.dy.float()
    if not glu:
        return dy * activation_grad_ref(base, gate)
    return torch.cat((dy * up * activation_grad_ref(base, gate), dy * activation_ref(base, gate)), dim=1)


@triton.jit
def _gate(x, ACT: tl.constexpr):
    """_gate_ref of an fp32 tile."""
    if ACT == "gelu":
        x = _GELU_B * (x + _GELU_C * x * x * x)
    elif ACT == "qgelu":
        x = _QGELU * x
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activation(x, ACT: tl.constexpr):
    """activation_ref of an fp32 tile."""
    if ACT == "relu" or ACT == "srelu":
        y = tl.where(x <= 0.0, 0.0, x)  # not a maximum: nan stays nan
        if ACT == "srelu":
            y = y * y
    else:
        y = x * _gate(x, ACT)
    return y


@triton.jit
def _activation_grad(x, ACT: tl.constexpr):
    """activation_grad_ref of an fp32 tile."""
    if ACT == "relu":
        d = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACT == "srelu":
        d = 2.0 * tl.where(x <= 0.0, 0.0, x)
    else:
        xc = tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT)
        s = _gate(x, ACT)
        slope = (_QGELU * xc if ACT == "qgelu" else xc) * s * (1.0 - s)
        if ACT == "gelu":
            slope = slope * (_GELU_B * (1.0 + 3.0 * _GELU_C * xc * xc))
        d = s + slope
    return d


@triton.jit
def produce(
    source, m0, n0, rows, cols, KIND: tl.constexpr, ACT: tl.constexpr, GLU: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """produce_ref's rows m0, m0 + STEP, ..., BLOCK_M of them, and columns n0 : n0 + BLOCK_N as an fp32 tile, zero
    outside rows x cols.

    source: (x, dy, mean, rstd, gamma, beta). KIND "words": the int32 values of x themselves.
    Returns two tiles. cols is F for a gated activation and then dact returns (gate's, up's) gradients from
    one read; otherwise the second is to be ignored.
    """
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
    if KIND == "norm":
        if mean is not None:
            v = v - tl.load(mean + m0 + m, mask=in_m, other=0.0)[:, None]
        v = v * tl.load(rstd + m0 + m, mask=in_m, other=0.0)[:, None]
        g = tl.load(gamma + n0 + n, mask=in_n, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            g = g + 1.0
        v = v * g[None, :]
        if beta is not None:
            v = v + tl.load(beta + n0 + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        v = tl.where(mask, v, 0.0)
    elif KIND == "act":
        if GLU:
            up = tl.load(h + cols + inside, mask=mask, other=0.0).to(tl.float32)
            v = _activation(v, ACT) * up
        else:
            v = _activation(v, ACT)
    elif KIND == "dact":
        dy += first * cols + n0
        d = tl.load(dy + m[:, None] * cols + n[None, :], mask=mask, other=0.0).to(tl.float32)
        if GLU:
            up = tl.load(h + cols + inside, mask=mask, other=0.0).to(tl.float32)
            v2 = d * _activation(v, ACT)
            v = d * up * _activation_grad(v, ACT)
        else:
            v = d * _activation_grad(v, ACT)
    return v, v2
