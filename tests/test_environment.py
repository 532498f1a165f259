"""Environment variables, most of which are read when te_lite is imported."""

import os
import subprocess
import sys

import pytest

from te_lite.overlap.bootstrap import timeout_s


@pytest.mark.parametrize("name", ["TE_LITE_AUTO", "TE_LITE_RECORD", "TE_LITE_CHECK_RANKS", "TE_LITE_NVTX"])
def test_an_unknown_value_is_refused(name):
    run = subprocess.run(
        [sys.executable, "-c", "import te_lite"], env=os.environ | {name: "never"}, capture_output=True, text=True
    )
    assert run.returncode == 1 and f"ValueError: {name}='never': must be " in run.stderr, run.stderr


@pytest.mark.parametrize("word", ["never", "-1", "0", "nan"])
def test_a_timeout_that_is_none_is_refused_by_its_name(monkeypatch, word):
    monkeypatch.setenv("TE_LITE_UB_TIMEOUT", word)
    with pytest.raises(ValueError, match=f"TE_LITE_UB_TIMEOUT='{word}': must be seconds, more than 0"):
        timeout_s()


@pytest.mark.parametrize(("word", "seconds"), [("", 60.0), ("0.5", 0.5), ("inf", float("inf"))])
def test_timeouts(monkeypatch, word, seconds):
    monkeypatch.setenv("TE_LITE_UB_TIMEOUT", word)
    assert timeout_s() == seconds
