"""How many Python functions of te_lite a warm step calls: what a step pays the host for being Python."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import launch

PACKAGE = os.path.dirname(te.__file__) + os.sep
# (module, recipe) -> most calls forward and backward, on CPU tensors, oracles and autocast included.
MOST = {
    ("Linear", "bf16"): (30, 30),
    ("Linear", "delayed"): (75, 55),
    ("LayerNormMLP", "delayed"): (130, 125),  # of which activation(h), which backward computes again, takes 15
}
# CPython 3.12 runs comprehensions in the frame around them, and counts fewer.
pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the numbers are CPython 3.11's")


def calls(run: Callable[[], object]) -> int:
    """Calls of functions in te_lite's files while run() runs."""
    found = 0

    def profile(frame, event, argument):
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def counted(module: torch.nn.Module, x: torch.Tensor, recipe: str) -> tuple[int, int]:
    """Calls of a warm forward and of its backward."""
    outputs = []

    def forward():
        with te.autocast(enabled=recipe != "bf16", recipe=te.recipe.from_name(recipe)):
            outputs.append(module(x))

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            forward()
            outputs.pop().sum().backward()
        found, (y,) = calls(forward), outputs
        dy = torch.ones_like(y)
        return found, calls(lambda: y.backward(dy))


@pytest.mark.parametrize("kind, recipe", MOST, ids="-".join)
def test_a_warm_step(kind, recipe):
    features, options = (64, 96), {}
    if kind == "LayerNormMLP":
        features, options = (64, 128), {"activation": "swiglu", "normalization": "RMSNorm"}
    module = getattr(te, kind)(*features, params_dtype=torch.bfloat16, device="cpu", **options)
    found = counted(module, torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True), recipe)
    most = MOST[kind, recipe]
    assert found[0] <= most[0] and found[1] <= most[1], found


def test_the_count_sees_a_call():
    assert calls(lambda: te.recipe.from_name("delayed")) == calls(lambda: None) + 1


def test_a_warm_step_over_two_ranks():
    launch(Path(__file__).with_name("ranks_calls.py"), ranks=2, timeout=120)
