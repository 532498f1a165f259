"""Tables of documents, as benchmarks/report.py puts them there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int) -> str:
    """A table whose first text_columns are left-aligned and whose others are numbers."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def number(value: float | None, digits: int = 0, mark: str = "") -> str:
    return "" if value is None else f"{round(value, digits) + 0.0:.{digits}f}{mark}"  # + 0.0: no "-0"


def ratio(a: float | None, b: float | None) -> str:
    return number(a / b, 2) if a and b else ""


def provenance(content: dict) -> str:
    """Where the numbers below come from."""
    where = f"{content['device']}, driver {content['driver']}, CUDA {content['cuda']}"
    versions = f"torch {content['torch']}, triton {content['triton']}, Python {content['python']}"
    return f"Measured {content['date'][:10]} on {where}, {versions}; te_lite tree `{content['tree'][:12]}`."


def gpu_mark(row: dict) -> str:
    """An asterisk where the device caught up with the host in most samples: launch gaps may be in it."""
    return "\\*" if row.get("exposed", 0) * 2 > row.get("samples", 0) else ""


def render_peers(content: dict) -> str:
    """A line for each shape, module, recipe and way of calling: te_lite beside the others of the same run."""
    groups: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in content["rows"]:
        key = (row["shape"], row["module"], row["recipe"], row["call"])
        groups.setdefault(key, {})[row["candidate"]] = row
    lines = []
    for key, found in groups.items():
        ours, theirs = (found.get(name, {}) for name in ("te_lite", "te"))
        cells = [number(row.get("gpu_us"), mark=gpu_mark(row)) for row in (ours, theirs)]
        cells += [number(ours.get("over_te"), 2)]
        cells += [number(found.get(name, {}).get("gpu_us")) for name in ("torch", "gemms")]
        cells += [number(ours.get("over_gemms"), 2)]
        cells += [number(row.get(field)) for field in ("wall_us", "kept_mib") for row in (ours, theirs)]
        cells += [number(row.get("error_pct"), 2) for row in (ours, theirs)]
        lines.append([*key, *cells])
    header = ["shape", "module", "recipe", "call", "te_lite us", "TE us", "te_lite / TE", "torch us", "GEMMs alone us"]
    header += ["te_lite / GEMMs", *(f"{what}, {who}" for what in ("wall us", "MiB kept") for who in ("te_lite", "TE"))]
    header += ["error %, te_lite", "error %, TE"]
    left_out = "".join(f" {said}" for said in content["left_out"])
    about = f"Transformer Engine {content['peers']['transformer_engine']}." if content["peers"] else ""
    parts = [f"{provenance(content)} {about}{left_out}", markdown(header, lines, text_columns=4)]
    if any(gpu_mark(row) for row in content["rows"]):
        parts.append("\\* the device waited for the host in most samples: launch gaps are in this number.")
    return "\n\n".join(parts)


_COUNTS = ("allocations", "torch_allocations")


def render_host(content: dict) -> str:
    """A line for each shape, module and recipe: a step of te_lite, what it is made of, and what it is compared with."""
    parts = ("autocast", "begin", "look_up", "launches", "rest")
    lines = []
    for row in content["rows"]:
        times = [number(row[f"{name}_us"]) for name in ("step", *parts, "function", "torch")]
        counts = [number(row[name]) for name in _COUNTS if name in row]  # of files since they are counted
        lines.append([row["shape"], row["module"], row["recipe"], *times, number(row["ratio"], 2), *counts])
    header = ["shape", "module", "recipe", "step us", *parts, "Function alone", "torch us", "te_lite / torch"]
    header += ["allocations", "torch's"] if lines and len(lines[0]) > len(header) else []
    return f"{provenance(content)}\n\n{markdown(header, lines, text_columns=3)}"


# Of grouped.py: section -> its title and the columns of numbers, by the name of the field, digits and heading.
_GPU, _HOST, _RATE = ("gpu_us", 0, "GPU us"), ("host_us", 0, "host us"), ("tflops", 0, "TFLOP/s")
_TORCH, _TE = ("over_torch", 2, "torch / this"), ("over_te", 2, "this / TE")
GROUPED = {
    "steps": ("Forward and backward of a call, gradients to autograd", (_GPU, _HOST, _RATE, _TORCH)),
    "modules": ("Forward and backward of the module, gradients added in fp32", (_GPU, _HOST, _RATE, _TORCH, _TE)),
    "products": ("One product of operands that lie ready", (_GPU, _RATE, _TORCH)),
    "casts": ("Quantization of all groups", (_GPU, ("gbps", 0, "GB/s"))),
}


def render_grouped(content: dict) -> str:
    """A table for each section of grouped.py, its rows in the order in which they were measured."""
    groups, tokens, k, n = content["shape"]
    peers = ", ".join(name for name in content["peers"] if name != "te_lite") or "none"
    shape = f"{groups} experts, {tokens} tokens, K {k}, N {n}."
    parts = [f"{provenance(content)} {shape} Other libraries that were there: {peers}."]
    for section, (title, columns) in GROUPED.items():
        lines = []
        for row in content["rows"]:
            if row["section"] == section and not row["error"]:
                numbers = (number(row.get(name), digits) for name, digits, _ in columns)
                lines.append([row["split"], row["what"], row["candidate"], *numbers])
        if lines:
            header = ["tokens", "what", "by", *(heading for *_, heading in columns)]
            parts += [f"{title}:", markdown(header, lines, text_columns=3)]
    failed = [f"{row['what']} by {row['candidate']} ({row['split']})" for row in content["rows"] if row["error"]]
    return "\n\n".join([*parts, *([f"Not measured, because they failed: {'; '.join(failed)}."] if failed else [])])


def render_llama(content: dict) -> str:
    lines = []
    for row in content["rows"]:
        cells = [number(row.get("tokens_s")), number(row.get("of_bf16"), 2), number(row.get("peak_gib"), 1)]
        marks = ["yes" if row[mark] else "" for mark in ("fused", "compiled")]
        lines.append([row["library"], row["recipe"], *marks, *cells])
    header = ["library", "recipe", "fused", "compiled", "tokens/s", "of bf16", "peak GiB"]
    left_out = "".join(f" {said}" for said in content["left_out"])
    about = f"{content['layers']} layers, {content['tokens']} tokens a step.{left_out}"
    return f"{provenance(content)} {about}\n\n{markdown(header, lines, text_columns=4)}"


def losses_apart(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The root of the mean squared distance of losses, over all steps, of each run of `some` from each of `others`."""
    squares = [(x - y) ** 2 for a in some for b in others for x, y in zip(a, b, strict=True)]
    return (sum(squares) / len(squares)) ** 0.5


def render_megatron(content: dict) -> str:
    lines = []
    theirs = {row["recipe"]: row["losses"] for row in content["rows"] if row["candidate"] == "te" and row["losses"]}
    for row in content["rows"]:
        cells = [number(row.get("tokens_s")), number(row.get("over_te"), 2), number(row.get("wall_over_te"), 2)]
        runs, mean = theirs.get(row["recipe"], ()), None
        if row["candidate"] != "te" and row["losses"] and len(runs) > 1:
            seeds = [losses_apart([a], [b]) ** 2 for a, b in itertools.combinations(runs, 2)]
            mean = losses_apart(row["losses"], runs) / (sum(seeds) / len(seeds)) ** 0.5
        cells += [number(row.get("loss_ratio"), 2), number(mean, 2), number(row.get("peak_gib"), 1)]
        lines.append([row["candidate"], row["recipe"], *cells])
    header = ["candidate", "recipe", "tokens/s", "of TE", "of TE, wall", "losses", "losses, all steps", "peak GiB"]
    left_out = "".join(f" {said}" for said in content["left_out"])
    tokens = content["micro_batch"] * content["sequence"]
    about = f"{content['layers']} layers, {tokens} tokens a step, {content['steps']} steps. Seeds: {content['seed']}."
    return f"{provenance(content)} {about}{left_out}\n\n{markdown(header, lines, text_columns=2)}"
