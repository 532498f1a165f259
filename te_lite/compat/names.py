"""Names that users bring from other libraries, and misspelt ones: errors that say what te_lite has instead.

Unknown attributes of te_lite and te_lite.recipe, unknown keywords of constructors and contexts. A call that is right
costs one more Python frame; everything else happens once an error is certain.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from te_lite import arguments, recipe
from te_lite.autocast import autocast
from te_lite.modules.grouped_linear import GroupedLinear
from te_lite.modules.layernorm_linear import LayerNormLinear
from te_lite.modules.layernorm_mlp import LayerNormMLP
from te_lite.modules.linear import Linear
from te_lite.modules.multihead_attention import MultiheadAttention
from te_lite.modules.norm import _Norm
from te_lite.modules.transformer_layer import TransformerLayer

P = ParamSpec("P")
R = TypeVar("R")

_OWN = "te_lite.recipe", "te_lite.recipe_base"
_RECIPES = {name: value for name, value in vars(recipe).items() if getattr(value, "__module__", "") in _OWN}

# "where name" -> the remedy. Names that resemble those of te_lite need no line: the nearest is named without.
INSTEAD = {
    "te_lite pytorch": "its names stand in te_lite itself, such as te_lite.Linear; import te_lite as te",
    "te_lite common": "recipes are te_lite.recipe",
    "te_lite fp8": "use te_lite.fp8_autocast, te_lite.fp8_model_init, te_lite.FP8GlobalStateManager",
    "te_lite is_fp8_available": "use te.check_recipe_support('current')",
    "te_lite is_mxfp8_available": "use te.check_recipe_support('mxfp8')",
    **{f"te_lite {name}": f"use te.recipe.{name}" for name, value in _RECIPES.items() if isinstance(value, type)},
    "te_lite.recipe NVFP4BlockScaling": "te_lite has no fp4; use MXFP8BlockScaling",
    "te_lite.recipe TensorwiseScaling": "use Float8CurrentScaling",
    "recipe fp8": "nearest: current, delayed, which are fp8 with one scale a tensor",
    "recipe float8": "nearest: current, delayed, which are fp8 with one scale a tensor",
    "recipe hybrid": "nearest: current, delayed, which have fp8_format=Format.HYBRID",
    "recipe e4m3": "nearest: mxfp8, blockwise, rowwise, which are E4M3 throughout",
    "recipe nvfp4": "nearest: mxfp8; te_lite has no fp4",
    "recipe fp4": "nearest: mxfp8; te_lite has no fp4",
    "recipe fp16": "nearest: bf16, which leaves the activations in their own dtype",
    "recipe fp32": "nearest: bf16, which leaves the activations in their own dtype",
    "activation swish": "nearest: silu, which is the same function",
    "DelayedScaling interval": "leave it out: scales take their step after each pass",
    "DelayedScaling override_linear_precision": "leave it out; RowwiseScaling(high_precision_wgrad=True) keeps wgrad",
    "autocast fp8_group": "nearest: amax_reduction_group",
    "fp8_autocast amax_reduction_group": "nearest: fp8_group",
}
arguments.INSTEAD.update({name.lower(): remedy for name, remedy in INSTEAD.items()})


def missing(module: str, known: Iterable[str]) -> Callable[[str], Any]:
    """A __getattr__ for `module`. It raises AttributeError, so that hasattr() stays False."""
    known = tuple(known)

    def __getattr__(name: str) -> Any:
        remedy = arguments.remedy(module, name, known, f"dir({module}) lists its names")
        raise AttributeError(f"module {module!r} has no attribute {name!r}; {remedy}")

    return __getattr__


def named(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which answers a keyword that it does not have with the nearest one that it has."""

    @functools.wraps(function)
    def answering(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            parameters = inspect.signature(function).parameters.values()
            known = [one.name for one in parameters if one.name != "self"]
            unknown = [name for name in kwargs if name not in known]
            if not unknown:
                raise
            owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
            near = arguments.remedy(owner, unknown[0], known, f"help({owner}) lists its arguments")
            raise TypeError(f"{owner} has no argument {unknown[0]!r}; {near}") from error

    return answering


vars(recipe)["__getattr__"] = missing("te_lite.recipe", _RECIPES)
_classes: tuple[Any, ...] = (
    *_RECIPES.values(), autocast, Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, _Norm, MultiheadAttention,
    TransformerLayer,
)  # fmt: skip
for _class in _classes:
    if "__init__" in vars(_class):
        _class.__init__ = named(_class.__init__)
