"""LayerNorm and RMSNorm modules against the oracle."""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal, assert_bound_bites
from tests import reference
from tests.harness import compare, leaf
from tests.reference import Spec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("LayerNorm", "RMSNorm")
OWN_NAME = {"layer_norm_weight": "weight", "layer_norm_bias": "bias"}  # oracle's name -> the module's
SHAPES = [(0, 64), (1, 64), (7, 100), (300, 8), (2, 3, 5, 65), (9, 1), (3, 5000)]


def _case(kind, zero_centered, dtype, device, shape=(48, 64), eps=1e-5):
    """(module, x, dy, truth, low) of one norm with random parameters."""
    spec = Spec(kind, normalization=kind, zero_centered=zero_centered, eps=eps)
    k = shape[-1]
    p = reference.make_parameters(spec, k, 0, dtype=dtype)
    options = {"params_dtype": dtype, "zero_centered_gamma": zero_centered, "device": device}
    module = getattr(te, kind)(k, eps=eps, **options)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in p.items():
            own[OWN_NAME[name]].copy_(value)
    m = int(torch.tensor(shape[:-1]).prod())
    x = reference.make_tokens(m, k, dtype=dtype).reshape(shape)
    dy = reference.make_tokens(m, k, seed=2, dtype=dtype, scale=0.1).reshape(shape)
    truth = reference.run(spec, p, x, dy)
    low = reference.run(spec, p, x, dy, arith=reference.stored_in(dtype))
    return module, x, dy, truth, low


def _run(module, x, dy, device):
    xs = leaf(x, device)
    out = module(xs)
    out.backward(dy.to(device))
    got = {"out": out.detach(), "dx": xs.grad}
    for name, own in OWN_NAME.items():
        if getattr(module, own, None) is not None and getattr(module, own).grad is not None:
            got[name] = getattr(module, own).grad
    return got


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_matches_oracle(kind, dtype, zero_centered, device):
    module, x, dy, truth, low = _case(kind, zero_centered, dtype, device)
    compare(f"{kind} {dtype}", _run(module, x, dy, device), truth, low)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_any_shape(shape, kind, device):
    module, x, dy, truth, low = _case(kind, False, torch.bfloat16, device, shape)
    got = _run(module, x, dy, device)
    assert got["out"].shape == got["dx"].shape == shape
    compare(f"{kind} {shape}", got, truth, low)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_strided_input(kind):
    module, x, dy, _, _ = _case(kind, False, torch.bfloat16, "cpu")
    dense = _run(module, x, dy, "cpu")
    module, _, _, _, _ = _case(kind, False, torch.bfloat16, "cpu")
    xs = x.t().contiguous().t().requires_grad_()
    out = module(xs)
    out.backward(dy.t().contiguous().t())
    assert_bitwise_equal("out", out.detach(), dense["out"])
    assert_bitwise_equal("dx", xs.grad, dense["dx"])


@pytest.mark.parametrize("kind", KINDS)
def test_norm_arguments(kind):
    """normalized_shape or hidden_size; gain 1 (0 zero-centered); eps; .sequence_parallel on the
    parameters.
    """
    norm = getattr(te, kind)
    for module in (norm(64), norm(hidden_size=64), norm((64,)), norm(normalized_shape=64)):
        assert tuple(module.weight.shape) == (64,)
        assert bool((module.weight == 1).all())
    assert not norm(64, zero_centered_gamma=True).weight.detach().any()
    module = norm(64, sequence_parallel=True)
    assert all(p.sequence_parallel for p in module.parameters())
    assert not any(getattr(p, "sequence_parallel", False) for p in norm(64).parameters())
    expected = {"weight", "bias"} if kind == "LayerNorm" else {"weight"}
    assert set(dict(module.named_parameters())) == expected
    with pytest.raises((TypeError, ValueError)):
        norm()
    with pytest.raises((TypeError, ValueError)):
        norm(64, no_such_argument=1)


def test_norm_bound_bites():
    module, x, dy, truth, low = _case("LayerNorm", False, torch.bfloat16, "cpu")
    got = _run(module, x, dy, "cpu")
    assert_bound_bites("out", got["out"], truth["out"], low["out"], lambda t: t * 1.01)
    assert_bound_bites("dx", got["dx"], truth["dx"], low["dx"], lambda t: t.roll(1, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_norm_meta_and_reset(kind):
    module = getattr(te, kind)(64, device="meta")
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert bool((module.weight == 1).all())


@pytest.mark.parametrize("kind", KINDS)
def test_norm_output_owns_its_storage(kind):
    module, x, _, _, _ = _case(kind, False, torch.bfloat16, "cpu", (3, 5, 64))
    assert module(x)._base is None


@pytest.mark.parametrize("kind", KINDS)
def test_norm_reset_keeps_the_parameters(kind):
    """reset_parameters writes into the parameters that an optimizer already holds, as the linears' does."""
    module, *_ = _case(kind, False, torch.bfloat16, "cpu")
    held = dict(module.named_parameters())
    module.reset_parameters()
    assert all(p is held[name] for name, p in module.named_parameters())
    assert bool((held["weight"] == 1).all())


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_the_shape_of_torchs(kind):
    """And those that an older version kept flat are read."""
    module, other = getattr(te, kind)((4, 8), device="cpu"), getattr(torch.nn, kind)((4, 8))
    with torch.no_grad():
        for param in other.parameters():
            param.normal_()
    state = other.state_dict()
    for given in (state, {name: value.flatten() for name, value in state.items()}):
        module.reset_parameters()
        module.load_state_dict(given, strict=True)
        assert all(torch.equal(param, state[name]) for name, param in module.named_parameters())
    x = torch.randn(3, 4, 8)
    eps = {} if kind == "LayerNorm" else {"eps": 1e-5}
    want = getattr(torch.nn, kind)((4, 8), **eps)
    want.load_state_dict(state)
    torch.testing.assert_close(module(x), want(x))
    module(x).sum().backward()
    want(x).sum().backward()
    torch.testing.assert_close(module.weight.grad, want.weight.grad)
