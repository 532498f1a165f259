"""Modules sharded by torch: FSDP2, torch.distributed.checkpoint."""

from pathlib import Path

import pytest

from te_lite.testing.distributed import launch, rank_device_params

HERE = Path(__file__).parent


@pytest.mark.parametrize("device", rank_device_params(2))
def test_fully_shard(device):
    lines = launch(HERE / "run_fsdp.py", "--device", device, ranks=2, timeout=300).splitlines()
    assert lines[-1] == "all agree"
    assert sum(line.endswith(": ok") for line in lines) == 9


@pytest.mark.parametrize("device", rank_device_params(4))
def test_fully_shard_and_tensor_parallelism(device):
    lines = launch(HERE / "run_fsdp.py", "--device", device, ranks=4, timeout=300).splitlines()
    assert lines[-1] == "all agree"
