"""Checks a machine: a layer with overlap against the same layer without, and against an unsharded fp32 oracle.

    torchrun --nproc-per-node 2 tests/distributed/run_layer_with_overlap.py --device cpu --layer-type LayerNormMLP
    torchrun --nproc-per-node 4 tests/distributed/run_layer_with_overlap.py --layer-type linear \
        --linear-parallel-mode column --quantization fp8_current_scaling --overlap-rs-dgrad --benchmark
    mpirun -n 2 python tests/distributed/run_layer_with_overlap.py --device cpu

The options are those of Transformer Engine's script of this name where te_lite has what they are about. Layers stand
side by side and share the buffers: all forwards, then all backwards in the opposite order. Compared are output, input
gradient and every parameter gradient of every layer, one line a tensor, of the rank and iteration where it is worst:

    against collective, bit for bit    gathered operands go into the same GEMM: weight gradients (but those that depend
                                       on a sum over ranks), and the biases' of a sum over local tokens
    against collective                 what is summed over ranks, or multiplied in pieces: at most twice the error of a
                                       low-precision reference apart
    against the oracle                 off the fp64 truth by at most twice what that reference is off

Then a line for each GEMM that was to overlap, from te.overlap_report(), and a verdict. Exit status 0: all well,
1: a failure, 2: refused. The oracle runs on the CPU: large sizes take minutes, --skip-verify leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

# A copy of one rank's program: one thread, decided before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.overlap.exchanges import EXCHANGES  # noqa: E402
from te_lite.testing.numerics import Closeness, measure  # noqa: E402
from tests import reference  # noqa: E402
from tests.distributed import overlap_harness as common  # noqa: E402
from tests.distributed.overlap_harness import DTYPES, RefusedError, Session  # noqa: E402
from tests.distributed.run_modules import shard_input, shard_output, shard_parameter  # noqa: E402
from tests.harness import BLOCKED, Oracle, build, leaf, under  # noqa: E402
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec  # noqa: E402

SCRIPT = "tests/distributed/run_layer_with_overlap.py"
KINDS = {kind.lower(): kind for kind in (LINEAR, LN_LINEAR, LN_MLP)}
ABSENT = ("multiheadattention", "transformerlayer")
METHODS = ("default", "ring_exchange", "pipeline", "bulk", "fused", "auto")
REPORTED = {"ring_exchange": "ring"}  # what te.overlap_report() calls a method, where by another name
TWO_GATHERS = ("mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")  # dy is gathered again for wgrad, "external"


def layer_type(name: str) -> str:
    """A layer by its name, in upper or lower case."""
    if name.lower() in ABSENT:
        raise argparse.ArgumentTypeError(f"{name} is not compared by this script; choose one of {', '.join(KINDS)}")
    if name.lower() not in KINDS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(KINDS)}")
    return KINDS[name.lower()]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog=Path(__file__).name)
    parser.add_argument("-l", "--layer-type", type=layer_type, default=LN_MLP, help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--num-layers", type=int, default=1, help="layers that share the buffers")
    parser.add_argument("-b", "--batch-size", type=int, default=2)
    parser.add_argument("-s", "--seq-length", type=int, default=1024, help="of all ranks together")
    parser.add_argument("-n", "--num-heads", type=int, default=16, help="hidden size = heads x head dim")
    parser.add_argument("-d", "--head-dim", type=int, default=48)
    parser.add_argument("--linear-parallel-mode", type=str.lower, choices=("row", "column"), default=None)
    parser.add_argument("--overlap-rs-dgrad", action="store_true", help="dgrad + reduce-scatter in place of both bulks")
    parser.add_argument("--method", choices=METHODS, default="default", help="wherever it fits the GEMM")
    parser.add_argument("--use-cuda-graphs", action="store_true", help="capture, then replay with new inputs")
    parser.add_argument("--num-layers-at-start-in-bf16", type=int, default=0)
    parser.add_argument("--num-layers-at-end-in-bf16", type=int, default=0)
    parser.add_argument("--skip-verify", action="store_true", help="no comparison: for --benchmark of large sizes")
    common.add_common_options(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot run, and settles what follows from the options."""
    args.mode = args.linear_parallel_mode or ("row" if args.layer_type == LINEAR else "column")
    if args.layer_type == LN_LINEAR and args.mode == "row":
        raise RefusedError("LayerNormLinear is column-parallel only: the norm needs whole rows")
    if args.overlap_rs_dgrad and args.method == "bulk":
        raise RefusedError("--overlap-rs-dgrad is in place of both bulks; leave out --method bulk")
    if args.use_cuda_graphs and args.device == "cpu":
        raise RefusedError("--use-cuda-graphs needs --device cuda: there are no graphs of CPU work")
    if args.use_cuda_graphs and args.recipe == "delayed":
        raise RefusedError(
            "--use-cuda-graphs with delayed scaling: replays are compared with eager steps of the same layers, which "
            "would take steps of the same scales; use --quantization fp8_current_scaling"
        )
    first, last = args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16
    if args.num_layers < 1 or min(first, last) < 0 or first + last > args.num_layers:
        raise RefusedError(f"--num-layers {args.num_layers} with {first} + {last} in bf16: must be enough for both")
    args.hidden = args.num_heads * args.head_dim
    args.recipes = [args.recipe if first <= i < args.num_layers - last else "bf16" for i in range(args.num_layers)]


def check_sizes(args: argparse.Namespace, tp: int) -> None:
    multiple = tp * te.recipe.from_name(args.recipe).feature_multiple
    if args.hidden % multiple or args.seq_length % tp:
        raise RefusedError(
            f"hidden size {args.hidden} (heads x head dim) must be a multiple of {multiple}, --seq-length "
            f"{args.seq_length} of tp {tp}; change --num-heads, --head-dim or --seq-length"
        )


# What is asked for


def methods(args: argparse.Namespace) -> dict[str, str]:
    """GEMM ("fc1_fprop") -> method that ub_cfgs asks for, of all linears of the layer."""
    method = "auto" if args.method == "default" else args.method
    gathers = method if EXCHANGES[method].gathers else "ring_exchange"
    scatters = method if EXCHANGES[method].scatters else "pipeline"
    wanted = {}
    for linear, mode in linears(args).items():
        if mode == "column":
            wanted[f"{linear}_fprop"] = gathers
            wanted[f"{linear}_dgrad"] = scatters if args.overlap_rs_dgrad else "bulk"
            if not args.overlap_rs_dgrad:
                wanted[f"{linear}_wgrad"] = "bulk"
        else:
            wanted |= {f"{linear}_fprop": scatters, f"{linear}_dgrad": gathers, f"{linear}_wgrad": "external"}
    return wanted


def linears(args: argparse.Namespace) -> dict[str, str]:
    """ub_name -> parallel mode."""
    if args.layer_type == LN_MLP:
        return {"fc1": "column", "fc2": "row"}
    return {"qkv" if args.mode == "column" else "proj": args.mode}


def flags(args: argparse.Namespace) -> dict[str, object]:
    """The ub_* arguments of the layer."""
    asked: dict[str, object] = {"ub_overlap_ag": True}
    if args.layer_type == LN_MLP or args.mode == "row":
        asked["ub_overlap_rs"] = True
    if args.layer_type == LN_MLP or args.mode == "column":
        asked["ub_overlap_rs_dgrad"] = args.overlap_rs_dgrad
        asked["ub_bulk_dgrad"] = asked["ub_bulk_wgrad"] = not args.overlap_rs_dgrad
    if args.layer_type != LN_MLP:
        asked["ub_name"] = next(iter(linears(args)))
    return asked


def confirm(args: argparse.Namespace) -> list[tuple[str, bool]]:
    """Of each GEMM that was to overlap: what te.overlap_report() says it did."""
    facts = []
    wanted = methods(args)
    rows = {(row["module"], row["gemm"]): row for row in te.overlap_report()}
    for i, recipe in enumerate(args.recipes):
        for gemm, method in wanted.items():
            linear, _, which = gemm.partition("_")
            if method == "external" and recipe not in TWO_GATHERS:
                continue  # one gather serves both GEMMs
            row = rows[f"layer {i}", gemm if args.layer_type == LN_MLP else which]
            took = row["schedule"]
            good = took == REPORTED.get(method, method)
            if method == "auto":  # it may have found Collective the fastest
                good = took != "collective" or row["reason"].startswith("auto: ")
            if method == "fused" and not args.strict:
                good = took in ("fused", "ring")
            text = f"layer {i} {gemm}: {method} asked for, {took} taken, {row['sent'] / 2**20:.3f} MiB sent"
            facts.append((f"{text} [{row['reason']}]" if row["reason"] else text, good))
    return facts


# Layers


class Stack:
    """Layers side by side, each with inputs of its own; step() is all forwards, then all backwards."""

    def __init__(self, layers: list[nn.Module], args: argparse.Namespace) -> None:
        self.layers, self.args = layers, args
        self.inputs: list[tuple[Tensor, Tensor]] = []  # x, dy of this rank
        self.outputs: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, inputs: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """New values into the same memory, as a graph needs them."""
        if not self.inputs:
            self.inputs = [(leaf(x, device), dy.to(device).clone()) for x, dy in inputs]
            return
        with torch.no_grad():
            for (x, dy), (new_x, new_dy) in zip(self.inputs, inputs, strict=True):
                x.copy_(new_x)
                dy.copy_(new_dy)

    def _run(self) -> None:
        for layer, (x, _) in zip(self.layers, self.inputs, strict=True):
            layer.zero_grad(set_to_none=True)
            x.grad = None
        self.outputs = []
        with under(self.args.recipe):
            for layer, recipe, (x, _) in zip(self.layers, self.args.recipes, self.inputs, strict=True):
                plain = recipe == "bf16" and self.args.recipe != "bf16"
                with te.autocast(enabled=False) if plain else contextlib.nullcontext():
                    self.outputs.append(layer(x))
        for out, (_, dy) in reversed(list(zip(self.outputs, self.inputs, strict=True))):
            out.backward(dy)

    def step(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def capture(self) -> None:
        """From here on step() replays. Other threads (NCCL's and te_lite's watchers) may call CUDA meanwhile."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._run()

    def results(self) -> list[dict[str, Tensor]]:
        """Of each layer {"out", "dx", gradients by parameter name}, those of sequence-parallel parameters summed."""
        found = []
        for layer, out, (x, _) in zip(self.layers, self.outputs, self.inputs, strict=True):
            te.reduce_sequence_parallel_grads(layer)
            grads = {name: p.grad for name, p in layer.named_parameters() if p.numel()}
            found.append({name: t.detach().clone() for name, t in {"out": out, "dx": x.grad, **grads}.items()})
        return found


class Problem:
    """The layers of one run: with overlap, without, and their oracles."""

    def __init__(self, session: Session) -> None:
        args, here = session.args, session.here
        self.session, self.args, tp = session, args, here.tp_size
        mode = None if args.layer_type == LN_MLP else args.mode
        self.spec = Spec(args.layer_type, mode=mode, tp=tp, sequence_parallel=True)
        h = args.hidden
        k, n = (4 * h, h) if mode == "row" else (h, 3 * h)
        self.dtype, self.width_in, self.width_out = DTYPES[args.dtype], k, h if args.layer_type == LN_MLP else n
        gpu_fp32 = self.dtype == torch.float32 and here.device.type == "cuda"
        # Magnitudes that differ inside of a row, so that scales of a wrong block show (see tests/harness.py).
        self.spread = args.recipe in BLOCKED and self.dtype != torch.float16 and not gpu_fp32
        common.initialise(session, args.seq_length * args.batch_size, h, methods_as_cfgs(args), args.use_cuda_graphs)
        plain, overlapped, self.oracles = [], [], []
        for i, recipe in enumerate(args.recipes):
            p = reference.make_parameters(self.spec, k, n, 4 * h, seed=args.seed + i, dtype=self.dtype)
            p = reference.spread_parameters(self.spec, p) if self.spread else p
            shards = {name: shard_parameter(name, full, self.spec, here.tp_rank) for name, full in p.items()}
            options = {"dtype": self.dtype, "device": here.device, "parameters": shards, "sequence_parallel": True}
            options |= {"tp_group": here.tp_group, "tp_size": tp}
            overlapped.append(build(self.spec, k, n, 4 * h, name=f"layer {i}", **options, **flags(args)))
            plain.append(build(self.spec, k, n, 4 * h, name=f"layer {i} without", **options))
            self.oracles.append(Oracle(self.spec, p, recipe, self.dtype, here.device))
        self.overlapped, self.plain = Stack(overlapped, args), Stack(plain, args)

    def batch(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Full x and dy [S, B, features] of each layer."""
        args, full = self.args, []
        for i in range(args.num_layers):
            tokens, at = args.seq_length * args.batch_size, seed + 1000 * i
            x = reference.make_tokens(tokens, self.width_in, seed=at, dtype=self.dtype)
            dy = reference.make_tokens(tokens, self.width_out, seed=at + 500, dtype=self.dtype, scale=0.1)
            x, dy = reference.spread_tokens(self.spec, x, dy) if self.spread else (x, dy)
            full.append((x.view(args.seq_length, args.batch_size, -1), dy.view(args.seq_length, args.batch_size, -1)))
        return full

    def load(self, full: list[tuple[Tensor, Tensor]]) -> None:
        rank = self.session.here.tp_rank
        own = [(shard_input(x, self.spec, rank), shard_output(dy, self.spec, rank)) for x, dy in full]
        for stack in (self.overlapped, self.plain):
            stack.load(own, self.session.device)

    def expected(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of the oracle's tensor."""
        rank = self.session.here.tp_rank
        if name not in ("out", "dx"):
            return shard_parameter(name, value, self.spec, rank)
        value = value.view(self.args.seq_length, self.args.batch_size, -1)
        return (shard_output if name == "out" else shard_input)(value, self.spec, rank)

    def compare(self, full: list[tuple[Tensor, Tensor]]) -> list[Closeness]:
        """Every tensor of every layer, after a step of both stacks."""
        lines = []
        exact = ("fc2_bias",) if self.args.layer_type == LN_MLP else ("weight", "bias")
        results = zip(self.overlapped.results(), self.plain.results(), self.oracles, full, strict=True)
        for i, (got, collective, oracle, (x, dy)) in enumerate(results):
            truth, low = oracle.step(x, dy)
            if self.args.corrupt in got and i == 0:
                got[self.args.corrupt] = common.damaged(got[self.args.corrupt])
            for name, value in got.items():
                label = f"layer {i} {name}"
                parts = [self.expected(name, t[name]) for t in (truth, low)]
                if name in exact:
                    lines.append(common.identical(f"{label} against collective, bit for bit", value, collective[name]))
                else:
                    lines.append(common.between(f"{label} against collective", value, collective[name], *parts))
                lines.append(measure(f"{label} against the oracle", value, *parts))
        return lines


def methods_as_cfgs(args: argparse.Namespace) -> dict[str, dict[str, str]] | None:
    """ub_cfgs for --method; None for what initialize_ub does by itself."""
    if args.method == "default":
        return None
    return {gemm: {"method": method} for gemm, method in methods(args).items()}


def run(session: Session) -> None:
    args = session.args
    check_sizes(args, args.tp)
    problem = Problem(session)
    problem.load(problem.batch(args.seed))
    if args.use_cuda_graphs:
        problem.overlapped.capture()
    for i in range(1 if args.skip_verify else args.iterations):
        full = problem.batch(args.seed + i)
        problem.load(full)
        for stack in (problem.overlapped, problem.plain):
            stack.step()
        if not args.skip_verify:
            session.steps.append(problem.compare(full))
    session.facts += confirm(args)
    if args.skip_verify:
        session.say("nothing was compared (--skip-verify)")
    if args.benchmark:
        common.time_candidates(session, {"overlap": problem.overlapped.step, "collective": problem.plain.step})


if __name__ == "__main__":
    sys.exit(common.main(build_parser(), SCRIPT, check, run))
