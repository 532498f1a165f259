"""transformer_engine.pytorch's contexts, which take tolerant recipes, and FP8GlobalStateManager."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from te_lite.autocast import autocast as _autocast
from te_lite.autocast import current, model_init
from te_lite.autocast import quantized_model_init as _quantized_model_init
from te_lite.compat import contexts
from te_lite.compat.alias import graph, recipes, support
from te_lite.compat.alias.names import NotThere
from te_lite.recipe import Recipe


class autocast(_autocast):
    """te_lite.autocast, for recipes that may be changed afterwards."""

    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Recipe | str | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None, _graph: bool = False, *, strict: bool = False,
    ) -> None:  # fmt: skip
        recipe = recipes.settled(recipes.DelayedScaling() if recipe is None else recipe)
        super().__init__(enabled, calibrating, recipe, amax_reduction_group, strict=strict)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | str | None = None,
    fp8_group: dist.ProcessGroup | None = None, _graph: bool = False,
) -> autocast:  # fmt: skip
    """autocast under its older name and argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def quantized_model_init(
    enabled: bool = True, recipe: Recipe | str | None = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """te_lite.quantized_model_init, for tolerant recipes."""
    return _quantized_model_init(enabled, recipes.settled(recipe), preserve_high_precision_init_val)


fp8_model_init = quantized_model_init


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        raise NotThere(f"{cls.__name__}.{name}: te_lite has no such method")


class FP8GlobalStateManager(contexts.FP8GlobalStateManager, metaclass=_Named):
    """What frameworks ask about the open autocast, and what this machine supports."""

    is_fp8_available = staticmethod(support.check_fp8_support)
    is_mxfp8_available = staticmethod(support.check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(support.check_fp8_block_scaling_support)
    add_fp8_tensors_to_global_buffer = staticmethod(graph.add_fp8_tensors_to_global_buffer)
    reduce_and_update_fp8_tensors = staticmethod(graph.reduce_and_update_fp8_tensors)
    set_skip_fp8_weight_update_tensor = staticmethod(graph.set_skip_fp8_weight_update_tensor)

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Of the open autocast; outside of any the default."""
        state = current()
        return recipes.DelayedScaling() if state is None else state.recipe

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Inside quantized_model_init."""
        return model_init() is not None

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """No module of this pass has run yet that will take the backward scales' step."""
        return (state := current()) is not None and not state.one_pass.claimed

    @classmethod
    def reset(cls) -> None:
        super().reset()
        graph.forget_graphs()
