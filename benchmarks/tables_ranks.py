"""Tables of several GPUs, as benchmarks/report.py puts them into documents."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.tables import markdown, number, provenance, ratio


def shares_of_limit(content: dict, first: str) -> str:
    """A line for each operation, behind its column `first`, shape and type; every candidate's time and share."""
    candidates = list(dict.fromkeys(row["candidate"] for row in content["rows"] if not row["error"]))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in content["rows"]:
        key = (str(row[first]), row["shape"], row["dtype"], f"{row['m']}, {row['k']}, {row['n']}")
        cell = f"{number(row['gpu_us'])} ({number(row['of_limit'], 2)})" if not row["error"] else ""
        lines.setdefault(key, {})[row["candidate"]] = cell
    table = [[*key, *(cells.get(name, "") for name in candidates)] for key, cells in lines.items()]
    return markdown([first, "shape", "type", "M, K, N", *candidates], table, text_columns=4)


def render_overlap_gemms(content: dict) -> str:
    about = (
        f"{content['tp']} ranks, microseconds of the slowest; in brackets the limit, the longer of GEMM and copies "
        "alone, over that time. M of all ranks, K and N of the local GEMM."
    )
    return f"{provenance(content)} {about}{measured_twice(content['rows'])}\n\n{shares_of_limit(content, 'op')}"


def render_overlap_played(content: dict) -> str:
    about = "Microseconds of the slower GPU; played: how many ranks; in brackets the limit of bf16 over that time."
    return f"{provenance(content)} {about}\n\n{shares_of_limit(content, 'played')}"


def measured_twice(rows: list[dict]) -> str:
    """How far the times of overlap_gemms.py's second run are from the first, where there was one."""
    off = [(abs(row["again_us"] / row["gpu_us"] - 1), row) for row in rows if row.get("again_us") and row["gpu_us"]]
    if not off:
        return ""
    most, row = max(off, key=lambda pair: pair[0])
    where = f"{row['op']} {row['shape']} {row['dtype']}, {row['candidate']}"
    return (
        f" Measured twice in a row: {statistics.median(o for o, _ in off):.1%} apart (median), {most:.1%} at {where}."
    )


def render_overlap(content: dict) -> str:
    columns = ("gpu_us", "collective_gpu_us", "gemms_gpu_us", "host_us", "wall_us", "collective_wall_us")
    columns += ("graph_wall_us", "collective_graph_wall_us") * any("graph_wall_us" in row for row in content["rows"])
    lines = []
    for row in (row for row in content["rows"] if not row["error"]):
        ratios = [ratio(row["collective_gpu_us"], row["gpu_us"]), ratio(row["gpu_us"], row["gemms_gpu_us"])]
        numbers = [number(row.get(column)) for column in columns]
        lines.append([row["shape"], row["recipe"], row["method"], *numbers[:3], *ratios, *numbers[3:]])
    header = ["shape", "recipe", "method", "GPU us", "Collective", "GEMMs alone", "Collective / overlapped"]
    header += ["overlapped / GEMMs", "host us", "wall us", "Collective, wall us"]
    header += ["graph, wall us", "Collective, graph, wall us"][: len(columns) - 6]
    about = f"{content['tp']} ranks, microseconds of the slowest, forward and backward."
    return f"{provenance(content)} {about}\n\n{markdown(header, lines, text_columns=3)}"


def render_two_trees(content: dict) -> str:
    """A line for each exchange: of each schedule the share of the limit that the old tree reaches, and the new one."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in content["rows"]:
        *what, dtype, m, k, n, candidate = row["row"].split()
        key = (what[0], " ".join(what[1:]), dtype, f"{m}, {k}, {n}")
        shares = (number(row["old_share"], 3), number(row["new_share"], 3))
        lines.setdefault(key, {})[candidate] = row["error"] or ", ".join(shares)
    candidates = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    table = [[*key, *(cells.get(name, "") for name in candidates)] for key, cells in lines.items()]
    held = "; ".join(f"{name}: {'yes' if holds else 'no'}" for name, holds in content["criteria"].items())
    pairs = f"{content['pairs']} pairs of processes."
    about = f"The old tree is `{content['old_tree'][:12]}`. {pairs} {held[:1].upper()}{held[1:]}."
    header = ["op", "shape", "type", "M, K, N", *(f"{name}, old and new" for name in candidates)]
    return f"{provenance(content)} {about}\n\n{markdown(header, table, text_columns=4)}"


def render_verbs(content: dict) -> str:
    """A line for each call: te_lite's time and its peers' over it, as called and in a CUDA graph. Below 1 is bold."""
    calls: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in content["rows"]:
        calls.setdefault((row["verb"], row["shape"], row["dtype"]), {})[row["candidate"]] = row
    table = []
    for call, found in calls.items():
        cells = []
        for name in ("te_lite", "te_lite graph"):
            row = found.get(name, {})
            cells.append(number(row.get("gpu_us")))
            for against in (row.get("against_nccl"), row.get("against_symm_mem")):
                cells.append(f"**{number(against, 2)}**" if against and against < 1 else number(against, 2))
        table.append([*call, *cells])
    header = ["verb", "shape", "type", "te_lite us", "NCCL / te_lite", "torch / te_lite"]
    header += ["graph, us", "NCCL / te_lite", "torch / te_lite"]
    about = f"{content['tp']} ranks, microseconds of the slowest. Below 1, in bold, te_lite is slower."
    parts = [f"{provenance(content)} {about}", markdown(header, table, text_columns=3)]
    return "\n\n".join([*parts, *filter(None, (symmetric_inputs(calls), wrong_results(content["rows"])))])


def symmetric_inputs(calls: dict[tuple[str, ...], dict[str, dict]]) -> str:
    """torch's gathers of what lies in symmetric memory already, over te_lite's time. Scatters are not compared."""
    found: dict[str, list[float]] = {}
    for (verb, *_), rows in calls.items():
        theirs, ours = (rows.get(name, {}).get("gpu_us") for name in ("symm_mem symmetric", "te_lite"))
        if verb.startswith("all_gather") and theirs and ours:
            found.setdefault(verb, []).append(theirs / ours)
    ranges = [f"{verb} {min(over):.2f} to {max(over):.2f}" for verb, over in found.items()]
    where = "torch's time over te_lite's, as called, where x lies in torch's symmetric memory already"
    return f"{where}: {'; '.join(ranges)}." if ranges else ""


def wrong_results(rows: Sequence[dict]) -> str:
    failed = [f"{row['verb']} {row['shape']}, {row['candidate']} ({row['error']})" for row in rows if row["error"]]
    return f"Without a number, because they failed: {'; '.join(failed)}." if failed else ""


def render_megatron_ranks(content: dict) -> str:
    """A line for each process of megatron_gpt.py over several ranks; a row with an error keeps the numbers it has."""
    lines = []
    for row in content["rows"]:
        cells = [number(row.get("tokens_s")), number(row.get("spread"), 2), number(row.get("over_te"), 2)]
        cells += [number(row.get("speedup"), 2)]
        off = row.get("off") or []
        cells += [f"{max(off):.2f} (step {off.index(max(off)) + 1})" if off else ""]
        cells += [number(statistics.mean(x * x for x in off) ** 0.5, 2) if off else "", number(row["peak_gib"], 1)]
        mark = "\\*" if row["error"] else ""
        lines.append([row["candidate"] + mark, row["recipe"], row["overlap"], *cells])
    header = ["candidate", "recipe", "overlap", "tokens/s", "spread", "of TE", "of without overlap"]
    header += ["losses, largest", "losses, all steps", "peak GiB"]
    sizes = f"tp {content['tp']}, pp {content['pp']}, micro-batches a step: {content['micro_batches']}"
    optimizer = ", distributed optimizer" if content["distributed_optimizer"] else ""
    tokens = content["micro_batch"] * content["sequence"] * content["micro_batches"] * content["dp"]
    about = f"{sizes}{optimizer}, {content['layers']} layers, {tokens} tokens a step, {content['steps']} steps."
    about += f" Transformer Engine {content['peers']['transformer_engine']}." if content["peers"] else ""
    parts = [f"{provenance(content)} {about}", markdown(header, lines, text_columns=3)]
    failed = [
        f"{r['candidate']} {r['recipe']}, overlap {r['overlap']}: {r['error']}" for r in content["rows"] if r["error"]
    ]
    return "\n\n".join([*parts, *([f"\\* {'; '.join([*failed, *content['left_out']])}."] if failed else [])])


def render_moe(content: dict) -> str:
    """A line for each recipe: how far its losses are from those of bf16 on one rank, at each number of ranks."""
    lines: dict[str, dict[int, str]] = {}
    for run in content["runs"]:
        off = max(abs(run[name] - 1) for name in ("train_ratio", "held_out_ratio"))
        lines.setdefault(run["recipe"], {})[run["ep"]] = f"{run['held_out_loss']:.3f} ({off:.1%})"
    sizes = sorted({run["ep"] for run in content["runs"]})
    table = [[recipe, *(cells.get(ep, "") for ep in sizes)] for recipe, cells in lines.items()]
    options = content["options"]
    about = (
        f"{content['steps']} steps, {options['experts']} experts, {options['top_k']} of each token. "
        f"The held-out loss in nats a byte, and the distance from bf16 at ep 1, of that or of the loss in training, "
        f"whichever is farther. Unigram entropy {content['unigram_entropy']:.2f}. The largest distance is "
        f"{content['worst']:.1%}; above {content['bound']:.0%} the check fails."
    )
    return f"{about}\n\n{markdown(['recipe', *(f'ep {ep}' for ep in sizes)], table, text_columns=1)}"
