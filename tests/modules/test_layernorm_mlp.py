"""LayerNormMLP against the unsharded oracle: every activation, norm, recipe and type."""

import functools

import pytest
import torch

import te_lite as te
from te_lite.ops.activation import Activation
from te_lite.ops.cast import amax, transform
from te_lite.ops.source import Source, act, plain
from te_lite.overlap.epilogues import Activate
from te_lite.quantize.qtensor import QTensor
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal, assert_bound_bites, measure
from tests import reference
from tests.harness import FP8, RECIPES, Oracle, build, check, compare, step, under, with_activations
from tests.overlap.one_rank import force
from tests.reference import ALL_ACTIVATIONS, GATED, LN_MLP, Spec

# (normalization, zero_centered, bias): each value of each with each recipe, not every product.
VARIANTS = [
    ("LayerNorm", False, True),
    ("LayerNorm", True, False),
    ("RMSNorm", False, False),
    ("RMSNorm", True, True),
]


@pytest.mark.parametrize(("recipe", "activation", "device"), with_activations(RECIPES))
def test_activations_match_oracle(recipe, activation, device):
    check(Spec(LN_MLP, activation=activation), recipe, device=device)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("normalization, zero_centered, bias", VARIANTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_variants_match_oracle(recipe, normalization, zero_centered, bias, activation, device):
    check(Spec(LN_MLP, normalization, zero_centered, activation, bias), recipe, device=device)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_types(recipe, dtype, device):
    check(Spec(LN_MLP, "RMSNorm", activation="swiglu", bias=False), recipe, dtype=dtype, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_matches_oracle_at_a_real_size(recipe, activation):
    check(
        Spec(LN_MLP, "RMSNorm", activation=activation, bias=False),
        recipe,
        device="cuda",
        m=2048,
        k=1024,
        ffn=2816,
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 64), (1020, 64), (3, 5, 64), (2, 0, 64)], ids=str)
def test_any_leading_shape(shape, recipe):
    spec = Spec(LN_MLP, activation="swiglu")
    p = reference.make_parameters(spec, 64, 0, 96, dtype=torch.bfloat16)
    m = int(torch.tensor(shape[:-1]).prod())
    x, dy = _tokens(m, 64).reshape(shape), _tokens(m, 64, seed=3).reshape(shape)
    got = step(build(spec, 64, ffn=96, parameters=p), x, dy, recipe)
    assert got["out"].shape == got["dx"].shape == shape
    truth, low = Oracle(spec, p, recipe).step(x, dy)
    compare(f"{recipe} {shape}", got, truth, low)


def _tokens(m, k, seed=1, **kw):
    return reference.make_tokens(m, k, seed=seed, dtype=torch.bfloat16, **kw)


@pytest.mark.parametrize("recipe", FP8)
def test_both_linears_are_quantized(recipe):
    """Outputs and all gradients differ from bf16 by more than the bf16 bound: fp8 in every GEMM."""
    spec = Spec(LN_MLP)
    p = reference.make_parameters(spec, 64, 0, 96, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 64, seed=3)
    module = build(spec, 64, ffn=96, parameters=p)
    got = [step(module, x, dy, recipe) for _ in range(2)][-1]
    truth, low = Oracle(spec, p).step(x, dy)
    for name in ("out", "dx", "fc1_weight", "fc2_weight"):
        assert not measure(name, got[name], truth[name], low[name]).ok, f"{name} looks like bf16"


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_the_bound_notices_swapped_halves(activation):
    """up first instead of gate first is a plausible bug."""
    spec = Spec(LN_MLP, activation=activation)
    p = reference.make_parameters(spec, 64, 0, 96, dtype=torch.bfloat16)
    x = _tokens(48, 64)
    out = step(build(spec, 64, ffn=96, parameters=p), x, None)["out"]
    truth, low = Oracle(spec, p).step(x, None)
    swapped = {n: torch.cat(v.chunk(2)[::-1]) if n.startswith("fc1") else v for n, v in p.items()}
    wrong = step(build(spec, 64, ffn=96, parameters=swapped), x, None)["out"]
    assert_bound_bites("halves", out, truth["out"], low["out"], lambda t: wrong)


@pytest.mark.parametrize("activation", ALL_ACTIVATIONS)
def test_parameter_shapes(activation):
    """fc1 holds gate and up of a glu; fc2 and both biases follow."""
    module = te.LayerNormMLP(64, 96, activation=activation, device="cpu")
    wide = 192 if activation in GATED else 96
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "layer_norm_weight": (64,),
        "layer_norm_bias": (64,),
        "fc1_weight": (wide, 64),
        "fc1_bias": (wide,),
        "fc2_weight": (64, 96),
        "fc2_bias": (64,),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_return_bias_and_layernorm_output(recipe):
    """out leaves fc2's bias to the caller (fc1's is inside), then bias, then ln_out."""
    spec = Spec(LN_MLP, returns_norm=True)
    p = reference.make_parameters(spec, 64, 0, 96, dtype=torch.bfloat16)
    x = _tokens(48, 64)
    module = build(spec, 64, ffn=96, parameters=p, return_bias=True, return_layernorm_output=True)
    with under(recipe):
        out, bias, ln_out = module(x)
    assert_bitwise_equal("bias", bias.detach(), p["fc2_bias"])
    truth, low = Oracle(spec, p, recipe).step(x, None)
    for result in (truth, low):
        result["out"] = result["out"] - p["fc2_bias"].to(result["out"].dtype)
    compare(recipe, {"out": out.detach(), "ln_out": ln_out.detach()}, truth, low)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight", "fc1_bias", "layer_norm_weight"])
def test_frozen_parameters(frozen, recipe):
    spec = Spec(LN_MLP)
    p = reference.make_parameters(spec, 64, 0, 96, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 64, seed=3)
    full = step(build(spec, 64, ffn=96, parameters=p), x, dy, recipe)
    module = build(spec, 64, ffn=96, parameters=p)
    getattr(module, frozen).requires_grad_(False)
    got = step(module, x, dy, recipe)
    assert set(full) - set(got) == {frozen}
    for name in got:
        assert_bitwise_equal(f"{frozen} frozen: {name}", got[name], full[name])


def test_init_methods():
    """init_method for fc1, output_layer_init_method for fc2; without: normal with std 0.023; biases 0."""

    def constant(value):
        return lambda w: torch.nn.init.constant_(w, value)

    module = te.LayerNormMLP(64, 96, init_method=constant(0.25), output_layer_init_method=constant(0.5), device="cpu")
    assert bool((module.fc1_weight == 0.25).all()) and bool((module.fc2_weight == 0.5).all())
    module = te.LayerNormMLP(128, 512, device="cpu", params_dtype=torch.float32)
    for weight in (module.fc1_weight, module.fc2_weight):
        assert abs(float(weight.detach().std()) - 0.023) < 0.001
    assert not module.fc1_bias.detach().any() and not module.fc2_bias.detach().any()


def test_unknown_activation_names_the_known_ones():
    with pytest.raises(ValueError, match="swiglu"):
        te.LayerNormMLP(64, 96, activation="swigelu", device="cpu")
    with pytest.raises(ValueError, match="RMSNorm"):
        te.LayerNormMLP(64, 96, normalization="BatchNorm", device="cpu")


@pytest.mark.parametrize("given, match", [
    ({"limit": 1.0}, r"has \['limit'\]: activation 'gelu' takes none; leave"), ({0: 1}, r"has \[0\]"),
    ([1.0], r"\[1.0\]: must be a dict.*pass"),
])  # fmt: skip
def test_activation_params_of_one_that_takes_none(given, match):
    with pytest.raises((ValueError, TypeError), match=match):
        te.LayerNormMLP(64, 96, activation="gelu", activation_params=given, device="cpu")
    assert te.LayerNormMLP(64, 96, activation="gelu", activation_params={}, device="cpu").activation == "gelu"


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_params_reach_forward_and_backward(recipe, monkeypatch):
    """With values on both sides of the limit. Those that are not given have TE's defaults, to the bit."""
    spec, defaults = Spec(LN_MLP, activation="clamped_swiglu"), {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    p = reference.make_parameters(spec, 64, 0, 96, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 64, seed=3)

    def got(params):
        return step(build(spec, 64, ffn=96, parameters=p, activation_params=params), x, dy, recipe)

    want = got(None)
    for name, value in got(defaults).items():
        assert_bitwise_equal(name, value, want[name])
    given = {"limit": 0.4, "alpha": 1.2, "glu_linear_offset": 0.3}
    with monkeypatch.context() as patch:
        clamped = functools.partial(reference.clamped_swiglu, limit=0.4, alpha=1.2, offset=0.3)
        patch.setitem(reference.GATED, spec.activation, clamped)
        truth, low = Oracle(spec, p, recipe).step(x, dy)
        compare(f"{recipe} with parameters", got(given), truth, low)


def _by_a_kernel(epilogue: Activate, h: torch.Tensor) -> Source | QTensor:
    """What a GEMM that ends with the activation leaves, by kernels of its own."""
    source = act(h, Activation.of("swiglu"))
    if epilogue.want == "amax":
        return source._replace(amax=amax(source))
    if epilogue.want == "high precision":
        return plain(transform(source, hp_dtype=h.dtype).hp)
    return epilogue.quantizer.quantize(source, row=True, col=True)[0]


@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_takes_the_activation_that_a_kernel_has_computed(recipe, monkeypatch):
    """In place of its own pass over h, with the same bits, also of all gradients."""
    spec = Spec(LN_MLP, activation="swiglu")
    parameters = reference.make_parameters(spec, 64, 0, 96, dtype=torch.bfloat16)
    x, dy = _tokens(32, 64), _tokens(32, 64, seed=3)
    module = build(spec, 64, ffn=96, parameters=parameters)
    want = [step(module, x, dy, recipe) for _ in range(2)]
    wants = []

    def kernel(epilogue, h):
        wants.append(epilogue.want)
        return epilogue.given(h, _by_a_kernel(epilogue, h))

    monkeypatch.setattr(Activate, "__call__", kernel)
    force(monkeypatch)
    module = build(spec, 64, ffn=96, parameters=parameters)
    for expected in want:
        for name, got in step(module, x, dy, recipe).items():
            assert_bitwise_equal(name, got, expected[name])
    assert wants == 2 * [{"bf16": "high precision", "current": "amax", "delayed": "fp8"}[recipe]]


@pytest.mark.parametrize("recipe, activation", [("bf16", "gelu"), ("mxfp8", "swiglu"), ("blockwise", "swiglu")])
def test_asks_no_gemm_for_what_none_makes(recipe, activation, monkeypatch):
    unfused, asked = Activate.__call__, []

    def watched(epilogue, h):
        asked.append(epilogue.want)
        return unfused(epilogue, h)

    monkeypatch.setattr(Activate, "__call__", watched)
    force(monkeypatch)
    module = build(Spec(LN_MLP, activation=activation), 64, ffn=96)
    with under(recipe):
        module(_tokens(32, 64))
    assert asked == [""]


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("hidden", [64, 8192])  # features enough for a read of its own to be cheap
def test_asks_a_gemm_for_columns_where_backward_reads_them(hidden, trains, recompute, monkeypatch):
    """By default too: the GEMM that makes the gradient of h leaves no pass that would read h."""
    asked = []
    monkeypatch.setattr(Activate, "__call__", lambda epilogue, h: asked.append(epilogue) or (h, epilogue.source(h)))
    force(monkeypatch)
    module = build(Spec(LN_MLP, activation="swiglu", bias=False), hidden, ffn=128, recompute_activation=recompute)
    with torch.set_grad_enabled(trains), under("delayed"):
        module(_tokens(32, hidden))
    assert [(epilogue.want, epilogue.col) for epilogue in asked] == [("fp8", trains and not recompute)]
