"""Decoder layers in the manner of Llama: found by the names of their parts, believed by what they compute.

A forward runs on a stand-in: the module's own code over small random tensors of the CPU in the place of its parts. So
neither its class nor its device matters, and nothing of it is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_EPS = ("variance_epsilon", "eps", "epsilon")
_OFF = 1e-5  # relative; of fp32, in which some hundred additions err by 1e-6, and eps off by 1% by 2.5e-3


class Rms(NamedTuple):
    """What an RMSNorm computes: x / sqrt(mean(x^2) + eps) * weight, or times (1 + weight) where zero_centered."""

    eps: float
    zero_centered: bool


class NotFollowed(Exception):
    """A forward does not compute what it must; the message says why, as the end of a sentence."""


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of the layers that have the parts of Llama's."""
    for name, module in model.named_modules():
        if _PARTS <= module._modules.keys() and all(module._modules[part] is not None for part in _PARTS):
            yield name, module


def _random(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))  # the caller's random numbers stay what they are
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def _run(module: nn.Module, *args: Any, weight: Tensor | None = None, parts: dict[str, Any] | None = None) -> Any:
    """The forward of the module's class, with other parts and another weight, in evaluation mode."""
    stand_in: Any = type(module).__new__(type(module))
    own = module._parameters if weight is None else {**module._parameters, "weight": weight}
    vars(stand_in).update(vars(module), training=False, _parameters=own, _modules={**module._modules, **(parts or {})})
    forward = type(module).forward
    required = list(inspect.signature(forward).parameters.values())[1 + len(args) :]
    others = {
        p.name: None for p in required if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return forward(stand_in, *args, **others)
    except NotFollowed:
        raise
    except Exception as error:
        raise NotFollowed(f"could not be followed: {type(error).__name__}: {error}") from error


def rms_rule(norm: nn.Module) -> Rms:
    """By what the norm gives for random x and weight, x of size 1 and of a size at which eps counts."""
    weight = norm._parameters.get("weight")
    if norm._parameters.keys() != {"weight"} or weight is None or weight.dim() != 1 or norm._modules:
        raise NotFollowed("has not one weight vector alone")
    gains = _random(len(weight))
    for eps in [value for name in _EPS if isinstance(value := getattr(norm, name, None), float)]:
        xs = [_random(3, len(weight)) * scale for scale in (1.0, eps**0.5)]
        found = [_run(norm, x, weight=gains) for x in xs]
        for zero_centered in (False, True):
            if all(_close(y, _rms(x, gains, eps, zero_centered)) for x, y in zip(xs, found, strict=True)):
                return Rms(eps, zero_centered)
    raise NotFollowed(f"is no RMSNorm of its weight with an eps that stands as a number in one of {', '.join(_EPS)}")


def _rms(x: Tensor, gains: Tensor, eps: float, zero_centered: bool) -> Tensor:
    x, gains = x.double(), gains.double() + zero_centered
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gains


def _close(y: Any, expected: Tensor) -> bool:
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return False
    return bool((y.double() - expected).abs().max() <= _OFF * expected.abs().max())


def _handed(given: Any, expected: Tensor, what: str) -> None:
    if given is not expected:
        raise NotFollowed(f"does not hand {what}")


def follow_mlp(mlp: nn.Module) -> None:
    """It is down(silu(gate(x)) * up(x)), for small and for large values of gate and up, which some limit."""
    for scale in (1.0, 100.0):
        _follow_mlp(mlp, _random(64) * scale, _random(2, 64)[0] * scale)


def _follow_mlp(mlp: nn.Module, gate: Tensor, up: Tensor) -> None:
    x, y = _random(7), _random(9)

    def down_proj(a: Tensor) -> Tensor:
        if not _close(a, F.silu(gate.double()) * up.double()):
            raise NotFollowed("does not hand silu(gate) * up to down_proj")
        return y

    def first(h: Tensor, name: str) -> Any:
        def run(given: Tensor) -> Tensor:
            _handed(given, x, f"its input to {name}")
            return h

        return run

    parts = {"gate_proj": first(gate, "gate_proj"), "up_proj": first(up, "up_proj"), "down_proj": down_proj}
    _handed(_run(mlp, x, parts=parts), y, "out what down_proj gives")


def follow_layer(layer: nn.Module, features: int) -> None:
    """self_attn and mlp each read what the norm before them gives; nobody else does, or nan would come out."""
    x, attended, y = _random(3, 1, 1, features)
    normed1, normed2 = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    failed: NotFollowed | None = None
    for result in ((attended, None), attended, (attended, None, None)):  # what self_attn returns
        ran: list[str] = []

        def input_layernorm(given: Tensor, ran: list[str] = ran) -> Tensor:
            _handed(given, x, "its input to input_layernorm")
            ran.append("input_layernorm")
            return normed1

        def self_attn(*args: Any, ran: list[str] = ran, result: Any = result, **named: Any) -> Any:
            if sum(value is normed1 for value in (*args, *named.values())) != 1:
                raise NotFollowed("does not hand what input_layernorm gives to self_attn")
            ran.append("self_attn")
            return result

        def post_attention_layernorm(_: Tensor, ran: list[str] = ran) -> Tensor:
            ran.append("post_attention_layernorm")
            return normed2

        def mlp(given: Tensor, ran: list[str] = ran) -> Tensor:
            _handed(given, normed2, "what post_attention_layernorm gives to mlp")
            ran.append("mlp")
            return y

        parts = {f.__name__: f for f in (input_layernorm, self_attn, post_attention_layernorm, mlp)}
        try:
            out = _run(layer, x, parts=parts)
        except NotFollowed as error:
            failed = failed or error
            continue
        out = out[0] if isinstance(out, tuple) else out
        if list(parts) != ran or not isinstance(out, Tensor) or not out.isfinite().all():
            raise NotFollowed(f"uses its parts in another way: {', '.join(ran)}")
        return
    assert failed is not None
    raise failed
