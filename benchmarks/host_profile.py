"""Where the host's time goes in one step: `python benchmarks/modules.py --profile`, `overlap.py --profile`.

By samples of the stack, for a profiler that is called at every call makes small functions look expensive.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from benchmarks.modules import ModuleStep

_PERIOD = 230e-6  # seconds, no divisor of a step's usual length
Line = tuple[CodeType, int]


class Samples:
    """Lines of Python by how often a signal found them: at the end of the stack (own), anywhere in it (all)."""

    def __init__(self) -> None:
        self.own: Counter[Line] = Counter()
        self.all: Counter[Line] = Counter()
        self.on = False

    def take(self, _: int, frame: FrameType | None) -> None:
        if self.on and frame is not None:
            self.own[frame.f_code, frame.f_lineno] += 1
            stack = set()
            while frame is not None:
                stack.add((frame.f_code, frame.f_lineno))
                frame = frame.f_back
            self.all.update(stack)
        _next()


def _next() -> None:
    """Asks for one more signal: a period after the last was dealt with, however slow the machine is."""
    signal.setitimer(signal.ITIMER_REAL, _PERIOD)


def _text(line: Line) -> str:
    code, number = line
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{number} {code.co_name}"


def _host_us(call: Callable[[], object], before: Callable[[], None], steps: int) -> float:
    """Median host time of call(), in microseconds."""
    times = []
    for _ in range(steps):
        before()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def sampled(call: Callable[[], object], before: Callable[[], None], steps: int) -> Samples:
    """Samples of `steps` calls, of this thread, without what before() does."""
    samples = Samples()
    previous = signal.signal(signal.SIGALRM, samples.take)
    signal.siginterrupt(signal.SIGALRM, False)  # system calls of other threads, say of NCCL, go on
    _next()
    try:
        for _ in range(steps):
            before()
            samples.on = True
            call()
            samples.on = False
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first: take() would ask for one more
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return samples


def add_argument(parser: argparse.ArgumentParser) -> None:
    what = "print where the host's time goes in so many steps (default 1000); time nothing"
    parser.add_argument("--profile", type=int, nargs="?", const=1000, metavar="STEPS", help=what)


def profile_step(work: ModuleStep, name: str, steps: int, *, top: int = 40) -> str:
    """Host time of forward and of forward plus backward, and the lines that take it, as a text.

    The backward runs on the calling thread (set_multithreading_enabled), the one that signals interrupt. A line's time
    is its share of the samples of the step's median time without sampling.
    """

    def before() -> None:
        work.reset()
        if work.x.is_cuda:
            torch.cuda.synchronize()

    with torch.autograd.set_multithreading_enabled(False):
        _host_us(work.step, before, steps)  # a process on a virtual machine takes seconds to its full speed
        forward_us = _host_us(work.forward, before, steps)
        step_us = _host_us(work.step, before, steps)
        samples = sampled(work.step, before, steps)
    count = sum(samples.own.values())
    text = [f"\n=== {name}: host {step_us:.0f} us a step, {forward_us:.0f} of it the forward; {count} samples ==="]
    for title, lines in (("by the line that runs", samples.own), ("by the line and what it calls", samples.all)):
        text.append(f"{title}, us a step")
        text += [f"{found / count * step_us:9.1f}  {_text(line)}" for line, found in lines.most_common(top)]
    return "\n".join(text)
