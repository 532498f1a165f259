"""What a cast sees of a norm or an activation in front of a linear: its fp32 value, or that rounded to bf16.

With an identity for the weight y is the operand of fprop; with one for dy dw, which main_grad holds in fp32, is that of
wgrad. A Linear in fp32 that is given the value, rounded or not, says what either must be, bit for bit.
"""

from dataclasses import dataclass

import pytest
import torch

import te_lite as te
from te_lite.ops import source
from te_lite.ops.activation import Activation
from te_lite.ops.cast import transform
from te_lite.ops.norm import norm_stats
from te_lite.quantize.per_tensor import FORMATS, Current
from te_lite.quantize.quantizer import Quantizer
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import OPTIONS, RECIPES, step, under

N = 64  # tokens and features
BF16 = torch.bfloat16
FP32, ROUNDED = "fp32", "rounded"
SEEN = dict.fromkeys([*RECIPES[1:], *OPTIONS], (FP32, FP32)) | {
    "rowwise_with_gw_hp": (FP32, ROUNDED),  # its weight gradient reads the activations' dtype
    "custom": (FP32, FP32),
    "custom_not_fused": (ROUNDED, ROUNDED),  # a quantizer that does not normalise as it reads
}


@dataclass(frozen=True, slots=True)
class NotFused(Quantizer):
    """Current scaling behind a quantizer that only promises what every Quantizer does."""

    def quantize(self, source, *, row=True, col=False, bias_grad=None):
        return Current(self.format).quantize(source, row=row, col=col, bias_grad=bias_grad)


def recipe_of(name):
    if not name.startswith("custom"):
        return name
    kind = NotFused if name == "custom_not_fused" else Current
    return te.recipe.CustomRecipe(qfactory=lambda role: kind(FORMATS[torch.float8_e4m3fn]))


def draw(seed, device):
    return torch.randn(N, N, generator=torch.Generator().manual_seed(seed)).to(device, BF16)


def norm_in_fp32(module, x):
    """norm(x) of `module`, fp32."""
    gamma, beta = module.layer_norm_weight.detach(), module.layer_norm_bias.detach()
    mean, rstd, _ = norm_stats(x, gamma, beta, 1e-5, False, False, False)
    return transform(source.norm(x, mean, rstd, gamma, beta), hp_dtype=torch.float32).hp


def filled(module, **values):
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).copy_(value)
    return module


def through_a_linear(recipe, value):
    """(operand of fprop in bf16, as y is; operand of wgrad) of fp32 `value`."""
    linear = te.Linear(N, N, bias=False, params_dtype=torch.float32, device=value.device)
    filled(linear, weight=torch.eye(N))
    got = step(linear, value, torch.eye(N), recipe)
    return got["out"].to(BF16), got["weight"]


def trained(module, recipe, x, weight="weight"):
    """(y, dw in fp32) of a step with an identity for dy."""
    for param in module.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)
    with under(recipe):
        out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.eye(N, dtype=BF16, device=x.device))
    return out.detach(), getattr(module, weight).main_grad


def assert_sees(name, recipe, got, value, seen):
    """got: (y, dw) or (y,), of which `seen` says what their GEMMs read of fp32 `value`."""
    exact, rounded = through_a_linear(recipe, value), through_a_linear(recipe, value.to(BF16).float())
    for gemm, result, what, a, b in zip(("fprop", "wgrad"), got, seen, exact, rounded, strict=False):
        assert not torch.equal(a, b), f"{name} {gemm}: this input cannot tell"
        assert_bitwise_equal(f"{name} {gemm} sees {what}", result, a if what == FP32 else b)


def ln_linear(device, **kw):
    kw = {"fuse_wgrad_accumulation": True, "bias": False, "params_dtype": BF16, "device": device, **kw}
    module = te.LayerNormLinear(N, N, **kw)
    return filled(module, weight=torch.eye(N), layer_norm_weight=draw(1, device)[0], layer_norm_bias=draw(2, device)[0])


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", SEEN)
def test_norm(recipe, device):
    seen, recipe = SEEN[recipe], recipe_of(recipe)
    module, x = ln_linear(device), draw(3, device)
    assert_sees("norm", recipe, trained(module, recipe, x), norm_in_fp32(module, x), seen)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", SEEN)
def test_norm_in_front_of_a_frozen_weight(recipe, device):
    """The same y as where the weight is trained."""
    seen, recipe = SEEN[recipe], recipe_of(recipe)
    module, x = ln_linear(device), draw(3, device).requires_grad_()
    module.weight.requires_grad_(False)
    assert_sees("norm", recipe, trained(module, recipe, x)[:1], norm_in_fp32(module, x.detach()), seen)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", SEEN)
def test_norm_that_is_an_output(recipe, device):
    recipe = recipe_of(recipe)
    module, x = ln_linear(device, return_layernorm_output=True), draw(3, device)
    assert_sees("norm", recipe, trained(module, recipe, x), norm_in_fp32(module, x), (ROUNDED, ROUNDED))


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", SEEN)
def test_activation(recipe, activation, device):
    """Never written for a quantizer: all of them read its fp32 value, of h as fc1's GEMM rounded it."""
    seen, recipe = SEEN[recipe], recipe_of(recipe)
    seen = (FP32, seen[1] if recipe == "rowwise_with_gw_hp" else FP32)
    kw = {"bias": False, "params_dtype": BF16, "device": device}
    module = te.LayerNormMLP(N, N, activation=activation, fuse_wgrad_accumulation=True, **kw)
    filled(module, fc2_weight=torch.eye(N))
    first = te.LayerNormLinear(N, len(module.fc1_weight), **kw)
    filled(first, weight=module.fc1_weight)
    x = draw(3, device)
    with under(recipe):
        h = first(x).detach()
    value = transform(source.act(h, Activation.of(activation)), hp_dtype=torch.float32).hp
    assert_sees(activation, recipe, trained(module, recipe, x, "fc2_weight"), value, seen)
