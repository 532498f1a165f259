"""The three ways an op can be run, for tests that hold on all of them.

"cpu" is the registered op on CPU tensors (the oracle), "cuda" on CUDA tensors (the kernel), "interpreted" the
kernel's launcher on CPU tensors in Triton's interpreter, in the process that `run_interpreted` starts.
"""

import pytest

from tests.ops.interpreted import ACTIVE, only_interpreted

not_interpreted = pytest.mark.skipif(ACTIVE, reason="runs in the parent process")
DEVICES = [
    pytest.param("cpu", marks=not_interpreted),
    pytest.param("cuda", marks=[pytest.mark.gpu, not_interpreted]),
]
PATHS = [*DEVICES, pytest.param("interpreted", marks=only_interpreted)]


def device_of(path: str) -> str:
    return "cuda" if path == "cuda" else "cpu"
