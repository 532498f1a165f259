"""Forward plus backward of a tensor-parallel te.LayerNormMLP with its communication overlapped, against Collective.

    torchrun --nproc-per-node 4 benchmarks/overlap.py
    torchrun --nproc-per-node 2 benchmarks/overlap.py --device cpu    # smoke test; its numbers mean nothing

Sequence parallel, RMSNorm, SwiGLU, no bias. In each run the overlapped module, the same without overlap and the six
GEMMs alone, as cuBLAS runs them back to back on operands that lie ready, are interleaved; a sample starts on all ranks
together and is the slowest rank's. Methods: "ring", "fused" and "auto" (initialize_ub's default) ask for that wherever
there is a choice, "auto, rs" also scatters dx out of dgrad (ub_overlap_rs_dgrad), not behind wgrad, "auto, fp8_buf"
sends fc2's partial sums in fp8. --graphs: also CUDA graphs of the whole step, in which the host launches nothing.
--profile: instead, where the host's time goes in each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
import torch.distributed as dist

import te_lite as te
from benchmarks import bench, host_profile, modules, report, result_files
from benchmarks.modules import BF16, RESULTS, ModuleStep, Shape
from benchmarks.ranks import run_on_ranks
from benchmarks.recipes import RanksClock
from te_lite.overlap.config import LAYER_GEMMS, offered

SHAPES = (Shape("70b", 8192, 8192, 28672), Shape("8b", 8192, 4096, 14336), Shape("small", 2048, 4096, 14336))
SMOKE_SHAPES = (Shape("smoke", 64, 64, 128),)
RECIPES = ("bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise")
FUSED_RECIPES = ("bf16", "delayed", "current", "rowwise")  # of the others the fused kernels take none
BULK = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
SCATTERS = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True}


def everywhere(method: str, *, dgrad: bool) -> dict[str, dict[str, str]]:
    """ub_cfgs that ask for `method` wherever it is offered; dgrad: also where bulk is the default."""
    names = [name for name in LAYER_GEMMS if method in offered(name)]
    return {name: {"method": method} for name in names if dgrad or "bulk" not in offered(name)}


METHODS = {
    "auto": (None, BULK, RECIPES),
    "auto, rs": (None, SCATTERS, RECIPES),
    "auto, fp8_buf": ({"fc2_fprop": {"fp8_buf": True}}, BULK, FUSED_RECIPES),
    "ring": (everywhere("ring_exchange", dgrad=False), BULK, RECIPES),
    "fused": (everywhere("fused", dgrad=False), BULK, FUSED_RECIPES),
}


def mlp_step(shape: Shape, recipe: str, flags: dict[str, bool], device: torch.device) -> ModuleStep:
    ranks = dist.get_world_size()
    mlp = te.LayerNormMLP(
        shape.hidden,
        shape.ffn,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        set_parallel_mode=True,
        sequence_parallel=True,
        tp_group=dist.group.WORLD,
        tp_size=ranks,
        params_dtype=BF16,
        device=device,
        **flags,
    )
    x = torch.randn(shape.tokens // ranks, shape.hidden, device=device, dtype=BF16).requires_grad_()
    return ModuleStep(mlp, modules.recipe_context(recipe), x, torch.randn_like(x))


def fresh_step(work: ModuleStep) -> None:
    work.reset()
    work.step()


def compare(shape: Shape, recipe: str, method: str, args: argparse.Namespace, device: torch.device) -> dict:
    """One row: the overlapped module, with Collective and the GEMMs beside it. The same on all ranks."""
    overlapped = mlp_step(shape, recipe, METHODS[method][1], device)
    plain = mlp_step(shape, recipe, {}, device)
    ranks = dist.get_world_size()
    local = Shape(shape.name, shape.tokens, shape.hidden, shape.ffn // ranks)
    gemms = modules.gemm_step("LayerNormMLP", local, recipe != "bf16", str(device))
    run = []
    if args.graphs:  # of modules of their own, whose gradients belong to the graph
        # First, so that they are captured before the others have scales: delayed scaling keeps those apart then.
        for name, flags in (("collective_graph", {}), ("graph", METHODS[method][1])):
            work = mlp_step(shape, recipe, flags, device)
            run.append(bench.Candidate(name, bench.captured(partial(fresh_step, work))))
    run += [
        bench.Candidate("overlapped", overlapped.step, overlapped.reset),
        bench.Candidate("collective", plain.step, plain.reset),
        bench.Candidate("gemms", gemms),
    ]
    timings = bench.time_interleaved(run, RanksClock(device), rounds=args.rounds, wall_rounds=args.wall_rounds)
    rows = [row for row in te.overlap_report() if row["sent"] and row["schedule"] != "collective"]
    took = dict.fromkeys(f"{one['gemm']} {one['schedule']}" for one in rows)  # the graph's module says the same
    row = {"shape": shape.name, "tp": ranks, "recipe": recipe, "method": method}
    row["took"] = ", ".join(took)
    timing = asdict(timings["overlapped"])
    del timing["name"]
    row |= timing
    for name in (one.name for one in run if one.name != "overlapped"):
        row |= {f"{name}_gpu_us": timings[name].gpu_us, f"{name}_wall_us": timings[name].wall_us}
        row["error"] = row["error"] or timings[name].error
    if not row["error"]:
        row["against_collective"] = row["collective_gpu_us"] / row["gpu_us"]
        row["against_gemms"] = row["gpu_us"] / row["gemms_gpu_us"]
    return row


def profile(shape: Shape, recipe: str, method: str, steps: int, device: torch.device) -> None:
    """Prints where the host's time of rank 0 goes, with overlap and without."""
    for name, flags in ((method, METHODS[method][1]), ("Collective", {})):
        work = mlp_step(shape, recipe, flags, device)
        text = host_profile.profile_step(work, f"{shape.name} {recipe}, {name}", steps)
        if dist.get_rank() == 0:
            print(text, flush=True)


def measure(args: argparse.Namespace, device: torch.device, rows: list[dict], write: Callable[[], None]) -> None:
    """Appends a row after the other; write() after each, so that a run that is cut off leaves what it measured."""
    shapes = SMOKE_SHAPES if device.type == "cpu" else SHAPES
    for shape in (shape for shape in shapes if shape.name in args.shapes or device.type == "cpu"):
        for method in args.methods:
            config, _, recipes = METHODS[method]
            te.initialize_ub(
                [shape.tokens, shape.hidden],
                dist.get_world_size(),
                ub_cfgs=config,
                cuda_graphs=args.graphs,
                device=device,
            )
            for recipe in (recipe for recipe in args.recipes if recipe in recipes):
                if args.profile is not None:
                    profile(shape, recipe, method, args.profile, device)
                    continue
                rows.append(compare(shape, recipe, method, args, device))
                write()
            te.destroy_ub()


def summary(rows: list[dict]) -> str:
    columns = ("gpu_us", "collective_gpu_us", "gemms_gpu_us", "host_us", "wall_us", "collective_wall_us")
    columns += ("graph_wall_us", "collective_graph_wall_us")
    ratios = ("against_collective", "against_gemms")
    lines = []
    for row in rows:
        cells = [report.number(row.get(name)) for name in columns] + [report.number(row.get(n), 2) for n in ratios]
        lines.append([row["shape"], row["method"], row["recipe"], *cells, row["error"] or ""])
    return result_files.text_table(("shape", "method", "recipe", *columns, *ratios, "error"), lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", default=names, choices=names)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--wall-rounds", type=int, default=2)
    host_profile.add_argument(parser)
    parser.add_argument("--graphs", action="store_true", help="also under CUDA graphs; on GPUs")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for overlap.json")
    args = parser.parse_args(argv)
    if args.graphs and args.device == "cpu":
        parser.error("--graphs needs --device cuda: there are no graphs of CPU work")
    if args.graphs and args.profile is not None:
        parser.error("--graphs with --profile: a graph's replay has no Python in it; leave one out")
    return args


def main(argv: list[str] | None = None) -> int:
    return run_on_ranks("overlap", parse(argv), measure, summary)


if __name__ == "__main__":
    raise SystemExit(main())
