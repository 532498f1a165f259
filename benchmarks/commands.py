"""One command with a time limit, as benchmarks/gpu_check.py starts its stages, and the row that comes of it; what the
rows of several calls say together."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import result_files

ROOT = Path(__file__).resolve().parents[1]
MARK = "TE_LITE_COMMAND"
TAIL_LINES = 60
SLOWEST = 30
GRACE_S = 15.0  # between the interrupt that lets pytest write its report and the kill
SAFE_ENVIRONMENT = {
    # Multicast is not used by this library, and a multicast object left behind by a crash can take a host's
    # NVLink fabric out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "PYTHONUNBUFFERED": "1",
}


def run_command(
    command: Sequence[str], limit_s: float, *, echo: bool = True, **variables: str
) -> tuple[int | None, float, list[str]]:
    """(exit status or None after the limit, seconds, last lines). Output is passed through as it comes.

    At the limit the process group is interrupted, then killed: the group is the command's own. What the command
    started in groups of their own, as torchrun does, is killed in any case: it would hold the GPUs of the next one.
    """
    mark = secrets.token_hex(8)
    environment = {**os.environ, **SAFE_ENVIRONMENT, **variables, MARK: mark}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []

    def drain() -> None:
        for line in process.stdout:
            if echo:
                print(line, end="", flush=True)
            lines.append(line.rstrip())
            del lines[:-400]

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    status: int | None = None
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    finally:
        # Children that outlived their parent would hold the pipe and the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
    reader.join(timeout=GRACE_S)
    return status, time.monotonic() - begin, lines


def marked(mark: str) -> list[int]:
    """Processes of this user in whose environment MARK has this value."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone by now
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def read_junit(path: Path) -> dict[str, Any]:
    """Counts of a junit report, and the modules that took longest, in seconds; removes it."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    seconds = Counter[str]()
    for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():
        kinds = {child.tag for child in case}
        key = "passed"
        for tag, name in (("failure", "failed"), ("error", "errors"), ("skipped", "skipped")):
            if tag in kinds:
                key = name
                break
        counts[key] += 1
        seconds[case.get("classname", "")] += float(case.get("time", 0.0))
    path.unlink(missing_ok=True)
    counts["slowest"] = [f"{name} {took:.0f}" for name, took in seconds.most_common(SLOWEST)]
    return counts


@dataclass
class Stage:
    """One row of gpu_check.json. status: passed, failed, timeout, skipped."""

    stage: str
    status: str
    seconds: float = 0.0
    command: str = ""
    detail: dict = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


def portable(text: str, out: Path) -> str:
    """`text` without this machine's folders: it goes into a file that others read."""
    places = {sys.executable: "python", f"{ROOT}/": "", str(ROOT): ".", str(out): "OUT", sys.prefix: "PREFIX"}
    for place, name in places.items():
        text = text.replace(place, name)
    return text


def outcome(status: int | None) -> str:
    return "timeout" if status is None else "passed" if status == 0 else "failed"


def finished(
    name: str, run: tuple[int | None, float, list[str]], command: Sequence[str], out: Path, detail: dict
) -> Stage:
    status, seconds, lines = run
    tail = [portable(line, out) for line in lines[-TAIL_LINES:]]
    return Stage(name, outcome(status), seconds, portable(shlex.join(command), out), detail, tail)


def earlier_rows(path: Path, tree: str, stages: Sequence[str]) -> list[dict]:
    """Rows of an earlier call on the same tree into the same file, of stages that are not run again.

    So a machine with several GPUs need not be held for what one GPU can measure.
    """
    content = json.loads(path.read_text()) if path.exists() else {"tree": None}
    return [row for row in content["rows"] if row["stage"].split()[0] not in stages] if content["tree"] == tree else []


def read_outcomes(path: Path, key: str) -> dict[str, list[str]]:
    """test -> "passed" or "failed", of each time that it ran, as tests/conftest.py writes them after the line `key`."""
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[str, list[str]] = {}
    for word, _, name in (line.partition(" ") for line in lines[1:] if lines[0] == key):
        found.setdefault(name, []).append(word)
    return found


def counts_of_tests(rows: Sequence[dict]) -> dict[str, Any] | None:
    """What the stage `tests` found; None without it."""
    names = "passed", "failed", "errors", "skipped", "failures"
    found = [row["detail"] for row in rows if row["stage"] == "tests"]
    return {name: found[0].get(name, []) for name in names} if found else None


def summary(stages: Sequence[Stage]) -> str:
    lines = []
    for stage in stages:
        detail = ", ".join(f"{k} {v}" for k, v in stage.detail.items() if not isinstance(v, list))
        lines.append((stage.stage, stage.status, f"{stage.seconds:.0f} s", detail))
    failures = [f"FAILED {name}" for stage in stages for name in stage.detail.get("failures", [])]
    return "\n".join([*failures[:40], result_files.text_table(("stage", "status", "time", "detail"), lines)])
