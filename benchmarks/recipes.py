"""What each recipe costs: error of y, dx and dw, time of forward plus backward, memory kept by forward.

    python benchmarks/recipes.py
    python benchmarks/recipes.py --device cpu        # smoke test at tiny shapes; its numbers mean nothing
    torchrun --nproc-per-node 4 benchmarks/recipes.py --part per_shard

Errors are those of te.Linear, y[M, N] = x[M, K] w[N, K]^T, against an fp64 oracle of the unquantized bf16 inputs, in
percent: the root mean square over tokens (rows of y and dx) or input features (columns of dw) of |out - oracle| over
|oracle|, so that one with small numbers counts as much as one with large ones. x, dy and w * K^0.5 are normal, and for

    rows        each row of x and of dy is multiplied by 2^u, u uniform within -8 and 8
    columns     8 columns of x are multiplied by 2^14 and w's divided by it
    uneven      the rows of x that rank r of R holds are multiplied by 2^(-14 r / (R - 1))

Times and memory are those of te.LayerNormMLP as modules.py measures them, at its 8b shape, all recipes in one
interleaved run.

--part per_shard, on 2 ranks or more: current scaling under sequence parallelism, with an all-reduce of the amax before
the gather of x or with per_shard_scales=True. A column-parallel te.Linear; a sample starts on all ranks together and
is the slowest rank's.
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
from torch import Tensor

import te_lite as te
from benchmarks import bench, modules, report, result_files
from benchmarks.modules import BF16, RESULTS, ModuleStep
from te_lite.testing.distributed import init_ranks, leave_ranks

RECIPES = tuple(name for name in te.recipe.available() if name != "tensorwise")  # which is current
TENSORS = ("y", "dx", "dw")
KINDS, SHARD_KINDS = ("rows", "columns"), ("even", "uneven")
ROW_BINADES, OUTLIERS, OUTLIER_FACTOR, SHARD_BINADES = 8.0, 8, 2.0**14, 14.0
ERROR_SIZES, SMOKE_ERROR_SIZES = (2048, 4096, 4096), (64, 128, 96)  # M, K, N
SHARD_SIZES, SMOKE_SHARD_SIZES = (8192, 4096, 14336), (64, 128, 192)
MLP_SHAPE = next(shape for shape in modules.SHAPES if shape.name == "8b")
WARM_STEPS = 3  # before an error is taken: delayed scaling's scales come from earlier steps
SEED = 1234
# Name -> recipe of --part per_shard.
SHARD_RECIPES = {
    "bf16": te.recipe.HighPrecision(),
    "current": te.recipe.Float8CurrentScaling(),
    "current, per_shard_scales": te.recipe.Float8CurrentScaling(per_shard_scales=True),
}

Operands = tuple[Tensor, Tensor, Tensor]  # x[M, K], w[N, K], dy[M, N]


def operands(kind: str, sizes: tuple[int, int, int], device: torch.device | str, shards: int = 1) -> Operands:
    """The inputs of `kind`, see the module's docstring; the same numbers in every call on the same kind of device."""
    m, k, n = sizes
    generator = torch.Generator(device).manual_seed(SEED)
    x, w, dy = (torch.randn(*size, device=device, generator=generator) for size in ((m, k), (n, k), (m, n)))
    w *= k**-0.5
    if kind == "rows":
        for t in (x, dy):
            t *= torch.exp2(ROW_BINADES * (2 * torch.rand(m, 1, device=device, generator=generator) - 1))
    elif kind == "columns":
        columns = torch.randperm(k, device=device, generator=generator)[:OUTLIERS]
        x[:, columns] *= OUTLIER_FACTOR
        w[:, columns] /= OUTLIER_FACTOR
    elif kind == "uneven":
        exponent = torch.arange(shards, device=device) / max(1, shards - 1)
        x *= torch.exp2(-SHARD_BINADES * exponent).repeat_interleave(m // shards).unsqueeze(1)
    return x.to(BF16), w.to(BF16), dy.to(BF16)


def row_error(out: Tensor, oracle: Tensor) -> float:
    """The root mean square over rows of |out_r - oracle_r| / |oracle_r|."""
    difference = (out.double() - oracle).square().sum(1)
    return (difference / oracle.square().sum(1)).mean().sqrt().item()


def linear_step(linear: te.Linear, recipe: te.recipe.Recipe, x: Tensor, w: Tensor, dy: Tensor) -> ModuleStep:
    with torch.no_grad():
        linear.weight.copy_(w)
    return ModuleStep(linear, partial(te.autocast, recipe=recipe), x.clone().requires_grad_(), dy)


def step_errors(work: ModuleStep, oracles: Operands) -> dict[str, float]:
    """{"y": error, "dx": ..., "dw": ...} of a step after WARM_STEPS others."""
    for _ in range(WARM_STEPS):
        work.reset()
        work.step()
    work.reset()
    y = work.forward()
    y.backward(work.dy)
    dw, dw_oracle = work.module.weight.grad, oracles[2]
    pairs = ((y.detach(), oracles[0]), (work.x.grad, oracles[1]), (dw.t(), dw_oracle.t()))
    return {name: row_error(*pair) for name, pair in zip(TENSORS, pairs, strict=True)}


def linear_errors(recipes: list[str], sizes: tuple[int, int, int], device: str) -> dict[str, dict[str, float | str]]:
    """Recipe -> "<kind>_<tensor>_pct" -> error, or "error" -> what its step raised."""
    rows: dict[str, dict[str, float | str]] = {recipe: {} for recipe in recipes}
    for kind in KINDS:
        x, w, dy = operands(kind, sizes, device)
        wide = [t.double() for t in (x, w, dy)]
        oracles = (wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0])
        for recipe in recipes:
            linear = te.Linear(sizes[1], sizes[2], bias=False, params_dtype=BF16, device=device)
            try:
                found = step_errors(linear_step(linear, te.recipe.from_name(recipe), x, w, dy), oracles)
                rows[recipe] |= {f"{kind}_{name}_pct": 100 * error for name, error in found.items()}
            except Exception as error:  # a row with its error, and the others run
                rows[recipe]["error"] = f"{type(error).__name__}: {error}"
    return rows


def mlp_costs(args: argparse.Namespace, shape: modules.Shape) -> dict[str, dict]:
    """Recipe -> timings and kept_mib of te.LayerNormMLP, interleaved."""
    built = {recipe: modules.module_step("LayerNormMLP", shape, recipe, args.device) for recipe in args.recipes}
    run = [bench.Candidate(recipe, work.step, work.reset) for recipe, work in built.items()]
    clock = bench.clock_for(args.device)
    timings = bench.time_interleaved(run, clock, rounds=args.rounds, wall_rounds=args.wall_rounds)
    rows = {}
    for recipe, work in built.items():
        timing = asdict(timings[recipe])
        del timing["name"]
        kept = None if timing["error"] else bench.kept_by_forward(work.forward, args.device)
        rows[recipe] = timing | {"kept_mib": kept}
    return rows


def compare_recipes(args: argparse.Namespace) -> list[dict]:
    """One row a recipe."""
    smoke = torch.device(args.device).type == "cpu"
    errors = linear_errors(args.recipes, SMOKE_ERROR_SIZES if smoke else ERROR_SIZES, args.device)
    costs = mlp_costs(args, modules.SMOKE_SHAPES[0] if smoke else MLP_SHAPE)
    rows = []
    for recipe in args.recipes:
        error = errors[recipe].get("error") or costs[recipe]["error"]
        rows.append({"recipe": recipe, **errors[recipe], **costs[recipe], "error": error})
    return rows


class RanksClock:
    """A bench.Clock whose samples start together on all ranks and are the slowest rank's.

    So every rank sees the same numbers, and time_interleaved decides the same on all of them: how long to hold the
    stream, how many steps a block of wall time has.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = bench.clock_for(device)
        self.inner = bench.HostClock()
        self.word = torch.zeros(1, device=device)

    def synchronize(self) -> None:
        self.clock.synchronize()
        dist.all_reduce(torch.zeros(1))  # a barrier of the hosts, through gloo

    def sample(self, step: Callable[[], object], hold_us: float) -> bench.Sample:
        own: list[float] = []
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.word.is_cuda else []

        def aligned() -> None:
            dist.all_reduce(self.word)  # the devices start together, not only the hosts
            for mark in marks[:1]:
                mark.record()
            own.append(self.inner.sample(step, 0.0).host_us)
            for mark in marks[1:]:
                mark.record()

        self.synchronize()
        exposed = self.clock.sample(aligned, hold_us).exposed
        gpu_us = marks[0].elapsed_time(marks[1]) * 1e3 if marks else own[0]
        slowest = torch.tensor([gpu_us, own[0], float(exposed)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return bench.Sample(slowest[0].item(), slowest[1].item(), bool(slowest[2]))


def shard_step(name: str, kind: str, sizes: tuple[int, int, int], device: torch.device) -> tuple[ModuleStep, Operands]:
    """A column-parallel, sequence-parallel te.Linear on this rank's shards, and the oracles of what this rank gets."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, w, dy = operands(kind, sizes, device, ranks)
    x_shard, dx_rows = x.chunk(ranks)[rank], dy.chunk(ranks)[rank].double() @ w.double()
    w_shard, dy_shard = w.chunk(ranks)[rank], dy.chunk(ranks, dim=1)[rank].contiguous()
    wide = x.double()
    oracles = (wide @ w_shard.double().t(), dx_rows, dy_shard.double().t() @ wide)
    parallel = {"parallel_mode": "column", "sequence_parallel": True, "tp_group": dist.group.WORLD, "tp_size": ranks}
    linear = te.Linear(sizes[1], sizes[2], bias=False, params_dtype=BF16, device=device, **parallel)
    return linear_step(linear, SHARD_RECIPES[name], x_shard, w_shard, dy_shard), oracles


def over_ranks(errors: dict[str, float]) -> dict[str, float]:
    """The root mean square over ranks of each error: they hold parts of the same tensor."""
    squares = torch.tensor(list(errors.values()), dtype=torch.float64).square()
    dist.all_reduce(squares)
    return dict(zip(errors, (squares / dist.get_world_size()).sqrt().tolist(), strict=True))


def per_shard(args: argparse.Namespace, device: torch.device) -> list[dict]:
    """One row for each of SHARD_RECIPES; the same on all ranks."""
    sizes = SMOKE_SHARD_SIZES if device.type == "cpu" else SHARD_SIZES
    rows: dict[str, dict] = {name: {"tp": dist.get_world_size(), "recipe": name} for name in SHARD_RECIPES}
    steps: dict[str, ModuleStep] = {}
    for kind in reversed(SHARD_KINDS):  # the steps of the last kind are timed
        for name in SHARD_RECIPES:
            steps[name], oracles = shard_step(name, kind, sizes, device)
            errors = over_ranks(step_errors(steps[name], oracles))
            rows[name] |= {f"{kind}_{tensor}_pct": 100 * error for tensor, error in errors.items()}
    run = [bench.Candidate(name, work.step, work.reset) for name, work in steps.items()]
    timings = bench.time_interleaved(run, RanksClock(device), rounds=args.rounds, wall_rounds=args.wall_rounds)
    for name, row in rows.items():
        timing = asdict(timings[name])
        del timing["name"]
        row |= timing
    return list(rows.values())


def summary(rows: list[dict], kinds: tuple[str, str]) -> str:
    errors = [f"{kind}_{name}_pct" for kind in kinds for name in TENSORS]
    lines = []
    for row in rows:
        cells = [report.number(row.get(name), 2) for name in errors]
        cells += [report.number(row.get(name)) for name in ("gpu_us", "wall_us", "kept_mib")]
        lines.append([row["recipe"], *cells, row["error"] or ""])
    return result_files.text_table(("recipe", *errors, "gpu_us", "wall_us", "kept_mib", "error"), lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", default="recipes", choices=("recipes", "per_shard"))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--wall-rounds", type=int, default=3)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for recipes.json or per_shard.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    smoke, first = torch.device(args.device).type == "cpu", True
    if args.part == "recipes":
        rows, kinds = compare_recipes(args), KINDS
        shape = modules.SMOKE_SHAPES[0] if smoke else MLP_SHAPE
        extra = {"sizes": SMOKE_ERROR_SIZES if smoke else ERROR_SIZES, "shape": asdict(shape)}
    else:
        rank, ranks, device = init_ranks(torch.device(args.device).type)
        first = rank == 0
        if ranks < 2:
            raise SystemExit(f"--part per_shard on {ranks} rank: shards need 2 or more; start it with torchrun")
        rows, kinds = per_shard(args, device), SHARD_KINDS
        extra = {"sizes": SMOKE_SHARD_SIZES if smoke else SHARD_SIZES}
    if first:
        path = args.out / f"{args.part}.json"
        result_files.write_results(path, args.part, rows, tree=tree, device=args.device, **extra)
        print(summary(rows, kinds))
    if args.part == "per_shard":
        leave_ranks()
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
