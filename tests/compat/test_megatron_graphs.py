"""Megatron-core's own CUDA graphs (cuda_graph_impl) over te_lite, on CPU ranks; what transformer_engine.pytorch.graph
offers to frameworks that capture themselves."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.compat.alias import contexts, graph
from te_lite.compat.alias.manager import FP8GlobalStateManager as manager
from te_lite.compat.alias.names import NotThere
from te_lite.modules.base import TeLiteModule
from te_lite.testing.distributed import launch
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.graphing import DELAYED, K, draw, make, scales
from tests.harness import under
from tests.reference import LINEAR, LN_MLP

SCRIPT = Path(__file__).parent / "ranks_megatron_graphs.py"


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (pip install -e '.[test]')")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_gpt(impl: str, ranks: int) -> None:
    """The cases of ranks_megatron_graphs.py, bit for bit as without graphs; two ranks are two stages of a pipeline."""
    out = launch(SCRIPT, impl, ranks=ranks, timeout=300, env={"CUDA_VISIBLE_DEVICES": ""})
    assert out.count("ok Case(") >= (5 if ranks == 1 else 2), out


@pytest.fixture(autouse=True)
def _alone():
    """No pools of other tests."""
    manager.reset()


def trained(kind=LN_MLP) -> TeLiteModule:
    module = make(kind, "cpu")
    for seed in range(2):
        with under(DELAYED):
            y = module(draw(seed, "cpu"))
        y.sum().backward()
    return module


def test_a_warm_up_leaves_no_trace():
    module = trained()
    before, saved = scales(module)[0], graph.save_fp8_tensors([module], DELAYED)
    live = module._scales._live.values()
    for _ in range(2):  # once more changes nothing
        graph.set_capture_start()
    try:
        assert graph.is_graph_capturing()
        for seed in range(3):
            with under(DELAYED):
                y = module(draw(seed, "cpu"))
            y.sum().backward()
    finally:
        graph.set_capture_end()
    assert all(torch.equal(state.scale, scale) for state, (_, _, scale) in zip(live, saved, strict=True)), "no step"
    assert all(bool(state.history[0].any()) for state in live), "amaxes are recorded"
    assert not any(state.pool.touched for state in live), "and ask for no step afterwards"
    graph.restore_fp8_tensors([module], saved)
    assert_bitwise_equal("restored", scales(module)[0], before)
    assert graph.save_fp8_tensors([module], te.recipe.Float8CurrentScaling()) == []


def test_weights_are_quantized_anew_while_a_framework_captures():
    """A framework says is_first_microbatch=False when it captures; a replay must see the weights of its time."""
    module, x = make(LINEAR, "cpu"), draw(0, "cpu")
    with under("current"):
        stale = module(x, is_first_microbatch=True)
        with torch.no_grad():
            module.weight.data.mul_(-2)  # as a fused optimizer: no trace
        assert_bitwise_equal("cached", module(x, is_first_microbatch=False), stale)
        graph.set_capture_start()
        try:
            got = module(x, is_first_microbatch=False)
        finally:
            graph.set_capture_end()
        assert_bitwise_equal("anew", got, module(x))


def test_steps_around_replays(monkeypatch):
    """One of each direction, also where eager modules run in the same pass."""
    module, eager = trained(), trained(LINEAR)
    forward, backward = (module._scales._live[direction].pool for direction in ("forward", "backward"))
    stepped = []
    for pool in (forward, backward):
        monkeypatch.setattr(pool, "update", lambda pool=pool: (stepped.append(pool), setattr(pool, "touched", False)))

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            module.fp8_meta["fp8_group"], module.fp8_meta["recipe"] = None, manager.get_fp8_recipe()
            manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            manager.reduce_and_update_fp8_tensors(forward=False)
            return grad

    with contexts.autocast(recipe=DELAYED):
        y = Replay.apply(eager(draw(1, "cpu", grad=True)))
        assert not manager.is_first_fp8_module() and not stepped
    assert stepped == [forward]
    y.sum().backward()
    assert stepped == [forward, backward]
    manager.reduce_and_update_fp8_tensors(forward=False)
    assert stepped == [forward, backward, backward], "outside of a backward at once"
    other = te.recipe.DelayedScaling(amax_history_len=5)
    with contexts.autocast(recipe=other), pytest.raises(RuntimeError, match="was captured with"):
        module.fp8_meta["recipe"] = manager.get_fp8_recipe()
    with pytest.raises(NotThere, match="scaling_fwd"):
        module.fp8_meta["scaling_fwd"] = 1
    manager.reset()
    assert not graph._backward_pools


def test_weights_in_later_micro_batches():
    manager.set_skip_fp8_weight_update_tensor(False)
    with pytest.warns(UserWarning, match="in every micro-batch"):
        manager.set_skip_fp8_weight_update_tensor(True)


def test_weak_references():
    x = torch.randn(6, 8).to(torch.bfloat16)[1:5, 2:7]
    ref, other = graph.make_weak_ref((x, {"a": [x.t(), 3]})), torch.empty(0, 4)
    assert ref[0].data_ptr() == x.data_ptr() and torch.equal(ref[0], x) and torch.equal(ref[1]["a"][0], x.t())
    assert ref[1]["a"][1] == 3 and graph.make_weak_ref(other).shape == other.shape
    assert ref[0].untyped_storage()._cdata != x.untyped_storage()._cdata
    x.fill_(2.0)
    assert bool((ref[0] == 2).all()) and not ref[0].requires_grad


def test_graphs_for_a_pipeline_take_megatrons_arguments(monkeypatch):
    """__call__, not forward, is what runs; None for what was not in the sample; the memory option is accepted."""
    from te_lite.compat import graph_capture
    from tests.compat.graphing import CpuCaptures

    monkeypatch.setattr(graph_capture, "Captures", CpuCaptures)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make(LINEAR, "cpu")

        def forward(self, x, mask=None):
            raise AssertionError("not this")

        def __call__(self, x, mask=None):
            return (2 * self.inner(x),)

    layer, sample = Layer(), (draw(0, "cpu", grad=True),)
    with pytest.warns(UserWarning, match="more memory"):
        first, second = graph.make_graphed_callables(
            (layer,), (sample, sample), _order=[1, 1, -1, -1], _reuse_graph_input_output_buffers=True
        )
    x = draw(3, "cpu", grad=True)
    y = first(x, mask=None)[0]
    y.sum().backward()
    assert_bitwise_equal("y", y, 2 * layer.inner(x))
    assert x.grad is not None and x.grad.shape == (48, K)
    with pytest.raises(TypeError, match="mask"):
        second(x, mask=torch.ones(1))
    first.reset()
    assert_bitwise_equal("eager again", first(x)[0], 2 * layer.inner(x))
