"""Where weight gradients go: main_grad, later, or nowhere (Megatron's contracts)."""

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal, assert_close_to_oracle
from tests import reference
from tests.harness import RECIPES, Oracle, build, leaf, step, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

KINDS = (LINEAR, LN_LINEAR, LN_MLP)
WEIGHTS = {LINEAR: ("weight",), LN_LINEAR: ("weight",), LN_MLP: ("fc1_weight", "fc2_weight")}


def tokens(seed=1):
    return reference.make_tokens(48, 64, seed=seed, dtype=torch.bfloat16)


def parameters(kind):
    return reference.make_parameters(Spec(kind), 64, 64, 96, dtype=torch.bfloat16)


def make(kind, device="cpu", **kw):
    return build(Spec(kind), 64, 64, 96, device=device, parameters=parameters(kind), **kw)


def fused(kind, device="cpu", fill=0.0, dtype=torch.float32, added=False):
    module = make(kind, device, fuse_wgrad_accumulation=True)
    for name in WEIGHTS[kind]:
        weight = getattr(module, name)
        weight.main_grad = torch.full_like(weight, fill, dtype=dtype)
        if added:
            weight.grad_added_to_main_grad = False
    return module


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_accumulates(kind, recipe, device):
    """main_grad += dw in fp32; .grad stays None; other gradients are as without fusion."""
    module = fused(kind, device, fill=3.0)
    plain = step(make(kind, device), tokens(), tokens(3), recipe)
    got = step(module, tokens(), tokens(3), recipe)
    truth, low = Oracle(Spec(kind), parameters(kind), recipe, device=device).step(tokens(), tokens(3))
    for name in WEIGHTS[kind]:
        weight = getattr(module, name)
        assert weight.grad is None and name not in got
        assert weight.main_grad.dtype == torch.float32
        assert_close_to_oracle(name, weight.main_grad - 3.0, truth[name], low[name])
    for name in set(plain) - set(WEIGHTS[kind]):
        assert_bitwise_equal(name, got[name], plain[name])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_keeps_more_than_bf16(kind, recipe):
    """Accumulated in fp32 without rounding dw to bf16 on the way."""
    module = fused(kind)
    step(module, tokens(), tokens(3), recipe)
    for name in WEIGHTS[kind]:
        main_grad = getattr(module, name).main_grad
        rounded = main_grad.bfloat16().float()
        assert float((main_grad != rounded).float().mean()) > 0.5, f"{name} looks rounded to bf16"


@pytest.mark.parametrize("kind", KINDS)
def test_main_grad_accumulates_over_microbatches(kind):
    once = fused(kind)
    step(once, tokens(), tokens(3), "current")
    twice = fused(kind)
    for _ in range(2):
        step(twice, tokens(), tokens(3), "current")
    for name in WEIGHTS[kind]:
        got, single = getattr(twice, name).main_grad, getattr(once, name).main_grad
        torch.testing.assert_close(got, 2 * single, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_overwrite_main_grad(kind):
    module, clean = fused(kind, fill=float("nan")), fused(kind)
    for name in WEIGHTS[kind]:
        getattr(module, name).overwrite_main_grad = True
    step(module, tokens(), tokens(3), "current")
    step(clean, tokens(), tokens(3), "current")
    for name in WEIGHTS[kind]:
        got, want = getattr(module, name).main_grad, getattr(clean, name).main_grad
        assert bool(torch.isfinite(got).all())
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zero_out", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dummy_gradient_for_megatron(kind, zero_out):
    """grad_added_to_main_grad present: set True, and .grad is a dummy of the weight's shape, zeros on
    request.
    """
    module = fused(kind, added=True)
    for name in WEIGHTS[kind]:
        if zero_out is not None:
            getattr(module, name).zero_out_wgrad = zero_out
    step(module, tokens(), tokens(3), "bf16")
    for name in WEIGHTS[kind]:
        weight = getattr(module, name)
        assert weight.grad_added_to_main_grad is True
        assert weight.grad is not None and weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
        if zero_out:
            assert not weight.grad.any()
        assert bool(weight.main_grad.any())


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_main_grad(kind):
    module = fused(kind, dtype=torch.bfloat16)
    step(module, tokens(), tokens(3), "bf16")
    truth, low = Oracle(Spec(kind), parameters(kind)).step(tokens(), tokens(3))
    for name in WEIGHTS[kind]:
        assert_close_to_oracle(name, getattr(module, name).main_grad, truth[name], low[name])


@pytest.mark.parametrize("kind", KINDS)
def test_fusion_without_main_grad_is_an_error_at_forward(kind):
    module = make(kind, fuse_wgrad_accumulation=True)
    with pytest.raises((RuntimeError, ValueError), match="main_grad"):
        module(leaf(tokens()))


@pytest.mark.parametrize("kind", KINDS)
def test_fusion_without_main_grad_does_not_disturb_frozen_or_inference(kind):
    module = make(kind, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        module(tokens())
    for name in WEIGHTS[kind]:
        getattr(module, name).requires_grad_(False)
    module(leaf(tokens())).backward(tokens(3))


# Delayed weight gradients


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_dw(kind, recipe):
    """backward leaves the weights' gradients out; backward_dw() computes them, bit for bit the same."""
    want = step(make(kind), tokens(), tokens(3), recipe)
    module = make(kind, delay_wgrad_compute=True)
    assert all(getattr(module, n).skip_backward_post_hook for n in WEIGHTS[kind])
    got = step(module, tokens(), tokens(3), recipe)
    assert not set(WEIGHTS[kind]) & set(got)
    assert_bitwise_equal("dx", got["dx"], want["dx"])
    assert module.need_backward_dw()
    module.backward_dw()
    for name, p in module.named_parameters():
        assert_bitwise_equal(name, p.grad, want[name])


@pytest.mark.parametrize("kind", KINDS)
def test_backward_dw_is_first_in_first_out(kind):
    module = make(kind, delay_wgrad_compute=True)
    batches = [(tokens(s), tokens(s + 10)) for s in (1, 2)]
    with under("current"):
        outs = [module(leaf(x)) for x, _ in batches]
    for out, (_, dy) in zip(outs, batches, strict=True):
        out.backward(dy)
    for x, dy in batches:
        for name in WEIGHTS[kind]:
            getattr(module, name).grad = None
        module.backward_dw()
        want = step(make(kind), x, dy, "current")
        for name in WEIGHTS[kind]:
            assert_bitwise_equal(name, getattr(module, name).grad, want[name])
    with pytest.raises(RuntimeError, match="backward_dw"):
        module.backward_dw()


@pytest.mark.parametrize("kind", KINDS)
def test_backward_dw_empty_is_an_error(kind):
    with pytest.raises(RuntimeError, match="backward_dw"):
        make(kind, delay_wgrad_compute=True).backward_dw()


@pytest.mark.parametrize("kind", KINDS)
def test_backward_dw_adds_to_an_existing_gradient(kind):
    module = make(kind, delay_wgrad_compute=True)
    want = step(make(kind), tokens(), tokens(3), "bf16")
    for _ in range(2):
        module(leaf(tokens())).backward(tokens(3))
        module.backward_dw()
    for name in WEIGHTS[kind]:
        got = getattr(module, name).grad
        torch.testing.assert_close(got, 2 * want[name], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_dw_into_main_grad(kind, recipe):
    module = make(kind, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    for name in WEIGHTS[kind]:
        getattr(module, name).main_grad = torch.ones_like(getattr(module, name), dtype=torch.float32)
    direct = fused(kind, fill=1.0)
    step(direct, tokens(), tokens(3), recipe)
    step(module, tokens(), tokens(3), recipe)
    for name in WEIGHTS[kind]:
        assert bool((getattr(module, name).main_grad == 1).all())
    module.backward_dw()
    for name in WEIGHTS[kind]:
        assert_bitwise_equal(name, getattr(module, name).main_grad, getattr(direct, name).main_grad)


def test_hooks_run_after_backward_dw():
    module = make(LINEAR, delay_wgrad_compute=True)
    calls = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(module.weight.grad is not None))
    step(module, tokens(), tokens(3))
    assert calls == []
    module.backward_dw()
    assert calls == [True]


def test_need_backward_dw_is_false_without_delay():
    assert not te.Linear(64, 64, device="cpu").need_backward_dw()


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weight_leaves_nothing_to_do_later(kind):
    module = make(kind, delay_wgrad_compute=True)
    for name in WEIGHTS[kind]:
        getattr(module, name).requires_grad_(False)
    step(module, tokens(), tokens(3))
    with pytest.raises(RuntimeError):
        module.backward_dw()


@pytest.mark.parametrize("frozen, left", [("fc1_weight", "fc2_weight"), ("fc2_weight", "fc1_weight")])
def test_backward_dw_with_one_frozen_weight(frozen, left):
    """The other weight's gradient still comes."""
    want = step(make(LN_MLP), tokens(), tokens(3))[left]
    module = make(LN_MLP, delay_wgrad_compute=True)
    getattr(module, frozen).requires_grad_(False)
    step(module, tokens(), tokens(3))
    module.backward_dw()
    assert_bitwise_equal(left, getattr(module, left).grad, want)
    assert getattr(module, frozen).grad is None


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_biases_alone(kind, recipe, device):
    """Trained in a first layer, whose input needs no gradient: each is what it is when all parameters are trained."""
    want = step(make(kind, device), tokens(), tokens(3), recipe)
    for name in [name for name in want if name.endswith("bias")]:
        module = make(kind, device).requires_grad_(False)
        module.get_parameter(name).requires_grad_()
        with under(recipe):
            out = module(tokens().to(device))
        out.backward(tokens(3).to(device))
        assert_bitwise_equal(name, module.get_parameter(name).grad, want[name])
        assert all(p.grad is None for other, p in module.named_parameters() if other != name)


@pytest.mark.parametrize("kind", (LINEAR, LN_MLP))
def test_a_residual_alone(kind):
    module = make(kind).requires_grad_(False)
    residual = leaf(tokens(5))
    module(tokens(), residual=residual).backward(tokens(3))
    assert_bitwise_equal("residual", residual.grad, tokens(3))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
@pytest.mark.parametrize("kind", (*KINDS, te.GroupedLinear))
def test_a_weight_gradient_that_nobody_asks_for_goes_nowhere(kind, recipe, late):
    """As pipeline schedules do that compute the gradients of inputs first and those of weights later: each once."""
    options = {"delay_wgrad_compute": late, "fuse_wgrad_accumulation": True}
    grouped = kind is te.GroupedLinear
    module = te.GroupedLinear(2, 64, 96, device="cpu", params_dtype=torch.bfloat16, **options) if grouped else None
    module = make(kind, **options) if module is None else module
    weights = [getattr(module, name) for name in (module.weight_names if grouped else WEIGHTS[kind])]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    x, rest = leaf(tokens()), ([17, 31],) if grouped else ()

    def sums():
        while module.run_delayed() if late else False:
            pass
        return [weight.main_grad.clone() for weight in weights]

    with under(recipe):
        y = module(x, *rest)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy, inputs=[p for name, p in module.named_parameters() if "bias" in name], retain_graph=True)
    assert not any(map(torch.any, sums())) and not any(weight.grad_added_to_main_grad for weight in weights)
    torch.autograd.grad(y, weights, dy, retain_graph=True)
    got = sums()
    for weight in weights:
        weight.main_grad.zero_()
    y.backward(dy)
    for a, b in zip([dx, *got], [x.grad, *sums()], strict=True):
        assert_bitwise_equal("gradient", a, b)
    if len(weights) > 1 and not grouped:
        with under(recipe):
            y = module(x)
        before = sums()
        torch.autograd.grad(y, weights[1], dy)
        assert [torch.equal(a, b) for a, b in zip(before, sums(), strict=True)] == [True, False]


def test_of_a_grouped_linears_weights_all_are_asked_for_or_none():
    module = te.GroupedLinear(2, 64, 96, bias=False, device="cpu", fuse_wgrad_accumulation=True)
    for weight in module.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    torch.autograd.grad(module(torch.randn(48, 64), [17, 31]).sum(), module.weight0)
    assert all(weight.main_grad.all() and weight.grad_added_to_main_grad for weight in module.parameters())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11's schedule takes no autograd.Function")
@pytest.mark.parametrize("late", [False, True])
def test_a_zero_bubble_schedule_of_torch(late):
    """Gradients of inputs for all micro-batches, then those of weights: the sums of whole backwards."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    stage = torch.nn.Sequential(*[
        make(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=late) for kind in (LN_MLP, LN_LINEAR)
    ])  # fmt: skip
    weights = [weight for weight in stage.parameters() if weight.dim() == 2]
    xs, sums = [tokens(seed).requires_grad_() for seed in (1, 2)], []
    for apart in (False, True):
        for weight in weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        stage.zero_grad()
        ys, groups = [stage(x) for x in xs], []
        for x, y in zip(xs, ys, strict=True):
            if apart:
                groups.append(stage_backward_input([y], [torch.ones_like(y)], [x], stage.parameters())[1])
            else:
                y.backward(torch.ones_like(y))
        assert not apart or not any(weight.main_grad.any() or weight.grad_added_to_main_grad for weight in weights)
        for group in groups:
            stage_backward_weight(stage.parameters(), group)
        while late and any([module.run_delayed() for module in stage]):
            pass
        others = [param.grad for param in stage.parameters() if param.dim() == 1]
        sums.append([weight.main_grad for weight in weights] + [grad.clone() for grad in others])
    for a, b in zip(*sums, strict=True):
        assert_bitwise_equal("gradient", a, b)
