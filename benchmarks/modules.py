"""Forward plus backward of the modules, beside torch's modules and the bare GEMMs, in one interleaved run.

    python benchmarks/modules.py                     # all rows, on a GPU
    python benchmarks/modules.py --profile           # where the host's time goes, at the last shape chosen
    python benchmarks/modules.py --device cpu        # smoke test at a tiny shape; its numbers mean nothing

RMSNorm, no bias, SwiGLU, bf16 parameters. Linear and LayerNormLinear go hidden -> ffn; LayerNormMLP goes
hidden -> 2 ffn -> hidden. A step is forward and backward with input, weight and norm gradients; gradients are
set to None before it (outside gpu_us and host_us, inside wall_us), so the weight gradient is written to a new
.grad and not added to an old one. Weights are quantized in every step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
import torch.nn.functional as F

from benchmarks import bench, host_profile, result_files

RESULTS = Path(__file__).resolve().parent / "results"
BF16 = torch.bfloat16
MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")
RECIPES = ("bf16", "delayed", "current")


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    hidden: int
    ffn: int


# The small shape last: there the host decides, and a process on a virtual machine takes seconds to its full speed.
SHAPES = (Shape("70b", 8192, 8192, 7168), Shape("8b", 8192, 4096, 14336), Shape("small", 512, 2048, 5632))
SMOKE_SHAPES = (Shape("smoke", 32, 64, 96),)


def linears(module: str, shape: Shape) -> list[tuple[int, int]]:
    """(in_features, out_features) of each linear of a module."""
    if module == "LayerNormMLP":
        return [(shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden)]
    return [(shape.hidden, shape.ffn)]


def step_flops(module: str, shape: Shape) -> float:
    """fprop, dgrad and wgrad of each linear: 2 M K N apiece."""
    return sum(3 * 2.0 * shape.tokens * k * n for k, n in linears(module, shape))


class TorchMLP(torch.nn.Module):
    """RMSNorm, fc1, silu(gate) * up, fc2."""

    def __init__(self, hidden: int, ffn: int, **where: object) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5, **where)
        self.fc1 = torch.nn.Linear(hidden, 2 * ffn, bias=False, **where)
        self.fc2 = torch.nn.Linear(ffn, hidden, bias=False, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(self.norm(x)).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


def build_torch(module: str, shape: Shape, device: str) -> torch.nn.Module:
    where = {"device": device, "dtype": BF16}
    if module == "LayerNormMLP":
        return TorchMLP(shape.hidden, shape.ffn, **where)
    linear = torch.nn.Linear(shape.hidden, shape.ffn, bias=False, **where)
    if module == "Linear":
        return linear
    return torch.nn.Sequential(torch.nn.RMSNorm(shape.hidden, eps=1e-5, **where), linear)


def build_te(module: str, shape: Shape, device: str, te: Any = None, **options: object) -> torch.nn.Module:
    """te: te_lite (default), or a library with its constructors. options: more of their arguments."""
    if te is None:
        import te_lite as te
    options |= {"bias": False, "params_dtype": BF16, "device": device}
    if module == "Linear":
        return te.Linear(shape.hidden, shape.ffn, **options)
    if module == "LayerNormLinear":
        return te.LayerNormLinear(shape.hidden, shape.ffn, normalization="RMSNorm", **options)
    return te.LayerNormMLP(shape.hidden, shape.ffn, normalization="RMSNorm", activation="swiglu", **options)


def recipe_context(recipe: str) -> Callable[[], contextlib.AbstractContextManager]:
    """Opens the recipe's autocast, once a step, as a training loop does."""
    if recipe == "bf16":
        return contextlib.nullcontext
    import te_lite as te

    return functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=te.recipe.from_name(recipe))


@dataclass
class ModuleStep:
    """A module with its input and output gradient: forward(), step() = forward and backward, reset()."""

    module: torch.nn.Module
    context: Callable[[], contextlib.AbstractContextManager]
    x: torch.Tensor
    dy: torch.Tensor

    def forward(self) -> torch.Tensor:
        with self.context():
            return self.module(self.x)

    def step(self) -> None:
        self.forward().backward(self.dy)

    def reset(self) -> None:
        self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None


def module_step(module: str, shape: Shape, recipe: str | None, device: str) -> ModuleStep:
    """recipe None: torch's own modules in bf16."""
    built = build_torch(module, shape, device) if recipe is None else build_te(module, shape, device)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.023)
    x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(shape.tokens, linears(module, shape)[-1][1], device=device, dtype=BF16)
    context = contextlib.nullcontext if recipe is None else recipe_context(recipe)
    return ModuleStep(built, context, x, dy)


def gemm_step(module: str, shape: Shape, fp8: bool, device: str) -> Callable[[], None]:
    """fprop, dgrad and wgrad of each linear on operands that lie ready in the layout each GEMM wants.

    y[M,N] = x[M,K] w[N,K]^T; dx[M,K] = dy[M,N] w[N,K]; dw[N,K] = dy[M,N]^T x[M,K]. fp8: E4M3 times E4M3 or
    E5M2, fast accumulation in fprop only, as both fp8 recipes set it.
    """

    def random(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, device=device, dtype=BF16)

    calls: list[Callable[[], torch.Tensor]] = []
    one = torch.ones(1, device=device, dtype=torch.float32)
    for k, n in linears(module, shape):
        x, w, dy = random(shape.tokens, k), random(n, k), random(shape.tokens, n)
        if not fp8:
            pairs = ((x, w.t()), (dy, w), (dy.t(), x))
            calls += [functools.partial(torch.mm, a, b) for a, b in pairs]
            continue
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        x_row, w_row, dy_row = x.to(e4m3), w.to(e4m3), dy.to(e5m2)
        x_col, w_col, dy_col = (t.t().contiguous() for t in (x_row, w_row, dy_row))
        scaled = functools.partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=BF16)
        calls.append(functools.partial(scaled, x_row, w_row.t(), use_fast_accum=True))
        calls.append(functools.partial(scaled, dy_row, w_col.t(), use_fast_accum=False))
        calls.append(functools.partial(scaled, dy_col, x_col.t(), use_fast_accum=False))

    def step() -> None:
        for call in calls:
            call()

    return step


def candidates(module: str, shape: Shape, recipes: list[str], device: str) -> Iterator[tuple[dict, object]]:
    """(identity of the row, ModuleStep or GEMM step or the error that building it raised)."""
    for kind, recipe in [("te_lite", r) for r in recipes] + [
        ("torch", "bf16"),
        ("gemms", "bf16"),
        ("gemms", "fp8"),
    ]:
        row = {"shape": shape.name, "module": module, "candidate": kind, "recipe": recipe}
        try:
            if kind == "gemms":
                yield row, gemm_step(module, shape, recipe == "fp8", device)
            else:
                yield row, module_step(module, shape, recipe if kind == "te_lite" else None, device)
        except Exception as error:  # a row with its error, and the others run
            yield row, error


def measure(module: str, shape: Shape, recipes: list[str], clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    rows, steps, run = [], {}, []
    for row, built in candidates(module, shape, recipes, args.device):
        rows.append(row)
        name = f"{row['candidate']} {row['recipe']}"
        if isinstance(built, Exception):
            row["error"] = f"{type(built).__name__}: {built}"
        elif isinstance(built, ModuleStep):
            steps[name] = built
            run.append(bench.Candidate(name, built.step, built.reset))
        else:
            run.append(bench.Candidate(name, built))
    timings = bench.time_interleaved(run, clock, rounds=args.rounds, wall_rounds=args.wall_rounds)
    for row in rows:
        name = f"{row['candidate']} {row['recipe']}"
        if name not in timings:
            continue
        timing = asdict(timings[name])
        del timing["name"]
        row |= timing
        row["tflops"] = bench.tflops(step_flops(module, shape), row["gpu_us"])
        if name in steps and row["error"] is None:
            row["kept_mib"] = bench.kept_by_forward(steps[name].forward, args.device)
    return rows


def summary(rows: list[dict]) -> str:
    """One line a row; beside te_lite's the published times, which its GPU and wall time are held against."""
    from benchmarks import report

    published, _, _ = report.load_published()
    columns = ("gpu_us", "host_us", "wall_us", "kept_mib", "tflops", "exposed")
    names = ("shape", "module", "candidate", "recipe")
    lines, errors = [], []
    for row in rows:
        peer = published.get((row["shape"], row["module"], row["recipe"]), {})
        peer = peer if row["candidate"] == "te_lite" else {}
        cells = [report.number(row.get(column)) for column in columns]
        cells += [report.number(peer.get(column)) for column in ("gpu_us", "wall_us")]
        cells.append(report.ratio(row.get("gpu_us"), peer.get("gpu_us")))
        lines.append([*(row[name] for name in names), *cells])
        if row.get("error"):
            errors.append(" ".join([*(row[name] for name in names), row["error"]]))
    header = (*names, *columns, "TE gpu_us", "TE wall_us", "gpu/TE")
    return "\n".join([result_files.text_table(header, lines), *errors])


def chosen_shapes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Shape]:
    """Those that --shapes names, of the device's; all where it is not given. Ends the program for an unknown name."""
    known = SHAPES if torch.device(args.device).type == "cuda" else SMOKE_SHAPES
    unknown = set(args.shapes or ()) - {shape.name for shape in known}
    if unknown:
        parser.error(f"--shapes {sorted(unknown)}: on {args.device} choose from {[s.name for s in known]}")
    return [shape for shape in known if not args.shapes or shape.name in args.shapes]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", help="names of shapes; all by default")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=MODULES)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--wall-rounds", type=int, default=5)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for modules.json")
    host_profile.add_argument(parser)
    args = parser.parse_args(argv)
    args.shapes = chosen_shapes(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)  # tiny shapes: more threads only wait for each other
    if args.profile is not None:
        for module in args.modules:
            for recipe in args.recipes:
                work = module_step(module, args.shapes[-1], recipe, args.device)
                print(host_profile.profile_step(work, f"{module} {recipe}", args.profile))
        return 0
    clock = bench.clock_for(args.device)
    rows = []
    for shape in args.shapes:
        for module in args.modules:
            rows += measure(module, shape, args.recipes, clock, args)
            if torch.device(args.device).type == "cuda":
                torch.cuda.empty_cache()
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    shapes = [asdict(shape) for shape in args.shapes]
    result_files.write_results(args.out / "modules.json", "modules", rows, tree=tree, device=args.device, shapes=shapes)
    print(summary(rows))
    return 1 if any(row.get("error") for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
