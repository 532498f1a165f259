"""Whole runs of the demo: it learns, resumes bitwise, refuses what it must, and starts three ways."""

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from examples.gpt import checkpoint
from tests.examples.demo import TINY, TRAIN, outputs, read_log, run, train_alone, train_ranks

STEPS, SAVED = 30, 15


@dataclass(frozen=True)
class Run:
    folder: Path
    log: dict
    printed: str

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@pytest.fixture(scope="module")
def fp8_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """30 steps on 2 ranks in fp8, with checkpoints at 15 and 30 and a held-out loss before each. param: the recipe."""
    folder = tmp_path_factory.mktemp(request.param)
    args = ("--tp", "2", "--sequence-parallel", "--recipe", request.param, "--steps", str(STEPS), "--eval-every", "15")
    save = ("--checkpoint-dir", str(folder / "checkpoints"), "--save-every", str(SAVED), "--lr", "6e-3")
    return Run(folder, *train_ranks(folder, *args, *save, torchrun=True))


def resume_args(result: Run, directory: Path) -> tuple[str, ...]:
    """The options of result's run, to resume it in another directory."""
    recipe = result.log["options"]["recipe"]
    args = ("--tp", "2", "--sequence-parallel", "--recipe", recipe, "--steps", str(STEPS), "--eval-every", "15")
    return (*args, "--checkpoint-dir", str(directory), "--save-every", str(SAVED), "--lr", "6e-3", "--resume")


def crashed_copy(result: Run, directory: Path) -> Path:
    """What a run leaves that died while writing its second checkpoint: the first, and half a file."""
    step = f"step_{SAVED:08d}"
    shutil.copytree(result.checkpoints / step, directory / step)
    (directory / "latest.json").write_text(f'{{"step": {SAVED}}}')
    unfinished = directory / f"step_{STEPS:08d}"
    unfinished.mkdir()
    (unfinished / "tp_0_of_2.pt.tmp").write_bytes(b"half")
    return directory


@pytest.mark.parametrize("fp8_run", ["delayed", "current"], indirect=True)
def test_learns_and_reports(fp8_run: Run) -> None:
    log, summary = fp8_run.log, fp8_run.log["summary"]
    assert len(log["losses"]) == STEPS and summary["steps"] == STEPS
    # How much an untrained model pays hangs on the text, which is this Python's library: near ln 256 = 5.5, less where
    # bytes repeat. Without context no model gets below the unigram entropy.
    assert log["losses"][0] > 1.5 * summary["unigram_entropy"]
    assert sum(log["losses"][-5:]) / 5 < 1.15 * summary["unigram_entropy"]
    assert summary["held_out_loss"] < 1.15 * summary["unigram_entropy"]
    assert summary["tokens_per_second"] > 0
    assert (fp8_run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    recipe = log["options"]["recipe"]
    for expected in ("held-out loss", "unigram entropy", "tokens/s", "tp 2", "started by torchrun", recipe):
        assert expected in fp8_run.printed, f"{expected!r} is missing in:\n{fp8_run.printed}"
    # the report names every te_lite module of the model
    for module in ("qkv", "proj", "fc1", "fc2"):
        assert module in fp8_run.printed, f"{module!r} is missing in:\n{fp8_run.printed}"


@pytest.mark.parametrize("fp8_run", ["current"], indirect=True)
def test_overlap_moves_everything_and_changes_no_loss(fp8_run: Run, tmp_path: Path) -> None:
    """Every exchange goes through userbuffers; sums are rounded elsewhere, so losses differ as between recipes."""
    recipe = fp8_run.log["options"]["recipe"]
    args = ("--tp", "2", "--sequence-parallel", "--recipe", recipe, "--steps", str(STEPS), "--eval-every", "15")
    log, _ = train_ranks(tmp_path, *args, "--lr", "6e-3", "--overlap")
    schedules = {(row["module"], row["gemm"]): row["schedule"] for row in log["gemms"]}
    assert "collective" not in schedules.values()
    overlapped = [gemm for (_, gemm), schedule in schedules.items() if schedule != "local"]
    assert {"fprop", "dgrad", "fc1_fprop", "fc2_fprop", "fc1_dgrad", "fc2_dgrad"} <= set(overlapped)
    plain = [row["schedule"] for row in fp8_run.log["gemms"]]
    assert "collective" in plain and set(plain) <= {"collective", "local"}
    for ours, theirs in zip(log["losses"], fp8_run.log["losses"], strict=True):
        assert abs(ours / theirs - 1) < 0.03
    assert abs(log["summary"]["held_out_loss"] / fp8_run.log["summary"]["held_out_loss"] - 1) < 0.03


def assert_same(ours: object, theirs: object, where: str) -> None:
    """Bitwise equality of nested checkpoint contents."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} and {type(theirs)}"
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, where
        same = torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        assert same, f"{where}: largest difference {(ours.double() - theirs.double()).abs().max()}"
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, f"{where}: {ours} and {theirs}"


@pytest.mark.parametrize("fp8_run", ["delayed"], indirect=True)
def test_resume_is_bitwise(fp8_run: Run, tmp_path: Path) -> None:
    directory = crashed_copy(fp8_run, tmp_path / "checkpoints")
    log, _ = train_ranks(tmp_path, *resume_args(fp8_run, directory))
    assert log["losses"] == fp8_run.log["losses"]
    assert log["held_out"] == fp8_run.log["held_out"]
    for tp_rank in (0, 1):
        files = [checkpoint.rank_file(path, STEPS, tp_rank, 2) for path in (directory, fp8_run.checkpoints)]
        assert_same(*(torch.load(file, weights_only=True) for file in files), f"rank {tp_rank}")


def test_refuses_another_recipe_and_loses_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    common = ("--steps", "4", "--checkpoint-dir", str(directory))
    first = train_alone(tmp_path, *common, "--recipe", "delayed", "--stop-at", "2")
    assert first.returncode == 0, first.stderr
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    resumed = train_alone(tmp_path, *common, "--recipe", "current", "--resume")
    fresh = train_alone(tmp_path, *common, "--recipe", "delayed")
    for refused, expected in (
        (resumed, ("--recipe", "delayed", "current", "--checkpoint-dir")),
        (fresh, ("already holds a run", "step 2", "--resume")),
    ):
        assert refused.returncode == 2
        message = [line for line in refused.stderr.splitlines() if "error:" in line]
        assert len(message) == 1 and "Traceback" not in refused.stderr, refused.stderr
        for word in expected:
            assert word in message[0], f"{word!r} is missing in {message[0]}"
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def mpirun() -> str | None:
    """The launcher of the environment that mpi4py lives in, else the one on the path."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.is_file() else shutil.which("mpirun")


@pytest.mark.skipif(mpirun() is None, reason="needs mpirun and mpi4py")
def test_under_mpirun(tmp_path: Path) -> None:
    # Open MPI refuses root and more ranks than cores unless told otherwise; other MPIs ignore these variables
    allow = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    args = ("--tp", "2", "--sequence-parallel", "--recipe", "current", "--steps", "8", "--eval-every", "0")
    done = run([mpirun(), "-n", "2", sys.executable, str(TRAIN), *TINY, *outputs(tmp_path), *args], allow)
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path)
    assert log["summary"]["launcher"] == "mpirun" and log["summary"]["tp"] == 2
    assert log["losses"][-1] < log["losses"][0]


def test_data_parallel_matches_one_replica(tmp_path: Path) -> None:
    """Two replicas with half a batch each train as one with the whole: same data, mean of the gradients.

    fp32; the two differ in the order of sums only. 1e-4 is far above that over 6 steps (1e-6 is seen) and far below
    what a missing gradient reduction does (0.1).
    """
    args = ("--recipe", "bf16", "--params-dtype", "fp32", "--steps", "6", "--eval-every", "0")
    pair, alone = tmp_path / "pair", tmp_path / "alone"
    two, _ = train_ranks(pair, "--tp", "1", *args)
    done = train_alone(alone, *args)
    assert done.returncode == 0, done.stderr
    assert two["summary"]["dp"] == 2
    one = read_log(alone)
    assert max(abs(a - b) for a, b in zip(two["losses"], one["losses"], strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("common", "switch", "bound"),
    [((), ("--recompute", "full"), 0.0), (("--params-dtype", "fp32"), ("--fuse-wgrad",), 1e-5)],
    ids=["recompute", "fuse-wgrad"],
)
def test_options_that_change_no_result(
    common: tuple[str, ...], switch: tuple[str, ...], bound: float, tmp_path: Path
) -> None:
    """Recomputation is bitwise. main_grad of one micro-batch is .grad with fp32 weights, up to the last bit of the
    sum into it, which is 1e-7 of the loss; 1e-5 leaves room for 6 steps."""
    args = ("--recipe", "current", "--steps", "6", "--eval-every", "0", *common)
    losses = []
    for folder, options in ((tmp_path / "plain", args), (tmp_path / "changed", (*args, *switch))):
        done = train_alone(folder, *options)
        assert done.returncode == 0, done.stderr
        losses.append(read_log(folder)["losses"])
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) <= bound
