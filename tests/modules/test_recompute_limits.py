"""As test_recompute.py: calls that no graph holds, autocasts around backward, copies, recipes with state."""

import contextlib
import copy
import pickle
import threading

import pytest
import torch

import te_lite as te
from te_lite.quantize import per_tensor
from tests.harness import delayed_state, under
from tests.modules.test_recompute import (
    HOW,
    KINDS,
    OFF,
    assert_same,
    batch,
    direct,
    evaluate,
    gradients,
    how,
    made,
    reentrant,
    step,
)

# ---- parts of a checkpointed function that keep nothing for backward ----


def frozen_first(module, first):
    """A frozen linear reads what wants no gradient, so nothing of its call is in a graph."""
    for p in first.parameters():
        p.requires_grad_(False)
    return lambda x: module(x + first(x.detach()))


def first_without_gradients(module, first):
    def run(x):
        with torch.no_grad():
            y = first(x)
        return module(x + y)

    return run


def first_with_gradients(module, first):
    def run(x):
        with torch.enable_grad():
            y = first(x * 1.0)
        return module(x + y)

    return run


@how
@pytest.mark.parametrize("build", [frozen_first, first_without_gradients, first_with_gradients])
def test_calls_that_no_graph_holds(build, how):
    """They follow the first run, or are refused once they have run under two recipes; never another in silence."""
    module, first = made("LayerNormMLP"), made("Linear")
    run = build(module, first)
    if build is not first_without_gradients:  # those would be two recipes without gradients
        evaluate(first, "bf16")
    want = step(module, lambda m, x: run(x), "current")
    assert_same(step(module, lambda m, x: HOW[how](run, x), "current"), want)
    want = step(module, lambda m, x: run(x), "mxfp8")
    try:
        assert_same(step(module, lambda m, x: HOW[how](run, x), "mxfp8"), want)
    except RuntimeError as error:
        assert "current" in str(error) and "mxfp8" in str(error)
        assert build is not first_with_gradients


class Setup(torch.autograd.Function):
    """A reentrant checkpoint in torch's newer style, whose forward is given no context."""

    @staticmethod
    def forward(module, x):
        return module(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.module = inputs[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        y.backward(dy)
        return None, x.grad


def test_other_reentrant_checkpoints():
    """Of one recipe that a module has ever had, its own; of two, an error."""
    module = made("Linear")
    for p in module.parameters():
        p.requires_grad_(False)
    want = step(module, direct, "current")
    assert_same(step(module, Setup.apply, "current"), want)
    with pytest.raises(RuntimeError, match="mxfp8"):
        step(module, Setup.apply, "mxfp8")


# ---- autocasts at the time of backward ----


@how
def test_backward_inside_of_an_autocast(how):
    """One that is open around backward is not the first run's; one that the function opens is."""
    module = made("Linear")
    for name in ("current", "bf16"):
        want = step(module, direct, name)
        x, dy = batch()
        module.zero_grad()
        with under("mxfp8"):
            with under("current") if name == "current" else OFF:
                y = HOW[how](module, x)
            y.backward(dy)
        assert_same({"y": y.detach()} | gradients(module, x), want)
        del y


@how
def test_an_autocast_inside_comes_first(how):
    module = made("Linear")

    def inside(x):
        with under("mxfp8"):
            y = module(x)
        with OFF:
            return module(y)

    results = []
    for run in (direct, HOW[how]):
        module.zero_grad()
        x, dy = batch()
        with under("current"):
            y = run(inside, x)
        y.backward(dy)
        results.append({"y": y.detach()} | gradients(module, x))
        del y
    assert_same(results[1], results[0])


@how
def test_backward_on_another_thread(how):
    module = made("LayerNormMLP")
    evaluate(module, "bf16")
    want = step(module, direct, "current")
    module.zero_grad()
    x, dy = batch()
    with under("current"):
        y = HOW[how](module, x)
    thread = threading.Thread(target=y.backward, args=(dy,))
    thread.start()
    thread.join()
    assert_same({"y": y.detach()} | gradients(module, x), want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@how
def test_copies_have_calls_of_their_own(how, copied):
    module = made("Linear")
    step(module, direct, "mxfp8")
    x, dy = batch()
    module.zero_grad()
    with under("current"):
        y = HOW[how](module, x)
    other = copied(module)
    want = step(other, direct, "blockwise")
    assert_same(step(other, HOW[how], "blockwise"), want)
    y.backward(dy)
    got = {"y": y.detach()} | gradients(module, x)
    del y
    assert_same(got, step(module, direct, "current"))


# ---- recipes with state ----


@how
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "LayerNormMLP checkpoint"])
def test_delayed_scaling_is_refused(how, kind):
    with pytest.raises(RuntimeError, match="te.checkpoint_context_fn"):
        step(made(kind), HOW[how], "delayed")


@how
@pytest.mark.parametrize("inside", [True, False])
def test_delayed_scaling_in_te_checkpoint_inside(how, inside):
    """torch's checkpoint around te_lite's: the outer one carries no scales. Where it computes no more again than what
    stands before the inner one, these have them."""

    def call(module, x):
        with under("delayed") if inside else contextlib.nullcontext():
            return te.checkpoint(module, x * 1.0, use_reentrant=False)

    results = []
    for run in (direct, HOW[how]):
        module = made("Linear")
        try:
            for i in (1, 0):
                results.append(step(module, lambda m, x: run(call, m, x), None if inside else "delayed", i))  # noqa: B023
            results.append(delayed_state(module))
        except RuntimeError as error:
            assert run is reentrant and "te.checkpoint_context_fn" in str(error)
            return
    for got, want in zip(results[3:], results[:3], strict=True):
        assert_same(got, want)


@how
def test_calibration_records_once(how):
    results = []
    for call in (direct, HOW[how]):
        module = made("Linear")
        for i in (1, 0):
            x, dy = batch(i)
            with te.autocast(enabled=False, calibrating=True, recipe="delayed"):
                y = call(module, x)
            y.backward(dy)
        results.append(delayed_state(module))
    assert (results[0]["history_fwd"] != 0).any()
    assert_same(results[1], results[0])


def current_quantizers(role):
    operands = per_tensor.current_operands(te.recipe.Float8CurrentScaling(), role.site)
    gemm = getattr(operands, role.gemm)
    return gemm.a if role.operand == ("x" if role.gemm == "fprop" else "dy") else gemm.b


@how
def test_custom_recipes_say_whether_they_have_state(how):
    module = made("LayerNormMLP")
    want = step(module, direct, "current")
    assert_same(step(module, HOW[how], te.recipe.CustomRecipe(current_quantizers, stateless=True)), want)
    with pytest.raises(RuntimeError, match="CustomRecipe that has none says so: stateless=True"):
        step(module, HOW[how], te.recipe.CustomRecipe(current_quantizers))
    with pytest.raises(TypeError, match="stateless"):
        te.recipe.CustomRecipe(current_quantizers, stateless="no")


def test_which_recipes_are_stateless():
    said = {name: te.recipe.from_name(name).stateless for name in te.recipe.available()}
    assert said == {name: name != "delayed" for name in said}
    assert not te.recipe.CustomRecipe(current_quantizers).stateless


@pytest.mark.parametrize("cut", ["argmax", "detached"])
def test_a_call_whose_own_graph_is_gone_is_no_other_calls(cut):
    """The checkpoint keeps what its function saved elsewhere, so the module may be computed again though its node is
    gone. Another call of it that is alive says nothing of that."""
    torch.manual_seed(0)
    first, last = (te.Linear(32, 32, params_dtype=torch.float32, device="cpu") for _ in range(2))
    x = torch.randn(16, 32, requires_grad=True)

    def function(x):
        h = first(x)
        mask = torch.nn.functional.one_hot(h.argmax(-1), 32) if cut == "argmax" else h.detach()
        return last(mask * x)

    with te.autocast(recipe="current"):
        y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)
    with te.autocast(enabled=False):
        first(x).sum().backward()
    with te.autocast(recipe="rowwise"):
        other = first(x)
    with pytest.raises(RuntimeError, match="has run under current and rowwise"):
        y.square().sum().backward()
    del other, y


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_grouped_product_with_a_recipe_of_its_own(reentrant):
    """A call with recipe= follows no autocast: it says nothing of what another call has followed."""
    w, offs = torch.randn(2, 64, 64), torch.tensor([5, 16], dtype=torch.int32)

    def first(x):
        return te.scaled_grouped_mm(x, w.mT, offs)

    x, grads = torch.randn(16, 64, requires_grad=True), []
    for again in (False, True):
        with te.autocast(recipe="current"):
            h = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=reentrant) if again else first(x)
            y = te.scaled_grouped_mm(h, w.mT, offs, recipe="mxfp8")
        y.sum().backward()
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(*grads)
