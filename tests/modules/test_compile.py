"""torch.compile: each module runs as in eager mode, whole, between what is compiled before and after it."""

import contextlib
import copy
import functools

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import checkpoint as torch_checkpoint

import te_lite as te
from te_lite.compat.convert import convert_to_float8_training
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import RECIPES, delayed_state, leaf, under

BF16 = torch.bfloat16
WIDTH, STEPS = 32, 4


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def linear(device, **options):
    return te.Linear(WIDTH, WIDTH, params_dtype=BF16, device=device, **options)


def quantized(device):
    with te.quantized_model_init(recipe="current"):
        return linear(device)


def converted(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=BF16, device=device))
    assert convert_to_float8_training(model, tokens=None).converted
    return model[0]


def norm_linear(device):
    options = {"return_layernorm_output": True, "return_bias": True, "params_dtype": BF16, "device": device}
    return te.LayerNormLinear(WIDTH, WIDTH, **options)


def mlp(device, **options):
    return te.LayerNormMLP(WIDTH, 64, activation="swiglu", params_dtype=BF16, device=device, **options)


KINDS = {
    "Linear": linear,
    "Linear return_bias": functools.partial(linear, return_bias=True),
    "Linear split": functools.partial(linear, parameters_split=("q", "k")),
    "Linear delay_wgrad": functools.partial(linear, delay_wgrad_compute=True),
    "quantized": quantized,
    "converted": converted,
    "LayerNormLinear": norm_linear,
    "LayerNormMLP": mlp,
    "LayerNormMLP checkpoint": functools.partial(mlp, checkpoint=True),
}


def total(out):
    """All outputs of a module in one tensor, so that each of them has a gradient."""
    return sum(out[1:], start=out[0]) if isinstance(out, tuple) else out


class Around(nn.Module):
    """The module between operations of torch, whose bits do not depend on who runs them."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, **options):
        return total(self.module(x * 2, **options)) * 0.5


def train(net, call, recipe, device, options=({},) * STEPS, read_only=False):
    """What STEPS steps leave: outputs, gradients, parameters, scales."""
    results = {}
    for i, given in enumerate(options):
        torch.manual_seed(i)
        x = leaf(torch.randn(48, WIDTH, dtype=BF16) * 3**i, device)
        dy = torch.randn(48, WIDTH, dtype=BF16).to(device)
        net.zero_grad()
        with under(recipe):
            y = call(x, **given)
        y.backward(dy)
        for part in net.modules():
            if getattr(part, "delay_wgrad_compute", False):
                part.backward_dw()
        results |= {f"{i} y": y.detach(), f"{i} dx": x.grad}
        results |= {f"{i} {name}": p.grad.clone() for name, p in net.named_parameters()}
        with torch.no_grad():
            for p in net.parameters():
                if not read_only:
                    p.add_(p.grad, alpha=-0.01)
    for name, part in net.named_modules():
        if isinstance(part, (te.Linear, te.LayerNormLinear, te.LayerNormMLP)) and not isinstance(part, nn.Linear):
            results |= {f"{name} {key}": value for key, value in delayed_state(part).items()}
    return results


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])


def breaks():
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


no_recompilation = torch._dynamo.config.patch(error_on_recompile=True)


def recipes_of(kind):
    if kind == "quantized":
        return ["current"]
    return RECIPES if kind in ("Linear", "LayerNormMLP") else ["bf16", "delayed", "current"]


TABLE = [(kind, recipe) for kind in KINDS for recipe in recipes_of(kind)]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("kind, recipe", TABLE)
def test_training_has_the_bits_of_eager_mode(kind, recipe, device):
    """Between compiled operations, over steps, without compiling again; two graphs are left of one function."""
    nets = [Around(KINDS[kind](device))]
    nets.append(copy.deepcopy(nets[0]))
    want = train(nets[0], nets[0], recipe, device)
    with no_recompilation:
        got = train(nets[1], torch.compile(nets[1], backend="aot_eager"), recipe, device)
    assert_same(got, want)
    assert breaks()[1] == 2
    assert len(counters["graph_break"]) == 1, list(counters["graph_break"])
    assert "te_lite's linears and its autocast are not traced" in next(iter(counters["graph_break"]))


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_alone_and_in_evaluation(kind, recipe, device):
    """torch.compile(module), then the same under no_grad and inference_mode: one break, the bits of eager mode."""
    if recipe not in recipes_of(kind):
        pytest.skip("one recipe has that format")
    module = KINDS[kind](device)
    module.eval()
    x = torch.randn(48, WIDTH, dtype=BF16, device=device)
    compiled = torch.compile(module, backend="eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), under(recipe):
            want = total(module(x))
            torch._dynamo.reset()
            counters.clear()
            assert_bitwise_equal(mode.__name__, total(compiled(x)).clone(), want.clone())
            assert breaks() == (1 + (kind == "converted"), 0)  # a forward that calls a forward


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_inductor(recipe):
    nets = [Around(mlp("cpu"))]
    nets.append(copy.deepcopy(nets[0]))
    want = train(nets[0], nets[0], recipe, "cpu")
    compiled = torch.compile(nets[1])
    with no_recompilation:
        assert_same(train(nets[1], compiled, recipe, "cpu"), want)
    x = torch.randn(48, WIDTH, dtype=BF16)
    with torch.no_grad(), under(recipe):
        assert_bitwise_equal("evaluation", compiled(x), nets[0](x))


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_is_first_microbatch(kind):
    """Each of its values is compiled once."""
    options = [{"is_first_microbatch": i % 2 == 0} for i in range(STEPS)]
    nets = [Around(KINDS[kind]("cpu"))]
    nets.append(copy.deepcopy(nets[0]))
    want = train(nets[0], nets[0], "current", "cpu", options)
    compiled = torch.compile(nets[1], backend="aot_eager")
    assert_same(train(nets[1], compiled, "current", "cpu", options), want)


def test_residual_and_quantized_outputs():
    """Arguments that only some forwards have reach them."""
    module, x = linear("cpu"), torch.randn(48, WIDTH, dtype=BF16)
    compiled = torch.compile(module, backend="aot_eager")
    with torch.no_grad(), under("current"):
        assert_bitwise_equal("residual", compiled(x, residual=x), module(x, residual=x))
        got = compiled(x, fp8_output=True)
        assert isinstance(got, te.QuantizedTensor)
        assert_bitwise_equal("fp8_output", got.dequantize(), module(x, fp8_output=True).dequantize())
    block = mlp("cpu")
    with torch.no_grad():
        compiled = torch.compile(block, backend="aot_eager")
        assert_bitwise_equal("residual of an MLP", compiled(x, residual=x), block(x, residual=x))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norms_are_compiled(kind, dtype):
    """A norm alone is traced: no graph break, and with aot_eager the bits of eager mode."""
    norm = getattr(te, kind)(WIDTH, params_dtype=dtype, device="cpu")
    results = []
    for call in (norm, torch.compile(norm, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        norm.zero_grad()
        x = torch.randn(48, WIDTH, dtype=dtype).requires_grad_()
        y = call(x)
        y.backward(torch.randn(48, WIDTH, dtype=dtype))
        results.append({"y": y.detach(), "dx": x.grad} | {n: p.grad.clone() for n, p in norm.named_parameters()})
    assert_same(results[1], results[0])
    assert breaks()[0] == 0


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_an_autocast_inside_the_compiled_function(recipe):
    """Bits and scales of eager mode, delayed scaling's step taken once; nothing is compiled again at each step, but by
    torch 2.11, which guards the autocast object itself."""
    nets = [Around(mlp("cpu"))]
    nets.append(copy.deepcopy(nets[0]))

    def inside(net, x):
        with under(recipe):
            return net(x) * 2

    want = train(nets[0], functools.partial(inside, nets[0]), None, "cpu")
    with contextlib.nullcontext() if torch.__version__ < (2, 12) else no_recompilation:
        compiled = torch.compile(functools.partial(inside, nets[1]), backend="aot_eager")
        assert_same(train(nets[1], compiled, None, "cpu"), want)


CHECKPOINTS = {
    "te": functools.partial(te.checkpoint, use_reentrant=False),
    "te reentrant": te.checkpoint,
    "torch": functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_a_checkpoint_inside_the_compiled_function(how, recipe):
    if how == "torch" and recipe == "delayed":
        pytest.skip("needs te.checkpoint, compiled or not")
    nets = [Around(mlp("cpu"))]
    nets.append(copy.deepcopy(nets[0]))

    def inside(net, x):
        return CHECKPOINTS[how](net, x) * 2

    want = train(nets[0], lambda x: nets[0](x) * 2, recipe, "cpu")
    with no_recompilation:
        compiled = torch.compile(functools.partial(inside, nets[1]), backend="aot_eager")
        assert_same(train(nets[1], compiled, recipe, "cpu"), want)


@pytest.mark.parametrize("recipe", ["bf16", "current"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "quantized"])
def test_fullgraph_is_refused(kind, recipe):
    module = KINDS[kind]("cpu")
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with under(recipe), pytest.raises(Exception, match="te_lite's linears and its autocast are not traced"):
        compiled(torch.randn(48, WIDTH, dtype=BF16))
