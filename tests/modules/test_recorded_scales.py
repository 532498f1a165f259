"""Delayed scaling's scales and histories, where recordings fetch them (quantize/delayed.py, ScaleFetch)."""

from __future__ import annotations

import copy
import gc

import pytest

from te_lite.testing.numerics import assert_bitwise_equal
from tests.modules.cpu_recordings import record_on_cpu
from tests.modules.test_layer_function import make, one_step, recorded

pytestmark = pytest.mark.usefixtures("no_other_scales")


def test_recordings_follow_scales_that_move(monkeypatch):
    """Delayed scaling's lie beside those of other modules: one comes, and one that lay before them goes."""
    first = make("Linear")
    one_step(first, "delayed", 0)
    module = make("LayerNormMLP")
    twin, runs, others = copy.deepcopy(module), [], [first]
    for i in range(12):
        want = one_step(twin, "delayed", i)
        with monkeypatch.context() as patch:
            record_on_cpu(patch)
            got = one_step(module, "delayed", i)
        for name in want:
            assert_bitwise_equal(f"step {i}: {name}", got[name], want[name])
        runs.append([one.runs for one in recorded(module)])  # forward's, backward's
        if i == 4:
            others.append(make("Linear"))
            one_step(others[1], "delayed", 0)
        elif i == 7:
            one_step(others[1], "delayed", 1)
            del first, others[0]
            gc.collect()
    # Where their places have changed the bodies run once, and are recorded.
    assert runs[4:] == [[3, 3], [4, 4], [5, 5], [6, 6], [0, 0], [1, 1], [2, 2], [3, 3]]


def test_recordings_go_on_where_scales_stay(monkeypatch):
    """Where a checkpoint's numbers take the place of a state's, until an update puts it beside others again, the bodies
    run. A CUDA graph's scales are copied for each replay."""
    module = make("LayerNormMLP")
    twin, runs = copy.deepcopy(module), []
    for i in range(11):
        if i in (5, 8):
            for state in [*module._scales._live.values(), *twin._scales._live.values()]:
                state.load(state.history, 2 * state.scale, state.key.fp8_max) if i == 5 else state.fix()
        with monkeypatch.context() as patch:
            record_on_cpu(patch)
            got = one_step(module, "delayed", i)
        want = one_step(twin, "delayed", i)
        for name in want:
            assert_bitwise_equal(f"step {i}: {name}", got[name], want[name])
        runs.append([one.runs for one in recorded(module)])
    assert runs[4:] == [[3, 3], [3, 3], [4, 4], [5, 5], [6, 6], [7, 7], [8, 8]]
