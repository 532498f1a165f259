"""Gradients that overflow in fp16: a GradScaler must see that they did, whatever quantizes them."""

import pytest
import torch
from torch import nn

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal

RECIPES = [name for name in te.recipe.available() if te.recipe.from_name(name).is_fp8]
OPTIONS = {"bias": False, "params_dtype": torch.float16}
MODULES = {
    "Linear": lambda device: te.Linear(64, 64, device=device, **OPTIONS),
    "LayerNormLinear": lambda device: te.LayerNormLinear(64, 64, device=device, **OPTIONS),
    "LayerNormMLP": lambda device: te.LayerNormMLP(64, 128, activation="swiglu", device=device, **OPTIONS),
    "GroupedLinear": lambda device: te.GroupedLinear(2, 64, 64, device=device, **OPTIONS),
}


def gradients(module, recipe, dy):
    """{"x", names of parameters: gradients} of one step."""
    torch.manual_seed(0)
    x = torch.randn(32, 64, dtype=torch.float16).to(dy.device).requires_grad_()
    more = ([16, 16],) if isinstance(module, te.GroupedLinear) else ()
    module.zero_grad()
    with te.autocast(recipe=recipe):
        y = module(x, *more)
    y.backward(dy)
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("device", device_params())
def test_an_infinite_gradient_is_seen_in_all_that_read_it(name, recipe, value, device):
    module, dy = MODULES[name](device), torch.randn(32, 64, dtype=torch.float16, device=device)
    dy[3, 5] = value
    given = dy.clone()
    for key, grad in gradients(module, recipe, dy).items():
        if key != "weight1":  # of the group that has other tokens
            assert not grad.isfinite().all(), key
    assert_bitwise_equal("dy", dy, given)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", device_params())
def test_a_product_that_overflows_within_the_mlp_is_seen(recipe, device):
    """dy is finite, dy @ w2 is not, nor would be what is quantized of it."""
    module, dy = MODULES["LayerNormMLP"](device), torch.randn(32, 64, dtype=torch.float16, device=device)
    with torch.no_grad():
        module.fc2_weight[:, 7] = 1e3
    dy[3] = 5e4
    grads = gradients(module, recipe, dy)
    assert not grads["fc1_weight"].isfinite().all() and not grads["x"].isfinite().all()


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise"])
def test_a_grad_scaler_backs_off(recipe):
    """Without a bias, whose gradient is a sum of dy as it is, nothing else would tell it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64, bias=False))
    te.convert_to_float8_training(model, recipe, minimum_size=0)
    ids, targets = torch.randint(256, (128,)), torch.randint(64, (128,))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(model.parameters())
    before = model[1].weight.detach().clone()
    with torch.autocast("cpu", torch.float16):
        y = model(ids)
    loss = nn.functional.cross_entropy(y.float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**23
    assert_bitwise_equal("weight", model[1].weight.detach(), before)
