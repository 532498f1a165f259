"""Ops reach the implementation of their device, and traced code their fake."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from te_lite.ops.registry import register

_numbers = itertools.count()


def _register(arguments: str, **implementations):
    name = f"test_registry_{next(_numbers)}"
    return name, register(f"{name}{arguments}", **implementations)


def _never(*args):
    raise AssertionError("this implementation must not be called")


def test_cpu_tensors_take_the_oracle_and_the_overload_is_public():
    name, op = _register("(Tensor x, float y) -> Tensor", cpu=lambda x, y: x * y, cuda=_never, fake=_never)
    assert op.overload is getattr(torch.ops.te_lite, name).default
    assert torch.equal(op(torch.ones(3), 2.5), torch.full((3,), 2.5))


def test_fake_tensors_take_the_fake():
    _, op = _register("(Tensor x) -> Tensor", cpu=_never, cuda=_never, fake=lambda x: x.new_empty((x.shape[0], 7)))
    with FakeTensorMode():
        assert op(torch.empty(5, 2)).shape == (5, 7)


def test_a_mutated_argument_may_be_a_view():
    def add_into(x, out):
        out.add_(x.sum())

    _, op = _register("(Tensor x, Tensor(a!) out) -> ()", cpu=add_into, cuda=_never, fake=lambda *a: None)
    history = torch.zeros(3, 4)
    assert op(history[2], history[1, 2]) is None
    op(torch.ones(6), history[1, 2])
    assert history[1, 2] == 6 and history.sum() == 6


def test_a_compiled_graph_keeps_the_mutation():
    def add_into(x, out):
        out.add_(x.sum())

    _, op = _register("(Tensor x, Tensor(a!) out) -> ()", cpu=add_into, cuda=_never, fake=lambda *a: None)
    out = torch.zeros(())
    compiled = torch.compile(lambda x: op(x, out), backend="aot_eager", fullgraph=True)
    compiled(torch.ones(4))
    assert out == 4


@pytest.mark.parametrize("schema", ["noarguments", "te_lite::named(Tensor x) -> Tensor", "(Tensor x) -> Tensor"])
def test_a_bad_schema_says_how_to_write_one(schema):
    with pytest.raises(ValueError, match="write for example"):
        register(schema, cpu=_never, cuda=_never, fake=_never)


@pytest.mark.gpu
def test_cuda_tensors_take_the_kernel():
    _, op = _register("(Tensor x) -> Tensor", cpu=_never, cuda=lambda x: x + 1, fake=_never)
    assert op(torch.zeros(2, device="cuda")).tolist() == [1, 1]


def test_the_namespace_stays_open_to_other_libraries():
    program = (
        "import torch, te_lite.ops.registry\n"
        "other = torch.library.Library('te_lite', 'FRAGMENT')\n"
        "other.define('foreign(Tensor x) -> Tensor')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_watchers_see_the_overload_and_plain_calls_skip_it():
    """Dispatch modes and the profiler are told of every call; without them the implementation is called directly."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    name, op = _register("(float y, Tensor x) -> Tensor", cpu=lambda y, x: x * y, cuda=_never, fake=_never)
    with torch.no_grad():
        with Watch():
            op(2.0, torch.ones(3))
        assert op.overload in seen
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            op(2.0, torch.ones(3))
        assert f"te_lite::{name}" in {event.key for event in profile.key_averages()}
        direct = type(op)(op.overload, lambda y, x: "direct", _never)
        assert direct(2.0, torch.ones(3)) == "direct"
