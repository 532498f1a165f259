"""Everything that needs a GPU, in one call: tests, benchmarks, demo; results go to benchmarks/results/.

    python benchmarks/gpu_check.py                                   # all stages
    python benchmarks/gpu_check.py --stages tests modules --workers 4
    python benchmarks/gpu_check.py --tree-hash $(git rev-parse HEAD:te_lite) --out results

Each stage is a process of its own with a time limit, and a stage that fails does not stop the next. Exit
status 1 when a test failed, none ran, or a stage failed or ran out of time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from te_lite.testing import results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Caps, not expectations. One GPU runs no demo, so they add up to 6 minutes there.
LIMITS_S = {"tests": 240.0, "modules": 90.0, "kernels": 60.0, "demo": 120.0}
GRACE_S = 15.0  # between the interrupt that lets pytest write its report and the kill
DEMO_RECIPES = ("delayed", "current")
DEMO_ARGS = "--layers 4 --hidden 1024 --heads 16 --seq-length 512 --batch-size 16 --steps 100 --lr 1e-3"
MAX_TP = 4
TAIL_LINES = 15
SAFE_ENVIRONMENT = {
    # Multicast is not used by this library, and a multicast object left behind by a crash can take a host's
    # NVLink fabric out of service.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass
class Stage:
    """One row of gpu_check.json. status: passed, failed, timeout, skipped."""

    stage: str
    status: str
    seconds: float = 0.0
    command: str = ""
    detail: dict = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)


def run_command(
    command: Sequence[str], limit_s: float, *, echo: bool = True, **variables: str
) -> tuple[int | None, float, list[str]]:
    """(exit status or None after the limit, seconds, last lines). Output is passed through as it comes.

    At the limit the process group is interrupted, then killed: the group is the command's own.
    """
    environment = {**os.environ, **SAFE_ENVIRONMENT, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
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
    process.wait()
    reader.join(timeout=GRACE_S)
    return status, time.monotonic() - begin, lines


def portable(text: str, out: Path) -> str:
    """`text` without this machine's folders: it goes into a file that others read."""
    for place, name in (
        (sys.executable, "python"),
        (f"{ROOT}/", ""),
        (str(out), "OUT"),
        (sys.prefix, "PREFIX"),
    ):
        text = text.replace(place, name)
    return text


def finished(
    name: str, run: tuple[int | None, float, list[str]], command: Sequence[str], out: Path, detail: dict
) -> Stage:
    status, seconds, lines = run
    tail = [portable(line, out) for line in lines[-TAIL_LINES:]]
    return Stage(name, outcome(status), seconds, portable(shlex.join(command), out), detail, tail)


def read_junit(path: Path) -> dict[str, object]:
    """Counts of a junit report and the names of what failed."""
    root = ElementTree.parse(path).getroot()
    counts: dict[str, object] = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    failures = []
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        key = "passed"
        for tag, name in (("failure", "failed"), ("error", "errors"), ("skipped", "skipped")):
            if tag in kinds:
                key = name
                break
        counts[key] += 1
        if key in ("failed", "errors"):
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    counts["failures"] = failures
    return counts


def outcome(status: int | None) -> str:
    return "timeout" if status is None else "passed" if status == 0 else "failed"


def tests_stage(args: argparse.Namespace) -> list[Stage]:
    report = args.out / "junit.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if args.mark:
        command += ["-m", args.mark]
    if args.workers and importlib.util.find_spec("xdist"):
        command += ["-n", str(args.workers), "--dist", "loadgroup"]
    # README's tables are made from what this run is about to write.
    command += ["--deselect", "tests/test_bench.py::test_documents_match_the_committed_results"]
    command += shlex.split(args.pytest_args) or ["tests"]
    run = run_command(command, args.limits["tests"])
    detail = read_junit(report) if report.exists() else {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    report.unlink(missing_ok=True)
    stage = finished("tests", run, command, args.out, detail)
    if stage.status == "passed" and not detail["passed"]:
        stage.status = "failed"  # a check that ran nothing has shown nothing
    return [stage]


def benchmark_stage(name: str, args: argparse.Namespace) -> list[Stage]:
    command = [sys.executable, f"benchmarks/{name}.py", "--out", str(args.out), "--tree-hash", args.tree_hash]
    command += ["--device", args.device]
    if args.rounds:
        command += ["--rounds", str(args.rounds)]
    # One card: a process that sees several keeps torch's backward thread (te_lite/modules/backward_thread.py).
    run = run_command(command, args.limits[name], CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0")[:1])
    return [finished(name, run, command, args.out, {})]


def demo_stage(args: argparse.Namespace) -> list[Stage]:
    """The example on all GPUs (at most MAX_TP), sequence parallel, once a recipe; the limit is shared."""
    gpus = torch.cuda.device_count() if args.device.startswith("cuda") else 0
    tp = args.demo_ranks or min(MAX_TP, gpus)
    if tp < 2:
        return [Stage("demo", "skipped", detail={"reason": f"{gpus} GPU: tensor parallelism needs 2"})]
    stages = []
    for recipe in DEMO_RECIPES:
        log = args.out / f"demo_{recipe}.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp}"]
        options = ["--tp", str(tp), "--sequence-parallel", "--recipe", recipe, "--log-json", str(log)]
        command = [*launch, "examples/train_gpt.py", *options, *shlex.split(args.demo_args)]
        run = run_command(command, args.limits["demo"] / len(DEMO_RECIPES))
        detail = {"tp": tp, "recipe": recipe, **demo_numbers(log)}
        stage = finished(f"demo {recipe}", run, command, args.out, detail)
        loss, entropy = detail.get("held_out_loss"), detail.get("unigram_entropy")
        if stage.status == "passed" and not (loss and entropy and loss < entropy):  # nan is not below, too
            stage.status = "failed"
            stage.tail.append(f"held-out loss {loss} is not below the text's unigram entropy {entropy}")
        stages.append(stage)
    return stages


def demo_numbers(log: Path) -> dict[str, float]:
    """Losses and speed of the log that the example wrote; the log itself goes."""
    if not log.exists():
        return {}
    summary = json.loads(log.read_text())["summary"]
    log.unlink()
    wanted = ("steps", "train_loss", "held_out_loss", "unigram_entropy", "tokens_per_second")
    return {name: round(summary[name], 4) for name in wanted if name in summary}


RUNNERS = {
    "tests": tests_stage,
    "modules": lambda args: benchmark_stage("modules", args),
    "kernels": lambda args: benchmark_stage("kernels", args),
    "demo": demo_stage,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", default=list(RUNNERS), choices=list(RUNNERS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results files")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mark", default="", help="pytest -m expression, e.g. 'gpu or multigpu'; all tests by default")
    parser.add_argument("--workers", type=int, default=0, help="pytest-xdist processes, where it is installed")
    parser.add_argument("--pytest-args", default="", help="what to pass to pytest in place of 'tests'")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the benchmarks; 0 keeps their own")
    parser.add_argument("--demo-ranks", type=int, default=0, help="0: number of GPUs, at most 4")
    parser.add_argument("--demo-args", default=DEMO_ARGS, help="model and training options of the example")
    for name, limit in LIMITS_S.items():
        parser.add_argument(f"--{name}-limit", type=float, default=limit, help="seconds")
    args = parser.parse_args(argv)
    args.limits = {name: getattr(args, f"{name}_limit") for name in LIMITS_S}
    args.out = args.out.resolve()
    args.tree_hash = args.tree_hash or results.tree_hash(ROOT / "te_lite")
    return args


def summary(stages: Sequence[Stage]) -> str:
    lines = []
    for stage in stages:
        detail = ", ".join(f"{k} {v}" for k, v in stage.detail.items() if not isinstance(v, list))
        lines.append((stage.stage, stage.status, f"{stage.seconds:.0f} s", detail))
    failures = [f"FAILED {name}" for stage in stages for name in stage.detail.get("failures", [])]
    return "\n".join([*failures[:40], results.text_table(("stage", "status", "time", "detail"), lines)])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    stages: list[Stage] = []
    for name in args.stages:
        print(f"--- {name}", flush=True)
        stages += RUNNERS[name](args)
        # Written after every stage, so that a lost machine costs only what came after.
        rows = [asdict(stage) for stage in stages]
        tests = next((stage.detail for stage in stages if stage.stage == "tests"), None)
        results.write_results(
            args.out / "gpu_check.json",
            "gpu_check",
            rows,
            tree=args.tree_hash,
            device=args.device,
            tests=tests,
        )
    print("\n" + summary(stages))
    return 0 if all(stage.status in ("passed", "skipped") for stage in stages) else 1


if __name__ == "__main__":
    raise SystemExit(main())
