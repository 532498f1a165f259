"""autocast: nesting, re-entry, calibration, amax groups, and delayed scaling's exact history over several
steps.
"""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.emulation import E4M3, E5M2, Delayed, amax_of
from tests.harness import build, delayed_state, leaf, step, under
from tests.reference import LINEAR, LN_MLP, Spec

DELAYED = te.recipe.DelayedScaling


def tokens(seed=1, scale=1.0, k=64):
    return reference.make_tokens(32, k, seed=seed, dtype=torch.bfloat16, scale=scale)


def make(kind=LINEAR, device="cpu", seed=0):
    p = reference.make_parameters(Spec(kind), 64, 64, 96, seed=seed, dtype=torch.bfloat16)
    return build(Spec(kind), 64, 64, 96, device=device, parameters=p)


@pytest.fixture(scope="module")
def outputs():
    """What one Linear gives without autocast and under each recipe, first step."""
    return {name: step(make(), tokens(), None, name)["out"] for name in ("bf16", "delayed", "current")}


def run(module=None):
    return (module or make())(tokens()).detach()


# Which recipe applies


def test_recipes_differ(outputs):
    assert not torch.equal(outputs["bf16"], outputs["delayed"])
    assert not torch.equal(outputs["current"], outputs["delayed"])


def test_default_recipe_is_delayed_scaling(outputs):
    with te.autocast():
        assert_bitwise_equal("autocast()", run(), outputs["delayed"])
    with te.fp8_autocast():
        assert_bitwise_equal("fp8_autocast()", run(), outputs["delayed"])


def test_both_names_and_their_arguments(outputs):
    recipe = te.recipe.Float8CurrentScaling()
    with te.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=recipe, fp8_group=None):
        assert_bitwise_equal("fp8_autocast", run(), outputs["current"])
    with te.fp8_autocast(True, False, recipe, None):
        assert_bitwise_equal("fp8_autocast, positional", run(), outputs["current"])
    with te.autocast(enabled=True, calibrating=False, recipe=recipe, amax_reduction_group=None):
        assert_bitwise_equal("autocast", run(), outputs["current"])


def test_nesting(outputs):
    """The innermost decides: disabled inside enabled, another recipe inside, and back again."""
    current = te.recipe.Float8CurrentScaling()
    with te.autocast(recipe=current):
        assert_bitwise_equal("outer", run(), outputs["current"])
        with te.autocast(enabled=False):
            assert_bitwise_equal("disabled inside enabled", run(), outputs["bf16"])
            with te.autocast(recipe=DELAYED()):
                assert_bitwise_equal("enabled inside disabled", run(), outputs["delayed"])
            assert_bitwise_equal("back to disabled", run(), outputs["bf16"])
        with te.autocast(recipe=DELAYED()):
            assert_bitwise_equal("another recipe", run(), outputs["delayed"])
        assert_bitwise_equal("back to outer", run(), outputs["current"])
    assert_bitwise_equal("outside", run(), outputs["bf16"])


def test_one_object_entered_again_and_nested(outputs):
    context = te.autocast(recipe=te.recipe.Float8CurrentScaling())
    for _ in range(2):
        with context:
            assert_bitwise_equal("entered", run(), outputs["current"])
            with context:
                assert_bitwise_equal("entered twice", run(), outputs["current"])
            assert_bitwise_equal("left once", run(), outputs["current"])
        assert_bitwise_equal("left", run(), outputs["bf16"])


def test_as_decorator(outputs):
    decorated = te.autocast(recipe=te.recipe.Float8CurrentScaling())(run)
    assert_bitwise_equal("decorated", decorated(), outputs["current"])
    assert_bitwise_equal("outside", run(), outputs["bf16"])


def test_an_error_inside_leaves_nothing_behind(outputs):
    module = make()
    with pytest.raises(KeyError), te.autocast(recipe=DELAYED()):
        raise KeyError
    assert_bitwise_equal("outside", run(module), outputs["bf16"])
    with te.autocast(recipe=DELAYED()):
        assert_bitwise_equal("again", run(module), outputs["delayed"])


def test_recipe_may_change_between_steps(outputs):
    """One module under each recipe in turn: each step is what a fresh module gives."""
    module = make()
    for name in ("current", "bf16", "delayed", "current", "bf16"):
        assert_bitwise_equal(name, step(module, tokens(), None, name)["out"], outputs[name])


# Delayed scaling, exactly


class ExactLinear:
    """The six amaxes of one Linear by the formulas of delayed scaling, fp32, in plain Python: (input, weight,
    grad_output).
    """

    def __init__(self, recipe, grad=E5M2):
        options = {
            "length": recipe.amax_history_len,
            "algo": recipe.amax_compute_algo,
            "margin": recipe.margin,
        }
        self.x, self.w = Delayed(E4M3, **options), Delayed(E4M3, **options)
        self.dy = Delayed(grad, **options)

    def seen(self, x, w, dy=None):
        self.x.record(x)
        self.w.record(w)
        self.x.update()
        self.w.update()
        if dy is not None:
            self.dy.record(dy)
            self.dy.update()

    def check(self, label, module):
        state = delayed_state(module)
        for name, column, want in (("fwd", 0, self.x), ("fwd", 1, self.w), ("bwd", 0, self.dy)):
            got = state[f"history_{name}"][:, column]
            assert_bitwise_equal(f"{label}: history_{name}[:, {column}]", got.contiguous(), want.history)
            assert_bitwise_equal(f"{label}: scale_{name}[{column}]", state[f"scale_{name}"][column], want.scale)


RECIPES = [
    DELAYED(),
    DELAYED(amax_history_len=1),
    DELAYED(amax_history_len=3),
    DELAYED(amax_history_len=4, amax_compute_algo="most_recent"),
    DELAYED(amax_history_len=2, margin=3),
    DELAYED(amax_history_len=3, margin=-1, amax_compute_algo="most_recent"),
]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.amax_history_len}-{r.amax_compute_algo}-{r.margin}")
def test_history_and_scale_over_steps(recipe, device):
    """Growing, shrinking and zero amaxes: every history row and scale is the oracle's, bit for bit."""
    module, exact = make(device=device), ExactLinear(recipe)
    for i, scale in enumerate((1.0, 5.0, 0.3, 0.0, 2.0, 1e-3, 0.7)):
        x, dy = tokens(i, scale), tokens(i + 20, 0.1 * (i % 3))
        step(module, x, dy, recipe)
        exact.seen(x, module.weight, dy)
        exact.check(f"step {i}", module)


def test_e4m3_gradients_scale_by_448():
    recipe = DELAYED(fp8_format=te.recipe.Format.E4M3, amax_history_len=2)
    module, exact = make(), ExactLinear(recipe, grad=E4M3)
    step(module, tokens(1), tokens(2), recipe)
    exact.seen(tokens(1), module.weight, tokens(2))
    exact.check("E4M3", module)


def test_tiny_amax_gives_fp32_max():
    """fp8_max / amax overflows for amax below about 1e-36: the scale is fp32's largest value, not inf."""
    recipe = DELAYED(amax_history_len=2)
    module, exact = make(), ExactLinear(recipe)
    x = torch.full((32, 64), 1e-38, dtype=torch.bfloat16)
    step(module, x, x, recipe)
    exact.seen(x, module.weight, x)
    assert float(exact.x.scale) == torch.finfo(torch.float32).max
    exact.check("tiny", module)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_do_not_enter_the_history(bad, device):
    """A bad batch counts as amax 0: nothing rolls, scales stay, and the next clean step goes on."""
    recipe = DELAYED(amax_history_len=4)
    module, exact = make(device=device), ExactLinear(recipe)
    for i in range(4):
        x, dy = tokens(i), tokens(i + 20)
        if i == 2:
            x[3, 5] = dy[1, 2] = bad
        step(module, x, dy, recipe)
        exact.seen(x, module.weight, dy)
        exact.check(f"step {i}", module)
    assert bool(torch.isfinite(step(module, tokens(9), tokens(8), recipe)["out"]).all())


def test_no_update_without_gradients():
    """Inference uses the scales and leaves the history's rolled part and the scales alone."""
    recipe = DELAYED(amax_history_len=4)
    module = make()
    step(module, tokens(1), tokens(2), recipe)
    before = delayed_state(module)
    with torch.no_grad(), under(recipe):
        module(tokens(3, 7.0))
    after = delayed_state(module)
    assert_bitwise_equal("scale", after["scale_fwd"], before["scale_fwd"])
    assert_bitwise_equal("history", after["history_fwd"][1:], before["history_fwd"][1:])


def test_forward_update_happens_at_the_outermost_exit():
    recipe = DELAYED(amax_history_len=4)
    module = make()
    with under(recipe):
        with under(recipe):
            module(tokens(1, 3.0))
        inside = delayed_state(module)
        assert float(inside["scale_fwd"][0]) == 1.0
        assert_bitwise_equal("current amax", inside["history_fwd"][0, 0], amax_of(tokens(1, 3.0)))
    outside = delayed_state(module)
    assert float(outside["scale_fwd"][0]) != 1.0 and float(outside["history_fwd"][0, 0]) == 0.0


def test_several_forwards_in_one_pass_share_one_amax():
    """Two microbatches under one autocast: one step with the larger amax; the weight's too."""
    recipe = DELAYED(amax_history_len=4)
    module = make()
    with under(recipe):
        module(tokens(1, 3.0))
        module(tokens(2, 1.0))
    state = delayed_state(module)
    want = torch.maximum(amax_of(tokens(1, 3.0)), amax_of(tokens(2, 1.0)))
    assert_bitwise_equal("amax", state["history_fwd"][-1, 0], want)
    assert float(state["history_fwd"][-2, 0]) == 0.0


def test_backward_update_follows_the_first_module():
    """dy's amaxes of every module are known when the first module's backward ends; not one step later."""
    recipe = DELAYED(amax_history_len=4)
    first, last = make(seed=1), make(seed=2)
    x = leaf(tokens())
    with under(recipe):
        out = last(first(x))
    assert "scale_bwd" not in delayed_state(last) or float(delayed_state(last)["scale_bwd"][0]) == 1.0
    out.backward(tokens(5))
    for module in (first, last):
        state = delayed_state(module)
        assert float(state["scale_bwd"][0]) != 1.0
        assert float(state["history_bwd"][-1, 0]) > 0 and float(state["history_bwd"][0, 0]) == 0


def test_backward_update_with_a_frozen_first_module():
    """No gradient flows into the first module, so the pass ends with the first one that has a backward."""
    recipe = DELAYED(amax_history_len=4)
    first, last = make(seed=1), make(seed=2)
    first.requires_grad_(False)
    for i in range(2):
        with under(recipe):
            out = last(first(tokens(i)))
        out.backward(tokens(5))
    state = delayed_state(last)
    assert float(state["scale_bwd"][0]) != 1.0 and float(state["history_bwd"][0, 0]) == 0


def test_two_passes_in_flight():
    """k forwards then k backwards (pipeline parallelism): each backward takes one step."""
    recipe = DELAYED(amax_history_len=8)
    module, dy = make(), Delayed(E5M2, length=8)
    inputs = [leaf(tokens(i)) for i in range(3)]
    outs = []
    for x in inputs:
        with under(recipe):
            outs.append(module(x))
    for i, out in enumerate(outs):
        grad = tokens(30 + i, 1.0 + i)
        out.backward(grad)
        dy.record(grad)
        dy.update()
        assert_bitwise_equal(f"history {i}", delayed_state(module)["history_bwd"][:, 0].contiguous(), dy.history)


def test_mlp_has_columns_for_both_linears():
    """LayerNormMLP: 6 forward and 4 backward columns; fc2's input and fc1's gradient are recorded too."""
    recipe = DELAYED(amax_history_len=4)
    module = make(LN_MLP)
    step(module, tokens(), tokens(3), recipe)
    state = delayed_state(module)
    assert state["history_fwd"].shape == (4, 6) and state["history_bwd"].shape == (4, 4)
    for column in (0, 1, 3, 4):
        assert float(state["history_fwd"][-1, column]) > 0, column
    for column in (0, 2):
        assert float(state["history_bwd"][-1, column]) > 0, column
    assert_bitwise_equal("fc1 weight", state["history_fwd"][-1, 1], amax_of(module.fc1_weight))
    assert_bitwise_equal("fc2 weight", state["history_fwd"][-1, 4], amax_of(module.fc2_weight))
    assert_bitwise_equal("fc2 dy", state["history_bwd"][-1, 2], amax_of(tokens(3)))


# Calibration


def test_calibrating_records_without_quantizing(outputs):
    """Bit for bit the high-precision result; afterwards the scales are those a real step would have left."""
    recipe = DELAYED(amax_history_len=4)
    module, exact = make(), ExactLinear(recipe)
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe):
        assert_bitwise_equal("calibrating", run(module), outputs["bf16"])
    exact.seen(tokens(), module.weight)
    state = delayed_state(module)
    for column, want in ((0, exact.x), (1, exact.w)):
        assert_bitwise_equal("scale", state["scale_fwd"][column], want.scale)
        assert_bitwise_equal("history", state["history_fwd"][:, column].contiguous(), want.history)
    fp8 = step(module, tokens(), None, recipe)["out"]
    assert not torch.equal(fp8, outputs["bf16"]) and not torch.equal(fp8, outputs["delayed"])


def test_enabled_wins_over_calibrating(outputs):
    with te.autocast(enabled=True, calibrating=True, recipe=DELAYED()):
        assert_bitwise_equal("enabled", run(), outputs["delayed"])


@pytest.mark.parametrize("through_checkpoint", [False, True])
@pytest.mark.parametrize("first, second", [("HYBRID", "E4M3"), ("E4M3", "HYBRID")])
def test_a_changed_format_does_not_saturate(first, second, through_checkpoint):
    """A gradient scale made for E5M2's range would clip nearly everything in E4M3: it is converted or dropped."""
    module = make()
    for name in (first, first, second):
        recipe = DELAYED(fp8_format=te.recipe.Format[name], amax_history_len=4)
        if through_checkpoint and name == second:
            state, module = module.state_dict(), make()
            module.load_state_dict(state)
        got = step(module, tokens(), tokens(3, 100.0), recipe)
    want = step(make(), tokens(), tokens(3, 100.0), "bf16")
    for name in ("dx", "weight"):
        error = (got[name].float() - want[name].float()).norm() / want[name].float().norm()
        assert float(error) < 0.1, f"{name} is off by {float(error):.0%}"
