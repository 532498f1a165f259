"""From which size on does a converted linear gain? Forward plus backward against torch's bf16 nn.Linear.

    python benchmarks/layer_gain.py
    python benchmarks/layer_gain.py --device cpu     # smoke test at tiny sizes; its numbers mean nothing

No bias, bf16 parameters, gradients of input and weight. All candidates of one size are interleaved. `gain_gpu` and
`gain_wall` are torch's time over te_lite's; a layer gains where both are above 1: where the host decides, less device
time is no gain. It prints MINIMUM of te_lite/compat/convert.py.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import bench, result_files
from benchmarks.modules import BF16, RESULTS, ModuleStep

RECIPES = ("current", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
TOKENS = (512, 2048, 8192)
# (in_features, out_features): products from 1M to 235M, flat and tall ones among them.
FEATURES = (
    (1024, 1024),
    (2048, 1024),
    (2048, 2048),
    (1024, 4096),
    (4096, 1024),
    (2048, 5632),
    (4096, 4096),
    (4096, 6144),
    (4096, 14336),
    (14336, 4096),
    (8192, 8192),
    (8192, 28672),
)
SMOKE_TOKENS, SMOKE_FEATURES = (32, 64), ((64, 96), (96, 128))


def layer_step(recipe: str | None, tokens: int, features: tuple[int, int], device: str) -> ModuleStep:
    """recipe None: torch's nn.Linear as it is."""
    import te_lite as te

    linear = torch.nn.Linear(*features, bias=False, device=device, dtype=BF16)
    if recipe is not None:
        report = te.convert_to_float8_training(linear, recipe, tokens=None)
        if report.skipped:
            raise RuntimeError(f"{features} is not converted to {recipe}: {report.skipped[0].reason}")
    x = torch.randn(tokens, features[0], device=device, dtype=BF16, requires_grad=True)
    return ModuleStep(linear, contextlib.nullcontext, x, torch.randn(tokens, features[1], device=device, dtype=BF16))


def measure(tokens: int, features: tuple[int, int], clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    """One row a recipe."""
    size = {"tokens": tokens, "in_features": features[0], "out_features": features[1]}
    run, rows = [], []
    for recipe in (None, *args.recipes):
        try:
            work = layer_step(recipe, tokens, features, args.device)
        except Exception as error:  # a row with its error, and the others run
            rows.append({**size, "recipe": recipe, "error": f"{type(error).__name__}: {error}"})
            continue
        run.append(bench.Candidate(recipe or "torch", work.step, work.reset))
    timings = bench.time_interleaved(run, clock, rounds=args.rounds, wall_rounds=args.wall_rounds)
    torch_times = timings["torch"]
    for recipe in args.recipes:
        if recipe not in timings:
            continue
        timing = timings[recipe]
        row = {**size, "recipe": recipe, "gpu_us": timing.gpu_us, "wall_us": timing.wall_us}
        row |= {"torch_gpu_us": torch_times.gpu_us, "torch_wall_us": torch_times.wall_us}
        error = timing.error or torch_times.error
        for kind in () if error else ("gpu", "wall"):
            row[f"gain_{kind}"] = row[f"torch_{kind}_us"] / row[f"{kind}_us"]
        rows.append(row | {"spread": timing.spread, "error": error})
    return rows


def gains(row: dict) -> bool:
    return min(row.get("gain_gpu") or 0.0, row.get("gain_wall") or 0.0) > 1.0


def minimum(rows: list[dict]) -> dict[str, dict[int, float]]:
    """MINIMUM of te_lite/compat/convert.py: recipe -> tokens -> the smallest in * out from which on every row gains.

    inf where the largest layer does not gain; a recipe that gains nowhere is left out.
    """
    cells: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    for row in rows:
        size = row["in_features"] * row["out_features"]
        cells.setdefault((row["recipe"], row["tokens"]), []).append((size, gains(row)))
    tables: dict[str, dict[int, float]] = {}
    for (recipe, tokens), cell in cells.items():
        lost = max((size for size, gain in cell if not gain), default=0)
        tables.setdefault(recipe, {})[tokens] = min((size for size, _ in cell if size > lost), default=math.inf)
    return {recipe: table for recipe, table in tables.items() if min(table.values()) < math.inf}


def summary(rows: list[dict]) -> str:
    header = ("tokens", "in_features", "out_features", "recipe", "gpu_us", "wall_us", "gain_gpu", "gain_wall", "error")
    lines = []
    for row in rows:
        cells = (row.get(name) for name in header)
        lines.append(["" if c is None else f"{c:.2f}" if isinstance(c, float) else c for c in cells])
    tables = (f'    "{recipe}": {table},'.replace("inf", "math.inf") for recipe, table in minimum(rows).items())
    return "\n".join([result_files.text_table(header, lines), "MINIMUM = {", *tables, "}"])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--features", nargs="+", help="as 4096x14336; all by default")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--wall-rounds", type=int, default=3)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for layer_gain.json")
    args = parser.parse_args(argv)
    cuda = torch.device(args.device).type == "cuda"
    args.tokens = args.tokens or (TOKENS if cuda else SMOKE_TOKENS)
    if args.features:
        args.features = [tuple(int(size) for size in text.split("x")) for text in args.features]
    else:
        args.features = FEATURES if cuda else SMOKE_FEATURES
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)  # tiny shapes: more threads only wait for each other
    clock, rows = bench.clock_for(args.device), []
    for features in args.features:
        for tokens in args.tokens:
            rows += measure(tokens, features, clock, args)
            if torch.device(args.device).type == "cuda":
                torch.cuda.empty_cache()
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    result_files.write_results(args.out / "layer_gain.json", "layer_gain", rows, tree=tree, device=args.device)
    print(summary(rows))
    return 1 if any(row.get("error") for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
