"""te.make_graphed_callables: GPU and wall time of replays against the same step run eagerly, in one interleaved run.

    python benchmarks/graphs.py                                   # every module and recipe, on a GPU
    python benchmarks/graphs.py --shapes small --recipes delayed

Shapes, modules and steps are those of modules.py. A replay reads its input and the gradient of its output from memory
of its own; "copies" is what copying them there takes alone, of which a loop that writes to the samples itself has the
second only. gpu_ratio = (graphed - copies) / eager, in GPU time.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

import te_lite as te
from benchmarks import bench, modules, result_files

RECIPES = ("bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")
SHAPES = ("8b", "small")


def graphed(eager: modules.ModuleStep, recipe: str) -> modules.ModuleStep:
    """The same step by graphs, of a copy of the module."""
    sample = torch.empty_like(eager.x).normal_().requires_grad_()
    value = None if recipe == "bf16" else te.recipe.from_name(recipe)
    made = te.make_graphed_callables(copy.deepcopy(eager.module), (sample,), recipe=value)
    return modules.ModuleStep(made, eager.context, eager.x.detach().clone().requires_grad_(), eager.dy)


def measure(module: str, shape: modules.Shape, recipe: str, clock: bench.Clock, args: argparse.Namespace) -> dict:
    row: dict = {"shape": shape.name, "module": module, "recipe": recipe, "error": None}
    try:
        eager = modules.module_step(module, shape, recipe, args.device)
        replays = graphed(eager, recipe)
    except Exception as error:  # a row with its error, and the others run
        return row | {"error": f"{type(error).__name__}: {error}"}
    x, dy = torch.empty_like(eager.x), torch.empty_like(eager.dy)

    @torch.no_grad()
    def copies() -> None:
        x.copy_(eager.x)
        dy.copy_(eager.dy)

    run = [bench.Candidate(name, one.step, one.reset) for name, one in (("eager", eager), ("graphed", replays))]
    run.append(bench.Candidate("copies", copies))
    timings = bench.time_interleaved(run, clock, rounds=args.rounds, wall_rounds=args.wall_rounds)
    for name, timing in timings.items():
        row |= {
            f"{name}_{key}": value for key, value in asdict(timing).items() if key in ("gpu_us", "host_us", "wall_us")
        }
        row["error"] = row["error"] or timing.error
    if row["error"] is None:
        row["gpu_ratio"] = (row["graphed_gpu_us"] - row["copies_gpu_us"]) / row["eager_gpu_us"]
        row["wall_ratio"] = row["graphed_wall_us"] / row["eager_wall_us"]
    return row


def summary(rows: list[dict]) -> str:
    names = ("shape", "module", "recipe")
    numbers = ("eager_gpu_us", "graphed_gpu_us", "copies_gpu_us", "eager_wall_us", "graphed_wall_us")
    ratios = ("gpu_ratio", "wall_ratio")
    lines = []
    for row in rows:
        cells = [f"{row[name]:.1f}" if row.get(name) is not None else "" for name in numbers]
        cells += [f"{row[name]:.3f}" if row.get(name) is not None else "" for name in ratios]
        lines.append([*(row[name] for name in names), *cells, row["error"] or ""])
    return result_files.text_table((*names, *numbers, *ratios, "error"), lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="names of shapes of modules.py")
    parser.add_argument("--modules", nargs="+", default=list(modules.MODULES), choices=modules.MODULES)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--wall-rounds", type=int, default=5)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=modules.RESULTS, help="folder for graphs.json")
    args = parser.parse_args(argv)
    if torch.device(args.device).type != "cuda":
        parser.error("--device must be cuda: there are no graphs of CPU work")
    args.shapes = modules.chosen_shapes(parser, args)
    torch.manual_seed(0)
    clock, rows = bench.clock_for(args.device), []
    for shape in args.shapes:
        for module in args.modules:
            for recipe in args.recipes:
                supported, why = te.check_recipe_support(te.recipe.from_name(recipe), torch.device(args.device))
                if supported:
                    rows.append(measure(module, shape, recipe, clock, args))
                else:
                    print(f"{recipe} is left out: {why}")
            torch.cuda.empty_cache()
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    result_files.write_results(args.out / "graphs.json", "graphs", rows, tree=tree, device=args.device)
    print(summary(rows))
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
