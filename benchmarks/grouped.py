"""Grouped linears, the experts of a mixture, beside torch, torchao and Transformer Engine, taking turns in one process.

    python benchmarks/grouped.py                         # grouped.json and grouped_modules.json
    python benchmarks/grouped.py --sections steps modules       # grouped_modules.json alone
    python benchmarks/grouped.py --kernels               # tiles of the grouped GEMM: grouped_kernels.json
    python benchmarks/grouped.py --device cpu            # smoke test; its numbers mean nothing

8 experts, 8,192 tokens, K = 4096, N = 14336; tokens balanced, or by Zipf's law: the i-th expert has 1/i as many as
the first; "odd" is that with odd numbers of tokens, as routers give them and peers in fp8 do not take them.

grouped.json:

    products   one GEMM of quantized operands: by te_lite's Triton kernel, by torch, expert by expert by cublasLt
    casts      quantization of all groups, with GB/s
grouped_modules.json:

    steps      forward and backward of te.scaled_grouped_mm by recipe, of torch._grouped_mm in bf16 (over_torch: its GPU
               time over te_lite's, median over rounds), of torchao's rowwise one
    modules    the same of te.GroupedLinear, with gradients added to fp32 main_grad: weights quantized in every step or
               cached, or quantized and kept ("first", as Megatron calls a first micro-batch: is_first_microbatch=True);
               of torch._grouped_mm and an addition; of Transformer Engine's (over_te: te_lite's time over its)

A product that errs by more than MAX_ERROR of its largest value fails the run, as does a candidate that raises.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
from torch import Tensor

from benchmarks import bench, result_files
from benchmarks import grouped_kernels as kernels
from benchmarks.grouped_kernels import BF16, MAX_ERROR, Data, Problem
from benchmarks.peer_steps import RECIPES as PEER_RECIPES
from benchmarks.peer_steps import own

RESULTS = Path(__file__).resolve().parent / "results"
FILES = {"grouped": ("products", "casts"), "grouped_modules": ("steps", "modules")}  # results file -> its sections
SECTIONS = tuple(section for sections in FILES.values() for section in sections)
SPLITS = ("balanced", "zipf", "odd")
RECIPES = ("bf16", "current", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
FULL, SMOKE = (8, 8192, 4096, 14336), (3, 96, 64, 48)  # experts, tokens, K, N
TORCHAO = "torchao.prototype.moe_training:_to_fp8_rowwise_then_scaled_grouped_mm"
COLUMNS = "section split what candidate gpu_us host_us tflops gbps over_torch over_te error".split()


class Step:
    """Forward and backward of y = call(x, w_t), gradients to autograd; adds: those of w are then added up in fp32."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor], data: Data, adds: bool = False) -> None:
        self.call, self.dy = call, data.dy
        self.x, self.w = own(data.x), own(data.w)
        self.main_grad = torch.zeros_like(self.w, dtype=torch.float32) if adds else None

    def step(self) -> None:
        self.call(self.x, self.w.mT).backward(self.dy)
        if self.main_grad is not None:
            self.main_grad.add_(self.w.grad)

    def reset(self) -> None:
        self.x.grad = self.w.grad = None


class ModuleStep:
    """A GroupedLinear with fp32 main_grad. first: is_first_microbatch of each step; before False comes one of True."""

    def __init__(self, te: Any, context: Callable[[], Any], data: Data, splits: Any, first: bool | None) -> None:
        problem = data.problem
        self.module = te.GroupedLinear(
            len(problem.sizes), problem.k, problem.n, bias=False, params_dtype=BF16, device=data.device,
            fuse_wgrad_accumulation=True,
        )  # fmt: skip
        self.context, self.splits, self.x, self.dy = context, splits, own(data.x), data.dy
        block = torch.zeros(data.w.shape, device=data.device, dtype=torch.float32)
        for i, weight in enumerate(self.module.parameters()):
            weight.main_grad = block[i]
        self.first = True if first is False else first
        if first is False:
            self.reset()
            self.step()
            self.first = False

    def step(self) -> None:
        with self.context():
            y = self.module(self.x, self.splits, is_first_microbatch=self.first)
        (y[0] if isinstance(y, tuple) else y).backward(self.dy)

    def reset(self) -> None:
        self.x.grad = None


def ratio(samples: dict[str, list[bench.Sample]], over: str, under: str) -> float | None:
    """Median over rounds of the GPU time of `over` over that of `under`."""
    if not samples.get(over) or not samples.get(under):
        return None
    pairs = zip(samples[over], samples[under], strict=True)
    return statistics.median(a.gpu_us / b.gpu_us for a, b in pairs)


def timed(candidates: list[bench.Candidate], run: argparse.Namespace) -> tuple[dict[str, bench.Timing], dict]:
    samples: dict[str, list[bench.Sample]] = {}
    return bench.time_interleaved(candidates, run.clock, rounds=run.rounds, wall_rounds=0, kept=samples), samples


def row(section: str, split: str, what: str, timing: bench.Timing, **more: Any) -> dict[str, Any]:
    found = {"section": section, "split": split, "what": what, "candidate": timing.name, "gpu_us": timing.gpu_us}
    return found | {"host_us": timing.host_us, "spread": timing.spread, "error": timing.error} | more


def product_rows(data: Data, run: argparse.Namespace) -> list[dict]:
    rows = []
    for gemm, kind, operands in kernels.products(data):
        sizes = data.problem.sizes
        candidates = {"triton": kernels.by_triton(gemm, operands), "torch": kernels.by_torch(gemm, operands)}
        candidates["own"] = kernels.by_own(gemm, operands)
        candidates["expert by expert"] = kernels.by_expert(gemm, operands, sizes)
        if gemm == "wgrad":
            into = torch.zeros(data.w.shape, device=data.device, dtype=torch.float32)
            candidates["triton, added to fp32"] = kernels.by_triton(gemm, operands, into=into)
            candidates["own, added to fp32"] = kernels.by_own(gemm, operands, into)
            candidates["expert by expert, added to fp32"] = kernels.by_expert(gemm, operands, sizes, into)
        known = {name: call for name, call in candidates.items() if call is not None}
        if run.device == "cpu":  # no kernel runs there
            known = {"oracle": partial(kernels.reference, gemm, operands)}
        want = kernels.reference(gemm, operands)
        errors = {
            name: kernels.error(gemm, operands, call, want) for name, call in known.items() if "added" not in name
        }
        timings, samples = timed([bench.Candidate(name, call) for name, call in known.items()], run)
        for name, timing in timings.items():
            found = row("products", data.problem.name, f"{gemm} {kind}", timing, relative_error=errors.get(name))
            found["tflops"] = bench.tflops(data.problem.flops, timing.gpu_us)
            found["over_torch"] = ratio(samples, "torch", name) if name != "torch" else None
            if errors.get(name, 0.0) > MAX_ERROR:
                found["error"] = f"relative error {errors[name]:.2e}"
            rows.append(found)
    return rows


def cast_rows(data: Data, run: argparse.Namespace) -> list[dict]:
    cases = list(kernels.casts(data))
    candidates = [bench.Candidate(f"{name} of {which}", call) for name, which, _, call in cases]
    timings, _ = timed(candidates, run)
    rows = []
    for (name, which, moved, _), timing in zip(cases, timings.values(), strict=True):
        timing.name = "te_lite"
        rows.append(
            row("casts", data.problem.name, f"{name} of {which}", timing, gbps=bench.gbps(moved, timing.gpu_us))
        )
    return rows


def step_rows(data: Data, run: argparse.Namespace) -> list[dict]:
    import te_lite as te

    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    if run.device != "cpu":
        calls["torch"] = partial(torch._grouped_mm, offs=data.offs)
    for recipe in run.recipes:
        calls[f"te_lite {recipe}"] = partial(te.scaled_grouped_mm, offs=data.offs, recipe=recipe)
    if "torchao" in run.peers and data.problem.aligned:
        function = run.peers["torchao"]
        calls["torchao rowwise"] = partial(function, offs=data.offs, pad_token_groups_for_grouped_mm=False)
    work = {name: Step(call, data) for name, call in calls.items()}
    timings, samples = timed([bench.Candidate(name, one.step, one.reset) for name, one in work.items()], run)
    rows = []
    for name, timing in timings.items():
        found = row(
            "steps", data.problem.name, "step", timing, tflops=bench.tflops(3 * data.problem.flops, timing.gpu_us)
        )
        found["over_torch"] = ratio(samples, "torch", name) if name != "torch" else None
        rows.append(found)
    return rows


def module_rows(data: Data, run: argparse.Namespace) -> list[dict]:
    """Recipe by recipe: weights and main_grads of all together would not fit."""
    rows = []
    for recipe in [*run.recipes, "delayed"]:
        work: dict[str, Callable[[], Any]] = {}
        if run.device != "cpu":
            work["torch"] = partial(Step, partial(torch._grouped_mm, offs=data.offs), data, True)
        for library in ("te_lite", *(("te",) if "te" in run.peers else ())):
            if library == "te" and (recipe not in PEER_RECIPES or (recipe != "bf16" and not data.problem.aligned)):
                continue
            te = run.peers[library]
            context: Callable[[], Any] = contextlib.nullcontext
            if recipe != "bf16":
                name = PEER_RECIPES.get(recipe)
                recipes = importlib.import_module(
                    "te_lite.recipe" if library == "te_lite" else "transformer_engine.common.recipe"
                )
                chosen = getattr(recipes, name)() if name else recipes.from_name(recipe)
                context = partial(te.autocast, enabled=True, recipe=chosen)
            splits: list[tuple[str, Any]] = [("list", list(data.problem.sizes))]
            if library == "te_lite":
                splits.append(("device", torch.tensor(data.problem.sizes, device=data.device)))
            for kind, given in splits:
                ways: dict[str, bool | None] = {"": None}
                if recipe != "bf16":
                    ways |= {" cached": False, " first": True} if kind == "list" else {" cached": False}
                for way, first in ways.items():
                    work[f"{library} {kind}{way}"] = partial(ModuleStep, te, context, data, given, first)
        rows += _module_case(recipe, work, data, run)
    return rows


def _module_case(recipe: str, work: dict[str, Callable[[], Any]], data: Data, run: argparse.Namespace) -> list:
    made, rows = {}, []
    for name, make in work.items():
        try:
            made[name] = make()
        except Exception as error:  # a peer that refuses costs its row
            timing = bench.Timing(name, error=f"{type(error).__name__}: {error}")
            rows.append(row("modules", data.problem.name, recipe, timing))
    timings, samples = timed([bench.Candidate(name, one.step, one.reset) for name, one in made.items()], run)
    for name, timing in timings.items():
        found = row("modules", data.problem.name, recipe, timing)
        found["tflops"] = bench.tflops(3 * data.problem.flops, timing.gpu_us)
        other = " ".join(["te list", *name.split()[2:]])
        found["over_te"] = ratio(samples, name, other) if name.startswith("te_lite") else None
        found["over_torch"] = ratio(samples, "torch", name) if name != "torch" else None
        rows.append(found)
    return rows


def tile_rows(data: Data, run: argparse.Namespace) -> list[dict]:
    """Tiles of the Triton kernel for each product, the table's and torch's beside them."""
    rows = []
    for gemm, kind, operands in kernels.products(data):
        if run.kinds and kind not in run.kinds:
            continue
        want, calls = kernels.reference(gemm, operands), {}
        for config in kernels.tiles(gemm, kind):
            calls[" ".join(map(str, config))] = kernels.by_triton(gemm, operands, config)
        calls |= {"table": kernels.by_triton(gemm, operands), "torch": kernels.by_torch(gemm, operands)}
        good: dict[str, Callable[[], Tensor]] = {}
        calls = {name: call for name, call in calls.items() if call is not None}
        begin = (lambda: None) if run.device == "cpu" else torch.cuda.synchronize  # gives the thread its context
        with ThreadPoolExecutor(initializer=begin) as pool:  # Triton compiles outside of the interpreter's lock
            compiled = [pool.submit(call) for call in calls.values()]
        for (name, call), first in zip(calls.items(), compiled, strict=True):
            try:
                first.result()
                found = kernels.error(gemm, operands, call, want)
            except Exception as error:  # a tile that needs more than there is costs its row
                timing = bench.Timing(name, error=f"{type(error).__name__}: {str(error)[:60]}")
                rows.append(row("tiles", data.problem.name, f"{gemm} {kind}", timing))
                continue
            if found > MAX_ERROR:
                timing = bench.Timing(name, error=f"relative error {found:.2e}")
                rows.append(row("tiles", data.problem.name, f"{gemm} {kind}", timing))
            else:
                good[name] = call
        timings, samples = timed([bench.Candidate(name, call) for name, call in good.items()], run)
        for name, timing in timings.items():
            tflops = bench.tflops(data.problem.flops, timing.gpu_us)
            over = ratio(samples, "torch", name) if name != "torch" else None
            rows.append(row("tiles", data.problem.name, f"{gemm} {kind}", timing, tflops=tflops, over_torch=over))
    return sorted(rows, key=lambda one: (one["what"], one["gpu_us"] or float("inf")))


def summary(rows: list[dict]) -> str:
    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.3f}" if isinstance(value, float) and value < 10 else (
            f"{value:.0f}" if isinstance(value, float) else str(value)[:60]
        )  # fmt: skip

    return result_files.text_table(COLUMNS, [[cell(one.get(name)) for name in COLUMNS] for one in rows])


def found_peers(device: str) -> dict[str, Any]:
    """te_lite, and those peers that can be imported: "te" (module), "torchao" (function)."""
    found: dict[str, Any] = {"te_lite": importlib.import_module("te_lite")}
    if device == "cpu":
        return found
    with contextlib.suppress(Exception):
        found["te"] = importlib.import_module("transformer_engine.pytorch")
    with contextlib.suppress(Exception):
        module, _, name = TORCHAO.partition(":")
        found["torchao"] = getattr(importlib.import_module(module), name)
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=SPLITS)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--kernels", action="store_true", help="tiles of the grouped GEMM alone")
    parser.add_argument("--kinds", nargs="+", help="with --kernels: bf16, rowwise, current, blockwise; all by default")
    parser.add_argument("--shape", nargs=4, type=int, metavar=("G", "M", "K", "N"), help="experts, tokens, K, N")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results files")
    return parser.parse_args(argv)


def by_file(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """Results file -> its rows; no file without rows."""
    found = {name: [row for row in rows if row["section"] in sections] for name, sections in FILES.items()}
    return {name: some for name, some in found.items() if some}


def main(argv: Sequence[str] | None = None) -> int:
    run = parse(argv)
    torch.manual_seed(0)
    if run.device == "cpu":
        torch.set_num_threads(1)
    groups, tokens, k, n = run.shape or (SMOKE if run.device == "cpu" else FULL)
    run.clock, run.peers = bench.clock_for(run.device), found_peers(run.device)
    sections = {"products": product_rows, "casts": cast_rows, "steps": step_rows, "modules": module_rows}
    rows: list[dict] = []
    for name in run.splits:
        data = Data(Problem(name, kernels.split(name, tokens, groups), k, n), run.device)
        for measure in [tile_rows] if run.kernels else [sections[section] for section in run.sections]:
            found = measure(data, run)
            print(summary(found), flush=True)
            rows += found
            data.forget()
            if run.device != "cpu":
                torch.cuda.empty_cache()
    tree = run.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    more = {"shape": [groups, tokens, k, n], "peers": sorted(run.peers)}
    files = {"grouped_kernels": rows} if run.kernels else by_file(rows)
    for name, some in files.items():
        result_files.write_results(run.out / f"{name}.json", name, some, tree=tree, device=run.device, **more)
    return 0 if run.kernels else 1 if any(one.get("error") for one in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
