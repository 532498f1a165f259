"""Quantized parameters written to by optimizers, in checkpoints, copied and moved."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist

import te_lite as te
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.testing.numerics import FACTOR, assert_bitwise_equal
from tests.harness import step, through_a_file, under
from tests.quantize.test_params import (
    KINDS,
    RECIPES,
    K,
    N,
    assert_same,
    assert_same_bytes,
    batch,
    dequantized,
    kinds,
    make,
    recipes,
    weights_of,
)
from tests.reference import LINEAR, LN_MLP

# Optimizers


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
}


@recipes
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_on_the_parameter_itself(name, recipe):
    """As on plain parameters of the same numbers, with a rounding to the format after every write."""
    x, dy = batch(LN_MLP)
    module = make(LN_MLP, recipe)
    plain = dequantized(module, LN_MLP)
    rounded = make(LN_MLP, recipe, seed=9)  # only rounds
    optimizer, twin = OPTIMIZERS[name](module.parameters()), OPTIMIZERS[name](plain.parameters())
    for _ in range(2):
        step(module, x, dy, recipe)
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        if name.startswith("AdamW"):  # decays first, a write of its own: both writes round
            for group in twin.param_groups:
                decay = 1 - group["lr"] * group["weight_decay"]
                with torch.no_grad():
                    for p in group["params"]:
                        p.mul_(decay)
            round_through(plain, rounded)
            for group in twin.param_groups:
                group["weight_decay"] = 0.0
        optimizer.step()
        twin.step()
        round_through(plain, rounded)
        for group in twin.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
        for (key, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert_bitwise_equal(key, ours.detach() + 0, theirs.detach())
    assert all(type(value) is torch.Tensor for state in optimizer.state.values() for value in state.values())


def round_through(plain, rounded):
    """Every weight that is quantized in `rounded` becomes what the format makes of it."""
    with torch.no_grad():
        for name, weight in weights_of(rounded).items():
            weight.copy_(plain.get_parameter(name))
            plain.get_parameter(name).copy_(weight)


STEPS = 30
BUGS = ("not quantized again", "columns left behind")


def train(recipe, quantized, exact=False, bug=None):
    """Loss at each step of a gated MLP that learns a fixed function, by Adam on fp32 masters."""
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe, preserve_high_precision_init_val=True):
        mlp = te.LayerNormMLP(
            K, 2 * K, activation="swiglu", normalization="RMSNorm", params_dtype=torch.bfloat16, device="cpu"
        )
    mlp = mlp.float() if exact else mlp
    params = list(mlp.parameters())
    first = [p.get_high_precision_init_val() if isinstance(p, QuantizedTensor) else p.detach() for p in params]
    masters = [value.float().clone() for value in first]
    optimizer = torch.optim.Adam(masters, lr=1e-2)
    w1, w2 = (torch.randn(K, K, generator=torch.Generator().manual_seed(s)) / K**0.5 for s in (1, 2))
    losses = []
    for i in range(STEPS):
        x = torch.randn(128, K, generator=torch.Generator().manual_seed(100 + i))
        with contextlib.nullcontext() if exact else under(recipe):
            y = mlp(x.to(params[0].dtype))
        loss = (y.float() - torch.tanh(x @ w1) @ w2).square().mean()
        mlp.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                write(param, master, bug)
    return torch.stack(losses)


def write(param, master, bug):
    kept = param.q.col if bug and isinstance(param, QuantizedTensor) else None
    if kept is None or bug == "columns left behind":
        kept = None if kept is None else kept.clone()
        param.copy_(master)
    if kept is not None:
        param.q.col.copy_(kept)


@recipes
def test_training_follows_the_run_with_bf16_parameters(recipe):
    """Both runs stray from the fp32 run by the recipe's own error; quantized parameters must not stray further than
    twice what bf16 parameters do (the oracle's factor for two honest computations). Mistakes do.
    """
    exact = train(recipe, quantized=False, exact=True)
    assert exact[-1] < 0.6 * exact[0]

    def strays(losses):
        return float((losses - exact).square().mean().sqrt())

    bound = FACTOR * strays(train(recipe, quantized=False))
    assert strays(train(recipe, quantized=True)) <= bound
    for bug in BUGS:
        assert strays(train(recipe, quantized=True, bug=bug)) > 2 * bound, bug


# Checkpoints


@recipes
@kinds
def test_a_checkpoint_restores_every_byte(kind, recipe):
    x, dy = batch(kind)
    module, other = make(kind, recipe), make(kind, recipe, seed=5)
    step(module, x, dy, recipe)
    other.load_state_dict(through_a_file(module.state_dict()))
    for name, weight in weights_of(module).items():
        assert_same_bytes(name, other.get_parameter(name), weight)
    assert_same("next step", step(other, x, dy, recipe), step(module, x, dy, recipe))


@recipes
@kinds
def test_bf16_checkpoints_go_in_and_out(kind, recipe):
    plain = make(kind)
    module = make(kind, recipe, seed=5)
    module.load_state_dict(through_a_file(plain.state_dict()))
    for name, weight in weights_of(module).items():
        assert isinstance(weight, QuantizedTensor)
        assert_same_bytes(name, weight, make(kind, recipe).get_parameter(name))
    back = make(kind, seed=6)
    back.load_state_dict(through_a_file(module.state_dict()))
    for name, p in back.named_parameters():
        want = module.get_parameter(name)
        assert type(p) is torch.nn.Parameter
        assert_bitwise_equal(name, p, want.dequantize() if isinstance(want, QuantizedTensor) else want)


def test_a_kept_weight_is_not_used_after_loading():
    x, _ = batch(LINEAR)
    module, other = make(LINEAR, "current"), make(LINEAR, "current", seed=5)
    with torch.no_grad(), under("current"):
        module(x, is_first_microbatch=True)
        module.load_state_dict(other.state_dict())
        assert_bitwise_equal("out", module(x, is_first_microbatch=False), other(x))


# Copies, devices, wrappers


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@kinds
def test_a_deep_copy_is_its_own(kind, recipe):
    x, dy = batch(kind)
    module = make(kind, recipe)
    want = step(module, x, dy, recipe)
    twin = copy.deepcopy(module)
    for name, weight in weights_of(twin).items():
        assert (
            isinstance(weight, torch.nn.Parameter) and weight.partition_dim == module.get_parameter(name).partition_dim
        )
        assert_bitwise_equal("gradient", weight.grad, module.get_parameter(name).grad)
    with torch.no_grad():
        for weight in weights_of(module).values():
            weight.zero_()
    assert_same("copy", step(twin, x, dy, recipe), want)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@recipes
def test_moving_a_module_keeps_its_parameters(recipe, device):
    """The optimizer's objects stay the module's; nothing is quantized again."""
    module = make(LINEAR, recipe)
    weight, bytes_ = module.weight, module.weight.q.row.clone()
    module.to(device)
    assert isinstance(module.weight, QuantizedTensor) and module.weight.device.type == device
    assert all(t is None or t.device.type == device for t in module.weight.q.tensors)
    assert repr(module.weight)
    if device == "cuda":  # torch itself makes new parameters on the meta device
        assert module.weight is weight
        assert_bitwise_equal("bytes", weight.q.row.view(torch.uint8).cpu(), bytes_.view(torch.uint8))
        x, dy = batch(LINEAR)
        step(module, x, dy, recipe)


@pytest.mark.parametrize("change", [lambda m: m.half(), lambda m: m.float(), lambda m: m.to_empty(device="cpu")])
def test_what_would_dequantize_a_module_is_refused(change):
    module = make(LINEAR, "current")
    with pytest.raises(TypeError, match="params_dtype"):
        change(module)
    assert [type(p.data) for p in module.parameters()] == [QuantizedTensor, torch.Tensor]
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())  # nothing was changed


@pytest.mark.parametrize("how", ["reset", "to_empty, reset"])
@kinds
def test_the_meta_device(kind, how):
    module = make_meta(kind)
    if how.startswith("to_empty"):
        module.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match="quantized_model_init"):
            module(batch(kind)[0].float())
    torch.manual_seed(4)
    module.reset_parameters()
    device = next(iter(weights_of(module).values())).device  # a GPU's random numbers are others than the CPU's
    torch.manual_seed(4)
    with te.quantized_model_init(recipe="current"):
        want = LAYERS[kind](device=device)
    assert len(weights_of(module)) == len(weights_of(want)) > 0
    for name, weight in weights_of(module).items():
        assert_same_bytes(name, weight, want.get_parameter(name))


LAYERS = {
    "Linear": lambda **kw: te.Linear(K, N, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(K, N, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(K, 2 * K, **kw),
}
assert LAYERS.keys() == set(KINDS)


def make_meta(kind):
    with te.quantized_model_init(recipe="current"):
        return LAYERS[kind](device="meta")


def test_replaced_parameters_are_noticed():
    module = make(LINEAR, "current")
    module.load_state_dict(make(LINEAR).state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="Linear.weight was made under quantized_model_init"):
        module(batch(LINEAR)[0])


def test_ddp_trains_them_and_fsdp_is_refused(one_rank):
    from torch.distributed.fsdp import fully_shard

    x, dy = batch(LINEAR)
    module = make(LINEAR, "current")
    want = step(make(LINEAR, "current"), x, dy, "current")
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    with under("current"):
        wrapped(x).backward(dy)
    assert isinstance(module.weight, QuantizedTensor)
    assert_bitwise_equal("gradient", module.weight.grad, want["weight"])
    sharded = fully_shard(make(LINEAR, "current"), mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match="FSDP"), under("current"):
        sharded(x)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
def test_evaluation_under_inference_mode(recipe):
    x, dy = batch(LN_MLP)
    module = make(LN_MLP, recipe)
    want = step(make(LN_MLP, recipe), x, dy, recipe)
    with torch.inference_mode(), under(recipe):
        assert_bitwise_equal("out", module(x).clone(), want["out"])
    assert_same("training after it", step(module, x, dy, recipe), want)


@kinds
def test_torch_compile_loses_no_gradient(kind):
    x, dy = batch(kind)
    module = make(kind, "current")
    want = step(module, x, dy, "current")
    compiled = torch.compile(module, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    with under("current"):
        y = compiled(leaf)
    y.backward(dy)
    got = {"out": y.detach(), "dx": leaf.grad, **{n: p.grad for n, p in module.named_parameters()}}
    assert_same("compiled", got, want)
