"""A stand-in for Transformer Engine: te_lite's modules under its names. So both must agree, on any machine."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import te_lite

MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "autocast")


def install(monkeypatch: pytest.MonkeyPatch, **replaced: object) -> None:
    """Makes `import transformer_engine` find it. replaced: other modules in the place of te_lite's."""
    names = ("", ".common", ".common.recipe", ".pytorch", ".pytorch.quantization")
    fakes = {name: ModuleType(f"transformer_engine{name}") for name in names}
    fakes[""].__version__ = "0.0.fake"
    fakes[".common.recipe"].__dict__.update({k: v for k, v in vars(te_lite.recipe).items() if not k.startswith("_")})
    fakes[".pytorch"].__dict__.update({name: getattr(te_lite, name) for name in MODULES} | replaced)
    fakes[".pytorch.quantization"].FP8GlobalStateManager = te_lite.FP8GlobalStateManager
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", fake)
