"""is_first_microbatch: when a quantized weight is reused, and when it must not be."""

import copy
import functools

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import FP8, RECIPES, build, leaf, step, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

KINDS = (LINEAR, LN_LINEAR, LN_MLP)
WEIGHTS = {LINEAR: ("weight",), LN_LINEAR: ("weight",), LN_MLP: ("fc1_weight", "fc2_weight")}


def tokens(seed=1):
    return reference.make_tokens(48, 64, seed=seed, dtype=torch.bfloat16)


def make(kind, device="cpu", seed=0, **kw):
    p = reference.make_parameters(Spec(kind), 64, 64, 96, seed=seed, dtype=torch.bfloat16)
    return build(Spec(kind), 64, 64, 96, device=device, parameters=p, **kw)


def run(module, first, recipe="current"):
    with torch.no_grad(), under(recipe):
        return module(tokens().to(next(module.parameters()).device), is_first_microbatch=first)


def weights_of(module, kind):
    return [getattr(module, name) for name in WEIGHTS[kind]]


def write(module, kind, how):
    """New weights for `module`, put there in one of the ways that training code uses."""
    fresh = make(kind, seed=7)
    for weight, new in zip(weights_of(module, kind), weights_of(fresh, kind), strict=True):
        if how == "data":
            weight.data.copy_(new.data)
        elif how == "optimizer":
            weight.grad = (weight.detach() - new.detach()).clone()
        else:
            with torch.no_grad():
                weight.copy_(new)
    if how == "optimizer":
        torch.optim.SGD(weights_of(module, kind), lr=1.0).step()
    elif how == "load_state_dict":
        module.load_state_dict(module.state_dict())
    elif how == "optimizer foreach":
        raise AssertionError(how)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_weights_change_nothing(kind, recipe, device):
    """Without a write, True then False then False give the bytes of None, gradients included."""
    want = step(make(kind, device), tokens(), tokens(3), recipe)
    module = make(kind, device)
    for first in (True, False, False):
        if recipe == "delayed":
            module = make(kind, device)  # scales move with each step: compare first steps
        got = step(module, tokens(), tokens(3), recipe, is_first_microbatch=first)
        for name in want:
            assert_bitwise_equal(f"is_first_microbatch={first} {name}", got[name], want[name])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["copy_", "data", "optimizer", "load_state_dict"])
@pytest.mark.parametrize("first", [True, None])
@pytest.mark.parametrize("kind", KINDS)
def test_true_and_none_quantize_again(kind, first, how, recipe):
    """However the weight was written, True and None see the new one."""
    module = make(kind)
    run(module, True, recipe)
    write(module, kind, how)
    fresh = make(kind)
    write(fresh, kind, how)
    assert_bitwise_equal(how, run(module, first, recipe), run(fresh, None, recipe))


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("how", ["copy_", "optimizer", "load_state_dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_false_notices_a_changed_version(kind, how, recipe):
    """A forgotten True right after optimizer.step does not train on stale weights."""
    module = make(kind)
    run(module, True, recipe)
    write(module, kind, how)
    fresh = make(kind)
    write(fresh, kind, how)
    assert_bitwise_equal(how, run(module, False, recipe), run(fresh, None, recipe))


@pytest.mark.parametrize("kind", KINDS)
def test_false_reuses_what_true_quantized(kind):
    """A write that leaves no trace is not seen by False (that is what caching means) until the cache is
    cleared.
    """
    module = make(kind)
    old = run(module, True)
    write(module, kind, "data")
    assert_bitwise_equal("cached", run(module, False), old)
    module.clear_caches()
    fresh = make(kind)
    write(fresh, kind, "data")
    assert_bitwise_equal("after clear_caches", run(module, False), run(fresh, None))


@pytest.mark.parametrize("kind", KINDS)
def test_none_does_not_leave_a_cache(kind):
    """True, then None, then False: False must not find what True left before None quantized newer weights."""
    module = make(kind)
    run(module, True)
    write(module, kind, "data")
    new = run(module, None)
    assert_bitwise_equal("False after None", run(module, False), new)


@pytest.mark.parametrize("kind", KINDS)
def test_eval_uses_the_cache_correctly(kind):
    module = make(kind)
    run(module, True)
    write(module, kind, "optimizer")
    fresh = make(kind)
    write(fresh, kind, "optimizer")
    assert_bitwise_equal("eval", run(module.eval(), False), run(fresh.eval(), None))


@pytest.mark.parametrize("kind", KINDS)
def test_another_recipe_does_not_take_the_cache(kind):
    """A cache filled under one recipe (or in bf16) is of no use under another."""
    module = make(kind)
    run(module, True, "current")
    assert_bitwise_equal("bf16", run(module, False, "bf16"), run(make(kind), None, "bf16"))
    assert_bitwise_equal("delayed", run(module, False, "delayed"), run(make(kind), None, "delayed"))
    pow2 = te.recipe.Float8CurrentScaling(use_power_2_scales=True)
    run(module, True, "current")
    assert_bitwise_equal("pow2", run(module, False, pow2), run(make(kind), None, pow2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_read_as_it_is_is_not_kept(kind, dtype):
    """Where nothing is quantized: only its cast to the dtype of the activations is worth keeping."""
    module = getattr(te, kind)(64, 96, device="cpu", params_dtype=dtype)
    x = torch.randn(16, 64, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ys = [module(x, is_first_microbatch=first) for first in (None, True, False)]
    for y in ys[1:]:
        assert_bitwise_equal("y", y, ys[0])
    assert [cache._kept[2] is not None for cache in module._caches] == [dtype == torch.float32] * len(module._caches)


def test_cache_with_split_parameters_notices_a_changed_version():
    """The joined weight is not the parameter: versions are those of the parameters."""
    module = te.Linear(64, 64, parameters_split=("q", "k"), device="cpu", params_dtype=torch.bfloat16)
    run(module, True)
    with torch.no_grad():
        module.k_weight.copy_(torch.randn(32, 64))
    fresh = te.Linear(64, 64, parameters_split=("q", "k"), device="cpu", params_dtype=torch.bfloat16)
    fresh.load_state_dict(module.state_dict())
    assert_bitwise_equal("out", run(module, False), run(fresh, None))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_uses_the_weights_of_its_forward(kind):
    """Gradient accumulation: two microbatches forward, then both backwards, one quantized weight."""
    want = [step(make(kind), tokens(s), tokens(s + 5), "current") for s in (1, 2)]
    module = make(kind)
    inputs = [leaf(tokens(s)) for s in (1, 2)]
    with under("current"):
        outs = [module(x, is_first_microbatch=i == 0) for i, x in enumerate(inputs)]
    for i, out in enumerate(outs):
        out.backward(tokens(i + 6))
        assert_bitwise_equal(f"dx {i}", inputs[i].grad, want[i]["dx"])


@pytest.mark.parametrize("kind", KINDS)
def test_cache_does_not_travel(kind):
    """A deep copy quantizes for itself; the cache is not in the checkpoint."""
    module = make(kind)
    before = set(module.state_dict())
    run(module, True)
    assert set(module.state_dict()) == before
    twin = copy.deepcopy(module)
    write(twin, kind, "data")
    fresh = make(kind)
    write(fresh, kind, "data")
    assert_bitwise_equal("twin", run(twin, False), run(fresh, None))
    assert_bitwise_equal("original", run(module, False), run(make(kind), None))


def test_a_cached_weight_does_not_record_its_amax_again():
    """With delayed scaling the cached weight keeps the scale it was made with; the next True takes the new
    one.
    """
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    module = make(LINEAR)
    outs = []
    for first in (True, False, True):
        with under(recipe):
            outs.append(module(tokens(), is_first_microbatch=first))
    assert all(bool(torch.isfinite(out).all()) for out in outs)
    # The second step's x has a new scale, its weight the old: a third result.
    assert not torch.equal(outs[0], outs[1])


def test_torch_may_swap_parameters_of_a_module_that_keeps_weights():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = te.Linear(32, 48, device="cpu", params_dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float16):
            module.to(dtype)
            with te.autocast(recipe="current"):
                module(torch.randn(16, 32, dtype=dtype), is_first_microbatch=True)
            module.load_state_dict(module.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("recipe", [None, "current"])
def test_weights_of_parts_in_a_checkpoint(recipe):
    """A copy's parts do not lie side by side: its weight is joined anew when the call is computed again."""
    module = copy.deepcopy(te.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16, parameters_split=("a", "b")))
    grads = []
    for again in (False, True):
        x = torch.randn(32, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for first in (True, False):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                call = functools.partial(module, is_first_microbatch=first)
                y = te.checkpoint(call, x, use_reentrant=False) if again else call(x)
            y.sum().backward()
        grads.append(x.grad)
    assert_bitwise_equal("dx", *grads)
