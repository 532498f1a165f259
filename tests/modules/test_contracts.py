"""What code around the modules relies on: attributes, construction, outputs, autocast, determinism."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal, assert_close_to_oracle
from tests import reference
from tests.emulation import E4M3, Current
from tests.harness import RECIPES, Oracle, build, leaf, step, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

KINDS = (LINEAR, LN_LINEAR, LN_MLP)


def tokens(m=48, k=64, seed=1, **kw):
    return reference.make_tokens(m, k, seed=seed, dtype=torch.bfloat16, **kw)


def make(kind, device="cpu", **kw):
    """A module 64 -> 64 (ffn 96) with the same parameters each time."""
    spec = Spec(kind)
    p = reference.make_parameters(spec, 64, 64, 96, dtype=kw.get("dtype", torch.bfloat16))
    return build(spec, 64, 64, 96, device=device, parameters=p, **kw)


# Parameters


def _parallel_attributes(p):
    if not getattr(p, "tensor_model_parallel", False):
        return None
    return p.partition_dim, p.partition_stride


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [LINEAR, LN_LINEAR])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_parameter_attributes(mode, kind, sequence_parallel):
    if (kind, mode) == (LN_LINEAR, "row"):
        pytest.skip("a norm over sharded features is not a layer that exists")
    module = getattr(te, kind)(64, 96, parallel_mode=mode, tp_size=2, sequence_parallel=sequence_parallel, device="cpu")
    assert tuple(module.weight.shape) == ((48, 64) if mode == "column" else (96, 32))
    assert tuple(module.bias.shape) == ((48,) if mode == "column" else (96,))
    assert _parallel_attributes(module.weight) == ((0, 1) if mode == "column" else (1, 1))
    assert _parallel_attributes(module.bias) == ((0, 1) if mode == "column" else None)
    marked = {n for n, p in module.named_parameters() if getattr(p, "sequence_parallel", False)}
    want = {"bias"} if mode == "row" else {n for n, _ in module.named_parameters() if n.startswith("layer_norm")}
    assert marked == (want if sequence_parallel else set())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_mlp_parameter_attributes(sequence_parallel):
    module = te.LayerNormMLP(
        64, 96, set_parallel_mode=True, tp_size=2, sequence_parallel=sequence_parallel, device="cpu"
    )
    attributes = {n: _parallel_attributes(p) for n, p in module.named_parameters()}
    assert attributes["fc1_weight"] == attributes["fc1_bias"] == (0, 1)
    assert attributes["fc2_weight"] == (1, 1) and attributes["fc2_bias"] is None
    assert tuple(module.fc1_weight.shape) == (48, 64) and tuple(module.fc2_weight.shape) == (64, 48)
    marked = {n for n, p in module.named_parameters() if getattr(p, "sequence_parallel", False)}
    assert marked == ({"fc2_bias", "layer_norm_weight", "layer_norm_bias"} if sequence_parallel else set())


def test_group_may_come_after_construction():
    """tp_size > 1 without a group is legal; using the module before the group is set is an error that says
    so.
    """
    module = te.Linear(64, 96, parallel_mode="row", tp_size=2, device="cpu", params_dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError), match="set_tensor_parallel_group"):
        module(tokens(48, 32))


def test_rng_tracker_seeds_the_weights():
    """With a tracker, initialisation runs in its fork: it repeats, and leaves the default generator alone."""
    weights = []
    for _ in range(2):
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 1234)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        module = te.Linear(64, 64, device="cpu", get_rng_state_tracker=lambda t=tracker: t)
        assert_bitwise_equal("default generator", torch.get_rng_state(), before)
        weights.append(module.weight.detach().clone())
    assert_bitwise_equal("weight", weights[0], weights[1])
    tracker = te.CudaRNGStatesTracker()
    tracker.add("other", 99)
    module = te.Linear(64, 64, device="cpu", get_rng_state_tracker=lambda: tracker, rng_tracker_name="other")
    assert not torch.equal(module.weight.detach(), weights[0])


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_then_reset_parameters(kind):
    """Nothing is allocated on meta; to_empty and reset_parameters give what direct construction gives."""
    args = (64, 96)
    module = getattr(te, kind)(*args, device="meta", params_dtype=torch.bfloat16)
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(5)
    module.reset_parameters()
    torch.manual_seed(5)
    direct = getattr(te, kind)(*args, device="cpu", params_dtype=torch.bfloat16)
    for (name, p), q in zip(module.named_parameters(), direct.parameters(), strict=True):
        assert_bitwise_equal(name, p.detach(), q.detach())
        assert getattr(p, "tensor_model_parallel", None) == getattr(q, "tensor_model_parallel", None)
    with under("current"):
        module(tokens())


@pytest.mark.parametrize("kind", [LINEAR, LN_LINEAR])
@pytest.mark.parametrize("recipe", RECIPES)
def test_parameters_split(recipe, kind):
    """One GEMM over parameters of their own names; out and gradients are those of the concatenation."""
    whole = make(kind)
    x, dy = tokens(), tokens(seed=3)
    want = step(whole, x, dy, recipe)
    for split in (("query", "key", "value", "gate"), {"q_": 32, "kv": 16, "g": 16}):
        sizes = list(split.values()) if isinstance(split, dict) else [16] * 4
        names = [n.rstrip("_") for n in split]
        module = getattr(te, kind)(64, 64, parameters_split=split, device="cpu", params_dtype=torch.bfloat16)
        with torch.no_grad():
            for kind_of in ("weight", "bias"):
                for name, part in zip(names, getattr(whole, kind_of).split(sizes), strict=True):
                    getattr(module, f"{name}_{kind_of}").copy_(part)
            for name, p in whole.named_parameters():
                if name.startswith("layer_norm"):
                    getattr(module, name).copy_(p)
        got = step(module, x, dy, recipe)
        for name in ("out", "dx"):
            assert_bitwise_equal(name, got[name], want[name])
        for kind_of in ("weight", "bias"):
            grads = torch.cat([got[f"{name}_{kind_of}"] for name in names])
            assert_bitwise_equal(kind_of, grads, want[kind_of])
    with pytest.raises(ValueError, match="64"):
        getattr(te, kind)(64, 64, parameters_split={"a": 32, "b": 16}, device="cpu")


# Outputs


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("shape", [(48, 64), (3, 16, 64)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_own_their_storage(kind, recipe, shape, device):
    """Megatron replaces out.data to free it and asserts that out._base is None; backward must not need it."""
    module, x = make(kind, device), tokens().reshape(shape)
    want = step(make(kind, device), x, tokens(seed=3), recipe)
    xs = leaf(x, device)
    with under(recipe):
        out = module(xs)
    assert out._base is None and out.is_contiguous() and out.shape == shape
    assert out.untyped_storage().nbytes() == out.numel() * out.element_size()
    dy = tokens(seed=3).reshape(shape).to(device)
    out.data = torch.empty((1,), dtype=out.dtype, device=device)
    torch.autograd.Variable._execution_engine.run_backward((out,), (dy,), False, False, (), True, True)
    assert_bitwise_equal("dx", xs.grad, want["dx"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_several_forwards_before_their_backwards(kind, recipe):
    """Pipeline parallelism: what a forward kept is not touched by the next."""
    module = make(kind)
    batches = [(tokens(seed=s), tokens(seed=s + 50)) for s in range(3)]
    alone = [step(make(kind), x, dy, recipe) for x, dy in batches]
    inputs = [leaf(x) for x, _ in batches]
    with under(recipe):
        outs = [module(x) for x in inputs]
    for out, (_, dy) in zip(outs, batches, strict=True):
        out.backward(dy)
    for i, (x, out) in enumerate(zip(inputs, outs, strict=True)):
        assert_bitwise_equal(f"out {i}", out.detach(), alone[i]["out"])
        if recipe != "delayed":  # the first backward's update moves the gradients' scale
            assert_bitwise_equal(f"dx {i}", x.grad, alone[i]["dx"])


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_repeat_bitwise(kind, recipe, device):
    first = step(make(kind, device), tokens(), tokens(seed=3), recipe)
    second = step(make(kind, device), tokens(), tokens(seed=3), recipe)
    for name in first:
        assert_bitwise_equal(name, second[name], first[name])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_eval_and_no_grad_change_nothing(kind, recipe):
    module = make(kind)
    want = step(make(kind), tokens(), None, recipe)["out"]
    with torch.no_grad(), under(recipe):
        assert_bitwise_equal("no_grad", module(tokens()), want)
        assert_bitwise_equal("eval", module.eval()(tokens()), want)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])  # whose first scales fit nothing
@pytest.mark.parametrize("kind", KINDS)
def test_torch_autocast_decides_the_type(kind, recipe, device):
    """fp32 parameters and input under torch.amp.autocast(bf16): bf16 out, fp32 gradients, bf16's result."""
    module = make(kind, device, dtype=torch.float32)
    low = make(kind, device)
    with torch.no_grad():
        for p, q in zip(module.parameters(), low.parameters(), strict=True):
            p.copy_(q)
    x = leaf(tokens().float(), device)
    with torch.amp.autocast(device, dtype=torch.bfloat16), under(recipe):
        out = module(x)
    assert out.dtype == torch.bfloat16
    out.backward(tokens(seed=3).to(device))
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())
    want = step(low, tokens(), tokens(seed=3), recipe)
    if kind == LINEAR:
        assert_bitwise_equal("out", out.detach(), want["out"])
    parameters = {n: p.detach().cpu() for n, p in low.named_parameters()}
    truth, reference_low = Oracle(Spec(kind), parameters, recipe, device=device).step(tokens(), tokens(seed=3))
    got = {"out": out.detach(), "dx": x.grad, **{n: p.grad for n, p in module.named_parameters()}}
    for name in got:
        assert_close_to_oracle(f"{kind} {name}", got[name], truth[name], reference_low[name])


# Quantized outputs and gradients


@pytest.mark.parametrize("recipe", ["delayed", "current"])  # the others refuse: tests/quantize/test_operands.py
def test_fp8_output_feeds_the_next_module(recipe):
    """A quantized output is taken as it is: the chain equals the oracle with the output quantized in
    between.
    """
    first, second = Spec(LINEAR), Spec(LINEAR)
    p1 = reference.make_parameters(first, 64, 64, seed=1, dtype=torch.bfloat16)
    p2 = reference.make_parameters(second, 64, 64, seed=2, dtype=torch.bfloat16)
    a, b = build(first, 64, 64, parameters=p1), build(second, 64, 64, parameters=p2)
    x = leaf(tokens())
    with under(recipe):
        middle = a(x, fp8_output=True)
        out = b(middle, fp8_grad=True)
    assert middle.shape == (48, 64)
    out.backward(tokens(seed=3))
    assert x.grad is not None and a.weight.grad is not None and bool(torch.isfinite(x.grad).all())
    if recipe == "delayed":
        return  # scale 1 in the first step: the path was taken; its numbers are those of a cast
    quantize = Current(E4M3)
    truth = reference.run(first, p1, tokens(), None, reference.quantization(recipe, first))["out"]
    truth = reference.run(second, p2, quantize(truth), None, reference.quantization(recipe, second))["out"]
    arith = reference.stored_in(torch.bfloat16)
    low = reference.run(first, p1, tokens(), None, reference.quantization(recipe, first), arith)["out"]
    low = reference.run(second, p2, quantize(low), None, reference.quantization(recipe, second), arith)["out"]
    assert_close_to_oracle("chain", out.detach(), truth, low)


def test_fp8_output_without_fp8_is_an_ordinary_tensor():
    out = make(LINEAR)(tokens(), fp8_output=True, fp8_grad=True)
    assert type(out) is torch.Tensor and out.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
def test_save_original_input(recipe):
    """Keeps x itself and quantizes again in backward: same bytes; refused where the scale would have
    moved.
    """
    module = make(LINEAR, save_original_input=True)
    if recipe == "delayed":
        with pytest.raises((ValueError, RuntimeError), match="save_original_input"), under(recipe):
            module(tokens())
        return
    got = step(module, tokens(), tokens(seed=3), recipe)
    want = step(make(LINEAR), tokens(), tokens(seed=3), recipe)
    for name in want:
        assert_bitwise_equal(name, got[name], want[name])


# Work that must not be done


class CountGemms(TorchDispatchMode):
    """Counts matrix products, whether torch's own or te_lite's."""

    NAMES = ("mm", "addmm", "_scaled_mm", "bmm", "matmul", "linear")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name in self.NAMES or "gemm" in name:
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind, frozen, expected", [
    (LINEAR, (), 3), (LINEAR, ("weight",), 2), (LN_LINEAR, ("weight",), 2),
    (LN_MLP, (), 6), (LN_MLP, ("fc1_weight", "fc2_weight"), 4), (LN_MLP, ("fc2_weight",), 5),
])  # fmt: skip
def test_frozen_weights_launch_no_wgrad_gemm(kind, frozen, expected, recipe):
    module = make(kind)
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    x = leaf(tokens())
    with CountGemms() as count:
        with under(recipe):
            out = module(x)
        out.backward(tokens(seed=3))
    assert len(count.calls) == expected, count.calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_never_waits_for_the_device(kind, recipe):
    module = make(kind, "cuda")
    x, dy = leaf(tokens(), "cuda"), tokens(seed=3).cuda()
    for _ in range(2):
        with under(recipe):
            module(x).backward(dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with under(recipe):
            module(x).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
