"""Activation checkpointing: bitwise the same training, whatever is recomputed."""

import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.memory import bytes_kept
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import FP8, RECIPES, delayed_state, leaf, under

STEPS = 10
RNG_STATE = 6 * 1024  # torch's checkpoint keeps the generator's state: 5,056 bytes for the CPU's
MODES = ("none", "selective", "full", "nested")


class Block(nn.Module):
    """x + linear(dropout(mlp(x))), as a user writes it."""

    def __init__(self, device):
        super().__init__()
        options = {"device": device, "params_dtype": torch.bfloat16}
        self.mlp = te.LayerNormMLP(32, 48, activation="swiglu", **options)
        self.linear = te.Linear(32, 32, **options)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.linear(self.dropout(self.mlp(x)))


class Net(nn.Module):
    """Three blocks; `mode` says which calls are checkpointed, `call` how."""

    def __init__(self, mode, call, device="cpu"):
        super().__init__()
        self.blocks = nn.ModuleList(Block(device) for _ in range(3))
        self.mode, self.call = mode, call

    def forward(self, x):
        if self.mode == "full":
            return self.call(self._all, x)
        if self.mode == "nested":
            return self.call(self._all_each, x)
        for i, block in enumerate(self.blocks):
            x = self.call(block, x) if self.mode == "selective" and i != 1 else block(x)
        return x

    def _all(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def _all_each(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


def recipe_for(name):
    return te.recipe.DelayedScaling(amax_history_len=4) if name == "delayed" else name


def train(mode, call, recipe, device="cpu", steps=STEPS):
    """(losses, gradients of the last step, amax state of every module) of a few steps of SGD."""
    torch.manual_seed(0)
    net = Net(mode, call, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for i in range(steps):
        torch.manual_seed(100 + i)
        x = leaf(reference.make_tokens(16, 32, seed=i, dtype=torch.bfloat16, scale=1 + i % 3), device)
        with under(recipe_for(recipe)):
            out = net(x)
        loss = out.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()} | {"x": x.grad}
    return torch.stack(losses), grads, states(net)


def states(net):
    found = {}
    for name, module in net.named_modules():
        if isinstance(module, (te.Linear, te.LayerNormMLP)):
            found.update({f"{name}.{key}": value.clone() for key, value in delayed_state(module).items()})
    return found


def assert_same(got, want):
    for i, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
        assert_bitwise_equal(f"loss of step {i}", a, b)
    for kind in (1, 2):
        assert set(got[kind]) == set(want[kind])
        for name in want[kind]:
            assert_bitwise_equal(name, got[kind][name], want[kind][name])


@functools.lru_cache
def baseline(recipe, device="cpu"):
    return train("none", None, recipe, device)


CALLS = {
    "te reentrant": functools.partial(te.checkpoint, use_reentrant=True),
    "te": functools.partial(te.checkpoint, use_reentrant=False),
    "torch with context_fn": functools.partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=te.checkpoint_context_fn
    ),
}


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", CALLS)
def test_training_is_bitwise_the_same(how, mode, recipe, device):
    """Losses, gradients and amax histories over 10 steps do not depend on what is recomputed, nor on how."""
    if mode == "none":
        assert_same(train("none", None, recipe, device), baseline(recipe, device))
        return
    assert_same(train(mode, CALLS[how], recipe, device), baseline(recipe, device))


def test_the_delayed_baseline_has_a_history():
    """Nothing above compares empty with empty."""
    state = baseline("delayed")[2]
    assert len(state) == 3 * 2 * 4
    assert all(bool((v != 0).any()) for v in state.values())
    assert all(not torch.equal(v, torch.ones_like(v)) for k, v in state.items() if "scale" in k)


OWN_CALLS = {
    "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "torch reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
}


def train_block(call, recipe):
    """Three steps of one block whose autocast is opened inside the function that `call` checkpoints."""
    torch.manual_seed(0)
    block = Block("cpu")

    def inside(x):
        with under(recipe_for(recipe)):
            return block(x)

    for i in range(3):
        torch.manual_seed(5 + i)
        block.zero_grad()
        x = leaf(reference.make_tokens(16, 32, seed=i, dtype=torch.bfloat16))
        out = call(inside, x)
        out.backward(reference.make_tokens(16, 32, seed=50 + i, dtype=torch.bfloat16))
    grads = {name: p.grad for name, p in block.named_parameters()} | {"x": x.grad}
    return out.detach()[None], grads, states(block)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("how", [*OWN_CALLS, *CALLS])
def test_autocast_inside_the_checkpointed_function(how, recipe):
    """Results are those without a checkpoint. Only te_lite's own checkpoints (or context_fn) carry delayed scales:
    torch's alone may refuse there, but never differ in silence."""
    want = train_block(lambda fn, x: fn(x), recipe)
    if how in OWN_CALLS and recipe == "delayed":
        try:
            got = train_block(OWN_CALLS[how], recipe)
        except RuntimeError as error:
            assert "te.checkpoint" in str(error)
            return
    else:
        got = train_block({**OWN_CALLS, **CALLS}[how], recipe)
    assert_same(got, want)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torch_checkpoint_without_context_fn_raises(use_reentrant):
    """It does not carry delayed scaling's scales: an error that names the remedy. test_recompute.py has recipes
    without state."""
    block = Block("cpu")
    x = leaf(reference.make_tokens(16, 32, dtype=torch.bfloat16))
    with under("delayed"):
        out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match="te.checkpoint|context_fn"):
        out.sum().backward()
    # Nothing is stuck: the same block goes on under te.checkpoint.
    with under("delayed"):
        out = te.checkpoint(block, x, use_reentrant=use_reentrant)
    out.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torch_checkpoint_in_high_precision_needs_nothing(use_reentrant):
    block = Block("cpu").eval()
    x = leaf(reference.make_tokens(16, 32, dtype=torch.bfloat16))
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
    got, x.grad = x.grad, None
    block(x).sum().backward()
    assert_bitwise_equal("dx", got, x.grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_backward_in_another_order_than_forward(use_reentrant, recipe):
    """Two checkpointed calls of one module, backwards in forward order: state belongs to the call, not a
    queue.
    """
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        block = Block("cpu").eval()
        inputs = [leaf(reference.make_tokens(16, 32, seed=i, dtype=torch.bfloat16, scale=3**i)) for i in range(3)]
        outs = []
        for x in inputs:
            with under(recipe_for(recipe)):
                call = functools.partial(te.checkpoint, use_reentrant=use_reentrant)
                outs.append(call(block, x) if checkpointed else block(x))
        for i in (1, 0, 2):
            outs[i].sum().backward()
        grads.append({f"x{i}": x.grad for i, x in enumerate(inputs)} | {n: p.grad for n, p in block.named_parameters()})
    for name in grads[0]:
        assert_bitwise_equal(name, grads[1][name], grads[0][name])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_keyword_arguments_tuples_and_rng_tracker(use_reentrant):
    """Keywords reach the function, tuples come back, and a tracker's states are rewound for the second
    run.
    """
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    linear = te.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16)
    drawn = []

    def fn(x, *, scale):
        with tracker.fork():
            drawn.append(torch.rand(4))
        return linear(x) * scale, x

    x = leaf(reference.make_tokens(16, 32, dtype=torch.bfloat16))
    options = {"use_reentrant": use_reentrant, "get_rng_state_tracker": lambda: tracker}
    out, same = te.checkpoint(fn, x, scale=2.0, **options)
    with tracker.fork():
        after = torch.rand(4)
    out.sum().backward()
    assert len(drawn) == 2
    assert_bitwise_equal("recomputed draw", drawn[1], drawn[0])
    assert not torch.equal(after, drawn[0])
    with tracker.fork():  # the rewinding did not leak out
        assert not torch.equal(torch.rand(4), after)


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_keeps_only_the_input(recipe):
    block = Block("cpu").eval()
    x = leaf(reference.make_tokens(256, 32, dtype=torch.bfloat16))
    with under(recipe):
        full = bytes_kept(block(x))
        out = te.checkpoint(block, x, use_reentrant=True)
    assert bytes_kept(out) <= x.numel() * x.element_size() + RNG_STATE < full


def test_inference_needs_no_checkpoint():
    block = Block("cpu").eval()
    x = reference.make_tokens(16, 32, dtype=torch.bfloat16)
    with torch.no_grad(), under("current"):
        assert_bitwise_equal("out", te.checkpoint(block, x, use_reentrant=False), block(x))


# ---- a returned bias, as Megatron's MLP returns (out, bias) ----

BIASED = {
    "Linear": lambda **o: te.Linear(32, 32, **o),
    "Linear row": lambda **o: te.Linear(32, 32, parallel_mode="row", **o),
    "Linear split": lambda **o: te.Linear(32, 32, parameters_split=("q", "k"), **o),
    "Linear without bias": lambda **o: te.Linear(32, 32, bias=False, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(32, 32, return_layernorm_output=True, **o),
    "LayerNormLinear split": lambda **o: te.LayerNormLinear(32, 32, parameters_split={"q": 24, "k": 8}, **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(32, 48, set_parallel_mode=True, **o),
    "LayerNormMLP checkpoint": lambda **o: te.LayerNormMLP(32, 48, checkpoint=True, **o),
}


def train_biased(kind, call, recipe, frozen, device):
    """(outputs and gradients of three steps, the module); the bias is added outside of what `call` checkpoints."""
    torch.manual_seed(0)
    module = BIASED[kind](return_bias=True, params_dtype=torch.bfloat16, device=device)
    biases = [p for name, p in module.named_parameters() if name.endswith("bias") and "norm" not in name]
    for p in biases:
        nn.init.normal_(p).requires_grad_(not frozen)
    results = {}
    for i in range(3):
        module.zero_grad()
        x = leaf(reference.make_tokens(16, 32, seed=i, dtype=torch.bfloat16), device)
        with under(recipe_for(recipe)):
            out, bias, *rest = call(module, x)
        assert all(p.is_leaf for p in module.parameters()), "a checkpoint took a parameter for its own"
        y = sum((t for t in (bias, *rest) if t is not None), start=out) * 2
        y.backward(reference.make_tokens(16, 32, seed=50 + i, dtype=torch.bfloat16).to(device))
        grads = {f"{i} {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        results |= {f"{i} y": y.detach(), f"{i} x": x.grad} | grads
        with torch.no_grad():
            for p in module.parameters():
                p.add_(p if p.grad is None else p.grad, alpha=-0.01)
    assert any(name.endswith("bias") and "norm" not in name for name in results) == bool(biases and not frozen)
    return results | states(module)


def direct(function, *args):
    return function(*args)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("kind", BIASED)
def test_a_returned_bias(kind, recipe, frozen, device):
    """A reentrant checkpoint runs the module without gradients and makes what it returns an output of its own. A
    parameter among them would become a part of the graph, and its gradient a loop."""
    want = train_biased(kind, direct, recipe, frozen, device)
    calls = {**CALLS, **(OWN_CALLS if recipe == "bf16" else {})}
    for how, call in calls.items():
        got = train_biased(kind, call, recipe, frozen, device)
        assert got.keys() == want.keys()
        for name in want:
            assert_bitwise_equal(f"{how}: {name}", got[name], want[name])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_function_that_returns_a_parameter(use_reentrant):
    """Of any module, te_lite's or not, alone or among other outputs."""
    scale = nn.Parameter(torch.randn(32))
    x = leaf(torch.randn(16, 32))
    for function in (lambda x: (x * 2, scale, None), lambda x: scale):
        scale.grad = None
        out = te.checkpoint(function, x, use_reentrant=use_reentrant)
        assert scale.is_leaf
        (out[1] if isinstance(out, tuple) else out).sum().backward()
        assert_bitwise_equal("gradient", scale.grad, torch.ones(32))
