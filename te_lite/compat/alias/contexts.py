"""transformer_engine.pytorch's contexts, which take tolerant recipes. FP8GlobalStateManager is in manager.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from te_lite.autocast import OPEN
from te_lite.autocast import autocast as _autocast
from te_lite.autocast import quantized_model_init as _quantized_model_init
from te_lite.compat.alias import recipes
from te_lite.recipe import Recipe


class autocast(_autocast):
    """te_lite.autocast, for recipes that may be changed afterwards."""

    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Recipe | str | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None, _graph: bool = False, *, strict: bool = False,
    ) -> None:  # fmt: skip
        recipe = recipes.settled(recipes.DelayedScaling() if recipe is None else recipe)
        super().__init__(enabled, calibrating, recipe, amax_reduction_group, strict=strict)

    def __exit__(self, exc_type: Any, *rest: Any) -> None:
        """Closes the context that it opened. FP8GlobalStateManager may have replaced or covered that: RuntimeError."""
        if not torch.compiler.is_dynamo_compiling():
            state = OPEN.stack[-1].state if OPEN.stack else None
            own = state.recipe == self.recipe if state is not None else not (self.enabled or self.calibrating)
            if exc_type is None and not (own and OPEN.stack):
                raise RuntimeError(
                    f"autocast(recipe={self.recipe.name!r}) ends, and another autocast or none is open: call "
                    "autocast_exit() for each autocast_enter() inside, and set_autocast_state() with the state that "
                    "get_autocast_state() gave inside; FP8GlobalStateManager.reset() closes all"
                )
            if not OPEN.stack:
                return
        super().__exit__(exc_type, *rest)


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
