"""Kernels that NVRTC compiles at run time, compiled by nvcc, on a machine without a GPU."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from te_lite.ops.nvrtc import SOURCES


def spilled(source: str, macros: Sequence[str], folder: Path) -> tuple[int, str]:
    """(bytes of registers spilled, all that ptxas says); no wgmma waits for the one before. Skips without nvcc."""
    if not (nvcc := shutil.which("nvcc")):
        pytest.skip("no nvcc")
    command = [nvcc, "-std=c++17", *macros, "-cubin", "-Xptxas=-v", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["-o", folder / "x.cubin", SOURCES / source]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in said
    return int(said.split(" bytes spill stores")[0].split()[-1]), said
