"""What modules have under the alias for frameworks that ask for fp8's state: fp8_meta, quantizers, fp8_initialized."""

import copy
import pickle

import pytest
import torch

import te_lite as te
from te_lite.compat.alias import grouped, recipes
from te_lite.compat.alias.modules import get_fp8_meta_tensors, init_fp8_metadata, reset_fp8_meta_tensors
from te_lite.compat.alias.names import NotThere
from te_lite.modules.base import TeLiteModule
from te_lite.testing.numerics import assert_bitwise_equal

DELAYED = recipes.DelayedScaling(amax_history_len=4)
KEYS = "scaling_fwd", "scaling_bwd"


@pytest.fixture(autouse=True)
def fresh():
    te.FP8GlobalStateManager.reset()
    yield
    te.FP8GlobalStateManager.reset()


def linear(**kw) -> te.Linear:
    return te.Linear(32, 48, bias=False, params_dtype=torch.bfloat16, device="cpu", **kw)


def mlp() -> te.LayerNormMLP:
    return te.LayerNormMLP(32, 64, params_dtype=torch.bfloat16, device="cpu")


def step(module: TeLiteModule, recipe="delayed", scale: float = 1.0) -> torch.Tensor:
    x = (scale * torch.randn(16, 32)).bfloat16().requires_grad_()
    with te.autocast(recipe=recipe):
        y = module(x)
    y.float().sum().backward()
    return x


def test_whether_fp8_is_set_up_follows_the_last_call():
    module = linear()

    def said() -> list[bool]:
        return [module.fp8_initialized, module.fp8, module.fp8_calibration, module.fp8_meta_tensors_initialized]

    assert said() == [False] * 4 and dict(module.fp8_meta) == {} and module.quantizers == {}
    step(module, "current")
    assert said() == [True, True, False, False] and module.fp8_meta["recipe"].float8_current_scaling()
    with te.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        module(torch.randn(16, 32, dtype=torch.bfloat16))
    assert said() == [True, False, True, True]
    module(torch.randn(16, 32, dtype=torch.bfloat16))
    assert said() == [False, False, False, True] and "recipe" not in module.fp8_meta
    step(module, DELAYED)
    module.fp8_initialized = False
    assert not module.fp8_initialized
    before = module.fp8_meta["scaling_fwd"].amax_history.clone()
    step(module, DELAYED, 2.0)
    assert module.fp8_initialized, "the next call plans anew"
    assert_bitwise_equal("and keeps the scales", module.fp8_meta["scaling_fwd"].amax_history[-2], before[-1])
    with pytest.raises(NotImplementedError, match="run the module"):
        module.fp8_initialized = True


@pytest.mark.parametrize("make, gemms", [(linear, 1), (mlp, 2)])
def test_scales_in_transformer_engines_order(make, gemms):
    """Against the amaxes of tensors that the test knows: forward input, weight, output; backward grad_output, dx."""
    module = make()
    x = step(module, DELAYED)
    forward, backward = (module.fp8_meta[key] for key in KEYS)
    assert forward.amax_history.shape == (4, 3 * gemms) and backward.amax_history.shape == (4, 2 * gemms)
    assert forward.scale.shape == (3 * gemms,) and backward.scale.shape == (2 * gemms,)
    newest = forward.amax_history[-1]
    weights = [module.weight] if gemms == 1 else [module.fc1_weight, module.fc2_weight]
    for gemm, weight in enumerate(weights):
        assert newest[3 * gemm + 1] == weight.abs().max()
        torch.testing.assert_close(forward.scale[3 * gemm + 1], 448 / weight.abs().max().float())
    if gemms == 1:
        assert newest[0] == x.abs().max() and backward.amax_history[-1, 0] == 1.0
    kept = forward.amax_history.clone()
    step(module, DELAYED)
    assert_bitwise_equal("read anew", module.fp8_meta["scaling_fwd"].amax_history[-2], kept[-1])


def test_keys_that_are_not_there_name_what_is():
    module = linear()
    with pytest.raises(NotThere, match=r"scaling_fwd.*nothing.*init_fp8_metadata"):
        module.fp8_meta["scaling_fwd"]
    step(module, "current")
    with pytest.raises(NotThere, match="scaling_fwd.*recipe, fp8_group"):
        module.fp8_meta["scaling_fwd"]
    for key, value in (("scaling_fwd", 1), ("num_gemms", 1)):
        with pytest.raises(NotThere, match=key):
            module.fp8_meta[key] = value
    assert module.fp8_meta.get("scaling_fwd") is None


def test_scales_go_from_one_module_to_another():
    """As Megatron-core does where it takes a fused module apart."""
    one, other = linear(), linear()
    step(one, DELAYED)
    step(other, DELAYED, 5.0)
    for key in one.fp8_meta:
        if key in other.fp8_meta:
            other.fp8_meta[key] = one.fp8_meta[key]
    assert_bitwise_equal("state", other.get_extra_state(), one.get_extra_state())


@pytest.mark.parametrize("key", KEYS)
def test_a_modules_own_scales_stay(key):
    """Set again, and reset from the very tensors."""
    module = linear()
    step(module, DELAYED)
    step(module, DELAYED, 2.0)
    before = module.get_extra_state()
    module.fp8_meta[key] = module.fp8_meta[key]
    assert_bitwise_equal("set", module.get_extra_state(), before)
    module.reset_fp8_meta_tensors(
        {key: [module.fp8_meta[key].scale, module.fp8_meta[key].amax_history] for key in KEYS}
    )
    assert_bitwise_equal("reset", module.get_extra_state(), before)


@pytest.mark.parametrize("change, why", [
    (lambda scale, history: [scale[:1], history], r"scale \(1,\)"),
    (lambda scale, history: [scale[:1], history[:, :1]], r"scale \(1,\), amax_history \(4, 1\)"),
    (lambda scale, history: [scale, history[:, :1]], r"amax_history \(4, 1\): must be \[2\] and \[length, 2\]"),
    (lambda scale, history: [history, scale], r"scale \(4, 2\)"),
    (lambda scale, history: [scale, history[:0]], r"amax_history \(0, 2\)"),
    (lambda scale, history: [scale.tolist(), history], r"scale \(\)"),
    (lambda scale, history: [scale * torch.tensor([1.0, float("nan")]), history], "tensor 1 has the scale nan"),
    (lambda scale, history: [0 * scale, history], "tensor 0 has the scale 0.0"),
    (lambda scale, history: [scale, -1 - history], "amaxes .-"),
    (lambda scale, history: [scale, history / 0], "finite"),
])  # fmt: skip
def test_scales_that_do_not_fit_change_nothing(change, why):
    """Those of the other direction neither."""
    module = linear()
    step(module, DELAYED)
    saved = get_fp8_meta_tensors(module)
    saved["scaling_bwd"] = change(*saved["scaling_bwd"])
    step(module, DELAYED, 3.0)
    before = module.get_extra_state()
    with pytest.raises(ValueError, match=f"Linear's backward scales.*{why}.*take those of a module like it"):
        module.reset_fp8_meta_tensors(saved)
    assert_bitwise_equal("state", module.get_extra_state(), before)


def test_scales_of_another_module_that_do_not_fit_change_nothing():
    one, other = linear(), mlp()
    step(one, DELAYED)
    step(other, DELAYED)
    before = other.get_extra_state()
    for key in KEYS:
        with pytest.raises(ValueError, match="LayerNormMLP's .*take those of a module like it"):
            other.fp8_meta[key] = one.fp8_meta[key]
    assert_bitwise_equal("state", other.get_extra_state(), before)


def test_a_recipe_that_is_set_is_one():
    """As replays set it; scales that are left of another recipe's calls do not matter."""
    module = linear()
    for key, value in (("recipe", "nonsense"), ("fp8_group", "nonsense")):
        with pytest.raises(TypeError, match="nonsense.*pass the autocast's"):
            module.fp8_meta[key] = value
    step(module, DELAYED)
    module.fp8_meta["recipe"] = recipes.Float8CurrentScaling()


def test_scales_made_ahead():
    """init_fp8_metadata in the autocast; then a call uses these, and writes to the very tensors."""
    module = mlp()
    init_fp8_metadata(module)
    with te.autocast(recipe="current"):
        module.init_fp8_metadata()
    assert module.get_fp8_meta_tensors() is None and not module.fp8_meta_tensors_initialized
    with te.autocast(recipe=DELAYED):
        module.init_fp8_metadata(num_gemms=2)
    history = module.fp8_meta["scaling_fwd"].amax_history
    assert history.shape == (4, 6) and not history.any() and not module.fp8_initialized
    module.fp8_meta["scaling_fwd"].scale[1] = 7.0
    with te.autocast(recipe=DELAYED):
        module(torch.randn(16, 32, dtype=torch.bfloat16))
        assert history[0, 1] == module.fc1_weight.abs().max() and module.quantizers["scaling_fwd"][1].scale == 7.0
    meta = te.Linear(32, 32, device="meta")
    with te.autocast(recipe=DELAYED):
        meta.init_fp8_metadata()
    assert "scaling_fwd" not in meta.fp8_meta


def test_scales_kept_and_reset():
    module = linear()
    step(module, DELAYED)
    state, saved = module.get_extra_state(), get_fp8_meta_tensors(module)
    step(module, DELAYED, 3.0)
    assert not torch.equal(module.get_extra_state(), state)
    reset_fp8_meta_tensors(module, saved)
    assert_bitwise_equal("restored", module.get_extra_state(), state)
    with pytest.raises(KeyError, match="scaling_bwd"):
        module.reset_fp8_meta_tensors({"scaling_fwd": saved["scaling_fwd"]})
    module.reset_fp8_meta_tensors()
    with te.autocast(recipe=DELAYED):
        module.init_fp8_metadata()
    for scale, history in get_fp8_meta_tensors(module).values():
        assert bool((scale == 1).all()) and not history.any()


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "blockwise"])
def test_quantizers_quantize_as_the_module_does(recipe):
    module, x = linear(), torch.randn(16, 32).bfloat16()
    with te.autocast(recipe=recipe):
        y = module(x)
        made = module.quantizers
        q_x, q_w = made["scaling_fwd"][0](x), made["scaling_fwd"][1](module.weight)
        got = q_x.dequantize(torch.float32) @ q_w.dequantize(torch.float32).t()
    assert len(made["scaling_fwd"]) == 3 and len(made["scaling_bwd"]) == 2
    torch.testing.assert_close(y.float(), got, rtol=2**-7, atol=1e-3)
    if recipe == "delayed":
        made["scaling_bwd"][0](torch.full((16, 48), 3.0))
        assert made["scaling_bwd"][0].amax == 3.0 and module.fp8_meta["scaling_bwd"].amax_history[0, 0] == 3.0
    module(x)
    assert module.quantizers == {}


def test_quantized_parameters():
    assert not linear().primary_weights_in_fp8 and linear()._get_fp8_params() is None
    for device in ("cpu", "meta"):
        with te.quantized_model_init(recipe="current"):
            module = te.Linear(32, 48, params_dtype=torch.bfloat16, device=device)
        assert module.primary_weights_in_fp8 and module.fp8_parameters
    with te.quantized_model_init(recipe="current"):
        module = linear()
    assert [param is module.weight for param in module._get_fp8_params()] == [True]
    module.weight.requires_grad_(False)
    assert module._get_fp8_params() is None


@pytest.mark.parametrize("name, remedy", [
    ("prepare_forward", "derive"), ("grad_output_preprocess", "derive"), ("set_activation_dtype", "derive"),
    ("init_fp8_meta_tensors", "init_fp8_metadata"), ("set_meta_tensor", "init_fp8_metadata"),
    ("adjust_amax_history_length", "amax_history_len"),
])  # fmt: skip
def test_methods_that_are_not_there_name_themselves(name, remedy):
    with pytest.raises(NotImplementedError, match=rf"Linear\.{name}: .*{remedy}"):
        getattr(linear(), name)(16)


def test_groups():
    """Megatron asks whether there is a state of each expert, and its CUDA graphs set what they set in others."""
    module = grouped.GroupedLinear(2, 32, 48, params_dtype=torch.bfloat16, device="cpu")
    assert module.fp8_meta["fp8_checkpoint"] is False and not module.fp8
    module.init_fp8_metadata(num_gemms=2)
    with te.autocast(recipe=DELAYED):
        module(torch.randn(16, 32, dtype=torch.bfloat16), [8, 8])
    module.fp8_meta["fp8_group"], module.fp8_meta["recipe"] = None, DELAYED
    assert module.fp8_meta["scaling_fwd"].amax_history.shape == (4, 6)
    with pytest.raises(RuntimeError, match="was captured with"):
        module.fp8_meta["recipe"] = recipes.DelayedScaling(amax_history_len=5)


@pytest.mark.parametrize("kind", [te.GroupedLinear, grouped.GroupedLinear])
def test_quantizers_of_groups_say_why_they_are_not_there(kind):
    """nn.Module would answer with words of its own. Other names that are missing have those."""
    module = kind(2, 32, 48, params_dtype=torch.bfloat16, device="cpu")
    assert module.quantizers == {}
    with te.autocast(recipe="current"):
        module(torch.randn(32, 32, dtype=torch.bfloat16), [16, 16])
    assert not hasattr(module, "quantizers") and getattr(module, "quantizers", None) is None
    with pytest.raises(NotImplementedError, match=r"GroupedLinear\.quantizers: .* groups together.*; make a quantizer"):
        module.quantizers  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        module.no_such_thing  # noqa: B018
    assert module.weight1.shape == (48, 32)


class OnlyTheBase(TeLiteModule):
    """As callers of Transformer Engine derive a module of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[call-arg]


class WithoutTheBasesInit(TeLiteModule):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


class Made:
    """Whose own __new__ is still called."""

    def __new__(cls, *args, **kwargs):
        made = super().__new__(cls)
        made.arguments = len(args)
        return made


class Derived(te.Linear):
    pass


class DerivedTwice(Derived, Made):
    pass


@pytest.mark.parametrize("kind", [OnlyTheBase, WithoutTheBasesInit, TeLiteModule])
def test_modules_on_the_base_alone_are_refused(kind):
    """Here TransformerEngineBaseModule is TeLiteModule."""
    with pytest.raises(
        NotImplementedError, match=rf"{kind.__name__} is built on .*derive from torch\.nn\.Module and hold"
    ):
        kind()
    assert issubclass(kind, TeLiteModule) and issubclass(te.Linear, TeLiteModule)


def test_modules_on_te_lites_own_are_built():
    for kind in (Derived, DerivedTwice):
        made = kind(32, 48, device="cpu")
        assert isinstance(made, TeLiteModule) and getattr(made, "arguments", 2) == 2
        assert type(copy.deepcopy(made)) is kind and type(pickle.loads(pickle.dumps(made))) is kind


@pytest.mark.parametrize("norm", [te.LayerNorm, te.RMSNorm])
def test_norms_take_dtype(norm):
    made = norm(32, dtype=torch.bfloat16, device="cpu")
    assert made.weight.dtype == made.params_dtype == torch.bfloat16
    assert norm(32, params_dtype=torch.bfloat16, dtype=torch.bfloat16, device="cpu").params_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="pass one"):
        norm(32, params_dtype=torch.float32, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(TypeError, match="no argument 'margin'"):
        norm(32, margin=0, device="cpu")


@pytest.mark.parametrize("norm", [te.LayerNorm, te.RMSNorm])
def test_norms_take_no_margin(norm):
    for margin in (0, {"forward": 0, "backward": 0, "inference": 0}, {}):
        assert norm(32, sm_margin=margin, device="cpu").eps == 1e-5
    for margin in (4, {"forward": 0, "backward": 4}):
        with pytest.raises(NotImplementedError, match="sm_margin=.*leave it out"):
            norm(32, sm_margin=margin, device="cpu")
