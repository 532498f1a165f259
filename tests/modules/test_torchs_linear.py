"""Linear in high precision where te_lite adds nothing: torch's own linear computes it, bit for bit."""

import contextlib

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import delayed_state, leaf

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((7, 48), (1, 64), (0, 32), (4, 9, 64), (2, 3, 5, 32))


def _by_torch(y: torch.Tensor) -> bool:
    """Whether none of the nodes that gave y is te_lite's."""
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return not any("LayerFunction" in node.name() for node in seen)


def _pass(function, x, weight, bias, dy):
    y = function(x, weight, bias)
    wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    return y, *torch.autograd.grad(y, wanted, dy)


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_torchs(dtype, shape, bias, frozen, device):
    module = te.Linear(shape[-1], 80, bias=bias, params_dtype=dtype, device=device, name="torchs")
    if bias:
        torch.nn.init.normal_(module.bias)
    x = torch.randn(shape, dtype=dtype, device=device).requires_grad_(frozen != "x")
    module.weight.requires_grad_(frozen != "weight")
    dy = torch.randn((*shape[:-1], 80), dtype=dtype, device=device)
    weights = module.weight, module.bias if bias else None
    mine = _pass(lambda x, *_: module(x), x, *weights, dy)
    theirs = _pass(torch.nn.functional.linear, x, *weights, dy)
    for name, a, b in zip(("y", *"abc"), mine, theirs, strict=False):
        assert_bitwise_equal(name, a, b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    assert len(mine) == len(theirs) and _by_torch(mine[0])
    assert not mine[0]._is_view()  # pipelines free their outputs, and refuse views
    rows = {row["gemm"]: row["shape"] for row in te.overlap_report() if row["module"] == "torchs"}
    assert rows["fprop"][0] == x.numel() // shape[-1], rows


OTHERS = {
    "residual": {},
    "amp": {},
    "hooks": {},
    "strided": {},
    "parts": {"parameters_split": ("q", "k")},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed wgrad": {"delay_wgrad_compute": True},
    "fp8": {},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_te_lite_adds_to_is_not_torchs(what):
    module = te.Linear(64, 48, bias=False, **{"params_dtype": torch.bfloat16, "device": "cpu"} | OTHERS[what])
    if what == "main_grad":
        module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
    x, residual = leaf(torch.randn(32, 64)), torch.randn(32, 48).bfloat16()
    x = x.to(torch.bfloat16)
    if what == "strided":
        x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True).t()
    weight = module.weight if what != "parts" else torch.cat([module.q_weight, module.k_weight])
    truth = x.float() @ weight.float().t() + (residual.float() if what == "residual" else 0)
    with (
        torch.autocast("cpu", torch.float16, enabled=what == "amp"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if what == "hooks" else torch.enable_grad(),
        te.autocast(enabled=what == "fp8", recipe="current"),
    ):
        y = module(x, residual=residual if what == "residual" else None)
    assert not _by_torch(y)
    assert (y.float() - truth).norm() < (2.0**-3 if what == "fp8" else 2.0**-6) * truth.norm()


def test_a_kept_weight_is_the_weight_itself():
    """is_first_microbatch keeps nothing of its own in high precision, so what is written to the weight is seen."""
    module = te.Linear(64, 48, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    for first in (True, False, False):
        y = module(x, is_first_microbatch=first)
        assert _by_torch(y)
        assert_bitwise_equal("y", y, torch.nn.functional.linear(x, module.weight))
        y.sum().backward()
        module.weight.data.mul_(2)


def test_its_gradient_may_come_quantized():
    module = te.Linear(64, 48, bias=False, params_dtype=torch.bfloat16, device="cpu")
    after = te.Linear(48, 32, bias=False, params_dtype=torch.bfloat16, device="cpu")
    found = []
    for lone in (True, False):
        x = torch.randn(32, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        module.weight.grad = None
        y = module(x) if lone else torch.nn.functional.linear(x, module.weight)
        with te.autocast(recipe="current"):
            z = after(y, fp8_grad=True)
        z.backward(torch.randn(32, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)))
        found.append((x.grad, module.weight.grad))
    for mine, theirs in zip(*found, strict=True):
        assert type(mine) is torch.Tensor
        assert_bitwise_equal("gradient", mine, theirs)


def test_it_can_be_differentiated_twice():
    module = te.Linear(16, 8, bias=False, params_dtype=torch.float32, device="cpu")
    x = torch.randn(4, 16, requires_grad=True)
    found = []
    for function in (module, lambda x: torch.nn.functional.linear(x, module.weight)):
        (slope,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.sum(), (x, module.weight)))
    for mine, theirs in zip(*found, strict=True):
        assert_bitwise_equal("second", mine, theirs)
        assert mine.abs().max() > 0


def test_a_pass_that_it_begins_is_closed():
    """Under delayed scaling the backward of the first module of a pass takes the step, of whatever precision it is."""
    first = te.Linear(24, 32, bias=False, device="cpu")  # its features are no multiple of 16
    module = te.Linear(32, 32, bias=False, device="cpu")
    losses = []
    for scale in (1, 10):
        x = torch.randn(16, 32, requires_grad=True)
        with te.autocast(recipe="delayed"), pytest.warns(UserWarning) if scale == 1 else contextlib.nullcontext():
            losses.append(scale * module(x + 0 * first(torch.randn(16, 24))).sum())
    sum(losses).backward()
    assert delayed_state(module)["history_bwd"][:, 0].count_nonzero() == 2
