"""Render the tables of README.md and of two pages of docs/ (DOCUMENTS) from the committed results.

    python benchmarks/report.py              # rewrite what lies between the markers
    python benchmarks/report.py --check      # status 1 when a document does not match the results

A document names a table between two lines, `<!-- results:NAME -->` and `<!-- /results:NAME -->`; NAMES are the
keys of RENDERERS. No number there is typed by hand; what was not measured yet is said to be so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

from benchmarks.result_files import BY_NAME
from benchmarks.tables import (
    gpu_mark,
    markdown,
    number,
    provenance,
    ratio,
    render_grouped,
    render_host,
    render_llama,
    render_megatron,
    render_peers,
)
from benchmarks.tables_ranks import (
    render_megatron_ranks,
    render_moe,
    render_overlap,
    render_overlap_gemms,
    render_overlap_played,
    render_two_trees,
    render_verbs,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PUBLISHED = ROOT / "benchmarks" / "published.json"
PAGES = ("README.md", "docs/background/performance.md", "docs/how-to/choose-a-recipe.md")
DOCUMENTS = tuple(ROOT / page for page in PAGES)
MARKED = re.compile(r"(<!-- results:(\w+) -->\n)(.*?)(<!-- /results:\2 -->)", re.DOTALL)

Key = tuple[str, str, str]  # shape, module, recipe


def load(results: Path, name: str) -> dict | None:
    path = results / f"{name}.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    if content["device"] == "cpu":
        raise ValueError(
            f"{path.name} was measured on a CPU: documents show numbers of a GPU only; "
            f"run benchmarks/gpu_check.py on one, or remove the file"
        )
    return content


def load_published() -> tuple[dict[Key, dict], str, str]:
    """Rows by (shape, module, recipe), label and source of the constant column."""
    content = json.loads(PUBLISHED.read_text())
    rows = [dict(zip(content["fields"], row, strict=True)) for row in content["rows"]]
    return {(r["shape"], r["module"], r["recipe"]): r for r in rows}, content["label"], content["source"]


def by_candidate(content: dict, candidate: str) -> dict[Key, dict]:
    return {(r["shape"], r["module"], r["recipe"]): r for r in content["rows"] if r["candidate"] == candidate}


def shapes_line(content: dict) -> str:
    shapes = (f"{s['name']} {s['tokens']}, {s['hidden']}, {s['ffn']}" for s in content["shapes"])
    return f"Shapes (tokens, hidden, ffn): {'; '.join(shapes)}."


def module_keys(content: dict) -> list[Key]:
    return list(by_candidate(content, "te_lite"))


def gpu_table(content: dict) -> str:
    ours, torch_rows = by_candidate(content, "te_lite"), by_candidate(content, "torch")
    gemms = by_candidate(content, "gemms")
    published, label, _ = load_published()
    rows = []
    for key in module_keys(content):
        shape, module, recipe = key
        row = ours[key]
        bare = gemms.get((shape, module, "bf16" if recipe == "bf16" else "fp8"), {}).get("gpu_us")
        eager = torch_rows.get((shape, module, "bf16"), {}).get("gpu_us")
        peer = published.get(key, {}).get("gpu_us")
        cells = [number(row.get("gpu_us"), mark=gpu_mark(row)), number(row.get("tflops")), number(bare)]
        cells += [ratio(bare, row.get("gpu_us")), number(eager), number(peer), ratio(row.get("gpu_us"), peer)]
        rows.append([*key, *cells])
    header = ["shape", "module", "recipe", "te_lite us", "TFLOP/s", "GEMMs alone us", "GEMMs / te_lite"]
    header += ["torch bf16 us", f"{label} us (published)", f"te_lite / {label}"]
    return markdown(header, rows, text_columns=3)


def host_table(content: dict) -> str:
    ours, torch_rows = by_candidate(content, "te_lite"), by_candidate(content, "torch")
    published, label, _ = load_published()
    rows = []
    for key in module_keys(content):
        eager = torch_rows.get((key[0], key[1], "bf16"), {})
        cells = []
        for field in ("host_us", "wall_us", "kept_mib"):
            sources = (ours[key], eager, published.get(key, {}))
            cells += [number(source.get(field)) for source in sources]
        rows.append([*key, *cells])
    names = ("te_lite", "torch bf16", label)
    header = [f"{what}, {name}" for what in ("host us", "wall us", "MiB kept") for name in names]
    return markdown(["shape", "module", "recipe", *header], rows, text_columns=3)


def render_modules(content: dict) -> str:
    _, label, source = load_published()
    parts = [f"{provenance(content)} {shapes_line(content)}", "GPU time of forward plus backward:"]
    parts += [gpu_table(content), "Host time to enqueue a step, wall time of a step, memory kept by forward:"]
    parts += [host_table(content), f"{label}, a constant: {source}."]
    if any(gpu_mark(row) for row in content["rows"]):
        parts.append("\\* the device waited for the host in most samples: launch gaps are in this number.")
    return "\n\n".join(parts)


def render_summary(content: dict) -> str:
    """For the front page, of peers.json: GPU time beside Transformer Engine and the bare GEMMs, wall time where the
    host is the limit."""
    found: dict[Key, dict[str, dict]] = {}
    for row in content["rows"]:
        if row["call"] == "main_grad":
            found.setdefault((row["shape"], row["module"], row["recipe"]), {})[row["candidate"]] = row
    gpu, wall = [], []
    for (shape, module, recipe), rows in found.items():
        field, lines = ("wall_us", wall) if shape == "small" else ("gpu_us", gpu)
        cells = [number(rows.get(name, {}).get(field)) for name in ("te_lite", "te", "gemms")]
        if shape == "small" or module == "LayerNormMLP":
            lines.append([shape, module, recipe, *cells[: 3 - (shape == "small")]])
    names = ["shape", "module", "recipe", "te_lite", "Transformer Engine"]
    parts = [f"{provenance(content)} {shapes_line(content)} Weight gradients are added to `main_grad`."]
    parts += ["GPU time of forward plus backward, us:", markdown([*names, "GEMMs alone"], gpu, text_columns=3)]
    parts += ["Wall time a step where the host is the limit, us:", markdown(names, wall, text_columns=3)]
    return "\n\n".join(parts)


def render_kernels(content: dict) -> str:
    rows = []
    for row in content["rows"]:
        cells = [number(row.get("gpu_us"), 1), number(row.get("host_us"), 1), number(row.get("gbps"))]
        rows.append([f"{row['m']} x {row['n']}", row["kernel"], *cells, number(row.get("of_copy"), 2)])
    header = ["shape", "kernel", "GPU us", "host us", "GB/s", "of copy"]
    return f"{provenance(content)}\n\n{markdown(header, rows, text_columns=2)}"


def render_gemms(content: dict) -> str:
    rows = []
    for row in content["rows"]:
        cells = [number(row.get("gpu_us"), 1), number(row.get("tflops")), number(row.get("of_bf16"), 2)]
        rows.append([f"{row['m']} x {row['k']} x {row['n']}", row["gemm"], *cells, number(row.get("of_torch"), 2)])
    header = ["M x K x N", "GEMM", "GPU us", "TFLOP/s", "of bf16", "of torch's call"]
    return f"{provenance(content)}\n\n{markdown(header, rows, text_columns=2)}"


def error_table(content: dict, kinds: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of "<kind>_<tensor>_pct", a row for each row of the results."""
    names = [(kind, tensor) for kind in kinds for tensor in ("y", "dx", "dw")]
    cells = [[number(row.get(f"{kind}_{tensor}_pct"), 2) for kind, tensor in names] for row in content["rows"]]
    return [f"{kind}: {tensor} %" for kind, tensor in names], cells


def cost_cells(content: dict) -> list[list[str]]:
    """GPU time, the bf16 row's over it, wall time."""
    bf16 = next((row.get("gpu_us") for row in content["rows"] if row["recipe"] == "bf16"), None)
    rows = content["rows"]
    return [
        [number(row.get("gpu_us"), mark=gpu_mark(row)), ratio(bf16, row.get("gpu_us")), number(row.get("wall_us"))]
        for row in rows
    ]


def render_recipes(content: dict) -> str:
    errors_header, errors = error_table(content, ("rows", "columns"))
    rows = [
        [row["recipe"], *error, *cost, number(row.get("kept_mib"))]
        for row, error, cost in zip(content["rows"], errors, cost_cells(content), strict=True)
    ]
    header = ["recipe", *errors_header, "GPU us", "bf16 / recipe", "wall us", "MiB kept"]
    m, k, n = content["sizes"]
    shape = content["shape"]
    about = (
        f"Errors: te.Linear, {m} tokens, {k} to {n} features, root mean square over tokens (y, dx) or input features "
        "(dw) of the error relative to an fp64 oracle. *rows*: the magnitudes of x's and dy's rows span 2^-8 to 2^8; "
        "*columns*: 8 columns of x are 2^14 times the others, which w makes up for. Times (forward plus backward) and "
        f"memory kept by forward: te.LayerNormMLP, {shape['tokens']} tokens, {shape['hidden']} features, "
        f"ffn {shape['ffn']}, swiglu, RMSNorm."
    )
    return f"{provenance(content)} {about}\n\n{markdown(header, rows, text_columns=1)}"


def render_per_shard(content: dict) -> str:
    errors_header, errors = error_table(content, ("even", "uneven"))
    rows = [
        [row["recipe"], *error, *cost]
        for row, error, cost in zip(content["rows"], errors, cost_cells(content), strict=True)
    ]
    header = ["recipe", *errors_header, "GPU us", "bf16 / recipe", "wall us"]
    (m, k, n), tp = content["sizes"], content["rows"][0]["tp"]
    about = (
        f"Forward plus backward of a column-parallel te.Linear under sequence parallelism on {tp} ranks, the slowest "
        f"rank's time; {m} tokens, {k} to {n} features over all ranks. Errors as above. *even*: "
        "shards of equal magnitude; *uneven*: the last rank's tokens are 2^-14 times the first's, the others' between."
    )
    return f"{provenance(content)} {about}\n\n{markdown(header, rows, text_columns=1)}"


def render_check(content: dict) -> str:
    rows = []
    for row in content["rows"]:
        detail = ", ".join(f"{k} {v}" for k, v in row["detail"].items() if not isinstance(v, list))
        rows.append([row["stage"], row["status"], detail, str(row["gpus"]), number(row["seconds"])])
    table = markdown(["stage", "status", "detail", "GPUs", "seconds"], rows, text_columns=3)
    return f"{provenance(content)}\n\n{table}"


# What a document may ask for -> the file in benchmarks/results that it is made of, and the function that makes it.
RENDERERS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "modules": ("modules", render_modules),
    "summary": ("peers", render_summary),
    "peers": ("peers", render_peers),
    "host": ("host", render_host),
    "llama": ("llama", render_llama),
    "llama_eager": ("llama_eager", render_llama),
    "megatron": ("megatron", render_megatron),
    "megatron_tp4_pp1": ("megatron_tp4_pp1", render_megatron_ranks),
    "megatron_tp2_pp1": ("megatron_tp2_pp1", render_megatron_ranks),
    "megatron_tp1_pp2": ("megatron_tp1_pp2", render_megatron_ranks),
    "moe": ("moe", render_moe),
    "grouped_modules": ("grouped_modules", render_grouped),
    "grouped": ("grouped", render_grouped),
    "kernels": ("kernels", render_kernels),
    "gemms": ("gemms", render_gemms),
    "recipes": ("recipes", render_recipes),
    "per_shard": ("per_shard", render_per_shard),
    "overlap_gemms": ("overlap_gemms", render_overlap_gemms),
    "overlap_gemms_tp2": ("overlap_gemms_tp2", render_overlap_gemms),
    "overlap_played": ("overlap_played", render_overlap_played),
    "two_trees_tp4": ("two_trees_tp4", render_two_trees),
    "verbs": ("verbs", render_verbs),
    "verbs_tp2": ("verbs_tp2", render_verbs),
    "overlap": ("overlap", render_overlap),
    "overlap_tp2": ("overlap_tp2", render_overlap),
    "check": ("gpu_check", render_check),
    "check_tp2": ("gpu_check_tp2", render_check),
    "check_tp4": ("gpu_check_tp4", render_check),
}


def rendered(text: str, results: Path) -> str:
    """`text` with every marked part replaced. ValueError for a name that no renderer has."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in RENDERERS:
            raise ValueError(f"results:{name}: no such table; the names are {', '.join(RENDERERS)}")
        file, render = RENDERERS[name]
        content = load(results, file)
        command = f"gpu_check.py --stages {file}" if file in BY_NAME else "gpu_check.py"
        missing = f"Not measured yet: `python benchmarks/{command}` on a GPU writes the results file {file}.json."
        return f"{match.group(1)}\n{missing if content is None else render(content)}\n\n{match.group(4)}"

    return MARKED.sub(replace, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 when a document is stale")
    parser.add_argument("documents", nargs="*", type=Path, default=list(DOCUMENTS))
    args = parser.parse_args(argv)
    stale = 0
    for path in args.documents:
        if not path.exists():
            print(f"{path.name}: not there")
            continue
        before = path.read_text()
        after = rendered(before, args.results)
        if after == before:
            print(f"{path.name}: as the results say")
            continue
        stale += 1
        if args.check:
            print(f"{path.name}: does not match the results; run python benchmarks/report.py")
        else:
            path.write_text(after)
            print(f"{path.name}: rewritten")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
