"""Ranks started directly, each with its own end, for tests in which one of them dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from te_lite.testing.distributed import end_with_parent

SCRIPT = Path(__file__).with_name("run_faults.py")
VICTIM = 1  # the rank that fails


@dataclass
class Ended:
    """How a rank ended. status: exit status, -9 for SIGKILL. lines: (name, what it saw), in order."""

    status: int
    output: str
    lines: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        pairs = (line.partition(": ") for line in self.output.splitlines())
        self.lines = [(name, what) for name, _, what in pairs]

    def saw(self, name: str) -> list[str]:
        """What the rank has printed under `name`."""
        return [what for said, what in self.lines if said == name]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start_ranks(
    fault: str, ranks: int, device: str, *, limit: float, script: Path = SCRIPT, **variables: object
) -> list[Ended]:
    """`script` on `ranks` processes. AssertionError with all outputs unless every one ends within `limit` s."""
    root = str(SCRIPT.parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    common.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    common.update({name: str(value) for name, value in variables.items()})
    processes = []
    for rank in range(ranks):
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), fault, "--device", device],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=end_with_parent,
            )
        )
    deadline, ended, hung = time.monotonic() + limit, [], []
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            hung.append(rank)
            process.kill()
            output, _ = process.communicate()
        ended.append(Ended(process.returncode, output))
    if hung:
        raise AssertionError(f"ranks {hung} did not end in {limit} s\n{outputs(ended)}")
    return ended


def outputs(ended: list[Ended]) -> str:
    """For messages."""
    return "\n".join(f"--- rank {rank}, status {one.status}\n{one.output[-4000:]}" for rank, one in enumerate(ended))
