"""Memory that is written to while te_lite still needs it: noticed, or copied before."""

import pytest
import torch

import te_lite as te
from te_lite.quantize.params import weight_quantizer
from te_lite.quantize.tensor import quantized
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import RECIPES, under

K, M = 64, 48
SPLIT = (te.Linear, te.LayerNormLinear)
KINDS = (te.Linear, te.LayerNormLinear, te.LayerNormMLP)


def draw(device="cpu"):
    return torch.randn(M, K, device=device).bfloat16()


def make(kind, device="cpu", **options):
    return kind(K, K, device=device, params_dtype=torch.bfloat16, **options)


# Between forward and backward, to a part of a split weight

FROZEN = [("q", "k", "v"), ("q",), ("k", "v"), ()]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("written", ["q", "v"])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("recipe", ["bf16", "current"])
@pytest.mark.parametrize("kind", SPLIT)
def test_a_write_to_a_part_is_noticed(kind, recipe, frozen, written, beside, device):
    """Frozen or not; also where the gradient of x alone is asked for, so that the parts' own never runs; and where the
    parts do not lie side by side, as an undivided weight's is."""
    module = make(kind, device, parameters_split={"q": 16, "k": 16, "v": 32})
    for name in frozen:
        module.get_parameter(f"{name}_weight").requires_grad_(False)
    if not beside:
        module.k_weight.data = module.k_weight.data.clone()
    for only_x in (False, True):
        x = draw(device).requires_grad_()
        with under(recipe):
            y = module(x)
        with torch.no_grad():
            module.get_parameter(f"{written}_weight").mul_(2)
        with pytest.raises(RuntimeError, match="between forward and backward"):
            torch.autograd.grad(y.sum(), x) if only_x else y.sum().backward()


@pytest.mark.parametrize("kind", SPLIT)
def test_a_write_that_no_gradient_needs_is_none(kind):
    """Biases alone are trained, in a first layer: the weight is not read again; nor are biases."""
    for frozen in (True, False):
        module = make(kind, parameters_split=("q", "k"))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not frozen or name.endswith("_bias") and "norm" not in name)
        y = module(draw())
        with torch.no_grad():
            (module.q_weight if frozen else module.q_bias).mul_(2)
        y.sum().backward()
        assert module.q_bias.grad is not None


# After backward, before backward_dw()

# What leaves no trace in a tensor's version: noticing alone would miss it.
WRITES = {
    "copy_": lambda t: t.detach().normal_(),
    "data": lambda t: t.data.normal_(),
    "numpy": lambda t: t.detach().view(torch.int16).cpu().numpy().fill(0x4000),
}


def test_what_leaves_no_trace():
    """If the last two left one, they could be noticed and no copy would be needed."""
    for how, traces in (("copy_", True), ("data", False), ("numpy", False)):
        t = draw()
        WRITES[how](t)
        assert (t._version > 0) == traces, how


def weights(module):
    return [p for name, p in module.named_parameters() if name.endswith("weight") and "norm" not in name]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("sink", ["grad", "main_grad"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_weight_gradients_are_of_what_backward_saw(kind, recipe, sink, how, device):
    """x, dy, the output and the returned norm's output are written to when backward() is over."""
    if (how, device) == ("numpy", "cuda"):
        pytest.skip("numpy shares no memory with a GPU")
    options = {} if kind is te.Linear else {"return_layernorm_output": True}
    options["fuse_wgrad_accumulation"] = sink == "main_grad"
    late, now = make(kind, device, delay_wgrad_compute=True, **options), make(kind, device, **options)
    late.load_state_dict(now.state_dict())
    x, dy = draw(device), draw(device)
    for module, keeps in ((late, False), (now, True)):
        for weight in weights(module):
            weight.main_grad = torch.zeros(weight.shape, device=device)
        mine, grad = x.clone().requires_grad_(), dy.clone()
        with under(recipe):
            outputs = module(mine)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs[0], grad)
        for t in (mine, grad, *outputs) if not keeps else ():
            WRITES[how](t)
    late.backward_dw()
    for got, want in zip(weights(late), weights(now), strict=True):
        name = "grad" if sink == "grad" else "main_grad"
        assert_bitwise_equal(name, getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("given", ["x", "dy"])
def test_quantized_tensors_that_can_be_written_to(given):
    """They are used as they are; one without a quantizer is read only."""
    quantizer = weight_quantizer(te.recipe.Float8CurrentScaling(fp8_format=te.recipe.Format.E4M3))
    late, now, x, dy = make(te.Linear, delay_wgrad_compute=True), make(te.Linear), draw(), draw()
    late.load_state_dict(now.state_dict())
    for module in (now, late):
        mine, grad = quantized(x, quantizer), quantized(dy, quantizer)
        with under(te.recipe.Float8CurrentScaling(fp8_format=te.recipe.Format.E4M3)):
            y = module(mine if given == "x" else x)
        y.backward(grad if given == "dy" else dy)
        if module is late:
            (mine if given == "x" else grad).quantize_(draw())
    late.backward_dw()
    assert_bitwise_equal("dw", late.weight.grad, now.weight.grad)


def test_a_gradient_that_two_layers_share():
    """An addition hands both the same dy, and the second writes to it in place, as a collective may."""

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            dy.data.mul_(2)  # torch.distributed.all_reduce(dy) leaves no trace either
            return dy

    late, now, x, dy = make(te.Linear, delay_wgrad_compute=True), make(te.Linear), draw(), draw()
    late.load_state_dict(now.state_dict())
    now(x).backward(dy)
    early = Reduced.apply(x.clone().requires_grad_())  # made first, so that its backward comes last
    (late(x) + early).backward(dy)
    late.backward_dw()
    assert_bitwise_equal("dw", late.weight.grad, now.weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_module_made_is_not_copied(kind, monkeypatch):
    """In bf16: dy of the last linear, and x of a first one without a norm."""
    copied, clone = [], torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t, *a, **k: copied.append(tuple(t.shape)) or clone(t, *a, **k))
    module = make(kind, delay_wgrad_compute=True)
    x, dy = draw().requires_grad_(), draw()
    module(x).backward(dy)
    assert copied == [(M, K)] * (2 if kind is te.Linear else 1)
