"""LayerNormLinear against the unsharded oracle."""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal, assert_bound_bites, assert_close_to_oracle
from tests import reference
from tests.harness import RECIPES, Oracle, build, check, compare, leaf, step, under
from tests.reference import LN_LINEAR, Spec

NORMS = [("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normalization, zero_centered", NORMS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_matches_oracle(recipe, normalization, zero_centered, bias, device):
    check(Spec(LN_LINEAR, normalization, zero_centered, bias=bias), recipe, device=device)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_types(recipe, dtype, device):
    check(Spec(LN_LINEAR), recipe, dtype=dtype, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_matches_oracle_at_a_real_size(recipe):
    check(Spec(LN_LINEAR, "RMSNorm", bias=False), recipe, device="cuda", m=2048, k=1024, n=1536)


def test_eps_is_used():
    check(Spec(LN_LINEAR, eps=0.3), "bf16")
    check(Spec(LN_LINEAR, "RMSNorm", eps=0.3), "current")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 64), (4092, 64), (3, 5, 64), (2, 0, 64)], ids=str)
def test_any_leading_shape(shape, recipe):
    spec = Spec(LN_LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    m = int(torch.tensor(shape[:-1]).prod())
    x, dy = _tokens(m, 64).reshape(shape), _tokens(m, 80, seed=3).reshape(*shape[:-1], 80)
    got = step(build(spec, 64, 80, parameters=p), x, dy, recipe)
    assert got["out"].shape == (*shape[:-1], 80) and got["dx"].shape == shape
    truth, low = Oracle(spec, p, recipe).step(x, dy)
    compare(f"{recipe} {shape}", got, truth, low)


def _tokens(m, k, seed=1, **kw):
    return reference.make_tokens(m, k, seed=seed, dtype=torch.bfloat16, **kw)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("return_bias", [False, True])
def test_return_layernorm_output(return_bias, recipe, device):
    """ln_out is the norm's output in the input's type, and a gradient that arrives there is not lost."""
    spec = Spec(LN_LINEAR, returns_norm=True)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    options = {"return_layernorm_output": True, "return_bias": return_bias}
    module = build(spec, 64, 80, device=device, parameters=p, **options)
    x, dy, dln = _tokens(48, 64), _tokens(48, 80, seed=3), _tokens(48, 64, seed=4)
    xs = leaf(x, device)
    with under(recipe):
        returned = module(xs)
    assert len(returned) == 2 + return_bias
    out, ln_out = returned[0], returned[-1]
    assert ln_out.shape == x.shape and ln_out.dtype == x.dtype
    torch.autograd.backward([out, ln_out], [dy.to(device), dln.to(device)])

    truth, low = Oracle(spec, p, recipe, device=device).step(x, dy)
    extra = {}
    for arith in (reference.TRUTH, reference.stored_in(torch.bfloat16)):
        norm = Spec("LayerNorm")
        names = ("layer_norm_weight", "layer_norm_bias")
        extra[arith] = reference.run(norm, {n: p[n] for n in names}, x, dln, arith=arith)
    for total, part in zip((truth, low), extra.values(), strict=True):
        for name in ("dx", "layer_norm_weight", "layer_norm_bias"):
            total[name] = total[name] + part[name]
    if return_bias:
        for total in (truth, low):
            total["out"] = total["out"] - p["bias"].to(total["out"].dtype)
            del total["bias"]
        assert_bitwise_equal("bias", returned[1].detach().cpu(), p["bias"])
    got = {"out": out.detach(), "ln_out": ln_out.detach(), "dx": xs.grad}
    got.update({n: q.grad for n, q in module.named_parameters() if q.grad is not None})
    compare(f"{recipe} return_bias={return_bias}", got, truth, low)


def test_the_bound_notices_a_lost_norm_term():
    """The input gradient without the norm's projection, and a gamma that is off by its centre, must fail."""
    spec = Spec(LN_LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 80, seed=3)
    got = step(build(spec, 64, 80, parameters=p), x, dy)
    truth, low = Oracle(spec, p).step(x, dy)

    def shifted(t):
        return t + 0.02 * t.float().square().mean().sqrt().to(t.dtype)

    assert_bound_bites("dx", got["dx"], truth["dx"], low["dx"], shifted)
    assert_bound_bites("out", got["out"], truth["out"], low["out"], lambda t: t * 1.01)
    assert_bound_bites("gamma", got["layer_norm_weight"], *_pair(truth, low, "layer_norm_weight"), lambda t: t * 1.02)


def _pair(truth, low, name):
    return truth[name], low[name]


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_norm_and_frozen_weight(recipe):
    spec = Spec(LN_LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 80, seed=3)
    full = step(build(spec, 64, 80, parameters=p), x, dy, recipe)
    for frozen in (("weight",), ("layer_norm_weight", "layer_norm_bias"), ("bias",)):
        module = build(spec, 64, 80, parameters=p)
        for name in frozen:
            getattr(module, name).requires_grad_(False)
        got = step(module, x, dy, recipe)
        assert set(full) - set(got) == set(frozen)
        for name in got:
            assert_bitwise_equal(f"{frozen} frozen: {name}", got[name], full[name])


def test_norm_statistics_survive_a_large_mean():
    """fp32 input with a mean 1000 times its deviation: sum-of-squares minus square-of-sum would lose it."""
    spec = Spec(LN_LINEAR)
    p = reference.make_parameters(spec, 64, 80)
    x = reference.make_tokens(48, 64) + 1000.0
    got = step(build(spec, 64, 80, dtype=torch.float32, parameters=p), x, None)
    truth, _ = Oracle(spec, p, dtype=torch.float32).step(x, None)
    bf16 = reference.run(spec, p, x, None, arith=reference.stored_in(torch.bfloat16))
    assert_close_to_oracle("out", got["out"], truth["out"], bf16["out"])


def test_the_norms_output_can_be_asked_for_later():
    module = te.LayerNormLinear(32, 16)
    x = torch.randn(4, 32, device=module.weight.device)
    assert module(x).shape == (4, 16)
    module.return_layernorm_output = True
    y, norm = module(x)
    assert y.shape == (4, 16) and norm.shape == (4, 32)
