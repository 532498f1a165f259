"""LayerNormMLP(recompute_activation=True): backward computes activation(h) again, with the bits of the one not kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.functional.plan import MainGrad
from te_lite.modules.layernorm_mlp import MOST_COST, recomputation_cost
from te_lite.modules.plans import PLANNED
from te_lite.quantize.per_tensor import FORMATS, Current, Delayed
from te_lite.recipe import CustomRecipe
from te_lite.testing.distributed import launch, rank_device_params
from te_lite.testing.memory import bytes_kept
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import FP8, OPTIONS, RECIPES, build, leaf, under, with_activations
from tests.reference import LN_MLP, Spec

K, FFN, TOKENS, STEPS = 64, 96, 40, 3
E4M3 = FORMATS[torch.float8_e4m3fn]


def own_for_wgrad(role):
    """Current scaling, of wgrad's x by a power of two: fprop and wgrad read different numbers."""
    return Current(E4M3, pow2=(role.gemm, role.operand) == ("wgrad", "x"))


def mlp(recompute, activation="swiglu", device="cpu", bias=True, **options):
    spec = Spec(LN_MLP, "RMSNorm", activation=activation, bias=bias)
    p = reference.make_parameters(spec, K, 0, FFN, dtype=torch.bfloat16)
    return build(spec, K, ffn=FFN, device=device, parameters=p, recompute_activation=recompute, **options)


def run(module, recipe, tokens=TOKENS, call=None, before=lambda module: None):
    """Outputs, gradients and the state of delayed scaling after each of several steps."""
    device = module.fc1_weight.device
    before(module)
    found = {}
    for i in range(STEPS):
        x, dy = (reference.make_tokens(tokens, K, seed=2 * i + j, dtype=torch.bfloat16) for j in (1, 2))
        x, dy = leaf(x * 2.0**i, device), dy.to(device)
        module.zero_grad(set_to_none=True)
        with under(recipe):
            out = module(x) if call is None else call(module, x)
        out.backward(dy)
        if module.delay_wgrad_compute:
            module.backward_dw()
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        now = {"out": out.detach(), "dx": x.grad, **grads, "state": module.get_extra_state()}
        found |= {f"{name} of step {i}": t for name, t in now.items()}
    return found


def compare(got, want):
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_bitwise_equal(name, value, want[name])


@pytest.mark.parametrize(("recipe", "activation", "device"), with_activations([*RECIPES, *OPTIONS]))
def test_all_bits_are_those_without(recipe, activation, device):
    compare(*(run(mlp(again, activation, device), recipe) for again in (True, False)))


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_of_any_number_of_tokens(tokens, recipe):
    compare(*(run(mlp(again), recipe, tokens) for again in (True, False)))


def freeze(names):
    def before(module):
        for name, p in module.named_parameters():
            p.requires_grad_(name not in names)

    return before


def checkpointed(module, x):
    return te.checkpoint(module, x, use_reentrant=False)


def on_cpu(module, x):
    with torch.autograd.graph.save_on_cpu():
        return module(x)


def twice(module, x):
    """Two forwards before their backwards."""
    return module(x) + module(x * 0.5)


def without_dx(module, x):
    return module(x.detach()) + 0 * x


def cached(module, x):
    return module(x, is_first_microbatch=True) + module(x, is_first_microbatch=False)


NORM_AND_FC1 = ("layer_norm_weight", "fc1_weight", "fc1_bias")
CLAMPED = {"activation": "clamped_swiglu", "activation_params": {"limit": 0.5, "alpha": 2.0}}
SETTINGS = {
    "parameters": {"options": CLAMPED},
    "no fc2": {"before": freeze(("fc2_weight",))},
    "no fc1": {"before": freeze(("fc1_weight",))},
    "delayed wgrads": {"options": {"delay_wgrad_compute": True}},
    "checkpoint": {"options": {"checkpoint": True}},
    "checkpointed": {"call": checkpointed},
    "on the CPU": {"call": on_cpu},
    "twice": {"call": twice},
    "cached weights": {"call": cached},
    "no bias": {"options": {"bias": False}},
    "norm returned": {"options": {"return_layernorm_output": True}, "call": lambda module, x: sum(module(x))},
    "residual": {"call": lambda module, x: module(x, residual=x)},
    "only fc2": {"before": freeze(NORM_AND_FC1), "call": without_dx},
    "fc2 and a bias": {"before": freeze(NORM_AND_FC1[:2]), "call": without_dx},
    "fc2 and fc1": {"before": freeze(NORM_AND_FC1[:1]), "call": without_dx},
}


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "mxfp8", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_whatever_else_is_asked_for(setting, recipe):
    options = SETTINGS[setting].get("options", {})
    rest = {name: value for name, value in SETTINGS[setting].items() if name != "options"}
    compare(*(run(mlp(again, **options), recipe, **rest) for again in (True, False)))


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_quantized_parameters(recipe):
    def made(again):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=te.recipe.from_name(recipe)):
            return te.LayerNormMLP(K, FFN, params_dtype=torch.bfloat16, device="cpu", recompute_activation=again)

    compare(*(run(made(again), recipe) for again in (True, False)))


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_main_grad(recipe):
    found = []
    for again in (True, False):
        module = mlp(again, fuse_wgrad_accumulation=True)
        for p in module.parameters():
            p.main_grad = torch.zeros(p.shape)
        run(module, recipe)
        found.append({name: p.main_grad for name, p in module.named_parameters()})
        assert any(isinstance(sink, MainGrad) for sink in module._sinks) and found[-1]["fc2_weight"].any()
    compare(*found)


def test_a_quantizer_that_wgrad_alone_uses():
    """The scale of wgrad's x is of wgrad's quantizer, though it keeps no data."""
    compare(*(run(mlp(again), CustomRecipe(own_for_wgrad)) for again in (True, False)))


@pytest.mark.parametrize("device", rank_device_params(2))
def test_over_two_ranks(device):
    launch(Path(__file__).with_name("ranks_recompute_activation.py"), "--device", device, ranks=2, timeout=240)


@pytest.mark.parametrize("recipe", FP8)
def test_statistics_count_the_same(recipe):
    found = []
    for again in (True, False):
        with te.collect_statistics() as stats:
            run(mlp(again), recipe)
        found.append({(row["operand"], row["format"]): row for row in stats.rows()})
    assert found[0] == found[1] and len(found[0]) >= 6


def test_calibration_records_once():
    def call(module, x):
        with te.autocast(enabled=False, calibrating=True, recipe=te.recipe.DelayedScaling()):
            return module(x)

    compare(*(run(mlp(again), "bf16", call=call) for again in (True, False)))


def recorded_twice(self, source, earlier):
    return self.quantize(source, row=False, col=True)[0]


again_of = Delayed.again


def test_the_comparison_notices_an_amax_recorded_twice(monkeypatch):
    """Of weights alone the state would be the same; so the bug is in activations' again only."""
    setting = SETTINGS["fc2 and a bias"]
    want = run(mlp(False), "delayed", **setting)
    monkeypatch.setattr(Delayed, "again", lambda q, s, e: (recorded_twice if s.kind == "act" else again_of)(q, s, e))
    got = run(mlp(True), "delayed", **setting)
    assert_bitwise_equal("out of step 0", got["out of step 0"], want["out of step 0"])
    assert not torch.equal(got["state of step 0"], want["state of step 0"])


def test_the_comparison_notices_a_scale_of_now(monkeypatch):
    """The scale that is there in backward: after the update that ends the autocast."""
    want, module, original = run(mlp(False), "delayed"), mlp(True), Delayed.quantize_and_again

    def with_scale_of_now(self, grad, row, col, bias_grad, x):
        if x is not None:
            quantizer = module._planned[1][1].operands.fprop.a
            x = replace(x, seed=quantizer.state.scale_at(quantizer.slot))
        return original(self, grad, row, col, bias_grad, x)

    monkeypatch.setattr(Delayed, "quantize_and_again", with_scale_of_now)
    got = run(module, "delayed")
    assert_bitwise_equal("out of step 0", got["out of step 0"], want["out of step 0"])
    assert not torch.equal(got["fc2_weight of step 0"], want["fc2_weight of step 0"])


# memory


def kept(recompute, recipe, tokens=32):
    module = mlp(recompute)
    x = leaf(reference.make_tokens(tokens, K, dtype=torch.bfloat16))
    with under(recipe):
        return bytes_kept(module(x))


def bytes_of_a(recipe, tokens):
    """As forward kept it, scales too."""
    if recipe in ("bf16", "rowwise_with_gw_hp"):
        return 2 * tokens * FFN
    scales = {"mxfp8": FFN * tokens // 32, "blockwise": 4 * FFN * -(-tokens // 128), "rowwise": 4 * FFN}
    return tokens * FFN + scales.get(recipe, 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_falls_by_the_activations_bytes(recipe):
    """What stays is the seed: a scale. Few tokens, so that no weight stays transposed either way."""
    fell = kept(False, recipe) - kept(True, recipe)
    assert 0 <= bytes_of_a(recipe, 32) - fell <= (4 if recipe in ("delayed", "current") else 0)


def test_of_a_quantizer_that_wgrad_alone_uses():
    recipe = CustomRecipe(own_for_wgrad)
    assert 32 * FFN <= kept(False, recipe) - kept(True, recipe) <= 32 * FFN + 4


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("setting", ["no fc2", "only fc2", "delayed wgrads"])
def test_it_keeps_what_it_cannot_compute_again_for_less(setting, recipe):
    """Nothing is kept of a for a frozen weight. Where h is not kept, or is not there when wgrad runs, a is."""
    options, before = SETTINGS[setting].get("options", {}), SETTINGS[setting].get("before", lambda module: None)

    def counted(recompute):
        module = mlp(recompute, **options)
        before(module)
        x = reference.make_tokens(64, K, dtype=torch.bfloat16).requires_grad_(setting != "only fc2")
        with under(recipe):
            return bytes_kept(module(x))

    assert counted(True) == counted(False)


@pytest.mark.parametrize("tokens", [1, 7, 64, 1024, 4096])
@pytest.mark.parametrize("recipe", FP8)
def test_fp8_keeps_no_more_than_bf16(recipe, tokens):
    padding = 16 * (K + 3 * FFN) if tokens % 16 else 0
    assert kept(True, recipe, tokens) <= kept(True, "bf16", tokens) + padding + 64


# the default


SIZES = [
    (256, "swiglu", False),
    (2048, "swiglu", False),
    (4096, "swiglu", False),
    (5120, "swiglu", True),
    (8192, "clamped_swiglu", True),
    (3584, "gelu", False),
    (4096, "gelu", True),
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hidden, activation, expected", SIZES)
def test_the_default_goes_by_recipe_and_size(hidden, activation, expected, recipe):
    """Where fp8 quantizes a again from the read that the gradient of h takes, always."""
    module = te.LayerNormMLP(hidden, 64, activation=activation, params_dtype=torch.bfloat16, device="meta")
    assert module.recompute_activation is None
    x = torch.empty(32, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with under(recipe):
        module(x)
    assert PLANNED[module][1].recomputes_x is (expected or recipe in ("delayed", "current"))


def test_the_estimate():
    """The numbers of its docstring: 4 bytes at 2.9 TB/s against 18 * 4,096 flop at 1.3 Pflop/s."""
    assert recomputation_cost(4096, glu=True) == pytest.approx(4 / 2.9e12 / (18 * 4096 / 1.3e15))
    assert recomputation_cost(4096, glu=False) == pytest.approx(4 / 2.9e12 / (12 * 4096 / 0.7e15))
    assert recomputation_cost(8192, glu=True) <= MOST_COST < recomputation_cost(4096, glu=True)


@pytest.mark.parametrize("given", [1, "yes"])
def test_the_argument_is_a_flag(given):
    with pytest.raises(TypeError, match="recompute_activation"):
        te.LayerNormMLP(K, FFN, device="meta", recompute_activation=given)
