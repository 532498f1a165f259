"""Recorded bodies of layers that overlap, on 2 and 4 ranks: many cases a launch."""

from pathlib import Path

import pytest

from te_lite.testing.distributed import launch, rank_device_params

SCRIPT = Path(__file__).with_name("run_recordings.py")


def check(ranks, device, *options):
    methods = ["ring_exchange", *["fused"] * (device == "cuda")]  # on CPU ranks a ring runs in its place
    said = launch(SCRIPT, "--device", device, "--methods", *methods, *options, ranks=ranks, timeout=180).splitlines()
    assert said == [f"{name}: ok" for name in (*methods, "failing")]


@pytest.mark.parametrize("device", rank_device_params(2))
def test_two_ranks(device):
    check(2, device)


@pytest.mark.parametrize("device", rank_device_params(2))
def test_collectives_of_two_ranks(device):
    said = launch(SCRIPT, "--device", device, "--collectives", ranks=2, timeout=180).splitlines()
    assert said == ["collectives: ok"]


@pytest.mark.parametrize("device", rank_device_params(4))
def test_four_ranks(device):
    check(4, device, *["--recipes", "delayed"] * (device == "cpu"))
