"""The picture of README.md: one LayerNormMLP by te_lite and by its peers, from committed results.

    python benchmarks/peers_plot.py [--results FOLDER] [--out FOLDER]        # needs matplotlib

GPU time of forward plus backward, a panel for each large shape, a group of bars for each recipe: Transformer Engine and
te_lite, which took turns in one process, and the bare GEMMs. Weight gradients are added to main_grad.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

from benchmarks.report import RESULTS, ROOT, load, provenance

IMAGE = ROOT / "docs" / "img" / "peers.png"
MODULE = "LayerNormMLP"
RECIPES = ("bf16", "delayed", "current", "blockwise")
NAMES = {"te": "Transformer Engine", "te_lite": "te_lite", "gemms": "GEMMs alone"}
COLORS = ("tab:green", "tab:blue", "lightsteelblue")
Bars = dict[str, dict[str, float]]  # recipe -> peer -> milliseconds


def peers(content: dict, shape: str) -> Bars:
    """The bars of one shape."""
    rows = {(r["recipe"], r["candidate"]): r for r in content["rows"]
            if (r["shape"], r["module"], r["call"]) == (shape, MODULE, "main_grad")}  # fmt: skip
    return {
        recipe: {name: rows[recipe, candidate]["gpu_us"] / 1000 for candidate, name in NAMES.items()}
        for recipe in RECIPES
    }


def draw(content: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    shapes = [shape for shape in content["shapes"] if shape["name"] != "small"]
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), sharey=True), shapes, strict=True):
        bars = peers(content, shape["name"])
        names = list(next(iter(bars.values())))
        width = 0.84 / len(names)
        for i, (name, color) in enumerate(zip(names, COLORS, strict=True)):
            heights = [one[name] for one in bars.values()]
            drawn = axes.bar([group + i * width for group in range(len(bars))], heights, width, label=name, color=color)
            axes.bar_label(drawn, fmt="%.1f", fontsize=7)
        axes.set_xticks([group + 0.42 - width / 2 for group in range(len(bars))], list(bars))
        axes.set_title(f"{shape['tokens']} tokens, hidden {shape['hidden']}, ffn {shape['ffn']}", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"{MODULE}, forward + backward:\nGPU ms (lower is better)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize="small")
    figure.supxlabel(provenance(content), fontsize=6)
    figure.savefig(path, dpi=120, metadata={"Description": provenance(content)})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--out", type=Path, default=IMAGE.parent, help="folder of the picture")
    args = parser.parse_args(argv)
    content = load(args.results, "peers")
    if content is None:
        parser.error(f"{args.results} has no peers.json: run benchmarks/peers.py on a GPU")
    draw(content, args.out / IMAGE.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
