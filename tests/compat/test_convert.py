"""convert_to_float8_training: the numbers of converted layers, and that the rest of torch does not notice."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import leaf

BF16 = torch.bfloat16
POW2 = te.recipe.Float8CurrentScaling(use_power_2_scales=True)
STATELESS = [
    name
    for name, recipe in ((name, te.recipe.from_name(name)) for name in te.recipe.available())
    if recipe.is_fp8 and not recipe.delayed()
]


def convert_all(module, recipe="current", *args, **kwargs):
    """Conversion without the rule about sizes: the layers here are tiny."""
    return te.convert_to_float8_training(module, recipe, *args, tokens=None, **kwargs)


def tokens(*shape, dtype=BF16, device="cpu"):
    return torch.randn(*shape, dtype=dtype, device=device)


def net(dtype=BF16):
    return nn.Sequential(nn.Linear(64, 96, dtype=dtype), nn.GELU(), nn.Linear(96, 64, bias=False, dtype=dtype))


def twin(linear):
    """A te.Linear with the numbers of an nn.Linear."""
    made = te.Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device=linear.weight.device,
    )
    with torch.no_grad():
        for name, parameter in linear.named_parameters():
            getattr(made, name).copy_(parameter)
    return made


def run(module, x, dy):
    """{"out", "dx", gradients} of one forward and backward."""
    module.zero_grad(set_to_none=True)
    x = leaf(x, x.device)
    out = module(x)
    out.backward(dy)
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "dx": x.grad, **grads}


def assert_same(got, expected, label=""):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise_equal(f"{label} {name}", got[name], value)


# ---- numbers ----


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", STATELESS)
def test_runs_the_recipe_without_an_autocast(recipe, bias, device):
    linear = nn.Linear(256, 384, bias=bias, dtype=BF16, device=device)
    other = twin(linear)
    plain = run(linear, x := tokens(160, 256, device=device), dy := tokens(160, 384, device=device))
    convert_all(linear, recipe)
    got = run(linear, x, dy)
    with te.autocast(recipe=recipe):
        expected = run(other, x, dy)
    assert_same(got, expected, recipe)
    assert not torch.equal(got["out"], plain["out"]) and not torch.equal(got["dx"], plain["dx"])


@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (7, 64), (2, 3, 5, 64)], ids=str)
def test_any_leading_shape(shape):
    linear = nn.Linear(64, 96, dtype=BF16)
    other = twin(linear)
    convert_all(linear)
    x, dy = tokens(*shape), tokens(*shape[:-1], 96)
    with te.autocast(recipe="current"):
        expected = run(other, x, dy)
    got = run(linear, x, dy)
    assert got["out"].shape == F.linear(x, linear.weight).shape
    assert_same(got, expected)
    assert_bitwise_equal("keyword", linear(input=x), got["out"])


def test_an_open_autocast_comes_first():
    linear = nn.Linear(64, 96, dtype=BF16)
    other = twin(linear)
    convert_all(linear, POW2)
    x, dy = tokens(24, 64), tokens(24, 96)
    own = run(linear, x, dy)
    plain = run(other, x, dy)
    with te.autocast(recipe="current"):
        assert_same(run(linear, x, dy), run(other, x, dy), "current")
        with te.autocast(enabled=False):
            assert_same(run(linear, x, dy), plain, "disabled inside")
    with te.autocast(enabled=False):
        assert_same(run(linear, x, dy), plain, "disabled")
    for _ in range(2):
        with te.autocast(recipe="delayed"):
            got, expected = run(linear, x, dy), run(other, x, dy)
        assert_same(got, expected, "delayed")
    assert_same(run(linear, x, dy), own, "its own again")


def test_compiled_under_delayed_scaling():
    """It trains as in eager mode, bit for bit; the second step has scales of the first."""
    torch.compiler.reset()
    linear = nn.Linear(64, 96, dtype=BF16)
    other = copy.deepcopy(linear)
    convert_all(linear)
    convert_all(other)
    linear.forward = torch.compile(linear.forward, fullgraph=True, backend="aot_eager")
    outs = []
    for factor in (1, 3):
        x, dy = factor * tokens(24, 64), tokens(24, 96)
        with te.autocast(recipe="delayed"):
            got, expected = run(linear, x, dy), run(other, x, dy)
        assert_same(got, expected)
        outs.append(got["out"])
    with te.autocast(recipe="delayed"):
        assert not torch.equal(run(linear, x, dy)["out"], outs[1])


def test_torch_amp_is_respected():
    linear = nn.Linear(64, 96)
    other = twin(linear)
    convert_all(linear)
    x, dy = tokens(24, 64, dtype=torch.float32), tokens(24, 96)
    with torch.amp.autocast("cpu", dtype=BF16):
        got = run(linear, x, dy)
        with te.autocast(recipe="current"):
            expected = run(other, x, dy)
    assert got["out"].dtype == BF16 and got["weight"].dtype == torch.float32
    assert_same(got, expected)
    with pytest.raises(TypeError, match="must agree"):
        linear(x.to(BF16))


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_checkpoint(reentrant):
    model = net()
    convert_all(model)
    x, dy = tokens(24, 64), tokens(24, 64)
    expected = run(model, x, dy)
    model.zero_grad(set_to_none=True)
    x = leaf(x)
    out = checkpoint(model, x, use_reentrant=reentrant)
    out.backward(dy)
    got = {"out": out.detach(), "dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    assert_same(got, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outside", [{"enabled": False}, {"recipe": POW2}, {"recipe": "delayed"}], ids=str)
def test_recomputation_by_another_recipe(outside, reentrant):
    """An autocast outside of torch's checkpoint is that of the second run too; delayed scaling is refused."""
    model, x, dy = net(), tokens(24, 64), tokens(24, 64)
    convert_all(model)
    run(model, x, dy)  # by its own recipe
    results = []
    for call in (lambda leaf: model(leaf), lambda leaf: checkpoint(model, leaf, use_reentrant=reentrant)):
        model.zero_grad(set_to_none=True)
        given = leaf(x)
        with te.autocast(**outside):
            out = call(given)
        if results and outside.get("recipe") == "delayed":
            with pytest.raises(RuntimeError, match="recomputed with DelayedScaling"):
                out.backward(dy)
            return
        out.backward(dy)
        results.append({"out": out.detach(), "dx": given.grad} | {n: p.grad for n, p in model.named_parameters()})
        del out
    assert_same(results[1], results[0])


def test_frozen_weights_get_no_gradient():
    model = net()
    model[0].weight.requires_grad_(False)
    convert_all(model)
    got = run(model, tokens(24, 64), tokens(24, 64))
    assert "0.weight" not in got and {"dx", "0.bias", "2.weight"} <= got.keys()


# ---- identity ----


def test_everything_else_stays_the_same_object():
    model = net()
    model.eval()
    model[2].train()
    model[0].weight.requires_grad_(False)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    keys = list(model.state_dict())
    attributes = {name: dict(vars(p)) for name, p in parameters.items()}
    flags = [(p.requires_grad, p.dtype, p.device) for p in parameters.values()]
    report = convert_all(model)
    assert report.module is model and [layer.name for layer in report.converted] == ["0", "2"]
    assert dict(model.named_modules()) == modules and list(model.state_dict()) == keys
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert attributes == {name: vars(p) for name, p in parameters.items()}
    assert flags == [(p.requires_grad, p.dtype, p.device) for p in parameters.values()]
    assert (model[0].training, model[2].training) == (False, True)
    assert model[2].bias is None and all(isinstance(model[i], nn.Linear) for i in (0, 2))


def test_a_root_is_converted_in_place():
    linear = nn.Linear(64, 96, dtype=BF16)
    report = convert_all(linear)
    assert report.module is linear and isinstance(linear, te.Linear)
    assert list(linear.state_dict()) == ["weight", "bias"]


def test_hooks_fire_and_can_be_removed():
    linear, seen = nn.Linear(64, 96, dtype=BF16), []
    handles = [
        linear.register_forward_pre_hook(lambda *_: seen.append("pre")),
        linear.register_forward_hook(lambda module, *_: seen.append(type(module).__name__)),
        linear.register_full_backward_hook(lambda *_: seen.append("backward")),
        linear.register_state_dict_post_hook(lambda *_: seen.append("save")),
        linear.register_load_state_dict_pre_hook(lambda *_: seen.append("load")),
    ]
    convert_all(linear)
    run(linear, tokens(8, 64), tokens(8, 96))
    linear.load_state_dict(linear.state_dict())
    assert seen == ["pre", "ConvertedLinear", "backward", "save", "load"]
    for handle in handles:
        handle.remove()
    run(linear, tokens(8, 64), tokens(8, 96))
    assert len(seen) == 5


def test_an_optimizer_made_before_trains_the_model():
    model = net(torch.float32)
    plain = copy.deepcopy(model)
    x, y = tokens(64, 64, dtype=torch.float32), tokens(64, 64, dtype=torch.float32)
    losses = {}
    for name, trained in (("plain", plain), ("converted", model)):
        optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
        if trained is model:
            convert_all(trained)
        for _ in range(40):
            optimizer.zero_grad()
            losses.setdefault(name, []).append(loss := F.mse_loss(trained(x), y))
            loss.backward()
            optimizer.step()
    assert losses["converted"][-1] < 0.5 * losses["converted"][0]
    # E4M3 and E5M2 round to 4 and 3 bits: the path differs, the destination does not by much.
    assert abs(losses["converted"][-1] - losses["plain"][-1]) < 0.1 * losses["plain"][0]


def test_tied_weights_and_shared_modules_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(96, 64, dtype=BF16)
            self.inner = self.again = nn.Linear(64, 64, dtype=BF16)
            self.head = nn.Linear(64, 96, bias=False, dtype=BF16)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.again(self.inner(self.embedding(ids))))

    model = Tied()
    report = convert_all(model)
    assert [layer.name for layer in report.converted] == ["inner", "head"]
    assert model.head.weight is model.embedding.weight and model.inner is model.again
    ids = torch.arange(32)
    model(ids).sum().backward()
    grad = model.embedding.weight.grad
    assert grad[:32].ne(0).any() and grad[32:].ne(0).any()  # the embedding's rows and the head's


def test_checkpoints_move_both_ways():
    before, after = net(), net()
    convert_all(after)
    x = tokens(8, 64)
    for source, target in ((before, after), (after, before)):
        with torch.no_grad():
            source[0].weight.normal_()
        assert target.load_state_dict(source.state_dict()) == ([], [])
        assert_bitwise_equal("weight", target[0].weight, source[0].weight)
    expected = after(x)
    after.load_state_dict({name: value.clone() for name, value in before.state_dict().items()}, assign=True)
    assert_bitwise_equal("assigned", after(x), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_keep_numbers_and_recipe(how):
    model = net()
    convert_all(model, POW2)
    x, dy = tokens(24, 64), tokens(24, 64)
    expected = run(model, x, dy)
    if how == "deepcopy":
        made = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        made = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert made[0].weight is not model[0].weight
    assert vars(made[0].weight) == vars(model[0].weight) and made[2].bias is None
    assert_same(run(made, x, dy), expected)


def test_a_model_on_meta_comes_to_life():
    with torch.device("meta"):
        model = net()
    report = convert_all(model)
    assert len(report.converted) == 2 and model[0].weight.is_meta
    model.to_empty(device="cpu")
    expected = net()
    for made in (model, expected):
        torch.manual_seed(7)
        for i in (0, 2):
            made[i].reset_parameters()
    for name, parameter in expected.named_parameters():
        assert_bitwise_equal(name, model.get_parameter(name), parameter)
    convert_all(expected)
    assert_bitwise_equal("out", model(x := tokens(3, 64)), expected(x))


def test_moving_and_casting_after_a_run():
    model = net(torch.float32)
    convert_all(model)
    model(tokens(8, 64, dtype=torch.float32))
    model.to(BF16)
    assert model(tokens(8, 64)).dtype == BF16
