"""Pictures of the committed rows of overlap: docs/img/overlap_gemms.png and docs/img/overlap_mlp.png.

    python benchmarks/overlap_plot.py [--results FOLDER] [--out FOLDER]        # needs matplotlib

overlap_gemms: for each operation the share of the limit, the longer of GEMM and copies, that every way reaches.
overlap_mlp: forward and backward of an MLP by Collective and with overlap, over its GEMMs alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

from benchmarks.report import RESULTS, ROOT, load, provenance

IMAGES = ROOT / "docs" / "img"
WAYS = ("collective", "torch fused", "ring", "fused")
Bars = dict[str, dict[str, float]]  # operation -> way -> value


def of_limit(content: dict) -> Bars:
    """Shares of the limit."""
    bars: Bars = {}
    for row in content["rows"]:
        if row["candidate"] in WAYS and row["of_limit"]:
            bars.setdefault(f"{row['op']} {row['shape']} {row['dtype']}", {})[row["candidate"]] = row["of_limit"]
    return bars


def over_gemms(content: dict) -> Bars:
    """Times over those of the GEMMs alone."""
    bars: Bars = {}
    for row in content["rows"]:
        if not row["error"]:
            ways = bars.setdefault(f"{row['shape']} {row['recipe']}", {})
            ways["collective"] = row["collective_gpu_us"] / row["gemms_gpu_us"]
            ways[row["method"]] = row["against_gemms"]
    return bars


def draw(bars: Bars, title: str, label: str, note: str, path: Path) -> None:
    """One group of bars an operation, one bar a way; a line at 1."""
    from matplotlib.figure import Figure

    ways = list(dict.fromkeys(way for one in bars.values() for way in one))
    figure = Figure(figsize=(max(6.0, 0.7 * len(bars)), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        places = [(place + i * width, one[way]) for place, one in enumerate(bars.values()) if way in one]
        axes.bar([place for place, _ in places], [value for _, value in places], width, label=way)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(bars))], list(bars), rotation=60, ha="right")
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.legend(ncols=len(ways), fontsize="small", loc="lower center")
    figure.supxlabel(note, fontsize=6)
    figure.savefig(path, dpi=110, metadata={"Description": note})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the pictures")
    args = parser.parse_args(argv)
    gemms, mlp = load(args.results, "overlap_gemms"), load(args.results, "overlap")
    title, label = "All-gather + GEMM, GEMM + reduce-scatter", "share of the limit (1: nothing left)"
    draw(of_limit(gemms), title, label, provenance(gemms), args.out / "overlap_gemms.png")
    title, label = "LayerNormMLP, forward and backward", "time over the GEMMs alone (lower is better)"
    draw(over_gemms(mlp), title, label, provenance(mlp), args.out / "overlap_mlp.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
