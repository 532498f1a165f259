"""The first gradient after a forward with is_first_microbatch=True replaces main_grad, as in Transformer Engine; later
ones are added, whoever computes them."""

import copy
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import RECIPES, build, leaf, under
from tests.modules.cpu_recordings import record_on_cpu
from tests.modules.test_layer_function import recorded
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

KINDS = (LINEAR, LN_LINEAR, LN_MLP)
WAYS = {
    "plain": lambda module, x, first: module(x, is_first_microbatch=first),
    "te.checkpoint": lambda module, x, first: te.checkpoint(module, x, is_first_microbatch=first),
    "te.checkpoint, reentrant": lambda module, x, first: te.checkpoint(
        module, x, is_first_microbatch=first, use_reentrant=True
    ),
    "checkpoint": lambda module, x, first: checkpoint(
        module, x, is_first_microbatch=first, use_reentrant=False, context_fn=te.checkpoint_context_fn
    ),
    "torch's": lambda module, x, first: checkpoint(module, x, is_first_microbatch=first, use_reentrant=False),
    "torch's, reentrant": lambda module, x, first: checkpoint(
        partial(module, is_first_microbatch=first), x, use_reentrant=True
    ),
}


def tokens(seed=1):
    return reference.make_tokens(48, 64, seed=seed, dtype=torch.bfloat16)


def weights(module):
    return [p for p in module.parameters() if p.dim() == 2]


def fused(kind, device="cpu", fill=float("nan"), dtype=torch.float32, **options):
    parameters = reference.make_parameters(Spec(kind), 64, 64, 96, dtype=torch.bfloat16)
    module = build(
        Spec(kind), 64, 64, 96, device=device, parameters=parameters, fuse_wgrad_accumulation=True, **options
    )
    for weight in weights(module):
        weight.main_grad = torch.full_like(weight, fill, dtype=dtype)
    return module


def micro_batch(module, i, first, recipe, call=WAYS["plain"]):
    """Forward and backward of the i-th micro-batch."""
    device = next(module.parameters()).device
    with under(recipe):
        call(module, leaf(tokens(i), device), first).backward(tokens(i + 10).to(device))


def agree(module, other):
    """Bit for bit."""
    for got, want in zip(weights(module), weights(other), strict=True):
        assert got.main_grad.isfinite().all() and want.main_grad.any()
        assert torch.equal(got.main_grad, want.main_grad)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_of_three_micro_batches(kind, recipe, device):
    """Nobody zeroes main_grad between the steps. The twin's is zeros at each micro-batch, and the sum is made here."""
    module, twin, sums = fused(kind, device), fused(kind, device), []
    for i in range(6):
        for weight in weights(twin):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for made in (module, twin):
            micro_batch(made, i, i % 3 == 0, recipe)
        found = [weight.main_grad for weight in weights(twin)]
        sums = found if i % 3 == 0 else [a + b for a, b in zip(sums, found, strict=True)]
        for weight, total in zip(weights(twin), sums, strict=True):
            weight.main_grad = total
        agree(module, twin)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_a_module_that_is_called_twice_in_a_micro_batch(way, recipe):
    """Transformer Engine would lose the gradient of one of the two calls."""
    module, twin = fused(LN_MLP), fused(LN_MLP, fill=0.0)
    for made, first in ((module, True), (twin, None)):
        x, y = leaf(tokens(1)), leaf(tokens(2))
        call = WAYS[way if made is module else "plain"]
        with under(recipe):
            sums = call(made, x, first).sum() + call(made, y, first).square().sum()
            sums.backward()
    agree(module, twin)


def test_pipelined_micro_batches():
    """The second forward runs before the first backward, and says that it is not the first."""
    module, twin = fused(LINEAR), fused(LINEAR, fill=0.0)
    ys = [module(leaf(tokens(i)), is_first_microbatch=i == 0) for i in range(3)]
    for i, y in enumerate(ys):
        y.backward(tokens(i + 10))
        micro_batch(twin, i, None, "bf16")
    agree(module, twin)


def test_tied_weights():
    """Two modules add to one main_grad; the one that computes its gradient first replaces what was there."""
    first, second, twin = fused(LINEAR), fused(LINEAR), fused(LINEAR, fill=0.0)
    second.weight = first.weight
    ys = [module(leaf(tokens(i)), is_first_microbatch=True) for i, module in enumerate((first, second))]
    for i, y in reversed(list(enumerate(ys))):
        y.backward(tokens(i + 10))
        micro_batch(twin, i, None, "bf16")
    agree(first, twin)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["bf16", "blockwise"])
def test_what_computes_no_gradient_says_nothing(recipe, way):
    """An evaluation, and a frozen weight: what was there stays, and is added to."""
    module, twin = fused(LN_MLP, fill=1.0), fused(LN_MLP, fill=1.0)
    with torch.no_grad(), under(recipe):
        WAYS[way](module, tokens(), True)
        WAYS[way](module, leaf(tokens()), True)
    with torch.inference_mode(), under(recipe):
        module(tokens(), is_first_microbatch=True)
    module.requires_grad_(False)
    with under(recipe):
        module(leaf(tokens()), is_first_microbatch=True).sum().backward()
    module.requires_grad_(True)
    for made in (module, twin):
        micro_batch(made, 1, None, recipe)
    agree(module, twin)


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_gradients_that_wait(recipe):
    """Each backward_dw() is one gradient: the oldest replaces."""
    module, twin = fused(LN_MLP, delay_wgrad_compute=True), fused(LN_MLP, fill=0.0)
    for i in range(2):
        micro_batch(module, i, i == 0, recipe)
        assert all(weight.main_grad.isnan().all() for weight in weights(module))
        micro_batch(twin, i, None, recipe)
    for _ in range(2):
        module.backward_dw()
    agree(module, twin)


@pytest.mark.parametrize("recipe", ["bf16", "current", "blockwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "at any address"])
@pytest.mark.parametrize("device", device_params())
def test_wherever_main_grad_lies(device, layout, dtype, recipe):
    """Rounded once, to its dtype."""
    module, exact = fused(LINEAR, device), fused(LINEAR, device)
    shape, options = module.weight.shape, {"dtype": dtype, "device": device}
    module.weight.main_grad = {
        "contiguous": lambda: torch.full(shape, float("nan"), **options),
        "strided": lambda: torch.full(shape[::-1], float("nan"), **options).t(),
        "at any address": lambda: torch.full((shape.numel() + 1,), float("nan"), **options)[1:].view(shape),
    }[layout]()
    where = module.weight.main_grad.data_ptr()
    for made in (module, exact):
        micro_batch(made, 1, True, recipe)
    got, want = module.weight.main_grad, exact.weight.main_grad
    bound = torch.finfo(dtype).eps / 2 * want.abs() + 2.0**-18 * want.abs().max()  # the second: of sums in fp32
    assert got.data_ptr() == where and ((got.float() - want).abs() <= bound).all()


def test_no_tokens():
    module = fused(LINEAR)
    module(leaf(tokens()[:0]), is_first_microbatch=True).sum().backward()
    assert not module.weight.main_grad.any()


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "blockwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_recordings(kind, recipe, monkeypatch):
    """What replaces and what adds are recorded apart; a replay of the first uses up what forward said."""
    module = fused(kind)
    twin = copy.deepcopy(module)
    for made in (module, twin):
        for weight in weights(made):
            weight.main_grad = torch.full_like(weight, float("nan"), dtype=torch.float32)
    for i in range(12):
        micro_batch(twin, i, i % 3 == 0, recipe)
        with monkeypatch.context() as patch:
            record_on_cpu(patch)
            micro_batch(module, i, i % 3 == 0, recipe)
        agree(module, twin)
    assert sum(one.runs > 0 for one in recorded(module)) >= 2, "nothing was replayed"


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["bf16", "current", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_launches_add_what_is_asked_for(kind, recipe, device, monkeypatch):
    """A backward for the input alone and one for everything are repeated each by launches of its own."""
    if device == "cpu":
        record_on_cpu(monkeypatch)
    module = fused(kind, device, fill=0.0)
    for _ in range(6):
        x, before = leaf(tokens(1), device), [weight.main_grad.clone() for weight in weights(module)]
        with under(recipe):
            y = module(x)
        dy = torch.ones_like(y)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        for weight, was in zip(weights(module), before, strict=True):
            assert_bitwise_equal("main_grad", weight.main_grad, was)
        y.backward(dy)
        assert_bitwise_equal("dx", x.grad, dx)
        for weight, was in zip(weights(module), before, strict=True):
            assert not torch.equal(weight.main_grad, was)
    assert len(recorded(module)) >= 3, "forward and both backwards"
    assert device != "cpu" or sum(one.runs > 0 for one in recorded(module)) >= 3


def test_quantized_weights():
    with te.quantized_model_init(recipe="current"):
        module, twin = fused(LINEAR), fused(LINEAR, fill=0.0)
    micro_batch(module, 1, True, "current")
    micro_batch(twin, 1, None, "current")
    agree(module, twin)
