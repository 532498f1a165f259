"""Megatron-core's GPT by te_lite's alias, Transformer Engine and Megatron's own layers: losses and tokens a second.

    python benchmarks/megatron_gpt.py
    python benchmarks/megatron_gpt.py --recipes bf16 current --steps 30 --total-limit 240
    python benchmarks/megatron_gpt.py --te-pythonpath FOLDER            # where transformer_engine is imported from
    python benchmarks/megatron_gpt.py --device cpu --steps 4            # smoke test of a tiny model

Layers of Llama 3 8B's size, bf16 and fp8. Each candidate of each recipe is a process of its own (megatron_steps.py), in
which two seeds train; te_lite and Transformer Engine take turns in going first. All start from the same weights and see
the same data. A seed rounds the weights to bf16 at random, up or down: what two seeds of Transformer Engine differ by
is what roundings alone do to the losses. With --seed-is weights each seed draws weights of its own.

    loss_ratio   = max over steps of off[t] / noise[t]; at most MAX_LOSS_RATIO, else the row has an error
    off[t]       = max over seeds of |loss of te_lite - loss of Transformer Engine|
    noise[t]     = max over the steps t-WINDOW ... t+WINDOW of |loss of seed 0 - loss of seed 1|, Transformer Engine's,
                   for two curves cross now and then
    over_te, wall_over_te = tokens a second over Transformer Engine's

Exit status 1 where a process failed, a loss is not finite, or loss_ratio is too large.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import result_files
from benchmarks.commands import ROOT, run_command
from benchmarks.modules import RESULTS

RECIPES = ("bf16", "delayed", "current", "blockwise")
MAX_LOSS_RATIO, WINDOW = 2.0, 2
LEAST_TOKENS_RATIO = 1.0
SEEDS = (0, 1)
TOTAL_S = 480.0
ALIAS = "+te.lite"  # in the version of te_lite's alias, which is no Transformer Engine to compare with
MEANING = {
    "rounding": "same initial weights in fp32 and same data; a seed rounds each weight to bf16 up or down at random",
    "weights": "same data; a seed draws the initial weights",
}


@dataclass(frozen=True)
class Sizes:
    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    vocabulary: int = 32000
    sequence: int = 4096
    micro_batch: int = 1


SMOKE = Sizes(2, 64, 96, 4, 2, 128, 32, 2)


def in_front(path: str | None) -> str:
    """PYTHONPATH with `path` before the rest."""
    return os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))


def te_version(pythonpath: str | None) -> tuple[str | None, str]:
    """(version of the Transformer Engine that a process of its own imports, why it is left out)."""
    code = "import transformer_engine.pytorch, transformer_engine as te; print('VERSION', te.__version__)"
    environment = os.environ | {"PYTHONPATH": in_front(pythonpath)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    for line in run.stdout.splitlines():
        if line.startswith("VERSION "):
            return line.split()[1], ""
    last = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
    return None, f"Transformer Engine is left out: {last.split(':')[0]}."


def jobs(recipes: Sequence[str], te: bool) -> Iterator[tuple[str, str]]:
    """(candidate, recipe) of each process, in their order."""
    for i, recipe in enumerate(recipes):
        pair = ["te_lite", *(["te"] if te else [])]
        yield from ((candidate, recipe) for candidate in (pair if i % 2 else reversed(pair)))
    if "bf16" in recipes:
        yield "local", "bf16"


def measure(candidate: str, recipe: str, sizes: Sizes, args: argparse.Namespace, folder: Path) -> dict:
    """A row from one process."""
    row: dict = {"candidate": candidate, "recipe": recipe, "error": None}
    report = folder / f"{candidate}_{recipe}.json"
    # As a module, so that the folder of the benchmarks is on no path.
    command = [sys.executable, "-m", "benchmarks.megatron_steps", "--candidate", candidate, "--recipe", recipe]
    for field in fields(sizes):
        command += [f"--{field.name.replace('_', '-')}", str(getattr(sizes, field.name))]
    command += ["--steps", str(args.steps), "--warmup", str(args.warmup), "--lr", str(args.lr), "--json", str(report)]
    command += ["--seeds", *map(str, SEEDS), "--seed-is", args.seed_is, "--device", args.device]
    path = {"PYTHONPATH": in_front(args.te_pythonpath)} if candidate == "te" else {}
    status, seconds, lines = run_command(command, args.end - time.monotonic(), echo=False, **path)
    found = json.loads(report.read_text()) if report.exists() else {"runs": []}
    row |= {"seconds": seconds, "version": found.get("version"), "peak_gib": found.get("peak_gib")}
    row["losses"] = [run["losses"] for run in found["runs"]]
    if status != 0 or len(found["runs"]) < len(SEEDS):
        print(*lines[-30:], sep="\n", flush=True)
        said = "the time was up" if status is None else (lines or ["it said nothing"])[-1]
        row["error"] = f"{len(found['runs'])} of {len(SEEDS)} seeds trained: {said[:200]}"
    elif not all(math.isfinite(loss) for losses in row["losses"] for loss in losses):
        row["error"] = "a loss is not finite"
    if found["runs"]:  # the second seed finds caches filled and the GPU warm, in every candidate
        last = found["runs"][-1]
        tokens = 1e6 * sizes.micro_batch * sizes.sequence
        row |= {name: last[name] for name in ("gpu_us", "wall_us", "spread")}
        row |= {"tokens_s": tokens / last["gpu_us"], "wall_tokens_s": tokens / last["wall_us"]}
    return row


def apart(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [round(abs(x - y), 6) for x, y in zip(a, b, strict=True)]


def noise_of(losses: Sequence[Sequence[float]]) -> list[float]:
    """At each step, by how much two seeds are apart there or nearby."""
    seeds = apart(*losses)
    return [max(seeds[max(0, t - WINDOW) : t + WINDOW + 1]) for t in range(len(seeds))]


def compare(rows: list[dict]) -> None:
    """te_lite's rows get their ratios to Transformer Engine's, Megatron's own its distance to both."""
    found = {(row["candidate"], row["recipe"]): row for row in rows}
    for (candidate, recipe), row in found.items():
        theirs = found.get(("te", recipe))
        if candidate == "te" or theirs is None or row["error"] or theirs["error"]:
            continue
        off = [max(pair) for pair in zip(*map(apart, row["losses"], theirs["losses"]), strict=True)]
        noise = noise_of(theirs["losses"])
        ratios = [a / b if b else math.inf if a else 0.0 for a, b in zip(off, noise, strict=True)]
        row |= {"loss_ratio": max(ratios), "worst_step": ratios.index(max(ratios)), "off": off, "noise": noise}
        row |= {"over_te": row["tokens_s"] / theirs["tokens_s"]}
        row |= {"wall_over_te": row["wall_tokens_s"] / theirs["wall_tokens_s"]}
        if candidate == "te_lite" and not row["loss_ratio"] <= MAX_LOSS_RATIO:
            row["error"] = (
                f"at step {row['worst_step']} the losses are {row['loss_ratio']:.2f} times as far from Transformer "
                f"Engine's as its own seeds are from each other; at most {MAX_LOSS_RATIO:g} is expected"
            )


def bars(rows: Sequence[dict]) -> dict[str, bool]:
    """criterion -> whether it holds, of what was compared."""
    held = {}
    for row in rows:
        if row["candidate"] == "te_lite" and "over_te" in row:
            held[f"{row['recipe']}: loss_ratio <= {MAX_LOSS_RATIO:g}"] = row["loss_ratio"] <= MAX_LOSS_RATIO
            held[f"{row['recipe']}: over_te >= {LEAST_TOKENS_RATIO:g}"] = row["over_te"] >= LEAST_TOKENS_RATIO
    return held


def summary(rows: Sequence[dict]) -> str:
    columns = {"tokens_s": 0, "wall_tokens_s": 0, "over_te": 3, "wall_over_te": 3, "loss_ratio": 2, "peak_gib": 1}

    def cell(row: dict, name: str) -> str:
        return "-" if row.get(name) is None else f"{row[name]:.{columns[name]}f}"

    lines = []
    for row in rows:
        last = [f"{losses[-1]:.4f}" for losses in row["losses"]]
        cells = [cell(row, name) for name in columns]
        lines.append([row["candidate"], row["recipe"], *cells, " ".join(last), row["error"] or ""])
    return result_files.text_table(("candidate", "recipe", *columns, "last losses", "error"), lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--rounds", type=int, default=0, help="as --steps, where it is not 0")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed-is", default="rounding", choices=list(MEANING), help="what two seeds differ by")
    parser.add_argument("--te-pythonpath", default=os.environ.get("TE_PYTHONPATH"), help="PYTHONPATH of its processes")
    parser.add_argument("--allow-alias", action="store_true", help="te_lite's alias may stand for it; for tests")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=f"default {field.default}")
    parser.add_argument("--total-limit", type=float, default=TOTAL_S, help="seconds; no process outlasts them")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for megatron.json")
    args = parser.parse_args(argv)
    args.steps = args.rounds or args.steps
    args.end = time.monotonic() + args.total_limit
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    usual = SMOKE if torch.device(args.device).type == "cpu" else Sizes()
    sizes = Sizes(**{name: getattr(args, name) or value for name, value in asdict(usual).items()})
    version, why = te_version(args.te_pythonpath)
    if version is not None and ALIAS in version and not args.allow_alias:
        version, why = None, f"Transformer Engine is left out: what is imported is te_lite's alias, {version}."
    left_out = [] if version else [why]
    todo, rows = list(jobs(args.recipes, version is not None)), list[dict]()
    tree = args.tree_hash or result_files.tree_hash(ROOT / "te_lite")
    with tempfile.TemporaryDirectory() as folder:
        for candidate, recipe in todo:
            if time.monotonic() >= args.end:
                left_out.append(f"{candidate} {recipe} is left out: {args.total_limit:g} s were used up before it.")
                continue
            print(f"--- {candidate} {recipe}", flush=True)
            rows.append(measure(candidate, recipe, sizes, args, Path(folder)))
    compare(rows)
    result_files.write_results(
        args.out / "megatron.json", "megatron", rows, tree=tree, device=args.device, left_out=left_out,
        peers={"transformer_engine": version} if version else {}, bars=bars(rows), seed=MEANING[args.seed_is],
        steps=args.steps, warmup=args.warmup, lr=args.lr, window=WINDOW, **asdict(sizes),
    )  # fmt: skip
    said = [f"{'holds' if holds else 'FAILS'}  {name}" for name, holds in bars(rows).items()]
    print(summary(rows), *said, *left_out, sep="\n")
    return 1 if any(row["error"] for row in rows) or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
