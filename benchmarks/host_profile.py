"""Where the host's time goes in one step of a module: `python benchmarks/modules.py --profile`."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from benchmarks.modules import ModuleStep


def _median_us(call: Callable[[], object], before: Callable[[], None], sync: Callable[[], None], steps: int) -> float:
    times = []
    for _ in range(steps):
        before()
        sync()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def profile_step(work: ModuleStep, module: str, recipe: str, *, steps: int = 200, top: int = 25) -> None:
    """Print forward and backward host time, the Python functions and the torch operators that take it.

    The backward runs on the calling thread here (set_multithreading_enabled), for cProfile sees one thread.
    """
    cuda = work.x.is_cuda
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    for _ in range(10):
        work.reset()
        work.step()
    sync()
    forward_us = _median_us(work.forward, work.reset, sync, steps)
    step_us = _median_us(work.step, work.reset, sync, steps)
    print(f"\n=== {module} {recipe}: host {step_us:.0f} us a step, {forward_us:.0f} of it the forward ===")

    with torch.autograd.set_multithreading_enabled(False):
        profile = cProfile.Profile()
        for _ in range(steps):
            work.reset()
            sync()
            profile.enable()
            work.step()
            profile.disable()
        stats = pstats.Stats(profile, stream=sys.stdout)
        stats.strip_dirs().sort_stats("tottime").print_stats(top)
        print(f"(times above are seconds over {steps} steps, with the profiler's own cost in them)")

        activities = [torch.profiler.ProfilerActivity.CPU]
        if cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as traced:
            for _ in range(20):
                work.reset()
                work.step()
            sync()
    print(traced.key_averages().table(sort_by="self_cpu_time_total", row_limit=top, max_name_column_width=50))
