"""Everything that needs a GPU, in one call: tests, benchmarks, training; results go to benchmarks/results/.

    python benchmarks/gpu_check.py                                   # all stages but those of BY_NAME
    python benchmarks/gpu_check.py --stages peers llama grouped      # beside Transformer Engine and others
    python benchmarks/gpu_check.py --stages tests modules --workers 4
    python benchmarks/gpu_check.py --tree-hash $(git rev-parse HEAD:te_lite) --out results

Calls on the same tree add up: `--stages tests modules kernels gemms recipes` on one GPU, the others on four. Where the
time for one call ends before the tests do, `--rest` runs those that have not passed yet.

Each stage is a process of its own with a limit; one that fails does not stop the next. Stages that time nothing run
beside each other and `tests`, but `demo` comes last, by itself: beside them its runs reach their limit. On a GPU tests
leaves out what needs none, which `make test` runs anywhere, what needs several (`ranks`) and what is marked slow
(`matrix`, `matrix_tp2` and `random` are that).
--total-limit ends the whole before a machine's own does. Exit status 1 when a test or stage failed, or time ran out.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import commands, result_files
from benchmarks.check_logs import demo_mistakes, demo_numbers, training_numbers
from benchmarks.commands import Stage, finished, run_command
from benchmarks.result_files import BY_NAME

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Caps, not expectations: together they exceed TOTAL_S, which holds for the whole.
LIMITS_S = {
    name: seconds
    for seconds, names in {
        60.0: "kernels gemms recipes per_shard",
        90.0: "modules overlap_played memcheck host",
        120.0: "overlap_gemms verbs",
        170.0: "peers graphs alone",
        200.0: "overlap",
        240.0: "training moe demo",
        300.0: "grouped",
        360.0: "tests ranks matrix matrix_tp2 random",
        400.0: "llama",
        660.0: "megatron",
    }.items()
    for name in names.split()
}
BESIDE_TESTS = ("ranks", "training", "moe", "matrix", "matrix_tp2", "random", "memcheck")
RANDOM = "--seed 1 --iterations 500", "--seed 1 --iterations 500 --first 500", "--seed 7 --iterations 40 --repeats 12"
RANKS_WORKERS = max(6, (os.cpu_count() or 1) // 4)  # of tests that start processes of their own
TOTAL_S = 520.0
DEMO_RECIPES = ("delayed", "current")
DEMO_ARGS = "--layers 4 --hidden 1024 --heads 16 --seq-length 512 --batch-size 16 --steps 100 --lr 1e-3"
MAX_TP = 4
NOTHING_LEFT = 5  # pytest's exit status where no test was run


def limit(name: str, args: argparse.Namespace) -> float:
    """Seconds for the stage `name` that starts now."""
    return min(getattr(args, f"{name}_limit"), args.end - time.monotonic())


def ranks_tests_stage(args: argparse.Namespace) -> list[Stage]:
    """Tests of several GPUs. Beside each other, but few: each starts up to four ranks."""
    if gpu_count(args) < 2:
        return too_few("ranks", args)
    return pytest_stage("ranks", "multigpu and not slow", RANKS_WORKERS, args)


def pytest_stage(name: str, mark: str, workers: int, args: argparse.Namespace) -> list[Stage]:
    report = args.out / f"junit_{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-m", mark]
    if workers and importlib.util.find_spec("xdist"):
        command += ["-n", str(workers), "--dist", "loadgroup"]
    log = args.out / f"outcomes_{name}.txt"
    key = f"te_lite {args.tree_hash} tests {result_files.tree_hash(ROOT / 'tests')} {mark} {args.pytest_args}"
    before = commands.read_outcomes(log, key) if args.rest else {}
    if not before:
        log.write_text(f"{key}\n")
    variables = {"TE_LITE_OUTCOMES": str(log)}  # tests/conftest.py
    # README's tables are made from what this run is about to write.
    command += ["--deselect", "tests/benchmarks/test_report.py::test_documents_match_the_committed_results"]
    command += shlex.split(args.pytest_args) or ["tests"]
    if "not multigpu" in mark and (gpus := visible(args)):
        variables["TE_LITE_SPREAD"] = gpus
    run = run_command(command, limit(name, args), echo=name not in BESIDE_TESTS, **variables)
    detail = commands.read_junit(report)
    found = commands.read_outcomes(log, key)
    failures = [test for test, words in found.items() if words[-1] == "failed"]
    new = sum(words[len(before.get(test, ())) :].count("failed") > 0 for test, words in found.items())
    # The report counts what was interrupted among what passed. It alone has errors that are no test's.
    detail["errors"] = max(0, detail["errors"] + detail["failed"] - new)
    detail |= {"passed": len(found) - len(failures), "failed": len(failures), "failures": failures}
    detail["failed_once"] = [test for test, words in found.items() if "failed" in words[:-1] and words[-1] == "passed"]
    if before and run[0] == NOTHING_LEFT:
        run = (0, *run[1:])
    stage = finished(name, run, command, args.out, detail)
    if stage.status == "passed" and (failures or not detail["passed"]):
        stage.status = "failed"  # a check that ran nothing has shown nothing
    return [stage]


def script_options(args: argparse.Namespace) -> list[str]:
    """What every benchmark script takes."""
    rounds = ["--rounds", str(args.rounds)] if args.rounds else []
    return ["--out", str(args.out), "--tree-hash", args.tree_hash, "--device", args.device, *rounds]


def benchmark_stage(name: str, args: argparse.Namespace, script: str = "") -> list[Stage]:
    command = [sys.executable, f"benchmarks/{script or name}.py", *script_options(args)]
    # One card: a process that sees several keeps torch's backward thread (te_lite/modules/backward_thread.py). megatron
    # starts processes that see one each.
    gpus = visible(args) if name == "megatron" else visible(args).split(",")[0]
    run = run_command(command, limit(name, args), CUDA_VISIBLE_DEVICES=gpus)
    return [finished(name, run, command, args.out, {})]


def peer_stage(name: str, package: str, args: argparse.Namespace, script: str = "") -> list[Stage]:
    """A benchmark that has nothing to compare with, or nothing to run, without another package."""
    if importlib.util.find_spec(package) is None:
        return [Stage(name, "skipped", detail={"reason": f"{package} is not installed"})]
    return benchmark_stage(name, args, script)


def gpu_count(args: argparse.Namespace) -> int:
    return torch.cuda.device_count() if args.device.startswith("cuda") else 0


def visible(args: argparse.Namespace) -> str:
    """The GPUs, as CUDA_VISIBLE_DEVICES names them; "" without one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu_count(args))))


def launcher(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def tp_size(args: argparse.Namespace) -> int:
    """Ranks of the stages with tensor parallelism."""
    return args.ranks or min(MAX_TP, gpu_count(args))


def too_few(name: str, args: argparse.Namespace) -> list[Stage]:
    return [Stage(name, "skipped", detail={"reason": f"{gpu_count(args)} GPU: tensor parallelism needs 2"})]


def ranks_stage(name: str, script: list[str], args: argparse.Namespace, tp: int = 0) -> list[Stage]:
    """A script on `tp` ranks, by default as many as there are GPUs (at most MAX_TP)."""
    if tp_size(args) < 2:
        return too_few(name, args)
    tp = tp or tp_size(args)
    command = [*launcher(tp), *script]
    run = run_command(command, limit(name, args), echo=name not in BESIDE_TESTS)
    return [finished(name, run, command, args.out, {"tp": tp})]


def overlap_test(name: str, args: argparse.Namespace, *options: str, tp: int = 0) -> list[Stage]:
    """A suite of tests/distributed/run_overlap.py."""
    device = "cuda" if args.device.startswith("cuda") else "cpu"
    script = ["tests/distributed/run_overlap.py", "--device", device, "--dump", str(args.out / "dump"), *options]
    return ranks_stage(name, script, args, tp)


def random_stage(args: argparse.Namespace) -> list[Stage]:
    """RANDOM, in processes beside each other: most of their time is compilation."""
    parts = [part.split() for part in RANDOM]
    with ThreadPoolExecutor(len(parts)) as pool:
        stages = list(pool.map(lambda part: overlap_test("random", args, "--suite", "random", *part), parts))
    return sum(stages, [])


def training_stage(name: str, args: argparse.Namespace, *options: str) -> list[Stage]:
    """The demo model with every recipe, all runs at once; leaves <name>.png and <name>.json."""
    plot, log = args.out / f"{name}.png", args.out / f"{name}.json"
    log.unlink(missing_ok=True)
    folder = args.out / f"{name}_runs"
    shutil.rmtree(folder, ignore_errors=True)  # runs of another tree are no answer
    command = [sys.executable, "examples/compare_recipes.py", "--plot", str(plot), "--runs", str(folder), *options]
    command += ["--device", "cuda" if args.device.startswith("cuda") else "cpu", *shlex.split(args.training_args)]
    run = run_command(command, limit(name, args), echo=False)
    shutil.rmtree(folder, ignore_errors=True)
    stage = finished(name, run, command, args.out, training_numbers(log))
    if stage.status == "passed" and not stage.detail:
        stage.status = "failed"  # no curve was compared
    return [stage]


def demo_stage(args: argparse.Namespace) -> list[Stage]:
    """The example on all GPUs (at most MAX_TP), each recipe with and without overlap, one with partial sums in fp8.
    What is left of the limit is shared by the runs that are left."""
    if (tp := tp_size(args)) < 2:
        return too_few("demo", args)
    stages, end, without = [], time.monotonic() + limit("demo", args), None
    runs = [*itertools.product(DEMO_RECIPES, ([], ["--overlap"])), (DEMO_RECIPES[-1], ["--overlap", "--fp8-buf"])]
    for recipe, overlap in runs:
        log = args.out / f"demo_{recipe}.json"
        options = ["--tp", str(tp), "--sequence-parallel", "--recipe", recipe, "--log-json", str(log), *overlap]
        command = [*launcher(tp), "examples/train_gpt.py", *options, *shlex.split(args.demo_args)]
        left = (end - time.monotonic()) / (len(runs) - len(stages))
        run = run_command(command, left, echo=False, TE_LITE_AUTO="rule")  # for a small model Collective may be faster
        detail = {"tp": tp, "recipe": recipe, "overlap": bool(overlap), **demo_numbers(log)}
        stage = finished(f"demo {recipe}{''.join(overlap).replace('--', ' ')}", run, command, args.out, detail)
        without = detail if not overlap else without  # the recipe's first run
        wrong = demo_mistakes(detail, without if overlap else None) if stage.status == "passed" else []
        if wrong:
            stage.status = "failed"
            stage.tail += wrong
        stages.append(stage)
    return stages


def memcheck_stage(args: argparse.Namespace) -> list[Stage]:
    """compute-sanitizer's memcheck over a small case of every overlapped operation, on 2 ranks."""
    tool = shutil.which("compute-sanitizer")
    if gpu_count(args) < 2:
        return too_few("memcheck", args)
    if tool is None:
        return [Stage("memcheck", "skipped", detail={"reason": "no compute-sanitizer"})]
    # NCCL probes with calls that may fail, and its kernels are not ours.
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all"]
    command += ["--kernel-name-exclude", "kns=nccl", *launcher(2), "tests/distributed/run_gemm_with_overlap.py"]
    command += ["--device", "cuda", "-M", "256", "-K", "256", "-N", "256"]
    run = run_command(command, limit("memcheck", args), echo=False)
    said = [line for line in run[2] if "ERROR SUMMARY" in line or "VERDICT" in line]
    stage = finished("memcheck", run, command, args.out, {"said": "; ".join(line.strip("= ") for line in said)})
    if stage.status == "passed" and not any("ERROR SUMMARY: 0 errors" in line for line in said):
        stage.status = "failed"
    return [stage]


RUNNERS: dict[str, Callable[[argparse.Namespace], list[Stage]]] = {
    "tests": lambda args: pytest_stage("tests", args.mark, args.workers, args),
    "ranks": ranks_tests_stage,
    "training": lambda args: training_stage("training", args),
    # A mixture of experts over one, two and four ranks.
    "moe": lambda args: training_stage("moe", args, "--experts", "--ranks", "2", "4", "--parallel", "6"),
    "matrix": lambda args: overlap_test("matrix", args, "--suite", "matrix"),
    "matrix_tp2": lambda args: overlap_test("matrix_tp2", args, "--suite", "matrix", tp=2),
    "random": random_stage,
    "modules": lambda args: benchmark_stage("modules", args),
    "kernels": lambda args: benchmark_stage("kernels", args),
    "gemms": lambda args: benchmark_stage("gemms", args),
    "recipes": lambda args: benchmark_stage("recipes", args),
    "peers": lambda args: peer_stage("peers", "transformer_engine", args),
    "llama": lambda args: peer_stage("llama", "transformers", args),
    "megatron": lambda args: peer_stage("megatron", "megatron", args, "megatron_gpt"),
    "graphs": lambda args: benchmark_stage("graphs", args),
    "alone": lambda args: benchmark_stage("alone", args),
    "host": lambda args: benchmark_stage("host", args),
    "grouped": lambda args: benchmark_stage("grouped", args),
    # What per-shard scales cost and save against an all-reduce of the amax.
    "per_shard": lambda args: ranks_stage(
        "per_shard", ["benchmarks/recipes.py", "--part", "per_shard", *script_options(args)], args
    ),
    "overlap": lambda args: ranks_stage("overlap", ["benchmarks/overlap.py", *script_options(args)], args),
    "overlap_gemms": lambda args: ranks_stage(
        "overlap_gemms", ["benchmarks/overlap_gemms.py", "--twice", *script_options(args)], args
    ),
    "verbs": lambda args: ranks_stage("verbs", ["benchmarks/verbs.py", *script_options(args)], args),
    "overlap_played": lambda args: ranks_stage(
        "overlap_played", ["benchmarks/overlap_played.py", *script_options(args)], args, tp=2
    ),
    "memcheck": memcheck_stage,
    "demo": demo_stage,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in RUNNERS if name not in BY_NAME]
    parser.add_argument("--stages", nargs="+", default=usual, choices=list(RUNNERS), help="default: not BY_NAME")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results files")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mark", help="pytest -m expression of `tests`")
    parser.add_argument("--rest", action="store_true", help="of tests: what has not passed in earlier calls")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--workers", type=int, default=max(1, cores * 7 // 16), help="pytest-xdist processes, where it is there"
    )
    parser.add_argument("--pytest-args", default="", help="what to pass to pytest in place of 'tests'")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the benchmarks; 0 keeps their own")
    parser.add_argument("--ranks", type=int, default=0, help="of per_shard and demo; 0: number of GPUs, at most 4")
    parser.add_argument("--demo-args", default=DEMO_ARGS, help="model and training options of the example")
    parser.add_argument("--training-args", default="", help="options of examples/compare_recipes.py")
    parser.add_argument("--total-limit", type=float, default=TOTAL_S, help="seconds for all stages together")
    for name, limit in LIMITS_S.items():
        parser.add_argument(f"--{name.replace('_', '-')}-limit", type=float, default=limit, help="seconds")
    args = parser.parse_args(argv)
    args.end = time.monotonic() + args.total_limit
    args.out = args.out.resolve()
    args.mark = args.mark or f"{'gpu and ' if args.device.startswith('cuda') else ''}not slow and not multigpu"
    args.tree_hash = args.tree_hash or result_files.tree_hash(ROOT / "te_lite")
    return args


def run_stages(names: Sequence[str], args: argparse.Namespace) -> Iterator[list[Stage]]:
    """Each stage's rows as it ends. First tests and those of BESIDE_TESTS, beside each other, before any is timed."""
    together = [name for name in names if name == "tests" or name in BESIDE_TESTS]
    with ThreadPoolExecutor(1 + len(BESIDE_TESTS)) as pool:
        print(*(f"--- {name}" for name in together), sep="\n", flush=True)
        for done in as_completed([pool.submit(RUNNERS[name], args) for name in together]):
            yield done.result()
    for name in names:
        if name in together:
            continue
        print(f"--- {name}", flush=True)
        if time.monotonic() >= args.end:
            yield [Stage(name, "timeout", detail={"reason": f"--total-limit {args.total_limit:g} was used up"})]
        else:
            yield RUNNERS[name](args)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    stages: list[Stage] = []
    earlier = commands.earlier_rows(args.out / "gpu_check.json", args.tree_hash, args.stages)
    # The order of RUNNERS: tests and training are over before anything is timed.
    for done in run_stages([name for name in RUNNERS if name in args.stages], args):
        stages = sorted((*stages, *done), key=lambda stage: list(RUNNERS).index(stage.stage.split()[0]))
        # Written after every stage, so that a lost machine costs only what came after.
        rows = earlier + [{**asdict(stage), "gpus": gpu_count(args)} for stage in stages]
        path = args.out / "gpu_check.json"
        tests = commands.counts_of_tests(rows)
        result_files.write_results(path, "gpu_check", rows, tree=args.tree_hash, device=args.device, tests=tests)
    print("\n" + commands.summary(stages))
    return 0 if all(stage.status in ("passed", "skipped") for stage in stages) else 1


if __name__ == "__main__":
    raise SystemExit(main())
