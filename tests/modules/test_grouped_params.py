"""te.GroupedLinear whose weights are kept quantized."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor

import te_lite as te
from te_lite.modules import grouped_params
from te_lite.quantize.tensor import QuantizedTensor
from tests.modules.test_grouped_linear import BF16, data, grads_of, step, weights_of
from tests.ops.paths import DEVICES

SIZES, K, N = (5, 0, 130, 1), 144, 48
OWN = ("current", "blockwise", "mxfp8")


def made(recipe: str | None, device="cpu", **options) -> te.GroupedLinear:
    """With the numbers that every other one has before they are quantized."""
    torch.manual_seed(3)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe, preserve_high_precision_init_val=True):
        return te.GroupedLinear(len(SIZES), options.pop("k", K), N, params_dtype=BF16, device=device, **options)


def pair(recipe: str, device: str, dequantized: bool = False, **options) -> tuple[te.GroupedLinear, te.GroupedLinear]:
    """(one that keeps its weights quantized, one with the numbers that they were, or are)."""
    kept, plain = made(recipe, device, **options), made(None, device, **options)
    with torch.no_grad():
        for ours, theirs in zip(weights_of(kept), weights_of(plain), strict=True):
            assert isinstance(ours, QuantizedTensor) and not isinstance(theirs, QuantizedTensor)
            theirs.copy_(ours.dequantize() if dequantized else ours.get_high_precision_init_val())
    return kept, plain


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", OWN)
def test_bits_are_those_of_weights_quantized_in_each_call(recipe, device):
    kept, plain = pair(recipe, device)
    x, dy = data()
    expected = step(plain, x, dy, recipe=recipe)
    assert_equal(step(kept, x, dy, recipe=recipe), expected)
    assert_equal(step(kept, x, dy, recipe=recipe, is_first_microbatch=False), expected)
    splits = torch.tensor(SIZES, device=device)
    assert_equal(step(kept, x, dy, splits, recipe=recipe), step(plain, x, dy, splits, recipe=recipe))
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(kept(x.to(device), SIZES).cpu(), expected[0])


@pytest.mark.parametrize("device", DEVICES)
def test_delayed_scaling_takes_each_weights_own_amax(device):
    """As a te.Linear of each group does."""
    kept = made("delayed", device)
    with te.quantized_model_init(recipe="delayed"):
        linears = [te.Linear(K, N, params_dtype=BF16, device=device) for _ in SIZES]
    with torch.no_grad():
        for i, linear in enumerate(linears):
            linear.weight.copy_(getattr(kept, f"weight{i}").get_high_precision_init_val())
            linear.bias.copy_(getattr(kept, f"bias{i}"))
            assert torch.equal(linear.weight.dequantize(), getattr(kept, f"weight{i}").dequantize())
    x, dy = data()
    for _ in range(3):
        y, dx, *_ = step(kept, x, dy, recipe="delayed")
        leaf = x.clone().to(device).requires_grad_()
        with te.autocast(recipe="delayed"):
            parts = zip(linears, leaf.split(list(SIZES)), strict=True)
            out = torch.cat([linear(part) if len(part) else part.new_empty(0, N) for linear, part in parts])
        out.backward(dy.to(device))
        for ours, theirs in ((y, out), (dx, leaf.grad)):  # sums in another order, then rounded to bf16
            theirs = theirs.detach().cpu()
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-9 * float(theirs.abs().max()))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "bf16"])
def test_other_recipes_work_on_the_dequantized_numbers(recipe):
    kept, plain = pair("current", "cpu", dequantized=True)
    x, dy = data()
    if recipe == "bf16":
        found = step(kept, x, dy)
    else:
        with pytest.warns(UserWarning, match="kept in e4m3"):
            found = step(kept, x, dy, recipe=recipe)
    assert_equal(found, step(plain, x, dy, recipe=None if recipe == "bf16" else recipe))


def test_gradients_go_to_main_grad_and_may_come_late():
    x, dy = data()
    kept, plain = pair("current", "cpu", fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    for module in (kept, plain):
        for weight in weights_of(module):
            weight.main_grad = torch.full(weight.shape, 0.5)
        step(module, x, dy, recipe="current")
        assert all(bool((weight.main_grad == 0.5).all()) for weight in weights_of(module))
        module.backward_dw()
    assert_equal([weight.main_grad for weight in weights_of(kept)], [weight.main_grad for weight in weights_of(plain)])
    assert not torch.equal(weights_of(kept)[0].main_grad, torch.full((N, K), 0.5))


def test_an_optimizer_and_a_checkpoint_write_to_the_bytes(tmp_path):
    kept, (x, dy) = made("current"), data()
    before = [weight.dequantize().clone() for weight in weights_of(kept)]
    first = step(kept, x, dy, recipe="current")[0]
    torch.optim.SGD(kept.parameters(), lr=1.0).step()
    assert all(isinstance(weight, QuantizedTensor) for weight in weights_of(kept))
    assert not torch.equal(weights_of(kept)[0].dequantize(), before[0])
    trained = step(kept, x, dy, recipe="current")[0]
    assert not torch.equal(trained, first)
    torch.save(kept.state_dict(), tmp_path / "state.pt")
    other = made("current")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    assert torch.equal(step(other, x, dy, recipe="current")[0], trained)


def test_what_stands_for_the_weights_takes_no_memory():
    kept = made("current")
    shape = grouped_params.join_quantized(tuple(weights_of(kept)), False)
    assert shape.shape == (len(SIZES), N, K) and shape.untyped_storage().nbytes() == 2
    with torch.no_grad(), te.autocast(recipe="current"):
        kept(data()[0], SIZES)
    assert all(weight.q.col is None for weight in weights_of(kept)), "no backward may follow"


def test_backward_keeps_what_it_reads():
    """The columns, and only where x gets a gradient; the rows are gone."""
    kept = made("current")
    for leaf in (True, False):
        x = data()[0].requires_grad_(leaf)
        with te.autocast(recipe="current"):
            y = kept(x, SIZES)
        assert y.grad_fn.call.weights is None
        shapes = [t.shape for t in y.grad_fn.saved_tensors if t is not None and t.dtype == torch.float8_e4m3fn]
        assert ((len(SIZES), K, N) in shapes) == leaf and (len(SIZES), N, K) not in shapes
        y.backward(data()[1])


def test_another_threads_decision_comes_between(monkeypatch):
    """As where another thread calls the module under another recipe, once this call has decided by its own."""
    kept, (x, _), ends = made("current"), data(), te.GroupedLinear._ends

    def run(recipe: str) -> Tensor:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"), te.autocast(recipe=recipe):
            return kept(x, SIZES)

    def interrupted(*args):
        monkeypatch.setattr(te.GroupedLinear, "_ends", ends)
        others.append(run("current"))
        return ends(*args)

    expected, others = [run(recipe) for recipe in ("current", "blockwise")], list[Tensor]()
    assert not torch.equal(*expected)
    monkeypatch.setattr(te.GroupedLinear, "_ends", interrupted)
    assert torch.equal(run("blockwise"), expected[1]) and torch.equal(others[0], expected[0])


def test_recomputed():
    x, dy = data()
    kept = made("current")
    expected = step(kept, x, dy, recipe="current")
    leaf = x.clone().requires_grad_()
    kept.zero_grad(set_to_none=True)
    with te.autocast(recipe="current"):
        y = te.checkpoint(kept, leaf, SIZES, use_reentrant=False)
    y.backward(dy)
    assert_equal([y.detach(), leaf.grad, *grads_of(kept)], expected)


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_amp(recipe):
    """torch.amp.autocast has no say in how bytes are put together."""
    kept, plain = pair("current", "cpu", dequantized=recipe == "rowwise")
    x, dy = data()
    found = []
    for module in (kept, plain):
        with torch.amp.autocast("cpu", BF16), warnings.catch_warnings(action="ignore"):
            found.append(step(module, x, dy, recipe=recipe))
    assert_equal(*found)


def test_a_warning_that_is_an_error_decides_nothing():
    kept, (x, dy) = made("current"), data()
    expected = step(kept, x, dy, recipe="current")
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="anew in each call"):
        step(kept, x, dy, recipe="blockwise")
    assert_equal(step(kept, x, dy, recipe="current"), expected)


def test_bytes_of_another_format_are_seen():
    kept, other, (x, dy) = made("current"), made("blockwise"), data()
    step(kept, x, dy, recipe="current")
    for ours, theirs in zip(weights_of(kept), weights_of(other), strict=True):
        ours.data = theirs.data
    with pytest.warns(UserWarning, match="anew in each call"):
        found = step(kept, x, dy, recipe="current", is_first_microbatch=True)
    assert_equal(found, step(other, x, dy, recipe="current"))
    for weight in weights_of(kept):
        weight.data.mul_(3)
    assert not torch.equal(step(kept, x, dy, recipe="current", is_first_microbatch=False)[0], found[0])


def test_a_module_that_has_warned_is_freed():
    kept, (x, dy) = made("current"), data()
    with pytest.warns(UserWarning, match="anew in each call"):
        step(kept, x, dy, recipe="rowwise")
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("index", [0, 1])
def test_some_quantized_among_others(index):
    plain = made(None)
    setattr(plain, f"weight{index}", getattr(made("current"), f"weight{index}"))
    with pytest.raises(RuntimeError, match="some of its weights quantized"), te.autocast(recipe="current"):
        plain(data()[0], SIZES)


def test_what_is_not_kept_quantized():
    with pytest.raises(NotImplementedError, match="single_grouped_weight"):
        made("current", single_grouped_weight=True)
    assert not isinstance(made("current", k=40).weight0, QuantizedTensor), "fp8 takes multiples of 16"
