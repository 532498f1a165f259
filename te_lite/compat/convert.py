"""convert_to_float8_training: the nn.Linear layers of any model, quantized in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from te_lite.autocast import Pass, State, current
from te_lite.modules.linear import Linear
from te_lite.ops.source import DTYPES
from te_lite.quantize import replay
from te_lite.recipe import Recipe, as_recipe
from te_lite.tables import aligned

Filter = Callable[[nn.Module, str], bool]

# Recipe -> tokens of a step -> in_features * out_features from which on every measured layer gained, in device time and
# in wall time of forward and backward against torch's bf16 nn.Linear; the four came out alike. benchmarks/layer_gain.py
# measures and prints this; its rows are in benchmarks/results/layer_gain.json. A recipe that gained nowhere (mxfp8) is
# not here: it is taken for its numbers, so no layer is too small.
_GAINS = {512: math.inf, 2048: 58720256, 8192: 11534336}
MINIMUM: dict[str, dict[int, float]] = dict.fromkeys(("current", "rowwise", "rowwise_with_gw_hp", "blockwise"), _GAINS)


class ConvertedLinear(Linear, nn.Linear):
    """An nn.Linear that convert_to_float8_training changed: it follows `_default` where no autocast is open.

    For everybody else it is the nn.Linear that it was: class, checkpoints, initialisation.
    """

    _default: State

    reset_parameters = nn.Linear.reset_parameters
    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state  # no key in checkpoints

    def _state(self) -> State | None:
        state, (ran, _) = current(self._default), self._planned
        if state is self._default and ran is not None and ran[0] != state.key and replay.in_foreign_recomputation():
            raise RuntimeError(
                f"{self.name or 'linear'} ran under te.autocast and is recomputed outside of it, by another recipe; "
                "use te.checkpoint, or open the autocast inside the checkpointed function"
            )
        return state

    def forward(self, input: Tensor) -> Tensor:
        """x [..., in_features] -> y [..., out_features]."""
        return Linear.forward(self, input)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, recipe={self._default.recipe.name}"


class Layer(NamedTuple):
    """One nn.Linear of a model. reason: why it stayed as it was; empty where it did not."""

    name: str
    in_features: int
    out_features: int
    reason: str


class ConversionReport(NamedTuple):
    """What convert_to_float8_training did to `module`; str() is a table."""

    module: nn.Module
    recipe: Recipe
    converted: tuple[Layer, ...]
    skipped: tuple[Layer, ...]

    def __str__(self) -> str:
        layers = (*self.converted, *self.skipped)
        rows = [(name or "(root)", str(k), str(n), reason or "converted") for name, k, n, reason in layers]
        table = aligned([("layer", "in", "out", ""), *rows])
        return f"{len(self.converted)} of {len(layers)} linears converted to {self.recipe.name}\n{table}"


def _too_small(recipe: Recipe, size: int, tokens: int) -> str:
    """Why MINIMUM says no; empty where it does not."""
    table = MINIMUM.get(recipe.name, {0: 0})
    smallest = table.get(max((row for row in table if row <= tokens), default=-1), math.inf)
    if size >= smallest:
        return ""
    gains = "no layer is known to gain" if smallest == math.inf else f"layers gain from in * out = {smallest} on"
    return f"in * out = {size}, and at {tokens} tokens {gains}"


def _why_not(linear: nn.Linear, name: str, keep: Filter | None, recipe: Recipe, tokens: int | None) -> str:
    """Why a layer must stay as it is; empty when it is to be converted."""
    weight, shape = linear._parameters.get("weight"), (linear.out_features, linear.in_features)
    if isinstance(linear, ConvertedLinear):
        return "converted before"
    if type(linear) is not nn.Linear:
        return f"{type(linear).__name__} is a subclass of nn.Linear, whose weight may be used in other ways"
    if "forward" in vars(linear):
        return "its forward was replaced on the instance"
    if linear._parameters.keys() != {"weight", "bias"} or type(weight) is not nn.Parameter or weight.shape != shape:
        return f"its weight is not a plain parameter of shape {shape}"
    if weight.dtype not in DTYPES:
        return f"{weight.dtype} is not bfloat16, float16 or float32"
    if keep is not None and not keep(linear, name):
        return "module_filter_fn"
    if any(size < 1 or size % recipe.feature_multiple for size in shape):
        return f"features must be multiples of {recipe.feature_multiple}"
    return "" if tokens is None else _too_small(recipe, math.prod(shape), tokens)


def _convert(linear: nn.Linear, name: str, recipe: Recipe) -> None:
    """Makes `linear` a ConvertedLinear, the same object: whoever holds it, its parameters or its hooks still does."""
    out_features, in_features = linear.weight.shape
    bias, dtype = linear.bias is not None, linear.weight.dtype
    made = Linear(in_features, out_features, bias=bias, params_dtype=dtype, device="meta", name=name)
    made._specs = {}  # no attributes of ours on its parameters
    for key, value in vars(made).items():
        vars(linear).setdefault(key, value)
    linear._default = State(True, recipe, None, Pass())
    linear.__class__ = ConvertedLinear


def convert_to_float8_training(
    module: nn.Module, recipe: Recipe | str = "current", module_filter_fn: Filter | None = None, *,
    config: Recipe | str | None = None, tokens: int | None = 8192,
) -> ConversionReport:  # fmt: skip
    """Turns the nn.Linear layers of `module`, itself included, into te_lite linears that run by `recipe`, in place.

    No autocast is needed; an open te.autocast comes first, te.autocast(enabled=False) gives high precision. Modules,
    parameters, names, state-dict keys and hooks stay what they are. A layer that cannot or should not be converted is
    left alone, with its reason in the report.

    recipe: object or name of a stateless recipe; delayed scaling needs an autocast to take its steps.
    module_filter_fn(layer, name): False leaves the layer alone. config: the recipe under torchao's name for it.
    tokens: of one step and rank; layers that do not gain at so many are left alone (MINIMUM). None: whatever its size.

    Raises TypeError and ValueError for arguments that are none of these, before anything is changed.
    """
    recipe = as_recipe(recipe if config is None else config)
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_to_float8_training({module!r}): must be an nn.Module; pass the model")
    if recipe.delayed() or not recipe.is_fp8:
        raise ValueError(f"recipe {recipe.name!r}: must quantize, and without state; use for instance 'current'")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"tokens={tokens!r}: must be an integer, at least 1; None converts layers of any size")
    linears = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    layers = []
    for name, linear in linears.items():
        reason = _why_not(linear, name, module_filter_fn, recipe, tokens)
        layers.append(Layer(name, linear.in_features, linear.out_features, reason))
    converted = tuple(layer for layer in layers if not layer.reason)
    for layer in converted:
        _convert(linears[layer.name], layer.name, recipe)
    return ConversionReport(module, recipe, converted, tuple(layer for layer in layers if layer.reason))
