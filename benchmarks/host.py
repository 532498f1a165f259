"""Where the host's microseconds go: forward plus backward of a small layer, by part, on a GPU.

    python benchmarks/host.py                                  # every module and recipe at the small shape
    python benchmarks/host.py --modules Linear --recipes bf16

Shapes, modules and steps are those of modules.py. The step is longer on the host than on the device, so its wall time
is the host's. Rows of one shape and module run in turns. Parts of te_lite's step, by clocks around them (which cost
some 0.3 us each, so their sum is a little above step_us):

    autocast   entering and leaving, the step of the scales included
    begin      what a call does: the plan, the checks that the plan does not hold
    look_up    the key of a recording, its memory and what it fetches, without the launches
    launches   the recorded launches, in C++
    rest       torch's autograd and modules, and what is not above; also a body that is not recorded

function_us: torch.autograd.Function alone, with as many tensors in and out, which are allocated and not computed.
ratio = step_us / torch_us, of torch's own bf16 modules. A row is the round with the median ratio. allocations,
torch_allocations: how often a step asks the GPU's caching allocator for memory; null on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

import te_lite as te
from benchmarks import bench, modules, result_files
from te_lite import _C
from te_lite.functional.recordings import Recordings
from te_lite.modules.base import TeLiteModule

RECIPES = ("bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")
PARTS = ("autocast", "begin", "look_up", "launches", "rest")
STARTED = time.monotonic()
SETTLE_S = 8.0  # a virtual machine's host takes up to twice as long for some seconds after a process has started
STEPS = 100  # of one measurement; what is reported is one of --rounds of them


class Allocates(torch.autograd.Function):
    """As many outputs and gradients as a module's Function has, and no work."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *params)
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *[torch.empty_like(t) for t in ctx.saved_tensors]


class OnlyFunction(torch.nn.Module):
    """The parameters of `like`, seen by one Function that computes nothing."""

    def __init__(self, like: torch.nn.Module, features: int) -> None:
        super().__init__()
        self.params, self.features = torch.nn.ParameterList(like.parameters()), features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Allocates.apply((*x.shape[:-1], self.features), x, *self.params)


@contextlib.contextmanager
def clocks() -> Iterator[dict[str, int]]:
    """Inside, the nanoseconds that each part of te_lite has taken."""
    spent = dict.fromkeys(PARTS, 0)
    before: list[tuple[Any, str, Any]] = []

    def around(owner: Any, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter_ns() - begin

        before.append((owner, name, inner))
        setattr(owner, name, timed)

    for name in ("__enter__", "__exit__"):
        around(te.autocast, name, "autocast")
    around(TeLiteModule, "_begin", "begin")
    around(Recordings, "try_replay", "look_up")
    around(_C.Sequence, "run", "launches")
    try:
        yield spent
    finally:
        for owner, name, inner in before:
            setattr(owner, name, inner)


def wall_us(step: modules.ModuleStep, clock: bench.Clock, steps: int) -> float:
    clock.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(steps):
        step.reset()
        step.step()
    clock.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3 / steps


def allocations(step: modules.ModuleStep, device: str) -> int | None:
    """Of one step."""
    if torch.device(device).type != "cuda":
        return None

    def so_far() -> int:
        return torch.cuda.memory_stats(device)["allocation.all.allocated"]

    step.reset()
    before = so_far()
    step.step()
    return so_far() - before


def measure(module: str, shape: modules.Shape, args: argparse.Namespace) -> list[dict]:
    """A row for each recipe."""
    clock = bench.clock_for(args.device)
    torchs = modules.module_step(module, shape, None, args.device)
    only = OnlyFunction(torchs.module, torchs.dy.shape[-1])
    steps = {"torch": torchs, "function": modules.ModuleStep(only, contextlib.nullcontext, torchs.x, torchs.dy)}
    for recipe in args.recipes:
        supported, why = te.check_recipe_support(te.recipe.from_name(recipe), torch.device(args.device))
        if supported:
            steps[recipe] = modules.module_step(module, shape, recipe, args.device)
        else:
            print(f"{recipe} is left out: {why}")
    taken: dict[str, list[float]] = {name: [] for name in steps}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    while True:  # at least once
        for step in steps.values():
            wall_us(step, clock, bench.WARM_STEPS)
        if time.monotonic() - STARTED > args.settle:
            break
    for r in range(args.rounds):
        names = list(steps)
        for name in names[r % len(names) :] + names[: r % len(names)]:
            wall_us(steps[name], clock, bench.WARM_STEPS)
            taken[name].append(wall_us(steps[name], clock, args.steps))
            if name in args.recipes:
                with clocks() as spent:
                    whole = wall_us(steps[name], clock, args.steps)
                found = {part: value / 1e3 / args.steps for part, value in spent.items()}
                found["look_up"] -= found["launches"]
                parts[name].append(found | {"rest": whole - sum(found.values())})
    rows, counts = [], {name: allocations(step, args.device) for name, step in steps.items()}
    for recipe in [name for name in steps if name in args.recipes]:
        row: dict = {"shape": shape.name, "module": module, "recipe": recipe, "allocations": counts[recipe]}
        row["torch_allocations"] = counts["torch"]
        # All of one round, for a host that changes its speed changes all of them.
        ratios = [ours / torchs for ours, torchs in zip(taken[recipe], taken["torch"], strict=True)]
        at = ratios.index(statistics.median_low(ratios))
        row |= {"step_us": taken[recipe][at]} | {f"{name}_us": taken[name][at] for name in ("torch", "function")}
        rows.append(row | {f"{part}_us": parts[recipe][at][part] for part in PARTS} | {"ratio": ratios[at]})
    return rows


def summary(rows: list[dict]) -> str:
    names = ("shape", "module", "recipe")
    numbers = ("step_us", "torch_us", "function_us", *[f"{part}_us" for part in PARTS])
    lines = [
        [*[row[name] for name in names], *[f"{row[name]:.1f}" for name in numbers], f"{row['ratio']:.2f}"]
        for row in rows
    ]
    return result_files.text_table((*names, *numbers, "ratio"), lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", help="names of shapes of modules.py; default: small")
    parser.add_argument("--modules", nargs="+", default=list(modules.MODULES), choices=modules.MODULES)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds of the process before the first round")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=modules.RESULTS, help="folder for host.json")
    args = parser.parse_args(argv)
    if args.shapes is None and torch.device(args.device).type == "cuda":
        args.shapes = ["small"]
    args.shapes = modules.chosen_shapes(parser, args)
    torch.manual_seed(0)
    # As te_lite's modules have it in a process with one device; peers are to have the same.
    torch.autograd.set_multithreading_enabled(False)
    rows = [row for shape in args.shapes for module in args.modules for row in measure(module, shape, args)]
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    result_files.write_results(args.out / "host.json", "host", rows, tree=tree, device=args.device)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
