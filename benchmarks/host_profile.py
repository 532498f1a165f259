"""Where the host's time goes in one step: `--profile` of modules.py and overlap.py.

By samples of the stack, for a profiler that is called at every call makes small functions look expensive. Python deals
with a signal after a call, at the start of a function or at the end of a loop's turn: what an operator or a look-up
takes is found at one of those soon after it.
"""

from __future__ import annotations

import argparse
import random
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

_PERIOD = 230e-6  # seconds between samples, the mean: equal ones would meet every step at the same places
_SHORTEST = 20e-6
Line = tuple[CodeType, int]


class Sampler:
    """Periods of time by the line of Python that ran (own), and by each line that stood in the stack (all)."""

    def __init__(self) -> None:
        self.own: Counter[Line] = Counter()
        self.all: Counter[Line] = Counter()
        self._counts = self._goes_on = False
        self._due = 0.0
        self._random = random.Random(0)

    def run(self, call: Callable[[], object], before: Callable[[], None], steps: int) -> None:
        """Samples `steps` calls on the main thread, without what before() does."""
        previous = signal.signal(signal.SIGALRM, self._take)
        self._goes_on = True
        self._next()
        try:
            for _ in range(steps):
                before()
                self._counts = True
                call()
                self._counts = False
        finally:
            self._counts = self._goes_on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)

    def _take(self, _: int, frame: FrameType | None) -> None:
        if self._counts:
            # A call into C holds the signal up: it counts for all the periods that it took.
            self._count(frame, 1 + max(0.0, time.perf_counter() - self._due) / _PERIOD)
        if self._goes_on:
            self._next()

    def _next(self) -> None:
        delay = max(self._random.expovariate(1 / _PERIOD), _SHORTEST)
        self._due = time.perf_counter() + delay
        signal.setitimer(signal.ITIMER_REAL, delay)

    def _count(self, frame: FrameType | None, periods: float) -> None:
        stack: list[Line] = []
        while frame is not None and frame.f_code.co_filename != __file__:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        if stack:
            self.own[stack[0]] += periods
            for line in set(stack):
                self.all[line] += periods


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


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} steps: must be an integer above 0; leave it out for 1000")
    return int(text)


def add_argument(parser: argparse.ArgumentParser) -> None:
    what = "print where the host's time goes in so many steps (default 1000); time nothing"
    parser.add_argument("--profile", type=_steps, nargs="?", const=1000, metavar="STEPS", help=what)


def profile_step(work: ModuleStep, name: str, steps: int, *, top: int = 40) -> str:
    """Host time of forward and of forward plus backward, and the lines that take it, as a text.

    The device is idle when a step begins, and not held back. The backward runs on the calling thread
    (set_multithreading_enabled), the one that signals interrupt. A line's time is its share of the samples of the
    step's median time without sampling.
    """

    def before() -> None:
        work.reset()
        if work.x.is_cuda:
            torch.cuda.synchronize()

    sampler = Sampler()
    with torch.autograd.set_multithreading_enabled(False):
        _host_us(work.step, before, steps)  # a process on a virtual machine takes seconds to its full speed
        forward_us = _host_us(work.forward, before, steps)
        step_us = _host_us(work.step, before, steps)
        sampler.run(work.step, before, steps)
    whole = sum(sampler.own.values())
    text = [
        f"\n=== {name}: host {step_us:.0f} us a step, {forward_us:.0f} of it the forward; {steps} steps sampled ==="
    ]
    for title, lines in (("by the line that runs", sampler.own), ("by the line and what it calls", sampler.all)):
        text.append(f"{title}, us a step")
        text += [f"{found / whole * step_us:9.1f}  {_text(line)}" for line, found in lines.most_common(top)]
    return "\n".join(text)
