"""Userbuffers on 2, 4 and 8 ranks against torch.distributed and the fp32 oracle; many cases a launch."""

from pathlib import Path

import pytest

from te_lite.testing.distributed import launch, rank_device_params

HERE = Path(__file__).parent
TP4 = [("bulk", "pipeline"), ("ring_exchange", "auto"), ("fused",)]  # on GPUs
RECIPES = 8
CPU_TP4 = ("bf16", "delayed", "current_per_shard", "mxfp8", "blockwise", "rowwise")  # each way in which scales travel


def run(script, ranks, device, *args, timeout=400.0, **how):
    return launch(HERE / script, "--device", device, *args, ranks=ranks, timeout=timeout, **how).splitlines()


def check_matrix(ranks, device, methods):
    lines = run("run_overlap.py", ranks, device, "--suite", "matrix", "--methods", *methods)
    assert lines[-1] == f"matrix on {ranks} {device} ranks: no mismatch"
    whole = [method for method in methods if device == "cuda" or method != "auto"]  # a ring on the CPU
    assert sum(": ok" in line for line in lines) == RECIPES * len(whole) + 2 * (len(methods) - len(whole))


@pytest.mark.slow
@pytest.mark.parametrize("device", rank_device_params(2))
def test_matrix_tp2(device):
    """Every module x recipe x method, 12 or 20 iterations each, with delays, poison and shared buffers."""
    fused = ("fused",) if device == "cuda" else ()
    check_matrix(2, device, ("bulk", "pipeline", "ring_exchange", "auto", *fused))


@pytest.mark.slow
@pytest.mark.parametrize("methods", TP4, ids="-".join)
@pytest.mark.parametrize("device", rank_device_params(4)[1:])
def test_matrix_tp4(device, methods):
    check_matrix(4, device, methods)


@pytest.mark.slow
def test_matrix_of_four_cpu_ranks():
    """What two ranks do not have: several pieces that are under way, by each schedule of the CPU."""
    methods = "bulk", "pipeline", "ring_exchange"
    lines = run("run_overlap.py", 4, "cpu", "--suite", "matrix", "--methods", *methods, "--recipes", *CPU_TP4)
    assert lines[-1] == "matrix on 4 cpu ranks: no mismatch"
    assert sum(": ok" in line for line in lines) == len(methods) * len(CPU_TP4)


@pytest.mark.parametrize("device", rank_device_params(4))
def test_random_iterations(device):
    """Shape, module, recipe, method and delays drawn; a failure says how to repeat it."""
    lines = run("run_overlap.py", 4, device, "--suite", "random", "--iterations", "30", "--seed", "20")
    assert lines[-1] == f"random on 4 {device} ranks: no mismatch"


@pytest.mark.parametrize("connections", ["1", "32"])
@pytest.mark.parametrize("device", rank_device_params(2)[1:])
def test_hardware_queues(device, connections):
    """One queue for all streams, where a wait could stand before what ends it, and many."""
    script = HERE / "run_overlap.py"
    arguments = ("--device", device, "--suite", "random", "--iterations", "30", "--seed", "40")
    said = launch(script, *arguments, ranks=2, timeout=300, env={"CUDA_DEVICE_MAX_CONNECTIONS": connections})
    assert said.splitlines()[-1] == f"random on 2 {device} ranks: no mismatch"


def test_a_random_mismatch_says_how_to_repeat_it(tmp_path):
    """A reduce-scatter that adds in another order is found, and named with its seed."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys\n"
        "from te_lite.overlap import buffers\n"
        "from tests.distributed import run_overlap\n"
        "original = buffers.reduce_slots\n"
        "def other_order(staging, own, bias, rank, *rest):\n"
        "    return original(staging, own, bias, rank + 1, *rest)\n"
        "buffers.reduce_slots = other_order\n"
        "sys.exit(run_overlap.main())\n"
    )
    with pytest.raises(AssertionError, match=r"repeat it: --suite random --seed 5 --first \d+ --iterations 1"):
        launch(script, "--suite", "random", "--seed", "5", ranks=2, timeout=120)


@pytest.mark.parametrize("device", rank_device_params(2))
@pytest.mark.parametrize("suite", ["sizes", "gradients", "auto", "narrow"])
def test_checks_of_two(device, suite):
    assert run("run_overlap_checks.py", 2, device, "--suite", suite)


@pytest.mark.parametrize("device", rank_device_params(4))
def test_groups(device):
    lines = run("run_overlap_checks.py", 4, device, "--suite", "groups", torchrun=True)
    assert [line.split(":")[0] for line in lines] == [
        "parts_of_the_world",
        "two_groups_at_once",
        "one_group_has_none",
        "a_group_that_spans_hosts",
    ]


@pytest.mark.parametrize("device", rank_device_params(8))
def test_eight_ranks(device):
    assert run("run_overlap_checks.py", 8, device, "--suite", "eight")
