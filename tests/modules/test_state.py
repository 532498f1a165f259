"""Checkpoints: keys, plain tensors, constant size, strict load across recipes, bitwise resume."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import RECIPES, build, delayed_state, has_scales, step, through_a_file
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

KINDS = (LINEAR, LN_LINEAR, LN_MLP)
KEYS = {
    LINEAR: ["weight", "bias", "_extra_state"],
    LN_LINEAR: ["layer_norm_weight", "layer_norm_bias", "weight", "bias", "_extra_state"],
    LN_MLP: [
        *("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
        "_extra_state",
    ],
}
DELAYED = te.recipe.DelayedScaling(amax_history_len=4)


def recipe_of(name):
    return DELAYED if name == "delayed" else name


def tokens(seed=1):
    return reference.make_tokens(48, 64, seed=seed, dtype=torch.bfloat16)


def make(kind, seed=0, device="cpu"):
    p = reference.make_parameters(Spec(kind), 64, 64, 96, seed=seed, dtype=torch.bfloat16)
    return build(Spec(kind), 64, 64, 96, device=device, parameters=p)


def trained(kind, name, steps=3, device="cpu"):
    module = make(kind, device=device)
    for i in range(steps):
        step(module, tokens(i), tokens(i + 20), recipe_of(name))
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_state_keys(kind):
    module = make(kind)
    assert sorted(module.state_dict()) == sorted(KEYS[kind])
    rms = {} if kind == LINEAR else {"normalization": "RMSNorm"}
    args = (64, 96)
    bare = getattr(te, kind)(*args, bias=False, device="cpu", **rms).state_dict()
    gone = {"bias", "fc1_bias", "fc2_bias", "layer_norm_bias"}
    assert set(bare) == set(KEYS[kind]) - gone


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_extra_state_is_plain_and_of_constant_size(kind, recipe):
    """A tensor that weights_only=True loads, of the same size before a module has run and at every step."""
    module = make(kind)
    sizes = [module.get_extra_state().numel()]
    for i in range(3):
        step(module, tokens(i), tokens(i + 20), recipe_of(recipe))
        state = through_a_file(module.state_dict())["_extra_state"]
        assert isinstance(state, torch.Tensor)
        sizes.append(state.numel())
    assert len(set(sizes)) == 1
    assert has_scales(state) == (recipe == "delayed")


@pytest.mark.parametrize("saved", RECIPES)
@pytest.mark.parametrize("loaded", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_strict_load_across_recipes(kind, loaded, saved):
    """A checkpoint of any recipe loads strictly into a module that has trained with any other, and goes
    on.
    """
    source = trained(kind, saved)
    target = trained(kind, loaded, steps=2)
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    result = target.load_state_dict(through_a_file(source.state_dict()), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    for name, p in source.named_parameters():
        assert_bitwise_equal(name, dict(target.named_parameters())[name].detach(), p.detach())
    out = step(target, tokens(7), tokens(8), recipe_of(loaded))["out"]
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bitwise(kind, recipe, device):
    """Save after three steps, load into a fresh or a used module: the next steps are those of the
    original.
    """
    original = trained(kind, recipe, device=device)
    state = through_a_file(original.state_dict())
    fresh, used = make(kind, seed=5, device=device), trained(kind, recipe, steps=1, device=device)
    for module in (fresh, used):
        module.load_state_dict(state)
    for i in range(3):
        want = step(original, tokens(30 + i), tokens(40 + i), recipe_of(recipe))
        for label, module in (("fresh", fresh), ("used", used)):
            got = step(module, tokens(30 + i), tokens(40 + i), recipe_of(recipe))
            for name in want:
                assert_bitwise_equal(f"{label} step {i} {name}", got[name], want[name])
    assert_bitwise_equal("state", fresh.get_extra_state(), original.get_extra_state())


@pytest.mark.parametrize("kind", KINDS)
def test_state_waits_for_the_recipe(kind):
    """delayed -> a bf16 run that saves again -> delayed: the history is still there."""
    source = trained(kind, "delayed")
    middle = make(kind)
    middle.load_state_dict(source.state_dict())
    step(middle, tokens(), tokens(3), "bf16")
    last = make(kind)
    last.load_state_dict(through_a_file(middle.state_dict()))
    want = step(source, tokens(7), tokens(8), DELAYED)
    got = step(last, tokens(7), tokens(8), DELAYED)
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])


SAVED = None, "delayed", "mxfp8", te.recipe.DelayedScaling(), te.recipe.DelayedScaling(amax_history_len=1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("loaded", SAVED)
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("kind", KINDS)
def test_distributed_checkpoints_load_in_place_whatever_has_run(kind, saved, loaded, tmp_path):
    """torch.distributed.checkpoint reads into tensors of the target, which may not have run, or with another recipe."""
    source, target = (make(kind) if one is None else trained(kind, one) for one in (saved, loaded))
    dcp.save(source.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = target.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    target.load_state_dict(state)
    assert_bitwise_equal("state", target.get_extra_state(), source.get_extra_state())
    recipe = recipe_of("delayed" if saved is None else saved)
    for i in range(2):
        want, got = (step(m, tokens(30 + i), tokens(40 + i), recipe) for m in (source, target))
        for name in want:
            assert_bitwise_equal(name, got[name], want[name])


def test_states_of_older_versions_load():
    """They ended with the last scale, and were empty where there was none."""
    source, target = trained(LINEAR, "delayed"), make(LINEAR)
    state = source.get_extra_state()
    target.set_extra_state(state[: 6 + 5 * (DELAYED.amax_history_len + 1)])
    assert_bitwise_equal("state", target.get_extra_state(), state)
    target.set_extra_state(torch.empty(0))
    assert not has_scales(target.get_extra_state())


def test_another_history_length_keeps_the_scales():
    """Longer and shorter histories load; scales are taken over as they are."""
    source = trained(LINEAR, "delayed", steps=5)
    for length in (1, 2, 16):
        target = make(LINEAR)
        target.load_state_dict(source.state_dict())
        recipe = te.recipe.DelayedScaling(amax_history_len=length)
        with torch.no_grad(), te.autocast(recipe=recipe):
            target(tokens())
        got, want = delayed_state(target), delayed_state(source)
        assert_bitwise_equal("scale", got["scale_fwd"], want["scale_fwd"])
        assert got["history_fwd"].shape[0] == length


def test_empty_state_forgets_the_old_history():
    """A checkpoint without scales (a bf16 run) starts delayed scaling afresh; it does not keep another
    run's.
    """
    target = trained(LINEAR, "delayed")
    target.load_state_dict(through_a_file(trained(LINEAR, "bf16").state_dict()))
    fresh = make(LINEAR)
    want, got = (step(m, tokens(7), tokens(8), DELAYED) for m in (fresh, target))
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])


WRONG = {
    "pickled bytes": lambda s: io.BytesIO(pickle.dumps({"scale": 1})),
    "uint8": lambda s: torch.zeros(100, dtype=torch.uint8),
    "dict": lambda s: {"recipe": "delayed"},
    "cut short": lambda s: s[:-1],
    "a shorter history": lambda s: s.index_fill(0, torch.tensor(1), 2.0),
    "a number at the end": lambda s: s.index_fill(0, torch.tensor(s.numel() - 1), float("nan")),
    "numbers without a history": lambda s: s * (torch.arange(s.numel()) != 1),
    "another version": lambda s: torch.cat([torch.tensor([99.0]), s[1:]]),
    "another class": lambda s: trained(LN_MLP, "delayed").get_extra_state(),
}


@pytest.mark.parametrize("how", WRONG)
def test_foreign_extra_state_is_refused_and_nothing_is_lost(how):
    module = trained(LINEAR, "delayed")
    before = module.get_extra_state().clone()
    bad = WRONG[how](before.clone())
    with pytest.raises((TypeError, ValueError, RuntimeError), match="extra state|_extra_state"):
        module.set_extra_state(bad)
    assert_bitwise_equal("state", module.get_extra_state(), before)
    step(module, tokens(), tokens(3), DELAYED)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy_is_an_independent_twin(kind, recipe):
    original = trained(kind, recipe)
    twin = copy.deepcopy(original)
    want = step(copy.deepcopy(original), tokens(9), tokens(8), recipe_of(recipe))
    before = original.get_extra_state().clone()
    got = step(twin, tokens(9), tokens(8), recipe_of(recipe))
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])
    assert_bitwise_equal("original's state", original.get_extra_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_moving_a_module_keeps_its_state(kind):
    """.to() and .float() rebuild what depends on device and type, and keep scales."""
    module = trained(kind, "delayed")
    scale = delayed_state(module)["scale_fwd"]
    module = module.float().bfloat16().to("cpu")
    step_again = step(module, tokens(9), tokens(8), DELAYED)
    reference_module = trained(kind, "delayed")
    want = step(reference_module, tokens(9), tokens(8), DELAYED)
    for name in want:
        assert_bitwise_equal(name, step_again[name], want[name])
    assert delayed_state(module)["scale_fwd"].shape == scale.shape
