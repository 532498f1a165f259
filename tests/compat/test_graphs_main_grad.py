"""main_grad under te.make_graphed_callables: replays add to it, and what forwards said of it stays true."""

import contextlib
import copy

import pytest
import torch

from tests.compat.graphing import DEVICES, agree, draw, graphed, make, scales, step
from tests.reference import LINEAR, LN_MLP


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_main_grad_accumulates_in_replays(recipe, marks, device):
    plain = make(LN_MLP, device, fuse_wgrad_accumulation=True)
    twin = copy.deepcopy(plain)
    for module in (plain, twin):
        for i, p in enumerate(module.parameters()):
            p.main_grad = torch.full(p.shape, float(i), device=device)
            if marks:
                p.grad_added_to_main_grad = False
    before = [p.main_grad.clone() for p in plain.parameters()]
    graphed(plain, recipe, device)
    agree("warm-up", [p.main_grad for p in plain.parameters()], before)
    assert not marks or not any(p.grad_added_to_main_grad for p in plain.parameters())
    for seed in range(3):
        results = []
        for module in (plain, twin):
            found = step([module], recipe, seed, device)
            # What autograd gets for a weight that is added to main_grad is a dummy.
            dummies = sum(p.dim() == 2 for p in module.parameters()) if marks else 0
            grads = [p.grad for p in module.parameters() if p.dim() < 2]
            results.append([*found[:2], *grads, *(p.main_grad.clone() for p in module.parameters()), *scales(module)])
            assert sum(p.grad is not None for p in module.parameters()) == len(grads) + dummies
            if marks:
                assert all(p.grad_added_to_main_grad == (p.dim() == 2) for p in module.parameters())
        agree(f"step {seed}", *results)
    next(p for p in plain.parameters() if p.dim() == 2).main_grad = torch.zeros(1, device=device)
    with pytest.raises(RuntimeError, match="main_grad of a parameter .* replaced since"):
        step([plain], recipe, 0, device)


@contextlib.contextmanager
def aside(device):
    """On a CUDA stream of its own, after all that came before; what follows comes after."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def test_a_capture_uses_up_nothing_that_a_forward_said(device):
    """A forward of the first micro-batch waits for its backward, which replaces main_grad; replays add. On a stream
    of its own: no capture may use the default stream, on which its backward would add up gradients."""
    plain = make(LN_MLP, device, fuse_wgrad_accumulation=True)
    twin = copy.deepcopy(plain)
    found = []
    for module, fill in ((plain, float("nan")), (twin, 0.0)):
        for p in module.parameters():
            p.main_grad = torch.full(p.shape, fill, device=device)
        with aside(device):
            y = module(draw(7, device), is_first_microbatch=True)
            if module is plain:
                graphed(module, "bf16", device)
            y.backward(draw(8, device))
        step([module], "bf16", 1, device)
        found.append([p.main_grad for p in module.parameters() if p.dim() == 2])
    agree("main_grad", *found)


def test_a_replay_is_the_first_gradient_too(device):
    """Two layers share a weight. The eager one's forward says that main_grad is old, the replay comes first."""
    eager, other = (make(LINEAR, device, fuse_wgrad_accumulation=True) for _ in range(2))
    eager.weight = other.weight
    other.weight.main_grad = torch.full(other.weight.shape, float("nan"), device=device)
    graphed(other, "bf16", device)
    y = eager(draw(7, device), is_first_microbatch=True)
    step([other], "bf16", 1, device)
    first = other.weight.main_grad.clone()
    y.backward(torch.ones_like(y))
    assert first.isfinite().all() and first.any()
    before, other.weight.main_grad = other.weight.main_grad, torch.zeros_like(first)
    eager(draw(7, device)).backward(torch.ones_like(y))
    torch.testing.assert_close(before, first + other.weight.main_grad, rtol=1e-5, atol=1e-4)
