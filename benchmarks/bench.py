"""Timing for the benchmarks.

What is compared is measured in one interleaved run: a GPU's matrix rate moves by up to 15% with its power
state, so two numbers from two runs are no ratio.

    for r in range(rounds):
        for candidate in rotate(candidates, r):      # once a round each, another one first each time
            flush L2; hold the stream; start event; candidate.step(); end event

The stream is held by a spinning kernel until the host has enqueued the whole step, so `gpu_us` has no launch
gaps in it even where the host needs ten times as long as the device.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MIB = 1024 * 1024
WARM_STEPS = 10  # before each block of wall time
FLUSH_MIB = 256  # several times the 60 MB of L2 of an H200
MAX_HOLD_US = 50_000.0


@dataclass(frozen=True)
class Candidate:
    """One thing to time. `reset` runs before every step: outside the clocks of `gpu_us` and `host_us`,
    inside that of `wall_us`, as in a training loop that sets its gradients to None."""

    name: str
    step: Callable[[], object]
    reset: Callable[[], None] | None = None


@dataclass(frozen=True)
class Sample:
    gpu_us: float
    host_us: float
    exposed: bool  # the device began before the host had enqueued everything: gpu_us may hold launch gaps


@dataclass
class Timing:
    """Medians in microseconds. `spread` is the interquartile range of gpu_us over its median.
    `error` is set, and everything else None, when the candidate raised."""

    name: str
    gpu_us: float | None = None
    host_us: float | None = None
    wall_us: float | None = None
    spread: float | None = None
    samples: int = 0
    exposed: int = 0
    error: str | None = None


class Clock(Protocol):
    """What a device needs to be timed by time_interleaved."""

    def synchronize(self) -> None: ...

    def sample(self, step: Callable[[], object], hold_us: float) -> Sample: ...


class CudaClock:
    """Device time by events, with the L2 cache flushed and the stream held while the host enqueues."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self._flush = torch.empty(FLUSH_MIB * MIB, dtype=torch.uint8, device=self.device)
        self._cycles_per_us = self._calibrate()

    def _calibrate(self) -> float:
        cycles = 20_000_000
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(4):  # the first launch loads the module, and an idle clock has to rise
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        return cycles / (start.elapsed_time(end) * 1e3)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def sample(self, step: Callable[[], object], hold_us: float) -> Sample:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        self._flush.zero_()
        torch.cuda._sleep(int(hold_us * self._cycles_per_us))
        start.record()
        begin = time.perf_counter_ns()
        step()
        host_us = (time.perf_counter_ns() - begin) / 1e3
        exposed = start.query()
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) * 1e3, host_us, exposed)


class HostClock:
    """For CPU tensors: nothing is asynchronous, so device time is the host's. A smoke test, not a result."""

    def synchronize(self) -> None:
        pass

    def sample(self, step: Callable[[], object], hold_us: float) -> Sample:
        begin = time.perf_counter_ns()
        step()
        host_us = (time.perf_counter_ns() - begin) / 1e3
        return Sample(host_us, host_us, False)


def clock_for(device: torch.device | str) -> Clock:
    return CudaClock(device) if torch.device(device).type == "cuda" else HostClock()


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """step() as a CUDA graph, captured at the first call. Other threads may call CUDA meanwhile: NCCL's do."""
    graphs: list[torch.cuda.CUDAGraph] = []

    def replay() -> None:
        if not graphs:
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            graphs.append(graph)
        graphs[0].replay()

    return replay


def interleave(candidates: Sequence[Candidate], rounds: int) -> Iterator[Candidate]:
    """Every candidate once a round. Round r starts with candidate r % n: the neighbours in time change."""
    for r in range(rounds):
        for i in range(len(candidates)):
            yield candidates[(r + i) % len(candidates)]


def _reset(candidate: Candidate) -> None:
    if candidate.reset is not None:
        candidate.reset()


def _warm_up(candidate: Candidate, clock: Clock, steps: int) -> str | None:
    """Compiles, fills caches and allocator. Returns what went wrong."""
    try:
        for _ in range(steps):
            _reset(candidate)
            candidate.step()
        clock.synchronize()
    except Exception as error:  # one bad candidate costs one row, not the run
        return f"{type(error).__name__}: {error}"
    return None


def _wall_us(candidate: Candidate, clock: Clock, steps: int) -> float:
    """Steps back to back with one synchronisation at the end, over their number.

    A training loop is warm: the first steps after another candidate ran, which reload its code and data into the
    host's caches, are not counted.
    """
    for _ in range(WARM_STEPS):
        _reset(candidate)
        candidate.step()
    clock.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(steps):
        _reset(candidate)
        candidate.step()
    clock.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3 / steps


def _hold_for(candidate: Candidate, clock: Clock) -> float:
    """Microseconds to hold the stream until the host is done: doubled until a sample is not exposed."""
    _reset(candidate)
    hold_us = 2.0 * clock.sample(candidate.step, 0.0).host_us + 200.0
    while hold_us < MAX_HOLD_US:
        _reset(candidate)
        if not clock.sample(candidate.step, hold_us).exposed:
            break
        hold_us *= 2
    return min(hold_us, MAX_HOLD_US)


def time_interleaved(
    candidates: Sequence[Candidate],
    clock: Clock,
    *,
    rounds: int = 20,
    warmup: int = 3,
    wall_rounds: int = 5,
    wall_block_us: float = 60_000.0,
    kept: dict[str, list[Sample]] | None = None,
) -> dict[str, Timing]:
    """Time all candidates in one run; see the module's docstring.

    rounds: samples of gpu_us and host_us a candidate. wall_rounds: blocks of back-to-back steps a candidate
    (0: no wall time), interleaved as well, each about wall_block_us long and at least 5 steps.
    kept: gets the samples of every candidate, round by round, for ratios of neighbours in time.
    A candidate that raises in its warm-up gets a Timing with `error` and is left out of the run.
    """
    names = [candidate.name for candidate in candidates]
    if len(set(names)) != len(names):
        raise ValueError(f"candidates {names}: names must be unique; rename one")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least 1 is needed; pass rounds >= 1")
    timings = {name: Timing(name) for name in names}
    for candidate in candidates:
        timings[candidate.name].error = _warm_up(candidate, clock, warmup)
    running = [c for c in candidates if timings[c.name].error is None]
    holds = {c.name: _hold_for(c, clock) for c in running}

    samples: dict[str, list[Sample]] = {c.name: [] for c in running}
    for candidate in interleave(running, rounds):
        _reset(candidate)
        samples[candidate.name].append(clock.sample(candidate.step, holds[candidate.name]))
    walls: dict[str, list[float]] = {c.name: [] for c in running}
    for candidate in interleave(running, wall_rounds):
        one_us = max(1.0, *(max(s.gpu_us, s.host_us) for s in samples[candidate.name][-3:]))
        steps = int(min(200, max(5, wall_block_us / one_us)))
        walls[candidate.name].append(_wall_us(candidate, clock, steps))

    if kept is not None:
        kept.update(samples)
    for candidate in running:
        _summarise(timings[candidate.name], samples[candidate.name], walls[candidate.name])
        _reset(candidate)
    return timings


def _summarise(timing: Timing, samples: list[Sample], walls: list[float]) -> None:
    gpu = [s.gpu_us for s in samples]
    timing.gpu_us = statistics.median(gpu)
    timing.host_us = statistics.median(s.host_us for s in samples)
    timing.wall_us = statistics.median(walls) if walls else None
    timing.samples = len(samples)
    timing.exposed = sum(s.exposed for s in samples)
    if len(gpu) >= 4:
        low, _, high = statistics.quantiles(gpu, n=4)
        timing.spread = (high - low) / timing.gpu_us


def kept_by_forward(forward: Callable[[], torch.Tensor], device: torch.device | str) -> float | None:
    """MiB that `forward` allocated and still holds when it returns, its output left out. None on a CPU.

    What existed before (input, parameters) does not count, so a bf16 Linear keeps 0. Call it after a warm-up:
    GEMM workspaces and recipe state are allocated by the first call and never again.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    out = forward()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_allocated(device)
    return (after - before - out.untyped_storage().nbytes()) / MIB


def tflops(flops: float, us: float | None) -> float | None:
    """TFLOP/s of `flops` floating-point operations in `us` microseconds."""
    return flops / us / 1e6 if us else None


def gbps(num_bytes: float, us: float | None) -> float | None:
    """GB/s (1e9 bytes) of `num_bytes`, reads plus writes, in `us` microseconds."""
    return num_bytes / us / 1e3 if us else None
