"""On one rank: a GEMM and the pass after it, against one kernel that computes both (te_lite/overlap/one_rank.py).

    python benchmarks/alone.py
    python benchmarks/alone.py --shapes 8b --recipes delayed --rounds 40
    python benchmarks/alone.py --device cpu  # smoke test at a tiny shape, no kernel; its numbers mean nothing

RMSNorm, no bias, SwiGLU. Rows of fc1 time its GEMM until fc2's operand a is there, rows of dgrad fc2's dgrad until the
gradient of h is there, as fc1's GEMMs read it:

    pass       cublasLt and a pass; fp8 in both layouts
    row        fc1: of a the rows alone, for backward computes a again
    one read   dgrad: the pass also gives a by column
    again      dgrad: beside the rest, a by column from a read of its own
    fused      the kernel; of current scaling it leaves the amax, and a pass follows
    fused row  fc1: the kernel, of a the rows alone

Rows of step time forward and backward of LayerNormMLP, modules with TE_LITE_EPILOGUES=0 and with 1, by default and with
recompute_activation=False. Below the rows stand the courses that a module may take by default, sums of fc1 and dgrad,
and what te_lite/overlap/one_rank.py's FASTER should say by them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import bench, modules, report, result_files
from te_lite.functional.recordings import MOST_FLOPS
from te_lite.ops.activation import Activation
from te_lite.ops.nvrtc import unavailable
from te_lite.ops.source import Source, plain
from te_lite.overlap.epilogues import Activate, ActivateGrad
from te_lite.overlap.exchange import Gemm
from te_lite.overlap.fused import product_refusal
from te_lite.overlap.one_rank import multiply
from te_lite.quantize.qtensor import QTensor

RECIPES = {"bf16": "high precision", "delayed": "fp8", "current": "amax"}
SWIGLU = Activation.of("swiglu")
OPTIONS: dict[str, dict[str, Any]] = {"": {}, ", kept": {"recompute_activation": False}}
GAIN = 0.98  # of what it replaces and of the other GEMM: 2%, which is about the noise
Call = Callable[[], object]


def built_step(
    shape: modules.Shape, recipe: str, args: argparse.Namespace, word: str, **options: Any
) -> modules.ModuleStep:
    """A module whose plans are built under TE_LITE_EPILOGUES=word."""
    os.environ["TE_LITE_EPILOGUES"] = word
    built = modules.build_te("LayerNormMLP", shape, args.device, **options)
    x, dy = (torch.randn(shape.tokens, shape.hidden, device=args.device, dtype=modules.BF16) for _ in range(2))
    one = modules.ModuleStep(built, modules.recipe_context(recipe), x.requires_grad_(), dy)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.023)
    one.step()
    return one


class Parts:
    """fc1's GEMM and fc2's dgrad of a module of that recipe, with what follows each. fp8 quantized beforehand."""

    def __init__(self, shape: modules.Shape, recipe: str, args: argparse.Namespace) -> None:
        module = built_step(shape, recipe, args, "1").module
        self.want, (_, (self.plan1, self.plan2)) = RECIPES[recipe], module._planned
        m, weights = shape.tokens, [p.detach() for p in (module.fc1_weight, module.fc2_weight)]
        fc1, dgrad = self.plan1.operands.fprop, self.plan2.operands.dgrad

        def random(columns: int) -> Source:
            return plain(torch.randn(m, columns, device=args.device, dtype=modules.BF16))

        self.x, self.dy = fc1.a.quantize(random(shape.hidden))[0], dgrad.a.quantize(random(shape.hidden))[0]
        w1, w2 = fc1.b.quantize(plain(weights[0]))[0], dgrad.b.quantize(plain(weights[1]), row=False, col=True)[0]
        self.fc1 = Gemm(w1, "row", modules.BF16, fc1.fast_accum, "te_lite.fprop")
        self.dgrad = Gemm(w2, "col", modules.BF16, dgrad.fast_accum, "te_lite.dgrad")
        why = product_refusal(self.fc1, self.x) or product_refusal(self.dgrad, self.dy)
        if why and args.device != "cpu":
            raise RuntimeError(f"no row of {shape.name} and {recipe} would time the kernel: {why}")
        self.h: torch.Tensor = self.fc1(self.x)
        self.a = self.plan2.operands.fprop.a
        self.seed = self.a.quantize(Source("act", self.h, activation=SWIGLU))[0].seed_only()

    def forward(self, want: str, col: bool) -> QTensor:
        made: Any = multiply(replace(self.fc1, epilogue=Activate(self.a, SWIGLU, want, col=col)), self.x)[1]
        return made if isinstance(made, QTensor) else self.a.quantize(made, row=True, col=col)[0]

    def backward(self, want: str, again: bool) -> object:
        quantizer = self.plan1.operands.dgrad.a
        made: Any = multiply(replace(self.dgrad, epilogue=ActivateGrad(quantizer, SWIGLU, want, self.h)), self.dy)
        if isinstance(made, QTensor):
            return made
        if again:
            return quantizer.quantize_and_again(made, True, True, None, self.seed)
        return quantizer.quantize(made, row=True, col=True)

    def calls(self) -> dict[str, dict[str, Call]]:
        """By what is timed, then by candidate."""
        want, h = self.want, Source("act", self.h, activation=SWIGLU)
        forward: dict[str, Call] = {"pass": partial(self.forward, "", True), "fused": partial(self.forward, want, True)}
        backward: dict[str, Call] = {
            "pass": partial(self.backward, "", False),
            "one read": partial(self.backward, "", True),
            "fused": partial(self.backward, want, False),
            "fused, again": lambda: (self.a.again(h, self.seed), self.backward(want, False)),
        }
        if want != "high precision":
            forward["row"] = partial(self.forward, "", False)
            forward["fused row"] = partial(self.forward, want, False)
        if want == "amax":
            backward["fused one read"] = partial(self.backward, want, True)
        return {"fc1": forward, "dgrad": backward}


def courses(want: str, again: bool, apart: bool) -> dict[str, tuple[str, str]]:
    """What MLPLayer does by default, by which GEMM is fused: candidates of (fc1, dgrad). again, apart: whether
    activation(h) is computed again where a pass reads h anyway, and where none does."""
    behind = again if want == "amax" else apart  # the kernel's gradient of h
    rows = ("row", "fused row"), ("pass", "fused")
    quantizes = want != "high precision"
    (now, fc1), (dgrad, both) = (rows[not (one and quantizes)] for one in (again, behind))
    passes = "one read" if again else "pass"
    fused = ("fused one read" if want == "amax" else "fused, again") if behind else "fused"
    return {"now": (now, passes), "fc1": (fc1, passes), "dgrad": (dgrad, fused), "both": (both, fused)}


def timed(what: str, run: list[bench.Candidate], clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    walls = args.wall_rounds if what == "step" else 0
    timings = bench.time_interleaved(run, clock, rounds=args.rounds, wall_rounds=walls)
    return [{"what": what, "candidate": name} | asdict(timing) for name, timing in timings.items()]


def time_parts(shape: modules.Shape, recipe: str, clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    parts, rows = Parts(shape, recipe, args), []
    with torch.no_grad():
        for what, calls in parts.calls().items():
            rows += timed(what, [bench.Candidate(name, call) for name, call in calls.items()], clock, args)
    plan = parts.plan2
    taken = courses(parts.want, plan.recomputes_x, plan.recomputes_apart)
    us = {(row["what"], row["candidate"]): row["gpu_us"] for row in rows}
    for name, (fc1, dgrad) in taken.items():
        both = us["fc1", fc1], us["dgrad", dgrad]
        total = None if None in both else sum(both)
        rows.append({"what": "course", "candidate": name, "gpu_us": total, "error": None, "of": f"{fc1} + {dgrad}"})
    return rows


def time_steps(shape: modules.Shape, recipe: str, clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    steps = {}
    for word, (name, options) in itertools.product(("0", "1"), OPTIONS.items()):
        steps[f"{'fused' if word == '1' else 'now'}{name}"] = built_step(shape, recipe, args, word, **options)
    plans = {name: one.module._planned[1] for name, one in steps.items()}
    run = [bench.Candidate(name, one.step, one.reset) for name, one in steps.items()]
    rows = timed("step", run, clock, args)
    if any(one.module._planned[1] is not plans[name] for name, one in steps.items()):
        raise RuntimeError("a module has planned anew, under another TE_LITE_EPILOGUES than it was built with")
    for row in rows:
        if row["error"] is None:
            row["kept_mib"] = bench.kept_by_forward(steps[row["candidate"]].forward, args.device)
    return rows


def measure(shape: modules.Shape, recipe: str, clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    rows: list[dict] = []
    for part in (time_parts, time_steps):
        try:
            rows += part(shape, recipe, clock, args)
        except Exception as error:  # a row with its error, and the others run
            rows.append({"what": part.__name__, "candidate": "", "error": f"{type(error).__name__}: {error}"})
    return [{"shape": shape.name, "recipe": recipe} | row for row in rows]


def spans(rows: list[dict], shapes: dict[str, modules.Shape]) -> list[str]:
    """FASTER by the best course of each shape: the span that holds the shapes where a GEMM is fused in it, if it holds
    no other. Not of layers whose launches are recorded: a fused one is not, and the host decides there."""
    lines = []
    for (recipe, want), grad in itertools.product(RECIPES.items(), (False, True)):
        won, lost = [], []
        for name, shape in shapes.items():
            mine = [row for row in rows if (row["shape"], row["recipe"], row["what"]) == (name, recipe, "course")]
            us = {row["candidate"]: row["gpu_us"] for row in mine if row["gpu_us"]}
            best = min(us, key=us.__getitem__, default="now")
            k = shape.hidden
            work = shape.tokens * k * shape.ffn  # M * N * K of dgrad, half of fc1's
            where, recorded = (work * (1 if grad else 2), k), 4 * work <= MOST_FLOPS
            saves = not recorded and best in ("both", "dgrad" if grad else "fc1") and us[best] < GAIN * us["now"]
            (won if saves else lost).append(where)
        if won:
            least, deepest = min(size for size, _ in won), max(k for _, k in won)
            clean = not any(size >= least and k <= deepest for size, k in lost)
            remark = "" if clean else "  # but it also holds shapes where it lost"
            lines.append(f"    ({want!r}, {grad}): Span({least}, {deepest}),{remark}")
    return lines or ["    nothing: FASTER stays empty"]


def summary(rows: list[dict], shapes: dict[str, modules.Shape]) -> str:
    names, columns = ("shape", "recipe", "what", "candidate"), ("gpu_us", "host_us", "wall_us", "kept_mib", "spread")
    now = {tuple(row[name] for name in names[:3]): row["gpu_us"] for row in rows
           if row["candidate"] in ("now", "pass")}  # fmt: skip
    lines = []
    for row in rows:
        base = now.get(tuple(row[name] for name in names[:3]))
        cells = [report.number(row.get(column), 2 if column == "spread" else 0) for column in columns]
        ratio = report.number(row["gpu_us"] / base, 3) if base and row.get("gpu_us") else ""
        lines.append([*(row[name] for name in names), *cells, ratio, row["error"] or row.get("of", "")])
    table = result_files.text_table((*names, *columns, "of now, or pass", ""), lines)
    return "\n".join([table, "FASTER:", *spans(rows, shapes)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", help="names of shapes of modules.py; all by default")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--wall-rounds", type=int, default=5)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=modules.RESULTS, help="folder for alone.json")
    args = parser.parse_args(argv)
    args.shapes = modules.chosen_shapes(parser, args)
    if args.device == "cpu":
        torch.set_num_threads(1)
    elif why := unavailable(torch.device(args.device)):
        parser.error(f"--device {args.device}: {why}")
    torch.manual_seed(0)
    clock, rows = bench.clock_for(args.device), []
    for shape, recipe in itertools.product(args.shapes, args.recipes):
        rows += measure(shape, recipe, clock, args)
        if args.device != "cpu":
            torch.cuda.empty_cache()
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    shapes = [asdict(shape) for shape in args.shapes]
    result_files.write_results(args.out / "alone.json", "alone", rows, tree=tree, device=args.device, shapes=shapes)
    print(summary(rows, {shape.name: shape for shape in args.shapes}))
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
