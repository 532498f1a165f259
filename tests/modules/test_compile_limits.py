"""torch.compile: what is compiled again, what is refused by name, and checkpoints inside and around compiled code."""

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from torch._dynamo.utils import counters

import te_lite as te
from te_lite.testing.distributed import launch
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import FP8, RECIPES, leaf, under
from tests.modules.test_compile import (
    BF16,
    MODULES,
    WIDTH,
    assert_same,
    compiled,
    fresh_dynamo,
    graphs,
    linear,
    make,
    mlp,
    no_recompilation,
    state_of,
    step,
    train,
    twins,
)  # fmt: skip

__all__ = ["fresh_dynamo"]
# An MLP has all that the others have.
MOST = [("LayerNormMLP", recipe) for recipe in RECIPES] + [("Linear", "delayed"), ("LayerNormLinear", "delayed")]
REFUSED = r"Linear is not compiled: .*{}"


def once(call, x, recipe):
    with under(recipe):
        y = call(x)
    y.sum().backward()


@pytest.mark.parametrize("kind, recipe", MOST)
def test_modules_that_are_alike_share_one_graph(kind, recipe):
    """Whatever their names: layers are compiled one by one, each runs with its own weights and scales."""
    pairs = [twins(make(kind, "cpu")) for _ in range(3)]
    for i, pair in enumerate(pairs):
        pair[1].name = f"layer {i}"
    call = compiled(lambda module, x: module(x))
    with no_recompilation:
        for i in range(3):
            for j, (eager, net) in enumerate(pairs):
                want = step(eager, eager, 3 * i + j, recipe, "cpu")
                assert_same(step(net, functools.partial(call, net), 3 * i + j, recipe, "cpu"), want)
    assert graphs() == 1
    for eager, net in pairs:
        assert_same(state_of(net), state_of(eager))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind, recipe", MOST)
def test_token_counts(kind, recipe, dynamic):
    """At most one compilation more; none with dynamic=True. Tokens fill more than one block of 128."""
    eager, net = twins(make(kind, "cpu"))
    call, found = compiled(net, dynamic=dynamic), []
    for i, tokens in enumerate((160, 144, 300, 129)):
        want = step(eager, eager, i, recipe, "cpu", (tokens,))
        assert_same(step(net, call, i, recipe, "cpu", (tokens,)), want)
        found.append(graphs())
    assert found == ([1, 2, 2, 2] if dynamic is None else [1] * 4)


def test_another_recipe_is_compiled_once():
    x, found = leaf(torch.randn(48, WIDTH, dtype=BF16)), []
    eager, net = twins(linear("cpu"))
    call = compiled(net)
    short = te.recipe.DelayedScaling(amax_history_len=4)
    power = te.recipe.Float8CurrentScaling(use_power_2_scales=True)
    margin = te.recipe.DelayedScaling(amax_history_len=4, margin=1)
    for recipe in ("current", "mxfp8", "current", "bf16", short, margin, short, power, "current", margin):
        with under(recipe):
            want, got = eager(x), call(x)
        want.sum().backward()
        got.sum().backward()
        assert_bitwise_equal(str(recipe), got.detach(), want.detach())
        assert_same(state_of(net), state_of(eager))
        found.append(graphs())
    assert found == [1, 2, 2, 3, 4, 5, 5, 6, 6, 6]


def test_eager_modules_of_other_recipes_keep_their_histories():
    """Autocasts around compiled code bring the scales of all modules up to date, but change nobody's recipe."""
    torch.manual_seed(0)
    eager, net = make("Linear", "cpu"), make("Linear", "cpu")
    call, x = compiled(net), torch.randn(32, WIDTH, dtype=BF16)
    longer = te.recipe.DelayedScaling(amax_history_len=5)
    for _ in range(3):
        once(eager, x, longer)
        once(call, x, "delayed")
        kept = eager.get_extra_state()
        once(call, x, "delayed")
        assert_bitwise_equal("state", eager.get_extra_state(), kept)
    assert eager._scales._live["forward"].history.shape[0] == 5


@pytest.mark.parametrize("recipe", FP8)
def test_an_autocast_inside(recipe):
    """Delayed scaling's needs Python where it begins and ends; the other recipes' are compiled."""
    eager, net = twins(mlp("cpu"))

    def inside(module, x):
        with under(recipe):
            return module(x) * 2

    want = train(eager, functools.partial(inside, eager), None, "cpu", 4)
    run = functools.partial(inside, net)
    if recipe == "delayed":
        with pytest.raises(Exception, match="te.autocast of delayed scaling inside of compiled code"):
            compiled(run)(torch.randn(48, WIDTH, dtype=BF16))
        assert_same(train(net, torch.compile(run, backend="aot_eager"), None, "cpu", 4), want)
        return
    with no_recompilation:
        assert_same(train(net, compiled(run), None, "cpu", 4), want)
    assert graphs() == 1


# checkpoints

INSIDE = {
    "te": functools.partial(te.checkpoint, use_reentrant=False),
    "te reentrant": te.checkpoint,
    "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("how", INSIDE)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_checkpoint_inside(how, recipe, backend):
    """What is computed again records no maximum a second time."""
    eager, net = twins(mlp("cpu"))
    want = train(eager, eager, recipe, "cpu", 3)
    with no_recompilation:
        call = compiled(lambda x: INSIDE[how](net, x), backend)
        assert_same(train(net, call, recipe, "cpu", 3), want)


def test_what_torch_keeps_on_disk_is_found_by_all_that_a_graph_depends_on(monkeypatch):
    """torch keeps graphs with a checkpoint on disk by their constants, and looks there in every process. Tensors do not
    tell activations and recipes apart, nor what another te_lite makes of them."""
    x = torch.randn(48, WIDTH, dtype=BF16)
    recipes = [te.recipe.Float8CurrentScaling(use_power_2_scales=power) for power in (False, True)]
    for recipe, activation in itertools.product(recipes, ("swiglu", "geglu")):
        torch._dynamo.reset()
        net = mlp("cpu", activation=activation)
        call = compiled(lambda x, net=net: te.checkpoint(net, x), "inductor")
        with under(recipe):
            assert_bitwise_equal(activation, call(x).detach(), net(x).detach())
    from te_lite.functional import traced

    (kind, *_) = traced._kinds.values()
    name = traced.name_of(kind)
    monkeypatch.setattr(traced, "sources", lambda: "another te_lite")
    assert traced.name_of(kind) != name


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_te_checkpoint_around(recipe):
    eager, net = twins(mlp("cpu"))
    want = train(eager, eager, recipe, "cpu", 3)
    call = torch.compile(net, backend="aot_eager", fullgraph=recipe != "delayed")
    assert_same(train(net, functools.partial(te.checkpoint, call), recipe, "cpu", 3), want)
    assert bool(counters["graph_break"]) == (recipe == "delayed")


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_torch_checkpoint_around_is_refused(recipe):
    """Its second run would follow no autocast at all. Inside of the autocast that it opens itself it is right."""
    eager, net = twins(linear("cpu"))
    call = torch.compile(net, backend="aot_eager")
    around = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    x = leaf(torch.randn(48, WIDTH, dtype=BF16))
    with pytest.raises(RuntimeError, match="computed again by a checkpoint around compiled code"):
        once(functools.partial(around, call), x, recipe)
    if recipe == "current":

        def opened(module, x):
            with under(recipe):
                return module(x)

        want = train(eager, eager, recipe, "cpu", 3)
        assert_same(train(net, lambda x: around(opened, call, x), None, "cpu", 3), want)


# what is not compiled


def with_main_grad(device):
    module = linear(device, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(module.weight.shape, device=device)
    return module


NOT = {
    "main_grad": (with_main_grad, {}),
    "delay_wgrad_compute": (functools.partial(linear, delay_wgrad_compute=True), {}),
    "is_first_microbatch": (linear, {"is_first_microbatch": True}),
    "fp8_grad": (linear, {"fp8_grad": True}),
}


@pytest.mark.parametrize("what", NOT)
def test_refused_by_name(what):
    """With fullgraph=True an error; else one graph break, and the bits of eager mode."""
    build, options = NOT[what]
    eager, net = twins(build("cpu"))
    for module in (eager, net):
        if what == "main_grad":
            module.weight.main_grad = torch.zeros(module.weight.shape)
    with under("current"), pytest.raises(Exception, match=REFUSED.format(what)):
        compiled(net)(torch.randn(48, WIDTH, dtype=BF16), **options)
    call = torch.compile(net, backend="aot_eager")
    want = train(eager, functools.partial(eager, **options), "current", "cpu", 1)
    with no_recompilation:
        assert_same(train(net, functools.partial(call, **options), "current", "cpu", 1), want)
    if what == "main_grad":
        assert_bitwise_equal(what, net.weight.main_grad, eager.weight.main_grad)
    assert len(counters["graph_break"]) == 1


def test_calibration_and_statistics_are_refused(tmp_path):
    net, x = linear("cpu"), torch.randn(48, WIDTH, dtype=BF16)
    with te.autocast(enabled=False, calibrating=True), pytest.raises(Exception, match=REFUSED.format("calibrating")):
        compiled(net)(x)
    torch._dynamo.reset()
    from te_lite.quantize.quantizer import observe

    class Nobody:
        def watch(self, operands, module, linear):
            return operands

    observe(Nobody())
    try:
        with under("current"), pytest.raises(Exception, match=REFUSED.format("statistics are taken")):
            compiled(net)(x)
    finally:
        observe(None)
    with under("current"):
        compiled(net)(x)


def test_delayed_scaling_within_another_autocast_is_refused():
    net, x = linear("cpu"), torch.randn(48, WIDTH, dtype=BF16)
    with under("current"), under("delayed"), pytest.raises(Exception, match=REFUSED.format("stands within another")):
        compiled(net)(x)


@pytest.mark.parametrize(
    "x, options, error",
    [
        (torch.randn(48, 16, dtype=BF16), {}, ValueError),
        (torch.randn(48, WIDTH), {}, TypeError),
        (torch.randn(48, WIDTH, dtype=BF16), {"residual": torch.randn(1, 48, dtype=BF16)}, ValueError),
        (torch.randn(48, WIDTH, dtype=BF16), {"residual": torch.randn(48, 48)}, ValueError),
    ],
)
def test_errors_are_those_of_eager_mode(x, options, error):
    net = linear("cpu")
    with under("current"):
        with pytest.raises(error) as eager:
            net(x, **options)
        with pytest.raises(error) as found:
            torch.compile(net, backend="aot_eager")(x, **options)
    assert str(found.value) == str(eager.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_capture_of_a_cuda_graph_is_refused_under_delayed_scaling():
    net, x = linear("cuda"), torch.randn(48, WIDTH, dtype=BF16, device="cuda")
    call = compiled(net)
    for _ in range(3):
        once(call, x, "delayed")
    with (
        pytest.raises(Exception, match=REFUSED.format("capture of a CUDA graph")),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        once(call, x, "delayed")


def test_blocks_that_fsdp_shards():
    launch(Path(__file__).with_name("ranks_compile_fsdp.py"), ranks=2, timeout=120)


def test_importing_te_lite_imports_no_compiler():
    code = "import sys, te_lite; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.fixture(scope="module")
def torch_follows_parameters():
    """torch 2.11 does not compile again where a parameter of a module begins to ask for a gradient."""
    linear = torch.nn.Linear(4, 4)
    run = torch.compile(linear, backend="aot_eager", fullgraph=True)
    for asks in (False, True):
        linear.weight.requires_grad_(asks)
        run(torch.ones(2, 4)).sum().backward()
    if linear.weight.grad is None:
        pytest.skip("this torch loses such gradients of its own linear too")


@pytest.mark.usefixtures("torch_follows_parameters")
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("kind", MODULES)
def test_frozen_parameters(kind, recipe):
    """Whichever parameters and input ask for a gradient, just these get theirs."""
    eager, net = twins(make(kind, "cpu"))
    call = compiled(net)
    for frozen in [*dict(net.named_parameters()), "x"]:
        results = []
        for module, run in ((eager, eager), (net, call)):
            torch.manual_seed(0)
            x = torch.randn(48, WIDTH, dtype=BF16).requires_grad_(frozen != "x")
            for name, p in module.named_parameters():
                p.grad = None
                p.requires_grad_(name != frozen)
            with under(recipe):
                y = run(x)
            y.backward(torch.randn_like(y))
            grads = {"x": x} | dict(module.named_parameters())
            results.append({"y": y.detach()} | {n: p.grad for n, p in grads.items() if p.grad is not None})
        assert frozen not in results[1]
        assert_same(results[1], results[0])
    assert_same(state_of(net), state_of(eager))
