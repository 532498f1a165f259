"""How the tests start the demo: a tiny model, one process or several ranks, its JSON log as the result."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from te_lite.testing.distributed import launch

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = REPOSITORY / "examples" / "train_gpt.py"
TINY = (
    *("--layers", "2", "--hidden", "64", "--heads", "4", "--ffn", "128", "--seq-length", "32"),
    *("--batch-size", "8", "--warmup", "5", "--eval-tokens", "1024", "--device", "cpu"),
)
TIMEOUT = 120


def outputs(folder: Path) -> tuple[str, ...]:
    return "--log-json", str(folder / "log.json"), "--plot", str(folder / "loss.png")


def read_log(folder: Path) -> dict:
    return json.loads((folder / "log.json").read_text())


def train_ranks(folder: Path, *args: str, ranks: int = 2, torchrun: bool = False) -> tuple[dict, str]:
    """The log and what rank 0 printed, of a run on several ranks."""
    printed = launch(TRAIN, *TINY, *outputs(folder), *args, ranks=ranks, timeout=TIMEOUT, torchrun=torchrun)
    return read_log(folder), printed


def run(command: list[str], extra_env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command with a time limit that ends its children, too."""
    path = os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if p)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra_env or {})}
    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end in {TIMEOUT} s") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def train_alone(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A run in one process without a launcher."""
    return run([sys.executable, str(TRAIN), *TINY, *outputs(folder), *args])
