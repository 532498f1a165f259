"""forward(..., residual=...): added to the output, whoever sums it, and handed its gradient."""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import RECIPES, under

MODULES = {
    "Linear": lambda **kw: te.Linear(64, 128, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(64, 128, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(64, 128, activation="swiglu", **kw),
}
BF16 = torch.bfloat16


def made(name: str, device: str, **options):
    """(module, x [4, 8, 64], residual like its output), bf16."""
    torch.manual_seed(5)
    module = MODULES[name](params_dtype=BF16, device=device, **options)
    x = torch.randn(4, 8, 64, dtype=BF16, device=device, requires_grad=True)
    width = 64 if name == "LayerNormMLP" else 128
    return module, x, torch.randn(4, 8, width, dtype=BF16, device=device, requires_grad=True)


def results(module, x, out) -> dict[str, torch.Tensor]:
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=BF16, device=out.device).view(out.shape))
    grads = {name: p.grad.clone() for name, p in module.named_parameters()} | {"x": x.grad.clone()}
    module.zero_grad()
    x.grad = None
    return grads | {"out": out.detach()}


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_it_is_added_and_gets_the_gradient(name, recipe, device):
    (module, x, residual), (twin, y, added) = (made(name, device, bias=recipe != "current") for _ in "12")
    with under(recipe):
        got, want = module(x, residual=residual), twin(y) + added
    got, want = results(module, x, got), results(twin, y, want)
    for key in want:
        assert_bitwise_equal(key, got[key], want[key])
    assert_bitwise_equal("residual", residual.grad, added.grad)


def test_the_input_itself():
    """Of a block x + f(x): both ways of its gradient."""
    module, x, _ = made("LayerNormMLP", "cpu")
    want, got = results(module, x, x + module(x)), results(module, x, module(x, residual=x))
    for key in want:
        assert_bitwise_equal(key, got[key], want[key])


def test_checkpointed_and_without_gradient():
    module, x, residual = made("LayerNormMLP", "cpu")
    want = results(module, x, module(x, residual=residual))
    wanted, residual.grad = residual.grad, None
    module.checkpoint = True
    got = results(module, x, module(x, residual=residual))
    for key in want:
        assert_bitwise_equal(key, got[key], want[key])
    assert_bitwise_equal("residual", residual.grad, wanted)
    with torch.no_grad():
        assert_bitwise_equal("no grad", module(x, residual=residual), want["out"])
    frozen = residual.detach()
    module(x, residual=frozen).sum().backward()
    assert frozen.grad is None


def test_strided_residuals_and_any_leading_shape():
    module, x, residual = made("Linear", "cpu")
    turned = residual.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise_equal("strided", module(x, residual=turned), module(x, residual=residual))
    flat = module(x.view(-1, 64), residual=residual.view(-1, 128))
    assert_bitwise_equal("flat", flat, module(x, residual=residual).view(-1, 128))
    kept = residual.detach().clone()
    module(x, residual=residual)
    assert_bitwise_equal("not written to", residual.detach(), kept)
    nothing = module(x[:0], residual=residual[:0])
    assert nothing.shape == (0, 8, 128)


@pytest.mark.parametrize("name", MODULES)
def test_anything_else_is_refused(name):
    module, x, residual = made(name, "cpu")
    width = residual.shape[-1]
    for wrong in (residual[0], residual[:, :, :-1], residual.float(), residual.transpose(0, 1), residual.to("meta")):
        with pytest.raises(ValueError, match=rf"residual .* for an output .*4, 8, {width}.*torch.bfloat16.*'cpu'"):
            module(x, residual=wrong)


def test_a_quantized_residual_and_a_quantized_gradient():
    """Both count as what they stand for; a gradient that is kept can be added to."""
    a, x, residual = made("Linear", "cpu")
    b = te.Linear(128, 128, params_dtype=BF16, device="cpu")
    with under("current"):
        quantized = te.Linear(64, 128, params_dtype=BF16, device="cpu")(x.detach(), fp8_output=True)
        assert isinstance(quantized, te.QuantizedTensor)
        got, want = a(x, residual=quantized), a(x, residual=quantized.dequantize())
        assert_bitwise_equal("quantized residual", got, want)
        for _ in range(2):  # micro-batches
            b(a(x, residual=residual), fp8_grad=True).sum().backward()
    assert type(residual.grad) is torch.Tensor


def test_a_refusal_changes_nothing():
    """Of a pass of delayed scaling: its backward scales move as if nothing had been refused."""
    scales = []
    for refused in (False, True):
        module, x, residual = made("Linear", "cpu")
        for _ in range(3):
            with under("delayed"):
                if refused:
                    with pytest.raises(ValueError, match="must be like it"):
                        module(x, residual=residual.float())
                out = module(x, residual=residual)
            out.backward(torch.full_like(out, 60.0))
        scales.append(module.get_extra_state())
    assert_bitwise_equal("state", *scales)
    assert scales[0].unique().numel() > 3
    with pytest.raises(ValueError, match="residual <class 'float'> for an output"):
        module(x, residual=1.0)
