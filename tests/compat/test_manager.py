"""FP8GlobalStateManager under Transformer Engine's name: what it answers, and autocasts that are opened by hand."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import te_lite as te
from te_lite.compat.alias import contexts, graph, recipes, tensors
from te_lite.compat.alias.manager import FP8GlobalStateManager as manager
from te_lite.compat.alias.names import NotThere
from te_lite.recipe import Format
from te_lite.testing.distributed import init_ranks, launch, leave_ranks

# Of Transformer Engine 2.20. What te_lite has works; for the others see MISSING.
METHODS = (
    "set_skip_fp8_weight_update_tensor get_skip_fp8_weight_update_tensor reset is_fp8_available is_mxfp8_available "
    "is_fp8_block_scaling_available is_nvfp4_available get_meta_tensor_key get_fwd_bwd_key "
    "add_fp8_tensors_to_global_buffer is_fp8_enabled is_fp8_calibration with_fp8_parameters "
    "with_high_precision_init_val fp8_graph_capturing is_first_fp8_module get_fp8_recipe get_fp8_group "
    "get_autocast_state set_autocast_state reduce_tensor_across_group_op_max reduce_and_update_fp8_tensors "
    "get_unique_autocast_key autocast_enter autocast_exit"
)
MISSING = {
    "get_buffer_info": "fp8_meta",
    "get_key_in_buffer": "fp8_meta",
    "split_key_in_buffer": "fp8_meta",
    "copy_forward_fp8_meta_tensors_for_recompute": "te.checkpoint",
    "get_old_fp8_meta_tensors_for_recompute": "te.checkpoint",
    "restore_fp8_meta_tensors": "te.checkpoint",
    "fp8_autocast_enter": "use autocast_enter",
    "fp8_autocast_exit": "use autocast_exit",
    "quantization_state": "is_fp8_enabled",
    "no_such_thing": "leave it out",
}


@pytest.fixture(autouse=True)
def fresh():
    manager.reset()
    yield
    manager.reset()


def linear() -> te.Linear:
    return te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cpu")


def rows(layer: te.Linear) -> torch.Tensor:
    return layer(torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True))


def forward_history(layer: te.Linear) -> torch.Tensor:
    """[length, 3]: row 0 is the current step, the last row the newest."""
    return layer._scales._live["forward"].history


def test_every_method_works_or_says_so():
    for name in METHODS.split():
        assert callable(getattr(manager, name))
    for name, remedy in MISSING.items():
        assert not hasattr(manager, name)
        with pytest.raises(NotThere, match=rf"FP8GlobalStateManager\.{name}: .*{remedy}"):
            getattr(manager, name)


def test_questions():
    assert not manager.is_fp8_enabled() and isinstance(manager.get_fp8_recipe(), recipes.DelayedScaling)
    layer = linear()
    with contexts.fp8_autocast(fp8_recipe=recipes.DelayedScaling(margin=1, fp8_format=Format.HYBRID)):
        assert manager.is_fp8_enabled() and manager.get_fp8_recipe().margin == 1
        assert manager.is_first_fp8_module()
        rows(layer)
        assert not manager.is_first_fp8_module()
    for preserve in (False, True):
        with contexts.quantized_model_init(True, recipes.Float8CurrentScaling(), preserve):
            assert manager.with_fp8_parameters() and isinstance(linear().weight, tensors.Float8Tensor)
            assert manager.with_high_precision_init_val() is preserve
    with contexts.quantized_model_init(enabled=False):
        assert not (manager.with_fp8_parameters() or manager.with_high_precision_init_val())
    assert not (manager.with_fp8_parameters() or manager.with_high_precision_init_val())
    assert manager.is_fp8_available() == (True, "") and manager.is_nvfp4_available() == (False, "te_lite has no fp4")
    assert [manager.get_meta_tensor_key(way) for way in (True, False)] == ["scaling_fwd", "scaling_bwd"]
    assert [manager.get_fwd_bwd_key(way) for way in (True, False)] == ["forward", "backward"]
    assert manager.get_skip_fp8_weight_update_tensor() is None


def test_graph_capturing():
    assert not manager.fp8_graph_capturing()
    graph.set_capture_start()
    try:
        assert manager.fp8_graph_capturing()
    finally:
        graph.set_capture_end()
    assert not manager.fp8_graph_capturing()


def test_keys_of_autocasts():
    key, other = manager.get_unique_autocast_key, object()
    assert key(recipes.DelayedScaling()) == key(recipes.DelayedScaling())
    given = (recipes.DelayedScaling(), recipes.DelayedScaling(margin=1), recipes.MXFP8BlockScaling(), None)
    assert len({key(recipe, group) for recipe in given for group in (None, other)}) == 8


def test_entering_and_leaving_is_an_autocast():
    """The forward step is taken once, at the end of the outermost; not where a graph is captured."""
    layer, recipe = linear(), recipes.DelayedScaling(amax_history_len=4)
    manager.autocast_enter(True, fp8_recipe=recipe)
    assert manager.is_fp8_enabled() and manager.get_fp8_recipe() == recipe
    manager.autocast_enter(False)
    assert not manager.is_fp8_enabled()
    manager.autocast_exit(False)
    rows(layer)
    assert forward_history(layer)[0, 0] > 0 and not forward_history(layer)[1:].any()
    manager.autocast_exit(True, _graph=True)
    assert not manager.is_fp8_enabled() and forward_history(layer)[0, 0] > 0
    manager.autocast_enter(True, fp8_recipe=recipe)
    rows(layer)
    manager.autocast_exit(True)
    assert not forward_history(layer)[0].any() and forward_history(layer)[-1, 0] > 0
    with pytest.raises(RuntimeError, match="autocast_enter"):
        manager.autocast_exit(True)


def test_a_state_that_is_restored_before_the_exit():
    """As Transformer Engine's autocast leaves: first the state from before, then autocast_exit."""
    layer, recipe = linear(), recipes.DelayedScaling(amax_history_len=4)
    with contexts.autocast(recipe=recipes.Float8CurrentScaling()):
        outside = manager.get_autocast_state()
        manager.autocast_enter(True, fp8_recipe=recipe)
        rows(layer)
        manager.set_autocast_state(outside)
        assert manager.get_fp8_recipe().float8_current_scaling()
        manager.autocast_exit(True, _graph=False)
        assert manager.get_fp8_recipe().float8_current_scaling() and len(manager.get_autocast_state()) == 1
    assert manager.get_autocast_state() == ()
    manager.autocast_enter(True, fp8_recipe=recipe)
    rows(layer)
    manager.set_autocast_state(())
    manager.autocast_exit(True)
    assert forward_history(layer)[-1, 0] > 0 and manager.get_autocast_state() == ()


def test_autocasts_close_in_order():
    """Else one would stay open for good."""
    recipe, other = recipes.DelayedScaling(amax_history_len=4), recipes.Float8CurrentScaling()
    manager.autocast_enter(True, fp8_recipe=recipe)
    with contexts.autocast(recipe=other):
        with pytest.raises(RuntimeError, match=r"autocast_exit\(\): another autocast .* close that first"):
            manager.autocast_exit(True)
        assert manager.get_fp8_recipe() == other
    manager.autocast_exit(True)
    assert manager.get_autocast_state() == ()
    for leave in (lambda: manager.autocast_enter(True, fp8_recipe=recipe), lambda: manager.set_autocast_state(())):
        opened = contexts.autocast(recipe=other)
        opened.__enter__()
        inside = manager.get_autocast_state()
        leave()
        with pytest.raises(RuntimeError, match=r"autocast\(recipe='current'\) ends.*autocast_exit\(\) for each"):
            opened.__exit__(None, None, None)
        manager.set_autocast_state(inside)
        opened.__exit__(None, None, None)
        assert manager.get_autocast_state() == ()
    for enabled in (True, False):
        with pytest.raises(KeyError, match="theirs"), contexts.autocast(enabled, recipe=other):
            manager.set_autocast_state(())
            raise KeyError("theirs")


def test_a_state_that_is_set_later_is_followed():
    with contexts.autocast(recipe="mxfp8"):
        inside = manager.get_autocast_state()
    before = manager.get_autocast_state()
    manager.set_autocast_state(inside)
    assert manager.is_fp8_enabled() and manager.get_fp8_recipe().mxfp8()
    manager.set_autocast_state(before)
    assert not manager.is_fp8_enabled()
    for wrong in ((True, False, None), [], None):
        with pytest.raises(TypeError, match="get_autocast_state"):
            manager.set_autocast_state(wrong)


def test_maximum_over_ranks():
    alone = torch.tensor([1.0])
    manager.reduce_tensor_across_group_op_max(alone, None)
    assert alone.item() == 1.0
    launch(Path(__file__), ranks=2, timeout=120)


if __name__ == "__main__":
    rank, _, _ = init_ranks("cpu")
    numbers = torch.tensor([float(rank), -float(rank)])
    manager.reduce_tensor_across_group_op_max(numbers, dist.group.WORLD)
    assert numbers.tolist() == [1.0, 0.0], numbers
    leave_ranks()
