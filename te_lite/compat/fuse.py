"""te.fuse: the decoder layers of Llama-like models, with te_lite's fused modules in the place of their parts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from te_lite.autocast import quantized_model_init
from te_lite.compat.convert import ConvertedLinear, Filter, Layer, Stays, converted_state, default_state, why_not
from te_lite.compat.decoder import ATTENTION, MLP, NotFollowed, Rms, decoder_layers, follow_layer, follow_mlp, rms_rule
from te_lite.compat.fused import Columns, FusedMLP, FusedNormLinear, Held, Passed, back, become, pack
from te_lite.modules.layernorm_linear import LayerNormLinear
from te_lite.modules.layernorm_mlp import LayerNormMLP
from te_lite.modules.plans import PLANNED, PLANNED_LOCK
from te_lite.ops.source import DTYPES
from te_lite.recipe import Recipe, as_recipe
from te_lite.tables import aligned

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_ALONE = "its plain projections are converted one by one"


class FuseReport(NamedTuple):
    """What te.fuse did to `module`; str() is a table, repr() its head.

    fused: the halves of decoder layers, each one module now: "...self_attn" is norm, q, k and v, "...mlp" norm, gate,
    up and down. left: the halves that are not, with the reason. converted: other projections of decoder layers, which
    run by the recipe one by one. skipped: linears that stayed as they were, with the reason.
    """

    module: nn.Module
    recipe: Recipe
    fused: tuple[Layer, ...]
    left: tuple[Layer, ...]
    converted: tuple[Layer, ...]
    skipped: tuple[Layer, ...]

    def _head(self) -> str:
        fused = f"{len(self.fused)} of {len(self.fused) + len(self.left)} halves of decoder layers fused"
        linears = f"{len(self.converted)} of {len(self.converted) + len(self.skipped)} other linears converted"
        return f"{fused}, {linears}, to {self.recipe.name}"

    def __repr__(self) -> str:
        return f"<FuseReport: {self._head()}>"

    def __str__(self) -> str:
        kinds = {"fused": self.fused, "": self.left, "converted": self.converted, "stays": self.skipped}
        rows = [(name, str(k), str(n), r or kind) for kind, layers in kinds.items() for name, k, n, r in layers]
        return "\n".join((self._head(), aligned([("layer", "in", "out", ""), *rows])))


class _Refused(Exception):
    """Why half of a layer is not fused."""

    def __init__(self, kind: str, remedy: str = _ALONE, reason: str = "", chosen: bool = False) -> None:
        self.stays = Stays(kind, remedy, reason, chosen)


class _Half(NamedTuple):
    """Half of a decoder layer: a norm, and what reads it, self_attn or mlp. names: of its linears that are fused."""

    name: str
    layer: Any
    norm: Any
    owner: Any
    names: tuple[str, ...]

    @property
    def linears(self) -> tuple[Any, ...]:
        return tuple(self.owner._modules.get(name) for name in self.names)

    def row(self, reason: str = "") -> Layer:
        """The row of the report for this half; sizes are 0 where there are none."""
        shapes = [tuple(getattr(getattr(linear, "weight", None), "shape", (0, 0))) for linear in self.linears]
        out = shapes[2][0] if self.names == MLP else sum(shape[0] for shape in shapes)
        return Layer(self.name, shapes[0][-1], out, reason)


def _halves(model: nn.Module) -> Iterator[_Half]:
    for name, layer in decoder_layers(model):
        part: Any = layer._modules
        dot = f"{name}." if name else ""
        yield _Half(f"{dot}self_attn", layer, part["input_layernorm"], part["self_attn"], ATTENTION)
        yield _Half(f"{dot}mlp", layer, part["post_attention_layernorm"], part["mlp"], MLP)


def _check_modules(half: _Half, uses: Counter[int]) -> None:
    """Nobody has put something around what becomes another module. uses: id of a module -> modules whose part it is."""
    owner = half.name.rpartition(".")[2]
    changed = {"its norm": half.norm, **{f"its {n}": m for n, m in zip(half.names, half.linears, strict=True)}}
    if half.names == MLP:
        changed[owner] = half.owner
    hooked = [what for what, module in changed.items() if any(vars(module).get(hooks) for hooks in _HOOKS)]
    if half.owner._forward_pre_hooks:
        hooked.append(owner)
    for what in hooked:
        raise _Refused(f"{what} has hooks, which would see other tensors", "fuse first, then register hooks")
    for what, module in changed.items():
        if uses[id(module)] > 1:
            raise _Refused(f"{what} is a part of several modules")
    for what, module in {"its layer": half.layer, owner: half.owner, "its norm": half.norm}.items():
        if "forward" in vars(module):
            raise _Refused(f"the forward of {what} was replaced on the instance", "fuse first, then replace it")


def _check_linears(half: _Half, keep: Filter | None, recipe: Recipe) -> None:
    """They are plain, alike, and fit together."""
    linears = half.linears
    for name, linear in zip(half.names, linears, strict=True):
        if isinstance(linear, ConvertedLinear):
            raise _Refused(f"its {name} was converted before", "call te.fuse first")
        if linear is None:
            raise _Refused(f"it has no {name}")
        if not isinstance(linear, nn.Linear):
            raise _Refused(f"its {name} is a {type(linear).__name__}, no nn.Linear")
        if stays := why_not(linear, f"{half.name}.{name}", keep, recipe, 0, None):
            reason = f"its {name}: {stays.reason or stays.kind}"
            raise _Refused(f"its {name}: {stays.kind}", stays.remedy, reason, stays.chosen)
    if len({linear.bias is None for linear in linears}) > 1:
        raise _Refused("some of its linears have a bias and some have none")
    if len({(linear.weight.dtype, linear.weight.device) for linear in linears}) > 1:
        raise _Refused("its weights differ in dtype or device", "cast and move the model first")
    first, second, third = [tuple(linear.weight.shape) for linear in linears]
    if half.names == MLP:
        fits = first == second == third[::-1]
    else:  # other widths than the input's, so that nobody can take y for a normalised x
        fits = first[1] == second[1] == third[1] != first[0] + second[0] + third[0]
    if not fits:
        shapes = f"{first}, {second}, {third}"
        raise _Refused("its weights do not fit together", reason=f"its weights {shapes} do not fit together")


def _rule(half: _Half, keep: Filter | None, recipe: Recipe, uses: Counter[int]) -> Rms:
    """What its norm computes; raises _Refused where the half must stay as it is."""
    if isinstance(half.norm, (FusedNormLinear, Passed)):
        pack(half.linears[: len(half.names) - (half.names == MLP)])
        raise _Refused("fused before", chosen=True)
    _check_linears(half, keep, recipe)
    _check_modules(half, uses)
    first, weight = half.linears[0].weight, half.norm._parameters.get("weight")
    if isinstance(getattr(weight, "placements", None), tuple):
        raise _Refused("its norm is sharded", "fuse before fully_shard")
    what = "its norm"
    try:
        rule = rms_rule(half.norm)
        found, wanted = (weight.shape[0], weight.device), (first.shape[1], first.device)
        if found != wanted or weight.dtype not in DTYPES:
            raise _Refused(f"its norm has a weight {found} of {weight.dtype}, its linears read {wanted}")
        if half.names == MLP:
            what = "its mlp"
            follow_mlp(half.owner)
        what = "its layer"
        follow_layer(half.layer, first.shape[1], half.names == ATTENTION)
    except NotFollowed as error:
        raise _Refused(f"{what} {error}") from None
    return rule


def _fuse(half: _Half, rule: Rms, recipe: Recipe) -> None:
    """One module in the place of the half's; the same objects and parameters."""
    linears = half.linears
    first, last = linears[0], linears[-1]
    options: Any = {
        "eps": rule.eps, "zero_centered_gamma": rule.zero_centered, "normalization": "RMSNorm", "device": "meta",
        "params_dtype": first.weight.dtype, "bias": first.bias is not None, "name": half.name,
    }  # fmt: skip
    state = {"_default": default_state(recipe)}
    with quantized_model_init(enabled=False):
        if half.names == MLP:
            mlp = LayerNormMLP(first.in_features, first.out_features, activation="swiglu", **options)
            specs, fc1 = {**mlp._specs}, dict[str, Any]()
            for kind in ("weight", "bias") if mlp.use_bias else ("weight",):
                spec = specs.pop(f"fc1_{kind}")
                shape = first.out_features, *spec.shape[1:]
                fc1 |= {f"gate_{kind}": replace(spec, shape=shape), f"up_{kind}": replace(spec, shape=shape)}
            mlp._specs = {**specs, **fc1}
            become(half.owner, FusedMLP, {**vars(mlp), **state, "_layer_norm": (half.norm,)})
            become(half.norm, Passed, {"zero_centered_gamma": rule.zero_centered})
        else:
            widths = {name: linear.out_features for name, linear in zip("qkv", linears, strict=True)}
            total = sum(widths.values())
            norm = LayerNormLinear(first.in_features, total, parameters_split=widths, **options)
            become(half.norm, FusedNormLinear, {**vars(norm), **state, "_group": linears})
    end = 0
    for index, linear in enumerate(linears):
        if half.names == MLP:
            become(linear, Held, {"_group": () if linear is last else linears[:2]})
        else:
            begin, end = end, end + linear.out_features
            become(linear, Columns, {"_group": linears, "_index": index, "_columns": (begin, end, total)})
    pack(first._group)


def _warn(report: FuseReport, left: list[Stays]) -> None:
    """One warning where fewer than half of what the caller wanted was fused, or there is nothing to fuse."""
    head, done = f"te.fuse({type(report.module).__name__})", len(report.fused)
    if not report.fused and not report.left:
        parts = "input_layernorm, self_attn, post_attention_layernorm and mlp"
        warnings.warn(
            f"{head} found no decoder layer, a module with {parts}; te.convert_to_float8_training converts any linears",
            stacklevel=3,
        )
    left = [stays for stays in left if not stays.chosen]
    if len(left) > done:
        groups = Counter((stays.kind, stays.remedy) for stays in left).most_common()
        reasons = "; ".join(f"{count} x {kind} ({remedy})" for (kind, remedy), count in groups)
        text = f"{head} fused {done} of {done + len(left)} halves of decoder layers: {reasons}"
        warnings.warn(f"{text}; the report names them", stacklevel=3)


def _convert_others(model: nn.Module, recipe: Recipe, keep: Filter | None) -> Iterator[Layer]:
    """The rows of the report for all linears that no fused module reads. The projections of decoder layers are
    converted, unless why_not() says why one stays."""
    projections = {id(half.owner._modules.get(name)) for half in _halves(model) for name in (*half.names, "o_proj")}
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            stays: Stays | None = Stays("no projection of a decoder layer")
            if id(linear) in projections:
                stays = why_not(linear, name, keep, recipe, 0, None)
            if stays is None:
                become(linear, ConvertedLinear, converted_state(linear, name, recipe))
            reason = "" if stays is None else stays.reason or stays.kind
            yield Layer(name, linear.in_features, linear.out_features, reason)


def fuse(
    module: nn.Module, recipe: Recipe | str = "current", module_filter_fn: Filter | None = None
) -> FuseReport:  # fmt: skip
    """Turns the decoder layers of a Llama-like model into te_lite's fused modules, in place.

    input_layernorm with q_proj, k_proj and v_proj becomes one LayerNormLinear; post_attention_layernorm with
    gate_proj, up_proj and down_proj one LayerNormMLP; o_proj, and projections that could not be fused, run as
    convert_to_float8_training has it, whatever their size. All other linears (lm_head, a router) stay. Layers are found
    by the names of their parts, and each part's forward is tried for what it computes.

    Parameters, their names and state-dict keys stay what they are, optimizers too. unfuse() undoes it.

    recipe: as in convert_to_float8_training, and "bf16": in high precision where no autocast is open (delayed scaling:
    te.fuse(model, "bf16") and an autocast). module_filter_fn(linear, name): False leaves the linear alone, and unfused
    the half of a layer that it belongs to.

    Warns where fewer than half of what was to be fused was. Raises TypeError and ValueError for arguments that are none
    of these, before anything is changed.
    """
    recipe = as_recipe(recipe)
    if not isinstance(module, nn.Module):
        raise TypeError(f"te.fuse of a {type(module).__name__}: must be an nn.Module; pass one")
    if recipe.delayed() or not (recipe.is_fp8 or recipe.name == "bf16"):
        raise ValueError(
            f"recipe {recipe.name!r}: must have no state; te.fuse(model, 'bf16') follows te.autocast(recipe='delayed')"
        )
    uses = Counter(id(part) for parent in module.modules() for part in parent._modules.values())
    fused: list[Layer] = []
    left: list[Layer] = []
    stays: list[Stays] = []
    planned: list[tuple[_Half, Rms]] = []
    for half in _halves(module):
        try:
            planned.append((half, _rule(half, module_filter_fn, recipe, uses)))
        except _Refused as error:
            stays.append(error.stays)
            left.append(half.row(error.stays.reason or error.stays.kind))
    for half, rule in planned:  # after all checks: a layer's other half is followed as it was
        fused.append(half.row())
        _fuse(half, rule, recipe)
    others = list(_convert_others(module, recipe, module_filter_fn))
    converted, skipped = (tuple([one for one in others if bool(one.reason) is kept]) for kept in (False, True))
    report = FuseReport(module, recipe, tuple(fused), tuple(left), converted, skipped)
    _warn(report, stays)
    return report


def unfuse(module: nn.Module) -> tuple[str, ...]:
    """Gives every module that te.fuse changed its own class again, with the values that its parameters have now.

    Returns the names of these modules. Modules that te.convert_to_float8_training converted stay so. Raises
    RuntimeError, before anything is changed, where another library has changed the class of one since.
    """
    changed = {name: part for name, part in module.named_modules() if "_own" in vars(part)}
    for name, part in changed.items():
        if type(part) not in (FusedNormLinear, FusedMLP, Columns, Held, Passed, ConvertedLinear):
            raise RuntimeError(
                f"te.unfuse: {name} has become a {type(part).__name__} (fully_shard makes such classes); unfuse before"
            )
    for part in changed.values():
        back(part)
        with PLANNED_LOCK:
            PLANNED.pop(part, None)
    return tuple(changed)
