"""Ranks for tests: on a free port, a time limit, and every rank's log when something fails."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from te_lite.testing.forked import end_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
LOG_TAIL = 60  # lines of each rank's log shown on failure


def device_params() -> list[Any]:
    """Values for pytest's parametrize: "cpu" always, "cuda" marked gpu and skipped where there is none."""
    import pytest

    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return [pytest.param("cpu"), pytest.param("cuda", marks=[pytest.mark.gpu, missing])]


def rank_device_params(ranks: int) -> list[Any]:
    """As device_params for `ranks` processes: cuda needs that many devices and is marked multigpu."""
    import pytest

    have = torch.cuda.device_count()
    missing = pytest.mark.skipif(have < ranks, reason=f"needs {ranks} CUDA devices, has {have}")
    marks = [pytest.mark.gpu, pytest.mark.multigpu, missing]
    return [pytest.param("cpu"), pytest.param("cuda", marks=marks)]


def backend_for(device: str) -> str:
    """nccl for cuda, gloo for cpu; both where ranks on GPUs also reduce CPU tensors."""
    return "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"


def init_ranks(device: str) -> tuple[int, int, torch.device]:
    """In a rank started by torchrun: join the world; (rank, world size, this rank's device)."""
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        # A multicast object that a crash leaves behind can take a host's links out of service.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend_for(device))
    place = torch.device(device, local) if device == "cuda" else torch.device(device)
    return dist.get_rank(), dist.get_world_size(), place


def leave_ranks() -> None:
    """Leave the world. Whoever still holds a process group afterwards ends in an abort at exit now and then:
    gloo's threads are then joined too late. So cycles are collected first."""
    import gc

    import torch.distributed as dist

    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL:])


def _logs(folder: Path) -> str:
    parts = []
    for path in sorted(folder.rglob("std*.log")):
        text = _tail(path)
        if text.strip():
            parts.append(f"--- rank {path.parent.name} {path.name}\n{text}")
    return "\n".join(parts) or "(no rank wrote anything)"


def launch(
    script: str | Path, *args: str, ranks: int, timeout: float = 300.0, env: dict[str, str] | None = None,
    torchrun: bool = False,
) -> str:  # fmt: skip
    """Run `script` on `ranks` processes of this host; returns what rank 0 printed. They are forked, see forked.py, or
    started by torchrun: slower by an import of torch a rank.

    Raises AssertionError with the tail of every rank's log when a rank fails, or when `timeout` seconds pass
    (then all ranks are ended first, so a hang costs a bounded time).
    """
    with tempfile.TemporaryDirectory(prefix="te_lite_ranks_") as name:
        folder = Path(name)
        # --standalone takes a free port; redirects keep the ranks' outputs apart.
        options = ("--standalone", f"--nproc-per-node={ranks}", "--redirects=3", f"--log-dir={folder}")
        starter = ("torch.distributed.run", *options) if torchrun else ("te_lite.testing.forked", str(ranks), name)
        process = subprocess.Popen(
            [sys.executable, "-m", *starter, str(script), *args],
            env=_environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            launcher, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=40)  # torchrun gives its ranks 30 s
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            raise AssertionError(f"{ranks} ranks of {script} did not end in {timeout} s\n{_logs(folder)}") from None
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        if process.returncode:
            raise AssertionError(
                f"{ranks} ranks of {script} {' '.join(args)}: exit status {process.returncode}\n"
                f"{_logs(folder)}\n--- launcher\n{launcher[-2000:]}"
            )
        out = [path.read_text() for path in sorted(folder.rglob("stdout.log")) if path.parent.name == "0"]
        return "".join(out)


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if p)
    # One thread a rank: 4 ranks share the cores of a small machine.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}
