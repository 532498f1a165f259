"""What torch.compile's dynamo traces in place of a module's forward, and of autocast's entry and exit.

Constants of a graph: the recipe, the dtypes, the module's options, by value. dynamo guards each of them where it reads
it, so that modules that are alike share what is compiled and another recipe is compiled anew. What cannot be compiled
is refused by name: with fullgraph=True that is an error, else the call runs in Python as in eager mode.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from te_lite.autocast import OPEN, Context, Pass, State, autocast
from te_lite.functional.norm import NormSpec
from te_lite.functional.traced import Kind, linears, name_of
from te_lite.modules.checks import amp_dtype, check_input
from te_lite.modules.plans import build_plans
from te_lite.ops import now
from te_lite.ops.activation import built
from te_lite.ops.untraced import constant, untraced
from te_lite.quantize import graph_scales, replay
from te_lite.quantize.params import parameter_operand, reads_own_bytes
from te_lite.quantize.quantizer import observer
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.recipe import HighPrecision, MMParams, QParams, Recipe

if TYPE_CHECKING:
    from te_lite.modules.base import TeLiteModule

_quantized = False  # something was compiled under a recipe


@constant
def _names(kind: type) -> tuple[str, ...]:
    return tuple([item.name for item in fields(kind)])


def _value(value: Any) -> Any:
    """A frozen value as constants, each of which dynamo guards; floats by their bits, or they might become symbols."""
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, (Recipe, QParams, MMParams)):
        return type(value), tuple([_value(getattr(value, name)) for name in _names(type(value))])
    return value


@constant
def _same(one: Any, other: Any) -> bool:
    return one == other


def _made(value: Any) -> Any:
    """The value that _value() described."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type)):
        return value
    kind, parts = value
    if kind is float:
        return float.fromhex(parts)
    made = object.__new__(kind)
    for name, part in zip(_names(kind), parts, strict=True):
        object.__setattr__(made, name, _made(part))
    if isinstance(made, Recipe):
        made._check()
    return made


@constant
def _name(recipe: Any, dtype: Any, shapes: Any, options: Any, norm: Any, activation: Any, parts: int) -> str:
    """The name of the Kind.

    shapes: of the weights. options: its keep_original and recompute. parts: of the first weight."""
    made = HighPrecision() if recipe is None else _made(recipe)
    fits = tuple([all(size % made.feature_multiple == 0 for size in shape) for shape in shapes])
    spec = None if norm is None else NormSpec(_made(norm[0]), *norm[1:])
    act = None if activation is None else built(activation[0], tuple([_made(one) for one in activation[1]]))
    return name_of(Kind(made, dtype, fits, options[0], options[1], spec, act, parts))


def problem(module: TeLiteModule, dtype: torch.dtype, device: torch.device, dims: int, recipe: Any) -> str:
    """What eager mode would refuse in such a call, "" for nothing. dtype, device, dims: of the input. As in eager mode,
    its plans are those of the report from now on."""
    global _quantized
    state = None
    if recipe is not None:
        made, _quantized = _made(recipe), True
        state = OPEN.stack[-1].state if made.delayed() else State(True, made, None, Pass())
        if made.delayed():
            graph_scales.compiling(module._graph_scales, state)
    with torch.no_grad():
        weights = tuple([_joined(module, names) for names, _ in module._linear_names()])
    like = torch.empty((0,) * (dims - 1) + (weights[0].shape[1],), dtype=dtype, device=device)
    try:
        plans = build_plans(module, state, check_input(module, like, weights[0]), weights, False)
        for weight, plan in zip(weights, plans, strict=True):
            if reads_own_bytes(weight, plan.operands):
                parameter_operand(weight, plan.operands, torch.is_grad_enabled(), in_graph=True)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _refusal(module: Any, inp: Any, residual: Any, state: State | None, first: bool | None, quantized: bool) -> str:
    """Why a call cannot be compiled, "" if it can. quantized: outputs or gradients are to be."""
    if not isinstance(inp, Tensor) or isinstance(inp, QuantizedTensor):
        return "its input is not a plain tensor"
    if not inp.dim() or inp.shape[-1] != getattr(module, module._linear_names()[0][0][0]).shape[1]:
        return "its input has not the features of its weight"
    if residual is not None and not _is_like_output(module, inp, residual):
        return "its residual is not like its output"
    if module.tp_size > 1:
        return "it is split over ranks, whose collectives and userbuffers run in Python"
    if module.fuse_wgrad_accumulation:
        return "fuse_wgrad_accumulation=True: main_grad is written behind autograd's back"
    if module.delay_wgrad_compute:
        return "delay_wgrad_compute=True: its weight gradients wait outside of autograd"
    if first is not None:
        return "is_first_microbatch keeps quantized weights; leave it None"
    if quantized:
        return "fp8_output or fp8_grad"
    if observer() is not None:
        return "statistics are taken"
    if state is not None and not state.enabled:
        return "te.autocast(calibrating=True)"
    if state is None or state.recipe.stateless:
        return ""
    if not state.delayed:
        return "a CustomRecipe that does not say stateless=True"
    outer = OPEN.stack[0].state if OPEN.stack else None
    if outer is None or not outer.delayed or not _same(_value(outer.recipe), _value(state.recipe)):
        return "its autocast of delayed scaling stands within another; open it outermost"
    if now.capturing:
        return "the capture of a CUDA graph under delayed scaling, whose replays would find no new scales"
    if replay.OPEN.frames:
        return "te.checkpoint around compiled code under delayed scaling; compile what calls te.checkpoint"
    return ""


def _is_like_output(module: Any, inp: Tensor, residual: Any) -> bool:
    if not isinstance(residual, Tensor) or isinstance(residual, QuantizedTensor):
        return False
    features = sum([getattr(module, name).shape[0] for name in module._linear_names()[-1][0]])
    if residual.shape[:-1] != inp.shape[:-1] or residual.shape[-1] != features:
        return False
    return residual.dtype == (amp_dtype(inp) or inp.dtype) and residual.device == inp.device


def _computed(module: Any, inp: Tensor, params: list, parts: list, recipe: Any) -> list[Tensor]:
    """[y], and norm(x) where it is an output. params, then parts: as `linears` takes them."""
    normed = hasattr(module, "normalization")
    norm = activation = None
    if normed:
        spec = module._norm
        norm = _value(spec.eps), spec.rms, spec.zero_centered, bool(module.return_layernorm_output)
    if len(module.gemm_names) == 2:
        activation = module._act.name, tuple([_value(one) for one in module._act.parameters])
    first, linears_here = 2 * normed, len(module.gemm_names)
    shapes = [tuple(weight.shape) for weight in params[first : first + 2 * linears_here : 2]]
    shapes[0] = sum([part.shape[0] for part in parts], shapes[0][0]), shapes[0][1]
    options = module.save_original_input, module._recompute
    name = _name(recipe, amp_dtype(inp) or inp.dtype, tuple(shapes), options, norm, activation, 1 + len(parts))
    return linears(name, inp, *params, *parts)


def _recomputed(state: State | None) -> str:
    """Why a call that another library's checkpoint computes again, outside of what is compiled, cannot be. Nobody knows
    what its first run followed, whose autocast is closed."""
    if not now.in_backward or replay.OPEN.frames:
        return ""
    inside = OPEN.stack[-1].in_backward if OPEN.stack else not _quantized
    if inside and (state is None or state.recipe.stateless):
        return ""
    return (
        "it is computed again by a checkpoint around compiled code, which does not carry its autocast: put the "
        "checkpoint into what is compiled, or the autocast into what is checkpointed, or use te.checkpoint"
    )


def _raise(message: str) -> None:
    raise RuntimeError(message)


def call(
    module: Any, eager: Any, inp: Tensor, first: bool | None, fp8_output: bool, fp8_grad: bool, residual: Tensor | None
) -> Any:
    """module(inp, ...), traced. eager: its forward, where it is not."""
    state = OPEN.stack[-1].state if OPEN.stack else module._default
    why = _refusal(module, inp, residual, state, first, fp8_output or fp8_grad)
    recipe = None if state is None else _value(state.recipe)
    if not why:
        again = _recomputed(state)
        if again:
            return untraced(again, _raise, f"{type(module).__name__}: {again}")
        why = module._compiled_problem(inp.dtype, inp.device, inp.dim(), recipe)
    if why:
        options = (fp8_output, fp8_grad) if len(module.gemm_names) == 1 else ()
        why = f"{type(module).__name__} is not compiled: {why}"
        return untraced(why, eager, module, inp, first, *options, residual=residual)
    params: list[Any] = []
    if hasattr(module, "normalization"):
        params += [module.layer_norm_weight, module.layer_norm_bias]
    parts: list[Tensor] = []  # the first weight's but for the first of them
    for weights, biases in module._linear_names():
        first_part, *others = [getattr(module, name) for name in weights]
        params += [first_part, _joined(module, biases) if module.use_bias else None]
        parts += others
    bias = params[-1]
    if module.return_bias:
        params[-1] = None
    params.append(residual)
    if state is not None and state.delayed:
        graph = module._graph_scales
        if not graph.here.ready:
            raise RuntimeError("delayed scaling's states were not made ready for compiled code")
        params += [graph.forward_scales, graph.forward_amaxes, graph.backward_scales, graph.backward_amaxes]
    if getattr(module, "checkpoint", False) and torch.is_grad_enabled():
        out = torch.utils.checkpoint.checkpoint(_computed, module, inp, params, parts, recipe, use_reentrant=False)
    else:
        out = _computed(module, inp, params, parts, recipe)
    return module._outputs(tuple(out) if len(out) == 2 else out[0], bias)


def _joined(module: Any, names: list[str]) -> Tensor:
    parts = [getattr(module, name) for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def open_autocast(opened: Any) -> Any:
    """autocast.__enter__, traced. Delayed scaling's needs Python where it begins and ends."""
    if opened.calibrating or (opened.enabled and opened.recipe.delayed()):
        why = "te.autocast of delayed scaling inside of compiled code: open it around the compiled function"
        return untraced(why, autocast.__enter__, opened)
    state = State(True, opened.recipe, opened.group, Pass()) if opened.enabled else None
    OPEN.stack.append(Context(state, opened.strict, now.in_backward))
    return opened


def close_autocast(opened: Any, exc_type: Any) -> None:
    """autocast.__exit__, traced."""
    if opened.calibrating or (opened.enabled and opened.recipe.delayed()):
        why = "te.autocast of delayed scaling ends inside of compiled code"
        return untraced(why, autocast.__exit__, opened, exc_type)
    OPEN.stack.pop()


def checkpointed(eager: Any, function: Any, args: tuple, use_reentrant: bool, tracker: Any, kwargs: dict) -> Any:
    """te.checkpoint, traced: a graph computes again from values that it has, so scales need no memory of their own.
    eager: itself."""
    why = ""
    if tracker is not None:
        why = "te.checkpoint(get_rng_state_tracker=...) rewinds generators that graphs do not see"
    elif "distribute_saved_activations" in kwargs:
        why = "te.checkpoint(distribute_saved_activations=True) gathers its input in backward"
    if why:
        return untraced(
            why, eager, function, *args, use_reentrant=use_reentrant, get_rng_state_tracker=tracker, **kwargs
        )
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
