"""LayerFunction where launches are replayed, seen on the CPU (cpu_recordings.py), and what its callers may do to it."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import te_lite as te
from te_lite.functional.recordings import Recordings
from te_lite.ops.recording import Recording, like_of
from te_lite.ops.source import plain
from te_lite.quantize.per_tensor import FORMATS, Current
from te_lite.quantize.quantizer import Quantizer
from te_lite.recipe import CustomRecipe
from te_lite.testing.numerics import assert_bitwise_equal
from tests.modules.cpu_recordings import record_on_cpu

BF16 = torch.bfloat16
K, N = 64, 96
MAKE = {
    "Linear": partial(te.Linear, K, N),
    "original": partial(te.Linear, K, N, bias=False, save_original_input=True),
    "split": partial(te.Linear, K, N, parameters_split=("q", "k", "v")),
    "LayerNormLinear": partial(te.LayerNormLinear, K, N, normalization="RMSNorm"),
    "LayerNormMLP": partial(te.LayerNormMLP, K, N, activation="swiglu"),
    "recomputing": partial(te.LayerNormMLP, K, N, activation="swiglu", recompute_activation=True),
    "norm returned": partial(te.LayerNormMLP, K, N, return_layernorm_output=True),
}
# How a step differs from the plainest. enter: a context around forward; around: calls the module.
WAYS = {
    "plain": {},
    "two dimensions": {"shape": (16, K)},
    "residual": {"residual": True},
    "main_grad": {"main_grads": True},
    "frozen weights": {"frozen": ("weight",)},
    "frozen all": {"frozen": ("weight", "bias"), "residual": True, "dx": False},
    "cached weights": {"cached": True},
    "backward twice": {"backwards": 2},
    "hooks": {"enter": partial(saved_tensors_hooks, torch.clone, torch.clone), "backwards": 2},
    "save_on_cpu": {"enter": save_on_cpu},
    "no_grad": {"enter": torch.no_grad},
    "autocast": {"enter": partial(torch.amp.autocast, "cpu", BF16)},
    "checkpoint": {"around": partial(checkpoint, use_reentrant=False)},
    "reentrant checkpoint": {"around": partial(checkpoint, use_reentrant=True)},
}


def make(kind, **options):
    torch.manual_seed(0)
    return MAKE[kind](params_dtype=BF16, device="cpu", **options)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=BF16)


def recorded(module):
    return [known[0] for known in module._planned[1][0].recordings._known.values() if isinstance(known, tuple)]


def one_step(module, recipe, i, *, shape=(2, 8, K), residual=False, dx=True, cached=False, backwards=1,
             enter=nullcontext, around=None, **_):  # fmt: skip
    """Every tensor that a step leaves, by name."""
    x = (random(*shape, seed=i) * 2.0 ** (i - 3)).requires_grad_(dx)
    features = K if isinstance(module, te.LayerNormMLP) else N
    more = {"residual": random(*shape[:-1], features, seed=i + 50).requires_grad_()} if residual else {}
    if cached:
        more["is_first_microbatch"] = i % 3 == 0
    module.zero_grad(set_to_none=True)
    with enter(), te.autocast(enabled=recipe is not None, recipe=recipe):
        out = around(module, x, **more) if around else module(x, **more)
    outputs = out if isinstance(out, tuple) else (out,)
    for again in range(backwards if outputs[0].requires_grad else 0):
        outputs[0].backward(random(*outputs[0].shape, seed=i + 99), retain_graph=again + 1 < backwards)
    left = {f"y{at}": y.detach() for at, y in enumerate(outputs)} | {"dx": x.grad}
    left |= {name: t.grad for name, t in more.items() if name == "residual"}
    left |= {name: t for name, t in module.state_dict().items() if "extra" in name and t.numel()}
    for name, p in module.named_parameters():
        left |= {name: p.grad, f"{name}.main_grad": getattr(p, "main_grad", None)}
    return {name: t.clone() for name, t in left.items() if t is not None}


@pytest.mark.parametrize(
    "kind, recipe, way",
    [(kind, recipe, "plain") for kind in MAKE for recipe in (None, "current", "mxfp8", "blockwise", "rowwise")]
    + [(kind, "delayed", "plain") for kind in MAKE if kind != "original"]
    + [(kind, "current", way) for kind in MAKE for way in WAYS if (kind, way) != ("split", "main_grad")],
)
def test_replays_have_the_bits_of_the_bodies(kind, recipe, way, monkeypatch):
    given = WAYS[way]
    module = make(kind, fuse_wgrad_accumulation="main_grads" in given)
    for name, p in module.named_parameters():
        p.requires_grad_(not name.endswith(given.get("frozen", ("none",))))
    twin = copy.deepcopy(module)
    if "main_grads" in given:
        for p in (*module.parameters(), *twin.parameters()):
            p.main_grad = random(*p.shape).float()
    for i in range(5):
        want = one_step(twin, recipe, i, **given)
        with monkeypatch.context() as patch:
            record_on_cpu(patch)
            got = one_step(module, recipe, i, **given)
        assert got.keys() == want.keys()
        for name in want:
            assert_bitwise_equal(f"step {i}: {name}", got[name], want[name])
    assert twin._planned[1][0].recordings is None
    by_torch = (kind, recipe, way) == ("Linear", None, "plain")
    assert any(one.runs for one in recorded(module)) is not by_torch, "nothing was replayed"


def test_what_is_refused_is_refused_of_replays_too(monkeypatch):
    """A split weight written to between forward and backward; a gradient of the gradient."""
    record_on_cpu(monkeypatch)
    module = make("split")
    for i in range(5):
        y = module(random(8, K, seed=i).requires_grad_())
        with torch.no_grad():
            module.k_weight.mul_(2)
        with pytest.raises(RuntimeError, match="split weight was written to"):
            y.sum().backward()
        x = random(8, K, seed=i).requires_grad_()
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.grad(module(x).float().square().sum(), x, create_graph=True)
    assert any(one.runs for one in recorded(module))


def test_two_threads_may_record_the_same_body(monkeypatch):
    """Both have looked up before the first has recorded."""
    record_on_cpu(monkeypatch)
    recordings, x = Recordings(1), torch.randn(4, 4)
    keys = [recordings.try_replay(("body",), (x,))[0] for _ in range(20)]
    assert None not in keys
    for key in keys:
        taken = recordings.run(key, (x,), lambda: (x * 2,))
        assert torch.equal(taken.tensors[0], x * 2) and taken.specs == [()]
    _, found = recordings.try_replay(("body",), (x + 1,))
    assert torch.equal(found.tensors[0], (x + 1) * 2)


def test_a_body_is_not_recorded_where_its_memory_has_no_room_twice(monkeypatch):
    """While a body is recorded, all that it allocates is held."""
    record_on_cpu(monkeypatch)
    given_out = iter(range(0, 10**6, 1000))
    monkeypatch.setattr("te_lite.functional.recordings.allocated", lambda: next(given_out))
    x = torch.randn(4, 4)
    for room, replayed in ((1999, False), (2000, True)):
        monkeypatch.setattr("te_lite.functional.recordings.room", lambda room=room: room)
        recordings = Recordings(1)
        for _ in range(4):
            key, found = recordings.try_replay(("body",), (x,))
            taken = found or recordings.run(key, (x,), lambda: (x * 2,))
            assert torch.equal(taken.tensors[0], x * 2)
        assert (found is not None) == replayed


def test_the_body_runs_where_a_replay_has_no_room(monkeypatch):
    """A replay asks for all its memory before it does anything."""
    record_on_cpu(monkeypatch)
    recordings, x, fetched = Recordings(1), torch.randn(4, 4), []
    for _ in range(3):
        key, found = recordings.try_replay(("body",), (x,))
        if found is None:
            recordings.run(key, (x,), lambda: (x * 2,))
    assert found is not None
    recording = Recording(
        [], torch.device("cpu"), [lambda: fetched.append(True) or ()], [(x.shape, x.dtype)], 0, [(1, None)]
    )
    (known,) = [key for key, value in recordings._known.items() if not isinstance(value, int)]
    recordings._known[known] = recordings._known[known]._replace(recording=recording)
    monkeypatch.setattr(recording, "device", None)
    assert recordings.try_replay(("body",), (x,))[1].tensors[0].shape == x.shape and len(fetched) == 1

    def none_left(like):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty_like", none_left)
    assert recordings.try_replay(("body",), (x,)) == (None, None) and len(fetched) == 1


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_other_layouts_of_x_are_another_body(recipe, monkeypatch):
    """A quantized x by row is kept by row, a plain one by column; with as many tokens as features both are alike."""
    before, layer = (te.Linear(K, K, bias=False, params_dtype=BF16, device="cpu") for _ in range(2))
    x, dy = random(K, K, seed=1), random(K, K, seed=2)

    def dw(quantized: bool) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            given = before(x, fp8_output=True)
            given = given if quantized else given.detach().dequantize().requires_grad_()
            layer.zero_grad()
            layer(given).backward(dy)
        return layer.weight.grad.clone()

    record_on_cpu(monkeypatch)
    for _ in range(6):  # delayed scaling's scales stay what they are then
        dw(False)
    assert any(one.runs for one in recorded(layer)), "nothing was replayed"
    got = dw(True)
    layer._planned[1][0].recordings._known.clear()
    assert_bitwise_equal("dw", got, dw(True))


def test_threads_share_a_module(monkeypatch):
    record_on_cpu(monkeypatch)
    module = make("LayerNormLinear")
    xs = [random(8, K, seed=i).requires_grad_() for i in range(4)]
    want = [torch.autograd.grad(copy.deepcopy(module)(x).sum(), x)[0] for x in xs]

    def work(i):
        return [torch.autograd.grad(module(xs[i]).sum(), xs[i])[0] for _ in range(12)]

    with ThreadPoolExecutor(len(xs)) as threads:
        for dxs, dx in zip(threads.map(work, range(len(xs))), want, strict=True):
            assert all(torch.equal(one, dx) for one in dxs)


def test_memory_of_a_recording_has_the_strides_of_fresh_memory():
    for shape in [(), (1,), (5,), (1, 1), (1, 5), (5, 1), (2, 3, 4), (3, 1, 4, 1), (0,), (0, 4), (4, 0)]:
        made = torch.empty_like(like_of(torch.Size(shape), BF16, torch.device("cpu")))
        assert made.stride() == torch.empty(shape).stride(), shape
        assert made.untyped_storage().nbytes() == 2 * made.numel()


@pytest.mark.parametrize("kind", ["Linear", "split", "LayerNormLinear", "LayerNormMLP"])
def test_a_bias_in_fp32_has_its_gradient_in_fp32(kind):
    """Of a bf16 layer, when the bias, or the last part of it, becomes fp32 after the first call."""
    module = make(kind)
    module(random(2, K))
    *_, (name, bias) = [(name, p) for name, p in module.named_parameters() if name.endswith("bias")]
    bias.data = bias.data.float()
    y = module(random(300, K).requires_grad_())
    dy = random(*y.shape, seed=7)
    y.backward(dy)
    want = dy.double().sum(0)[-len(bias) :]
    assert bias.grad.dtype == torch.float32
    error, rounded = ((grad.double() - want).abs().max() for grad in (bias.grad, want.to(BF16)))
    bound = len(dy) * 2**-24 * dy.double().abs().sum(0).max()  # of sums in fp32, in any order
    assert error <= bound < rounded, name


@dataclass(frozen=True, slots=True)
class OlderSignature(Quantizer):
    """Of when bias_grad was a bool, and handed on as it comes."""

    inner: Current = Current(FORMATS[torch.float8_e4m3fn])
    format: object = FORMATS[torch.float8_e4m3fn]

    def quantize(self, source, *, row=True, col=False, bias_grad: bool = False):
        return self.inner.quantize(source, row=row, col=col, bias_grad=bias_grad)

    def again(self, source, earlier):
        return self.inner.again(source, earlier)


def older(role):
    return OlderSignature()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_quantizers_of_the_older_signature(kind):
    module = make(kind)
    with te.autocast(recipe=CustomRecipe(older)):
        y = module(random(32, K).requires_grad_())
    y.backward(dy := random(*y.shape))
    bias = module.bias if kind == "Linear" else module.fc2_bias
    assert_bitwise_equal("bias", bias.grad, dy.float().sum(0).to(BF16))
    assert Current(FORMATS[torch.float8_e4m3fn]).quantize(plain(dy), bias_grad=False)[1] is None


def test_a_tensor_that_outlives_its_transform_keeps_its_gradient():
    module, leaked = te.Linear(K, K, params_dtype=torch.float32, device="cpu"), []
    x = torch.randn(8, K, requires_grad=True)

    def leaks(t):
        leaked.append(t * 2)
        return t.sum()

    torch.func.grad(leaks)(x)
    module(leaked[0], residual=leaked[0]).sum().backward()
    want = 2 * (torch.ones(8, K) @ module.weight.detach() + 1)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_saved_tensors_that_hooks_put_anywhere(recipe):
    """No launch reads them where they lie: the layer runs, and is right, in every step."""
    module = te.Linear(512, 1024, params_dtype=BF16, device="cuda")
    x = torch.randn(64, 512, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn(64, 1024, device="cuda", dtype=BF16)

    def misplaced(t):
        memory = torch.empty(t.nbytes + 8, dtype=torch.uint8, device="cuda")
        return memory[8:].view(t.dtype).view(t.shape).copy_(t) if t.element_size() == 1 else t

    def step(pack):
        with saved_tensors_hooks(pack, lambda t: t), te.autocast(recipe=recipe):
            y = module(x)
        return torch.autograd.grad(y, (x, module.weight), dy)

    want = step(lambda t: t)
    for i in range(6):
        for name, got, exact in zip(("dx", "dw"), step(misplaced), want, strict=True):
            assert_bitwise_equal(f"step {i}: {name}", got, exact)
