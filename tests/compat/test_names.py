"""Names that te_lite does not have: errors that say what it has instead."""

import contextlib
import inspect
import pickle

import pytest
import torch

import te_lite as te
from te_lite.compat import names

recipe = te.recipe

# (name, what the error names)
MISSING = [
    ("pytorch", "te_lite.Linear"),
    ("common", "te_lite.recipe"),
    ("TransformerLayr", "TransformerLayer"),
    ("GroupedLiner", "GroupedLinear"),
    ("fp8", "te_lite.fp8_autocast"),
    ("is_mxfp8_available", "te.check_recipe_support('mxfp8')"),
    ("quantized_model", "quantized_model_init"),
    ("LayernormLinear", "LayerNormLinear"),
    ("Linaer", "Linear"),
    ("rmsnorm", "RMSNorm"),
    ("initialise_ub", "initialize_ub"),
    ("DelayedScaling", "te.recipe.DelayedScaling"),
    ("MXFP8BlockScaling", "te.recipe.MXFP8BlockScaling"),
    ("Format", "te.recipe.Format"),
    ("zzz", "dir(te_lite)"),
]
MISSING_RECIPES = [
    ("NVFP4BlockScaling", "MXFP8BlockScaling"),
    ("TensorwiseScaling", "Float8CurrentScaling"),
    ("DelayScaling", "DelayedScaling"),
    ("MXFP8", "dir(te_lite.recipe)"),
    ("delayedscaling", "DelayedScaling"),
    ("Qparams", "QParams"),
]


@pytest.mark.parametrize(
    "module, name, instead", [(te, *row) for row in MISSING] + [(te.recipe, *row) for row in MISSING_RECIPES]
)
def test_missing_attributes(module, name, instead):
    """AttributeError with the remedy, so hasattr() stays False."""
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    message = str(caught.value)
    assert message.startswith(f"module {module.__name__!r} has no attribute {name!r}; ") and instead in message
    assert "\n" not in message and len(message) < 200
    assert not hasattr(module, name) and getattr(module, name, None) is None


def test_import_of_what_is_missing_is_pythons_error():
    with pytest.raises(ModuleNotFoundError, match="te_lite.pytorch"):
        import te_lite.pytorch  # noqa: F401
    with pytest.raises(ImportError, match="NVFP4BlockScaling"):
        from te_lite.recipe import NVFP4BlockScaling  # noqa: F401


def test_what_the_table_offers_is_there():
    """Every te. and te_lite. name in a remedy exists."""
    for remedy in names.INSTEAD.values():
        for word in remedy.replace(",", " ").replace(";", " ").replace("(", " ").split():
            if word.startswith(("te.", "te_lite.")):
                assert eval(word, {"te": te, "te_lite": te}) is not None
    for key in names.INSTEAD:
        where, name = key.split(" ")
        if where in ("te_lite", "te_lite.recipe"):
            assert not hasattr(te if where == "te_lite" else te.recipe, name), f"{key} is there by now"


def mlp(**given):
    return te.LayerNormMLP(64, 64, device="cpu", **given)


# (call, kind of error, the value as the message has it, what is offered)
STRINGS = [
    (lambda: te.LayerNormLinear(64, 64, normalization="rmsnorm"), "normalization='rmsnorm'", "nearest: RMSNorm"),
    (lambda: mlp(normalization="layer_norm"), "normalization='layer_norm'", "nearest: LayerNorm"),
    (lambda: mlp(normalization="GroupNorm"), "normalization='GroupNorm'", "'RMSNorm'"),
    (lambda: mlp(activation="SwiGLU"), "activation 'SwiGLU'", "nearest: swiglu"),
    (lambda: mlp(activation="swish"), "activation 'swish'", "nearest: silu"),
    (lambda: mlp(activation="gelu_new"), "activation 'gelu_new'", "nearest: gelu"),
    (lambda: mlp(activation=None), "activation None", "choose one"),
    (lambda: te.Linear(64, 64, parallel_mode="Column"), "parallel_mode='Column'", "nearest: column"),
    (lambda: te.Linear(64, 64, parallel_mode="rows"), "parallel_mode='rows'", "nearest: row"),
    (lambda: te.Linear(64, 64, parallel_mode=2), "parallel_mode=2", "'column', 'row'"),
    (lambda: te.autocast(recipe="MXFP8"), "recipe 'MXFP8'", "nearest: mxfp8"),
    (lambda: te.autocast(recipe="fp8"), "recipe 'fp8'", "nearest: current, delayed"),
    (lambda: te.autocast(recipe="Float8"), "recipe 'Float8'", "nearest: current, delayed"),
    (lambda: te.autocast(recipe="hybrid"), "recipe 'hybrid'", "fp8_format=Format.HYBRID"),
    (lambda: te.check_recipe_support("nvfp4"), "recipe 'nvfp4'", "nearest: mxfp8"),
    (lambda: te.required_multiple("fp16"), "recipe 'fp16'", "nearest: bf16"),
]


@pytest.mark.parametrize("call, given, offered", STRINGS, ids=lambda v: v if isinstance(v, str) else "")
def test_strings_near_those_that_are_known(call, given, offered):
    with pytest.raises(ValueError) as caught:
        call()
    assert given in str(caught.value) and offered in str(caught.value)


# (callable, keywords, the unknown one, what the message offers)
KEYWORDS = [
    (te.autocast, {"fp8_recipe": "delayed"}, "fp8_recipe", "nearest: recipe"),
    (te.autocast, {"fp8_group": None}, "fp8_group", "nearest: amax_reduction_group"),
    (te.autocast, {"enable": True}, "enable", "nearest: enabled"),
    (te.fp8_autocast, {"recipe": "delayed"}, "recipe", "nearest: fp8_recipe"),
    (te.fp8_autocast, {"amax_reduction_group": None}, "amax_reduction_group", "nearest: fp8_group"),
    (te.quantized_model_init, {"fp8_recipe": "delayed"}, "fp8_recipe", "nearest: recipe"),
    (te.fp8_model_init, {"fp8_recipe": "delayed"}, "fp8_recipe", "nearest: recipe"),
    (recipe.DelayedScaling, {"amax_hist_len": 16}, "amax_hist_len", "nearest: amax_history_len"),
    (recipe.DelayedScaling, {"Margin": 1}, "Margin", "nearest: margin"),
    (recipe.DelayedScaling, {"interval": 1}, "interval", "leave it out"),
    (recipe.DelayedScaling, {"override_linear_precision": ()}, "override_linear_precision", "high_precision_wgrad"),
    (recipe.Float8CurrentScaling, {"use_power_of_2_scales": True}, "use_power_of_2_scales", "use_power_2_scales"),
    (recipe.MXFP8BlockScaling, {"format": None}, "format", "nearest: fp8_format"),
    (recipe.Float8BlockScaling, {"use_fp32_scales": True}, "use_fp32_scales", "nearest: use_f32_scales"),
    (recipe.RowwiseScaling, {"high_precision": True}, "high_precision", "nearest: high_precision_wgrad"),
    (recipe.CustomRecipe, {"factory": print}, "factory", "nearest: qfactory"),
    (recipe.HighPrecision, {"zzz": 1}, "zzz", "help(HighPrecision)"),
    (recipe.QParams, {"amax_eps": 1.0}, "amax_eps", "nearest: amax_epsilon"),
    (recipe.MMParams, {"split_accumulator": True}, "split_accumulator", "nearest: use_split_accumulator"),
    (te.Linear, {"in_feature": 64, "out_features": 64}, "in_feature", "nearest: in_features"),
    (te.LayerNormLinear, {"in_features": 64, "normalisation": "RMSNorm"}, "normalisation", "normalization"),
    (te.LayerNormMLP, {"hidden_size": 64, "ffn_hidden": 64}, "ffn_hidden", "nearest: ffn_hidden_size"),
    (te.LayerNorm, {"normalized_shape": 64, "zero_centred_gamma": True}, "zero_centred_gamma", "zero_centered_gamma"),
    (te.RMSNorm, {"normalized_shape": 64, "epsilon": 1e-6}, "epsilon", "nearest: eps"),
]  # fmt: skip


@pytest.mark.parametrize("function, given, unknown, offered", KEYWORDS, ids=lambda v: v if isinstance(v, str) else "")
def test_unknown_keywords(function, given, unknown, offered):
    with pytest.raises(TypeError) as caught:
        function(**given)
    owner = "quantized_model_init" if function is te.fp8_model_init else function.__name__
    assert str(caught.value).startswith(f"{owner} has no argument {unknown!r}; ")
    assert offered in str(caught.value)


def test_other_type_errors_stay():
    """Of arguments that are missing or given twice, and of the constructors themselves."""
    for call, words in (
        (lambda: te.Linear(64), "out_features"),
        (lambda: te.Linear(64, 64, in_features=64), "in_features"),
        (lambda: recipe.DelayedScaling(margin="1"), "must be int"),
        (lambda: te.Linear(64, 64, params_dtype=torch.int8), "params_dtype"),
    ):
        with pytest.raises(TypeError, match=words) as caught:
            call()
        assert "has no argument" not in str(caught.value)


def test_a_subclass_keeps_its_own_keywords():
    class Layer(te.Linear):
        def __init__(self, config, **options):
            super().__init__(config["k"], config["n"], device="cpu", **options)

    class Scaling(recipe.DelayedScaling):
        def __init__(self, config, **options):
            super().__init__(margin=config["margin"], **options)

    assert Layer(config={"k": 64, "n": 32}).weight.shape == (32, 64)
    assert Scaling(config={"margin": 3}).margin == 3
    with pytest.raises(TypeError, match="no argument 'retrun_bias'; nearest: return_bias"):
        Layer(config={"k": 64, "n": 32}, retrun_bias=True)
    with pytest.raises(TypeError, match="no argument 'amax_hist_len'; nearest: amax_history_len"):
        Scaling(config={"margin": 3}, amax_hist_len=4)


def test_signatures_and_copies_are_what_they_were():
    assert (
        str(inspect.signature(recipe.QParams)) == "(power_2_scale: 'bool' = False, amax_epsilon: 'float' = 0.0) -> None"
    )
    assert pickle.loads(pickle.dumps(recipe.DelayedScaling(margin=2))) == recipe.DelayedScaling(margin=2)
    for context in (te.autocast(recipe="current"), te.fp8_autocast(fp8_recipe="current")):
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            assert te.FP8GlobalStateManager.get_fp8_recipe().float8_current_scaling()
