"""CustomRecipe: which quantizer each operand of each GEMM gets from the user's factory."""

import pytest
import torch

import te_lite as te
from examples.stochastic_rounding import E4M3, gradients_at_random
from te_lite.parallel import TensorParallel
from te_lite.quantize import custom
from te_lite.quantize.per_tensor import Current
from te_lite.quantize.quantizer import Site
from te_lite.recipe import CustomRecipe, Float8CurrentScaling, Format

SITE = Site(0, torch.float32, TensorParallel(None, 1, None, False), None, None)
NEAREST = Current(E4M3)


def test_every_operand_is_asked_for_once():
    roles = []
    custom.operands(CustomRecipe(roles.append), SITE)
    assert {(role.gemm, role.operand) for role in roles} == {
        ("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x"),
    }  # fmt: skip
    assert len(roles) == 6 and all(role.site is SITE for role in roles)
    with pytest.raises(AttributeError):
        roles[0].gemm = "fprop"


def test_equal_quantizers_of_a_tensor_are_one_object():
    table = custom.operands(CustomRecipe(lambda role: Current(E4M3)), SITE)
    assert table.fprop.a is table.wgrad.b and table.fprop.b is table.dgrad.b and table.dgrad.a is table.wgrad.a
    by_gemm = {"fprop": NEAREST, "dgrad": Current(E4M3, pow2=True), "wgrad": None}
    table = custom.operands(CustomRecipe(lambda role: by_gemm[role.gemm]), SITE)
    assert table.fprop.a is NEAREST and table.fprop.b is NEAREST
    assert table.dgrad.a.pow2 and table.dgrad.b.pow2
    assert not table.wgrad.a.format.label and table.wgrad.a.target == torch.float32


def test_an_operand_per_gemm():
    """gradients_at_random: y as with rounding to nearest, dw as without fp8, bit for bit; dx as neither."""
    module = te.Linear(64, 48, params_dtype=torch.bfloat16, device="cpu", name="per gemm")
    x, dy = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(32, 48, dtype=torch.bfloat16)
    results = {}
    for name, recipe in (
        ("custom", CustomRecipe(gradients_at_random)),
        ("nearest", Float8CurrentScaling(fp8_format=Format.E4M3)),
        ("plain", "bf16"),
    ):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = module(leaf)
        y.backward(dy)
        results[name] = y.detach(), leaf.grad, module.weight.grad
        if name == "custom":
            rows = {
                row["gemm"]: (row["recipe"], row["operands"])
                for row in te.overlap_report()
                if row["module"] == "per gemm"
            }
    (y, dx, dw), nearest, unquantized = results["custom"], results["nearest"], results["plain"]
    assert torch.equal(y, nearest[0]) and torch.equal(dw, unquantized[2])
    assert not torch.equal(dx, nearest[1]) and not torch.equal(dx, unquantized[1])
    assert rows == {
        "fprop": ("custom", "e4m3 x e4m3"),
        "dgrad": ("custom", "e4m3 x e4m3"),
        "wgrad": ("custom", "bf16 x bf16"),
    }


@pytest.mark.parametrize("first", [True, False])
def test_a_weight_kept_for_fprop_does_not_serve_another_dgrad(first):
    """is_first_microbatch changes no number where dgrad takes the weight from another quantizer than fprop."""

    def qfactory(role):
        return None if (role.gemm, role.operand) == ("dgrad", "w") else NEAREST

    module = te.Linear(64, 48, params_dtype=torch.float32, device="cpu")
    x, dy = torch.randn(32, 64), torch.randn(32, 48)
    grads = []
    for flag in (None, True, first):
        leaf = x.clone().requires_grad_()
        with te.autocast(recipe=CustomRecipe(qfactory)):
            module(leaf, is_first_microbatch=flag).backward(dy)
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_plans_are_built_once_for_equal_recipes():
    asked = []

    def qfactory(role):
        asked.append(role)
        return NEAREST

    module = te.Linear(32, 32, params_dtype=torch.float32, device="cpu")
    for _ in range(3):
        with te.autocast(recipe=CustomRecipe(qfactory)):
            module(torch.randn(16, 32))
    assert len(asked) == 6
    with te.autocast(recipe=CustomRecipe(lambda role: qfactory(role))):
        module(torch.randn(16, 32))
    assert len(asked) == 12


@pytest.mark.parametrize(
    "wrong", [Current, "current", 8, E4M3, lambda v: v], ids=lambda v: getattr(v, "__name__", type(v).__name__)
)
def test_what_is_no_quantizer_is_refused(wrong):
    module = te.Linear(32, 32, params_dtype=torch.float32, device="cpu")
    with (
        pytest.raises(TypeError, match="qfactory gave .* for x of fprop.*Quantizer.*None"),
        te.autocast(recipe=CustomRecipe(lambda role: wrong)),
    ):
        module(torch.randn(16, 32))
