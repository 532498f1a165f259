"""Recorded launches of forward and backward (ops/recorder.py) give the bits of the bodies that were recorded."""

from __future__ import annotations

import copy

import pytest
import torch

import te_lite as te
from te_lite.ops.cublaslt import UNSCALED, product
from te_lite.ops.gemm import gemm
from te_lite.ops.recorder import Recording
from te_lite.testing.numerics import assert_bitwise_equal

BF16 = torch.bfloat16
MAKE = {
    "Linear": lambda **o: te.Linear(512, 1024, **o),
    "no bias": lambda **o: te.Linear(512, 1024, bias=False, **o),
    "split": lambda **o: te.Linear(512, 1024, parameters_split={"q": 512, "k": 256, "v": 256}, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(512, 1024, normalization="RMSNorm", **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(512, 1024, activation="swiglu", **o),
    "recomputing": lambda **o: te.LayerNormMLP(512, 1024, activation="swiglu", recompute_activation=True, **o),
}
SIZES = {"Linear": (512, 1024), "LayerNormMLP": (512, 512)}  # features in and out
RECIPES = ["bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp"]
STEPS = 7  # the first compiles, later ones record and replay


def make(kind, **options):
    torch.manual_seed(0)
    return MAKE[kind](params_dtype=BF16, device="cuda", **options)


def states(module):
    return {name: t for name, t in module.state_dict().items() if "extra" in name and t.numel()}


def one_step(module, recipe, x, dy, main_grads, first=None):
    """Every tensor that a step leaves, by name; what torch's allocator hands out next is poisoned before it."""
    x = x.clone().requires_grad_()
    poison = [torch.full((n,), float("nan"), device=x.device) for n in (64, 1 << 10, 1 << 14, 1 << 16, 1 << 18)]
    del poison
    module.zero_grad(set_to_none=True)
    with te.autocast(enabled=recipe != "bf16", recipe=None if recipe == "bf16" else recipe):
        y = module(x, is_first_microbatch=first)
    y.backward(dy)
    got = {"y": y.detach(), "dx": x.grad} | states(module)
    got |= {name: p.main_grad if main_grads and p.dim() == 2 else p.grad for name, p in module.named_parameters()}
    return {name: t.clone() for name, t in got.items() if t is not None}


def recorded(module):
    """How many bodies of the module are launches by now."""
    recordings = module._planned[1][0].recordings
    return sum(not isinstance(known, int) for known in recordings._known.values())


def compare(kind, recipe, shape, monkeypatch, *, main_grads=False, frozen=(), first=None, least=2):
    options = {"fuse_wgrad_accumulation": True} if main_grads else {}
    module = make(kind, **options)
    for name, p in module.named_parameters():
        p.requires_grad_(not any(name.endswith(end) for end in frozen))
    twin = copy.deepcopy(module)
    for made in (module, twin):
        for p in made.parameters():
            p.main_grad = torch.randn(p.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    generator = torch.Generator("cuda").manual_seed(hash(shape) & 255)
    features = 512 if "MLP" in type(module).__name__ else 1024
    for i in range(STEPS):
        scale = 2.0 ** (i - 3)
        x = torch.randn(*shape, device="cuda", dtype=BF16, generator=generator) * scale
        dy = torch.randn(*shape[:-1], features, device="cuda", dtype=BF16, generator=generator) * scale
        when = None if first is None else i % 3 == 0
        got = one_step(module, recipe, x, dy, main_grads, when)
        with monkeypatch.context() as patch:
            patch.setattr("te_lite.functional.plan.WANTED", False)
            want = one_step(twin, recipe, x, dy, main_grads, when)
        assert got.keys() == want.keys()
        for name in want:
            assert_bitwise_equal(f"step {i}: {name}", got[name], want[name])
    assert twin._planned[1][0].recordings is None
    if recipe == "bf16" and kind in ("Linear", "no bias") and not main_grads:
        assert recorded(module) == 0  # torch's own linear
    else:
        assert recorded(module) >= least, "nothing was recorded"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 512), (2, 24, 512)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MAKE)
def test_bits_of_replays(kind, recipe, shape, monkeypatch):
    compare(kind, recipe, shape, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "blockwise", "rowwise"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("first", [None, True], ids=["added", "replaced by every third"])
def test_main_grad(first, kind, recipe, monkeypatch):
    compare(kind, recipe, (64, 512), monkeypatch, main_grads=True, first=first)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_what_is_frozen(kind, recipe, frozen, monkeypatch):
    compare(kind, recipe, (64, 512), monkeypatch, frozen=frozen)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_frozen_weight_needs_no_main_grad(kind):
    module = make(kind, fuse_wgrad_accumulation=True)
    for p in module.parameters():
        p.requires_grad_(p.dim() == 1)
    for _ in range(4):
        x = torch.randn(64, 512, device="cuda", dtype=BF16, requires_grad=True)
        module(x).sum().backward()
        assert x.grad.isfinite().all() and all(p.grad is None for p in module.parameters() if p.dim() == 2)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_cached_weights(kind, recipe, monkeypatch):
    compare(kind, recipe, (64, 512), monkeypatch, first=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "blockwise"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_quantized_weights(kind, recipe, monkeypatch):
    with te.quantized_model_init(recipe=recipe):
        compare(kind, recipe, (64, 512), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("fixed", [False, True], ids=["moving", "fixed"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_steps_of_scales(kind, fixed, monkeypatch):
    """Their launch is recorded too, and leaves the state that it leaves where it is not."""

    def state(watched):
        monkeypatch.setattr("te_lite.quantize.delayed.unwatched", lambda: not watched)
        module = make(kind)
        generator = torch.Generator("cuda").manual_seed(3)
        for i in range(2 * STEPS):
            x, dy = (torch.randn(64, n, device="cuda", dtype=BF16, generator=generator) * 2.0**i for n in SIZES[kind])
            one_step(module, "delayed", x, dy, False)
            if fixed and i == STEPS:
                module._scales.fix()
        launches = [state.pool._launch for state in module._scales._live.values()]
        assert [isinstance(launch, Recording) for launch in launches] == [not watched] * 2
        return states(module)

    seen, replayed = state(True), state(False)
    for name in seen:
        assert_bitwise_equal(name, replayed[name], seen[name])
    assert seen


@pytest.mark.gpu
def test_a_replay_reads_what_is_there_now():
    """Weights replaced by .data, another gradient buffer, inputs elsewhere and of other lengths."""
    module = make("Linear", fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
    for i in range(12):
        tokens = (64, 64, 64, 128)[i % 4]
        x, dy = (torch.randn(tokens, n, device="cuda", dtype=BF16) for n in (512, 1024))
        if i % 5 == 4:
            module.weight.data = torch.randn(1024, 512, device="cuda", dtype=BF16)
            module.weight.main_grad = torch.randn(1024, 512, device="cuda")
        before = module.weight.main_grad.clone()
        y = module(x)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, module.weight, module.bias), rtol=2e-2, atol=0.3)
        y.backward(dy)
        want = before + (dy.float().t() @ x.float())
        torch.testing.assert_close(module.weight.main_grad, want, rtol=1e-2, atol=0.5)
    assert recorded(module) == 4  # two lengths, forward and backward


@pytest.mark.gpu
def test_products_in_bf16_have_the_bits_of_torch():
    generator = torch.Generator("cuda").manual_seed(5)
    for m, n, k in [
        (512, 2048, 5632),
        (64, 96, 64),
        (1024, 4096, 4096),
        (16, 16, 16),
        (48, 4096, 64),
        (128, 512, 8192),
    ]:
        a, b = (torch.randn(size, k, device="cuda", dtype=BF16, generator=generator) for size in (m, n))
        bias = torch.randn(n, device="cuda", dtype=BF16, generator=generator)
        at, bt = a.t().contiguous().t(), b.t().contiguous().t()
        for x in (a, at):
            for w in (b, bt):
                assert product(x.new_empty(m, n), x, w, None, None, UNSCALED), "torch would compute it"
                assert product(x.new_empty(m, n), x, w, None, None, UNSCALED, bias), "torch would add the bias"
                assert_bitwise_equal(f"{m} {n} {k}", gemm(x, w), torch.mm(x, w.t()))
                assert_bitwise_equal(f"{m} {n} {k} bias", gemm(x, w, None, bias), torch.addmm(bias, x, w.t()))
