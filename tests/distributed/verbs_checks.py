"""What run_verbs.py checks of handles, of states and of what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te
from te_lite.overlap.buffers import SLOTS
from te_lite.testing.numerics import assert_bitwise_equal
from tests.distributed.overlapping import begin, in_eighths, poison

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn)


def tokens(seed: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    return in_eighths(torch.randn(*shape, generator=generator, device="cpu")).to(torch.get_default_device())


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The body raises `kind` with all of these in its message."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if not re.search(word, str(error))]
        assert not missing, f"{error} lacks {missing}"
    else:
        raise AssertionError(f"no {kind.__name__} with {words}")


def _moved(seed: int, strict: bool) -> None:
    """Both verbs along a drawn dimension, forward and backward, with others begun in between."""
    draw, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    shape = [draw.choice((1, 3, 4)) for _ in range(draw.choice((1, 2, 3)))]
    dim, dtype = draw.randrange(len(shape)), draw.choice((torch.float32, torch.bfloat16))
    xs = [tokens(seed, r, *shape).to(dtype) for r in range(size)]
    shape[dim] *= size
    ps = [tokens(seed + 1, r, *shape).to(dtype) for r in range(size)]
    x, p = xs[rank].clone().requires_grad_(), ps[rank].clone().requires_grad_()
    first = te.all_gather(x, dist.group.WORLD, dim=dim - len(shape) * (seed % 2), strict=strict)
    second = te.reduce_scatter(p, dist.group.WORLD, dim=dim, strict=strict)
    between = [te.all_gather(torch.full((2,), r), dist.group.WORLD) for r in range(draw.choice((0, SLOTS + 2)))]
    order = [first, second]
    draw.shuffle(order)
    for handle in order:
        handle.wait()
    whole, part = first.wait(), second.wait()
    assert whole is first.wait() and whole.is_contiguous() and part.is_contiguous()
    assert_bitwise_equal("gathered", whole.detach(), torch.cat(xs, dim))
    total = sum(q.float() for q in ps).to(dtype)
    assert_bitwise_equal("scattered", part.detach(), total.chunk(size, dim)[rank])
    for r, handle in enumerate(between):
        assert handle.wait().tolist() == [r] * 2 * size
    kept = whole.detach().clone(), part.detach().clone()
    torch.autograd.backward((whole, part), (ps[rank], xs[rank]))
    assert_bitwise_equal("gradient of a gather", x.grad, total.chunk(size, dim)[rank])
    assert_bitwise_equal("gradient of a scatter", p.grad, torch.cat(xs, dim))
    for _ in range(SLOTS + 1):  # what wait() gave is no slot
        te.all_gather(torch.zeros(64), dist.group.WORLD).wait()
        te.reduce_scatter(torch.zeros(64 * size), dist.group.WORLD).wait()
    assert torch.equal(whole.detach(), kept[0]) and torch.equal(part.detach(), kept[1])


def handles(device: torch.device) -> None:
    for ub in (False, True):
        buffers = begin(64 * dist.get_world_size(), 16, dist.group.WORLD, device, dtype=torch.float32) if ub else None
        for seed in range(16):
            if buffers is not None:
                buffers.executor.set_delays(seed + dist.get_rank(), (0, 400)[seed % 2])
                poison([buffers])
            _moved(seed, ub)
        for dtype in DTYPES:  # whatever the dtype
            x = torch.arange(6).to(dtype).reshape(3, 2)
            whole, want = te.all_gather(x, dist.group.WORLD, dim=1).wait(), [x.float()] * dist.get_world_size()
            assert whole.dtype == dtype and torch.equal(whole.float(), torch.cat(want, 1))
        assert te.all_gather(torch.empty(0, 4), dist.group.WORLD).wait().shape == (0, 4)


def a_backward_has_the_gap_too(device: torch.device) -> None:
    """Backward of wait() begins the transposed exchange, that of begin finishes it: what lies between runs there."""
    begin(64, 16, dist.group.WORLD, device, dtype=torch.float32)
    events: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            events.append("between")
            return dy

    from te_lite.functional import transfers

    original = transfers.Transfer.__init__, transfers.Transfer.result

    def init(self: Any, verb: str, *rest: Any) -> None:
        events.append(f"begin {verb}")
        original[0](self, verb, *rest)

    def result(self: Any) -> Tensor:
        events.append(f"finish {self.verb}")
        return original[1](self)

    transfers.Transfer.__init__, transfers.Transfer.result = init, result
    try:
        x = torch.ones(2, 4, requires_grad=True)
        handle = te.all_gather(x, dist.group.WORLD)
        other = Noted.apply(x)
        (handle.wait().sum() + other.sum()).backward()
    finally:
        transfers.Transfer.__init__, transfers.Transfer.result = original
    names = "begin all_gather", "finish all_gather", "begin reduce_scatter", "between", "finish reduce_scatter"
    assert tuple(events) == names, events


def a_dropped_handle_warns_and_hangs_nobody(device: torch.device) -> None:
    """Of some ranks only; the slots are used on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for ub in (False, True):
        buffers = begin(64 * size, 16, dist.group.WORLD, device, dtype=torch.float32) if ub else None
        for verb in (te.all_gather, te.reduce_scatter):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                handle = verb(torch.ones(4 * size), dist.group.WORLD)
                if rank:
                    handle.wait()
                del handle
                gc.collect()
            said = [str(w.message) for w in caught if w.category is RuntimeWarning]
            assert len(said) == (rank == 0) and all(verb.__name__ in s and "dropped without wait" in s for s in said)
            for i in range(2 * SLOTS):
                want = i if verb is te.all_gather else i * size
                assert verb(torch.full((size,), float(i)), dist.group.WORLD).wait()[0] == want
            x = torch.ones(4, 16, requires_grad=True)
            te.all_gather_linear(x, torch.ones(16, 16), dist.group.WORLD, strict=ub).sum().backward()
        if buffers is not None:
            late = te.all_gather(torch.ones(4), dist.group.WORLD)
            te.destroy_ub()
            with refused(RuntimeError, "destroy_ub"):
                late.wait()


def strict_says_why(device: torch.device) -> None:
    world, size = dist.group.WORLD, dist.get_world_size()
    x, w = torch.ones(256 * size, 16), torch.ones(32, 16)
    calls: list[Callable[[], Any]] = [
        lambda: te.all_gather_linear(x, w, world, strict=True),
        lambda: te.all_gather_linear(x, (w, w), world, strict=True),
        lambda: te.linear_reduce_scatter(x, w, world, strict=True),
        lambda: te.all_gather(x, world, strict=True),
        lambda: te.reduce_scatter(x, world, strict=True),
    ]
    for call in calls:
        with refused(RuntimeError, "does not happen", "no userbuffers", "call initialize_ub", "strict"):
            call()
    with te.autocast(enabled=False, strict=True), refused(RuntimeError, "does not happen"):
        te.all_gather_linear(x, w, world)
    begin(8, 16, world, device)
    for call in calls:
        with refused(RuntimeError, "does not happen", "bytes are more than", "largest"):
            call()
    te.destroy_ub()
    begin(256 * size * size, 32, world, device, dtype=torch.float32)
    for call in calls:
        getattr(call(), "wait", list)()
    te.all_gather_linear(x, w, world, overlap=None)
    y, z = te.all_gather_linear(x.requires_grad_(), (w, w), world, strict=True)
    with refused(RuntimeError, "no weight gradient to hide"):
        (y.sum() + z.sum()).backward()


def wrong_arguments(device: torch.device) -> None:
    world, size = dist.group.WORLD, dist.get_world_size()
    x, w = torch.ones(2 * size, 16), torch.ones(32, 16)
    linear, scatter = te.all_gather_linear, te.linear_reduce_scatter
    table: list[tuple[type[Exception], tuple[str, ...], Callable[[], Any]]] = [
        (TypeError, ("group=None", "process group"), lambda: linear(x, w, None)),
        (TypeError, ("type list",), lambda: linear([1.0], w, world)),
        (ValueError, ("dim=1", "not the last"), lambda: linear(x, w, world, dim=1)),
        (ValueError, ("dim=-3", "one of its"), lambda: te.all_gather(x, world, dim=-3)),
        (ValueError, (r"\[32, 8\]", r"must be \[N, 16\]"), lambda: linear(x, torch.ones(32, 8), world)),
        (ValueError, (r"\[31\]", r"and \[N\]"), lambda: linear(x, w, world, bias=torch.ones(31))),
        (ValueError, ("2 weights and 1 biases",), lambda: linear(x, (w, w), world, bias=(None,))),
        (ValueError, ("0 weights",), lambda: linear(x, (), world)),
        (TypeError, ("float64", "float32"), lambda: linear(x.double(), w, world)),
        (TypeError, ("int64", "bfloat16"), lambda: linear(x.long(), w.long(), world)),
        (ValueError, ("overlap='pipeline'", "ring_exchange"), lambda: linear(x, w, world, overlap="pipeline")),
        (ValueError, ("'fuse'", "nearest: fused"), lambda: scatter(x, w, world, overlap="fuse")),
        (ValueError, ("overlap='bulk'",), lambda: scatter(x, w, world, overlap="bulk")),
        (TypeError, ("strict=1",), lambda: linear(x, w, world, strict=1)),
        (ValueError, ("recipe 'no' is not known",), lambda: linear(x, w, world, recipe="no")),
        (ValueError, ("te.autocast",), lambda: linear(x, w, world, recipe="delayed")),
        (ValueError, ("multiple of that", "pad it"), lambda: scatter(torch.ones(2 * size + 1, 16), w, world)),
        (ValueError, ("residual",), lambda: scatter(x, w, world, residual=torch.ones(3, 32))),
        (ValueError, ("multiple of the group",), lambda: te.reduce_scatter(torch.ones(2 * size + 1), world)),
        (ValueError, ("int64", "cast"), lambda: te.reduce_scatter(x.long(), world)),
        (ValueError, ("weights=0",), lambda: te.DelayedScales(0)),
        (ValueError, ("none below 0",), lambda: te.symmetric_empty([-1], torch.float32, world)),
        (TypeError, ("process group",), lambda: te.symmetric_empty([1], torch.float32, None)),
        (TypeError, ("torch.dtype",), lambda: te.symmetric_empty([1], "fp32", world)),
    ]
    for kind, words, call in table:
        with refused(kind, *words):
            call()
    with te.autocast(recipe="delayed"):
        for scales in (None, te.DelayedScales(2)):
            with refused(RuntimeError, "DelayedScales", "weights=1", "lives between the calls"):
                linear(x, w, world, scales=scales)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = linear(x, torch.ones(24, 16), world, recipe="current")
    assert "not multiples of 16" in str(caught[0].message) and y.dtype == x.dtype


def no_second_derivative(device: torch.device) -> None:
    x, w = torch.ones(2, 16, requires_grad=True), torch.ones(16, 16, requires_grad=True)
    for run in (
        lambda: te.all_gather_linear(x, w, dist.group.WORLD),
        lambda: te.all_gather_linear(x, (w, w), dist.group.WORLD)[0],
        lambda: te.linear_reduce_scatter(torch.cat([x] * dist.get_world_size()), w, dist.group.WORLD),
        lambda: te.all_gather(x, dist.group.WORLD).wait(),
    ):
        with refused(RuntimeError, "once_differentiable"):
            torch.autograd.grad(run().square().sum(), x, create_graph=True)


def delayed_scales_live_in_checkpoints(device: torch.device) -> None:
    """The state of a layer goes through state_dict, deepcopy and te.checkpoint, bit for bit."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(tokens(5, 0, 32, 32) / 4)
            self.scales = te.DelayedScales()

        def forward(self, x: Tensor) -> Tensor:
            return te.all_gather_linear(x, self.weight, dist.group.WORLD, scales=self.scales)

    def step(layer: Layer, x: Tensor, again: bool = False) -> tuple[Tensor, Tensor]:
        x, layer.weight.grad = x.clone().requires_grad_(), None
        with te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=4)):
            y = te.checkpoint(layer, x) if again else layer(x)
        y.square().mean().backward()
        return y.detach(), x.grad

    layer, rank = Layer(), dist.get_rank()
    for seed in range(3):
        step(layer, tokens(seed, rank, 8, 32) * 3)
    assert (layer.state_dict()["scales._extra_state"][6:] != 1).any()
    loaded, copied = Layer(), copy.deepcopy(layer)
    loaded.load_state_dict(layer.state_dict())
    x = tokens(9, rank, 8, 32)
    for _ in range(2):
        results = [step(layer, x), step(loaded, x), step(copied, x, again=True)]
        for one in results[1:]:
            for got, want in zip(one, results[0], strict=True):
                assert_bitwise_equal("after a copy of the state", got, want)
    state, want = copy.deepcopy(layer.state_dict()), step(layer, x)
    for other in ("loaded into a layer that has run", "after another recipe"):
        step(layer, x * 50)
        with te.autocast(recipe="current"):
            layer(x)
        layer.load_state_dict(state)
        assert_bitwise_equal(other, step(layer, x)[0], want[0])


def ranks_that_differ_are_named(device: torch.device) -> None:
    """A call that differs ends the group on every rank, with both calls in the message; so does a rank that fails."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    begin(64 * size, 32, world, device, dtype=torch.float32)
    with refused(RuntimeError, r"te.all_gather_linear\(dim=0\) of .32, 16.", r"of .48, 16."):
        for _ in range(400):
            te.all_gather_linear(torch.ones(4, 16), torch.ones(48 if rank else 32, 16), world)
    te.destroy_ub()
    dist.barrier()
    begin(64 * size, 32, world, device, dtype=torch.float32)
    told = RuntimeError, r"rank 0 failed in te.all_gather\(dim=0\), torch.float32", "out of it"
    with refused(*told if rank else (MemoryError, "out of it")):
        handle = te.all_gather(torch.ones(4, 4), world)
        copy_fails = mock.patch("torch.clone", side_effect=MemoryError("out of it"))  # out of the slot
        with contextlib.nullcontext() if rank else copy_fails:
            handle.wait()
        for _ in range(400):
            te.all_gather(torch.ones(4, 4), world).wait()


CHECKS = (
    handles,
    a_backward_has_the_gap_too,
    a_dropped_handle_warns_and_hangs_nobody,
    strict_says_why,
    wrong_arguments,
    no_second_derivative,
    delayed_scales_live_in_checkpoints,
    ranks_that_differ_are_named,
)
