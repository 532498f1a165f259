"""Which exchange of a GEMM is the fastest here, found by timing all of them once, kept in a file.

TE_LITE_AUTO: "measure" (the default on GPUs) or "rule" (the default elsewhere, where times say little): see auto.py.
The file lies in the folder of kept.py. Rank 0's counts for all ranks of a group.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from te_lite import kept
from te_lite.overlap.bootstrap import Rendezvous
from te_lite.watch import all_reduce_max

SCHEDULES = 8  # to be raised when a schedule changes its speed: what was measured before is then forgotten
ROUNDS = 5
HOLD_CYCLES = 2_000_000  # about 1 ms, in which the host issues what is timed, as one that runs ahead has
MOST = 512  # problems that one group times; a run with ever new token counts follows the rule from then on
MARGIN = 0.98  # another exchange than Collective must save 2%, which is about the noise


def cache_file() -> Path:
    return kept.folder() / "overlap.json"


def _load() -> dict[str, Any]:
    try:
        content = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _time_us(
    run: Callable[[], object], device: torch.device, group: dist.ProcessGroup, check: Callable[[], None]
) -> float:
    """Device time where there is a device. check() may raise while this rank waits for the others."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HOLD_CYCLES)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # all devices begin together
        start.record()
        run()
        end.record()
        while not end.query():
            check()
            time.sleep(1e-4)
    return start.elapsed_time(end) * 1e3


def fastest(times: Mapping[str, float]) -> str:
    """The name of the least time; "collective" where that of the least does not save enough."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < MARGIN * times["collective"] else "collective"


class Choices:
    """Problem -> microseconds of each exchange that may serve it, of one group, the same on all its ranks."""

    def __init__(self, exchange: Rendezvous, device: torch.device) -> None:
        cuda = device.type == "cuda"
        measures = os.environ.get("TE_LITE_AUTO", "measure" if cuda else "rule") == "measure"
        self._device, self._first, self.timed = device, exchange.rank == 0, 0  # timed: problems so far
        name = torch.cuda.get_device_name(device) if cuda else "CPU"
        versions = f"torch {torch.__version__}, triton {triton.__version__}, schedules {SCHEDULES}"
        self._machine = f"{name}, {versions}, tp {exchange.size}: "  # before each problem in the file
        self.measures, self._known = exchange.all((measures, _load() if self._first and measures else {}))[0]

    def known(self, problem: str, names: Collection[str]) -> dict[str, float] | None:
        """Those of `names`, or None where not just these have been timed."""
        found = self._known.get(self._machine + problem)
        return found if isinstance(found, dict) and set(found) == set(names) else None

    def measure(
        self, problem: str, runs: Mapping[str, Callable[[], object]], group: dist.ProcessGroup,
        check: Callable[[], None],
    ) -> dict[str, float]:  # fmt: skip
        """Those of `runs`, timed now and kept in the file. Collective; check() may raise while this rank waits."""
        key = self._machine + problem
        self.timed += 1
        found = self._known[key] = self._measure(runs, group, check)
        if self._first:  # beside what others may have written since
            kept.write(cache_file(), (json.dumps(_load() | {key: found}, indent=1) + "\n").encode())
        return found

    def _measure(
        self, runs: Mapping[str, Callable[[], object]], group: dist.ProcessGroup, check: Callable[[], None]
    ) -> dict[str, float]:
        """The slowest rank's median of each."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(2 + ROUNDS):  # the first compiles, in the second large products may measure algorithms
            for name, run in runs.items():
                times[name].append(_time_us(run, self._device, group, check))
        own = torch.tensor([statistics.median(values[2:]) for values in times.values()], device=self._device)
        all_reduce_max("auto's times", own, group)
        slowest = own.tolist()
        check()  # of a broken group they are garbage, not to be kept
        return dict(zip(runs, slowest, strict=True))
