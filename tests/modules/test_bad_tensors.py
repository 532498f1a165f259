"""Tensors that no entry point can take: an error of te_lite's own that names the argument, never a bare Python one."""

import copy
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import te_lite as te
from te_lite.quantize.custom import Role
from te_lite.testing.distributed import device_params
from tests.harness import RECIPES, step, under

PACKAGE = str(Path(te.__file__).parent)
E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
devices = pytest.mark.parametrize("device", device_params())


def values(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def module(kind, **kw):
    sizes = (64, 64) if kind.endswith("Linear") else (64, 96) if kind.endswith("MLP") else (64,)
    return getattr(te, kind)(*sizes, params_dtype=BF16, **{"device": "cpu", **kw})


def refused(call, *words):
    """call() raises an error from a file of te_lite, short, with these words."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    message = str(caught.value)
    assert last.filename.startswith(PACKAGE) and last.line.startswith("raise"), f"{last}: {message}"
    assert all(word in message for word in words) and len(message) < 500, message
    return message


BAD = {
    "numpy": np.ones((4, 64), np.float32),
    "list": [[1.0] * 64] * 4,
    "float": 1.0,
    "none": None,
    "str": "x",
    "0-dim": torch.tensor(1.0, dtype=BF16),
    "int": torch.ones(4, 64, dtype=torch.int64),
    "bool": torch.ones(4, 64, dtype=torch.bool),
    "complex": torch.ones(4, 64, dtype=torch.complex64),
}
MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNorm", "RMSNorm")
QUANTIZERS = {
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3),
    "given": lambda: te.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "blockwise": lambda: te.Float8BlockQuantizer(E4M3),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", MODULES)
def test_inputs_of_modules(kind, bad):
    for recipe in ("bf16", "current"):
        with under(recipe):
            refused(lambda: module(kind)(BAD[bad]), kind, "input")


@pytest.mark.parametrize("bad", [name for name in BAD if name != "none"])
@pytest.mark.parametrize("kind", MODULES[:3])
def test_residuals(kind, bad):
    refused(lambda: module(kind)(values(4, 64), residual=BAD[bad]), "residual")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_inputs_of_quantizers(kind, bad):
    quantizer = QUANTIZERS[kind]()
    refused(lambda: quantizer(BAD[bad]), "tensor")
    if kind == "given":
        refused(lambda: quantizer.calibrate(BAD[bad]), "tensor")
    if bad != "0-dim":  # which expands
        refused(lambda: quantizer.update_quantized(BAD[bad], quantizer(values(4, 64))), "src")
    message = refused(lambda: quantizer.update_quantized(values(4, 64), BAD[bad]), "dst")
    assert "tensor([" not in message and "1.0, 1.0" not in message
    refused(lambda: quantizer.make_empty(()), "()")
    refused(lambda: setattr(quantizer(values(4, 64)), "data", BAD[bad]), ".data")


def test_a_destination_of_another_format_is_named():
    dst = te.MXFP8Quantizer(E4M3)(values(4, 64))
    refused(lambda: QUANTIZERS["current"]().update_quantized(values(4, 64), dst), "dst", "mxfp8", "e4m3")


@pytest.mark.parametrize("bad", BAD)
def test_scales_of_quantizers(bad):
    refused(lambda: te.Float8Quantizer(BAD[bad], torch.zeros(1), E4M3), "scale")
    refused(lambda: te.Float8Quantizer(torch.ones(1), BAD[bad], E4M3), "amax")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_another_device():
    """A kernel would read the CPU's addresses."""
    x = values(4, 64).cuda()
    refused(lambda: QUANTIZERS["given"]()(x), "scale", "cuda")
    for kind in ("LayerNorm", "RMSNorm"):
        refused(lambda kind=kind: module(kind)(x), "weight", "cuda")
    for name in ("bias", "layer_norm_weight", "layer_norm_bias"):
        linear = module("LayerNormLinear", device="cuda")
        setattr(linear, name, nn.Parameter(getattr(linear, name).detach().cpu()))
        refused(lambda linear=linear: linear(x), name, "cuda")


# Parameters that somebody replaced


def turned(t):
    return t.t().contiguous().t() if t.dim() == 2 else strided(t)


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


def expanded(t):
    return t.flatten()[:1].expand(t.shape)


REPLACED = {
    "turned": turned,
    "strided": strided,
    "expanded": expanded,
    "short": lambda t: t[..., :32].clone(),
    "deep": lambda t: t[None].clone(),
    "complex": lambda t: t.to(torch.complex64),
    "int": lambda t: t.to(torch.int64),
    "meta": lambda t: t.to("meta"),
}
PARAMETERS = [
    ("Linear", "weight"), ("Linear", "bias"), ("LayerNormLinear", "weight"), ("LayerNormLinear", "layer_norm_weight"),
    ("LayerNormLinear", "layer_norm_bias"), ("LayerNormMLP", "fc1_weight"), ("LayerNormMLP", "fc2_weight"),
    ("LayerNormMLP", "fc2_bias"), ("LayerNormMLP", "layer_norm_weight"),
]  # fmt: skip
COPIED = ("turned", "strided", "expanded")  # of a linear's bias


def replaced(kind, name, how, device="cpu", **kw):
    made = module(kind, device=device, **kw)
    value = REPLACED[how](getattr(made, name).detach())
    setattr(made, name, nn.Parameter(value, requires_grad=value.is_floating_point() or value.is_complex()))
    return made


@devices
@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("kind, name", PARAMETERS)
def test_parameters_are_named(kind, name, how, device):
    x = values(4, 64).to(device)
    for recipe in ("bf16", "current"):
        made = replaced(kind, name, how, device)
        with under(recipe):
            if how in COPIED and name.endswith("bias") and "norm" not in name:
                assert made(x).shape == x.shape
            else:
                weight_itself = name.endswith("weight") and "norm" not in name and how not in COPIED
                refused(lambda made=made: made(x), kind, *(() if weight_itself else (name,)))


@devices
@pytest.mark.parametrize("how", ["strided", "expanded"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_strided_bias_is_the_same_bias(recipe, how, device):
    made = replaced("LayerNormLinear", "bias", how, device)
    packed = copy.deepcopy(made)
    packed.bias = nn.Parameter(made.bias.detach().contiguous())
    want, got = (step(m, values(4, 64), values(4, 64, seed=1), recipe) for m in (packed, made))
    assert all(torch.equal(got[name], want[name]) for name in want)


@devices
@pytest.mark.parametrize("how", ["strided", "expanded", "meta"])
@pytest.mark.parametrize("kind, name", [("LayerNorm", "weight"), ("LayerNorm", "bias"), ("RMSNorm", "weight")])
def test_parameters_of_norms(kind, name, how, device):
    """A kernel would read past them."""
    refused(lambda: replaced(kind, name, how, device)(values(4, 64).to(device)), f"{kind}.{name}")


def test_a_weight_that_lost_its_layout_after_a_step():
    """.data tells no one; the kernel's check calls it weight."""
    made, x = module("Linear"), values(4, 64)
    for recipe in ("bf16", "current"):
        with under(recipe):
            made(x)
    made.weight.data = turned(made.weight.data)
    with under("current"):
        refused(lambda: made(x), "weight has shape (64, 64), strides (1, 64)", "weight.reshape")


MAIN_GRADS = {
    "a list": [1.0],
    "int": torch.zeros(64, 64, dtype=torch.int32),
    "complex": torch.zeros(64, 64, dtype=torch.complex64),
    "fp8": torch.zeros(64, 64).to(E4M3),
    "expanded": torch.zeros(1).expand(64, 64),
    "meta": torch.zeros(64, 64, device="meta"),
    "short": torch.zeros(64, 32),
}


@pytest.mark.parametrize("bad", MAIN_GRADS)
def test_main_grads(bad):
    made = module("Linear", fuse_wgrad_accumulation=True)
    made.weight.main_grad = MAIN_GRADS[bad]
    refused(lambda: made(values(4, 64)), "main_grad")


@pytest.mark.parametrize("recipe", ["bf16", "current", "blockwise"])
@pytest.mark.parametrize("layout", [turned, strided])
def test_a_strided_main_grad_is_added_to(layout, recipe):
    made = module("Linear", fuse_wgrad_accumulation=True)
    found = []
    for change in (lambda t: t, layout):
        made.weight.main_grad = change(torch.ones(64, 64))
        step(made, values(4, 64), values(4, 64, seed=1), recipe)
        found.append(made.weight.main_grad)
    assert torch.equal(*found) and bool((found[0] != 1).any())


# Messages do not print what was given


BIG = torch.arange(4096.0)
PRINTS = {
    "recipe": lambda: te.autocast(recipe=BIG).__enter__(),
    "parameters_split": lambda: module("Linear", parameters_split=[BIG]),
    "activation_params": lambda: module("LayerNormMLP", activation_params={"limit": BIG}),
    "convert_to_float8_training": lambda: te.convert_to_float8_training({"weight": BIG}),
    "qfactory": lambda: _custom(BIG),
    "ub_cfgs": lambda: _ub(BIG),
    "ub_cfgs holds": lambda: _ub([BIG]),
    "qkv_fprop": lambda: _ub({"qkv_fprop": BIG}),
}


def _custom(result):
    from te_lite.quantize.custom import _ask

    _ask(te.recipe.CustomRecipe(qfactory=lambda role: result), Role("fprop", "x", None))


def _ub(cfgs):
    from te_lite.overlap.config import layer_methods

    layer_methods(cfgs, 1)


@pytest.mark.parametrize("name", PRINTS)
def test_messages_print_no_tensor(name):
    """At most its beginning and its end."""
    message = refused(PRINTS[name], name)
    assert "tensor(" not in message or "..." in message and len(message) < 200
