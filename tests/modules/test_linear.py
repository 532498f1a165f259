"""Linear against the unsharded oracle: recipes, types, shapes, bias."""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal, assert_bound_bites, measure
from tests import reference
from tests.emulation import E4M3, Current
from tests.harness import FP8, RECIPES, Oracle, build, check, compare, leaf, step, under
from tests.reference import LINEAR, Spec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_matches_oracle(recipe, dtype, bias, device):
    check(Spec(LINEAR, bias=bias), recipe, dtype=dtype, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m", [512, 4092])
def test_linear_matches_oracle_at_a_real_size(recipe, m):
    check(Spec(LINEAR), recipe, device="cuda", m=m, k=1024, n=1536)


def test_delayed_scales_follow_five_steps():
    check(Spec(LINEAR), "delayed", steps=5)


@pytest.mark.parametrize("recipe", FP8)
def test_the_bound_notices_missing_quantization(recipe):
    """fp8 was really used, and the bound is tight enough to tell it from bf16."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 80, seed=3)
    module = build(spec, 64, 80, parameters=p)
    got = [step(module, x, dy, recipe) for _ in range(2)][-1]
    truth, low = Oracle(spec, p, "bf16").step(x, dy)
    for name in ("out", "dx", "weight") if recipe != "rowwise_with_gw_hp" else ("out", "dx"):  # its wgrad is bf16's
        assert not measure(name, got[name], truth[name], low[name]).ok, f"{name} looks like bf16"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bound_bites(recipe):
    """Plausible mistakes fail: a bias left out, one scale off by a power of two, two rows exchanged."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x = _tokens(48, 64)
    out = step(build(spec, 64, 80, parameters=p), x, None, recipe)["out"]
    truth, low = Oracle(spec, p, recipe).step(x, None)
    bugs = {
        "no bias": lambda t: t - p["bias"],
        "scale": lambda t: 2 * t,
        "one wrong row": lambda t: t.index_copy(0, torch.tensor([7]), t[8:9]),
        "one percent": lambda t: t * 1.01,
    }
    for name, bug in bugs.items():
        assert_bound_bites(f"{recipe} {name}", out, truth["out"], low["out"], bug)


def _tokens(m, k, seed=1, **kw):
    return reference.make_tokens(m, k, seed=seed, dtype=torch.bfloat16, **kw)


SHAPES = [(0, 64), (1, 64), (7, 64), (4092, 64), (3, 5, 64), (2, 3, 4, 64), (64,), (0, 3, 64), (2, 0, 64)]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_leading_shape(shape, recipe, device):
    """Out has the input's leading shape, any token count included, and matches the oracle on the tokens."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    module = build(spec, 64, 80, device=device, parameters=p)
    m = int(torch.tensor(shape[:-1]).prod()) if len(shape) > 1 else 1
    x, dy = _tokens(m, 64).reshape(shape), _tokens(m, 80, seed=3).reshape(*shape[:-1], 80)
    got = step(module, x, dy, recipe)
    assert got["out"].shape == (*shape[:-1], 80)
    assert got["dx"].shape == shape
    assert got["out"].dtype == got["dx"].dtype == torch.bfloat16
    truth, low = Oracle(spec, p, recipe, device=device).step(x, dy)
    compare(f"{recipe} {shape}", got, truth, low)


def _transposed(t):
    return t.t().contiguous().t()


def _every_second_column(t):
    wide = torch.full((t.shape[0], 2 * t.shape[1]), float("nan"), dtype=t.dtype, device=t.device)
    wide[:, ::2] = t
    return wide[:, ::2]


def _offset(t):
    """Storage that starts off any 16-byte boundary."""
    flat = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", [_transposed, _every_second_column, _offset])
def test_strides_change_nothing(layout, recipe, device):
    """The same numbers in another memory layout, for x and dy, give the same bytes."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x, dy = _tokens(40, 64), _tokens(40, 80, seed=3)
    results = []
    for change in (lambda t: t, layout):
        module = build(spec, 64, 80, device=device, parameters=p)
        xs = change(x.to(device).clone()).detach().requires_grad_()
        with under(recipe):
            out = module(xs)
        out.backward(change(dy.to(device)))
        results.append({"out": out, "dx": xs.grad, "dw": module.weight.grad, "db": module.bias.grad})
    for name in results[0]:
        assert_bitwise_equal(f"{recipe} {name}", results[1][name], results[0][name])


@pytest.mark.parametrize("recipe", RECIPES)
def test_expanded_input_and_gradient(recipe):
    """x and dy with stride 0: sum() sends an expanded gradient."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    row = leaf(_tokens(1, 64))
    with under(recipe):
        out = build(spec, 64, 80, parameters=p)(row.expand(32, 64))
    out.sum().backward()
    dense = step(build(spec, 64, 80, parameters=p), row.expand(32, 64), torch.ones(32, 80).bfloat16(), recipe)
    assert_bitwise_equal("out", out.detach(), dense["out"])
    assert_bitwise_equal("dx", row.grad, dense["dx"].float().sum(0, keepdim=True).bfloat16())


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_only_where_asked(recipe):
    """Frozen weights get none, a frozen input gets none, and what is left does not change."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 80, seed=3)
    full = step(build(spec, 64, 80, parameters=p), x, dy, recipe)

    module = build(spec, 64, 80, parameters=p)
    module.weight.requires_grad_(False)
    got = step(module, x, dy, recipe)
    assert "weight" not in got
    assert_bitwise_equal("dx", got["dx"], full["dx"])
    assert_bitwise_equal("bias", got["bias"], full["bias"])

    module = build(spec, 64, 80, parameters=p)
    with under(recipe):
        module(x).backward(dy)
    assert_bitwise_equal("weight", module.weight.grad, full["weight"])


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_gradients_accumulate(recipe):
    module = build(Spec(LINEAR), 64, 80, dtype=torch.float32)
    x, dy = _tokens(48, 64).float(), _tokens(48, 80, seed=3).float()
    once = {name: grad.clone() for name, grad in step(module, x, dy, recipe).items()}
    with under(recipe):
        module(x).backward(dy)
    assert_bitwise_equal("weight", module.weight.grad, 2 * once["weight"])


@pytest.mark.parametrize("device", device_params())
def test_e4m3_format_and_powers_of_two(device):
    """Format.E4M3 quantizes gradients to E4M3; use_power_2_scales clears the scales' mantissas."""
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x, dy = _tokens(48, 64), _tokens(48, 80, seed=3)
    recipe = te.recipe.Float8CurrentScaling(fp8_format=te.recipe.Format.E4M3, use_power_2_scales=True)
    got = step(build(spec, 64, 80, device=device, parameters=p), x, dy, recipe)
    oracle = Oracle(spec, p, "current", device=device)
    for state in (oracle.truth_state, oracle.reference_state):
        gemm = state.gemms[0]
        gemm.x = gemm.w = gemm.dy = Current(E4M3, pow2=True)
    truth, low = oracle.step(x, dy)
    compare("E4M3 pow2", got, truth, low)


def test_default_initialisation_and_init_method():
    module = te.Linear(256, 512, device="cpu", params_dtype=torch.float32)
    assert abs(float(module.weight.detach().std()) - 0.023) < 0.001
    assert not module.bias.detach().any()
    module = te.Linear(16, 32, device="cpu", init_method=lambda w: torch.nn.init.constant_(w, 0.5))
    assert bool((module.weight == 0.5).all())


def test_parameters_follow_the_default_dtype():
    assert te.Linear(16, 16, device="cpu").weight.dtype == torch.get_default_dtype()
    assert te.Linear(16, 16, device="cpu", params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_default_device_is_the_gpu_where_there_is_one():
    want = "cuda" if torch.cuda.is_available() else "cpu"
    assert te.Linear(16, 16).weight.device.type == want


def test_no_bias_is_a_zero_length_tensor():
    module = te.Linear(16, 32, bias=False, device="cpu")
    assert isinstance(module.bias, torch.Tensor) and module.bias.numel() == 0
    assert set(dict(module.named_parameters())) == {"weight"}


def test_return_bias():
    spec = Spec(LINEAR)
    p = reference.make_parameters(spec, 64, 80, dtype=torch.bfloat16)
    x = _tokens(48, 64)
    out, bias = build(spec, 64, 80, parameters=p, return_bias=True)(x)
    plain = build(Spec(LINEAR, bias=False), 64, 80, parameters={"weight": p["weight"]})(x)
    assert_bitwise_equal("out", out.detach(), plain.detach())
    assert_bitwise_equal("bias", bias.detach(), p["bias"])
