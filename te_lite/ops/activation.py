"""The activations of an MLP: each is one value, and all that is known of one by name stands here.

A new one takes a line in _RULES, its math in torch (the oracle) and in Triton, below, and, where fused GEMMs are to
compute it, a struct in csrc/gemm_activation.h. Kernels are compiled for an activation with its parameters.
"""

from __future__ import annotations

import ctypes
import reprlib
from collections.abc import Mapping
from functools import cache
from numbers import Real
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.arguments import remedy

_FLOAT_MAX = torch.finfo(torch.float32).max
# Derivatives multiply x by s * (1 - s), which is 0 in fp32 beyond |x| = 104: the clamp turns inf * 0 into 0.
_LIMIT = tl.constexpr(128.0)
_GELU_B = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi): tanh(u) is 2 * sigmoid(2u) - 1
_GELU_C = tl.constexpr(0.044715)
_QGELU = tl.constexpr(1.702)


class _Rule(NamedTuple):
    """base: what x goes through. glu: h is [gate | up], and x the gate. fused: csrc/gemm_activation.h has it.
    defaults: of its parameters, in order."""

    base: str
    glu: bool = False
    fused: bool = False
    defaults: Mapping[str, float] = MappingProxyType({})


# By Transformer Engine's names.
_RULES = {
    "": _Rule(""),
    "gelu": _Rule("gelu"),
    "geglu": _Rule("gelu", glu=True),
    "qgelu": _Rule("qgelu"),
    "qgeglu": _Rule("qgelu", glu=True),
    "relu": _Rule("relu"),
    "reglu": _Rule("relu", glu=True),
    "srelu": _Rule("srelu"),
    "sreglu": _Rule("srelu", glu=True),
    "silu": _Rule("silu"),
    "glu": _Rule("sigmoid", glu=True, fused=True),
    "swiglu": _Rule("silu", glu=True, fused=True),
    "clamped_swiglu": _Rule("clamped", True, True, {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}),
}
ACTIVATIONS = tuple(name for name in _RULES if name)


class Activation(NamedTuple):
    """An activation with the values of all its parameters, in its rule's order, rounded to fp32; "" is none.

    `of` checks both. A plain one maps h[M, F] to value(h), a glu h[M, 2F] = [gate | up] to value(gate) * linear(up).
    """

    name: str = ""
    parameters: tuple[float, ...] = ()
    base: str = ""  # these three by the name, see _Rule
    glu: bool = False
    fused: bool = False

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, float] | None = None) -> Activation:
        """The activation of that name. parameters: by name, those that are not to be the default. Errors: ValueError,
        TypeError."""
        if name not in ACTIVATIONS:
            near = remedy("activation", name, ACTIVATIONS)
            raise ValueError(f"activation {name!r}: must be one of {', '.join(ACTIVATIONS)}; {near}")
        rule, given = _RULES[name], {} if parameters is None else parameters
        if not isinstance(given, Mapping):
            raise TypeError(f"activation_params={reprlib.repr(given)}: must be a dict of numbers, or None; pass one")
        if unknown := [key for key in given if key not in rule.defaults]:
            known = f"{', '.join(rule.defaults)}; leave out others" if rule.defaults else "none; leave it None"
            raise ValueError(f"activation_params has {reprlib.repr(unknown)}: activation {name!r} takes {known}")
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"activation_params[{key!r}]={reprlib.repr(value)}: must be a number; pass a float")
            if not abs(value) <= _FLOAT_MAX or (key == "limit" and value <= 0):
                raise ValueError(f"activation_params[{key!r}]={value}: must be finite in fp32, a limit > 0; choose one")
        values = (ctypes.c_float(given.get(key, default)).value for key, default in rule.defaults.items())
        return built(name, tuple(values))

    @property
    def named(self) -> dict[str, float]:
        """The parameters by name."""
        return dict(zip(_RULES[self.name].defaults, self.parameters, strict=True))


@cache
def built(name: str, parameters: tuple[float, ...]) -> Activation:
    """The activation of that name, of values that were checked."""
    return Activation(name, parameters, *_RULES[name][:3])


NONE = Activation()


def _gate_ref(x: Tensor, base: str) -> Tensor:
    """What gelu (the tanh approximation), qgelu and silu multiply x by; otherwise the sigmoid."""
    if base == "gelu":
        x = _GELU_B.value * (x + _GELU_C.value * x * x * x)
    elif base == "qgelu":
        x = _QGELU.value * x
    return torch.sigmoid(x)


def value_ref(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x, of a glu that of the gate, in x's own dtype."""
    base = activation.base
    if base == "clamped":
        limit, alpha, _ = activation.parameters
        x = x.clamp(max=limit)
        return x * torch.sigmoid(alpha * x)
    if base == "sigmoid":
        return _gate_ref(x, base)
    if base not in ("relu", "srelu"):
        return x * _gate_ref(x, base)
    y = torch.relu(x)
    return y * y if base == "srelu" else y


def slope_ref(x: Tensor, activation: Activation) -> Tensor:
    """d value_ref / d x in x's own dtype."""
    base = activation.base
    if base in ("relu", "srelu"):
        return 2.0 * torch.relu(x) if base == "srelu" else torch.where(x <= 0, 0.0, 1.0).to(x.dtype)
    if base == "clamped":
        limit, alpha, _ = activation.parameters
        z = alpha * x.clamp(max=limit)
        s = torch.sigmoid(z)
        return torch.where(x > limit, 0.0, s + z.clamp(-_LIMIT.value, _LIMIT.value) * s * (1 - s))
    if base == "sigmoid":
        return (s := _gate_ref(x, base)) * (1 - s)
    s, xc = _gate_ref(x, base), x.clamp(-_LIMIT.value, _LIMIT.value)
    slope = (_QGELU.value * xc if base == "qgelu" else xc) * s * (1 - s)
    return s + (slope * (_GELU_B.value * (1 + 3 * _GELU_C.value * xc * xc)) if base == "gelu" else slope)


def glu_ref(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """A glu of [gate | up]."""
    return value_ref(gate, activation) * _linear_ref(up, activation)


def _linear_ref(up: Tensor, activation: Activation) -> Tensor:
    if activation.base != "clamped":
        return up
    limit, _, offset = activation.parameters
    return up.clamp(-limit, limit) + offset


def glu_grads_ref(d: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Gradients of gate and of up, from d, that of glu_ref."""
    d_gate, d_up = d * _linear_ref(up, activation) * slope_ref(gate, activation), d * value_ref(gate, activation)
    if activation.base == "clamped":
        d_up = torch.where(up.abs() > activation.parameters[0], 0.0, d_up)
    return d_gate, d_up


@triton.jit
def _gate(x, BASE: tl.constexpr):
    """_gate_ref of an fp32 tile."""
    if BASE == "gelu":
        x = _GELU_B * (x + _GELU_C * x * x * x)
    elif BASE == "qgelu":
        x = _QGELU * x
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _at_most(x, LIMIT: tl.constexpr):
    return tl.where(x > LIMIT, LIMIT, x)  # not a minimum: nan stays nan


@triton.jit
def _linear(up, ACTIVATION: tl.constexpr):
    """_linear_ref of an fp32 tile."""
    if ACTIVATION.base == "clamped":
        LIMIT: tl.constexpr = ACTIVATION.parameters[0]
        up = tl.where(up < -LIMIT, -LIMIT, _at_most(up, LIMIT)) + ACTIVATION.parameters[2]
    return up


@triton.jit
def value(x, ACTIVATION: tl.constexpr):
    """value_ref of an fp32 tile."""
    BASE: tl.constexpr = ACTIVATION.base
    if BASE == "clamped":
        x = _at_most(x, ACTIVATION.parameters[0])
        y = x * _gate(ACTIVATION.parameters[1] * x, BASE)
    elif BASE == "sigmoid":
        y = _gate(x, BASE)
    elif BASE == "relu" or BASE == "srelu":
        y = tl.where(x <= 0.0, 0.0, x)  # not a maximum: nan stays nan
        if BASE == "srelu":
            y = y * y
    else:
        y = x * _gate(x, BASE)
    return y


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """slope_ref of an fp32 tile."""
    BASE: tl.constexpr = ACTIVATION.base
    if BASE == "relu":
        d = tl.where(x <= 0.0, 0.0, 1.0)
    elif BASE == "srelu":
        d = 2.0 * tl.where(x <= 0.0, 0.0, x)
    elif BASE == "clamped":
        z = ACTIVATION.parameters[1] * _at_most(x, ACTIVATION.parameters[0])
        s = _gate(z, BASE)
        d = s + tl.minimum(tl.maximum(z, -_LIMIT), _LIMIT) * s * (1.0 - s)
        d = tl.where(x > ACTIVATION.parameters[0], 0.0, d)
    elif BASE == "sigmoid":
        s = _gate(x, BASE)
        d = s * (1.0 - s)
    else:
        xc = tl.minimum(tl.maximum(x, -_LIMIT), _LIMIT)
        s = _gate(x, BASE)
        d = (_QGELU * xc if BASE == "qgelu" else xc) * s * (1.0 - s)
        if BASE == "gelu":
            d = d * (_GELU_B * (1.0 + 3.0 * _GELU_C * xc * xc))
        d = s + d
    return d


@triton.jit
def glu(gate, up, ACTIVATION: tl.constexpr):
    """glu_ref of fp32 tiles."""
    return value(gate, ACTIVATION) * _linear(up, ACTIVATION)


@triton.jit
def glu_grads(d, gate, up, ACTIVATION: tl.constexpr):
    """glu_grads_ref of fp32 tiles."""
    d_up = d * value(gate, ACTIVATION)
    if ACTIVATION.base == "clamped":
        d_up = tl.where(tl.abs(up) > ACTIVATION.parameters[0], 0.0, d_up)
    return d * _linear(up, ACTIVATION) * slope(gate, ACTIVATION), d_up
