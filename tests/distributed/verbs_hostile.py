"""What run_verbs.py checks of the verbs and of groups that end, differ, or are used in unusual ways."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import te_lite as te
from tests.distributed.overlapping import begin
from tests.distributed.verbs_checks import refused


@contextmanager
def _with_and_without(device: torch.device) -> Iterator[Callable[[], Iterator[bool]]]:
    """Gives a generator: False, then True with userbuffers open."""

    def each() -> Iterator[bool]:
        te.destroy_ub()
        yield False
        begin(64 * dist.get_world_size(), 32, dist.group.WORLD, device, dtype=torch.float32)
        yield True

    yield each


def a_group_of_one_rank(device: torch.device) -> None:
    """With userbuffers of its own: x itself."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group, x = groups[dist.get_rank()], torch.randn(8, 16)
    for ub in (False, True):
        if ub:
            te.initialize_ub([64, 64], 1, tp_group=group, dtype=torch.float32, device=device)
        for verb in (te.reduce_scatter, te.all_gather):
            for strict in (False, True):  # there is nothing that could overlap
                assert torch.equal(verb(x, group, strict=strict).wait(), x)
    te.destroy_ub()
    dist.barrier()
    for one in groups:
        if one is group:
            dist.destroy_process_group(one)


def what_torch_does_lazily(device: torch.device) -> None:
    """A conjugate or a negative that torch has not written down, and dtypes that no backend knows."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with _with_and_without(device) as each:
        for _ in each():
            x = torch.fft.rfft(torch.arange(32.0).reshape(4, 8) + rank)
            for lazy in (x.conj(), x.conj().imag):
                whole = te.all_gather(lazy, dist.group.WORLD).wait()
                assert torch.equal(whole.chunk(size)[rank], lazy.resolve_conj().resolve_neg())
            for dtype in (torch.int16, torch.uint16, torch.float64, torch.complex64):
                for rows in (4, 4096):  # the second is larger than a userbuffer
                    given = torch.full((rows, 4), rank, dtype=dtype)
                    whole = te.all_gather(given, dist.group.WORLD).wait()
                    assert whole.dtype == dtype and torch.equal(whole.chunk(size)[rank], given)
            assert te.all_gather(torch.ones(4, 0), dist.group.WORLD).wait().shape == (4 * size, 0)


def strict_by_autocast(device: torch.device) -> None:
    x, world = torch.ones(8 * dist.get_world_size(), 16), dist.group.WORLD
    with te.autocast(enabled=False, strict=True):
        for verb in (te.all_gather, te.reduce_scatter):
            with refused(RuntimeError, "does not happen", "no userbuffers"):
                verb(x, world)


def dimensions_that_differ(device: torch.device) -> None:
    x, w, world, rank = torch.arange(8.0).view(2, 2, 2), torch.eye(2), dist.group.WORLD, dist.get_rank()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: te.all_gather(x, world, dim=rank % 2),
        lambda: te.all_gather_linear(x, w, world, dim=rank % 2),
    )
    with _with_and_without(device) as each:
        for ub in each():
            if not (ub or device.type == "cpu"):
                continue  # ranks on GPUs compare nothing without userbuffers
            for call in calls:
                with refused(RuntimeError, "dim=0", "dim=1"):
                    for _ in range(400):
                        call()
                if ub:
                    te.destroy_ub()
                    dist.barrier()
                    begin(64 * dist.get_world_size(), 32, world, device, dtype=torch.float32)


def handles_in_checkpoints(device: torch.device) -> None:
    """torch's checkpoint recomputes as much as backward needs, here not the handle's wait()."""
    x, w = torch.randn(32, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        handle = te.all_gather(x, dist.group.WORLD)
        return te.all_gather_linear(x, w, dist.group.WORLD).sin() + handle.wait().sum()

    with _with_and_without(device) as each:
        for _ in each():
            grads: list[Tensor] = []
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for again in (False, True, False, True):
                    with te.autocast(recipe=("current", "blockwise")[len(grads) // 2]):
                        y = checkpoint(body, x, use_reentrant=False) if again else body(x)
                    grads += torch.autograd.grad(y.sum(), x)
                    del y
                    gc.disable()  # nothing may wait for the collector of cycles
            gc.enable()
            assert torch.equal(grads[0], grads[1]) and torch.equal(grads[2], grads[3])


def a_recipe_of_ones_own_beside_a_checkpoint(device: torch.device) -> None:
    """A call with recipe= follows no autocast: it says nothing of what another call has followed."""
    x, w = (torch.randn(32, 32, device=device, requires_grad=True) for _ in range(2))
    group = dist.group.WORLD

    def first(x: Tensor) -> Tensor:
        return te.linear_reduce_scatter(te.all_gather_linear(x, w, group), w, group)

    grads: list[Tensor] = []
    for again in (False, True):
        with te.autocast(recipe="current"):
            h = checkpoint(first, x, use_reentrant=False) if again else first(x)
            y = te.all_gather_linear(h, (w, w), group, recipe="mxfp8")[0]
            y = te.linear_reduce_scatter(y, w, group, recipe="blockwise")
        grads += torch.autograd.grad(y.sum(), x)
    assert torch.equal(*grads)


def groups_that_end(device: torch.device) -> None:
    """Nothing keeps a group that was destroyed: its threads and files go. And its use is refused."""
    if device.type != "cpu":
        return
    x, w, ranks = torch.randn(32, 32), torch.randn(32, 32), list(range(dist.get_world_size()))
    counts = []
    for _ in range(8):
        group = dist.new_group(ranks)
        te.all_gather_linear(x, w, group)
        module = te.Linear(
            32, 32, params_dtype=torch.float32, device=device, parallel_mode="column", sequence_parallel=True,
            tp_group=group, tp_size=len(ranks),
        )  # fmt: skip
        with te.autocast(recipe="delayed"):
            y = module(x)
        y.sum().backward()
        dist.destroy_process_group(group)
        with te.autocast(recipe="current"), refused(RuntimeError, "was destroyed", "set_tensor_parallel_group"):
            module(x)
        with refused(RuntimeError, "was destroyed"):
            te.all_gather_linear(x, torch.randn(16, 32), group)
        del module, y, group
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert counts[-1] == counts[2], (counts, threading.enumerate())


def waits_without_gradients(device: torch.device) -> None:
    """Who waits first, perhaps for a log, does not take the gradient away."""
    world, size = dist.group.WORLD, dist.get_world_size()
    with _with_and_without(device) as each:
        for _ in each():
            for verb, gradient in ((te.all_gather, size), (te.reduce_scatter, 1)):
                for mode in (torch.no_grad, torch.inference_mode):
                    x = torch.ones(2 * size, 4, device=device, requires_grad=True)
                    handle = verb(x, world)
                    with mode():
                        seen = handle.wait()
                    assert handle.wait() is seen
                    seen.sum().backward()
                    assert x.grad is not None and x.grad.eq(gradient).all()


HOSTILE = (
    waits_without_gradients,
    a_group_of_one_rank,
    what_torch_does_lazily,
    strict_by_autocast,
    dimensions_that_differ,
    handles_in_checkpoints,
    a_recipe_of_ones_own_beside_a_checkpoint,
    groups_that_end,
)
