"""The three ways an op can be run, for tests that hold on all of them.

"cpu" is the registered op on CPU tensors (the oracle), "cuda" on CUDA tensors (the kernel), "interpreted" the
kernel's launcher on CPU tensors in Triton's interpreter, in the process that `run_interpreted` starts.
"""

from collections.abc import Iterable

import pytest
import torch

from te_lite.ops.source import Source
from tests.ops.interpreted import ACTIVE, only_interpreted

not_interpreted = pytest.mark.skipif(ACTIVE, reason="runs in the parent process")
DEVICES = [
    pytest.param("cpu", marks=not_interpreted),
    pytest.param("cuda", marks=[pytest.mark.gpu, not_interpreted]),
]
PATHS = [*DEVICES, pytest.param("interpreted", marks=only_interpreted)]


def device_of(path: str) -> str:
    return "cuda" if path == "cuda" else "cpu"


def chosen(found: Iterable[Source], dtype: torch.dtype, fp8: torch.dtype, device: str) -> list[Source]:
    """On a GPU, where each is compiled, every activation with two pairs of types and three with the others."""
    every = device == "cpu" or (dtype, fp8) in (
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    )
    few = ("gelu", "swiglu", "clamped_swiglu")
    return [one for one in found if every or "act" not in one.kind or one.activation.name in few]
