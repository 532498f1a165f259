"""Extra state that te_lite cannot have written is refused with the value's name; all that it can write loads."""

import copy
import math

import pytest
import torch

import te_lite as te
from te_lite.modules.scale_state import HEADER
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import build, delayed_state, step
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec, make_tokens

K, L = 32, 4
RECIPE = te.recipe.DelayedScaling(amax_history_len=L)
INF, NAN = math.inf, math.nan
# Of a Linear: three forward columns, two backward; where each part begins.
HISTORY, SCALE = HEADER, HEADER + 3 * L
BACK_HISTORY, BACK_SCALE = SCALE + 3, SCALE + 3 + 2 * L


def tokens(seed, dtype=torch.bfloat16):
    return make_tokens(16, K, seed=seed, dtype=dtype)


def trained(kind=LINEAR, steps=6):
    torch.manual_seed(0)
    module = build(Spec(kind), K, K, 48)
    for i in range(steps):
        step(module, tokens(i), tokens(i + 20), RECIPE)
    return module


# (index in the state, value, what the message says of it)
DAMAGE = [
    *((0, value, "has version") for value in (NAN, INF, 0.0, -1.0, 1.5)),
    *((1, value, "history length is") for value in (NAN, INF, 0.0, -4.0, 3.5)),
    *((2, value, "count of forward tensors is") for value in (NAN, INF, 0.0, -3.0, 3.25)),
    *((3, value, "of backward tensors is") for value in (NAN, -INF, 0.0, -2.0, 2.5)),
    *((4, value, "forward fp8_max is") for value in (NAN, INF, 0.0, -448.0)),
    *((5, value, "backward fp8_max is") for value in (NAN, INF, 0.0, -448.0)),
    *((HISTORY + 1, value, r"forward amax of this step\[1\] is") for value in (NAN, -1.0, -INF)),
    *((HISTORY + 3 * 2, value, r"forward amax of an earlier step\[1, 0\] is") for value in (NAN, INF, -1.0, -INF)),
    *((SCALE + 2, value, r"forward scale\[2\] is") for value in (NAN, INF, 0.0, -1.0)),
    *((BACK_HISTORY, value, r"backward amax of this step\[0\] is") for value in (NAN, -0.5)),
    *((BACK_HISTORY + 2 * 3, value, r"backward amax of an earlier step\[2, 0\] is") for value in (NAN, INF, -1.0)),
    *((BACK_SCALE, value, r"backward scale\[0\] is") for value in (NAN, INF, 0.0, -1.0)),
]


@pytest.mark.parametrize(("at", "value", "says"), DAMAGE)
def test_each_value_is_checked(at, value, says):
    module = trained()
    before = module.get_extra_state()
    damaged = before.clone()
    damaged[at] = value
    state = module.state_dict() | {"_extra_state": damaged}
    with pytest.raises((ValueError, RuntimeError), match=f"extra state.*{says}.*{value:.4g}|has version {value}"):
        module.load_state_dict(state)
    with pytest.raises(ValueError, match="must be|update te_lite"):
        module.set_extra_state(damaged)
    assert_bitwise_equal("state", module.get_extra_state(), before)  # and nothing is lost


@pytest.mark.parametrize("size", range(1, HEADER))
def test_a_state_cut_short(size):
    module = trained()
    with pytest.raises(ValueError, match=f"extra state of {size} numbers .* at least {HEADER}"):
        module.set_extra_state(module.get_extra_state()[:size])


VALUES = (INF, -INF, NAN, 3e38)


@pytest.mark.parametrize("mode", ["trained", "evaluated", "calibrated"])
@pytest.mark.parametrize("kind", [LINEAR, LN_LINEAR, LN_MLP])
def test_what_hostile_inputs_leave_behind_loads(kind, mode):
    """inf and nan in x, in the weight and in dy: after each call the state loads, into a module with the same bits."""
    for value in VALUES:
        for where in ("x", "weight", "dy"):
            module, known = trained(kind, 2), []
            for i in range(3):
                x, dy = tokens(i), tokens(i + 20)
                weight = next(p for p in module.parameters() if p.dim() == 2)
                target = {"x": x, "weight": weight.data, "dy": dy}[where]
                kept = target[1, 1].clone()
                target[1, 1] = value if i == 1 else target[1, 1]
                if mode == "trained":
                    step(module, x, dy, RECIPE)
                else:
                    evaluated = mode == "evaluated"
                    with torch.set_grad_enabled(not evaluated):
                        with te.autocast(enabled=evaluated, calibrating=not evaluated, recipe=RECIPE):
                            module(x)
                target[1, 1] = kept
                state = module.get_extra_state()
                other = trained(kind, 0)
                other.set_extra_state(copy.deepcopy(state))
                assert_bitwise_equal("state", other.get_extra_state(), state)
                known.append(float(delayed_state(module)["history_fwd"][0].max()))
            if mode == "evaluated" and where == "weight" and value != 3e38:
                assert known[1] == INF  # what must load is there


@pytest.mark.parametrize("margin", [-64, 64])
@pytest.mark.parametrize("scale", [float(torch.finfo(torch.float32).max), 1e-36])
def test_another_margin_keeps_scales_finite(scale, margin):
    """te_lite gives such scales for amaxes at the ends of fp32; changed to another margin they stay scales."""
    module = trained()
    state = module.get_extra_state()
    state[SCALE : SCALE + 2] = scale
    module.set_extra_state(state)
    with torch.no_grad(), te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=L, margin=margin)):
        module(tokens(0))
    got = delayed_state(module)["scale_fwd"][:2].double()
    assert got.isfinite().all() and (got > 0).all()
    trained().set_extra_state(module.get_extra_state())
