"""Trains the same model on the same data and seed with every recipe at tp 1 and tp 2 and plots the curves together.

    python examples/compare_recipes.py

writes docs/img/recipes.png and docs/img/recipes.json, prints the final losses relative to bf16 at tp 1, and exits
with 1 if one is more than 2% away. Runs that are already in --runs with the same options are not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
RECIPES = ("bf16", "delayed", "current")
TP_SIZES = (1, 2)
BASELINE = ("bf16", 1)
SMOOTHING = 10  # steps in the running mean of the ratio panel
BOUND = 0.02

Key = tuple[str, int]


def command(recipe: str, tp: int, log: Path, extra: list[str]) -> list[str]:
    run = [str(EXAMPLES / "train_gpt.py"), "--recipe", recipe, "--tp", str(tp)]
    run += ["--sequence-parallel"] if tp > 1 else []
    run += ["--log-json", str(log), "--plot", str(log.with_suffix(".png")), *extra]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)] if tp > 1 else []
    return [sys.executable, *launcher, *run]


def train(recipe: str, tp: int, folder: Path, extra: list[str]) -> dict:
    """The JSON log of one run, from an earlier call if its command was the same."""
    log = folder / f"{recipe}_tp{tp}.json"
    line = command(recipe, tp, log, extra)
    recorded = log.with_suffix(".command")
    if not (log.is_file() and recorded.is_file() and json.loads(recorded.read_text()) == line):
        folder.mkdir(parents=True, exist_ok=True)
        recorded.unlink(missing_ok=True)
        subprocess.run(line, check=True)
        recorded.write_text(json.dumps(line))
    return json.loads(log.read_text())


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each `width` consecutive values; shorter by width - 1."""
    return [sum(values[i - width : i]) / width for i in range(width, len(values) + 1)]


def compare(logs: dict[Key, dict]) -> dict:
    """Final losses and their ratios to the baseline, as plain values."""
    base = logs[BASELINE]["summary"]
    rows = []
    for (recipe, tp), log in logs.items():
        summary = log["summary"]
        rows.append(
            {
                "recipe": recipe,
                "tp": tp,
                "train_loss": summary["train_loss"],
                "held_out_loss": summary["held_out_loss"],
                "train_ratio": summary["train_loss"] / base["train_loss"],
                "held_out_ratio": summary["held_out_loss"] / base["held_out_loss"],
                "tokens_per_second": summary["tokens_per_second"],
            }
        )
    worst = max(abs(row[key] - 1) for row in rows for key in ("train_ratio", "held_out_ratio"))
    first = {key: base[key] for key in ("data", "data_sha256", "device", "steps", "unigram_entropy")}
    return {**first, "options": logs[BASELINE]["options"], "bound": BOUND, "worst": worst, "runs": rows}


def plot(path: Path, logs: dict[Key, dict], entropy: float) -> None:
    """Left: the six curves. Right: each run's smoothed loss over the baseline's, with the 2% band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, ratios) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    colours = dict(zip(RECIPES, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    base = running_mean(logs[BASELINE]["losses"], SMOOTHING)
    for (recipe, tp), log in logs.items():
        style = {
            "color": colours[recipe],
            "linestyle": "-" if tp == 1 else ":",
            "label": f"{recipe}, tp {tp}",
        }
        losses = log["losses"]
        curves.plot(range(1, len(losses) + 1), losses, linewidth=1, **style)
        smooth = running_mean(losses, SMOOTHING)
        percent = [100 * (loss / reference - 1) for loss, reference in zip(smooth, base, strict=True)]
        ratios.plot(range(SMOOTHING, len(losses) + 1), percent, linewidth=1, **style)
    curves.axhline(entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy (held out)")
    curves.set(xlabel="step", ylabel="training loss (nats a byte)", ylim=(0, None))
    curves.legend(fontsize=8)
    ratios.axhspan(-100 * BOUND, 100 * BOUND, color="grey", alpha=0.15)
    ratios.set(xlabel="step", ylabel=f"loss against bf16, tp 1 (%), mean of {SMOOTHING} steps")
    ratios.set(ylim=(-250 * BOUND, 250 * BOUND))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Options not listed here go to train_gpt.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--plot", type=Path, default=EXAMPLES.parent / "docs" / "img" / "recipes.png")
    parser.add_argument("--runs", type=Path, default=Path("out/recipes"), help="folder of the runs' logs")
    args, extra = parser.parse_known_args(argv)
    logs = {(recipe, tp): train(recipe, tp, args.runs, extra) for tp in TP_SIZES for recipe in RECIPES}
    result = compare(logs)
    plot(args.plot, logs, result["unigram_entropy"])
    args.plot.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'recipe':<9}{'tp':>3}{'train':>9}{'held out':>10}{'train ratio':>13}{'held-out ratio':>16}")
    for row in result["runs"]:
        print(
            f"{row['recipe']:<9}{row['tp']:>3}{row['train_loss']:>9.4f}{row['held_out_loss']:>10.4f}"
            f"{row['train_ratio']:>13.4f}{row['held_out_ratio']:>16.4f}"
        )
    verdict = "within" if result["worst"] <= BOUND else "NOT within"
    print(f"largest difference {100 * result['worst']:.2f}%: {verdict} {100 * BOUND:.0f}%")
    return int(result["worst"] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
