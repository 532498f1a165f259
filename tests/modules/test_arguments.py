"""Arguments of another kind than the one wanted: refused where they are given, by name, with the remedy."""

import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal

BF16 = torch.bfloat16
MX = te.recipe.MXFP8BlockScaling()
E4M3 = torch.float8_e4m3fn


def opened(context):
    with context:
        return context


WEIGHT = torch.randn(3, 2)
# Public callable -> what calls it besides the argument at hand.
CALLS = {
    "autocast": te.autocast,
    "fp8_autocast": te.fp8_autocast,
    "quantized_model_init": lambda **kw: opened(te.quantized_model_init(**kw)),
    "fp8_model_init": lambda **kw: opened(te.fp8_model_init(**kw)),
    "Linear": lambda **kw: te.Linear(64, 64, device="cpu", **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(64, 64, device="cpu", **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(64, 64, device="cpu", **kw),
    "GroupedLinear": lambda **kw: te.GroupedLinear(2, 64, 64, device="cpu", **kw),
    "DotProductAttention": lambda **kw: te.DotProductAttention(2, 8, **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(
        64, 2, **({"device": "cpu", "fuse_qkv_params": True} | kw)
    ),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        64, 64, 2, **({"device": "cpu", "fuse_qkv_params": True} | kw)
    ),
    "RotaryPositionEmbedding": lambda **kw: te.RotaryPositionEmbedding(16, **kw),
    "make_graphed_callables": lambda **kw: te.make_graphed_callables(
        te.Linear(16, 16, device="cpu"), (torch.randn(16, 16),), **kw
    ),
    "LayerNorm": lambda **kw: te.LayerNorm(64, device="cpu", **kw),
    "RMSNorm": lambda **kw: te.RMSNorm(64, device="cpu", **kw),
    "checkpoint": lambda **kw: te.checkpoint(torch.sin, torch.randn(3), **kw),
    "plain_state_dict": lambda **kw: te.plain_state_dict(torch.nn.Linear(2, 2), **kw),
    "initialize_ub": lambda **kw: te.initialize_ub([64, 64], 1, device="cpu", **kw),
    "all_gather": lambda **kw: te.all_gather(torch.randn(4, 2), dist.group.WORLD, **kw).wait(),
    "reduce_scatter": lambda **kw: te.reduce_scatter(torch.randn(4, 2), dist.group.WORLD, **kw).wait(),
    "all_gather_linear": lambda **kw: te.all_gather_linear(torch.randn(4, 2), WEIGHT, dist.group.WORLD, **kw),
    "linear_reduce_scatter": lambda **kw: te.linear_reduce_scatter(torch.randn(4, 2), WEIGHT, dist.group.WORLD, **kw),
    "Float8Quantizer": lambda **kw: te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3, **kw),
    "Float8CurrentScalingQuantizer": lambda **kw: te.Float8CurrentScalingQuantizer(
        E4M3, **kw, **({"amax": torch.ones(1)} if "use_existing_amax" in kw else {})
    ),
    "MXFP8Quantizer": lambda **kw: te.MXFP8Quantizer(E4M3, **kw),
    "Float8BlockQuantizer": lambda **kw: te.Float8BlockQuantizer(E4M3, **kw),
}


def flags(name):
    """The arguments of a public callable that are annotated as bool."""
    try:
        parameters = inspect.signature(getattr(te, name), eval_str=False).parameters.values()
    except ValueError:
        return []
    return [p.name for p in parameters if p.annotation in ("bool", "bool | None")]


CALLABLE = [name for name in te.__all__ if callable(getattr(te, name)) and name != "Handle"]  # which verbs make
PUBLIC = [(name, flag) for name in CALLABLE for flag in flags(name)]
WRONG = ["no", 1, 128, 0.0, MX, torch.ones(40, 40), [], {"enabled": True}]


def test_every_public_flag_is_in_the_table():
    assert {name for name, _ in PUBLIC} == set(CALLS)
    assert len(PUBLIC) > 60


@pytest.mark.parametrize("name, flag", PUBLIC)
def test_flags_refuse_what_is_no_bool(name, flag, one_rank):
    """Named in the message, in one line or two, and no tensor is printed whole."""
    for wrong in WRONG:
        with pytest.raises(TypeError, match=rf"\({flag}=.*must be True or False; pass") as caught:
            CALLS[name](**{flag: wrong})
        assert len(str(caught.value)) < 240
    with pytest.raises(TypeError, match=flag):
        CALLS[name](**{flag: dist.group.WORLD})


@pytest.mark.parametrize("name, flag", PUBLIC)
def test_flags_take_none_and_numpy(name, flag, one_rank):
    """None is False, as in Transformer Engine, and a bool of numpy is one."""
    if name == "initialize_ub":
        for wrong in (None, np.True_):  # not made twice, so the flag has been taken
            te.initialize_ub([64, 64], 1, device="cpu")
            with pytest.raises(RuntimeError, match="twice"):
                CALLS[name](**{flag: wrong})
            te.destroy_ub()
        return
    if name == "make_graphed_callables":
        for wrong in (None, np.False_):  # refused for want of a GPU, so the flag has been taken
            with pytest.raises(ValueError, match="CUDA graphs hold work on CUDA tensors"):
                CALLS[name](**{flag: wrong})
        return
    CALLS[name](**{flag: None})
    CALLS[name](**{flag: np.False_})
    refused = flag == "strict" and name != "autocast"  # for want of userbuffers
    refused |= flag in ("return_max_logit", "all_gather_usage")
    refused |= name == "GroupedLinear" and flag.startswith("ub_")
    if flag not in ("distribute_saved_activations", "with_amax_reduction") and not refused:
        CALLS[name](**{flag: np.True_})


# (call, name of the argument that got the recipe)
SLIPS = [
    (lambda: te.fp8_autocast(True, MX), "calibrating"),
    (lambda: te.fp8_autocast(MX), "enabled"),
    (lambda: te.autocast(MX), "enabled"),
    (lambda: te.autocast(True, MX), "calibrating"),
    (lambda: te.autocast(True, "mxfp8"), "calibrating"),
    (lambda: opened(te.quantized_model_init(MX)), "enabled"),
    (lambda: opened(te.quantized_model_init(True, MX, MX)), "preserve_high_precision_init_val"),
    (lambda: te.Linear(64, 64, 128), "sequence_parallel"),
    (lambda: te.LayerNormLinear(64, 64, 1e-5, 2), "sequence_parallel"),
]


@pytest.mark.parametrize("call, name", SLIPS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_recipe_in_the_place_of_another_argument(call, name):
    """It was dropped and delayed scaling ran."""
    with pytest.raises(TypeError, match=rf"\({name}=.*must be True or False; pass other arguments by name"):
        call()
    assert not te.FP8GlobalStateManager.is_fp8_enabled()


def test_the_order_of_the_contexts_arguments_stays():
    for context in (te.fp8_autocast, te.autocast):
        with context(True, False, MX, None):
            assert te.FP8GlobalStateManager.get_fp8_recipe() == MX and te.FP8GlobalStateManager.is_fp8_enabled()


@pytest.mark.parametrize("device", device_params())
def test_flags_of_numpy_give_the_same_module(device):
    outputs = []
    for yes, no in ((True, False), (np.True_, np.False_)):
        torch.manual_seed(1)
        module = te.LayerNormMLP(
            64, 64, bias=yes, return_bias=yes, zero_centered_gamma=yes, normalization="RMSNorm", checkpoint=no,
            return_layernorm_output=yes, sequence_parallel=no, params_dtype=BF16, device=device,
        )  # fmt: skip
        with te.autocast(enabled=yes, recipe="current"):
            outputs.append(module(torch.randn(32, 64, dtype=BF16, device=device), is_first_microbatch=yes))
    assert len(outputs[0]) == len(outputs[1]) == 3
    for one, two in zip(*outputs, strict=True):
        assert_bitwise_equal("output", one, two)


FORWARDS = [
    ("Linear", {"is_first_microbatch": torch.ones(32, 64)}, "is_first_microbatch"),
    ("Linear", {"is_first_microbatch": "no"}, "is_first_microbatch"),
    ("LayerNormLinear", {"is_first_microbatch": 1}, "is_first_microbatch"),
    ("LayerNormMLP", {"is_first_microbatch": torch.ones(32, 64)}, "is_first_microbatch"),
    ("Linear", {"fp8_output": "no"}, "fp8_output"),
    ("LayerNormLinear", {"fp8_grad": 1}, "fp8_grad"),
]


@pytest.mark.parametrize("kind, given, name", FORWARDS)
def test_forwards_refuse_what_is_no_bool(kind, given, name):
    module = getattr(te, kind)(64, 64, params_dtype=BF16, device="cpu")
    x = torch.randn(32, 64, dtype=BF16)
    with pytest.raises(TypeError, match=rf"{kind}\({name}=.*must be True or False"), te.autocast(recipe="current"):
        module(x, **given)
    with te.autocast(recipe="current"):
        module(x, is_first_microbatch=True)


def test_defer_init_and_usage():
    for module in (te.Linear(64, 64, device="cpu"), te.LayerNorm(64, device="cpu")):
        with pytest.raises(TypeError, match=r"defer_init='no'.*True or False"):
            module.reset_parameters(defer_init="no")
    for name in ("rowwise", "columnwise"):
        with pytest.raises(TypeError, match=rf"MXFP8Quantizer\({name}='no'"):
            te.MXFP8Quantizer(E4M3).set_usage(**{name: "no"})


# (call, words of the message)
QParams, MMParams, Float8CurrentScaling = te.recipe.QParams, te.recipe.MMParams, te.recipe.Float8CurrentScaling
VALUES = [
    (lambda: QParams(power_2_scale="no"), ("QParams(power_2_scale='no')", "bool", "False")),
    (lambda: QParams(power_2_scale=1), ("QParams(power_2_scale=1)", "bool")),
    (lambda: QParams(power_2_scale=None), ("QParams(power_2_scale=None)", "bool")),
    (lambda: QParams(amax_epsilon="x"), ("QParams(amax_epsilon='x')", "float", "0.0")),
    (lambda: QParams(amax_epsilon=True), ("QParams(amax_epsilon=True)", "float")),
    (lambda: QParams(amax_epsilon=torch.ones(300)), ("QParams(amax_epsilon=tensor(", "float")),
    (lambda: MMParams(use_split_accumulator=1), ("MMParams(use_split_accumulator=1)", "bool", "True")),
    (lambda: MMParams(use_split_accumulator="no"), ("MMParams(use_split_accumulator='no')", "bool")),
    (lambda: MMParams(None), ("MMParams(use_split_accumulator=None)", "bool")),
    (lambda: Float8CurrentScaling(use_power_2_scales=1), ("Float8CurrentScaling(use_power_2_scales=1)", "bool")),
    (lambda: te.Float8CurrentScalingQuantizer(E4M3, amax_epsilon="x"), ("amax_epsilon='x'", "float")),
    (lambda: te.Float8BlockQuantizer(E4M3, amax_epsilon="x"), ("amax_epsilon='x'", "float")),
    (lambda: opened(te.collect_statistics(torch.ones(4))), ("collect_statistics(Tensor)", "nn.Module", "the model")),
    (lambda: opened(te.collect_statistics("gpt")), ("collect_statistics(str)", "nn.Module")),
    (lambda: te.autocast(recipe=torch.ones(99, 99)), ("recipe=tensor(", "'delayed'")),
]


@pytest.mark.parametrize("call, words", VALUES, ids=lambda v: v[0] if isinstance(v, tuple) else "")
def test_values_of_another_kind(call, words):
    with pytest.raises(TypeError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 240


@pytest.mark.parametrize("wrong", ["HYBRID", "E4M3", 0, None])
@pytest.mark.parametrize("cls", ["DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling"])
def test_a_format_given_as_something_else(cls, wrong):
    with pytest.raises(ValueError) as caught:
        getattr(te.recipe, cls)(fp8_format=wrong)
    assert f"{cls}(fp8_format={wrong!r}): must be te.recipe.Format.E4M3" in str(caught.value)


@pytest.mark.parametrize("epsilon", [0, 1, 1e-4, np.float32(0.5), np.float64(0.5)])
def test_numbers_are_taken_as_amax_epsilon(epsilon):
    assert QParams(amax_epsilon=epsilon).amax_epsilon == epsilon


# Devices


def absent():
    """Names of CUDA devices that are not there, of any machine that runs this."""
    return [f"cuda:{torch.cuda.device_count()}", torch.device("cuda", 99), 99]


NONSENSE = ["gpu", "cuda:x", 1.5, torch.ones(3)]
BUILDERS = {
    "Linear": lambda device: te.Linear(64, 64, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(64, 64, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(64, 64, device=device),
    "LayerNorm": lambda device: te.LayerNorm(64, device=device),
    "RMSNorm": lambda device: te.RMSNorm(64, device=device),
    "initialize_ub": lambda device: te.initialize_ub([64, 64], 1, device=device),
}


@pytest.mark.parametrize("build", BUILDERS)
def test_a_device_that_is_not_there(build, one_rank):
    for device in absent() + NONSENSE:
        with pytest.raises(ValueError, match=r"device=.*(torch counts|is no device).*pass .*'cpu'"):
            BUILDERS[build](device)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "mxfp8"])
def test_support_on_a_device_that_is_not_there(recipe):
    for device in absent() + NONSENSE:
        supported, reason = te.check_recipe_support(recipe, device)
        assert not supported and "device=" in reason and "'cpu'" in reason


@pytest.mark.parametrize("device", device_params())
def test_devices_that_are_there(device):
    names = ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)] if device == "cuda" else ["cpu"]
    for name in (*names, torch.device(device)):
        for build in ("Linear", "LayerNorm"):
            assert BUILDERS[build](name).weight.device.type == device
    default = "cuda" if torch.cuda.is_available() else "cpu"
    assert te.Linear(64, 64).weight.device.type == te.LayerNorm(64, device=None).weight.device.type == default
    assert te.Linear(64, 64, device="meta").weight.device.type == "meta"
