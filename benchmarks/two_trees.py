"""GPU and wall times of two trees of te_lite: benchmarks/modules.py and kernels.py of each, in alternating processes.
With --ranks its overlap_gemms.py instead.

    python benchmarks/two_trees.py --old HEAD~3                       # a revision against this checkout
    python benchmarks/two_trees.py --old ../before --new . --total-limit 540
    python benchmarks/two_trees.py --old HEAD~3 --stages modules --shapes small --recipes current --pairs 9
    python benchmarks/two_trees.py --old HEAD --device cpu --pairs 2  # smoke test; its numbers mean nothing
    python benchmarks/two_trees.py --old f589b4f --ranks 4 --pairs 3  # exchanges: two_trees_tp4.json

    pair 0: old new, pair 1: new old, ...           each a process of its own, with the scripts of its own tree
    x = gpu_us / gpu_us of the bare GEMMs (modules) or of the copy (kernels) of the same process
    ratio = median over processes of x, new / old   one a row; then the median over rows

A GPU's rate moves by some percent from process to process; what is measured in the same process moves with it. Wall and
host times are divided by those of torch's own module in the same process, which takes as many launches: the bare GEMMs
say little of the host. A row of torch's modules is a control: it is the same in both trees. An exchange is divided by
its limit, the longer of the GEMM and the copies alone: its x is 1 / share of the limit.

Exit status 0: medians of GPU times at most 1% more, that of wall times at most 3% more, no exchange's share of its
limit lower by more than 0.01, nothing failed, and enough pairs before --total-limit. 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import result_files
from benchmarks.result_files import Key
from benchmarks.trees import ROOT, environment, two_trees

RESULTS = Path(__file__).resolve().parent / "results"
STAGES = ("modules", "kernels")
EXCHANGES = "overlap_gemms"  # the stage of --ranks
COMPARED = ("collective", "ring", "fused")  # its candidates: what is te_lite's own and every tree has
SHARE_LOST = 0.01  # of the limit, of any exchange
OPTIONS = {
    "modules": ("shapes", "modules", "recipes"),
    "kernels": ("kernel_shapes", "families"),
    EXCHANGES: ("shapes",),
}
GPU_LIMIT, WALL_LIMIT = 1.01, 1.03  # of the medians over rows
LEAST_PAIRS = 5
NOTABLE = 1.03  # rows beyond it are named

Row = dict[str, object]
Run = dict[Key, Row]  # one process: identity -> row


def reference(stage: str, key: Key, quantity: str) -> Key:
    """The row of the same process that this one is divided by. quantity: "gpu_us", "wall_us" or "host_us"."""
    if stage == "kernels":
        return (*key[:2], "copy bf16")
    if quantity != "gpu_us":
        return (*key[:2], "torch", "bf16")
    return (*key[:2], "gemms", "bf16" if key[3] == "bf16" else "fp8")


def is_reference(stage: str, key: Key) -> bool:
    return key == reference(stage, key, "gpu_us") or key[2] == "gemms"


def relative(stage: str, runs: Iterable[Run], key: Key, quantity: str) -> list[float]:
    """Of each process the row's time over its reference's; processes that lack one of them are left out."""
    found = []
    if stage == EXCHANGES:
        shares = (run.get(key, {}).get("of_limit") for run in runs) if quantity == "gpu_us" else ()
        return [1 / share for share in shares if share]
    for run in runs:
        mine, other = run.get(key, {}).get(quantity), run.get(reference(stage, key, quantity), {}).get(quantity)
        if mine and other:
            found.append(mine / other)
    return found


def compared(stage: str, old: Sequence[Run], new: Sequence[Run]) -> list[Row]:
    """One row for each that both trees have timed, without the references themselves."""
    rows = []
    for key in dict.fromkeys(key for run in (*old, *new) for key in run):
        if key[-1] not in COMPARED if stage == EXCHANGES else is_reference(stage, key):
            continue
        row: Row = {"stage": stage, "row": " ".join(map(str, key)), "control": key[2] == "torch"}
        for name in ("gpu", "wall", "host"):
            before, after = (relative(stage, runs, key, f"{name}_us") for runs in (old, new))
            row[f"{name}_ratio"] = statistics.median(after) / statistics.median(before) if before and after else None
            if name == "gpu":
                row["processes"] = min(len(before), len(after))
                row["spread"] = (max(before) - min(before)) / statistics.median(before) if before else None
        row["share_lost"] = None
        if stage == EXCHANGES and row["gpu_ratio"]:
            old_share, share = (1 / statistics.median(relative(stage, runs, key, "gpu_us")) for runs in (old, new))
            row |= {"old_share": old_share, "new_share": share, "share_lost": old_share - share}
        for label, runs in (("old", old), ("new", new)):
            for name in ("gpu_us", "wall_us"):
                times = [run[key][name] for run in runs if key in run and run[key].get(name)]
                row[f"{label}_{name}"] = statistics.median(times) if times else None
        row["error"] = next((run[key]["error"] for run in (*old, *new) if run.get(key, {}).get("error")), None)
        rows.append(row)
    return rows


def medians(rows: Sequence[Row]) -> dict[str, float | None]:
    """Of each stage's ratios, the controls left out and apart."""

    def median(name: str, rows: Iterable[Row]) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return statistics.median(values) if values else None

    mine = [row for row in rows if not row["control"]]
    stages = dict.fromkeys((*STAGES, *(row["stage"] for row in rows)))
    found = {f"{stage} gpu": median("gpu_ratio", (r for r in mine if r["stage"] == stage)) for stage in stages}
    modules = [row for row in mine if row["stage"] == "modules"]
    found |= {"modules wall": median("wall_ratio", modules), "modules host": median("host_ratio", modules)}
    found["control gpu"] = median("gpu_ratio", (row for row in rows if row["control"]))
    return found


def verdict(rows: Sequence[Row], pairs: int, wanted: int) -> dict[str, bool]:
    """criterion -> whether it holds; what was not measured has no criterion."""
    found = medians(rows)
    limits = {"modules gpu": GPU_LIMIT, "kernels gpu": GPU_LIMIT, "modules wall": WALL_LIMIT}
    held = {f"{name} <= {limit}": found[name] <= limit for name, limit in limits.items() if found[name] is not None}
    lost = [row["share_lost"] for row in rows if row["share_lost"] is not None]
    if lost:
        held[f"no share of the limit lower by more than {SHARE_LOST}"] = max(lost) <= SHARE_LOST
    held["something was compared"] = bool(held)
    held["every row was timed in both trees"] = all(row["gpu_ratio"] is not None and not row["error"] for row in rows)
    held[f"pairs >= {wanted}"] = pairs >= wanted
    return held


def run_stage(stage: str, folder: Path, args: argparse.Namespace, out: Path, left: float) -> Run:
    """One process: the script of that tree, with options that every revision of it takes. RuntimeError where it leaves
    no rows."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"] if args.ranks else []
    command = [sys.executable, *launcher, str(folder / "benchmarks" / f"{stage}.py")]
    command += ["--out", str(out), "--device", args.device, "--rounds", str(args.rounds)]
    command += ["--wall-rounds", str(args.wall_rounds)] if stage == "modules" else []
    command += ["--no-torch"] if stage == EXCHANGES else []
    for name in OPTIONS[stage]:
        if getattr(args, name):
            command += [f"--{name.removeprefix('kernel_')}", *getattr(args, name)]
    path = out / f"{stage}.json"
    path.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=left)
    if not path.exists():
        raise RuntimeError(f"{stage}.py of {folder} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return result_files.keyed(json.loads(path.read_text()))


def alternate(
    args: argparse.Namespace, folders: tuple[Path, Path], out: Path, run: Callable[..., Run] = run_stage
) -> tuple[dict[str, tuple[list[Run], list[Run]]], int]:
    """(stage -> processes of the old and of the new tree, pairs that were finished).

    Begins no pair for which there is no time, by the last one; the first compiles kernels."""
    taken: dict[str, tuple[list[Run], list[Run]]] = {stage: ([], []) for stage in args.stages}
    pairs, last = 0, 0.0
    while pairs < args.pairs and time.monotonic() + last < args.end:
        begin = time.monotonic()
        got: list[tuple[str, int, Run]] = []
        try:
            for stage in args.stages:
                for side in (0, 1) if pairs % 2 == 0 else (1, 0):
                    left = max(1.0, args.end - time.monotonic())
                    got.append((stage, side, run(stage, folders[side], args, out, left)))
        except subprocess.TimeoutExpired:
            print(f"--total-limit was used up within pair {pairs}, which does not count", flush=True)
            break
        for stage, side, rows in got:
            taken[stage][side].append(rows)
        pairs, last = pairs + 1, time.monotonic() - begin
        print(f"pair {pairs} of {args.pairs}: {last:.0f} s", flush=True)
    return taken, pairs


def summary(rows: Sequence[Row], held: dict[str, bool]) -> str:
    """The rows, those beyond NOTABLE once more, medians and criteria."""

    def cell(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)

    columns = ("stage", "row", "gpu_ratio", "wall_ratio", "host_ratio", "spread", "old_gpu_us", "new_gpu_us")
    columns += ("old_share", "new_share") if any("new_share" in row for row in rows) else ()
    lines = [result_files.text_table(columns, [[cell(row.get(name)) for name in columns] for row in rows])]
    for row in rows:
        if row["error"]:
            lines.append(f"failed: {row['stage']} {row['row']}: {row['error']}")
        elif (row["gpu_ratio"] or 0) > NOTABLE:
            lines.append(f"slower: {row['stage']} {row['row']}: {cell(row['gpu_ratio'])}, spread {cell(row['spread'])}")
    lines += [f"median over rows, {name}, new / old: {cell(value)}" for name, value in medians(rows).items()]
    lines += [f"{'holds' if good else 'FAILS'}: {name}" for name, good in held.items()]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, help="git revision or folder")
    parser.add_argument("--new", default=str(ROOT), help="git revision or folder; default: this checkout")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--ranks", type=int, default=0, help=f"run {EXCHANGES}.py on so many, and no other stage")
    parser.add_argument("--pairs", type=int, default=LEAST_PAIRS)
    parser.add_argument(
        "--least-pairs", type=int, help=f"fewer fail; default: {LEAST_PAIRS}, or --pairs if that is less"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--wall-rounds", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", help="of modules.py or overlap_gemms.py; all by default")
    parser.add_argument("--modules", nargs="+", help="of modules.py; all by default")
    parser.add_argument("--recipes", nargs="+", help="of modules.py; its own by default")
    parser.add_argument("--kernel-shapes", nargs="+", help="of kernels.py, as 8192x4096; all by default")
    parser.add_argument("--families", nargs="+", help="of kernels.py; all by default")
    parser.add_argument("--total-limit", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for two_trees.json")
    args = parser.parse_args(argv)
    if args.ranks:
        args.stages = [EXCHANGES]
    args.end = time.monotonic() + args.total_limit
    args.least_pairs = min(LEAST_PAIRS, args.pairs) if args.least_pairs is None else args.least_pairs
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="te_lite_times_") as name:
        scratch = Path(name)
        try:
            folders = two_trees(args.old, args.new, scratch)
            taken, pairs = alternate(args, folders, scratch)
        except (RuntimeError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        old_tree, tree = (result_files.tree_hash(folder / "te_lite") for folder in folders)
    rows = [row for stage in args.stages for row in compared(stage, *taken[stage])]
    held = verdict(rows, pairs, args.least_pairs)
    name = f"two_trees_tp{args.ranks}.json" if args.ranks else "two_trees.json"
    result_files.write_results(
        args.out / name, "two_trees", rows, tree=tree, device=args.device, old_tree=old_tree, pairs=pairs,
        rounds=args.rounds, wall_rounds=args.wall_rounds, medians=medians(rows), criteria=held,
    )  # fmt: skip
    print(summary(rows, held))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
