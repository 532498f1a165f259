"""All-gather + GEMM and GEMM + reduce-scatter by every way there is, against the limit of the hardware.

    torchrun --nproc-per-node 4 benchmarks/overlap_gemms.py
    torchrun --nproc-per-node 2 benchmarks/overlap_gemms.py --device cpu    # smoke test; its numbers mean nothing

In each run are interleaved: the GEMM alone (cuBLAS, on the whole operand), the copies alone (as many bytes, one push to
each peer through userbuffers), NCCL and then the GEMM or the other way round ("collective"), te_lite's ring and fused
schedules and torch's fused operators in a CUDA graph. A sample starts on all ranks together and is the slowest rank's.
The limit is the longer of GEMM and copies; "of limit" is its share of a candidate's time. "against" a peer is the
median over rounds of the peer's time over the candidate's. fp8 is current scaling with fast accumulation, as in a
forward pass; its operands lie ready. Reduce-scatters travel in bf16, "fused narrow" as ub_cfgs' fp8_buf has it; what
that costs in accuracy is "relative_error": the norm of a result's difference from the sum of the products in fp32,
over that sum's, of the rank where it is largest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te
from benchmarks import bench, report, result_files
from benchmarks.modules import BF16, RESULTS
from benchmarks.ranks import run_on_ranks
from benchmarks.recipes import RanksClock
from te_lite.functional.parallel import parallel_linear
from te_lite.ops.source import plain
from te_lite.overlap import userbuffers
from te_lite.overlap.buffers import Gather
from te_lite.overlap.collective import Collective, reduce_scatter
from te_lite.overlap.exchange import Gemm, Place
from te_lite.overlap.fused import Fused
from te_lite.overlap.programs import following
from te_lite.overlap.ring import Ring
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Site, operands_for


@dataclass(frozen=True)
class Shape:
    """op "AG" or "RS"; m tokens of all ranks, k and n of the local GEMM [m, k] x [n, k]^T."""

    name: str
    op: str
    m: int
    k: int
    n: int


SHAPES = (
    Shape("qkv 70b", "AG", 8192, 8192, 2560),
    Shape("fc1 70b", "AG", 8192, 8192, 14336),
    Shape("fc1 8b", "AG", 8192, 4096, 7168),
    Shape("fc1 small", "AG", 2048, 4096, 7168),
    Shape("proj 70b", "RS", 8192, 2048, 8192),
    Shape("fc2 70b", "RS", 8192, 7168, 8192),
    Shape("fc2 8b", "RS", 8192, 3584, 4096),
    Shape("fc2 small", "RS", 2048, 3584, 4096),
)
SMOKE_SHAPES = (Shape("smoke", "AG", 64, 64, 48), Shape("smoke", "RS", 256, 48, 128))
RECIPES = {"bf16": "bf16", "fp8": "current"}


def has_torch_fused() -> bool:
    """Whether this torch has the operators; they have to be told of the group."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return False
    _symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    return True


class Problem:
    """One operation on this rank, its operands quantized and ready."""

    def __init__(self, shape: Shape, dtype: str, device: torch.device) -> None:
        self.shape, self.device, ranks = shape, device, dist.get_world_size()
        self.tp = TensorParallel("column" if shape.op == "AG" else "row", ranks, dist.group.WORLD, True)
        self.group = userbuffers.groups()[0]
        self.m = shape.m // ranks
        operands = self._operands(RECIPES[dtype])
        tokens = self.m if shape.op == "AG" else shape.m
        self.x: QTensor = operands.a.quantize(plain(self._random(tokens, shape.k)))[0]
        weight = operands.b.quantize(plain(self._random(shape.n, shape.k)))[0]
        self.gemm = Gemm(weight, "row", BF16, operands.fast_accum, "te_lite.fprop")
        unhidden = Collective(Place(self.tp, "fprop"))
        self.whole = unhidden.all_gather(self.x, "row").whole() if shape.op == "AG" else self.x
        # As many bytes as the operation moves: a gather of x, or of something as large as the rows that are scattered.
        product = self._operands("bf16").a.quantize(plain(self._random(self.m, shape.n)))[0]
        self.moved = self.x if shape.op == "AG" else product
        self.residual = self._random(self.m, shape.n) if shape.op == "RS" else None

    def _operands(self, recipe: str):
        def no_state(direction: str) -> None:
            raise RuntimeError(f"{recipe} asked for the {direction} state of a module, and here is none")

        return operands_for(te.recipe.from_name(recipe), Site(0, BF16, self.tp, no_state, dist.group.WORLD)).fprop

    def _random(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=BF16)

    def gemm_alone(self) -> Tensor:
        return self.gemm(self.whole)

    def copies_alone(self) -> None:
        with self.group.operation(f"copies {list(self.moved.shape)}"):
            gather = Gather(self.group, self.moved, "row", own=False)
            for source in following(self.group.rank, self.group.size):
                gather.shard(source)
            gather.close()

    def collective(self) -> Tensor:
        return self._by(Collective(Place(self.tp, "fprop")), self.gemm)

    def _by(self, exchange: Collective, gemm: Gemm) -> Tensor:
        return parallel_linear(self.tp, (exchange, exchange, exchange)).forward(gemm, self.x)

    def overlapped(self, kind: type[Ring], *, narrow: bool = False, residual: bool = False) -> Tensor:
        """residual: a reduce-scatter that adds it in the same pass."""
        place = Place(self.tp, "fprop", self.group, kind.name, self.shape.op, narrow=narrow)
        return self._by(kind(place), replace(self.gemm, residual=self.residual) if residual else self.gemm)

    def exact_sum(self) -> Tensor:
        """This rank's rows of the sum of the products, in fp32."""
        return reduce_scatter(self.gemm.product(self.x, None, torch.float32), dist.group.WORLD)

    def torch_fused(self) -> object:
        """torch's operator for it, decomposed into pieces by the library itself."""
        (a, a_scale), (b, b_scale) = self.x.operand("row"), self.gemm.b.operand("row")
        ops, group, n = torch.ops.symm_mem, dist.group.WORLD.group_name, self.shape.n
        if a_scale is None and self.shape.op == "AG":
            return ops.fused_all_gather_matmul(a, [b.t()], 0, group, return_A=False)
        if a_scale is None:
            return ops.fused_matmul_reduce_scatter(a, b.t(), "sum", 0, group)
        if self.shape.op == "AG":
            return ops.fused_all_gather_scaled_matmul(
                a, [b.t()], a_scale, [b_scale], 0, group, [None], [None], [BF16], [True]
            )
        return ops.fused_scaled_matmul_reduce_scatter(
            a, b.t(), a_scale, b_scale, "sum", 0, 0, group, [self.shape.m, n], out_dtype=BF16, use_fast_accum=True
        )


def candidates(problem: Problem, args: argparse.Namespace) -> list[bench.Candidate]:
    ways: dict[str, Callable[[], object]] = {
        "gemm": problem.gemm_alone,
        "copies": problem.copies_alone,
        "collective": problem.collective,
        "ring": lambda: problem.overlapped(Ring),
    }
    if problem.device.type == "cuda":
        ways["fused"] = lambda: problem.overlapped(Fused)
        if problem.shape.op == "RS":
            ways["fused narrow"] = lambda: problem.overlapped(Fused, narrow=True)
            ways["with residual"] = lambda: problem.overlapped(Fused, residual=True)
            ways["residual after"] = lambda: problem.overlapped(Fused).add_(problem.residual)
        if args.torch and has_torch_fused():
            ways["torch fused"] = bench.captured(problem.torch_fused)
    return [bench.Candidate(name, step) for name, step in ways.items()]


def relative_errors(problem: Problem, found: list[bench.Candidate]) -> dict[str, float]:
    """Of a reduce-scatter's candidates, te_lite's own; one that fails here ends the run."""
    if problem.shape.op == "AG":
        return {}
    total, errors = problem.exact_sum(), {}
    for one in (one for one in found if one.name not in ("gemm", "copies", "torch fused")):
        exact = total + problem.residual if "residual" in one.name else total
        error = (one.step().float() - exact).norm() / exact.norm()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        errors[one.name] = float(error)
    return errors


def compare(shape: Shape, dtype: str, args: argparse.Namespace, device: torch.device) -> list[dict]:
    """A row for each candidate. The same on all ranks."""
    problem = Problem(shape, dtype, device)
    clock = RanksClock(device)
    kept: dict[str, list[bench.Sample]] = {}
    found = candidates(problem, args)
    errors = relative_errors(problem, found)
    timings = bench.time_interleaved(found, clock, rounds=args.rounds, wall_rounds=0, kept=kept)
    limit = max(timings[name].gpu_us or 0.0 for name in ("gemm", "copies"))
    rows = []
    for timing in timings.values():
        row = {"op": shape.op, "shape": shape.name, "dtype": dtype, "m": shape.m, "k": shape.k, "n": shape.n}
        row |= {"candidate": timing.name, "gpu_us": timing.gpu_us, "host_us": timing.host_us, "spread": timing.spread}
        row["of_limit"] = limit / timing.gpu_us if timing.gpu_us else None
        for peer in ("collective", "torch fused"):
            pairs = zip(kept.get(peer, []), kept.get(timing.name, []), strict=False)
            ratios = [theirs.gpu_us / ours.gpu_us for theirs, ours in pairs]
            row[f"against_{peer.replace(' ', '_')}"] = statistics.median(ratios) if ratios else None
        row["relative_error"] = errors.get(timing.name)
        rows.append(row | {"exposed": timing.exposed, "error": timing.error})
    return rows


@torch.no_grad()
def measure(args: argparse.Namespace, device: torch.device, rows: list[dict], write: Callable[[], None]) -> None:
    """Appends the rows of one operation after the other; write() after each, so that a run cut off leaves the rest.
    With --twice all of it runs a second time, whose times go into the same rows as again_us."""
    shapes = SMOKE_SHAPES if device.type == "cpu" else [s for s in SHAPES if s.name in args.shapes]
    for again in (False, True)[: 1 + args.twice]:
        first = iter(rows)
        for shape in shapes:
            te.initialize_ub([shape.m, max(shape.k, shape.n)], dist.get_world_size(), device=device)
            for dtype in args.dtypes:
                found = compare(shape, dtype, args, device)
                if again:
                    for row in found:
                        next(first)["again_us"] = row["gpu_us"]
                else:
                    rows.extend(found)
                write()
            te.destroy_ub()


def summary(rows: list[dict]) -> str:
    """A line for each operation, microseconds; in brackets the share of the limit."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    lines: dict[tuple, dict[str, str]] = {}
    for row in rows:
        cell = f"{report.number(row['gpu_us'])} ({report.number(row['of_limit'], 2)})"
        lines.setdefault((row["op"], row["shape"], row["dtype"]), {})[row["candidate"]] = row["error"] or cell
    table = [[*key, *(cells.get(name, "")[:60] for name in names)] for key, cells in lines.items()]
    return result_files.text_table(("op", "shape", "dtype", *names), table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", default=names, choices=names)
    parser.add_argument("--dtypes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave torch's fused operators out")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--twice", action="store_true", help="all of it a second time: how far the numbers hold")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for overlap_gemms.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_on_ranks("overlap_gemms", parse(argv), measure, summary)


if __name__ == "__main__":
    raise SystemExit(main())
