"""transformer_engine.common.recipe: te_lite's recipes as tolerant as Transformer Engine's.

Unknown arguments are ignored, subclasses may have another constructor, and fields may be assigned. An autocast follows
the values that they have when it is made: `settled` takes them.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from te_lite import recipe
from te_lite.recipe_base import Format as Format
from te_lite.recipe_base import MMParams as MMParams
from te_lite.recipe_base import QParams as QParams
from te_lite.recipe_base import Recipe as Recipe

_InFront: Any = object  # of a Recipe, which types cannot say; a Recipe itself would hide what kind that one is


class Tolerant(_InFront):
    """In front of a recipe of te_lite: what Transformer Engine lets callers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        known = {item.name for item in fields(self)}
        if any(kwargs.get("override_linear_precision") or ()):
            raise NotImplementedError(
                f"{type(self).__name__}(override_linear_precision={kwargs['override_linear_precision']}): te_lite "
                "keeps wgrad in high precision by te_lite.recipe.RowwiseScaling(high_precision_wgrad=True) alone"
            )
        if kwargs.get("backward_override") is not None:
            raise NotImplementedError(
                f"{type(self).__name__}(backward_override={kwargs['backward_override']!r}): te_lite's backward follows "
                "the recipe; leave it out, or use te_lite.recipe.RowwiseScaling(high_precision_wgrad=True)"
            )
        super().__init__(*args, **{name: value for name, value in kwargs.items() if name in known})

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)

    def __repr__(self) -> str:
        return str(self)


def _nvfp4(recipe: Recipe) -> bool:
    """No: te_lite has no fp4. Of all recipes, as their other questions."""
    return False


Recipe.nvfp4 = _nvfp4  # type: ignore[attr-defined]


class DelayedScaling(Tolerant, recipe.DelayedScaling):
    """te_lite.recipe.DelayedScaling, tolerant."""


class Float8CurrentScaling(Tolerant, recipe.Float8CurrentScaling):
    """te_lite.recipe.Float8CurrentScaling, tolerant."""


class MXFP8BlockScaling(Tolerant, recipe.MXFP8BlockScaling):
    """te_lite.recipe.MXFP8BlockScaling, tolerant."""


class Float8BlockScaling(Tolerant, recipe.Float8BlockScaling):
    """te_lite.recipe.Float8BlockScaling, tolerant."""


class CustomRecipe(Tolerant, recipe.CustomRecipe):
    """te_lite.recipe.CustomRecipe, tolerant."""


def settled(given: Any) -> Any:
    """A copy of a tolerant recipe, checked anew: nobody can change it. Anything else as it is."""
    if not isinstance(given, Tolerant):
        return given
    made = copy.copy(given)
    made.__post_init__()
    return made
