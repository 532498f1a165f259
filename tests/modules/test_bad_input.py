"""Bad input: a clear error (value, rule, remedy), and nothing is lost."""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.emulation import E4M3, FP8_MAX
from tests.harness import FP8, RECIPES, build, delayed_state, leaf, step, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

KINDS = (LINEAR, LN_LINEAR, LN_MLP)
DELAYED = te.recipe.DelayedScaling(amax_history_len=4)


def tokens(m=32, k=64, seed=1, scale=1.0):
    return reference.make_tokens(m, k, seed=seed, dtype=torch.bfloat16, scale=scale)


def make(kind, device="cpu", **kw):
    p = reference.make_parameters(Spec(kind), 64, 64, 96, dtype=torch.bfloat16)
    return build(Spec(kind), 64, 64, 96, device=device, parameters=p, **kw)


def recipe_of(name):
    return DELAYED if name == "delayed" else name


def refused(module, x, recipe, kind, *words):
    """The call raises `kind` naming `words`; parameters, scales and autocast are as before; the module
    goes on.
    """
    step(module, tokens(), tokens(seed=3), recipe_of(recipe))
    state = module.get_extra_state().clone()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with pytest.raises(kind) as caught, under(recipe_of(recipe)):
        module(x)
    message = str(caught.value)
    for word in (type(module).__name__, *words):
        assert str(word) in message, f"{word!r} is not in: {message}"
    assert_bitwise_equal("extra state", module.get_extra_state(), state)
    for name, p in module.named_parameters():
        assert_bitwise_equal(name, p.detach(), before[name])
    assert not te.FP8GlobalStateManager.is_fp8_enabled()
    got = step(module, tokens(), tokens(seed=3), recipe_of(recipe))
    assert all(bool(torch.isfinite(t).all()) for t in got.values())


WRONG_TYPES = [torch.float32, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", WRONG_TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_dtype(kind, dtype, recipe):
    refused(make(kind), tokens().to(dtype), recipe, TypeError, dtype, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_double_parameters(kind):
    """fp64 throughout: no GEMM here is made for it."""
    with pytest.raises(TypeError, match="float64"):
        module = build(Spec(kind), 64, 64, 96, dtype=torch.float64)
        module(tokens().double())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(32, 63), (32, 65), (32, 1), (4, 8, 32), (0, 32), (32,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_last_dimension(kind, shape, recipe):
    refused(make(kind), torch.zeros(shape, dtype=torch.bfloat16), recipe, ValueError, shape, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_no_dimension_at_all(kind):
    refused(make(kind), torch.zeros((), dtype=torch.bfloat16), "current", ValueError, 64)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_refuse_a_wrong_last_dimension(kind):
    module = getattr(te, kind)(64, params_dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match="64"):
        module(tokens(k=32))


@pytest.mark.parametrize("value", [None, "x", [[1.0] * 64]])
def test_no_tensor(value):
    with pytest.raises(TypeError, match="Linear got an input of type"):
        make(LINEAR)(value)


BAD_SIZES = [
    (lambda: te.Linear(64, 65, parallel_mode="column", tp_size=2, device="cpu"), ("65", "2")),
    (lambda: te.Linear(65, 64, parallel_mode="row", tp_size=2, device="cpu"), ("65", "2")),
    (lambda: te.LayerNormLinear(64, 65, parallel_mode="column", tp_size=2, device="cpu"), ("65", "2")),
    (lambda: te.LayerNormMLP(64, 97, set_parallel_mode=True, tp_size=2, device="cpu"), ("97", "2")),
    (
        lambda: te.LayerNormMLP(64, 97, activation="swiglu", set_parallel_mode=True, tp_size=2, device="cpu"),
        ("97", "2"),
    ),
    (lambda: te.Linear(64, 64, parallel_mode="colum", tp_size=2, device="cpu"), ("colum", "column")),
    (lambda: te.Linear(64, 64, tp_size=0, device="cpu"), ("0",)),
    (lambda: te.Linear(64, 64, sequence_dim=-1, device="cpu"), ("sequence_dim=-1",)),
    (lambda: te.Linear(64, 0, device="cpu"), ("0",)),
    (lambda: te.Linear(-64, 64, device="cpu"), ("-64",)),
    (lambda: te.Linear(64, 64, params_dtype=torch.int32, device="cpu"), ("int32",)),
    (lambda: te.Linear(64, 64, parameters_split=(), device="cpu"), ("parameters_split",)),
    (lambda: te.LayerNormLinear(64, 64, normalization="GroupNorm", device="cpu"), ("GroupNorm", "RMSNorm")),
    (lambda: te.LayerNormLinear(64, 64, eps=-1.0, device="cpu"), ("eps", "-1.0")),
]


@pytest.mark.parametrize("build_it, words", BAD_SIZES, ids=lambda v: "-".join(v) if isinstance(v, tuple) else "")
def test_impossible_constructions(build_it, words):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        build_it()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


UB_FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")


@pytest.mark.parametrize("flag", UB_FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_userbuffer_flags_before_initialize_ub(kind, flag):
    """Not silently ignored: the flag and what it wants are named."""
    mode = {"set_parallel_mode": True} if kind == LN_MLP else {"parallel_mode": "column", "ub_name": "qkv"}
    with pytest.raises(RuntimeError, match=f"{flag}=True.*before te.initialize_ub"):
        getattr(te, kind)(64, 96, device="cpu", tp_size=2, sequence_parallel=True, **{flag: True}, **mode)


@pytest.mark.parametrize("flag", UB_FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_userbuffer_flags_without_tensor_parallelism(kind, flag):
    """As in Transformer Engine they then mean nothing, but the report says so, and strict refuses."""
    module = getattr(te, kind)(64, 96, device="cpu", name=f"{kind} {flag}", **{flag: True})
    module(torch.randn(4, 64))
    rows = [row for row in te.overlap_report() if row["module"] == module.name]
    assert rows and all(row["reason"] == "tensor parallelism is off" for row in rows)
    with pytest.raises(RuntimeError, match="tensor parallelism is off"), te.autocast(recipe="current", strict=True):
        module(torch.randn(4, 64))


@pytest.mark.parametrize("recipe", FP8)
def test_recipe_without_support_on_the_device(recipe, monkeypatch):
    """The reason of check_recipe_support, and bf16 goes on."""
    from te_lite.modules import base, checks

    def unsupported(recipe, device=None):
        return (True, "") if not recipe.is_fp8 else (False, "the device has no fp8 units")

    for module in (base, checks):
        if hasattr(module, "check_recipe_support"):
            monkeypatch.setattr(module, "check_recipe_support", unsupported)
    module = make(LINEAR)
    with pytest.raises(RuntimeError, match="no fp8 units"), under(recipe):
        module(tokens())
    assert bool(torch.isfinite(module(tokens())).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_input_on_another_device(kind):
    refused(make(kind, "cuda"), tokens(), "current", ValueError, "cpu", "cuda")


# Sizes that fp8 GEMMs do not take


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("k, n", [(60, 64), (64, 60), (24, 40), (1, 1), (17, 33)])
def test_misaligned_features_run_and_are_reported(recipe, k, n):
    """Feature sizes that are no multiple of 16 run in high precision, and overlap_report() says so."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, k, n, dtype=torch.bfloat16)
    module = build(spec, k, n, parameters=p, name=f"odd {k} {n} {recipe}")
    got = step(module, tokens(k=k), tokens(k=n, seed=3), recipe)
    want = step(build(spec, k, n, parameters=p), tokens(k=k), tokens(k=n, seed=3), "bf16")
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])
    rows = [row for row in te.overlap_report() if row["module"] == f"odd {k} {n} {recipe}"]
    assert [row["gemm"] for row in rows] == ["fprop", "dgrad", "wgrad"]
    for row in rows:
        assert "16" in row["reason"] and row["recipe"] == "bf16" and row["operands"] == "bf16 x bf16"


def test_the_report_names_formats():
    """HYBRID: E4M3 forward, E5M2 gradients; one row a GEMM, two linears in an MLP."""
    module = te.LayerNormMLP(64, 96, device="cpu", params_dtype=torch.bfloat16, name="formats")
    step(module, tokens(k=64), tokens(k=64, seed=3), "delayed")
    rows = {row["gemm"]: row for row in te.overlap_report() if row["module"] == "formats"}
    assert list(rows) == [f"{fc}_{gemm}" for fc in ("fc1", "fc2") for gemm in ("fprop", "dgrad", "wgrad")]
    for gemm, operands in (("fprop", "e4m3 x e4m3"), ("dgrad", "e5m2 x e4m3"), ("wgrad", "e5m2 x e4m3")):
        assert rows[f"fc2_{gemm}"]["operands"] == operands and rows[f"fc2_{gemm}"]["recipe"] == "delayed"


# Non-finite and extreme values


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan_and_in_its_row(kind, recipe, device):
    """nan propagates along its token; other tokens are finite; the next clean step is clean."""
    module = make(kind, device)
    x, dy = tokens(), tokens(seed=3)
    x[5, 7] = float("nan")
    got = step(module, x, dy, recipe_of(recipe))
    assert bool(got["out"][5].isnan().all())
    clean = torch.arange(32) != 5
    assert bool(torch.isfinite(got["out"].cpu()[clean]).all())
    after = step(module, tokens(seed=8), dy, recipe_of(recipe))
    assert all(bool(torch.isfinite(t).all()) for t in after.values())


@pytest.mark.parametrize("device", device_params())
# The largest MX value, 448 * 2^127, is inf by the E8M0 rule, and rowwise_with_gw_hp's wgrad reads x unquantized.
@pytest.mark.parametrize("recipe", [name for name in FP8 if name not in ("mxfp8", "rowwise_with_gw_hp")])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_inf_saturates(sign, recipe, device):
    """inf becomes fp8's largest value: no nan anywhere; current scaling takes scale 1, delayed its
    history's.
    """
    module = make(LINEAR, device)
    x = tokens()
    x[5, 7] = sign * float("inf")
    got = step(module, x, tokens(seed=3), recipe_of(recipe))
    assert all(bool(torch.isfinite(t).all()) for t in got.values()), "saturated operands give finite results"
    largest = x.clone()
    largest[5, 7] = sign * FP8_MAX[E4M3]
    fresh = make(LINEAR, device)
    if recipe == "delayed":  # scale 1 in the first step, and in current scaling because the amax is inf
        want = step(fresh, largest, tokens(seed=3), recipe_of(recipe))
        assert_bitwise_equal("out", got["out"], want["out"])


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_leaves_no_trace(bad, recipe):
    """An overflowing loss: the history and scales of the gradients are as if the step had not been."""
    module = make(LN_MLP)
    step(module, tokens(), tokens(seed=3), recipe_of(recipe))
    before = delayed_state(module)
    dy = tokens(seed=4)
    dy[0, 0] = bad
    step(module, tokens(seed=9), dy, recipe_of(recipe))
    after = delayed_state(module)
    if recipe == "delayed":
        assert_bitwise_equal("scale", after["scale_bwd"][2], before["scale_bwd"][2])
        assert bool(torch.isfinite(after["history_bwd"]).all() and torch.isfinite(after["scale_bwd"]).all())
    got = step(module, tokens(), tokens(seed=3), recipe_of(recipe))
    assert all(bool(torch.isfinite(t).all()) for t in got.values())


def _zeros(x):
    return torch.zeros_like(x)


def _one_zero_row(x):
    x = x.clone()
    x[3] = 0
    return x


def _subnormal(x):
    return torch.full_like(x, 1e-39)


def _tiny(x):
    return x * 1e-30


def _huge(x):
    return x * 1e30


def _one_outlier(x):
    x = x.clone()
    x[0, 0] = 3e38
    return x


EDGES = [_zeros, _one_zero_row, _subnormal, _tiny, _huge, _one_outlier]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("edge", EDGES)
def test_extreme_values_stay_finite(edge, recipe, device):
    """Zero, subnormal, tiny and huge inputs: no nan from a scale of inf or 0, and zeros stay zeros."""
    module = make(LINEAR, device)
    with torch.no_grad():
        module.bias.zero_()
    x = edge(tokens())
    for _ in range(3):
        with under(recipe_of(recipe)):
            out = module(leaf(x, device))
        assert not bool(out.isnan().any())
        if edge is not _one_outlier:
            assert bool(torch.isfinite(out).all())
        zero_rows = (x == 0).all(dim=1)
        assert not bool(out.detach().cpu()[zero_rows].any())
    state = delayed_state(module)
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_batches_do_not_disturb_the_history(recipe):
    """A step without tokens: shapes are right, gradients are zero, amax 0 rolls nothing of x's history."""
    module = make(LN_MLP)
    step(module, tokens(), tokens(seed=3), recipe_of(recipe))
    before = delayed_state(module)
    got = step(module, tokens(m=0), tokens(m=0), recipe_of(recipe))
    assert got["out"].shape == got["dx"].shape == (0, 64)
    for name, p in module.named_parameters():
        assert got[name].shape == p.shape and not bool(got[name].any())
    after = delayed_state(module)
    for name, columns in (("history_fwd", (0, 3)), ("history_bwd", (0, 2))):
        for column in columns:
            if before:
                assert_bitwise_equal(f"{name} {column}", after[name][:, column], before[name][:, column])


# Checkpoints of another recipe: see modules/test_state.py for loading; here for the error's text.


def test_a_pickled_state_names_the_way_out():
    module = make(LINEAR)
    state = module.state_dict()
    state["_extra_state"] = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"drop the \*_extra_state keys"):
        module.load_state_dict(state)
    assert_bitwise_equal("weight", module.weight.detach(), make(LINEAR).weight.detach())
    del state["_extra_state"]
    assert module.load_state_dict(state) == ([], [])
