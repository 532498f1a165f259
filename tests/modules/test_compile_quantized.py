"""torch.compile(fullgraph=True) of modules whose weights are held quantized: the bits of eager mode, weights too."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch._dynamo
from torch._subclasses import FakeTensorMode

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import has_scales, leaf, under
from tests.modules.test_compile import (
    BF16,
    MODULES,
    WIDTH,
    assert_same,
    compiled,
    fresh_dynamo,
    graphs,
    linear,
    mlp,
    no_recompilation,
    state_of,
    step,
    train,
    twins,
)  # fmt: skip

__all__ = ["fresh_dynamo"]
RECIPES = ("delayed", "current", "mxfp8", "blockwise", "rowwise")
FROM_ROWS = ("delayed", "current", "blockwise")  # the columnwise data of weights can be made from the rowwise data
SAME = [(kind, recipe, recipe) for kind in MODULES for recipe in RECIPES]
OTHER = [("current", "bf16"), ("current", "mxfp8"), ("blockwise", "delayed"), ("rowwise", "rowwise_with_gw_hp")]
TABLE = SAME + [("LayerNormMLP", *pair) for pair in OTHER]


def make(kind, recipe, device="cpu"):
    with te.quantized_model_init(recipe=recipe):
        module = MODULES[kind](device)
    assert weights_of(module)
    return module


def weights_of(net):
    return {name: p for name, p in net.named_parameters() if isinstance(p, te.QuantizedTensor)}


def bytes_of(net):
    """All that the weights hold, but what only one of two equal weights may hold: columnwise data made from rows."""
    results = {}
    for name, weight in weights_of(net).items():
        count = 2 if weight.q.format.col_from_row else 4
        results |= {f"{name} {i}": part.clone() for i, part in enumerate(weight.q.tensors[:count])}
    return results


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("kind, own, recipe", TABLE)
def test_ten_steps(kind, own, recipe, device):
    """One graph, compiled once, under the weights' own recipe and another; steps quantize the weights anew."""
    eager, net = twins(make(kind, own, device))
    before = bytes_of(net)
    want = train(eager, eager, recipe, device)
    with no_recompilation:
        assert_same(train(net, compiled(net), recipe, device), want)
    assert graphs() == 1
    assert_same(bytes_of(net), bytes_of(eager))
    for name, weight in weights_of(net).items():
        assert type(weight.grad) is torch.Tensor and weight.grad.dtype == weight.dtype
        assert not torch.equal(before[f"{name} 0"].view(torch.uint8), weight.q.row.view(torch.uint8))
    assert recipe != "delayed" or has_scales(want[" state"])


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_masters(recipe):
    """As docs/how-to/quantized-parameters.md has it: an optimizer steps on masters, which are written to weights."""
    results, nets = [], twins(make("LayerNormMLP", recipe))
    for net, run in zip(nets, (nets[0], compiled(nets[1], "inductor")), strict=True):
        masters = [p.detach().float().clone() for p in net.parameters()]
        optimizer, found = torch.optim.AdamW(masters, lr=0.01), {}
        with no_recompilation:
            for i in range(10):
                found |= step(net, run, i, recipe, "cpu")
                for p, master in zip(net.parameters(), masters, strict=True):
                    master.grad = p.grad.float()
                optimizer.step()
                with torch.no_grad():
                    for p, master in zip(net.parameters(), masters, strict=True):
                        p.copy_(master)
        results.append(found | bytes_of(net) | state_of(net))
    assert_same(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_reduce_overhead(recipe):
    eager, net = twins(make("LayerNormMLP", recipe, "cuda"))
    want = train(eager, eager, recipe, "cuda")
    assert_same(train(net, compiled(net, "inductor", mode="reduce-overhead"), recipe, "cuda"), want)
    assert_same(bytes_of(net), bytes_of(eager))


@pytest.mark.parametrize("recipe, dynamic", [("delayed", None), ("mxfp8", True), ("rowwise", True)])
def test_modules_that_are_alike_and_token_counts(recipe, dynamic):
    """Neither names nor tokens compile more than once; none of a weight's sizes becomes a symbol."""
    pairs = [twins(make("LayerNormMLP", recipe)) for _ in range(2)]
    call, found = compiled(lambda module, x: module(x), dynamic=dynamic), []
    for i, tokens in enumerate((160, 144, 300, 129)):
        for j, (eager, net) in enumerate(pairs):
            net.name = f"layer {j}"
            want = step(eager, eager, i + j, recipe, "cpu", (tokens,))
            assert_same(step(net, functools.partial(call, net), i + j, recipe, "cpu", (tokens,)), want)
        found.append(graphs())
    assert found == ([1, 2, 2, 2] if dynamic is None else [1] * 4)
    for eager, net in pairs:
        assert_same(state_of(net), state_of(eager))


@pytest.mark.parametrize("recipe", RECIPES)
def test_columnwise_data_comes_and_goes(recipe):
    """Graphs read it where it is there, which is compiled once; else they make it in backward and keep none."""
    eager, net = twins(make("Linear", recipe))
    call, found = compiled(net), []
    for i in range(7):
        if i in (2, 5):
            net.weight.update_usage(columnwise_usage=True)
        if i in (4, 6):
            te.free_caches(net)
        want = train(eager, eager, recipe, "cpu", 1)
        assert_same(train(net, call, recipe, "cpu", 1), want)
        found.append(graphs())
        assert (net.weight._columnwise_data is None) == (recipe in FROM_ROWS and i not in (2, 3, 5))
    assert found == ([1, 1, 2, 2, 2, 2, 2] if recipe in FROM_ROWS else [1] * 7)
    assert_same(bytes_of(net), bytes_of(eager))


def test_a_layout_that_is_missing_is_the_error_of_eager_mode():
    net, x = make("Linear", "rowwise"), leaf(torch.randn(48, WIDTH, dtype=BF16))
    net.weight.update_usage(columnwise_usage=False)
    call = torch.compile(net, backend="aot_eager")
    for run in (net, call):
        with under("rowwise"), pytest.raises(RuntimeError, match="cannot make its columnwise data"):
            run(x)
    with under("rowwise"), torch.no_grad():
        assert_bitwise_equal("y", compiled(net)(x), net(x))


@pytest.mark.parametrize(
    "write", [lambda p, s: p.copy_(s), torch.compile(lambda p, s: p.copy_(s), backend="aot_eager")]
)
def test_a_weight_written_between_forward_and_backward_is_noticed(write):
    net, x = make("Linear", "current"), leaf(torch.randn(48, WIDTH, dtype=BF16))
    for run in (net, compiled(net)):
        with under("current"):
            y = run(x)
        with torch.no_grad():
            write(net.weight, torch.randn(48, WIDTH))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("columns", [False, True])
def test_other_operations_in_compiled_code(recipe, columns):
    """Writes are those of eager mode in all layouts, reads see the dequantized numbers, detach() stays quantized."""

    def work(weight, x, values):
        y = torch.nn.functional.linear(x, weight) + weight.sum()
        weight.copy_(values)
        weight.add_(x[:, :1].sum())
        return y, weight.detach()

    nets = twins(make("Linear", recipe))
    x, values = torch.randn(8, WIDTH, dtype=BF16), torch.randn(48, WIDTH)
    outputs = []
    for net, run in zip(nets, (work, compiled(work)), strict=True):
        if columns:
            net.weight.update_usage(columnwise_usage=True)
        with torch.no_grad():
            outputs.append(run(net.weight, x, values))
    assert_bitwise_equal("y", outputs[1][0], outputs[0][0])
    assert isinstance(outputs[1][1], te.QuantizedTensor)
    for got in (nets[1].weight, outputs[1][1]):
        for i, (part, want) in enumerate(zip(got.q.tensors, nets[0].weight.q.tensors, strict=True)):
            assert (part is None) == (want is None)
            if part is not None:
                assert_bitwise_equal(str(i), part, want)


def test_what_torch_keeps_on_disk_is_found_by_what_a_weight_holds():
    """Also where nothing but that tells two graphs apart."""
    x = torch.randn(48, WIDTH, dtype=BF16)
    made = [make("Linear", recipe) for recipe in ("current", "blockwise", "current")]
    made[2].weight.update_usage(columnwise_usage=True)
    made.append(copy.deepcopy(made[2]))  # whose layouts have a scale each
    for net in made:
        torch._dynamo.reset()
        call, given = compiled(lambda x, net=net: te.checkpoint(net, x), "inductor"), [leaf(x), leaf(x)]
        outputs = []
        for run, leaf_x in zip((net, call), given, strict=True):
            with under("current"):
                outputs.append(run(leaf_x))
            outputs[-1].sum().backward()
        assert_bitwise_equal("y", outputs[1].detach(), outputs[0].detach())
        assert_bitwise_equal("dx", given[1].grad, given[0].grad)


def test_the_key_of_a_weight(monkeypatch):
    def keys():
        return [make("Linear", recipe).weight._stable_hash_for_caching() for recipe in RECIPES[1:]]

    from te_lite.quantize import flattened

    weight = make("Linear", "current").weight
    first = keys()
    assert keys() == first and weight._stable_hash_for_caching() == first[0]
    other = [make("Linear", te.recipe.Float8CurrentScaling(use_power_2_scales=True)).weight, weight.detach()]
    with te.quantized_model_init(recipe="current"):
        other.append(te.Linear(WIDTH, 48, params_dtype=torch.float32, device="cpu").weight)
    weight.update_usage(columnwise_usage=True)
    found = [*first, *[each._stable_hash_for_caching() for each in (weight, *other)]]
    assert all(a != b for a, b in itertools.combinations(found, 2))
    monkeypatch.setattr(flattened, "sources", lambda: "another te_lite")
    assert not set(found) & set(keys())


def test_a_weight_without_data():
    """Inside of the compiler: it prints, and its pickle is a key that nobody takes for a weight."""
    weight = make("Linear", "current").weight
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(weight)
        assert repr(fake) == repr(fake.detach()) and "row" in repr(fake)
        kept = pickle.dumps(fake.detach())
    with pytest.raises(RuntimeError, match="without data was pickled"):
        pickle.loads(kept)


def test_moving_a_module_after_it_was_compiled_keeps_its_parameters():
    """torch would swap traceable wrapper subclasses, attributes and all."""
    with te.quantized_model_init(recipe="current", preserve_high_precision_init_val=True):
        eager, net = twins(mlp("cpu"))
    call = compiled(net)
    step(net, call, 0, "current", "cpu")
    weight, grad, kept = net.fc1_weight, net.fc1_weight.grad.clone(), bytes_of(net)
    weight.main_grad = torch.ones(())
    torch.nn.Sequential(net).to("cpu")
    assert net.fc1_weight is weight and weight.main_grad == 1 and weight.get_high_precision_init_val() is not None
    assert_bitwise_equal("gradient", weight.grad, grad)
    assert_same(bytes_of(net), kept)
    with no_recompilation:
        assert_same(step(net, call, 1, "current", "cpu"), step(eager, eager, 1, "current", "cpu"))


def test_linear_without_autocast():
    """Its weights are dequantized, for inference too."""
    with te.quantized_model_init(recipe="mxfp8"):
        eager, net = twins(linear("cpu"))
    call, x = compiled(net), torch.randn(48, WIDTH, dtype=BF16)
    with torch.inference_mode():
        assert_bitwise_equal("y", call(x).clone(), eager(x).clone())
    want = train(eager, eager, None, "cpu", 2)
    assert_same(train(net, call, None, "cpu", 2), want)
