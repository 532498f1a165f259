"""Environment variables that are read when te_lite is imported."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["TE_LITE_AUTO", "TE_LITE_RECORD", "TE_LITE_CHECK_RANKS"])
def test_an_unknown_value_is_refused(name):
    run = subprocess.run(
        [sys.executable, "-c", "import te_lite"], env=os.environ | {name: "never"}, capture_output=True, text=True
    )
    assert run.returncode == 1 and f"ValueError: {name}='never': must be " in run.stderr, run.stderr
