"""What run_layer_with_overlap.py and run_gemm_with_overlap.py share: options, ranks, lines, the verdict, timing."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te
from benchmarks.bench import Candidate, clock_for, interleave
from examples.gpt import mesh
from te_lite.testing.distributed import leave_ranks
from te_lite.testing.numerics import Closeness, assert_bitwise_equal, measure
from tests.distributed.run_modules import report, worst

# What Transformer Engine's scripts call them, and te_lite's own names.
QUANTIZATIONS = {
    "none": "bf16",
    "fp8": "delayed",
    "fp8_delayed_scaling": "delayed",
    "delayed": "delayed",
    "fp8_current_scaling": "current",
    "current": "current",
    "mxfp8": "mxfp8",
    "blockwise": "blockwise",
    "rowwise": "rowwise",
    "rowwise_with_gw_hp": "rowwise_with_gw_hp",
}
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
RefusedError = mesh.RefusedError


@dataclass
class Session:
    """One run of a harness on this rank. steps: the compared tensors of each iteration. facts: (what, holds)."""

    here: mesh.Mesh
    args: argparse.Namespace
    steps: list[list[Closeness]] = field(default_factory=list)
    facts: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.here.device

    def say(self, *lines: str) -> None:
        """Rank 0 prints."""
        if self.here.is_main:
            print(*lines, sep="\n", flush=True)

    def finish(self) -> bool:
        """One line a tensor, of the rank and iteration where it is worst, and a line a fact. True if all is well."""
        good = report(worst(self.steps)) if self.steps else True
        gathered: list = [None] * self.here.world_size
        dist.all_gather_object(gathered, self.facts)
        for rank, facts in enumerate(gathered):
            for text, holds in facts:
                if self.here.is_main and (rank == 0 or (not holds and (text, holds) not in gathered[0])):
                    print(f"{'' if rank == 0 else f'rank {rank}: '}{text} {'ok' if holds else 'FAIL'}", flush=True)
        return good and all(holds for facts in gathered for _, holds in facts)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """What both scripts take."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of parameters and activations")
    parser.add_argument("--fp8", action="store_true", help="as --quantization fp8, unless that says more")
    parser.add_argument("--quantization", type=str.lower, choices=QUANTIZATIONS, default="none")
    parser.add_argument("--tp", type=int, default=None, help="ranks of a tensor-parallel group; default: all")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--iterations", type=int, default=2, help="compared steps, each with new inputs")
    parser.add_argument("--strict", action="store_true", help="a method that is asked for and not taken is a failure")
    parser.add_argument(
        "--bootstrap-backend",
        type=str.lower,
        choices=("gloo", "nccl", "mpi"),
        default=None,
        help="of the exchange of handles; default: torch.distributed as it is",
    )
    parser.add_argument("--benchmark", action="store_true", help="time as well")
    parser.add_argument("--benchmark-iter", type=int, default=100, help="samples of each candidate")
    parser.add_argument("--debug", action="store_true", help="print te.overlap_report(), too")
    parser.add_argument("--corrupt", default=None, help=argparse.SUPPRESS)  # for tests: damage this tensor
    parser.add_argument("--capacity", type=int, default=None, help=argparse.SUPPRESS)  # for tests: tokens of the buffer


def settle(args: argparse.Namespace) -> None:
    """args.recipe from --fp8 and --quantization; refuses numbers that mean nothing."""
    named = "fp8" if args.fp8 and args.quantization == "none" else args.quantization
    args.recipe = QUANTIZATIONS[named]
    for name in ("iterations", "benchmark_iter"):
        if getattr(args, name) < 1:
            raise RefusedError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.bootstrap_backend == "nccl" and args.device == "cpu":
        raise RefusedError("--bootstrap-backend nccl needs GPUs; use gloo, or mpi under mpirun")


def join(args: argparse.Namespace, script: str) -> Session:
    """Joins the ranks that torchrun or mpirun started."""
    launcher, _, world, _ = mesh.place()
    if world < 2:
        raise RefusedError(
            f"{world} rank, started by {launcher}: overlap needs at least 2. Start it as\n"
            f"    torchrun --nproc-per-node 2 {script} --device cpu\n"
            f"    mpirun -n 2 python {script} --device cpu        (needs mpi4py)"
        )
    args.tp = world if args.tp is None else args.tp
    if args.tp < 2:
        raise RefusedError(f"--tp {args.tp}: overlap needs tensor-parallel groups of at least 2 ranks")
    # The oracle runs on the CPU, on every rank; launchers leave one thread a rank.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    here = mesh.connect(args.tp, args.device)
    supported, reason = te.check_recipe_support(args.recipe, here.device)
    here.agree(None if supported else reason)
    return Session(here, args)


def initialise(session: Session, tokens: int, width: int, ub_cfgs: dict | None, cuda_graphs: bool = False) -> None:
    """te.initialize_ub for activations [tokens, width]; with --strict it must work."""
    args = session.args
    te.initialize_ub(
        [args.capacity or tokens, width],
        args.tp,
        use_fp8=args.recipe != "bf16",
        dtype=DTYPES[args.dtype],
        ub_cfgs=ub_cfgs,
        bootstrap_backend=args.bootstrap_backend,
        tp_group=session.here.tp_group,
        device=session.device,
        strict=args.strict,
        cuda_graphs=cuda_graphs,
    )


def identical(name: str, got: Tensor, want: Tensor) -> Closeness:
    """A line for tensors that must agree bit for bit; its bounds are 0."""
    try:
        assert_bitwise_equal(name, got, want)
    except AssertionError as difference:
        return Closeness(name, float("inf"), 0.0, float("inf"), 0.0, str(difference))
    return Closeness(name, 0.0, 0.0, 0.0, 0.0)


def between(name: str, got: Tensor, other: Tensor, truth: Tensor, low: Tensor) -> Closeness:
    """A line for two honest low-precision results: each is off by about as much as `low` is off the truth, so they are
    at most two such errors apart. The error is relative to `other`."""
    other = other.to("cpu", torch.float64)
    return measure(name, got, other, other + (low.double() - truth.double()))


def damaged(value: Tensor) -> Tensor:
    """For tests: `value` with one wrong element."""
    wrong = value.clone()
    wrong.view(-1)[-1] += 2 * wrong.abs().max() + 1
    return wrong


def time_candidates(session: Session, steps: dict[str, Callable[[], object]]) -> None:
    """Prints the median time of each candidate: interleaved, of the rank that was slowest in each sample."""
    clock, cuda = clock_for(session.device), session.device.type == "cuda"
    candidates = [Candidate(name, step) for name, step in steps.items()]
    host_us = 0.0
    for candidate in candidates:
        for _ in range(3):
            host_us = max(host_us, clock.sample(candidate.step, 0.0).host_us)
    # Ranks hold their streams until the host has issued a whole step, all for the same time.
    hold_us = min(2.0 * _slowest(session, [host_us])[0] + 500.0, 50_000.0) if cuda else 0.0
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for candidate in interleave(candidates, session.args.benchmark_iter):
        dist.barrier()
        samples[candidate.name].append(clock.sample(candidate.step, hold_us).gpu_us)
    medians = {name: statistics.median(_slowest(session, values)) for name, values in samples.items()}
    base = medians["collective"]
    session.say(
        *(f"{name}: {us:.1f} us, {base / us:.2f} of collective's speed" for name, us in medians.items()),
        f"(medians of {session.args.benchmark_iter} interleaved samples, slowest rank)",
        *(() if cuda else ("(CPU ranks: this shows that it runs, not how fast it is)",)),
    )


def _slowest(session: Session, values: Sequence[float]) -> list[float]:
    """Each value's maximum over all ranks."""
    slowest = torch.tensor(values, dtype=torch.float64, device=session.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def main(
    parser: argparse.ArgumentParser,
    script: str,
    check: Callable[[argparse.Namespace], None],
    run: Callable[[Session], None],
) -> int:
    """0: all well, 1: a failure, 2: refused. check(args) refuses before any rank waits; run(session) fills it."""
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    try:
        settle(args)
        check(args)
        session = join(args, script)
        run(session)
        good = session.finish()
        if args.debug:
            session.say(te.format_report(te.overlap_report()))
        te.destroy_ub()
    except RefusedError as error:  # on all ranks alike
        if rank == 0:
            print(f"{parser.prog}: refused: {error}", file=sys.stderr, flush=True)
        mesh.disconnect()
        return 2
    except BaseException:
        # Ended at once: the other ranks may wait for this one.
        traceback.print_exc()
        print(f"VERDICT: FAILED, rank {rank} ended with the error above", file=sys.stderr, flush=True)
        mesh.abort_all_ranks()
        os._exit(1)
    here = session.here
    where = f"{here.world_size} {here.device.type} ranks started by {here.launcher}, tp {here.tp_size}"
    session.say(f"VERDICT: {'all well' if good else 'FAILED, see the lines with FAIL'} on {where}")
    leave_ranks()
    return 0 if good else 1
