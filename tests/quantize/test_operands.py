"""What a GEMM does with operands that it cannot take as they are."""

import pytest
import torch

import te_lite as te
from te_lite.quantize.blockwise import SQUARES, VECTORS, Blocks
from te_lite.recipe import CustomRecipe, Float8CurrentScaling
from tests.harness import RECIPES, under

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def run(module, x, recipe):
    x = x.detach().requires_grad_() if not isinstance(x, te.QuantizedTensor) else x
    module.zero_grad(set_to_none=True)
    with under(recipe):
        y = module(x)
    y.float().square().sum().backward()
    return y.detach().float(), module.weight.grad.float()


def close(got, want, bound=0.1):
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("usage", [{"columnwise": False}, {"rowwise": False}])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "blockwise"])
def test_an_input_that_lacks_a_layout(recipe, usage):
    module, x = te.Linear(64, 96, params_dtype=BF16), torch.randn(32, 64, dtype=BF16)
    quantizer = {
        "current": lambda: te.Float8CurrentScalingQuantizer(E4M3, **usage),
        "mxfp8": lambda: te.MXFP8Quantizer(E4M3, **usage),
        "blockwise": lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usage),
    }[recipe]()
    close(run(module, quantizer(x), recipe), run(module, x, "bf16"))


def test_square_blocks_on_the_side_that_has_no_gemm():
    module, x = te.Linear(256, 128, params_dtype=BF16), torch.randn(64, 256, dtype=BF16)
    recipe = CustomRecipe(lambda role: Blocks(SQUARES if role.operand != "w" else VECTORS))
    close(run(module, x, recipe), run(module, x, "bf16"))


@pytest.mark.parametrize("flag", ["fp8_output", "fp8_grad"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_results_are_given_or_refused(recipe, flag):
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    offered = recipe in ("bf16", "delayed", "current")
    module = te.Linear(64, 96, params_dtype=BF16)
    with under(recipe):
        if not offered:
            with pytest.raises(ValueError, match=flag):
                module(x, **{flag: True})
            return
        y = module(x, **{flag: True})
        assert isinstance(y, te.QuantizedTensor) == (recipe != "bf16" and flag == "fp8_output")
    misfit = te.Linear(40, 64, params_dtype=BF16)  # in high precision, and the report says why
    with under(recipe):
        assert type(misfit(x[:, :40], **{flag: True})) is torch.Tensor


def test_a_cached_weight_serves_both_gemms_whatever_becomes_of_the_parameter():
    for recipe in ("current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp"):
        module, x = te.Linear(64, 96, params_dtype=BF16), torch.randn(32, 64, dtype=BF16, requires_grad=True)

        def dx(first, module=module, x=x, recipe=recipe):
            with under(recipe):
                y = module(x, is_first_microbatch=first)
            return torch.autograd.grad(y.float().sum(), x)[0]

        before = dx(True)
        module.weight.data.mul_(2)  # leaves no trace
        assert torch.equal(dx(False), before), recipe
        assert not torch.equal(dx(True), before), recipe


def test_writing_to_a_quantized_parameter():
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        weight = te.Linear(64, 96, params_dtype=BF16).weight
    with torch.no_grad():
        weight[:4] = 0.5
        assert (weight.dequantize()[:4] - 0.5).abs().max() <= 0.5 * 2**-4
        with pytest.raises(RuntimeError):
            weight.copy_(te.Float8CurrentScalingQuantizer(E4M3)(torch.randn(64, 96, dtype=BF16)))


@pytest.mark.parametrize("wrong", [3, None, E4M3])
def test_what_is_no_recipe(wrong):
    for ask in (te.check_recipe_support, te.required_multiple):
        with pytest.raises(TypeError, match="recipe"):
            ask(wrong)
