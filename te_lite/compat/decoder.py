"""Decoder layers in the manner of Llama: found by the names of their parts, believed by what they compute.

A forward runs on a stand-in: the module's own code over small random tensors of the CPU in the place of its parts. So
neither its class nor its device matters, and nothing of it is changed. It runs in training mode too, in which a dropout
shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.random import fork_rng

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


def _stand_in(module: Any, training: bool, parts: dict[str, Any]) -> Any:
    """Another module of its class, with the same attributes, in that mode, and with these in the place of its parts."""
    made: Any = object.__new__(type(module))
    vars(made).update(vars(module), training=training, _modules={**module._modules, **parts})
    for name, child in made._modules.items():
        if name not in parts and child is not None:
            made._modules[name] = _stand_in(child, training, {})
    return made


def _run(
    module: nn.Module, training: bool, *args: Any, weight: Tensor | None = None, parts: dict[str, Any] | None = None,
    **named: Any,
) -> Any:  # fmt: skip
    """The forward of the module's class, with other parts and another weight."""
    stand_in = _stand_in(module, training, parts or {})
    if weight is not None:
        vars(stand_in)["_parameters"] = {**module._parameters, "weight": weight}
    forward = type(module).forward
    required = list(inspect.signature(forward).parameters.values())[1 + len(args) :]
    others: dict[str, Any] = {
        p.name: None for p in required if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), fork_rng(()):
            return forward(stand_in, *args, **(others | named))
    except (NotFollowed, _Read):
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
        found = [(x, _run(norm, training, x, weight=gains)) for x in xs for training in (False, True)]
        for zero_centered in (False, True):
            if all(_close(y, _rms(x, gains, eps, zero_centered)) for x, y in found):
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
        for training in (False, True):
            _follow_mlp(mlp, training, _random(64) * scale, _random(2, 64)[0] * scale)


def _follow_mlp(mlp: nn.Module, training: bool, gate: Tensor, up: Tensor) -> None:
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
    _handed(_run(mlp, training, x, parts=parts), y, "out what down_proj gives")


class _Read(Exception):
    """All three projections have read what they must, so nothing else needs to run."""


def _follow_attention(
    module: Any, training: bool, normed: Tensor, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """q_proj, k_proj and v_proj of `module` read `normed`, one of its arguments, and before them nobody else does."""
    read: set[str] = set()

    def projection(name: str) -> Any:
        def run(given: Tensor) -> Tensor:
            _handed(given, normed, f"what input_layernorm gives to {name}")
            read.add(name)
            if len(read) == len(ATTENTION):
                raise _Read
            return normed.new_zeros(*given.shape[:-1], module._modules[name].out_features)

        return run

    def other(name: str) -> Any:
        def run(given: Any = None, *_: Any, **__: Any) -> Any:
            if given is normed:
                raise NotFollowed(f"hands what input_layernorm gives to {name} as well")
            return given

        return run

    parts = {name: projection(name) if name in ATTENTION else other(name) for name in module._modules}
    if named.get("position_embeddings", ()) is None:  # some take them apart before the projections
        named = named | {"position_embeddings": (torch.zeros(1, 1, 1, device="cpu"),) * 2}
    try:
        _run(module, training, *args, parts=parts, **named)
    except _Read:
        return
    raise NotFollowed(f"does not use {', '.join(ATTENTION)}")


def follow_layer(layer: nn.Module, features: int, attention: bool) -> None:
    """self_attn and mlp each read what the norm before them gives; nobody else does, or nan would come out. attention:
    in self_attn q_proj, k_proj and v_proj read it as it is."""
    for training in (False, True):
        _follow_layer(layer, training, features, attention)


def _follow_layer(layer: Any, training: bool, features: int, attention: bool) -> None:
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
            if attention:
                _follow_attention(layer.self_attn, training, normed1, args, named)
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
            out = _run(layer, training, x, parts=parts)
        except NotFollowed as error:
            failed = failed or error
            continue
        out = out[0] if isinstance(out, tuple) else out
        if list(parts) != ran or not isinstance(out, Tensor) or not out.isfinite().all():
            raise NotFollowed(f"uses its parts in another way: {', '.join(ran)}")
        return
    assert failed is not None
    raise failed
