"""Megatron-core's GPT by te_lite's alias, Transformer Engine and Megatron's own layers: losses and tokens a second.

    python benchmarks/megatron_gpt.py
    python benchmarks/megatron_gpt.py --recipes bf16 current --steps 30 --total-limit 240
    python benchmarks/megatron_gpt.py --te-pythonpath FOLDER            # where transformer_engine is imported from
    python benchmarks/megatron_gpt.py --device cpu --steps 4            # smoke test of a tiny model

    python benchmarks/megatron_gpt.py --tp 4 --overlap off on --seeds 1                      # on 4 GPUs
    python benchmarks/megatron_gpt.py --tp 2 --pp 2 --distributed-optimizer --seeds 1
    python benchmarks/megatron_gpt.py --tp 2 --ranks 4 --distributed-optimizer --seeds 1     # 2 data parallel ranks

Layers of Llama 3 8B's size, bf16 and fp8. Each candidate of each recipe is a process of its own (megatron_steps.py), in
which the seeds train; te_lite and Transformer Engine take turns in going first. All start from the same weights and see
the same data. A seed rounds the weights to bf16 at random, up or down: what two seeds of Transformer Engine differ by
is what roundings alone do to the losses. With --seed-is weights each seed draws weights of its own. Where there are
more GPUs than a process takes, recipes run beside each other, each on a GPU of its own.

    loss_ratio   = max over steps of off[t] / noise[t]; at most 2, else the row has an error (megatron_losses.py)
    off[t]       = max over seeds of |loss of te_lite - loss of Transformer Engine|
    noise[t]     = max over pairs of seeds and the steps t-WINDOW ... t+WINDOW of the distance of their losses,
                   Transformer Engine's, for two curves cross now and then
    over_te, wall_over_te = tokens a second over Transformer Engine's

Two seeds are few: where all losses are drawn from one normal distribution at each step, 79% of runs of 50 steps have a
loss_ratio above 2; with three seeds 22%, with four, the default, 6%.

On several ranks each process becomes as many, by torchrun, with sequence parallelism where --tp is above 1. Rows of the
same --overlap are compared. With --seeds 1 there is no noise, and so no loss_ratio. A pipeline has 4 micro-batches.

    speedup, wall_speedup = tokens a second with overlap over those without, of the same candidate
    tokens_s              = of all ranks, by the time of rank 0's GPU; wall_tokens_s: by the slowest rank's clock.
                            Medians of steps after those whose losses are compared, once the host has settled

Exit status 1 where a process failed, a loss is not finite, or loss_ratio is too large.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import result_files
from benchmarks.commands import ROOT, run_command
from benchmarks.megatron_losses import WINDOW, bars, compare
from benchmarks.modules import RESULTS

RECIPES = ("bf16", "delayed", "current", "blockwise")
SEEDS = (0, 1, 2, 3)
TOTAL_S = 640.0
PROCESS_S = 180.0
PIPELINE_BATCHES = 4
ALIAS = "+te.lite"  # in the version of te_lite's alias, which is no Transformer Engine to compare with
# Of Transformer Engine 2.20.2, with overlap: "Unsupported quantizer for Userbuffers".
NO_USERBUFFERS = ("blockwise",)
OVERLAPPED = {"ring", "pipeline", "fused", "bulk"}  # of te_lite.overlap_report()
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


@dataclass(frozen=True)
class Layout:
    """How the training is spread over ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    distributed_optimizer: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def file(self) -> str:
        if self.ranks == 1:
            return "megatron.json"
        return f"megatron_tp{self.tp}_pp{self.pp}{f'_dp{self.dp}' if self.dp > 1 else ''}.json"

    def problem(self, sizes: Sizes, overlaps: Sequence[str]) -> str | None:
        """Why this cannot run."""
        split = [("layers", "pp"), *((name, "tp") for name in ("heads", "groups", "ffn", "vocabulary", "sequence"))]
        for name, by in split:
            size, parts = getattr(sizes, name), getattr(self, by)
            if size % parts:
                return f"--{name} {size}: must be a multiple of --{by} {parts}, for each rank has as much of it"
        if "on" in overlaps and self.tp == 1:
            return "--overlap on: needs --tp 2 or more; it hides the communication of tensor parallelism"
        return None


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


def jobs(recipes: Sequence[str], te: bool, overlaps: Sequence[str] = ("off",)) -> Iterator[tuple[str, str, str]]:
    """(candidate, recipe, overlap) of each process that is compared with Transformer Engine, in their order."""
    for i, (recipe, overlap) in enumerate(itertools.product(recipes, overlaps)):
        pair = ["te_lite", *(["te"] if te and not (overlap == "on" and recipe in NO_USERBUFFERS) else [])]
        yield from ((candidate, recipe, overlap) for candidate in (pair if i % 2 else reversed(pair)))


def last_words(lines: Sequence[str]) -> str:
    """Why a process failed. Of ranks the first that raised: the others fail after it, and torchrun's summary at the end
    gives no reason."""
    said = [line for line in lines if re.match(r"\[rank\d+\]: .*Error\b|\s*traceback : Signal", line)]
    return said[0] if said else lines[-1] if lines else "it said nothing"


def measure(
    candidate: str, recipe: str, overlap: str, sizes: Sizes, layout: Layout, args: argparse.Namespace, folder: Path,
    gpu: str = "",
) -> dict:  # fmt: skip
    """A row from one process, or from the ranks that it starts. gpu: the one it sees; "" for all."""
    row: dict = {"candidate": candidate, "recipe": recipe, "overlap": overlap, "error": None, **asdict(layout)}
    report = folder / f"{candidate}_{recipe}_{overlap}.json"
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={layout.ranks}"]
    # As a module, so that the folder of the benchmarks is on no path.
    command = [sys.executable, *(start if layout.ranks > 1 else []), "-m", "benchmarks.megatron_steps"]
    command += ["--candidate", candidate, "--recipe", recipe, "--overlap", overlap]
    for field in fields(sizes):
        command += [f"--{field.name.replace('_', '-')}", str(getattr(sizes, field.name))]
    for name in ("tp", "pp", "ranks", "micro_batches"):
        command += [f"--{name.replace('_', '-')}", str(getattr(layout, name))]
    command += ["--distributed-optimizer"] if layout.distributed_optimizer else []
    command += ["--steps", str(args.steps), "--timed", str(args.timed), "--settle", str(args.settle)]
    command += ["--lr", str(args.lr), "--json", str(report)]
    command += ["--seeds", *map(str, args.seeds), "--seed-is", args.seed_is, "--device", args.device]
    variables = {"PYTHONPATH": in_front(args.te_pythonpath)} if candidate == "te" else {}
    variables |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    if layout.tp > 1:
        # Megatron asks for the first. The second keeps Transformer Engine's userbuffers from making multicast objects.
        variables |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "UB_SKIPMC": "1"}
    left = min(args.limit, args.end - time.monotonic())
    status, seconds, lines = run_command(command, left, echo=False, **variables)
    found = json.loads(report.read_text()) if report.exists() else {"runs": []}
    row |= {"seconds": seconds, "version": found.get("version"), "peak_gib": found.get("peak_gib")}
    row["schedules"] = found.get("schedules")
    row["losses"] = [run["losses"] for run in found["runs"]]
    if status != 0 or len(found["runs"]) < len(args.seeds):
        print(*lines[-30 * layout.ranks :], sep="\n", flush=True)
        said = "the time was up" if status is None else last_words(lines)
        row["error"] = f"{len(found['runs'])} of {len(args.seeds)} seeds trained: {said[:200]}"
    elif not all(math.isfinite(loss) for losses in row["losses"] for loss in losses):
        row["error"] = "a loss is not finite"
    elif overlap == "on" and row["schedules"] is not None and not OVERLAPPED & set(row["schedules"]):
        row["error"] = f"overlap is on, but te_lite's GEMMs ran as {row['schedules']}"
    if found["runs"] and "gpu_us" in (last := found["runs"][-1]):
        tokens = 1e6 * sizes.micro_batch * sizes.sequence * layout.micro_batches * layout.dp
        row |= {name: last[name] for name in ("gpu_us", "wall_us", "spread")}
        row |= {"tokens_s": tokens / last["gpu_us"], "wall_tokens_s": tokens / last["wall_us"]}
    return row


def own_gpus(args: argparse.Namespace) -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them, each for recipes of its own; [""] where all recipes take turns."""
    if args.layout.ranks > 1 or torch.device(args.device).type != "cuda":
        return [""]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return gpus[: len(args.recipes)]


def summary(rows: Sequence[dict]) -> str:
    columns = {"tokens_s": 0, "wall_tokens_s": 0, "over_te": 3, "wall_over_te": 3, "loss_ratio": 2, "max off": 4}
    columns |= {"speedup": 3, "wall_speedup": 3, "peak_gib": 1}

    def cell(row: dict, name: str) -> str:
        value = max(row["off"]) if name == "max off" and "off" in row else row.get(name)
        return "-" if value is None else f"{value:.{columns[name]}f}"

    lines = []
    for row in rows:
        last = [f"{losses[-1]:.4f}" for losses in row["losses"]]
        cells = [cell(row, name) for name in columns]
        lines.append([row["candidate"], row["recipe"], row["overlap"], *cells, " ".join(last), row["error"] or ""])
    return result_files.text_table(("candidate", "recipe", "overlap", *columns, "last losses", "error"), lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with `sizes` and `layout`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--overlap", nargs="+", default=["off"], choices=("off", "on"), help="of communication")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks, with sequence parallelism")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--ranks", type=int, default=0, help="default: tp * pp; more are data parallel")
    parser.add_argument(
        "--micro-batches", type=int, default=0, help=f"of a step; default: 1, in a pipeline {PIPELINE_BATCHES}"
    )
    parser.add_argument("--distributed-optimizer", action="store_true", help="Megatron's")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--timed", type=int, help="further steps, which are timed; default 30, on the CPU 2")
    parser.add_argument("--settle", type=float, help="seconds of training before them; default 8, on the CPU 0")
    parser.add_argument("--rounds", type=int, default=0, help="as --steps, where it is not 0")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--seeds", type=int, default=len(SEEDS), choices=range(1, 5), help="1: no loss_ratio, less time"
    )
    parser.add_argument("--seed-is", default="rounding", choices=list(MEANING), help="what two seeds differ by")
    parser.add_argument("--te-pythonpath", default=os.environ.get("TE_PYTHONPATH"), help="PYTHONPATH of its processes")
    parser.add_argument("--allow-alias", action="store_true", help="te_lite's alias may stand for it; for tests")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=f"default {field.default}")
    parser.add_argument("--limit", type=float, default=PROCESS_S, help="seconds of each process")
    parser.add_argument("--total-limit", type=float, default=TOTAL_S, help="seconds; no process outlasts them")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for megatron.json, or megatron_tp2_pp1.json")
    args = parser.parse_args(argv)
    args.steps = args.rounds or args.steps
    args.seeds = SEEDS[: args.seeds]
    args.end = time.monotonic() + args.total_limit
    cpu = torch.device(args.device).type == "cpu"
    args.timed = (2 if cpu else 30) if args.timed is None else args.timed
    args.settle = (0.0 if cpu else 8.0) if args.settle is None else args.settle
    args.sizes = Sizes(
        **{name: getattr(args, name) or value for name, value in asdict(SMOKE if cpu else Sizes()).items()}
    )
    if args.tp < 1 or args.pp < 1:
        parser.error(f"--tp {args.tp} --pp {args.pp}: must be at least 1")
    ranks, stage = args.ranks or args.tp * args.pp, args.tp * args.pp
    if ranks % stage:
        parser.error(f"--ranks {ranks}: must be a multiple of --tp {args.tp} times --pp {args.pp}")
    if not cpu and ranks > torch.cuda.device_count():
        parser.error(f"{ranks} ranks need as many GPUs; {torch.cuda.device_count()} are visible")
    batches = args.micro_batches or (PIPELINE_BATCHES if args.pp > 1 else 1)
    args.layout = Layout(args.tp, args.pp, ranks // stage, batches, args.distributed_optimizer)
    if problem := args.layout.problem(args.sizes, args.overlap):
        parser.error(problem)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    sizes, layout = args.sizes, args.layout
    version, why = te_version(args.te_pythonpath)
    if version is not None and ALIAS in version and not args.allow_alias:
        version, why = None, f"Transformer Engine is left out: what is imported is te_lite's alias, {version}."
    left_out = [] if version else [why]
    if version and "on" in args.overlap:
        refused = [recipe for recipe in args.recipes if recipe in NO_USERBUFFERS]
        left_out += [f"te {recipe} with overlap is left out: its userbuffers do not take it." for recipe in refused]
    todo, rows = list(jobs(args.recipes, version is not None, args.overlap)), list[dict]()
    if "bf16" in args.recipes and layout.ranks == 1:
        todo.append(("local", "bf16", "off"))
    tree = args.tree_hash or result_files.tree_hash(ROOT / "te_lite")
    with tempfile.TemporaryDirectory() as folder:

        def on_gpu(gpu: str, recipes: Sequence[str]) -> None:
            """The processes of these recipes, one after the other."""
            for candidate, recipe, overlap in [job for job in todo if job[1] in recipes]:
                name = f"{candidate} {recipe}" + (" overlap" if overlap == "on" else "")
                if time.monotonic() >= args.end:
                    left_out.append(f"{name} is left out: {args.total_limit:g} s were used up before it.")
                    continue
                print(f"--- {name}", flush=True)
                rows.append(measure(candidate, recipe, overlap, sizes, layout, args, Path(folder), gpu))

        gpus = own_gpus(args)
        with ThreadPoolExecutor(len(gpus)) as pool:
            list(pool.map(on_gpu, gpus, [args.recipes[i :: len(gpus)] for i in range(len(gpus))]))
    rows.sort(key=lambda row: todo.index((row["candidate"], row["recipe"], row["overlap"])))
    compare(rows)
    result_files.write_results(
        args.out / layout.file, "megatron" if layout.ranks == 1 else "megatron_ranks", rows, tree=tree,
        device=args.device, left_out=left_out, peers={"transformer_engine": version} if version else {},
        bars=bars(rows), seed=MEANING[args.seed_is], steps=args.steps, timed=args.timed, settle=args.settle,
        lr=args.lr, window=WINDOW,
        ranks=layout.ranks, **asdict(layout), **asdict(sizes),
    )  # fmt: skip
    said = [f"{'holds' if holds else 'FAILS'}  {name}" for name, holds in bars(rows).items()]
    print(summary(rows), *said, *left_out, sep="\n")
    return 1 if any(row["error"] for row in rows) or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
