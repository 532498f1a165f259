"""Overlapped modules captured in CUDA graphs."""

from pathlib import Path

import pytest

from te_lite.testing.distributed import launch, rank_device_params

HERE = Path(__file__).parent


@pytest.mark.parametrize("device", rank_device_params(2)[1:])
def test_a_hundred_replays_with_changing_inputs(device):
    lines = launch(HERE / "run_graphs.py", ranks=2, timeout=200).splitlines()
    assert lines[-1] == "all replays agree"
    assert sum(line.endswith(" ok") for line in lines) == 42 + 16  # whole steps, callables
