"""How far te_lite's losses are from Transformer Engine's: what benchmarks/megatron_gpt.py says of its rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

MAX_LOSS_RATIO, WINDOW = 2.0, 2
LEAST_TOKENS_RATIO = 1.0


def apart(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [round(abs(x - y), 6) for x, y in zip(a, b, strict=True)]


def noise_of(losses: Sequence[Sequence[float]]) -> list[float]:
    """At each step, by how much two seeds are apart at most, there or nearby."""
    seeds = [max(pairs) for pairs in zip(*(apart(*pair) for pair in itertools.combinations(losses, 2)), strict=True)]
    return [max(seeds[max(0, t - WINDOW) : t + WINDOW + 1]) for t in range(len(seeds))]


def compare(rows: list[dict]) -> None:
    """te_lite's rows get their ratios to Transformer Engine's, Megatron's own its distance to both. Rows with overlap
    get their ratios to those without."""
    found = {(row["candidate"], row["recipe"], row["overlap"]): row for row in rows if not row["error"]}
    for (candidate, recipe, overlap), row in found.items():
        if overlap == "on" and (without := found.get((candidate, recipe, "off"))):
            row["speedup"] = row["tokens_s"] / without["tokens_s"]
            row["wall_speedup"] = row["wall_tokens_s"] / without["wall_tokens_s"]
        theirs = found.get(("te", recipe, overlap))
        if candidate == "te" or theirs is None:
            continue
        off = [max(seeds) for seeds in zip(*map(apart, row["losses"], theirs["losses"]), strict=True)]
        row |= {"off": off, "over_te": row["tokens_s"] / theirs["tokens_s"]}
        row |= {"wall_over_te": row["wall_tokens_s"] / theirs["wall_tokens_s"]}
        if len(theirs["losses"]) < 2:
            continue
        noise = noise_of(theirs["losses"])
        ratios = [a / b if b else math.inf if a else 0.0 for a, b in zip(off, noise, strict=True)]
        row |= {"loss_ratio": max(ratios), "worst_step": ratios.index(max(ratios)), "noise": noise}
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
            name = row["recipe"] + (", overlap" if row["overlap"] == "on" else "")
            if "loss_ratio" in row:
                held[f"{name}: loss_ratio <= {MAX_LOSS_RATIO:g}"] = row["loss_ratio"] <= MAX_LOSS_RATIO
            held[f"{name}: over_te >= {LEAST_TOKENS_RATIO:g}"] = row["over_te"] >= LEAST_TOKENS_RATIO
    return held
