"""Modules on 2 and 4 ranks against the unsharded oracle; many cases a launch, because starting ranks is
slow.
"""

from pathlib import Path

import pytest

from te_lite.testing.distributed import launch, rank_device_params

HERE = Path(__file__).parent


def run(script, ranks, device, *args, timeout=400.0, **how):
    return launch(HERE / script, "--device", device, *args, ranks=ranks, timeout=timeout, **how)


@pytest.mark.parametrize("device", rank_device_params(2))
def test_modules_tp2(device):
    """Every module x recipe x mode x sequence parallel: output, input gradient, every parameter gradient."""
    lines = run("run_modules.py", 2, device, "--suite", "modules").splitlines()
    assert lines[-1].endswith("all within bounds")
    assert sum(line.endswith(" ok") for line in lines) > 900


@pytest.mark.parametrize("device", rank_device_params(4))
def test_modules_tp4(device):
    lines = run("run_modules.py", 4, device, "--suite", "modules").splitlines()
    assert lines[-1].endswith("all within bounds")


@pytest.mark.parametrize("device", rank_device_params(4))
def test_tp_smaller_than_the_world_and_ranks_not_contiguous(device):
    lines = run("run_modules.py", 4, device, "--suite", "mesh").splitlines()
    assert lines[-1].endswith("all within bounds")


@pytest.mark.parametrize("device", rank_device_params(2))
def test_groups_of_two(device):
    lines = run("run_groups.py", 2, device).splitlines()
    assert lines[-1].startswith("sequence_parallel_refusals: ok, ")


@pytest.mark.parametrize("device", rank_device_params(4))
def test_groups_of_four(device):
    lines = run("run_groups.py", 4, device, torchrun=True).splitlines()  # each rank with a seed of hash() of its own
    assert [line for line in lines if line.startswith("default_amax_group_is_the_tp_group: ok")]


def test_a_failing_rank_shows_its_log(tmp_path):
    """The launcher names the failure of the rank that failed, and does not wait for the others."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n    print('the reason', file=sys.stderr); sys.exit(3)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(AssertionError, match="the reason"):
        launch(script, ranks=2, timeout=50)


def test_a_hanging_rank_is_ended(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("import time\nprint('before the hang', flush=True)\ntime.sleep(600)\n")
    with pytest.raises(AssertionError, match="did not end in 8"):
        launch(script, ranks=2, timeout=8)
