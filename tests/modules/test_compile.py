"""torch.compile(fullgraph=True) of every module and recipe: the bits of eager mode, in gradients and states too."""

import copy
import functools

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

import te_lite as te
from te_lite.compat.convert import convert_to_float8_training
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import RECIPES, delayed_state, has_scales, leaf, under

BF16 = torch.bfloat16
WIDTH, STEPS = 32, 10
no_recompilation = torch._dynamo.config.patch(error_on_recompile=True)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def linear(device, **options):
    return te.Linear(WIDTH, 48, params_dtype=BF16, device=device, **options)


def norm_linear(device, **options):
    return te.LayerNormLinear(WIDTH, 48, params_dtype=BF16, device=device, **options)


def mlp(device, **options):
    return te.LayerNormMLP(WIDTH, 64, **({"activation": "swiglu", "params_dtype": BF16, "device": device} | options))


def converted(device):
    model = nn.Sequential(nn.Linear(WIDTH, 48, dtype=BF16, device=device))
    assert convert_to_float8_training(model, tokens=None).converted
    return model[0]


def both_outputs(device):
    return norm_linear(device, return_layernorm_output=True, return_bias=True, normalization="RMSNorm")


def clamped(device):
    return mlp(device, activation="clamped_swiglu", activation_params={"limit": 0.7}, recompute_activation=True)


MODULES = {"Linear": linear, "LayerNormLinear": norm_linear, "LayerNormMLP": mlp}
OPTIONS = {
    "split": functools.partial(linear, parameters_split=("q", "k")),
    "no bias": functools.partial(linear, bias=False),
    "original": functools.partial(linear, save_original_input=True),
    "converted": converted,
    "both outputs": both_outputs,
    "zero-centred": functools.partial(norm_linear, zero_centered_gamma=True, eps=1e-3),
    "clamped": clamped,
    "checkpoint": functools.partial(mlp, checkpoint=True),
}
FEW = ("bf16", "delayed", "current", "rowwise_with_gw_hp")
ALL = [(kind, recipe) for kind in MODULES for recipe in RECIPES]
TABLE = ALL + [(kind, recipe) for kind in OPTIONS for recipe in FEW if (kind, recipe) != ("original", "delayed")]


def make(kind, device):
    return (MODULES | OPTIONS)[kind](device)


def values(out):
    """All outputs of a module in one tensor, so that each of them has a gradient."""
    parts = out if isinstance(out, tuple) else (out,)
    return torch.cat([part.expand(*parts[0].shape[:-1], part.shape[-1]) for part in parts], dim=-1)


def state_of(net):
    return {
        f"{name} state": part.get_extra_state().clone()
        for name, part in net.named_modules()
        if isinstance(part, (te.Linear, te.LayerNormLinear, te.LayerNormMLP)) and not isinstance(part, nn.Linear)
    }


def step(net, call, i, recipe, device, shape=(48,)):
    """Step i: other magnitudes each time, an input and a gradient that are not contiguous; between forward and backward
    others fill memory that is free with nan, and the caller its own input."""
    torch.manual_seed(i)
    x = leaf(torch.randn(WIDTH, *shape, dtype=BF16) * 3 ** (i % 5), device)
    net.zero_grad()
    given = x.movedim(0, -1)
    with under(recipe):
        y = values(call(given))
    junk = [torch.full((n, 64), torch.nan, dtype=BF16, device=device) for n in (16, 32, 48, 48, 64)]
    dy = torch.randn(y.shape[-1], *shape).to(y).movedim(0, -1)
    result = {f"{i} y": y.detach().clone()}
    y.backward(dy)
    del junk
    grads = {"x": x} | dict(net.named_parameters())
    return result | {f"{i} d{name}": p.grad.clone() for name, p in grads.items() if p.grad is not None}


def train(net, call, recipe, device, steps=STEPS, shape=(48,)):
    """What the steps leave. The state is looked at after some of them, which must not change what follows."""
    results = {}
    for i in range(steps):
        results |= step(net, call, i, recipe, device, shape)
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-0.01)
        if i % 4 == 2:
            results |= {f"{i} {name}": value for name, value in state_of(net).items()}
    return results | state_of(net)


def assert_same(got, want):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])


def twins(made):
    return made, copy.deepcopy(made)


def graphs():
    return counters["stats"]["unique_graphs"]


def compiled(net, backend="aot_eager", **options):
    return torch.compile(net, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("kind, recipe", TABLE)
def test_ten_steps(kind, recipe, device):
    """One graph, compiled once; all outputs, gradients, histories and scales."""
    eager, net = twins(make(kind, device))
    want = train(eager, eager, recipe, device)
    with no_recompilation:
        assert_same(train(net, compiled(net), recipe, device), want)
    assert graphs() == 1
    if kind in MODULES:
        assert set(want) >= {f"9 d{name}" for name, _ in net.named_parameters()}
        assert recipe != "delayed" or has_scales(want[" state"])


class Model(nn.Module):
    """Modules between operations of torch: one is used twice, a residual is added, an output has two readers."""

    def __init__(self, device):
        super().__init__()
        self.first = norm_linear(device, return_layernorm_output=True, name="first")
        self.back = te.Linear(48, WIDTH, params_dtype=BF16, device=device, name="back")
        self.blocks = nn.ModuleList([mlp(device, name=f"block {i}") for i in range(2)])
        self.norm = te.RMSNorm(WIDTH, params_dtype=BF16, device=device)

    def forward(self, x):
        y, normed = self.first(x * 2)
        x = self.back(y.relu()) + normed
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, residual=x)
        return self.norm(x).clone()


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_whole_model(recipe, device):
    eager, net = twins(Model(device))
    want = train(eager, eager, recipe, device, 4, (2, 24))
    with no_recompilation:
        assert_same(train(net, compiled(net), recipe, device, 4, (2, 24)), want)
    assert graphs() == 1


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_inductor(recipe, device):
    """It plans memory and orders operations by itself. What surrounds te_lite here has the same bits in any order."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = mlp(device)
            self.linear = linear(device)

        def forward(self, x):
            return self.linear(self.block(x * 2) * 0.5)

    eager, net = twins(Around())
    want = train(eager, eager, recipe, device)
    with no_recompilation:
        assert_same(train(net, compiled(net, "inductor"), recipe, device), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["delayed", "current"])  # for bf16 inductor has GEMMs of its own
def test_reduce_overhead(recipe):
    eager, net = twins(mlp("cuda"))
    want = train(eager, eager, recipe, "cuda")
    assert_same(train(net, compiled(net, "inductor", mode="reduce-overhead"), recipe, "cuda"), want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_input_may_change_before_backward(recipe):
    """By .data, which leaves no trace: what eager mode does not read again compiled code does not read either."""
    eager, net = twins(linear("cpu"))
    results = []
    for module, run in ((eager, eager), (net, compiled(net, "inductor"))):
        torch.manual_seed(0)
        x = leaf(torch.randn(48, WIDTH, dtype=BF16))
        with under(recipe):
            y = run(x)
        x.data.fill_(torch.nan)
        y.backward(torch.randn_like(y))
        results.append({"dx": x.grad, "dw": module.weight.grad, "db": module.bias.grad})
    if recipe not in ("bf16", "rowwise_with_gw_hp"):  # there x itself is kept
        assert results[0]["dw"].isfinite().all()
    assert_same(results[1], results[0])


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("kind", MODULES)
def test_evaluation_and_amp(kind, recipe):
    """Evaluations record maxima and take no step; torch.amp chooses the dtype."""
    eager, net = twins(make(kind, "cpu"))
    call = compiled(net)
    x = torch.randn(48, WIDTH)
    results = []
    for module, run in ((eager, eager), (net, call)):
        found = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode(), under(recipe):
                found.append(run(x.to(BF16)).detach().clone())
            found += state_of(module).values()
        with torch.amp.autocast("cpu", BF16), under(recipe):
            y = run(x)
        y.sum().backward()
        found += [y.detach(), *[p.grad for p in module.parameters()]]
        results.append({str(i): value for i, value in enumerate(found)})
    assert_same(results[1], results[0])


def test_training_after_a_module_that_was_first_evaluated_in_inference_mode():
    """Its state lies where the step of an evaluation put it, and is written to by steps that follow."""
    late, x = linear("cpu"), torch.randn(48, WIDTH, dtype=BF16)
    call = compiled(linear("cpu"))
    with under("delayed"):
        call(x)
    with torch.inference_mode(), under("delayed"):
        late(x)
    kept = {"weight": late.weight.detach().clone(), "state": late.get_extra_state().clone()}
    for _ in range(2):
        with under("delayed"):
            (call(x).sum() + late(x).sum()).backward()
    late.load_state_dict({"weight": kept["weight"], "bias": late.bias, "_extra_state": kept["state"]})
    assert torch.equal(late.get_extra_state(), kept["state"])
    assert late.weight.grad.isfinite().all()


def test_delayed_scaling_through_checkpoints_copies_and_eager_steps():
    """Compiled and eager steps follow each other; states are loaded and modules copied between them."""
    eager, net = twins(mlp("cpu"))
    call, old = compiled(net), torch.empty(0)
    want: dict = {}
    got: dict = {}
    for i in range(8):
        if i == 4:
            assert not torch.equal(old, eager.get_extra_state())
            eager.load_state_dict(copy.deepcopy(eager.state_dict()) | {"_extra_state": old})
            net.load_state_dict(copy.deepcopy(net.state_dict()) | {"_extra_state": old})
        if i == 6:
            eager, net = copy.deepcopy(eager), copy.deepcopy(net)
            call = compiled(net)
        want |= step(eager, eager, i, "delayed", "cpu")
        got |= step(net, net if i in (2, 5) else call, i, "delayed", "cpu")
        if i == 1:
            old = eager.get_extra_state().clone()
    assert_same(got | state_of(net), want | state_of(eager))


def test_several_passes_before_their_backward():
    """Each pass has its own maxima, of which one step is taken together. A second call in a pass is refused."""
    eager, net = twins(linear("cpu"))
    call = compiled(net)
    for run in (eager, call):
        for i in range(3):
            outputs = []
            for _ in range(2):
                with under("delayed"):
                    outputs.append(run(torch.randn(48, WIDTH, dtype=BF16)))
            for j, y in enumerate(outputs):
                y.backward(torch.full_like(y, 1 + (2 * i + 3 * j) % 5))  # maxima 1, 4, then 3, 1, then 5, 3
    assert delayed_state(eager)["history_bwd"][-6:, 0].tolist() == [1, 4, 3, 1, 5, 3]
    assert delayed_state(net)["history_bwd"][-4:, 0].tolist() == [0, 4, 3, 5]
    with under("delayed"):
        outputs = [call(torch.randn(48, WIDTH, dtype=BF16)) for _ in range(2)]
    outputs[1].sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norms(kind, dtype):
    eager, net = twins(getattr(te, kind)(WIDTH, params_dtype=dtype, device="cpu"))
    results = []
    for module, run in ((eager, eager), (net, compiled(net))):
        torch.manual_seed(0)
        x = torch.randn(48, WIDTH, dtype=dtype).requires_grad_()
        y = run(x)
        y.backward(torch.randn(48, WIDTH, dtype=dtype))
        results.append({"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in module.named_parameters()})
    assert_same(results[1], results[0])
