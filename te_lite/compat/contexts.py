"""Contexts under the older names of Transformer Engine, and what training frameworks ask about the open one."""

from __future__ import annotations

import torch.distributed as dist

from te_lite.autocast import autocast, current, reset
from te_lite.autocast import quantized_model_init as _quantized_model_init
from te_lite.compat.names import named
from te_lite.recipe import DelayedScaling, Recipe


@named
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | str | None = None,
    fp8_group: dist.ProcessGroup | None = None, *, strict: bool = False,
) -> autocast:  # fmt: skip
    """autocast under its older name and argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, strict=strict)


quantized_model_init = fp8_model_init = named(_quantized_model_init)  # the second is the older name


class FP8GlobalStateManager:
    """The questions that training frameworks ask about the open autocast."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether it quantizes."""
        return (state := current()) is not None and state.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether it records amaxes alone."""
        return (state := current()) is not None and not state.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Its recipe; DelayedScaling() where none is open, or it neither quantizes nor records."""
        return DelayedScaling() if (state := current()) is None else state.recipe

    @classmethod
    def get_fp8_group(cls) -> dist.ProcessGroup | None:
        """Its amax_reduction_group; None also where none is open."""
        return None if (state := current()) is None else state.group

    @classmethod
    def reset(cls) -> None:
        """Forgets open autocasts and the delayed-scaling pools; for tests and notebooks."""
        reset()
