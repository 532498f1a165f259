"""Delayed scaling's backward scales step wherever any part of a pass runs backward, and once for each backward."""

import functools

import pytest
import torch
import torch.utils.checkpoint

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.cpu_graph import CpuGraph
from tests.harness import build, delayed_state
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, TRUTH, Spec, make_tokens, quantization

M, K = 32, 48
KINDS = (LINEAR, LN_LINEAR, LN_MLP)
RECIPE = te.recipe.DelayedScaling(amax_history_len=4)
DEVICES = device_params()
pytestmark = pytest.mark.usefixtures("no_other_scales")  # counted() sees every pool's steps


def pair(kind, device="cpu", first=LINEAR):
    """The module whose backward will not run, and one after it."""
    torch.manual_seed(0)
    return [build(Spec(k), K, K, 64, device=device, dtype=torch.float32) for k in (first, kind)]


def tokens(seed, device="cpu", scale=1.0):
    return make_tokens(M, K, seed=seed, scale=scale).to(device)


def one_pass(first, second, x, cut):
    """The second module's y. cut: why the first gets no backward, "" where it does."""
    with te.autocast(recipe=RECIPE):
        early = first(x)
        if cut == "detached":
            return second(early.detach())
        y = second(x)
    return y if cut == "unused" else y + (early - early.detach())


def counted(monkeypatch):
    """The directions of all steps, in order."""
    from te_lite.quantize import delayed

    seen, plain = [], delayed.Pool.update
    monkeypatch.setattr(delayed.Pool, "update", lambda pool: (seen.append(pool.key.direction), plain(pool))[1])
    return seen


def wgrads(module):
    return {name: p.grad for name, p in module.named_parameters() if p.dim() == 2}


def error(kind, cut, device, steps=20):
    """Relative error of each dw after `steps` steps with gradients of 1e-7, against float64 without fp8."""
    first, second = pair(kind, device)
    x, dy = tokens(1, device), tokens(2, device, 1e-7)
    for _ in range(steps):
        second.zero_grad()
        one_pass(first, second, x, cut).backward(dy)
    with te.autocast(recipe=RECIPE), torch.no_grad():
        inp = first(x) if cut == "detached" else x
    values = {name: p.detach().double() for name, p in second.named_parameters()}
    truth = reference.run(Spec(kind), values, inp.double(), dy.double(), quantization("bf16", Spec(kind)), TRUTH)
    return {name: relative(grad.double(), truth[name]) for name, grad in wgrads(second).items()}


def relative(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", ["detached", "unused"])
@pytest.mark.parametrize("kind", KINDS)
def test_small_gradients_survive(kind, cut, device):
    """With scales that stay 1 they are zero: an error of 1."""
    usual = error(kind, "", device)
    for name, value in error(kind, cut, device).items():
        assert usual[name] < 0.12
        assert value < 1.1 * usual[name], name


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_input_is_the_same_so_are_the_bits(kind):
    """An unused first module changes nothing for the second."""
    runs = []
    for cut in ("", "unused"):
        first, second = pair(kind)
        for i in range(4):
            second.zero_grad()
            one_pass(first, second, tokens(i), cut).backward(tokens(10 + i, scale=10.0 ** -(2 * i)))
        runs.append(wgrads(second) | delayed_state(second))
    for name, want in runs[0].items():
        assert_bitwise_equal(name, runs[1][name], want)


def nested(modules, x, call):
    """A checkpoint around the rest, which holds one of each module; the first module is cut off."""

    def rest(y):
        for module in modules[1:]:
            y = call(module, y)
        return y

    with te.autocast(recipe=RECIPE):
        return call(rest, modules[0](x).detach().requires_grad_())


CALLS = {
    "none": lambda fn, x: fn(x),
    "te": functools.partial(te.checkpoint, use_reentrant=False),
    "te reentrant": functools.partial(te.checkpoint, use_reentrant=True),
    "context_fn": functools.partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=te.checkpoint_context_fn
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", CALLS)
def test_checkpoints_step_once_at_the_outermost_end(how, device, monkeypatch):
    """The ends of the backwards inside of a reentrant checkpoint take no step; all bits are those without one."""
    results = []
    for call in (CALLS["none"], CALLS[how]):
        torch.manual_seed(0)
        modules = [build(Spec(kind), K, K, 64, device=device) for kind in (LINEAR, *KINDS)]
        seen = counted(monkeypatch)
        for i in range(4):
            seen.clear()
            x = tokens(i, device).bfloat16()
            nested(modules, x, call).backward(tokens(20 + i, device, 1e-5).bfloat16())
            assert seen == ["forward", "backward"], seen
        states = [value for module in modules[1:] for value in delayed_state(module).values()]
        results.append([p.grad for module in modules[1:] for p in module.parameters()] + states)
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        assert_bitwise_equal(f"{how}: {i}", got, want)


def two_outputs(modules, x):
    """Both modules of one pass, of one input."""
    with te.autocast(recipe=RECIPE):
        return [module(x) for module in modules]


def of_a_part(modules, x, dy):
    _, y = two_outputs(modules, x)
    y.backward(dy)


def twice_retained(modules, x, dy):
    _, y = two_outputs(modules, x)
    y.backward(dy, retain_graph=True)
    y.backward(dy)


def part_by_part(modules, x, dy):
    early, late = two_outputs(modules, x)
    late.backward(dy)
    early.backward(dy)


def with_inputs(modules, x, dy):
    outputs = two_outputs(modules, x)
    torch.autograd.backward(outputs, [dy, dy], inputs=[modules[1].weight])


def by_grad(modules, x, dy):
    _, y = two_outputs(modules, x)
    torch.autograd.grad(y, [modules[1].weight], dy)


def pipeline(modules, x, dy):
    outputs = [two_outputs(modules, x)[1] for _ in range(3)]
    for y in outputs:
        y.backward(dy)


def frozen_first(modules, x, dy):
    for param in modules[0].parameters():
        param.requires_grad_(False)
    both = [sum(two_outputs(modules, x.detach())) for _ in range(2)]
    sum(both).backward(dy)


def whole(modules, x, dy):
    sum(two_outputs(modules, x)).backward(dy)


def two_passes(modules, x, dy):
    (sum(two_outputs(modules, x)) + sum(two_outputs(modules, x))).backward(dy)


def bias_alone(modules, x, dy):
    modules[1].weight.requires_grad_(False)
    two_outputs(modules, x.detach())[1].backward(dy)


def late_wgrad(modules, x, dy):
    two_outputs(modules, x)[1].backward(dy)
    modules[1].backward_dw()


def fp8_grad(modules, x, dy):
    with te.autocast(recipe=RECIPE):
        modules[0](x)
        y = modules[1](x * 1, fp8_grad=True)
    y.backward(dy)


def after_an_error(modules, x, dy):
    """The engine drops what was queued in a backward that raises; the next one is not left without a step."""
    _, y = two_outputs(modules, x)
    broken = x * 1
    broken.register_hook(lambda grad: 1 / 0)
    _, bad = two_outputs(modules, broken)
    with pytest.raises(ZeroDivisionError):
        bad.backward(dy)
    y.backward(dy)


# What runs backward, how many steps of backward scales that is, and how many amaxes the second module then knows.
PARTS = {
    of_a_part: (1, 1),
    twice_retained: (2, 2),
    part_by_part: (2, 1),
    with_inputs: (1, 1),
    by_grad: (1, 1),
    pipeline: (3, 3),
    frozen_first: (2, 2),
    whole: (1, 1),
    two_passes: (2, 2),
    bias_alone: (0, 0),
    late_wgrad: (1, 1),
    fp8_grad: (1, 1),
    after_an_error: (1, 1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_steps_of_parts_of_a_pass(part, device, monkeypatch):
    steps, known = PARTS[part]
    extra = {"delay_wgrad_compute": True} if part is late_wgrad else {}
    modules = [build(Spec(LINEAR), K, K, device=device, **extra) for _ in range(2)]
    seen = counted(monkeypatch)
    x = tokens(1, device).bfloat16().requires_grad_()
    part(modules, x, tokens(2, device, 1e-6).bfloat16())
    assert seen.count("backward") == steps, seen
    state = delayed_state(modules[1])
    assert int((state["history_bwd"][:, 0] != 0).sum()) == known
    assert (float(state["scale_bwd"][0]) != 1) == bool(known)
    assert float(state["history_bwd"][0, 0]) == 0, "an amax waits for a step"
    if part is fp8_grad:
        assert float(state["scale_bwd"][1]) != 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_a_cuda_graph(device):
    """Replays take the step at the end of backward too, with the bits of eager calls."""
    modules, twins = pair(LN_MLP, device), pair(LN_MLP, device)
    x, dy = tokens(0, device), tokens(1, device)
    graph = torch.cuda.CUDAGraph() if device == "cuda" else CpuGraph()

    def run(which):
        for module in which:
            module.zero_grad(set_to_none=True)
        one_pass(*which, x, "detached").backward(dy)
        return list(wgrads(which[1]).values())

    for which in (modules, twins):
        run(which)
    with torch.cuda.graph(graph) if device == "cuda" else graph.capture():
        results = run(modules)
    for seed in range(2, 7):
        x.copy_(tokens(seed, device))
        dy.copy_(tokens(seed + 20, device, 10.0**-seed))
        graph.replay()
        want = run(twins)
        for i, (got, grad) in enumerate(zip(results, want, strict=True)):
            assert_bitwise_equal(f"replay {seed} gradient {i}", got, grad)
        for name, value in delayed_state(twins[1]).items():
            assert_bitwise_equal(f"replay {seed} {name}", delayed_state(modules[1])[name], value)
    assert float(delayed_state(modules[1])["scale_bwd"][0]) != 1


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("first", ["frozen", "parametrized"])
def test_the_first_module_is_found_whatever_asks_for_its_gradient(first, how):
    """It runs twice. Were another module to close the pass, the scales would step between the two backwards."""
    gradients = []
    for way in ("plain", how):
        torch.manual_seed(0)
        shared, between = (te.Linear(K, K, bias=False, params_dtype=torch.float32, device="cpu") for _ in range(2))
        inner = torch.nn.LayerNorm(K)
        if first == "frozen":
            shared.requires_grad_(False)
        else:
            torch.nn.utils.parametrize.register_parametrization(shared, "weight", torch.nn.Identity())
            inner.requires_grad_(False)

        def function(x, shared=shared, between=between, inner=inner):
            return shared(between(shared(inner(x)))) * 3

        for seed in range(6):
            between.zero_grad()
            x = tokens(seed).requires_grad_(first == "frozen" or way == "reentrant")
            with te.autocast(recipe=te.recipe.DelayedScaling(amax_compute_algo="most_recent")):
                y = function(x) if way == "plain" else te.checkpoint(function, x, use_reentrant=way == "reentrant")
            y.square().sum().backward()
        gradients.append(between.weight.grad)
        assert between.weight.grad.norm() > 1e-3
    assert_bitwise_equal("gradient", gradients[1], gradients[0])
