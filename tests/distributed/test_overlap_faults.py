"""What userbuffers do when a rank fails: it is named, by every rank, within a limit; nothing hangs."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from te_lite.testing.distributed import rank_device_params
from tests.distributed.faults import SCRIPT, VICTIM, free_port, outputs, start_ranks
from tests.distributed.mismatches import OPTIONS_APART
from tests.harness import RECIPES

TIMEOUT_S = 20  # TE_LITE_UB_TIMEOUT: longer than it takes to notice that a process is gone
LIMIT_S = 300  # four ranks that import torch on a busy machine; how long they wait for each other is asserted


def ranks_of(fault, ranks, device, **variables):
    """All ranks' ends; all but a victim that was killed have come to the end of the script."""
    ended = start_ranks(fault, ranks, device, limit=LIMIT_S, TE_LITE_UB_TIMEOUT=TIMEOUT_S, **variables)
    killed = fault.startswith("killed")
    for rank, one in enumerate(ended):
        assert one.status == (-9 if killed and rank == VICTIM else 0), outputs(ended)
        assert bool(one.saw("end")) != (killed and rank == VICTIM), outputs(ended)
    return ended


def seconds(text: str) -> float:
    return float(re.match(r"\[([\d.]+) s\]", text).group(1))


def without_time(text: str) -> str:
    return text.partition("] ")[2]


@pytest.mark.parametrize("device", rank_device_params(4))
def test_faults_after_which_all_go_on(device):
    """Arguments that differ, memory that cannot be mapped, a GEMM that raises, programs that differ."""
    ended = ranks_of("survived", 4, device)
    check_arguments(ended)
    check_mapping(ended)
    check_gemm(ended)
    for name, both in {
        "shape mismatch": ("bfloat16 [8, 128]", "fc1 fprop, column-parallel, bfloat16 [16, 128]"),
        "recipe mismatch": ("bfloat16 [8, 128]", "qkv fprop, column-parallel, mxfp8 [8, 128]"),
    }.items():
        for one in ended:
            (text,) = one.saw(name)
            assert "GroupBroken: the ranks do not run the same program" in text, text
            assert all(part in text for part in (*both, f"rank {VICTIM} runs")), text
    for rank, one in enumerate(ended):
        (text,) = one.saw("order")
        assert "layer 1 fc1 fprop" in text and f"rank {VICTIM} runs layer 2 fc1 fprop" in text, text
        assert "the ranks do not run the same program" in one.saw("unnoticed")[0], outputs(ended)
        if rank != VICTIM:
            (text,) = one.saw("left")
            assert f"GroupBroken: rank {VICTIM} has left" in text and seconds(text) < TIMEOUT_S / 2, text


def check_arguments(ended) -> None:
    """The same error on all ranks, with what the ranks have said."""
    found = [{name: what for name, what in one.lines if name.startswith("arguments, ")} for one in ended]
    mpi = "arguments, no mpi"
    texts = [{name: without_time(what) for name, what in one.items() if name != mpi} for one in found]
    assert all(one == texts[0] for one in texts), outputs(ended)
    different = "ValueError: initialize_ub got different arguments on the ranks of one group: rank 0: "
    expected = {
        "shape": (different, "shape=[64, 128]; rank 1: shape=[65, 128]"),
        "dtype": (different, "rank 1: dtype=torch.float32"),
        "methods": (different, "rank 0: proj_fprop=auto; rank 1: proj_fprop=ring_exchange"),
        "strict": (different, "rank 1: strict=True"),
        "graphs": (different, "rank 1: cuda_graphs=True"),
        "one unknown layer": (different, "rank 1: ValueError: ub_cfgs names the layer 'fc3_fprop'"),
        "tp_size": (different, "rank 1: tp_size=1; rank 2: tp_size=4"),
        "backend": (different, "rank 1: bootstrap_backend='mpi'"),
        "all unknown": ("ValueError: ub_cfgs names the layer 'fc3_fprop'",),
        "unknown backend": ("ValueError: bootstrap_backend='smoke signals': must be one of",),
        "tp_size of the group": ("ValueError: tp_size=7 but tp_group has 4 ranks",),
        "tp_size of the world": ("ValueError: tp_size=7 does not divide the world of 4 ranks",),
        "no number": ("TypeError: tp_size=None: must be an int",),
        "infinite": (different, "rank 1: ValueError: shape=[inf, 64]: must be [tokens, hidden]"),
        "no dict": ("ValueError: ub_cfgs names the layer 3: must be one of",),
        "no mode": ("TypeError: quantization_modes holds 5: each must be",),
    }
    assert {f"arguments, {name}" for name in expected} == set(texts[0])
    for name, parts in expected.items():
        text = texts[0][f"arguments, {name}"]
        assert all(part in text for part in parts), f"{name}: {text}"
    remedy = "start under mpirun" if importlib.util.find_spec("mpi4py") else "needs mpi4py"
    assert all("RuntimeError" in one[mpi] and remedy in one[mpi] for one in found)
    for one in ended:
        assert (
            "initialize_ub was called twice for the ranks [0, 1, 2, 3]: call destroy_ub() first" in one.saw("twice")[0]
        )


def check_mapping(ended) -> None:
    """One warning in all, the same fallback everywhere, strict an error everywhere."""
    assert sum(int(one.saw("warnings")[0]) for one in ended) == 1, outputs(ended)
    for one in ended:
        assert one.saw("fallback")[0].startswith("{'collective'}")
        for text in (one.saw("fallback")[0], one.saw("strict")[0]):
            assert f"failed on rank {VICTIM} (OSError: no access to a peer)" in text
        assert "BootstrapError" in one.saw("strict")[0] and one.saw("left over") == ["[]"]


def check_gemm(ended) -> None:
    """The victim raises its own error, the others its text; so does whatever is called next."""
    wrong = "ValueError: this GEMM went wrong"
    for rank, one in enumerate(ended):
        texts, after = one.saw("gemm"), one.saw("gemm, the next call")
        assert len(texts) == len(after) == 3
        for text, operation in zip(texts, ("qkv fprop", "proj fprop", "qkv backward"), strict=True):
            if rank == VICTIM:
                assert without_time(text) == wrong
            else:
                assert f"GroupBroken: rank {VICTIM} failed in" in text and operation in text and wrong in text
            assert seconds(text) < TIMEOUT_S / 2
        assert all("GroupBroken" in text and wrong in text for text in after)


def test_mismatched_calls_that_do_not_fit():
    """Collective's calls are compared too, before gloo would end the process; so is one that fits with one that does
    not. A rank that refuses alone is not waited for."""
    sizes = {
        "collective mismatch": ("[200, 128]", "[208, 128]"),
        "capacity mismatch": ("[8, 128]", "[200, 128]"),
        "backward mismatch": ("[200, 128]", "[400, 128]"),
    }
    for rank, one in enumerate(ranks_of("mismatches_over_capacity", 2, "cpu")):
        for name, both in sizes.items():
            (text,) = one.saw(name)
            assert "the ranks do not run the same program" in text and all(size in text for size in both), text
            assert name != "backward mismatch" or seconds(text) < TIMEOUT_S / 2, text
        (text,) = one.saw("refused alone")
        assert ("was asked for and does not happen" if rank == VICTIM else f"rank {VICTIM} has left") in text, text
        assert seconds(text) < TIMEOUT_S / 2


@pytest.mark.parametrize("fault", ["killed_in_forward", "killed_in_backward"])
@pytest.mark.parametrize("device", rank_device_params(4))
def test_a_killed_rank_is_named(device, fault):
    """Within seconds, by all others, which then end by themselves; every later call says so too."""
    for rank, one in enumerate(ranks_of(fault, 4, device)):
        if rank != VICTIM:
            (text,), (after,) = one.saw("killed"), one.saw("the next call")
            assert "GroupBroken" in text and f"rank {VICTIM} has stopped" in text and text.split("] ")[1] in after, text
            assert seconds(text) < TIMEOUT_S and seconds(after) < 1


def test_every_two_recipes_are_told_apart():
    """Also where one of them first reduces an amax: gloo would wait for the other, or end the process."""
    for one in ranks_of("mismatched_recipes", 2, "cpu"):
        texts = [what for name, what in one.lines if " and " in name and what.startswith("[")]
        assert len(texts) == len(RECIPES) * (len(RECIPES) - 1) // 2 + len(OPTIONS_APART), one.output
        for text in texts:
            assert "the ranks do not run the same program" in text and seconds(text) < TIMEOUT_S / 2, one.output


def test_nobody_waits_in_a_collective_for_a_rank_that_has_failed():
    for rank, one in enumerate(ranks_of("fails_before_a_collective", 2, "cpu")):
        for name in ("before an amax", "while auto measures"):
            (text,) = one.saw(name)
            assert "ValueError: this GEMM went wrong" in text and seconds(text) < TIMEOUT_S / 2, text
            assert rank == VICTIM or f"GroupBroken: rank {VICTIM} failed in" in text, text


@pytest.mark.parametrize("fault", ["killed_before_an_amax", "killed_in_an_exchange_over_capacity"])
def test_a_rank_killed_where_torch_waits_for_it_is_named(fault):
    for rank, one in enumerate(ranks_of(fault, 2, "cpu")):
        if rank != VICTIM:
            for text in (*one.saw("killed"), *one.saw("the next call")):
                assert f"GroupBroken: rank {VICTIM} has stopped" in text and seconds(text) < TIMEOUT_S, text


@pytest.mark.parametrize("where", ["init", "the_second_gather", "new_group"])
def test_a_rank_killed_during_the_set_up_is_named(where):
    """By all, and by its block alone where the world is cut into blocks (new_group). Those who leave because of it may
    be named beside it."""
    for rank, one in enumerate(ranks_of(f"killed_in_{where}", 4, "cpu")):
        if where == "new_group" and rank > 1:
            assert "nothing was raised" in one.saw("killed")[0], one.output
        elif rank != VICTIM:
            (text,) = one.saw("killed")
            assert f"{VICTIM}" in re.search(r"the process of ranks \[([\d, ]*)\] has ended", text).group(1), text
            assert seconds(text) < TIMEOUT_S + 10, text


def test_a_rank_killed_before_it_said_anything_is_missed():
    for rank, one in enumerate(ranks_of("killed_in_the_first_gather", 4, "cpu")):
        if rank != VICTIM:
            (text,) = one.saw("killed")
            assert "a rank is gone while userbuffers were set up" in text and seconds(text) < TIMEOUT_S, text


@pytest.mark.parametrize("device", rank_device_params(2))
def test_a_late_rank_is_waited_for(device):
    for one in ranks_of("late", 2, device):
        assert 10 <= float(one.saw("late")[0]) < 10 + LIMIT_S


@pytest.mark.parametrize("device", rank_device_params(2))
def test_fifty_cycles_leave_nothing_behind(device):
    """Memory, mappings, file descriptors and threads stay; an arena that stayed would be 18 MiB of mappings a cycle."""
    for one in ranks_of("cycles", 2, device):
        before, after = (list(map(int, line.split())) for line in one.saw("resources"))
        resident, mapped, descriptors, threads = (b - a for a, b in zip(before, after, strict=True))
        assert resident < 16 << 10 and mapped < 64 << 10, f"{before} {after}"
        assert descriptors <= 0 and threads <= 0, f"{before} {after}"


def test_handles_travel_by_mpi():
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs mpirun and mpi4py")
    paths = (str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", ""))
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MASTER_PORT": str(free_port())}
    variables.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", WORLD_SIZE="4")
    command = [mpirun, "-n", "4", "--allow-run-as-root", "--oversubscribe", sys.executable, str(SCRIPT), "mpi"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("end: mpi") == 4 and "blocks: (2, 3)" in done.stdout, done.stdout
