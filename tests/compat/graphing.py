"""Modules graphed by te.make_graphed_callables beside the same modules run eagerly, on GPUs and as tests/cpu_graph.py
plays."""

import contextlib
from unittest import mock

import pytest
import torch

import te_lite as te
from te_lite.compat import graph_capture
from te_lite.testing.numerics import assert_bitwise_equal
from tests.cpu_graph import CpuGraph
from tests.harness import build, under
from tests.reference import Spec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DELAYED = te.recipe.DelayedScaling(amax_history_len=3)
M, K, FFN = 48, 128, 256
BF16 = torch.bfloat16


class CpuCaptures:
    """graph_capture.Captures, on the CPU."""

    def __init__(self, pool, tensors):
        pass

    def warm_up(self):
        return torch.random.fork_rng([])

    @contextlib.contextmanager
    def capture(self, apart=False):
        graph = CpuGraph()
        with torch.random.fork_rng([]), graph.capture():  # what is only recorded draws nothing
            yield graph


def make(kind, device, **extra):
    return build(Spec(kind), K, K, FFN, device=device, **extra)


def draw(seed, device, rows=M, grad=False):
    value = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (seed % 7 - 3)
    return value.to(device, BF16).requires_grad_(grad)


def graphed(modules, recipe, device, samples=None, **options):
    """te.make_graphed_callables; samples: of their own by default."""
    many = isinstance(modules, tuple)
    if samples is None:
        samples = tuple((draw(90 + i, device, grad=True),) for i in range(len(modules) if many else 1))
        samples = samples if many else samples[0]
    value = None if recipe == "bf16" else te.recipe.from_name(recipe) if isinstance(recipe, str) else recipe
    played = mock.patch.object(graph_capture, "Captures", CpuCaptures)
    with played if device == "cpu" else contextlib.nullcontext():
        return te.make_graphed_callables(modules, samples, recipe=value, **options)


def scales(module):
    kinds = te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.DelayedScales
    return [child.get_extra_state() for child in module.modules() if isinstance(child, kinds)]


def step(layers, recipe, seed, device, **forward):
    """Forward and backward through `layers` in one autocast; all that a training loop sees of it."""
    x = draw(seed, device, grad=True)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    with under(recipe):
        y = x
        for layer in layers:
            y = layer(y, **forward)
    y.backward(draw(seed + 50, device))
    found = [y.detach().clone(), x.grad.clone()]
    for layer in layers:
        found += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        found += [getattr(p, "main_grad", torch.zeros(1)).clone() for p in layer.parameters()]
        found += scales(layer)
    return found


def agree(label, got, want):
    assert len(got) == len(want), label
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(f"{label}: {i}", a, b)
