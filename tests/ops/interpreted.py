"""Running a test file's kernels in Triton's interpreter, on CPU tensors.

TRITON_INTERPRET counts when the kernels are imported, so such tests run in a process of their own. The
interpreter does not round fp8 as the hardware does: it is for indexing, masks and padding.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ACTIVE = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(not ACTIVE, reason="runs in the process that run_interpreted starts")


def run_interpreted(path: str) -> None:
    """Run the tests of the file that are marked only_interpreted; fail with their output."""
    if ACTIVE:
        pytest.skip("this is the process it starts")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "interpreted",
        path,
    ]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


def _allow_loops_over_scalars() -> None:
    """Triton 3.6 turns a scalar, an array of one element, into an index in a way that numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if ACTIVE:
    _allow_loops_over_scalars()
