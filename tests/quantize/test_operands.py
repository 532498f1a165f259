"""What a GEMM does with operands that it cannot take as they are."""

import pytest
import torch

import te_lite as te
from te_lite.ops.source import plain
from te_lite.quantize.blockwise import SQUARES, VECTORS, Blocks
from te_lite.recipe import CustomRecipe, Float8CurrentScaling
from te_lite.testing.distributed import device_params
from tests.harness import RECIPES, under

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
DEVICES = pytest.mark.parametrize("device", device_params())


def linear(device, *features):
    return te.Linear(*features, params_dtype=BF16, device=device)


def run(module, x, recipe):
    x = x.detach().requires_grad_() if not isinstance(x, te.QuantizedTensor) else x
    module.zero_grad(set_to_none=True)
    with under(recipe):
        y = module(x)
    y.float().square().sum().backward()
    return y.detach().float(), module.weight.grad.float()


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@DEVICES
@pytest.mark.parametrize("usage", [{"columnwise": False}, {"rowwise": False}])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "blockwise"])
def test_an_input_that_lacks_a_layout(recipe, usage, device):
    module, x = linear(device, 64, 96), torch.randn(32, 64, dtype=BF16, device=device)
    make = {
        "current": te.Float8CurrentScalingQuantizer,
        "mxfp8": te.MXFP8Quantizer,
        "blockwise": lambda *args, **kw: te.Float8BlockQuantizer(*args, block_scaling_dim=1, **kw),
    }[recipe]
    lacking = make(E4M3, **usage)(x)
    # Rows with one scale give the columns, so they serve as they are; anything else is dequantized and quantized again.
    serves = recipe == "current" and usage == {"columnwise": False}
    want = run(module, make(E4M3)(x) if serves else lacking.dequantize(), recipe)
    got = run(module, lacking, recipe)
    assert same(got, want) and not same(got, run(module, x, "bf16"))


@DEVICES
def test_square_blocks_on_the_side_that_has_no_gemm(device):
    """y is the product of the dequantized operands, in bf16."""
    module, x = linear(device, 256, 128), torch.randn(64, 256, dtype=BF16, device=device)
    y, _ = run(module, x, CustomRecipe(lambda role: Blocks(SQUARES if role.operand != "w" else VECTORS)))
    a, _ = Blocks(SQUARES).quantize(plain(x))
    b, _ = Blocks(VECTORS).quantize(plain(module.weight.detach()))
    assert torch.equal(y, torch.mm(a.dequantize(), b.dequantize("row").t()).float())
    assert not torch.equal(y, run(module, x, "bf16")[0])


@DEVICES
@pytest.mark.parametrize("flag", ["fp8_output", "fp8_grad"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_results_are_given_or_refused(recipe, flag, device):
    x = torch.randn(32, 64, dtype=BF16, device=device, requires_grad=True)
    offered = recipe in ("bf16", "delayed", "current")
    module = linear(device, 64, 96)
    with under(recipe):
        if not offered:
            with pytest.raises(ValueError, match=flag):
                module(x, **{flag: True})
            return
        y = module(x, **{flag: True})
        assert isinstance(y, te.QuantizedTensor) == (recipe != "bf16" and flag == "fp8_output")
    misfit = linear(device, 40, 64)  # in high precision, and the report says why
    with under(recipe):
        assert type(misfit(x[:, :40], **{flag: True})) is torch.Tensor


@DEVICES
def test_a_cached_weight_serves_both_gemms_whatever_becomes_of_the_parameter(device):
    for recipe in ("current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp"):
        module, x = linear(device, 64, 96), torch.randn(32, 64, dtype=BF16, device=device, requires_grad=True)

        def dx(first, module=module, x=x, recipe=recipe):
            with under(recipe):
                y = module(x, is_first_microbatch=first)
            return torch.autograd.grad(y.float().sum(), x)[0]

        before = dx(True)
        module.weight.data.mul_(2)  # leaves no trace
        assert torch.equal(dx(False), before), recipe
        assert not torch.equal(dx(True), before), recipe


@DEVICES
def test_writing_to_a_quantized_parameter(device):
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        weight = linear(device, 64, 96).weight
    with torch.no_grad():
        weight[:4] = 0.5
        assert (weight.dequantize()[:4] - 0.5).abs().max() <= 0.5 * 2**-4
        with pytest.raises(RuntimeError):
            weight.copy_(te.Float8CurrentScalingQuantizer(E4M3)(torch.randn(64, 96, dtype=BF16, device=device)))


@pytest.mark.parametrize("wrong", [3, None, E4M3])
def test_what_is_no_recipe(wrong):
    for ask in (te.check_recipe_support, te.required_multiple):
        with pytest.raises(TypeError, match="recipe"):
            ask(wrong)
