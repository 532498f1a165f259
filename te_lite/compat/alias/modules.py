"""What Transformer Engine's modules have and te_lite's do not need: fp8_meta, fp8_initialized and their like, by which
frameworks ask for the state of fp8, and set it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite.autocast import current
from te_lite.compat.alias import assigned, attention  # noqa: F401  # attention adds to its modules
from te_lite.compat.alias.names import NotThere
from te_lite.compat.callers import CallerQuantizer, Float8Quantizer, for_callers
from te_lite.modules.base import UNPLANNED, TeLiteModule
from te_lite.modules.norm import _Norm
from te_lite.ops.registry import makes_data
from te_lite.quantize.delayed import ScaleState
from te_lite.quantize.quantizer import Quantizer
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.recipe import Recipe

_DIRECTIONS = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
Scales = dict[str, list[Tensor]]  # (scale, amax history) of each direction, by its key


class Scaling:
    """module.fp8_meta["scaling_fwd"]: delayed scaling's numbers of all GEMMs, forward (input, weight, output) of each,
    backward (grad_output, grad_input). They are the module's own: write to them between passes."""

    def __init__(self, state: ScaleState) -> None:
        self._state = state

    @property
    def amax_history(self) -> Tensor:
        """fp32 [length, tensors]; row 0 is the current step, then the oldest first."""
        return self._state.history

    @property
    def scale(self) -> Tensor:
        """fp32 [tensors], until the next step."""
        return self._state.scale


def _take_over(module: TeLiteModule, given: dict[str, tuple[Any, Any, float]]) -> None:
    """Copies (scale, history, the fp8_max that they were made for) by fp8_meta's keys into the scales that the module
    has: all of them, or none where one raises ValueError."""
    live = module._scales._live
    loads = [(live[way], *given[key]) for key, way in _DIRECTIONS.items() if key in given and way in live]
    for state, scale, history, _ in loads:
        what, remedy = f"{type(module).__name__}'s {state.key.direction} scales", "take those of a module like it"
        shapes = [tuple(getattr(part, "shape", ())) for part in (scale, history)]
        if shapes[0] != (state.n,) or shapes[1][1:] != (state.n,) or not shapes[1][0]:
            raise ValueError(
                f"{what} got scale {shapes[0]}, amax_history {shapes[1]}: must be [{state.n}] and [length, {state.n}]; "
                f"{remedy}"
            )
        past = history[1:]  # row 0 is inf where a value of this step was inf or nan
        good = (scale > 0) & scale.isfinite() & (history >= 0).all(0) & past.isfinite().all(0)
        if not good.all():
            at = int((~good).nonzero()[0])
            raise ValueError(
                f"{what}: tensor {at} has the scale {scale[at].item()} and the amaxes {history[:, at].tolist()}: must "
                f"be positive and at least 0, and finite; {remedy}"
            )
    for state, scale, history, fp8_max in loads:  # which may be the state's own
        state.load(history.clone(), scale.clone(), fp8_max)


class Fp8Meta(Mapping[str, Any]):
    """module.fp8_meta, as the module is now.

    recipe, fp8_group: of the last call. A replay may set them; neither is kept, for the graph has them.
    scaling_fwd, scaling_bwd: Scaling, under delayed scaling, once the module has scales. Setting one copies numbers;
    ValueError where they do not fit.
    Other keys raise NotThere.
    """

    def __init__(self, module: TeLiteModule) -> None:
        self.module = module

    def _known(self) -> dict[str, Any]:
        key = self.module._planned[0]
        known = dict(zip(("recipe", "fp8_group"), key[0][:2], strict=True)) if key and key[0] else {}
        self.module._graph_scales.settle()
        live = self.module._scales._live
        return known | {key: Scaling(live[way]) for key, way in _DIRECTIONS.items() if way in live}

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, key: object) -> bool:
        return key in self._known()

    def get(self, key: str, default: Any = None) -> Any:
        return self._known().get(key, default)

    def __getitem__(self, key: str) -> Any:
        known = self._known()
        if key not in known:
            raise NotThere(
                f"fp8_meta[{key!r}] of {type(self.module).__name__}: it has {', '.join(known) or 'nothing'} just now; "
                "scales come with a call under delayed scaling, or with module.init_fp8_metadata() in its autocast"
            )
        return known[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if _DIRECTIONS.get(key) in self.module._scales._live and isinstance(value, Scaling):
            _take_over(self.module, {key: (value.scale, value.amax_history, value._state.key.fp8_max)})
        elif key not in ("recipe", "fp8_group"):
            raise NotThere(
                f"fp8_meta[{key!r}] = {type(value).__name__}: te_lite takes 'recipe', 'fp8_group' and, where the "
                "module has scales, another module's scaling_fwd and scaling_bwd"
            )
        elif not isinstance(value, Recipe if key == "recipe" else dist.ProcessGroup | None):
            raise TypeError(f"fp8_meta[{key!r}] = {value!r}: must be what te.autocast takes; pass the autocast's")
        if key == "recipe":
            scales, delayed = self.module._scales, value.delayed()
            for state in scales._live.values() if delayed or scales.fixed() else ():
                now = state.key
                like = delayed and scales._key(value, None, now.device, now.owner, now.direction)
                if like != now._replace(group=None):
                    raise RuntimeError(
                        f"{type(self.module).__name__} was captured with {now}, and the te.autocast around the "
                        f"replay says {value}: open it with the recipe of the capture, or capture anew"
                    )


class _Slot(Float8Quantizer):
    """The quantizer of a tensor under delayed scaling.

    scale, amax: fp32 [1], the module's own, until the scales' next step."""

    def __init__(self, value: Any) -> None:
        CallerQuantizer.__init__(self, value, True, True)

    scale = property(lambda self: self._value.state.scale[self._value.slot : self._value.slot + 1])
    amax = property(lambda self: self._value.state.history[0, self._value.slot : self._value.slot + 1])


def _for_callers(value: Quantizer | None) -> CallerQuantizer | None:
    if value is None or not value.format.label:
        return None
    return for_callers(value) if getattr(value, "state", None) is None else _Slot(value)


def quantizers(module: TeLiteModule) -> dict[str, list[CallerQuantizer | None]]:
    """The quantizers of the last call, by fp8_meta's keys, in the order of its scales; None: high precision. Empty
    where that call was not by an fp8 recipe. They quantize as the module does, and under delayed scaling record the
    amax as it does."""
    if not _said(module, True):
        return {}
    operands = [plan.operands for plan in module._planned[1]]
    if not operands:
        raise NotThere(
            f"{type(module).__name__}.quantizers: te_lite quantizes its groups together, by none for callers; make a "
            "quantizer, such as te.Float8CurrentScalingQuantizer"
        )
    forward = [value for each in operands for value in (each.fprop.a, each.fprop.b, each.output)]
    backward = [value for each in operands for value in (each.dgrad.a, each.grad_input)]
    return {key: list(map(_for_callers, values)) for key, values in zip(_DIRECTIONS, (forward, backward), strict=True)}


def _said(module: TeLiteModule, enabled: bool) -> bool:
    """Whether the autocast of the last call enabled fp8, or calibrated."""
    key = module._planned[0]
    return bool(key and key[0]) and key[0][2] is enabled


def _set_initialized(module: TeLiteModule, value: bool) -> None:
    """False: the next call plans anew, with the scales that the module has."""
    if value:
        raise NotImplementedError("fp8_initialized = True: a call under te.autocast sets it; run the module")
    module._planned = UNPLANNED


def _quantized_params(module: TeLiteModule) -> list[nn.Parameter] | None:
    """The quantized parameters that are trained; None without any."""
    held: list[Any] = [
        p for p in module.parameters(recurse=False) if isinstance(p, QuantizedTensor) and p.requires_grad
    ]
    return held or None


def _in_fp8(module: TeLiteModule) -> bool:
    """It has quantized parameters; on the meta device, will have them."""
    specs = any([spec.quantizer is not None for spec in module._specs.values()])
    return specs or any([isinstance(param, QuantizedTensor) for param in module.parameters(recurse=False)])


def init_fp8_metadata(module: TeLiteModule, num_gemms: int = 1) -> None:
    """Makes the scales that the open autocast will need, if it is of delayed scaling: others keep no state.

    num_gemms: accepted; the module knows its linears.
    """
    state, device = current(), next(module.parameters()).device
    if state is None or not state.delayed or not makes_data(device):
        return
    recipe: Any = state.recipe
    group = module.tp_group if state.group is None else state.group
    for direction in _DIRECTIONS.values():
        module._scales.state(recipe, group, device, state.one_pass.pools, direction)  # type: ignore[arg-type]


def get_fp8_meta_tensors(module: TeLiteModule) -> Scales | None:
    """Copies of scales and histories, for reset_fp8_meta_tensors; None where the module has none yet."""
    meta = Fp8Meta(module)
    if any(key not in meta for key in _DIRECTIONS):
        return None
    return {key: [meta[key].scale.clone(), meta[key].amax_history.clone()] for key in _DIRECTIONS}


@torch.no_grad()
def reset_fp8_meta_tensors(module: TeLiteModule, fp8_meta_tensors: Scales | None = None) -> None:
    """Scales and histories are again what get_fp8_meta_tensors gave; None: those of a new module.

    KeyError for a dict that lacks a direction, ValueError for numbers that do not fit; nothing changes then.
    """
    if fp8_meta_tensors is None:
        module.set_extra_state(None)
        return
    given, live = {key: fp8_meta_tensors[key] for key in _DIRECTIONS}, module._scales._live
    module._graph_scales.settle()
    made_for = {key: live[way].key.fp8_max for key, way in _DIRECTIONS.items() if way in live}
    _take_over(module, {key: (given[key][0], given[key][1], fp8_max) for key, fp8_max in made_for.items()})
    module._planned = UNPLANNED


def _refusing(name: str, remedy: str) -> Callable[..., Any]:
    def refuse(module: TeLiteModule, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{type(module).__name__}.{name}: te_lite does not have it; {remedy}")

    return refuse


def _as_theirs(init: Callable[..., None]) -> Callable[..., None]:
    """A norm's constructor that takes `dtype`, another name of params_dtype, and `sm_margin`: 0, or 0 for each pass.
    ValueError where both dtypes are given, NotImplementedError for another margin."""

    @functools.wraps(init)
    def taking(norm: _Norm, *args: Any, dtype: torch.dtype | None = None, sm_margin: Any = 0, **kwargs: Any) -> None:
        owner = type(norm).__name__
        if any(sm_margin.values() if isinstance(sm_margin, Mapping) else [sm_margin]):
            raise NotImplementedError(
                f"{owner}(sm_margin={sm_margin!r}): te_lite's norms leave no SM to others; leave it out"
            )
        if dtype is not None and kwargs.setdefault("params_dtype", dtype) is not dtype:
            raise ValueError(
                f"{owner}(params_dtype={kwargs['params_dtype']}, dtype={dtype}): both mean the parameters' dtype; pass "
                "one"
            )
        init(norm, *args, **kwargs)

    return taking


_Norm.__init__ = _as_theirs(_Norm.__init__)  # type: ignore[method-assign]


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """TeLiteModule.__new__: NotImplementedError for TransformerEngineBaseModule and for what is derived from it alone.

    That name is TeLiteModule itself, so that isinstance, issubclass and what is assigned to it reach te_lite's modules.
    """
    ours = "te_lite", "transformer_engine"
    if not any([
        base is not TeLiteModule and issubclass(base, TeLiteModule) and base.__module__.partition(".")[0] in ours
        for base in cls.__mro__
    ]):  # fmt: skip
        raise NotImplementedError(
            f"{cls.__name__} is built on TransformerEngineBaseModule, which runs te_lite's own modules alone; derive "
            "from torch.nn.Module and hold te.Linear and its like, or derive from one of them"
        )
    following = super(TeLiteModule, cls).__new__
    return following(cls) if following is object.__new__ else following(cls, *args, **kwargs)


_OWN = "te_lite's modules do not run by it: derive from one of them, or build on te.all_gather_linear and its like"
_BY_AUTOCAST = "call module.init_fp8_metadata() in te.autocast(recipe=...), which makes the scales of that recipe"
_REFUSED = {
    **dict.fromkeys(("prepare_forward", "prepare_forward_ctx", "end_forward", "grad_output_preprocess"), _OWN),
    **dict.fromkeys(("set_activation_dtype", "get_quantizer_roles"), _OWN),
    **dict.fromkeys(("init_fp8_meta_tensors", "set_meta_tensor"), _BY_AUTOCAST),
    "adjust_amax_history_length": "use a recipe with another amax_history_len: modules take their histories over",
}
_ADDED: dict[str, Any] = {
    "__new__": staticmethod(_new),
    "__setattr__": assigned.set_attribute,
    "set_tensor_parallel_group": assigned.set_tensor_parallel_group,
    "register_wgrad_accumulation_and_reduce_hooks": assigned.register_wgrad_accumulation_and_reduce_hooks,
    "fp8_meta": property(Fp8Meta),
    "quantizers": property(quantizers),
    "fp8": property(lambda self: _said(self, True)),
    "fp8_calibration": property(lambda self: _said(self, False)),
    "fp8_initialized": property(lambda self: bool(self._planned[0] and self._planned[0][0]), _set_initialized),
    "fp8_meta_tensors_initialized": property(lambda self: bool(self._scales._live)),
    "fp8_parameters": property(_in_fp8),
    "primary_weights_in_fp8": property(_in_fp8),
    "ub_name": property(lambda self: self._ub_names[0]),
    "_get_fp8_params": _quantized_params,
    "init_fp8_metadata": init_fp8_metadata,
    "get_fp8_meta_tensors": get_fp8_meta_tensors,
    "reset_fp8_meta_tensors": reset_fp8_meta_tensors,
    **{name: _refusing(name, remedy) for name, remedy in _REFUSED.items()},
}
for _name, _value in _ADDED.items():
    setattr(TeLiteModule, _name, _value)
