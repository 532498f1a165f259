"""Forward and backward on meta and fake tensors: shapes and dtypes, no data, and no trace in real modules."""

import contextlib
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import RECIPES, has_scales, under
from tests.modules.kinds import BF16, FEATURES, LINEARS, MAKE, NORMS, make, run, same


def shapes(kind, recipe, train, first, device):
    """Steps on meta or fake tensors: shapes and dtypes of everything; the module."""
    module = make(kind, device=device)
    for i in range(2):
        x = torch.empty(2, 16, 64, dtype=BF16, device=device, requires_grad=train)
        args = () if kind in NORMS else (None if not first else i == 0,)
        with torch.set_grad_enabled(train), under(recipe):
            y = module(x, *args)
        assert y.shape == (2, 16, FEATURES.get(kind, 96)) and (y.dtype, y.device) == (BF16, x.device)
        if train:
            y.backward(torch.empty_like(y))
            for t in (x, *module.parameters()):
                assert (t.grad.shape, t.grad.dtype, t.grad.device) == (t.shape, t.dtype, t.device)
        assert kind in NORMS or not module._scales._compact().numel()
    return module


def on_fakes(mode="fake"):
    return contextlib.nullcontext() if mode == "meta" else FakeTensorMode()


@pytest.mark.parametrize("first", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_shapes_without_data(mode, kind, recipe, train, first):
    with warnings.catch_warnings(), on_fakes(mode):
        warnings.simplefilter("error")  # as of data_ptr() of a FakeTensor
        module = shapes(kind, recipe, train, first, "meta" if mode == "meta" else "cpu")
    if mode == "meta" and not first:
        module._device = "cpu"
        module.reset_parameters()
        got = run(kind, module, recipe=recipe)
        assert all(value.isfinite().all() and value.device.type == "cpu" for value in got.values())


@pytest.mark.parametrize("train", [pytest.param(True, marks=pytest.mark.gpu), False], ids=["train", "eval"])
@pytest.mark.parametrize("recipe", ["bf16", "current", "mxfp8", "rowwise"])
@pytest.mark.parametrize("kind", MAKE)
def test_shapes_on_fake_gpus(kind, recipe, train):
    """Also without a GPU; there torch itself can run no backward of fake CUDA tensors, nor index them."""
    if train and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with FakeTensorMode():
        shapes(kind, recipe, train, False, "cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("kind", LINEARS)
def test_shapes_on_fake_gpus_of_the_other_recipes(kind, recipe):
    with FakeTensorMode():
        shapes(kind, recipe, True, True, "cuda:0")


@pytest.mark.parametrize("outputs", [("meta", "no autocast"), ("meta", "amp"), ("fake", "amp")], ids=str)
def test_what_else_forward_gives_without_data(outputs):
    mode, amp = outputs
    device = "meta" if mode == "meta" else "cpu"
    with on_fakes(mode), torch.amp.autocast("cpu", enabled=amp == "amp"):
        x = torch.empty(16, 64, device=device, dtype=BF16, requires_grad=True)
        module = make("LayerNormLinear", device=device, return_layernorm_output=True, return_bias=True)
        with under("current"):
            y, bias, normed = module(x, residual=torch.empty(16, 96, device=device, dtype=BF16))
            q = make("Linear", device=device)(x, fp8_output=True, fp8_grad=True)
        assert (y.shape, bias.shape, normed.shape) == ((16, 96), (96,), (16, 64))
        assert isinstance(q, te.QuantizedTensor) and q.shape == (16, 96) and q._data.shape == (16, 96)
        (y.sum() + normed.sum() + q.dequantize().sum()).backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_weight_gradients_without_data(mode, recipe, option):
    device = "meta" if mode == "meta" else "cpu"
    with on_fakes(mode):
        module = make("LayerNormMLP", device=device, **{option: True})
        for weight in (module.fc1_weight, module.fc2_weight):
            weight.main_grad = torch.zeros(weight.shape, device=device)
        with under(recipe):
            y = module(torch.empty(16, 64, dtype=BF16, device=device))
        y.backward(torch.empty_like(y))
        module.backward_dw()
        assert option[0] == "f" or module.fc1_weight.grad.shape == module.fc1_weight.shape


@pytest.mark.parametrize("mode", ["meta", "fake"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_quantized_and_converted_modules_without_data(recipe, mode):
    device = "meta" if mode == "meta" else "cpu"
    with on_fakes(mode):
        with te.quantized_model_init(recipe=recipe):
            modules = [make("LayerNormMLP", device=device)]
        if recipe != "delayed":
            modules.append(torch.nn.Linear(64, 64, dtype=BF16, device=device))
            te.convert_to_float8_training(modules[-1], recipe, tokens=None)
        for module in modules:
            x = torch.empty(2, 16, 64, dtype=BF16, device=device, requires_grad=True)
            with under(recipe):
                y = module(x)
            y.backward(torch.empty_like(y))
            assert (y.shape, y.dtype, y.device, x.grad.shape) == (x.shape, BF16, x.device, x.shape)
            assert all(param.grad.shape == param.shape for param in module.parameters())
    if mode == "meta":
        modules[0].reset_parameters()
        assert isinstance(modules[0].fc1_weight, te.QuantizedTensor)
        assert run("LayerNormMLP", modules[0].to("cpu"), recipe=recipe)["out"].isfinite().all()


@pytest.mark.parametrize("kind", LINEARS)
def test_runs_without_data_leave_real_scales_alone(kind):
    """A real module with live scales: beside fake ones, as a fake itself, and in a mode that takes real tensors."""
    module, other = make(kind, device="cpu"), make(kind, device="cpu")
    run(kind, module, recipe="delayed")
    run(kind, other, recipe="delayed")
    with FakeTensorMode():
        shapes(kind, "delayed", True, False, "cpu")
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(param) for name, param in module.named_parameters()}
        x = torch.empty(16, 64, dtype=BF16)
        with under("delayed"):
            y = torch.func.functional_call(module, fakes, (x,))
        assert isinstance(y, FakeTensor)
    if kind != "split":  # torch cannot place a fake tensor over real parts
        with FakeTensorMode(allow_non_fake_inputs=True), under("delayed"):
            assert isinstance(module(torch.empty(16, 64, dtype=BF16)), FakeTensor)
    shapes(kind, "delayed", True, False, "meta")
    assert_bitwise_equal("state", module.get_extra_state(), other.get_extra_state())
    for seed in (2, 3):
        got, want = (run(kind, m, seed, "delayed") for m in (module, other))
        for name in want:
            assert_bitwise_equal(name, got[name], want[name])
    assert_bitwise_equal("state", module.get_extra_state(), other.get_extra_state())


def test_a_checkpoints_scales_outlast_a_run_on_meta():
    trained = make("Linear", device="cpu")
    run("Linear", trained, recipe="delayed")
    with torch.device("meta"):
        module = make("Linear")
    module.load_state_dict({"_extra_state": trained.get_extra_state()}, strict=False)
    with under("delayed"):
        module(torch.empty(16, 64, dtype=BF16, device="meta")).sum().backward()
    module.load_state_dict({k: v for k, v in trained.state_dict().items() if k[0] != "_"}, assign=True)
    same("Linear", module, trained, "delayed")
    assert has_scales(module.get_extra_state())
