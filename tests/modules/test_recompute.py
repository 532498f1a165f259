"""torch's own checkpoints around modules whose autocast is outside of them, as accelerate, transformers and Lightning
open it: a recipe without state is that of the first run, or an error says why nobody can tell."""

import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import te_lite as te
from te_lite.compat.convert import convert_to_float8_training
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import FP8, leaf, under

BF16 = torch.bfloat16
WIDTH, TOKENS = 32, 16
STATELESS = [name for name in FP8 if name != "delayed"]
OFF = te.autocast(enabled=False)

reentrant = functools.partial(torch_checkpoint.checkpoint, use_reentrant=True)
plain = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)


def keep_some(ctx, op, *args, **kwargs):
    """Selective: products are kept, all else is computed again."""
    keep = "gemm" in str(op) or op in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
    policy = torch_checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if keep else policy.PREFER_RECOMPUTE


selective = functools.partial(
    plain, context_fn=functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, keep_some)
)
HOW = {"reentrant": reentrant, "non-reentrant": plain, "selective": selective}
how = pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])


def direct(function, *args):
    return function(*args)


def converted(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=BF16, device=device))
    convert_to_float8_training(model, recipe="rowwise", tokens=None)
    return model[0]


def made(kind, device="cpu", **options):
    options |= {"params_dtype": BF16, "device": device}
    torch.manual_seed(0)
    if kind == "converted":
        return converted(device)
    if kind.startswith("LayerNormMLP"):
        return te.LayerNormMLP(WIDTH, 96, activation="swiglu", checkpoint="checkpoint" in kind, **options)
    return getattr(te, kind)(WIDTH, WIDTH, **options)


KINDS = ["Linear", "LayerNormLinear", "LayerNormMLP", "LayerNormMLP checkpoint", "converted"]


def batch(seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(TOKENS, WIDTH, generator=generator) * 3**seed for _ in range(2))
    return leaf(x.to(BF16), device), dy.to(BF16).to(device)


def evaluate(module, recipe, device="cpu", train=False):
    """Between forward and backward, where a graph is outstanding."""
    module.train(train)
    with torch.no_grad(), under(recipe):
        module(batch(9, device)[0].detach())
    module.train()


def gradients(module, x):
    return {"dx": x.grad} | {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])


def step(module, call, recipe, seed=0, device="cpu", between=lambda: None, **backward):
    """Output and gradients of one step, backward outside of the autocast."""
    module.zero_grad()
    x, dy = batch(seed, device)
    with under(recipe):
        y = call(module, x)
    between()
    y.backward(dy, **backward)
    return {"y": y.detach()} | gradients(module, x)


# ---- the bits of a run without a checkpoint ----


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", [*STATELESS, "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", HOW)
def test_the_recipe_is_that_of_the_first_run(call, kind, recipe, device):
    """Also after other recipes, and with an evaluation under another one between forward and backward."""
    module = made(kind, device)
    other = "current" if recipe == "mxfp8" else "mxfp8"
    for i, name in enumerate((recipe, other, recipe)):
        want = step(module, direct, name, i, device)
        between = functools.partial(evaluate, module, other, device)
        assert_same(step(module, HOW[call], name, i, device, between), want)


@pytest.mark.parametrize("call", HOW)
def test_recomputed_high_precision_would_differ(call):
    """What the comparison above would find."""
    module = made("LayerNormMLP")
    assert not torch.equal(step(module, HOW[call], "current")["dx"], step(module, HOW[call], "bf16")["dx"])


@how
@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant"])
def test_nested(how, inner):
    module = nn.Sequential(made("LayerNormMLP"), made("Linear"))

    def outer(x):
        return module[1](HOW[inner](module[0], x * 1.0) * 0.5)

    results = []
    for run in (direct, HOW[how]):
        for i, name in enumerate(("mxfp8", "current", "bf16", "current")):
            x, dy = batch(i)
            module.zero_grad()
            with under(name):
                y = run(outer, x) if run is not direct else module[1](module[0](x * 1.0) * 0.5)
            for part in module:
                evaluate(part, "rowwise")
            y.backward(dy)
            results.append({"y": y.detach()} | gradients(module, x))
    for got, want in zip(results[4:], results[:4], strict=True):
        assert_same(got, want)


@how
def test_te_checkpoint_inside(how):
    """A checkpoint of te_lite's own in a function that torch's computes again follows the first run too."""
    for inside in (True, False):
        module = made("LayerNormMLP")
        call = functools.partial(te.checkpoint, use_reentrant=inside)
        for name in ("current", "mxfp8"):
            want = step(module, direct, name)
            assert_same(step(module, lambda m, x: HOW[how](call, m, x), name), want)  # noqa: B023


@how
def test_torch_checkpoint_inside_te_checkpoint(how):
    for outside in (True, False):
        module = made("LayerNormMLP")
        for name in ("current", "mxfp8"):
            want = step(module, direct, name)
            call = functools.partial(te.checkpoint, use_reentrant=outside)
            assert_same(step(module, lambda m, x: call(HOW[how], m, x), name), want)  # noqa: B023


# ---- calls that are outstanding at once ----


@how
def test_several_forwards_before_their_backwards(how):
    """Any order, graphs kept for a second backward, a module that is called twice in one checkpoint."""
    module = made("LayerNormMLP")
    evaluate(module, "bf16")
    step(module, direct, "mxfp8")

    def twice(x):
        return module(module(x) * 0.5)

    results = []
    for run in (direct, HOW[how]):
        module.zero_grad()
        batches = [batch(i) for i in range(3)]
        with under("current"):
            outs = [run(function, x) for function, (x, _) in zip((module, twice, module), batches, strict=True)]
        evaluate(module, "bf16")
        for i in (1, 0, 2, 0):
            outs[i].backward(batches[i][1], retain_graph=True)
        results.append({f"dx {i}": x.grad for i, (x, _) in enumerate(batches)} | gradients(module, batches[0][0]))
    assert_same(results[1], results[0])


@how
@pytest.mark.parametrize("others", [("mxfp8", "current"), ("bf16", "current"), ("current", "bf16")])
def test_two_recipes_outstanding_are_refused(how, others):
    """Which of them a call had cannot be told; a graph that is dropped counts no longer."""
    module = made("Linear")
    outs = []
    for i, name in enumerate(others):
        with under(name):
            outs.append(HOW[how](module, batch(i)[0]))
    words = ["high precision" if name == "bf16" else name for name in others]
    for out in outs:
        with pytest.raises(RuntimeError, match="open the autocast inside the checkpointed function") as error:
            out.sum().backward()
        assert all(word in str(error.value) for word in words)
    del outs, out, error
    gc.collect()  # of the errors, whose tracebacks hold graphs
    want = step(module, direct, "rowwise")
    assert_same(step(module, HOW[how], "rowwise"), want)


@how
def test_a_loss_that_is_thrown_away(how):
    module = made("Linear")
    for name in ("bf16", "mxfp8", "current"):
        with under(name):
            HOW[how](module, batch(5)[0])
    want = step(module, direct, "blockwise")
    assert_same(step(module, HOW[how], "blockwise"), want)


@how
def test_evaluation_without_gradients_in_training_mode(how):
    """Before and between: nothing of it can be computed again."""
    module = made("LayerNormMLP")
    evaluate(module, "bf16", train=True)
    want = step(module, direct, "current")
    between = functools.partial(evaluate, module, "mxfp8", train=True)
    assert_same(step(module, HOW[how], "current", between=between), want)
