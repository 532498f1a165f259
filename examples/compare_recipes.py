"""Trains the same model on the same data and seed with every recipe and plots the curves together.

    python examples/compare_recipes.py                  # 10 to 15 minutes on 2 CPU cores
    python examples/compare_recipes.py --experts        # train_moe.py: a mixture of experts, ep in the place of tp

All recipes run at tp 1. At tp 2 (--ranks), sequence parallel, only those of CUT_RECIPES run, so that the whole stays
short; they need as many GPUs, or none. Writes docs/img/recipes.png (--experts: moe.png) and its .json, prints the final
losses relative to bf16 at tp 1, and exits with 1 if one is more than BOUND away. Runs that are already in --runs with
the same options are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
RECIPES = ("bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")
CUT_RECIPES = ("bf16", "current", "mxfp8", "blockwise")
BASELINE = ("bf16", 1)
SMOOTHING = 10  # steps in the running mean of the ratio panel
BOUND = 0.03
TAIL_LINES = 20  # of a failed run's output

Key = tuple[str, int]  # recipe and ranks


def runs(recipes: Sequence[str], gpus: int, cuts: Sequence[int] = (2,)) -> list[Key]:
    """(recipe, tp or ep), the longest first; gpus: 0 for CPU ranks. The baseline is always among them."""
    wanted = [recipe for recipe in CUT_RECIPES if recipe in recipes]
    pairs = [(recipe, ranks) for ranks in cuts if not 0 < gpus < ranks for recipe in wanted]
    return pairs + [(recipe, 1) for recipe in RECIPES if recipe in recipes or (recipe, 1) == BASELINE]


def command(recipe: str, ranks: int, log: Path, extra: Sequence[str], cut: str) -> list[str]:
    script = EXAMPLES / {"tp": "train_gpt.py", "ep": "train_moe.py"}[cut]
    run = [str(script), "--recipe", recipe, f"--{cut}", str(ranks)]
    run += ["--sequence-parallel"] if cut == "tp" and ranks > 1 else []
    run += ["--log-json", str(log), "--plot", str(log.with_suffix(".png")), "--eval-every", "0", *extra]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, *run]


def visible_gpus(device: str) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here; [] where train_gpt.py will run on the CPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def places(keys: Sequence[Key], gpus: Sequence[str], parallel: int) -> dict[Key, dict[str, str]]:
    """Environment of each run: GPUs in turn, and an equal share of the cores."""
    threads = (os.cpu_count() or 1) // (min(parallel, len(keys)) * max(ranks for _, ranks in keys))
    environments, first = {}, 0
    for key in keys:
        environments[key] = {"OMP_NUM_THREADS": str(max(1, threads))}
        if gpus:
            chosen = [gpus[(first + i) % len(gpus)] for i in range(key[1])]
            environments[key]["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
            first += key[1]
    return environments


def train(key: Key, folder: Path, extra: Sequence[str], place: dict[str, str], cut: str) -> dict:
    """The JSON log of one run, from an earlier call if its command was the same. cut: "tp" or "ep"."""
    recipe, ranks = key
    log = folder / f"{recipe}_{cut}{ranks}.json"
    line = command(recipe, ranks, log, extra, cut)
    recorded, printed = log.with_suffix(".command"), log.with_suffix(".txt")
    if not (log.is_file() and recorded.is_file() and json.loads(recorded.read_text()) == line):
        folder.mkdir(parents=True, exist_ok=True)
        recorded.unlink(missing_ok=True)
        begin = time.monotonic()
        with printed.open("w") as output:
            done = subprocess.run(line, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **place})
        if done.returncode:
            tail = "\n".join(printed.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise RuntimeError(f"{recipe} at {cut} {ranks} ended with status {done.returncode}; see {printed}\n{tail}")
        recorded.write_text(json.dumps(line))
        print(f"{recipe}, {cut} {ranks}: {time.monotonic() - begin:.0f} s", flush=True)
    return json.loads(log.read_text())


def train_all(
    keys: Sequence[Key], gpus: Sequence[str], parallel: int, folder: Path, extra: Sequence[str], cut: str = "tp"
) -> dict[Key, dict]:
    """Every run's log, `parallel` runs at once. The first failure is raised and nothing new is started."""
    environments = places(keys, gpus, parallel)
    with ThreadPoolExecutor(parallel) as pool:
        logs = {key: pool.submit(train, key, folder, extra, environments[key], cut) for key in keys}
        try:
            return {key: log.result() for key, log in logs.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def in_order(logs: dict[Key, dict]) -> list[tuple[Key, dict]]:
    return sorted(logs.items(), key=lambda item: (item[0][1], RECIPES.index(item[0][0])))


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each `width` consecutive values; shorter by width - 1."""
    return [sum(values[i - width : i]) / width for i in range(width, len(values) + 1)]


def compare(logs: dict[Key, dict], cut: str = "tp") -> dict:
    """Final losses and their ratios to the baseline, as plain values; `worst` is a distance from 1, or nan."""
    base = logs[BASELINE]["summary"]
    rows = []
    for (recipe, ranks), log in in_order(logs):
        summary = log["summary"]
        rows.append(
            {
                "recipe": recipe,
                cut: ranks,
                "train_loss": summary["train_loss"],
                "held_out_loss": summary["held_out_loss"],
                "train_ratio": summary["train_loss"] / base["train_loss"],
                "held_out_ratio": summary["held_out_loss"] / base["held_out_loss"],
                "tokens_per_second": summary["tokens_per_second"],
            }
        )
    distances = [abs(row[key] - 1) for row in rows for key in ("train_ratio", "held_out_ratio")]
    worst = max(distances) if all(d == d for d in distances) else float("nan")
    first = {key: base[key] for key in ("data", "data_sha256", "device", "steps", "unigram_entropy")}
    return {**first, "options": logs[BASELINE]["options"], "bound": BOUND, "worst": worst, "runs": rows}


def plot(path: Path, logs: dict[Key, dict], entropy: float, cut: str = "tp") -> None:
    """Left: the curves. Right: each run's smoothed loss over the baseline's, with the band of BOUND."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, ratios) = pyplot.subplots(1, 2, figsize=(11, 4.6))
    colours = {recipe: f"C{i}" for i, recipe in enumerate(RECIPES)}
    base = running_mean(logs[BASELINE]["losses"], SMOOTHING)
    for (recipe, ranks), log in in_order(logs):
        style = {
            "color": colours[recipe],
            "linestyle": {1: "-", 2: ":"}.get(ranks, "--"),
            "label": f"{recipe}, {cut} {ranks}",
        }
        losses = log["losses"]
        curves.plot(range(1, len(losses) + 1), losses, linewidth=1, **style)
        smooth = running_mean(losses, SMOOTHING)
        percent = [100 * (loss / reference - 1) for loss, reference in zip(smooth, base, strict=True)]
        ratios.plot(range(SMOOTHING, len(losses) + 1), percent, linewidth=1, **style)
    curves.axhline(entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy (held out)")
    curves.set(xlabel="step", ylabel="training loss (nats a byte)", ylim=(0, None))
    curves.legend(fontsize=7, ncols=2)
    ratios.axhspan(-100 * BOUND, 100 * BOUND, color="grey", alpha=0.15)
    ratios.set(xlabel="step", ylabel=f"loss against bf16, {cut} 1 (%), mean of {SMOOTHING} steps")
    ratios.set(ylim=(-150 * BOUND, 150 * BOUND))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Options not listed here go to train_gpt.py or train_moe.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--experts", action="store_true", help="train a mixture of experts: train_moe.py")
    parser.add_argument("--plot", type=Path, help="default: docs/img/recipes.png, moe.png with --experts")
    parser.add_argument("--runs", type=Path, help="folder of the runs' logs; default: out/recipes, out/moe")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="tp, or ep, of the runs that are cut")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1, help="runs at once; they share the cores")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=200)
    args, extra = parser.parse_known_args(argv)
    if args.parallel < 1:
        parser.error(f"--parallel {args.parallel}: must be at least 1")
    if min(args.ranks) < 2:
        parser.error(f"--ranks {min(args.ranks)}: must be at least 2; all recipes run on one rank as well")
    name, cut = ("moe", "ep") if args.experts else ("recipes", "tp")
    args.plot = args.plot or EXAMPLES.parent / "docs" / "img" / f"{name}.png"
    args.runs = args.runs or Path("out") / name
    gpus = visible_gpus(args.device)
    extra = ["--device", args.device, "--steps", str(args.steps), *extra]
    logs = train_all(runs(args.recipes, len(gpus), args.ranks), gpus, args.parallel, args.runs, extra, cut)
    result = compare(logs, cut)
    plot(args.plot, logs, result["unigram_entropy"], cut)
    args.plot.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'recipe':<19}{cut:>3}{'train':>9}{'held out':>10}{'train ratio':>13}{'held-out ratio':>16}")
    for row in result["runs"]:
        print(
            f"{row['recipe']:<19}{row[cut]:>3}{row['train_loss']:>9.4f}{row['held_out_loss']:>10.4f}"
            f"{row['train_ratio']:>13.4f}{row['held_out_ratio']:>16.4f}"
        )
    within = result["worst"] <= BOUND  # nan is not
    print(f"largest difference {100 * result['worst']:.2f}%: {'within' if within else 'NOT within'} {100 * BOUND:.0f}%")
    return int(not within)


if __name__ == "__main__":
    sys.exit(main())
