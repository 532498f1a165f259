"""What a run leaves behind: the progress bar, the loss curve, a JSON log and the summary."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

from tqdm import tqdm

import te_lite as te

from .checkpoint import History
from .data import Corpus, unigram_entropy
from .mesh import Mesh
from .model import GPT
from .moe import busiest

SMOOTHING = 20  # steps that the reported training loss is the mean of


class Progress:
    """A tqdm bar on rank 0, nothing elsewhere; call it as Trainer.run's on_step."""

    def __init__(self, args: Namespace, done: int, mesh: Mesh) -> None:
        total = args.stop_at or args.steps
        # a log file would otherwise get a line of control characters every half second
        interval = 0.5 if sys.stderr.isatty() else 10.0
        self.bar = tqdm(total=total, initial=done, unit="step", disable=not mesh.is_main, mininterval=interval)

    def __call__(self, step: int, loss: float, tokens_per_second: float) -> None:
        self.bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self) -> None:
        self.bar.close()


def final_train_loss(losses: list[float]) -> float:
    tail = losses[-SMOOTHING:]
    return sum(tail) / len(tail)


def summarise(args: Namespace, history: History, corpus: Corpus, mesh: Mesh, model: GPT) -> dict[str, object]:
    """The run's numbers, plain values throughout."""
    step, held_out = max(history.held_out.items())
    entropy = unigram_entropy(corpus)
    return {
        "recipe": args.recipe,
        "tp": mesh.tp_size,
        "dp": mesh.dp_size,
        "ep": mesh.ep_size,
        "experts": args.experts,
        "busiest_expert": busiest(model),
        "sequence_parallel": args.sequence_parallel,
        "launcher": mesh.launcher,
        "device": mesh.device.type,
        "data": corpus.source,
        "data_sha256": corpus.digest,
        "steps": step,
        "train_loss": final_train_loss(history.losses),
        "held_out_loss": held_out,
        "unigram_entropy": entropy,
        "held_out_over_unigram": held_out / entropy,
        "tokens_per_second": history.tokens_per_second,
        "training_seconds": history.seconds,
    }


def written(args: Namespace, history: History) -> list[str]:
    """A line for each file or folder that the run left."""
    lines = [f"{'loss curve':<17}{args.plot}"]
    if args.log_json is not None:
        lines.append(f"{'log':<17}{args.log_json}")
    if args.checkpoint_dir is not None:
        step = len(history.losses)
        lines.append(f"{'checkpoint':<17}{args.checkpoint_dir} at step {step}; --resume --steps N continues it")
    return lines


def format_summary(summary: dict, files: list[str], report_rows: list[dict]) -> str:
    s = summary
    parallel = f"tp {s['tp']}, dp {s['dp']}, sequence parallel {'on' if s['sequence_parallel'] else 'off'}"
    experts = []
    if s["experts"]:
        loads = ", ".join(f"{load:.2f}" for load in s["busiest_expert"])
        experts = [f"experts          {s['experts']}, ep {s['ep']}; the busiest of each layer had {loads} even shares"]
    bits = s["held_out_loss"] / math.log(2)
    return "\n".join(
        [
            "",
            f"run              {s['recipe']}, {parallel}, {s['device']}, started by {s['launcher']}",
            *experts,
            f"data             {s['data']}",
            f"steps            {s['steps']}",
            f"train loss       {s['train_loss']:.4f} nats a byte (mean of the last {SMOOTHING} steps)",
            f"held-out loss    {s['held_out_loss']:.4f} nats a byte ({bits:.3f} bits)",
            f"unigram entropy  {s['unigram_entropy']:.4f} nats a byte of the held-out text; "
            f"the model needs {100 * s['held_out_over_unigram']:.1f}% of it",
            f"speed            {s['tokens_per_second']:,.0f} tokens/s over {s['training_seconds']:.0f} s",
            *files,
            "",
            "recipe and schedule of each GEMM:",
            te.format_report(report_rows),
        ]
    )


def write_log(path: Path, args: Namespace, history: History, summary: dict, report_rows: list[dict]) -> None:
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    log = {
        "summary": summary,
        "options": options,
        "losses": history.losses,
        "held_out": {str(step): loss for step, loss in history.held_out.items()},
        "gemms": report_rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(log, indent=1) + "\n")


def plot_curve(path: Path, history: History, summary: dict) -> None:
    """Training loss a step, held-out losses as points, and the unigram entropy as the line to beat."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    axes.plot(range(1, len(history.losses) + 1), history.losses, label="train", linewidth=1)
    steps = sorted(history.held_out)
    axes.plot(steps, [history.held_out[s] for s in steps], "o", label="held out")
    axes.axhline(summary["unigram_entropy"], color="grey", linestyle="--", label="unigram entropy (held out)")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", ylim=(0, None))
    experts = f", {summary['experts']} experts, ep {summary['ep']}" if summary["experts"] else ""
    axes.set_title(f"{summary['recipe']}, tp {summary['tp']}{experts}, {summary['device']}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
