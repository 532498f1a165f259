"""Recipes: fields and defaults, what is refused, names, and what each recipe asks of a device and of sizes."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

import te_lite as te
from te_lite import recipe as recipes
from te_lite.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HighPrecision,
    MMParams,
    MXFP8BlockScaling,
    QParams,
    RowwiseScaling,
)

SPLIT, FAST = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)
QUANT = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
ATTENTION = [("fp8_dpa", False), ("fp8_mha", False)]
PLAIN = (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling, RowwiseScaling)

# (class, what can be given by position in Transformer Engine's order, with the defaults)
# fmt: off
FIELDS = [
    (DelayedScaling, [
        ("margin", 0), ("fp8_format", Format.HYBRID), ("amax_history_len", 1024), ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None), ("reduce_amax", True), *ATTENTION,
    ]),
    (Float8CurrentScaling, [
        ("use_power_2_scales", False), ("fp8_format", Format.HYBRID),
        ("fp8_gemm_fprop", FAST), ("fp8_gemm_dgrad", SPLIT), ("fp8_gemm_wgrad", SPLIT), *ATTENTION,
    ]),
    (MXFP8BlockScaling, [("margin", 0), ("fp8_format", Format.E4M3), *ATTENTION]),
    (Float8BlockScaling, [
        ("use_f32_scales", False), ("fp8_format", Format.E4M3),
        ("x_block_scaling_dim", 1), ("w_block_scaling_dim", 2), ("grad_block_scaling_dim", 1),
        ("fp8_gemm_fprop", SPLIT), ("fp8_gemm_dgrad", SPLIT), ("fp8_gemm_wgrad", SPLIT), *ATTENTION,
    ]),
    (RowwiseScaling, [("use_power_2_scales", True), ("high_precision_wgrad", False)]),
]
# fmt: on


@pytest.mark.parametrize("cls, expected", FIELDS, ids=lambda v: getattr(v, "__name__", ""))
def test_fields(cls, expected):
    parameters = inspect.signature(cls).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [name for name, _ in expected]
    made = cls()
    assert [(name, getattr(made, name)) for name, _ in expected] == expected
    assert cls(*(value for _, value in expected)) == made


def test_custom_fields():
    found = [(p.name, p.default) for p in inspect.signature(CustomRecipe).parameters.values()]
    assert found == [("qfactory", inspect.Parameter.empty), *ATTENTION, ("stateless", False)]


# (recipe, power_2_scale of the QParams that were not given)
POWERS = [
    (Float8CurrentScaling, {}, False),
    (Float8CurrentScaling, {"use_power_2_scales": True}, True),
    (Float8BlockScaling, {}, True),
    (Float8BlockScaling, {"use_f32_scales": True}, False),
]


@pytest.mark.parametrize("cls, options, expected", POWERS, ids=str)
def test_quantization_parameters_follow_the_kind_of_scale(cls, options, expected):
    made = cls(**options)
    assert all(getattr(made, name) == QParams(expected, 0.0) for name in QUANT)
    for given in QUANT:
        own = cls(**options, **{given: QParams(not expected, 1e-4)})
        for name in QUANT:
            assert getattr(own, name) == (QParams(not expected, 1e-4) if name == given else QParams(expected, 0.0))


def test_formats():
    assert (Format.E4M3.value.max_fwd, Format.E4M3.value.max_bwd) == (448, 448)
    assert (Format.E5M2.value.max_fwd, Format.E5M2.value.max_bwd) == (57344, 57344)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    for cls in (DelayedScaling, Float8CurrentScaling):
        assert cls(fp8_format=Format.E4M3).fp8_format is Format.E4M3


UNKNOWN = ("interval", "override_linear_precision", "params_dtype", "Margin", "amax_history_length")


@pytest.mark.parametrize("cls", PLAIN)
@pytest.mark.parametrize("field", UNKNOWN)
def test_unknown_fields_are_refused(cls, field):
    with pytest.raises(TypeError, match=field):
        cls(**{field: 1})


# (class, field, value, what else the message names: the rule)
IMPOSSIBLE = [
    (DelayedScaling, "margin", 1.5, "int"),
    (DelayedScaling, "margin", "0", "int"),
    (DelayedScaling, "margin", 1000, "64"),
    (DelayedScaling, "margin", None, "int"),
    (DelayedScaling, "amax_history_len", 0, "4096"),
    (DelayedScaling, "amax_history_len", -1, "4096"),
    (DelayedScaling, "amax_history_len", 2.0, "int"),
    (DelayedScaling, "amax_history_len", True, "int"),
    (DelayedScaling, "amax_compute_algo", "mean", "most_recent"),
    (DelayedScaling, "amax_compute_algo", None, "str"),
    (DelayedScaling, "fp8_format", Format.E5M2, "Format.HYBRID"),
    (DelayedScaling, "fp8_format", "HYBRID", "Format.HYBRID"),
    (DelayedScaling, "reduce_amax", "no", "bool"),
    (DelayedScaling, "scaling_factor_compute_algo", lambda *a: None, "margin"),
    (DelayedScaling, "fp8_dpa", True, "bf16"),
    (Float8CurrentScaling, "fp8_format", Format.E5M2, "Format.E4M3"),
    (Float8CurrentScaling, "fp8_format", None, "Format.E4M3"),
    (Float8CurrentScaling, "use_power_2_scales", 2, "bool"),
    (Float8CurrentScaling, "fp8_quant_fwd_inp", {"power_2_scale": True}, "QParams"),
    (Float8CurrentScaling, "fp8_gemm_fprop", True, "MMParams"),
    (Float8CurrentScaling, "fp8_mha", True, "bf16"),
    (Float8CurrentScaling, "per_shard_scales", 1, "bool"),
    (MXFP8BlockScaling, "margin", 1, "0"),
    (MXFP8BlockScaling, "margin", 0.0, "int"),
    (MXFP8BlockScaling, "fp8_format", Format.E5M2, "Format.E4M3"),
    (MXFP8BlockScaling, "fp8_format", Format.E5M2, "Format.E4M3"),
    (MXFP8BlockScaling, "fp8_dpa", True, "bf16"),
    (Float8BlockScaling, "fp8_format", Format.E5M2, "Format.E4M3"),
    (Float8BlockScaling, "x_block_scaling_dim", 2, "1x128"),
    (Float8BlockScaling, "w_block_scaling_dim", 1, "128x128"),
    (Float8BlockScaling, "grad_block_scaling_dim", 2, "1x128"),
    (Float8BlockScaling, "grad_block_scaling_dim", 1.0, "int"),
    (Float8BlockScaling, "fp8_quant_bwd_grad", True, "QParams"),
    (Float8BlockScaling, "fp8_gemm_wgrad", FAST, "True"),
    (Float8BlockScaling, "fp8_gemm_dgrad", None, "MMParams"),
    (Float8BlockScaling, "use_f32_scales", "yes", "bool"),
    (RowwiseScaling, "use_power_2_scales", None, "bool"),
    (RowwiseScaling, "high_precision_wgrad", 1, "bool"),
    (CustomRecipe, "qfactory", None, "qfactory"),
    (CustomRecipe, "qfactory", "te_lite.quantize.custom:operands", "function"),
]


@pytest.mark.parametrize("cls, field, value, rule", IMPOSSIBLE, ids=lambda v: getattr(v, "__name__", str(v)))
def test_impossible_values_are_refused(cls, field, value, rule):
    """The message names the field and the rule; the value stands between them."""
    with pytest.raises((ValueError, TypeError), match=field) as caught:
        cls(**{field: value})
    assert rule in str(caught.value)


@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf")])
def test_impossible_amax_epsilon(epsilon):
    with pytest.raises(ValueError, match="amax_epsilon"):
        QParams(amax_epsilon=epsilon)


@pytest.mark.parametrize("cls", PLAIN)
def test_recipes_are_values(cls):
    """Frozen, equal when their fields are, hashable; copies and pickles are equal."""
    one, two = cls(), cls()
    assert one == two and hash(one) == hash(two)
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field.name, getattr(one, field.name))
        value = getattr(one, field.name)
        if type(value) is bool and field.name not in dict(ATTENTION):
            changed = cls(**{field.name: not value})
            assert changed != one
            for other in (pickle.loads(pickle.dumps(changed)), copy.deepcopy(changed)):
                assert other == changed and other.name == changed.name


def test_custom_recipes_compare_by_their_factory():
    def one(role):
        return None

    def two(role):
        return None

    assert CustomRecipe(one) == CustomRecipe(one) and hash(CustomRecipe(one)) == hash(CustomRecipe(one))
    assert CustomRecipe(one) != CustomRecipe(two)


# (name, the same thing as an object, its name in reports, the question of Megatron that it answers)
NAMES = [
    ("bf16", HighPrecision(), "bf16", None),
    ("delayed", DelayedScaling(), "delayed", "delayed"),
    ("current", Float8CurrentScaling(), "current", "float8_current_scaling"),
    ("tensorwise", Float8CurrentScaling(), "current", "float8_current_scaling"),
    ("mxfp8", MXFP8BlockScaling(), "mxfp8", "mxfp8"),
    ("blockwise", Float8BlockScaling(), "blockwise", "float8_block_scaling"),
    ("rowwise", RowwiseScaling(), "rowwise", None),
    ("rowwise_with_gw_hp", RowwiseScaling(high_precision_wgrad=True), "rowwise_with_gw_hp", None),
]
QUESTIONS = ("delayed", "float8_current_scaling", "mxfp8", "float8_block_scaling", "custom")


@pytest.mark.parametrize("name, value, reported, question", NAMES, ids=lambda v: v if isinstance(v, str) else "")
def test_names_and_classes_are_the_same_thing(name, value, reported, question):
    made = recipes.from_name(name)
    assert made == value and hash(made) == hash(value) and made.name == reported
    assert [q for q in QUESTIONS if getattr(made, q)()] == ([question] if question else [])
    assert made.is_fp8 == (name != "bf16")
    assert made.float8_per_tensor_scaling() == (reported in ("delayed", "current"))


def test_custom_recipe_has_no_name_to_ask_for():
    made = CustomRecipe(lambda role: None)
    assert made.name == "custom" and made.is_fp8 and [q for q in QUESTIONS if getattr(made, q)()] == ["custom"]
    with pytest.raises(ValueError, match="custom"):
        recipes.from_name("custom")


# (what was asked for, what must be offered)
MISTAKES = [
    ("delaid", "delayed"),
    ("MXFP8", "mxfp8"),
    ("mxfp-8", "mxfp8"),
    ("block", "blockwise"),
    ("RowWise", "rowwise"),
    ("rowwise_gw_hp", "rowwise_with_gw_hp"),
    ("tensor_wise", "tensorwise"),
    ("", "bf16"),
    (None, "bf16"),
]


@pytest.mark.parametrize("wrong, offered", MISTAKES)
def test_unknown_names_are_answered_with_the_nearest(wrong, offered):
    with pytest.raises(ValueError, match=rf"nearest: .*\b{offered}\b"):
        recipes.from_name(wrong)


def test_available_says_what_each_recipe_is_for():
    infos = recipes.available()
    assert set(infos) == {name for name, *_ in NAMES}
    for name, info in infos.items():
        recipe = recipes.from_name(name)
        line = str(info)
        assert line.startswith(f"{name}: ") and "\n" not in line
        assert recipe.summary in line and recipe.memory in line and info.hardware in line
        with pytest.raises(dataclasses.FrozenInstanceError):
            info.memory = ""
    assert "9.0" in infos["blockwise"].hardware and "12.9" in infos["blockwise"].hardware
    assert infos["bf16"].hardware == "any device"
    assert len({info.summary for info in infos.values()}) == len(infos) - 1  # tensorwise is current


def test_a_name_may_stand_for_a_class_elsewhere(monkeypatch):
    """One line in the table, imported when it is asked for."""
    monkeypatch.setitem(recipes._BY_NAME, "plain", "te_lite.recipe:HighPrecision")
    monkeypatch.setitem(recipes._BY_NAME, "lost", "te_lite.nowhere:Lost")
    assert recipes.from_name("plain") == HighPrecision()
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        recipes.from_name("lost")


def test_autocast_refuses_what_is_no_recipe():
    for wrong in (DelayedScaling, 3, {"margin": 0}):
        with pytest.raises(TypeError, match="recipe"):
            te.autocast(recipe=wrong)
    with pytest.raises(ValueError, match="nope"):
        te.autocast(recipe="nope")


@pytest.mark.parametrize("name", [name for name, *_ in NAMES])
def test_the_cpu_runs_everything(name):
    assert te.check_recipe_support(name, torch.device("cpu")) == (True, "")
    assert te.check_recipe_support(recipes.from_name(name), "cpu") == (True, "")
    ok, reason = te.check_recipe_support(name, "meta")
    assert ok == (name == "bf16") and (ok or "meta" in reason)


# (recipe, capability, torch's CUDA, what the reason names; None: it runs)
SUPPORT = [
    ("bf16", (7, 0), "12.4", None),
    ("delayed", (8, 0), "13.0", ("8.0", "8.9")),
    ("current", (8, 6), "12.4", ("8.6", "8.9")),
    ("tensorwise", (10, 0), "13.0", None),
    ("mxfp8", (8, 6), "13.0", ("8.6", "8.9")),
    ("mxfp8", (8, 9), "12.4", None),
    ("blockwise", (8, 9), "13.0", ("8.9", "9.0")),
    ("blockwise", (9, 0), "12.8", ("12.8", "12.9")),
    ("blockwise", (9, 0), "12.10", None),
    ("blockwise", (9, 0), None, ("None", "12.9")),
    ("blockwise", (9, 0), "13.0", None),
    ("blockwise", (10, 0), "13.0", ("10.0", "9.0")),
    ("rowwise", (8, 9), "13.0", ("8.9", "9.0")),
    ("rowwise", (9, 0), "12.8", ("12.8", "12.9")),
    ("rowwise", (9, 0), "13.0", None),
    ("rowwise_with_gw_hp", (10, 0), "13.0", ("10.0", "9.0")),
]


@pytest.mark.parametrize("name, capability, cuda, words", SUPPORT)
def test_support_on_a_gpu(name, capability, cuda, words, monkeypatch):
    """The reason names what the device has and what is needed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "some GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    ok, reason = te.check_recipe_support(name)
    assert ok == (words is None)
    assert (reason == "") if ok else all(word in reason for word in (name, *words))


def test_support_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ok, reason = te.check_recipe_support("mxfp8", "cuda:1")
    assert not ok and "cuda:1" in reason
    assert te.check_recipe_support("mxfp8") == (True, "")  # on the CPU, then


MULTIPLES = [
    ("bf16", 1),
    ("delayed", 16),
    ("current", 16),
    ("tensorwise", 16),
    ("mxfp8", 32),
    ("blockwise", 128),
    ("rowwise", 16),
    ("rowwise_with_gw_hp", 16),
    (CustomRecipe(print), 16),
]


@pytest.mark.parametrize("recipe, expected", MULTIPLES, ids=lambda v: v if isinstance(v, str) else "")
def test_required_multiple(recipe, expected):
    value = recipes.from_name(recipe) if isinstance(recipe, str) else recipe
    for tp_size in (1, 2, 8):
        assert te.required_multiple(recipe, tp_size) == te.required_multiple(value, tp_size) == expected * tp_size
    assert te.required_multiple(recipe) == expected
    assert value.feature_multiple == (16 if value.is_fp8 else 1)


@pytest.mark.parametrize("tp_size", [0, -1, 2.0, True, None])
def test_required_multiple_of_an_impossible_group(tp_size):
    with pytest.raises(ValueError, match="tp_size"):
        te.required_multiple("mxfp8", tp_size)
