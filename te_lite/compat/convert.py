"""convert_to_float8_training: the nn.Linear layers of any model, quantized in place."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from te_lite.autocast import Pass, State
from te_lite.functional.shared_input import SharedInput
from te_lite.modules.linear import Linear
from te_lite.ops.source import DTYPES
from te_lite.recipe import HighPrecision, Recipe, as_recipe
from te_lite.tables import aligned

Filter = Callable[[nn.Module, str], bool]

# Recipe -> tokens of a step -> in_features * out_features from which on every measured layer gained, in device time and
# in wall time of forward and backward against torch's bf16 nn.Linear; the four came out alike. benchmarks/layer_gain.py
# measures and prints this; its rows are in benchmarks/results/layer_gain.json. A recipe that gained nowhere (mxfp8) is
# not here: it is taken for its numbers, so no layer is too small. It is one machine's: minimum_size comes before it.
_GAINS = {512: math.inf, 2048: 58720256, 8192: 11534336}
MINIMUM: dict[str, dict[int, float]] = dict.fromkeys(("current", "rowwise", "rowwise_with_gw_hp", "blockwise"), _GAINS)


# Names of layers of one parent that are called with the same tensor, in models of several families. Where they are not,
# they are quantized apart, as any others.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"), ("w1", "w3"),
)  # fmt: skip


class ConvertedLinear(Linear, nn.Linear):
    """An nn.Linear that convert_to_float8_training changed: it follows `_default` where no autocast is open.

    For everybody else it is the nn.Linear that it was: class, checkpoints, initialisation.
    """

    _default: State | None  # None: high precision, as te.fuse may ask

    # What nn.Linear has, and in its form: without defer_init and is_first_microbatch.
    reset_parameters = nn.Linear.reset_parameters  # type: ignore[assignment]  # other arguments
    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state  # no key in checkpoints

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As TeLiteModule's; a bias that comes later counts, too."""
        super().register_parameter(name, param)
        if name == "bias":
            self.use_bias = param is not None

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]  # as nn.Linear's
        """x [..., in_features] -> y [..., out_features]."""
        return Linear.forward(self, input)

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, recipe={self._default.recipe.name if self._default else 'bf16'}"


class Layer(NamedTuple):
    """One nn.Linear of a model. reason: why it stayed as it was; empty where it did not."""

    name: str
    in_features: int
    out_features: int
    reason: str


def _rule(minimum: float, tokens: int | None) -> str:
    """Which sizes are converted, in words."""
    if tokens is None:
        return f"layers from in * out = {minimum} on" if minimum else "layers of any size"
    gain = "no layer is known to gain" if minimum == math.inf else f"layers gain from in * out = {minimum} on"
    return f"at {tokens} tokens {gain}"


_ANY_SIZE = "pass minimum_size=0 to convert all"


class ConversionReport(NamedTuple):
    """What convert_to_float8_training did to `module`; str() is a table, repr() its head.

    minimum_size: in_features * out_features from which on layers were converted, inf where none was large enough.
    tokens: of a step, for which that was looked up; None where it was not.
    """

    module: nn.Module
    recipe: Recipe
    converted: tuple[Layer, ...]
    skipped: tuple[Layer, ...]
    minimum_size: float
    tokens: int | None

    def _head(self) -> tuple[str, str]:
        """How many layers were converted, and by which rule about sizes."""
        converted = f"{len(self.converted)} of {len(self.converted) + len(self.skipped)} linears converted"
        source = "" if self.tokens is None else f" (measured on one H200 by GPU and wall time; {_ANY_SIZE})"
        return f"{converted} to {self.recipe.name}", f"{_rule(self.minimum_size, self.tokens)}{source}"

    def __repr__(self) -> str:
        return f"<ConversionReport: {'; '.join(self._head())}>"

    def __str__(self) -> str:
        layers = (*self.converted, *self.skipped)
        rows = [(name or "(root)", str(k), str(n), reason or "converted") for name, k, n, reason in layers]
        return "\n".join((*self._head(), aligned([("layer", "in", "out", ""), *rows])))


class Stays(NamedTuple):
    """Why a layer stays as it is. kind, remedy: for a warning about many layers; reason: of this layer, else the kind.

    chosen: the caller's wish, no failure of the conversion.
    """

    kind: str
    remedy: str = ""
    reason: str = ""
    chosen: bool = False


def _minimum_size(
    given: int | Literal["measured"] | None, recipe: Recipe, tokens: int | None
) -> tuple[float, int | None]:
    """minimum_size and tokens of the report."""
    if given != "measured" or tokens is None or recipe.name not in MINIMUM:
        return (given if type(given) is int else 0), None
    table = MINIMUM[recipe.name]
    return table.get(max((row for row in table if row <= tokens), default=-1), math.inf), tokens


@cache
def _settings() -> frozenset[str]:
    """The attributes that make a linear ours. name: only words of a report."""
    ours, torchs = Linear(1, 1, device="meta"), nn.Linear(1, 1, device="meta")
    return frozenset(vars(ours)) - frozenset(vars(torchs)) - {"name"}


def why_not(
    linear: nn.Linear, name: str, keep: Filter | None, recipe: Recipe, minimum: float, tokens: int | None
) -> Stays | None:
    """Why a layer must stay as it is; None when it is to be converted."""
    weight, shape = linear._parameters.get("weight"), (linear.out_features, linear.in_features)
    size, multiple = math.prod(shape), recipe.feature_multiple
    if keep is not None and not keep(linear, name):
        return Stays("module_filter_fn", chosen=True)
    if isinstance(linear, ConvertedLinear):
        before = linear._default.recipe if linear._default else HighPrecision()
        if before == recipe:
            return Stays("converted before", chosen=True)
        return Stays(f"converted before, to {before}", "that recipe stays; te.autocast(recipe=...) runs another")
    if isinstance(getattr(weight, "placements", None), tuple):  # before the class: fully_shard changes that too
        remedy = "convert before fully_shard or another parallelism that makes DTensors"
        return Stays("its weight is sharded", remedy, f"its weight is a DTensor, not a plain parameter; {remedy}")
    if type(linear) is not nn.Linear:
        kind = f"{type(linear).__name__} is a subclass of nn.Linear, whose weight may be used in other ways"
        return Stays(kind, "put an nn.Linear in its place")
    if "forward" in vars(linear):
        return Stays("its forward was replaced on the instance", "convert first, then replace it")
    if taken := sorted(vars(linear).keys() & _settings()):
        kind, remedy = f"its attribute {taken[0]!r} has another meaning in te_lite", "rename it"
        return Stays(kind, remedy, f"{kind}; {remedy}")
    if linear._parameters.keys() != {"weight", "bias"} or type(weight) is not nn.Parameter or weight.shape != shape:
        kind = "its weight is not a plain parameter"
        remedy = "convert before FSDP, weight_norm or pruning puts something else there"
        return Stays(kind, remedy, f"{kind} of shape {shape}; {remedy}")
    if weight.dtype not in DTYPES:
        return Stays(f"{weight.dtype} is not bfloat16, float16 or float32", "cast the model first")
    if any(features < 1 or features % multiple for features in shape):
        return Stays(f"features must be multiples of {multiple}", "pad them")
    if size < minimum:
        rule = _rule(minimum, tokens)
        return Stays(f"too small, {rule}", _ANY_SIZE, f"in * out = {size}, and {rule}")
    return None


def _warn(report: ConversionReport, stays: list[Stays]) -> None:
    """One warning where fewer than half of the linears that the caller wanted were converted, or there is none at all.

    What an earlier call converted to another recipe counts only where this call converts nothing.
    """
    head = f"convert_to_float8_training({type(report.module).__name__})"
    if not (report.converted or report.skipped):
        text = f"{head} found no nn.Linear: other layers stay as they are, te_lite's run under te.autocast"
        warnings.warn(text, stacklevel=3)
    done = len(report.converted)
    left = [stay for stay in stays if not stay.chosen and not (done and stay.kind.startswith("converted before"))]
    if len(left) <= done:
        return
    groups = Counter((stay.kind, stay.remedy) for stay in left).most_common()
    reasons = "; ".join(f"{count} x {kind} ({remedy})" for (kind, remedy), count in groups)
    text = f"{head} converted {done} of {done + len(left)} linears to {report.recipe.name}: {reasons}"
    warnings.warn(f"{text}; the report names them", stacklevel=3)


def default_state(recipe: Recipe) -> State | None:
    """What a module that runs by `recipe` follows where no autocast is open."""
    return State(True, recipe, None, Pass()) if recipe.is_fp8 else None


def converted_state(linear: nn.Linear, name: str, recipe: Recipe) -> dict[str, Any]:
    """The attributes that make a ConvertedLinear of `linear`."""
    out_features, in_features = linear.weight.shape
    bias, dtype = linear.bias is not None, linear.weight.dtype
    made = Linear(in_features, out_features, bias=bias, params_dtype=dtype, device="meta", name=name)
    made._specs = {}  # no attributes of ours on its parameters
    return {**vars(made), "_default": default_state(recipe)}


def _convert(linear: Any, name: str, recipe: Recipe) -> None:
    """Makes `linear` a ConvertedLinear, the same object: whoever holds it, its parameters or its hooks still does."""
    for key, value in converted_state(linear, name, recipe).items():
        vars(linear).setdefault(key, value)
    linear.__class__ = ConvertedLinear
    linear._renewed()  # state was made on the meta device


def _leave_fast_paths(module: nn.Module) -> None:
    """torch's transformer layers read their linears' weights in evaluation without gradients, past our forwards."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            if isinstance(part.linear1, ConvertedLinear) or isinstance(part.linear2, ConvertedLinear):
                part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder) and any(isinstance(m, ConvertedLinear) for m in part.modules()):
            part.use_nested_tensor = False  # a nested tensor is for the fast path alone


def _share(linears: dict[str, Any]) -> None:
    """Lets siblings quantize the input that they share once. linears: those that were converted, by name."""
    parents: dict[str, dict[str, Any]] = {}
    for name, linear in linears.items():
        parent, _, own = name.rpartition(".")
        parents.setdefault(parent, {})[own] = linear
    for children, names in itertools.product(parents.values(), SIBLINGS):
        found = [children[name] for name in names if name in children]
        if len({id(linear) for linear in found}) == len(found) > 1 and len({one.in_features for one in found}) == 1:
            shared = SharedInput(tuple([linear.out_features for linear in found]))
            for reader, linear in enumerate(found):
                linear._shared = shared, reader


def convert_to_float8_training(
    module: nn.Module, recipe: Recipe | str = "current", module_filter_fn: Filter | None = None, *,
    config: Recipe | str | None = None, tokens: int | None = 8192,
    minimum_size: int | Literal["measured"] | None = "measured",
) -> ConversionReport:  # fmt: skip
    """Turns the nn.Linear layers of `module`, itself included, into te_lite linears that run by `recipe`, in place.

    No autocast is needed; an open te.autocast comes first, te.autocast(enabled=False) gives high precision. Modules,
    parameters, names, state-dict keys and hooks stay what they are. A layer that cannot or should not be converted is
    left alone, with its reason in the report.

    recipe: object or name of a stateless recipe; delayed scaling needs an autocast to take its steps.
    module_filter_fn(layer, name): False leaves the layer alone. config: the recipe under torchao's name for it.
    minimum_size: in_features * out_features below which a layer is left alone; 0 or None: no layer is too small.
    "measured": the size from which on layers gained at `tokens` tokens of one step and rank (MINIMUM, of one machine);
    tokens=None: no layer is too small.

    Warns where fewer than half of the nn.Linear layers that module_filter_fn lets through were converted, and of what
    kept how many of them. Raises TypeError and ValueError for arguments that are none of these, before anything is
    changed.
    """
    recipe = as_recipe(recipe if config is None else config)
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_to_float8_training of a {type(module).__name__}: must be an nn.Module; pass one")
    if recipe.delayed() or not recipe.is_fp8:
        raise ValueError(f"recipe {recipe.name!r}: must quantize, and without state; use for instance 'current'")
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"tokens={tokens!r}: must be an integer, at least 1; None converts layers of any size")
    if minimum_size not in ("measured", None) and (type(minimum_size) is not int or minimum_size < 0):
        raise ValueError(f"minimum_size={minimum_size!r}: must be 'measured' or an integer, at least 0; {_ANY_SIZE}")
    linears = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    minimum, looked_up = _minimum_size(minimum_size, recipe, tokens)
    stays = {name: why_not(part, name, module_filter_fn, recipe, minimum, looked_up) for name, part in linears.items()}
    layers = []
    for name, stay in stays.items():
        reason = "" if stay is None else stay.reason or stay.kind
        layers.append(Layer(name, linears[name].in_features, linears[name].out_features, reason))
    converted = tuple(layer for layer in layers if not layer.reason)
    for layer in converted:
        _convert(linears[layer.name], layer.name, recipe)
    _share({layer.name: linears[layer.name] for layer in converted})
    _leave_fast_paths(module)
    skipped = tuple(layer for layer in layers if layer.reason)
    report = ConversionReport(module, recipe, converted, skipped, minimum, looked_up)
    _warn(report, [stay for stay in stays.values() if stay is not None])
    return report
