"""Parameters held quantized: what modules make of them, how they are written, that nothing else is kept."""

import contextlib
import copy
import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import te_lite as te
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import build, step, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

# Bytes a weight element with both layouts: data twice; scales are one a tensor, a row and a column, 32 or 128x128.
BYTES = {"delayed": 2, "current": 2, "rowwise": 2, "mxfp8": 2 * 33 / 32, "blockwise": 2}
RECIPES = tuple(BYTES)
STATELESS = tuple(name for name in RECIPES if name != "delayed")
KINDS = (LINEAR, LN_LINEAR, LN_MLP)
M, K, N, FFN = 48, 64, 80, 112
recipes = pytest.mark.parametrize("recipe", RECIPES)
kinds = pytest.mark.parametrize("kind", KINDS)
devices = pytest.mark.parametrize("device", device_params())


def make(kind, recipe=None, device="cpu", seed=0, **kw):
    """A module with weights of `seed`, quantized by `recipe` (None: in bf16)."""
    p = reference.make_parameters(Spec(kind), K, N, FFN, seed=seed, dtype=torch.bfloat16)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return build(Spec(kind), K, N, FFN, device=device, parameters=p, **kw)


def dequantized(module, kind):
    """The same module with the same numbers in bf16."""
    plain = make(kind, device=next(module.parameters()).device)
    plain.load_state_dict(module.state_dict())
    return plain


def weights_of(module):
    return {name: p for name, p in module.named_parameters() if isinstance(p, QuantizedTensor)}


def batch(kind, seed=1):
    width = K if kind == LN_MLP else N
    tokens = [
        reference.make_tokens(M, size, seed=s, dtype=torch.bfloat16) for size, s in ((K, seed), (width, seed + 50))
    ]
    return tokens[0], tokens[1] * 0.1


def assert_same(label, got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert type(got[name]) is torch.Tensor
        assert_bitwise_equal(f"{label} {name}", got[name], want[name])


def assert_same_bytes(label, a, b):
    a.update_usage(columnwise_usage=True)
    b.update_usage(columnwise_usage=True)
    for got, want in zip(a.q.tensors[:4], b.q.tensors[:4], strict=True):
        assert_bitwise_equal(label, got, want)


# Making them


@recipes
@kinds
def test_weights_alone_are_quantized_from_the_usual_numbers(kind, recipe):
    """The same random numbers are drawn, and as many."""

    def built(quantized):
        torch.manual_seed(3)
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            return build(Spec(kind), K, N, FFN), torch.rand(1)

    (module, after), (plain, after_plain) = built(True), built(False)
    assert torch.equal(after, after_plain)
    names = {"fc1_weight", "fc2_weight"} if kind == LN_MLP else {"weight"}
    assert set(weights_of(module)) == names
    for name, param in module.named_parameters():
        want = dict(plain.named_parameters())[name]
        assert isinstance(param, torch.nn.Parameter) and param.requires_grad and param.dtype == want.dtype
        assert (param.tensor_model_parallel, param.partition_dim) == (want.tensor_model_parallel, want.partition_dim)
        if name in names:
            plain_twin = make(kind, recipe).get_parameter(name)
            plain_twin.quantize_(want)
            assert_same_bytes(name, param, plain_twin)
        else:
            assert_bitwise_equal(name, param, want)


def test_the_default_is_delayed_scaling():
    with te.fp8_model_init():
        module = te.Linear(K, N, device="cpu")
    assert module.weight.q.format.label == "e4m3" and module.weight._scale_inv.numel() == 1
    assert repr(module.weight).startswith("QuantizedTensor")


@pytest.mark.parametrize("recipe, reason", [
    ("rowwise_with_gw_hp", "quantizer of its own"),
    ("bf16", "high precision"),
    (te.recipe.CustomRecipe(qfactory=lambda role: None), "user's own"),
])  # fmt: skip
def test_recipes_without_one_weight_quantizer_are_refused(recipe, reason):
    with pytest.raises(ValueError, match=reason), te.quantized_model_init(recipe=recipe):
        pass
    assert not weights_of(te.Linear(K, N, device="cpu"))
    with te.quantized_model_init(enabled=False, recipe=recipe):
        assert not weights_of(te.Linear(K, N, device="cpu"))
    with pytest.raises(TypeError, match="recipe"), te.quantized_model_init(recipe=3):
        pass


def test_the_innermost_context_counts():
    with te.quantized_model_init(recipe="current"):
        with te.quantized_model_init(enabled=False):
            assert not weights_of(te.Linear(K, N, device="cpu"))
        assert weights_of(te.Linear(K, N, device="cpu"))
    assert not weights_of(te.Linear(K, N, device="cpu"))


def test_the_value_before_quantization_can_be_had():
    torch.manual_seed(0)
    plain = te.Linear(K, N, device="cpu")
    torch.manual_seed(0)
    with te.quantized_model_init(recipe="current", preserve_high_precision_init_val=True):
        module = te.Linear(K, N, device="cpu")
    for other in (module, copy.deepcopy(module)):
        assert_bitwise_equal("value", other.weight.get_high_precision_init_val(), plain.weight.detach())
    torch.manual_seed(1)
    module.reset_parameters()
    torch.manual_seed(1)
    plain.reset_parameters()
    assert_bitwise_equal("drawn again", module.weight.get_high_precision_init_val(), plain.weight.detach())
    drawn = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(plain.weight.detach())
    assert_same_bytes("drawn again", module.weight, drawn)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    assert make(LINEAR, "current").weight.get_high_precision_init_val() is None


def test_features_that_do_not_fit_stay_in_high_precision():
    with te.quantized_model_init(recipe="current"):
        module = te.Linear(K, 40, device="cpu")
    assert not weights_of(module)


def test_split_parameters_are_refused():
    with te.quantized_model_init(recipe="current"), pytest.raises(ValueError, match="parameters_split"):
        te.Linear(K, N, parameters_split=("q", "k"), device="cpu")


# Running with them


@devices
@pytest.mark.parametrize("recipe", STATELESS)
@kinds
def test_results_are_those_of_a_module_that_quantizes_its_weights(kind, recipe, device):
    """The same bytes enter the same GEMMs, in forward and backward; is_first_microbatch changes nothing."""
    x, dy = batch(kind)
    want = step(make(kind, device=device), x, dy, recipe)
    module = make(kind, recipe, device)
    for first in (None, True, False):
        assert_same(f"{recipe} {first}", step(module, x, dy, recipe, is_first_microbatch=first), want)


@kinds
def test_under_delayed_scaling_a_weight_keeps_its_own_scale(kind):
    """Own scale 1 (amax 448), as delayed scaling's first: the same results, and no amax of a weight recorded."""
    x, dy = batch(kind)
    quantized, plain = make(kind, "delayed"), make(kind)
    for name, weight in weights_of(quantized).items():
        value = torch.randint(-16, 17, weight.shape).bfloat16() * 2
        value[0, 0] = 448
        weight.quantize_(value)
        with torch.no_grad():
            plain.get_parameter(name).copy_(value)
    recipe = te.recipe.DelayedScaling(amax_history_len=2)
    assert_same("delayed", step(quantized, x, dy, recipe), step(plain, x, dy, recipe))
    slots = [1 + 3 * i for i in range(len(quantized.gemm_names))]
    for module, recorded in ((quantized, False), (plain, True)):
        history = module._scales._live["forward"].history
        assert history[:, slots].any() == recorded and history[:, [0]].any()


@devices
@pytest.mark.parametrize("own, other", [
    ("current", "bf16"), ("mxfp8", "bf16"), ("current", "mxfp8"), ("mxfp8", "current"), ("blockwise", "rowwise"),
    ("mxfp8", "delayed"), ("rowwise", "rowwise_with_gw_hp"), ("current", "blockwise"),
])  # fmt: skip
@kinds
def test_another_recipe_works_on_the_dequantized_numbers(kind, own, other, device):
    x, dy = batch(kind)
    module = make(kind, own, device)
    plain = dequantized(module, kind)
    for recipe in (other, "bf16", other):
        assert_same(f"{own} under {recipe}", step(module, x, dy, recipe), step(plain, x, dy, recipe))


class TouchesWeights(TorchDispatchMode):
    """Notes the te_lite ops that read or write a tensor of one of the shapes, other than GEMMs and what they read."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.calls = shapes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if func.namespace == "te_lite" and not any(word in func.name() for word in ("gemm", "dequantize")):
            self.calls += [func.name()] * any(tuple(t.shape) in self.shapes for t in tensors)
        return func(*args, **(kwargs or {}))


@recipes
@kinds
def test_no_weight_is_quantized_in_forward_or_backward(kind, recipe):
    x, dy = batch(kind)

    def calls(module):
        shapes = {tuple(p.shape) for p in module.parameters() if p.dim() == 2}
        step(module, x, dy, recipe)
        with TouchesWeights(shapes | {shape[::-1] for shape in shapes}) as mode:
            step(module, x, dy, recipe)
        return mode.calls

    assert calls(make(kind)) and not calls(make(kind, recipe))


@recipes
@kinds
def test_no_weight_is_held_in_high_precision(kind, recipe):
    def high_precision(sizes):
        gc.collect()
        found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        return [o for o in found if o.numel() in sizes and o.element_size() > 1]

    sizes = {p.numel() for p in weights_of(make(kind, recipe)).values()}
    before = high_precision(sizes)
    module = make(kind, recipe)
    x, dy = batch(kind)
    step(module, x, dy, recipe)
    module.zero_grad(set_to_none=True)
    assert len(high_precision(sizes)) == len(before)
    for weight in weights_of(module).values():
        storages = [t.untyped_storage() for t in weight.q.tensors if t is not None]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        scales = 4 * (sum(weight.shape) + 4)
        assert sum(held.values()) <= BYTES[recipe] * weight.numel() + scales


@kinds
def test_gradients_go_to_main_grad(kind):
    x, dy = batch(kind)
    module = make(kind, "current", fuse_wgrad_accumulation=True)
    for weight in weights_of(module).values():
        weight.main_grad = torch.ones(weight.shape)
        weight.grad_added_to_main_grad = False
    step(module, x, dy, "current")
    plain = make(kind, fuse_wgrad_accumulation=True)
    for name in weights_of(module):
        twin = plain.get_parameter(name)
        twin.main_grad, twin.grad_added_to_main_grad = torch.ones(twin.shape), False
    step(plain, x, dy, "current")
    for name, weight in weights_of(module).items():
        assert weight.grad_added_to_main_grad and weight.grad is not None
        assert_bitwise_equal(name, weight.main_grad, plain.get_parameter(name).main_grad)


@kinds
def test_gradients_can_wait(kind):
    x, dy = batch(kind)
    modules = make(kind, "current", delay_wgrad_compute=True), make(kind, delay_wgrad_compute=True)
    for module in modules:
        step(module, x, dy, "current")
        module.backward_dw()
    for name, weight in weights_of(modules[0]).items():
        assert_bitwise_equal(name, weight.grad, modules[1].get_parameter(name).grad)


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@kinds
def test_a_recomputed_forward_uses_them_too(kind, recipe):
    x, dy = batch(kind)
    module = make(kind, recipe)
    want = step(module, x, dy, recipe)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    with under(recipe):
        y = te.checkpoint(module, leaf)
    y.backward(dy)
    got = {"out": y.detach(), "dx": leaf.grad, **{n: p.grad for n, p in module.named_parameters()}}
    assert_same("checkpoint", got, want)


def test_a_write_between_forward_and_backward_is_noticed():
    x, dy = batch(LINEAR)
    module = make(LINEAR, "current")
    with under("current"):
        y = module(x.requires_grad_())
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward(dy)


@pytest.mark.parametrize("other, said", [("current", ""), ("mxfp8", "kept in e4m3"), (None, "kept in e4m3")])
def test_the_report_says_where_another_recipe_wants_another_format(other, said):
    module = make(LINEAR, "current", name=f"kept for {other}")
    warns = pytest.warns(UserWarning, match="anew in each call by 'mxfp8'.*kept in e4m3")
    with warns if other == "mxfp8" else contextlib.nullcontext(), under(other):
        module(batch(LINEAR)[0])
    (reason,) = {row["reason"] for row in te.overlap_report() if row["module"] == module.name}
    assert said in reason if said else not reason


@recipes
def test_free_caches(recipe):
    """Drops kept weights and what can be made again, in children too; the results stay what they are."""
    x, dy = batch(LINEAR)
    quantized, plain = make(LINEAR, recipe), make(LINEAR)
    with torch.no_grad(), under("current"):
        plain(x, is_first_microbatch=True)
    want = step(quantized, x, dy, recipe) if recipe != "delayed" else None
    remade = quantized.weight.q.format.col_from_row
    quantized.weight.update_usage(columnwise_usage=True)
    te.free_caches(torch.nn.Sequential(quantized, torch.nn.Sequential(plain)))
    assert plain._caches[0]._kept[-1] is None
    assert (quantized.weight._columnwise_data is None) == remade
    if want is not None:
        assert_same("after", step(quantized, x, dy, recipe), want)
