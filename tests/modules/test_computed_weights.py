"""Weights that are not the module's own parameter in every step: computed ones, replaced ones."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import te_lite as te
from te_lite.modules import base
from te_lite.quantize.params import weight_quantizer
from te_lite.quantize.tensor import QuantizedTensor, quantized
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import FP8, under

K = 64
NAMES = {te.Linear: "weight", te.LayerNormLinear: "weight", te.LayerNormMLP: "fc1_weight"}
KINDS = list(NAMES)


def make(kind=te.Linear, device="cpu", **kw):
    return kind(K, K, device=device, params_dtype=torch.bfloat16, **kw)


def draw(device="cpu", rows=K):
    return torch.randn(rows, K, device=device).bfloat16()


class Scaled(nn.Module):
    """weight * factor, a new tensor in each forward."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, weight):
        return weight * self.factor


# Weights that depend on the step: how a module gets them, and how the next step's are made.


def parametrized(module, name):
    scaled = Scaled()
    parametrize.register_parametrization(module, name, scaled)

    def change():
        scaled.factor *= -1.5

    return change


def weight_normed(module, name):
    parametrizations.weight_norm(module, name)
    magnitude = getattr(module.parametrizations, name).original0

    def change():
        magnitude.data.mul_(-1.5)

    return change


def pruned(module, name):
    prune.random_unstructured(module, name, amount=0.5)

    def change():
        getattr(module, f"{name}_mask").data.neg_()

    return change


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["current", "blockwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("how", [parametrized, weight_normed, pruned])
@pytest.mark.parametrize("kind", KINDS)
def test_false_quantizes_a_computed_weight_again(kind, how, recipe, device):
    """Its version is 0 in each forward and its memory that of an earlier one, which is free again."""
    module, x = make(kind, device), draw(device)
    change = how(module, NAMES[kind])
    for i in range(8):
        with torch.no_grad(), under(recipe):
            got = module(x, is_first_microbatch=i == 0)
            assert_bitwise_equal(f"step {i}", got, module(x))
            module(x, is_first_microbatch=i < 4)  # what None forgot is kept again
        change()


@pytest.mark.parametrize("device", device_params())
def test_false_quantizes_again_for_functional_call(device):
    """One network's weights after another's, in memory that returns."""
    module, x = make(device=device, bias=False), draw(device)
    for i in range(8):
        weight = draw(device)
        with torch.no_grad(), under("current"):
            got = torch.func.functional_call(module, {"weight": weight}, (x,), {"is_first_microbatch": i == 0})
            fresh = make(device=device, bias=False)
            fresh.weight.copy_(weight)
            assert_bitwise_equal(f"step {i}", got, fresh(x))
        del weight


def quantizations(monkeypatch):
    """How many times a weight was quantized to be kept."""
    count = []
    names = base.WeightCache.get.__globals__
    plain = names["plain"]
    monkeypatch.setitem(names, "plain", lambda w, **named: count.append(1) or plain(w, **named))
    return count


@pytest.mark.parametrize("split", [None, ("q", "k"), {"q": 16, "k": 48}])
def test_the_same_tensor_is_quantized_once(split, monkeypatch):
    """Parameters, also joined ones wherever they lie; a computed weight while it is one tensor."""
    module, x, count = make(parameters_split=split), draw(), quantizations(monkeypatch)
    if split:
        module.q_weight.data = module.q_weight.data.clone()  # no longer beside the other: joining copies
    with torch.no_grad(), under("current"):
        for first in (True, False, False):
            module(x, is_first_microbatch=first)
        assert len(count) == 1
        if split is None:
            parametrize.register_parametrization(module, "weight", Scaled())
            with parametrize.cached():
                for first in (True, False, False):
                    module(x, is_first_microbatch=first)
            assert len(count) == 2


def test_parts_are_compared_one_by_one():
    """Two parts that change their places have the versions and the sum of versions that they had."""
    module, x = make(parameters_split=("q", "k")), draw()
    with torch.no_grad(), under("current"):
        module(x, is_first_microbatch=True)
        module.q_weight, module.k_weight = module.k_weight, module.q_weight
        assert_bitwise_equal("swapped", module(x, is_first_microbatch=False), module(x))


def test_a_kept_weight_does_not_hold_what_it_was_made_of():
    module, x, weight = make(bias=False), draw(), draw()
    with torch.no_grad(), under("current"):
        torch.func.functional_call(module, {"weight": weight}, (x,), {"is_first_microbatch": True})
    held = weakref.ref(weight)
    del weight
    assert held() is None


def test_inference_tensors_have_no_version():
    """A weight that is computed in inference mode is quantized in each call."""
    module, x = make(), draw()
    scaled = Scaled()
    parametrize.register_parametrization(module, "weight", scaled)
    with torch.inference_mode(), under("current"):
        for first in (True, False, False):
            got = module(x, is_first_microbatch=first)
            assert_bitwise_equal(f"{first}", got, module(x))
            scaled.factor *= -1.5


# Replaced parameters


def built(monkeypatch):
    """How many times plans were built."""
    count, build = [], base.build_plans
    monkeypatch.setattr(base, "build_plans", lambda *args: count.append(1) or build(*args))
    return count


def quantized_weight(kind, recipe="current"):
    with te.quantized_model_init(recipe=recipe):
        return getattr(make(kind), NAMES[kind])


def by_setattr(module, name, new):
    setattr(module, name, new)


def by_assign(module, name, new):
    module.load_state_dict({name: new}, strict=False, assign=True)


def by_dict(module, name, new):
    """As torch.func.functional_call and accelerate do it."""
    module._parameters[name] = new


WAYS = [by_setattr, by_assign, by_dict]


@pytest.mark.parametrize("replace", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_parameter_replaced_by_a_plain_one(kind, replace):
    """Refused as it is before the first run."""
    with te.quantized_model_init(recipe="current"):
        module = make(kind)
    with under("current"):
        module(draw()).sum().backward()
    replace(module, NAMES[kind], nn.Parameter(torch.empty_like(getattr(module, NAMES[kind]).dequantize()).normal_()))
    with under("current"), pytest.raises(RuntimeError, match="quantized_model_init"):
        module(draw())


@pytest.mark.parametrize("replace", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FP8)
def test_a_plain_parameter_replaced_by_a_quantized_one(recipe, kind, replace):
    """Its gradient comes and torch.compile refuses it, as if it had been there from the start."""
    module, fresh, x = make(kind), make(kind), draw()
    fresh.load_state_dict(module.state_dict())
    with under(recipe):
        module(x, is_first_microbatch=True).sum().backward()
    module.zero_grad()
    new = quantized_weight(kind)
    replace(module, NAMES[kind], new)
    setattr(fresh, NAMES[kind], nn.Parameter(new.detach().clone()))
    found = []
    for m in (module, fresh):
        leaf = x.clone().requires_grad_()
        with under("current"):
            y = m(leaf, is_first_microbatch=False)
        y.sum().backward()
        found.append((y, leaf.grad, getattr(m, NAMES[kind]).grad))
    assert module._quantized and isinstance(getattr(module, NAMES[kind]), QuantizedTensor)
    for name, got, want in zip(("y", "dx", "dw"), *found, strict=True):
        assert_bitwise_equal(name, got, want)


@pytest.mark.parametrize("replace", WAYS)
def test_a_quantized_parameter_replaced_by_one_of_another_format(replace):
    with te.quantized_model_init(recipe="current"):
        module = make(bias=False)
    x = draw()
    with torch.no_grad(), under("current"):
        module(x)
        new = quantized_weight(te.Linear, "mxfp8")
        replace(module, "weight", new)
        fresh = make(bias=False)
        fresh.weight.copy_(new.dequantize())
        assert_bitwise_equal("y", module(x), fresh(x))


class Sharded(nn.Parameter):
    """What te_lite takes for a DTensor."""

    placements = ()


REPLACED = [("weight", way) for way in WAYS] + [("bias", by_setattr), ("bias", by_assign)]


@pytest.mark.parametrize("name, replace", REPLACED)
def test_a_parameter_replaced_by_a_dtensor(name, replace):
    module = make()
    module(draw())
    replace(module, name, Sharded(getattr(module, name).detach().clone()))
    with pytest.raises(RuntimeError, match="is a DTensor"):
        module(draw())


@pytest.mark.parametrize("new", ["quantized", "sharded"])
@pytest.mark.parametrize("name", ["k_weight", "k_bias"])
def test_a_part_replaced_by_what_cannot_be_joined(name, new):
    module = make(parameters_split={"q": 16, "k": 48})
    module(draw())
    old = getattr(module, name).detach().clone()
    format = weight_quantizer(te.recipe.Float8CurrentScaling())
    setattr(module, name, nn.Parameter(quantized(old, format)) if new == "quantized" else Sharded(old))
    with pytest.raises(RuntimeError, match="parameters_split"):
        module(draw())


def test_plans_are_built_once(monkeypatch):
    """Where nothing is replaced, and where a plain weight follows another."""
    module, x, count = make(), draw(), built(monkeypatch)
    weight = draw()
    for _ in range(3):
        module(x)
        torch.func.functional_call(module, {"weight": weight}, (x,))
    assert len(count) == 1


def test_a_parametrized_module_is_copied():
    module, x = make(), draw()
    parametrizations.weight_norm(module)
    assert_bitwise_equal("copy", copy.deepcopy(module)(x), module(x))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, te.GroupedLinear])
def test_a_computed_weight_and_a_delayed_gradient_are_refused(kind, fused):
    """backward_dw() would give the gradient to a tensor that nobody holds; without gradients there is none to lose."""
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": fused}
    module = te.GroupedLinear(1, K, K, device="cpu", **options) if kind is te.GroupedLinear else make(kind, **options)
    name = NAMES.get(kind, "weight0")
    parametrize.register_parametrization(module, name, Scaled())
    x = torch.randn(16, K, dtype=module.params_dtype)
    args = (x, [16]) if kind is te.GroupedLinear else (x,)
    with pytest.raises(RuntimeError, match="main_grad" if fused else "delay_wgrad_compute"):
        module(*args)
    with torch.no_grad():
        module(*args)
    getattr(module.parametrizations, name).original.requires_grad_(False)
    if fused:
        for param in module.parameters():
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)
    module(*args).sum().backward()  # of a frozen one
