"""Checks a machine: all-gather + GEMM, GEMM + reduce-scatter and bulk transfers through userbuffers, without modules.

    torchrun --nproc-per-node 2 tests/distributed/run_gemm_with_overlap.py --device cpu -M 256 -K 256 -N 256
    torchrun --nproc-per-node 4 tests/distributed/run_gemm_with_overlap.py -M 8192 -K 8192 -N 8192 \
        --quantization fp8_current_scaling --benchmark
    mpirun -n 2 python tests/distributed/run_gemm_with_overlap.py --device cpu

With R ranks:  all-gather      y[m, n/R] = all_gather(x[m/R, k]) @ w[n/R, k]^T
               reduce-scatter  y[m/R, n] = reduce_scatter(x[m, k/R] @ w[n, k/R]^T)
               bulk            the gather of x, or the reduce-scatter of a finished product, beside another GEMM

Each by every method: "ring" (pieces by copy engine), "fused" (one GEMM that waits for shards or partial sums; GPUs).
Compared, a line each, of the worst rank: the gathered operand with its scales and the GEMM beside a bulk transfer bit
for bit, results with collective and with the fp64 truth (bounds as in run_layer_with_overlap.py), and the
reduce-scatter with itself, run again. Exit status 0: all well, 1: a failure, 2: refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

# A copy of one rank's program: one thread, decided before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.functional.parallel import parallel_linear  # noqa: E402
from te_lite.ops.source import plain  # noqa: E402
from te_lite.overlap import fused, userbuffers  # noqa: E402
from te_lite.overlap.buffers import Gather, Scatter  # noqa: E402
from te_lite.overlap.collective import Collective  # noqa: E402
from te_lite.overlap.exchange import Gemm, Place  # noqa: E402
from te_lite.overlap.exchanges import EXCHANGES  # noqa: E402
from te_lite.parallel import TensorParallel  # noqa: E402
from te_lite.quantize.qtensor import QTensor  # noqa: E402
from te_lite.quantize.quantizer import Site, operands_for  # noqa: E402
from te_lite.testing.numerics import Closeness, measure  # noqa: E402
from tests import reference  # noqa: E402
from tests.distributed import overlap_harness as common  # noqa: E402
from tests.distributed.overlap_harness import DTYPES, RefusedError, Session  # noqa: E402
from tests.distributed.run_modules import shard_input, shard_output, shard_parameter  # noqa: E402
from tests.harness import BLOCKED, Oracle  # noqa: E402
from tests.reference import LINEAR, Spec  # noqa: E402

SCRIPT = "tests/distributed/run_gemm_with_overlap.py"
OPS = ("all-gather", "reduce-scatter", "bulk")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog=Path(__file__).name)
    # torchrun takes --m and --n for abbreviations of options of its own, also behind the script's name.
    parser.add_argument("-M", "--m", type=int, default=1024, help="tokens of all ranks together")
    parser.add_argument("-K", "--k", type=int, default=512, help="inner dimension, of all ranks together")
    parser.add_argument("-N", "--n", type=int, default=768, help="output features, of all ranks together")
    parser.add_argument("--op", choices=(*OPS, "all"), default="all")
    parser.add_argument("--method", choices=("ring", "fused", "all"), default="all")
    common.add_common_options(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    if args.recipe == "delayed":
        raise RefusedError(
            "delayed scaling keeps its scales in a module; use --quantization fp8_current_scaling (same format and "
            "GEMMs), or run_layer_with_overlap.py"
        )
    if min(args.m, args.k, args.n) < 1:
        raise RefusedError(f"-M {args.m} -K {args.k} -N {args.n}: must be positive")


def check_sizes(args: argparse.Namespace) -> None:
    multiple = args.tp * te.recipe.from_name(args.recipe).feature_multiple
    if args.m % args.tp or args.k % multiple or args.n % multiple:
        raise RefusedError(
            f"-M {args.m} must be a multiple of {args.tp}, -K {args.k} and -N {args.n} of {multiple}; change them"
        )


class Problem:
    """One linear's forward, split "column" (all-gather + GEMM) or "row" (GEMM + reduce-scatter), and its oracle."""

    def __init__(self, session: Session, mode: str) -> None:
        args, here = session.args, session.here
        self.session, self.mode, self.dtype = session, mode, DTYPES[args.dtype]
        self.spec = Spec(LINEAR, bias=False, mode=mode, tp=here.tp_size, sequence_parallel=True)
        self.tp = TensorParallel(mode, here.tp_size, here.tp_group, True)
        p = reference.make_parameters(self.spec, args.k, args.n, seed=args.seed, dtype=self.dtype)
        gpu_fp32 = self.dtype == torch.float32 and here.device.type == "cuda"
        self.spread = args.recipe in BLOCKED and self.dtype != torch.float16 and not gpu_fp32
        p = reference.spread_parameters(self.spec, p) if self.spread else p
        self.oracle = Oracle(self.spec, p, args.recipe, self.dtype, here.device)
        site = Site(0, self.dtype, self.tp, _no_state, here.tp_group)
        self.operands = operands_for(te.recipe.from_name(args.recipe), site).fprop
        w = shard_parameter("weight", p["weight"], self.spec, here.tp_rank).to(here.device).contiguous()
        wq, _ = self.operands.b.quantize(plain(w))
        self.gemm = Gemm(wq, "row", self.dtype, self.operands.fast_accum, f"te_lite.{mode}")
        self.group = userbuffers.groups()[0] if userbuffers.groups() else None

    def load(self, seed: int) -> None:
        """A new x, its truth and its low-precision reference, this rank's parts."""
        args, rank = self.session.args, self.session.here.tp_rank
        full = reference.make_tokens(args.m, args.k, seed=seed, dtype=self.dtype)
        full = reference.spread_tokens(self.spec, full, full.new_ones(args.m, args.n))[0] if self.spread else full
        both = self.oracle.step(full, None)
        self.truth, self.low = (shard_output(t["out"], self.spec, rank) for t in both)
        x = shard_input(full, self.spec, rank).to(self.session.device).contiguous()
        self.x: QTensor = self.operands.a.quantize(plain(x))[0]

    def unhidden(self) -> Tensor:
        return self._by(Collective(Place(self.tp, "fprop")))

    def _by(self, exchange: Collective) -> Tensor:
        return parallel_linear(self.tp, (exchange, exchange, exchange)).forward(self.gemm, self.x)

    def gathered(self) -> QTensor:
        """x of all ranks."""
        return Collective(Place(self.tp, "fprop")).all_gather(self.x, "row").whole()

    def refusal(self, method: str) -> str:
        """Why the method cannot run here, or ""."""
        if self.group is None:
            return "no userbuffers: the ranks cannot map each other's memory"
        if self.mode == "column":
            why = self.group.gather_refusal(self.x, "row")
        else:
            why = self.group.scatter_refusal(self.x.shape[0] // self.tp.size, self.gemm.columns, self.dtype)
        return why or (fused.refusal(self.gemm, self.x, self.group) if method == "fused" else "")

    def hidden(self, method: str) -> Tensor:
        """The same as unhidden(), with its communication behind the GEMM."""
        exchange = EXCHANGES["ring_exchange" if method == "ring" else method]
        return self._by(exchange(Place(self.tp, "fprop", self.group, method, self.mode)))

    def bulk_gather(self, beside: Callable[[], Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """(the wire format of the gathered x, what `beside` gave while it travelled)."""
        with self.group.operation(f"bulk gather {list(self.x.shape)}"):
            gather = Gather(self.group, self.x, "row", own=True)
            product = beside()
            parts = tuple(part.clone() for part in gather.whole().wire("row"))
            gather.close()
        return parts, product

    def bulk_scatter(self, partial: Tensor, beside: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """(this rank's rows of the sum of all ranks' `partial`, what `beside` gave while they travelled)."""
        rank, m = self.group.rank, self.x.shape[0] // self.tp.size
        with self.group.operation(f"bulk scatter {list(partial.shape)}"):
            scatter = Scatter(self.group, (m, self.gemm.columns), self.dtype)
            scatter.push_all(partial)
            product = beside()
            return scatter.reduce(partial[rank * m : (rank + 1) * m]), product

    def lines(self, label: str, got: Tensor, unhidden: Tensor) -> list[Closeness]:
        got = common.damaged(got) if self.session.args.corrupt == label.split(",")[0] else got
        return [
            common.between(f"{label} against collective", got, unhidden, self.truth, self.low),
            measure(f"{label} against the oracle", got, self.truth, self.low),
        ]


def _no_state(direction: str) -> None:
    raise RuntimeError(f"a recipe asked for the {direction} state of a module, and here is none")


def compare(column: Problem, row: Problem, args: argparse.Namespace, methods: dict[str, list[str]]) -> list[Closeness]:
    """One iteration of the operations asked for."""
    lines: list[Closeness] = []
    for op, problem in (("all-gather", column), ("reduce-scatter", row)):
        unhidden = problem.unhidden()
        for method in methods.get(op, []):
            got = problem.hidden(method)
            lines += problem.lines(f"{op}, {method}", got, unhidden)
            if op == "reduce-scatter":
                lines.append(common.identical(f"{op}, {method}, again, bit for bit", problem.hidden(method), got))
    if methods.get("bulk"):
        wanted = column.gathered().wire("row")
        alone = row.gemm(row.x)
        parts, beside = column.bulk_gather(lambda: row.gemm(row.x))
        if args.corrupt == "bulk":
            parts = (common.damaged(parts[0].view(torch.uint8)).view(parts[0].dtype), *parts[1:])
        for i, (got, want) in enumerate(zip(parts, wanted, strict=True)):
            lines.append(common.identical(f"bulk, gathered {('data', 'scales')[i]}, bit for bit", got, want))
        lines.append(common.identical("bulk, the GEMM beside the gather, bit for bit", beside, alone))
        summed, beside = row.bulk_scatter(alone, lambda: row.gemm(row.x))
        lines += row.lines("bulk, reduce-scatter", summed, row.unhidden())
        lines.append(common.identical("bulk, the GEMM beside the reduce-scatter, bit for bit", beside, alone))
    return lines


def choose(session: Session, column: Problem, row: Problem) -> dict[str, list[str]]:
    """op -> methods that run; the others become facts with the reason."""
    args, chosen = session.args, {}
    for op, problem in (("all-gather", column), ("reduce-scatter", row), ("bulk", column)):
        if args.op not in (op, "all"):
            continue
        methods = ("ring",) if op == "bulk" else ("ring", "fused") if args.method == "all" else (args.method,)
        chosen[op] = []
        for method in methods:
            why = problem.refusal(method) or (row.refusal(method) if op == "bulk" else "")
            if not why:
                chosen[op].append(method)
                continue
            wanted = method == "ring" or args.strict
            session.facts.append((f"{op}, {method}: does not run here: {why}", not wanted))
    return chosen


def benchmark(session: Session, op: str, problem: Problem, methods: list[str]) -> None:
    session.say(f"{op}, {session.args.m} x {session.args.k} x {session.args.n} over {problem.tp.size} ranks:")
    whole = problem.gathered() if problem.mode == "column" else problem.x
    steps: dict[str, Callable[[], object]] = {method: lambda m=method: problem.hidden(m) for method in methods}
    steps |= {"collective": problem.unhidden, "the GEMM alone": lambda: problem.gemm(whole)}
    common.time_candidates(session, steps)


def run(session: Session) -> None:
    args = session.args
    check_sizes(args)
    common.initialise(session, args.m, max(args.k, args.n), None)
    column, row = Problem(session, "column"), Problem(session, "row")
    methods: dict[str, list[str]] = {}
    for i in range(args.iterations):
        for problem in (column, row):
            problem.load(args.seed + i)
        if i == 0:
            methods = choose(session, column, row)
        session.steps.append(compare(column, row, args, methods))
    if args.benchmark:
        for op, problem in (("all-gather", column), ("reduce-scatter", row)):
            if methods.get(op):
                benchmark(session, op, problem, methods[op])


if __name__ == "__main__":
    sys.exit(common.main(build_parser(), SCRIPT, check, run))
