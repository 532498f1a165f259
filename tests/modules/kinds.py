"""Modules of every kind, made anywhere, and a step of them."""

from __future__ import annotations

import torch

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import step

BF16 = torch.bfloat16
MAKE = {
    "Linear": lambda **o: te.Linear(64, 96, **o),
    "no bias": lambda **o: te.Linear(64, 96, bias=False, **o),
    "split": lambda **o: te.Linear(64, 96, parameters_split=("q", "k", "v"), **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(64, 96, normalization="RMSNorm", **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(64, 96, activation="swiglu", **o),
    "checkpointed": lambda **o: te.LayerNormMLP(64, 96, checkpoint=True, **o),
    "LayerNorm": lambda **o: te.LayerNorm(64, sequence_parallel=True, **o),
    "RMSNorm": lambda **o: te.RMSNorm(64, **o),
}
LINEARS = [kind for kind in MAKE if "Norm" not in kind or "L" in kind[5:]]
NORMS = ("LayerNorm", "RMSNorm")
FEATURES = {"LayerNormMLP": 64, "checkpointed": 64, "LayerNorm": 64, "RMSNorm": 64}  # else 96


def make(kind, **options):
    torch.manual_seed(0)
    return MAKE[kind](params_dtype=BF16, **options)


def devices(module):
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


def tokens(device="cpu", features=64, seed=1):
    generator = torch.Generator().manual_seed(seed)  # on the CPU, whatever the default device
    return torch.randn(2, 16, features, generator=generator, device="cpu").to(device, BF16)


def run(kind, module, seed=1, recipe="bf16"):
    """{"out", "dx", gradients} of a step with random tokens."""
    device = next(module.parameters()).device
    return step(module, tokens(device, seed=seed), tokens(device, FEATURES.get(kind, 96), seed + 50), recipe)


def same(kind, module, other, recipe="bf16"):
    got, want = run(kind, module, recipe=recipe), run(kind, other, recipe=recipe)
    assert got.keys() == want.keys()
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])
