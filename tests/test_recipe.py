"""Recipes: fields and defaults, and everything that is refused."""

import dataclasses

import pytest
import torch

import te_lite as te
from te_lite import recipe as recipes
from te_lite.recipe import DelayedScaling, Float8CurrentScaling, Format


def defaults(cls):
    return {f.name: getattr(cls(), f.name) for f in dataclasses.fields(cls)}


def test_delayed_scaling_fields():
    assert list(defaults(DelayedScaling).items()) == [
        ("margin", 0),
        ("fp8_format", Format.HYBRID),
        ("amax_history_len", 1024),
        ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None),
        ("reduce_amax", True),
        ("fp8_dpa", False),
        ("fp8_mha", False),
    ]


def test_current_scaling_fields():
    got = defaults(Float8CurrentScaling)
    assert got["use_power_2_scales"] is False and got["fp8_format"] is Format.HYBRID
    assert got["fp8_gemm_fprop"].use_split_accumulator is False
    assert got["fp8_gemm_dgrad"].use_split_accumulator is True
    assert got["fp8_gemm_wgrad"].use_split_accumulator is True
    powers = Float8CurrentScaling(use_power_2_scales=True)
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        assert getattr(powers, name).power_2_scale and not got[name].power_2_scale
        assert got[name].amax_epsilon == 0.0


def test_formats():
    assert (Format.E4M3.value.max_fwd, Format.E4M3.value.max_bwd) == (448, 448)
    assert (Format.E5M2.value.max_fwd, Format.E5M2.value.max_bwd) == (57344, 57344)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    for cls in (DelayedScaling, Float8CurrentScaling):
        assert cls(fp8_format=Format.E4M3).fp8_format is Format.E4M3


UNKNOWN = ("interval", "override_linear_precision", "params_dtype", "Margin", "amax_history_length")


@pytest.mark.parametrize("cls", [DelayedScaling, Float8CurrentScaling])
@pytest.mark.parametrize("field", UNKNOWN)
def test_unknown_fields_are_refused(cls, field):
    with pytest.raises(TypeError, match=field):
        cls(**{field: 1})


IMPOSSIBLE = [
    (DelayedScaling, "margin", 1.5),
    (DelayedScaling, "margin", "0"),
    (DelayedScaling, "margin", 1000),
    (DelayedScaling, "margin", None),
    (DelayedScaling, "amax_history_len", 0),
    (DelayedScaling, "amax_history_len", -1),
    (DelayedScaling, "amax_history_len", 2.0),
    (DelayedScaling, "amax_history_len", True),
    (DelayedScaling, "amax_compute_algo", "mean"),
    (DelayedScaling, "amax_compute_algo", None),
    (DelayedScaling, "fp8_format", Format.E5M2),
    (DelayedScaling, "fp8_format", "HYBRID"),
    (DelayedScaling, "reduce_amax", "no"),
    (DelayedScaling, "scaling_factor_compute_algo", lambda *a: None),
    (DelayedScaling, "fp8_dpa", True),
    (Float8CurrentScaling, "fp8_format", Format.E5M2),
    (Float8CurrentScaling, "fp8_format", None),
    (Float8CurrentScaling, "use_power_2_scales", 2),
    (Float8CurrentScaling, "fp8_quant_fwd_inp", {"power_2_scale": True}),
    (Float8CurrentScaling, "fp8_gemm_fprop", True),
    (Float8CurrentScaling, "fp8_mha", True),
]


@pytest.mark.parametrize("cls, field, value", IMPOSSIBLE, ids=lambda v: getattr(v, "__name__", str(v)))
def test_impossible_values_are_refused(cls, field, value):
    """The message names the field; value, rule and remedy follow it."""
    with pytest.raises((ValueError, TypeError), match=field):
        cls(**{field: value})


@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf")])
def test_impossible_amax_epsilon(epsilon):
    with pytest.raises(ValueError, match="amax_epsilon"):
        recipes.QParams(amax_epsilon=epsilon)


@pytest.mark.parametrize("cls", [DelayedScaling, Float8CurrentScaling])
def test_recipes_are_values(cls):
    """Frozen, equal when their fields are, hashable."""
    one, two = cls(), cls()
    assert one == two and hash(one) == hash(two)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.fp8_format = Format.E4M3
    assert cls(fp8_format=Format.E4M3) != one


def test_from_name_and_available():
    assert recipes.from_name("delayed") == DelayedScaling()
    assert recipes.from_name("current") == Float8CurrentScaling()
    names = recipes.available()
    assert {"bf16", "delayed", "current"} <= set(names)
    for name in names:
        recipes.from_name(name)
    with pytest.raises(ValueError, match="delayed"):
        recipes.from_name("delaid")
    with pytest.raises((ValueError, TypeError)):
        recipes.from_name(None)


def test_autocast_refuses_what_is_no_recipe():
    for wrong in (DelayedScaling, 3, {"margin": 0}):
        with pytest.raises(TypeError, match="recipe"):
            te.autocast(recipe=wrong)
    with pytest.raises(ValueError, match="nope"):
        te.autocast(recipe="nope")


def test_predicates_that_megatron_asks():
    assert DelayedScaling().delayed() and not DelayedScaling().float8_current_scaling()
    assert Float8CurrentScaling().float8_current_scaling() and not Float8CurrentScaling().delayed()


def test_support_on_cpu():
    for name in ("bf16", "delayed", "current"):
        ok, reason = te.check_recipe_support(recipes.from_name(name), torch.device("cpu"))
        assert ok and not reason


def test_support_says_why_not(monkeypatch):
    """A GPU without fp8 is refused with its capability; bf16 is fine there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "an older GPU")
    ok, reason = te.check_recipe_support(DelayedScaling(), torch.device("cuda"))
    assert not ok and "8.0" in reason and "8.9" in reason
    ok, _ = te.check_recipe_support(recipes.from_name("bf16"), torch.device("cuda"))
    assert ok
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    assert te.check_recipe_support(DelayedScaling(), torch.device("cuda")) == (True, "")
