"""Draws what each rank does in one forward and backward of a tensor-parallel te.LayerNormMLP: copies against GEMMs.

    torchrun --nproc-per-node 4 benchmarks/timeline.py
    torchrun --nproc-per-node 2 benchmarks/timeline.py --device cpu    # the order of things; no GPU's times

One PNG a method, two rows a rank (needs matplotlib); timeline.json has the spans. The functions that compute, copy and
wait are wrapped from here, te_lite is as always. Kinds of spans:

    gemm, other   the ranges that te_lite names for profilers: GEMMs (or their pieces); norms, activations and casts
    reduce        the sum of partials that have arrived
    wait          the main stream (CPU: the thread) stands until data has come or gone
    copy          GPU: events on the group's copy stream around what is issued to it, the first behind the same wait for
                  the main stream as the copies. CPU: from its issue until the copy thread has done it
    collective    torch.distributed's, for which the main stream waits too

A fused GEMM waits for pieces, or adds what has arrived, inside its kernel: both are part of its span. A GPU is
timed by events from the end of one all-reduce on, which all ranks leave within some microseconds, and the host is ahead
of it. CPU ranks share the host's clock. Events cost some microseconds each: overlap.py is the benchmark that times.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed
if __name__ == "__main__":
    os.environ["TE_LITE_NVTX"] = "1"  # before te_lite is imported: the ranges are what is recorded

import torch
import torch.distributed as dist

import te_lite as te
from benchmarks import result_files
from benchmarks.modules import RESULTS, Shape
from benchmarks.overlap import BULK, RECIPES, SCATTERS, everywhere, mlp_step
from te_lite.functional import layernorm_mlp
from te_lite.ops import nvtx
from te_lite.overlap import buffers, epilogues
from te_lite.overlap.buffers import Gather, Scatter
from te_lite.overlap.exchange import Gemm
from te_lite.overlap.fused import Fused
from te_lite.overlap.group import Group
from te_lite.testing.distributed import init_ranks, leave_ranks

SHAPES = {"cuda": (8192, 4096, 14336), "cpu": (4096, 4096, 512)}  # tokens of all ranks, hidden, ffn
METHODS = {  # ub_cfgs, flags of the module
    "collective": (None, {}),
    "ring": (everywhere("ring_exchange", dgrad=True), SCATTERS),
    "bulk": (everywhere("ring_exchange", dgrad=False), BULK),  # rings, and bulk in the backward of fc1
    "fused": (everywhere("fused", dgrad=True), SCATTERS),
}
KIND_OF_RANGE = dict.fromkeys(("fprop", "dgrad", "wgrad"), "gemm")
KIND_OF_RANGE |= dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), "collective")
BESIDE = {"copy": "#f2a33a", "collective": "#b279a2"}
COLOURS = {"gemm": "#4c78a8", "other": "#c9d3dd", "reduce": "#72b7b2", "wait": "#e45756", **BESIDE}
HOLD_CYCLES = 60_000_000  # tens of milliseconds, in which the host issues the whole step

Mark = Any  # an event, microseconds of the host's clock, or a Future of them


def describe(use: Gather | Scatter, segment: int) -> tuple[str, str]:
    """(kind, name) of a segment of programs.py; ("", "") where it only sets flags or has a kernel's time watched.
    The first copy's time includes its wait for room."""
    rank, size = use.group.rank, use.group.size
    if isinstance(use, Gather):
        known = {0: ("copy", "gather"), size: ("wait", "for all"), size + 1: ("wait", "for what it sends")}
        return known.get(segment, ("wait", f"for rank {(rank + segment) % size}"))
    pushes = sum(use.cuts)
    last = [("copy", "rows of all"), ("wait", "for partials"), ("wait", "for what it sends"), ("", "")]
    if segment >= pushes:
        return last[segment - pushes]
    step = segment * (size - 1) // pushes
    return "copy", f"rows of {(rank + 1 + step) % size}"


class Recorder:
    """What this rank does while wrapped() is open: (kind, name, begin, end)."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list[tuple[str, str, Mark, Mark]] = []
        self.layer = ""
        self._watchers = ThreadPoolExecutor(8)

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        if not self.cuda:
            return time.perf_counter() * 1e6
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        name, begin = f"{self.layer} {name}".strip(), self.mark()
        yield
        self.spans.append((kind, name, begin, self.mark()))

    def range(self, label: str):
        """In place of nvtx_range."""
        name = label.removeprefix("te_lite.")
        return self.span(KIND_OF_RANGE.get(name, "other"), name.replace("_", "-"))

    def issue(
        self, original: Callable[..., None], group: Group, use: Gather | Scatter, segment: int, *rest: Any
    ) -> None:
        kind, name = describe(use, segment)
        if kind != "copy":
            with self.span(kind, name) if kind else nullcontext():
                return original(group, use, segment, *rest)
        if self.cuda:
            group.stream.wait_stream(torch.cuda.current_stream())  # else it begins when the copy stream fell idle
        begin = self.mark(group.stream)
        original(group, use, segment, *rest)
        end = self.mark(group.stream) if self.cuda else self._watchers.submit(self._copied, group.executor)
        self.spans.append((kind, f"{self.layer} {name}", begin, end))

    def _copied(self, executor: Any) -> float:
        executor.synchronize()
        return self.mark()

    def of_layer(self, original: Callable[..., Any], plan: Any, *args: Any, **kwargs: Any) -> Any:
        self.layer = "fc1" if plan.tp.mode == "column" else "fc2"
        return original(plan, *args, **kwargs)

    def one_kernel(self, original: Callable[..., Any], exchange: Fused, gemm: Gemm, *args: Any) -> Any:
        with self.range(gemm.label):
            return original(exchange, gemm, *args)

    def reduction(self, original: Callable[..., Any], *args: Any) -> Any:
        with self.span("reduce", "sum"):
            return original(*args)

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        wrappers = (
            (self.of_layer, layernorm_mlp, ("linear_forward", "linear_backward")),
            (self.one_kernel, Fused, ("all_gather_gemm", "gemm_reduce_scatter")),
            (self.reduction, buffers, ("reduce_slots",)),
            (self.reduction, epilogues, ("reduce_slots",)),
            (self.issue, Group, ("issue",)),
        )
        with ExitStack() as patches:
            patches.enter_context(patch.object(nvtx, "nvtx_range", self.range))
            for wrapper, owner, names in wrappers:
                for name in names:
                    wraps = (lambda w, original: lambda *a, **k: w(original, *a, **k))(wrapper, getattr(owner, name))
                    patches.enter_context(patch.object(owner, name, wraps))
            yield


def record(shape: Shape, recipe: str, method: str, warmup: int, device: torch.device) -> list[dict]:
    """A row a span of one step of all ranks, microseconds from the first. The same on all ranks."""
    config, flags = METHODS[method]
    te.initialize_ub([shape.tokens, shape.hidden], dist.get_world_size(), ub_cfgs=config, device=device)
    work, recorder = mlp_step(shape, recipe, flags, device), Recorder(device)
    with recorder.wrapped():
        for step in range(warmup + 1):
            work.reset()
            recorder.spans.clear()
            if recorder.cuda:
                torch.cuda.synchronize()
                torch.cuda._sleep(HOLD_CYCLES if step == warmup else 0)
            dist.all_reduce(torch.zeros(1, device=device))
            zero, recorder.layer = recorder.mark(), ""
            with recorder.span("step", "forward"):
                y = work.forward()
            recorder.layer = ""
            with recorder.span("step", "backward"):
                y.backward(work.dy)
    if recorder.cuda:
        torch.cuda.synchronize()

    def us(mark: Mark) -> float:
        mark = mark.result() if isinstance(mark, Future) else mark
        return zero.elapsed_time(mark) * 1e3 if recorder.cuda else mark

    own = sorted((us(begin), us(end), kind, name) for kind, name, begin, end in recorder.spans)
    for row in te.overlap_report():
        if row["reason"] and dist.get_rank() == 0:
            print(f"{method}: {row['gemm']} took {row['schedule']}: {row['reason']}")
    te.destroy_ub()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    first = min(spans[0][0] for spans in every)
    return [
        {"method": method, "rank": r, "kind": kind, "name": name, "begin_us": begin - first, "end_us": end - first}
        for r, spans in enumerate(every)
        for begin, end, kind, name in spans
    ]


def draw(path: Path, rows: list[dict], title: str) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks, length = 1 + max(row["rank"] for row in rows), max(row["end_us"] for row in rows)
    figure = Figure(figsize=(14, 1.2 + 1.4 * ranks), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        begin, width, kind, name = row["begin_us"], row["end_us"] - row["begin_us"], row["kind"], row["name"]
        y = 2.3 * row["rank"] + (kind in BESIDE)
        if kind == "step":
            axes.vlines(row["end_us"], y - 0.5, y + 1.5, color="black", linewidth=0.8, linestyle=":")
            continue
        axes.barh(y, width, left=begin, height=0.94, color=COLOURS[kind], edgecolor="white", linewidth=0.3)
        room = 190 * width / length  # characters
        if room > 1.5 and (kind in ("gemm", *BESIDE) or room > len(name)):
            turn = 0 if room > len(name) else 90
            axes.text(begin + width / 2, y, name, ha="center", va="center", fontsize=6, rotation=turn)
    axes.set_yticks([2.3 * rank + part for rank in range(ranks) for part in (0, 1)])
    axes.set_yticklabels([f"rank {rank} {part}" for rank in range(ranks) for part in ("computes", "sends")])
    axes.set(xlim=(0, 1.005 * length), ylim=(2.3 * ranks - 0.7, -0.6))
    axes.ticklabel_format(axis="x", style="plain")
    axes.set_xlabel("microseconds; dotted: the end of forward, of backward", fontsize=8)
    axes.set_title(title, fontsize=9)
    figure.legend(handles=[Patch(color=c, label=k) for k, c in COLOURS.items()], loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=100)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(SHAPES))
    parser.add_argument("--shape", nargs=3, type=int, metavar=("TOKENS", "HIDDEN", "FFN"), help="tokens of all ranks")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all, without fused on CPU ranks")
    parser.add_argument("--recipe", default="bf16", choices=RECIPES)
    parser.add_argument("--warmup", type=int, default=5, help="steps before the one that is drawn")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of timeline.json and timeline_<method>.png")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    cpu = args.device == "cpu"
    methods = args.methods or [method for method in METHODS if not (cpu and method == "fused")]
    if cpu and "fused" in methods:
        raise SystemExit("--methods fused with --device cpu: a ring would run in its place; leave it out")
    rank, ranks, device = init_ranks(args.device)
    if ranks < 2:
        raise SystemExit(f"timeline on {ranks} rank: nothing moves; start it with torchrun on 2 or more")
    torch.manual_seed(rank)
    shape = Shape("timeline", *(args.shape or SHAPES[args.device]))
    found = {method: record(shape, args.recipe, method, args.warmup, device) for method in methods}
    if rank == 0:
        rows = [row for spans in found.values() for row in spans]
        sizes = {"tokens": shape.tokens, "hidden": shape.hidden, "ffn": shape.ffn}
        where = "CPU ranks: the times say nothing about GPUs" if cpu else torch.cuda.get_device_name(device)
        result_files.write_results(
            args.out / "timeline.json",
            "timeline",
            rows,
            tree=tree,
            device=device,
            tp=ranks,
            recipe=args.recipe,
            **sizes,
        )
        text = ", ".join(f"{name} {size}" for name, size in sizes.items())
        for method, spans in found.items():
            draw(
                args.out / f"timeline_{method}.png",
                spans,
                f"{method}: LayerNormMLP, {args.recipe}, {text}; {ranks} {where}",
            )
    leave_ranks()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
