"""The public verbs as users call them, against PyTorch's symmetric memory and NCCL.

    torchrun --nproc-per-node 4 benchmarks/verbs.py
    torchrun --nproc-per-node 2 benchmarks/verbs.py --device cpu    # smoke test; its numbers mean nothing

Forward without gradients. In each run these are interleaved; a sample starts on all ranks and is the slowest rank's:

    te_lite   te.all_gather_linear, te.linear_reduce_scatter, te.all_gather, te.reduce_scatter through userbuffers
    nccl      torch.distributed's all-gather and then torch's GEMM, or the GEMM and then its reduce-scatter
    symm_mem  the fused operators of torch.ops.symm_mem, and its low-contention collectives

"graph" is the same call in a CUDA graph. "symm_mem symmetric", of all_gather alone, has its input in symmetric memory
already, so that torch need not copy it there; torch's reduce-scatter of such an input gave wrong sums on GPUs in some
calls, with relative errors of about 50. Handles are waited for at once. "beside a GEMM" runs a GEMM between the two,
which takes about as long as NCCL; "gemm" is that GEMM alone. fp8 is per-tensor current scaling: te_lite quantizes x and
the weights in the call, and so do its peers, by te_lite's kernels and with te_lite's one scale for the gathered shards
of all ranks.

"against" a peer is the median over rounds of the peer's time over the candidate's, both as called or both in graphs.
"relative_error" is the norm of a row's difference from the result in fp32, over that row's, where it is largest. What
NCCL's roundings allow is the limit of NCCL's, and twice NCCL's is that of the others; more is an error. "left_out" says
why a candidate did not run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te
from benchmarks import bench, report, result_files
from benchmarks.modules import BF16, RESULTS
from benchmarks.overlap_gemms import RECIPES, SHAPES, SMOKE_SHAPES, Shape, has_torch_fused
from benchmarks.ranks import run_on_ranks
from benchmarks.recipes import RanksClock
from te_lite.modules.plans import quantizers
from te_lite.ops.source import plain
from te_lite.overlap.collective import _all_gather_into, _reduce_scatter_into  # as this torch calls them
from te_lite.parallel import TensorParallel

SERVING = [shape for shape in SHAPES if shape.name.startswith(("fc1", "fc2"))]
ROUNDING = {"bf16": 2.0**-9, "fp8": 2.0**-4}  # of one rounding, relative: in bf16 the root mean square
GEMM_WIDTH, GEMM_US = {"cuda": 4096, "cpu": 64}, 200.0  # beside a collective; its time where NCCL's is not known
Step = Callable[[], Any]


@dataclass
class Call:
    """A call of one verb on this rank. A step gives a list of results; exact() gives them in fp32.

    ways: "nccl" first. bound: of NCCL's relative error. beside: what runs before a handle is waited for."""

    verb: str
    shape: Shape
    dtype: str
    bound: float
    exact: Step
    ways: dict[str, Step]
    beside: Step | None = None


def begun(x: Tensor, gathers: bool) -> tuple[Tensor, Any]:
    """(x of all ranks, or this rank's part of their sum, once the work is done; the work)."""
    rows = x.shape[0] * dist.get_world_size() if gathers else x.shape[0] // dist.get_world_size()
    out = x.new_empty(rows, x.shape[1])
    run: Any = _all_gather_into if gathers else _reduce_scatter_into
    return out, run(*(t.view(torch.uint8) if t.itemsize == 1 else t for t in (out, x)), async_op=True)


def exchanged(x: Tensor, gathers: bool) -> Tensor:
    out, work = begun(x, gathers)
    work.wait()
    return out


def linear(shape: Shape, dtype: str, device: torch.device, count: int = 1) -> Call:
    """y_i = all_gather(x) @ w_i^T of so many weights, or reduce_scatter(x @ w^T)."""
    group: Any = dist.group.WORLD
    name, ranks, gathers, recipe = group.group_name, group.size(), shape.op == "AG", RECIPES[dtype]
    tp = TensorParallel("column" if gathers else "row", ranks, group, True)
    fprop = quantizers(te.recipe.from_name(recipe), None, 0, BF16, tp, device, None).fprop
    tokens = shape.m // ranks if gathers else shape.m
    x, *ws = (torch.randn(rows, shape.k, device=device, dtype=BF16) for rows in (tokens, *[shape.n] * count))

    def operands() -> tuple[Any, list[Any]]:
        """x and the weights as the verb quantizes them: (data, scale), without a scale in bf16."""
        each = [(fprop.a, x), *((fprop.b, w) for w in ws)]
        first, *others = [quantizer.quantize(plain(t))[0].operand("row") for quantizer, t in each]
        return first, others

    def collectively(a: Any, bs: list[Any]) -> list[Tensor]:
        whole = exchanged(a[0], True) if gathers else a[0]
        ys = [matmul(whole, a[1], *b) for b in bs]
        return ys if gathers else [exchanged(ys[0], False)]

    def matmul(a: Tensor, a_scale: Any, b: Tensor, b_scale: Any) -> Tensor:
        if a_scale is None:
            return a @ b.t()
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=BF16, use_fast_accum=fprop.fast_accum)

    def te_lite() -> list[Tensor]:
        if gathers:
            return list(te.all_gather_linear(x, tuple(ws), group, recipe=recipe))
        return [te.linear_reduce_scatter(x, ws[0], group, recipe=recipe)]

    def symm_mem() -> list[Tensor]:
        ops, fast, ((a, a_scale), bs) = torch.ops.symm_mem, fprop.fast_accum, operands()
        datas, scales = [b.t() for b, _ in bs], [scale for _, scale in bs]
        if gathers and a_scale is None:
            return ops.fused_all_gather_matmul(a, datas, 0, name, return_A=False)[1]
        if gathers:
            none, more = [None] * count, ([BF16] * count, [fast] * count)
            return ops.fused_all_gather_scaled_matmul(a, datas, a_scale, scales, 0, name, none, none, *more)[1]
        if a_scale is None:
            return [ops.fused_matmul_reduce_scatter(a, datas[0], "sum", 0, name)]
        given = (a, datas[0], a_scale, scales[0], "sum", 0, 0, name, [shape.m, shape.n])
        return [ops.fused_scaled_matmul_reduce_scatter(*given, out_dtype=BF16, use_fast_accum=fast)]

    ways = {"nccl": lambda: collectively(*operands()), "te_lite": te_lite, "symm_mem": symm_mem}
    # Each rank's product and each step of the sum is rounded to bf16, in fp8 both factors before.
    bound = 2 * ranks * ROUNDING["bf16"] + (2 * ROUNDING["fp8"] if dtype == "fp8" else 0.0)
    verb = ("all_gather_linear" if gathers else "linear_reduce_scatter") + f", {count} weights" * (count > 1)
    return Call(
        verb, shape, dtype, bound, lambda: collectively((x.float(), None), [(w.float(), None) for w in ws]), ways
    )


def bare(shape: Shape, device: torch.device, beside: Step | None = None) -> Call:
    """all_gather(x) or reduce_scatter(x) that begins, and is waited for behind `beside`."""
    group: Any = dist.group.WORLD
    name, gathers = group.group_name, shape.op == "AG"
    size = (shape.m // group.size(), shape.k) if gathers else (shape.m, shape.n)
    x = torch.randn(size, device=device, dtype=BF16)
    symmetric: list[Tensor] = []

    def hidden(wait: Callable[[], Any]) -> list[Any]:
        if beside is not None:
            beside()
        return [wait()]

    def nccl() -> list[Tensor]:
        out, work = begun(x, gathers)
        hidden(work.wait)
        return [out]

    def symm_mem(x: Tensor = x) -> list[Tensor]:
        low: Any = torch.ops.symm_mem  # on a stream of torch's own
        out = low._low_contention_all_gather(x, name) if gathers else low._low_contention_reduce_scatter(x, "sum", name)
        return hidden(lambda: torch.ops._c10d_functional.wait_tensor(out))

    def of_symmetric() -> list[Tensor]:
        if not symmetric:
            from torch.distributed import _symmetric_memory

            made = _symmetric_memory.empty(size, dtype=BF16, device=device)
            _symmetric_memory.rendezvous(made, name)
            symmetric.append(made.copy_(x))
        return symm_mem(symmetric[0])

    verb = te.all_gather if gathers else te.reduce_scatter
    ways: dict[str, Step] = {"nccl": nccl, "te_lite": lambda: hidden(verb(x, group).wait)}
    ways |= {"symm_mem": symm_mem, **({"symm_mem symmetric": of_symmetric} if gathers else {})}
    bound = 0.0 if gathers else group.size() * ROUNDING["bf16"]
    return Call(verb.__name__, shape, "bf16", bound, lambda: [exchanged(x.float(), gathers)], ways, beside)


def of_all_ranks(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def symm_mem_refusal(room: int, wanted: bool, device: torch.device) -> str:
    """Why torch's symmetric memory is left out, or "". Makes its workspace: one that grew would leave graphs behind."""
    if device.type == "cpu" or not wanted:
        return "it needs GPUs" if wanted else "--no-symm-mem"
    group: Any = dist.group.WORLD
    why = ""
    try:  # what fails on all ranks alike; one that fails alone would leave the others waiting
        if not has_torch_fused():
            why = "this torch has none"
        else:
            from torch.distributed import _symmetric_memory as module

            if module._SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, device.index):
                why = "it would use multicast"
            else:
                module.get_symm_mem_workspace(group.group_name, min_size=room)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return next(filter(None, of_all_ranks(why)), "")


def as_graph(step: Step) -> Step:
    """step() in a CUDA graph, captured at the first call; a call gives what its replay has written."""
    results: list[Any] = [None]
    replay = bench.captured(lambda: results.__setitem__(0, step()))
    return lambda: replay() or results[0]


def relative_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """Of the worst row of all results."""
    worst = []
    for result, want in zip(results, exact, strict=True):
        if result.shape != want.shape:
            raise ValueError(f"the result is {list(result.shape)}: must be {list(want.shape)}")
        worst.append(((result.float() - want).norm(dim=1) / want.norm(dim=1)).max())
    return torch.stack(worst).max().item()


def tried(step: Step, exact: list[Tensor]) -> tuple[str | None, float]:
    """(what step() raised on a rank, the largest relative error of all ranks). The same on all ranks: where one lacked
    a candidate that others run, they would wait for it."""
    mine: tuple[str | None, float] = (None, 0.0)
    try:
        mine = None, relative_error(step(), exact)
    except Exception as error:
        mine = f"rank {dist.get_rank()}: {type(error).__name__}: {error}", 0.0
    said, errors = zip(*of_all_ranks(mine), strict=True)
    return next(filter(None, said), None), torch.tensor(errors).max().item()


def compare(call: Call, refusal: str, clock: RanksClock, rounds: int) -> list[dict]:
    """A row for each candidate, the same on all ranks."""
    run, left_out, kept = dict[str, Step](), dict[str, str](), dict[str, list[bench.Sample]]()
    for name, step in call.ways.items():
        for label, way in ((name, step), (f"{name} graph", as_graph(step))):
            no_graph = "there are no CUDA graphs of CPU work" if way is not step and not clock.word.is_cuda else ""
            run[label], left_out[label] = way, refusal if name.startswith("symm_mem") else no_graph
    exact, errors, right, allowed = call.exact(), dict[str, str | None](), dict[str, float](), call.bound
    for name in (name for name in run if not left_out[name]):
        errors[name], found = tried(run[name], exact)
        if not errors[name] and found <= allowed:
            right[name] = found
        elif not errors[name]:  # also a NaN
            errors[name] = f"wrong: a relative error of {found:.2g}, must be at most {allowed:.2g}"
        allowed = 2 * right["nccl"] if name == "nccl" and name in right else allowed
    if call.beside is not None:
        run["gemm"], errors["gemm"] = call.beside, None
    candidates = [bench.Candidate(name, run[name]) for name, error in errors.items() if not error]
    timings = bench.time_interleaved(candidates, clock, rounds=rounds, wall_rounds=0, kept=kept)
    verb, shape, rows = call.verb + " beside a GEMM" * (call.beside is not None), call.shape, []
    for name in run:
        timing = timings.get(name, bench.Timing(name, error=errors.get(name)))
        row = {"verb": verb, "shape": shape.name, "dtype": call.dtype, "m": shape.m, "k": shape.k, "n": shape.n}
        row |= {"candidate": name, "gpu_us": timing.gpu_us, "host_us": timing.host_us, "spread": timing.spread}
        for peer in ("nccl", "symm_mem"):
            pairs = zip(kept.get(peer + " graph" * name.endswith("graph"), []), kept.get(name, []), strict=False)
            ratios = [theirs.gpu_us / ours.gpu_us for theirs, ours in pairs]
            row[f"against_{peer}"] = statistics.median(ratios) if ratios else None
        row |= {"relative_error": right.get(name), "exposed": timing.exposed, "left_out": left_out.get(name) or None}
        rows.append(row | {"error": timing.error})
    return rows


def gemm_of(us: float, clock: RanksClock) -> Step:
    """A GEMM in bf16 that takes about so long. The same on all ranks."""
    width = GEMM_WIDTH[clock.word.device.type]
    a, b = (torch.randn(width, width, device=clock.word.device, dtype=BF16) for _ in range(2))
    took = statistics.median(clock.sample(lambda: a @ b, 500.0).gpu_us for _ in range(8))
    rows = min(64 * width, max(256, round(width * us / took / 256) * 256))
    long = torch.randn(rows, width, device=clock.word.device, dtype=BF16)
    return lambda: long @ b


@torch.no_grad()
def measure(args: argparse.Namespace, device: torch.device, rows: list[dict], write: Callable[[], None]) -> None:
    """Appends the rows of one call after the other; write() after each, so that a run cut off leaves the rest."""
    shapes = SMOKE_SHAPES if device.type == "cpu" else [shape for shape in SERVING if shape.name in args.shapes]
    sizes = [(shape.m, shape.k if shape.op == "AG" else shape.n) for shape in shapes]  # of what travels
    refusal = symm_mem_refusal(max(m * width for m, width in sizes) * BF16.itemsize, args.symm_mem, device)
    clock = RanksClock(device)

    def add(call: Call) -> list[dict]:
        rows.extend(found := compare(call, refusal, clock, args.rounds))
        write()
        return found

    for shape, size in zip(shapes, sizes, strict=True):
        # strict: a call that cannot overlap is an error in its row.
        te.initialize_ub(size, dist.get_world_size(), device=device, strict=True, cuda_graphs=device.type == "cuda")
        for dtype in args.dtypes:
            for count in (1, 2) if shape.op == "AG" else (1,):
                add(linear(shape, dtype, device, count))
        us = next(row["gpu_us"] for row in add(bare(shape, device)) if row["candidate"] == "nccl")
        add(bare(shape, device, gemm_of(us or GEMM_US, clock)))
        te.destroy_ub()


def summary(rows: list[dict]) -> str:
    """A line for each call, in microseconds, and what was left out."""
    names = list(dict.fromkeys(row["candidate"] for row in rows if not row["left_out"]))
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        cell = row["error"] or report.number(row["gpu_us"])
        lines.setdefault((row["verb"], row["shape"], row["dtype"]), {})[row["candidate"]] = cell[:60]
    table = [[*key, *(cells.get(name, "") for name in names)] for key, cells in lines.items()]
    out = dict.fromkeys(f"{row['candidate']} is left out: {row['left_out']}" for row in rows if row["left_out"])
    return "\n".join([result_files.text_table(("verb", "shape", "dtype", *names), table), *out])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    names = [shape.name for shape in SERVING]
    parser.add_argument("--shapes", nargs="+", default=names, choices=names)
    parser.add_argument("--dtypes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--no-symm-mem", dest="symm_mem", action="store_false", help="leave torch's operators out")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for verbs.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_on_ranks("verbs", parse(argv), measure, summary)


if __name__ == "__main__":
    raise SystemExit(main())
