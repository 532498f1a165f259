"""Which of cublasLt's algorithms computes a large product: the fastest by measurement.

cublasLt's heuristic gives several and puts first what it takes for the fastest; docs/notebook/gemms.md has what others
took. One is used only where it gave the first one's bits, which are those of torch's calls.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from te_lite import _C
from te_lite.ops.memory import room

LEAST = 1 << 35  # multiplications, 50 to 100 us of a GPU: below, a step's time is the host's
MOST = 8  # algorithms that are asked for
ROUNDS = 5
MARGIN = 0.99  # another than the first must save 1%, which is about the noise
MOST_PROBLEMS = 128  # that a process measures; one with ever new token counts uses the first ones from then on
_WORD = os.environ.get("TE_LITE_AUTO", "measure")
if _WORD not in ("measure", "rule"):
    raise ValueError(f"TE_LITE_AUTO={_WORD!r}: must be measure or rule; leave it out for what the device favours")
MEASURES = _WORD == "measure"
_measured = 0  # problems so far


def most_algorithms(m: int, n: int, k: int) -> int:
    """How many to ask the heuristic for, for a product [m, n] of sums over k."""
    return MOST if MEASURES and _measured < MOST_PROBLEMS and m * n * k >= LEAST else 1


def choose(
    plan: _C.GemmPlan, trial: Callable[[], Any], out: Tensor, a: Tensor, b: Tensor, scales: Sequence[Tensor | None],
    bias: Tensor | None,
) -> None:  # fmt: skip
    """Has `plan` use the fastest algorithm from now on, for tensors that lie as these, which GemmPlan.run takes.

    trial: gives another plan of the same problem, in which one algorithm after the other is chosen. Waits for the
    device, which computes the product some 50 times. Nothing is measured where memory has no room for that, after
    MOST_PROBLEMS, or where torch.cuda.set_sync_debug_mode asks for no waiting. The first stays where the call refuses
    another.
    """
    global _measured
    needed = 3 * (_span(a) + _span(b)) + 5 * out.nbytes + plan.workspace
    if _measured >= MOST_PROBLEMS or torch.cuda.get_sync_debug_mode() or 2 * needed > room():
        return
    _measured, other = _measured + 1, trial()
    with suppress(RuntimeError), _disable_current_modes():  # the call refuses one, or memory has run out
        generator = torch.Generator(out.device).manual_seed(0)

        # Values are random: of the caller's zeros, or of sums that vanish in what they are added to, every algorithm
        # has the same bits. Sums are some 100: fp8 values are spread over all exponents, and scales take them back.
        def random(like: Tensor) -> Tensor:
            made = torch.randn(_span(like), device=out.device, dtype=torch.bfloat16, generator=generator)
            return (made * 32 if like.itemsize == 1 else made).to(like.dtype)

        left, right, before = random(a), random(b), random(out)
        a_scale, b_scale = (None if t is None else random(t).abs_().add_(0.5) / 32 for t in scales)
        added = None if bias is None else torch.zeros_like(bias)
        space = torch.empty(other.workspace, dtype=torch.uint8, device=out.device)
        rest = [0 if t is None else t.data_ptr() for t in (a_scale, b_scale, added, space)]
        stream = torch.cuda.current_stream(out.device).cuda_stream

        def run(algorithm: int, to: Tensor) -> Tensor:
            other.choose(algorithm)
            other.run(left.data_ptr(), right.data_ptr(), to.data_ptr(), *rest, stream)
            return to

        first = run(0, before.clone())
        times = _times(run, other.algorithms, before.clone())
        plan.choose(pick(times, lambda i: torch.equal(first, run(i, before.clone()))))


def pick(times: Sequence[Sequence[float]], like_first: Callable[[int], bool]) -> int:
    """The algorithm with the least median time, where that is below MARGIN of the first one's, of those for which
    like_first(i); else the first, 0."""
    medians = [statistics.median(of_one) for of_one in times]
    faster = [i for i, median in enumerate(medians) if median < MARGIN * medians[0]]
    return next(filter(like_first, sorted(faster, key=medians.__getitem__)), 0)


def _span(t: Tensor) -> int:
    """From the first to the last of its elements as they lie."""
    return 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))


def _times(run: Callable[[int, Tensor], object], count: int, out: Tensor) -> list[list[float]]:
    """Milliseconds of each algorithm in each round; they take turns."""
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in range(count)]
    for _ in range(1 + ROUNDS):
        for i in range(count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(i, out)
            end.record()
            events[i].append((start, end))
    torch.cuda.current_stream(out.device).synchronize()
    return [[start.elapsed_time(end) for start, end in of_one[1:]] for of_one in events]
