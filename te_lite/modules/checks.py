"""What callers get wrong, found before anything runs. Every message states the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from te_lite.arguments import flag, remedy
from te_lite.autocast import OPEN, State
from te_lite.functional.layer import output_shape
from te_lite.functional.plan import LinearPlan
from te_lite.ops.registry import makes_data
from te_lite.ops.source import DTYPES
from te_lite.overlap import userbuffers
from te_lite.overlap.config import LAYERS
from te_lite.parallel import MODES
from te_lite.quantize import replay
from te_lite.quantize.quantizer import Quantizer
from te_lite.recipe import Recipe, check_recipe_support
from te_lite.watch import compare

if TYPE_CHECKING:
    from te_lite.modules.base import TeLiteModule


def check_userbuffers(module: TeLiteModule, names: tuple[str | None, ...], symmetric_ar_type: str | None) -> None:
    """What ub_* flags need is there. names: of the module's linears, as ub_cfgs calls them."""
    owner = type(module).__name__
    if symmetric_ar_type is not None:
        raise NotImplementedError(
            f"{owner}(symmetric_ar_type={symmetric_ar_type!r}): te_lite has no other all-reduce than torch's; leave it "
            "None"
        )
    asked = [flag for flag, value in module._ub_flags.items() if value]
    if not asked or not module.sequence_parallel:
        return
    if not userbuffers.initialised():
        raise RuntimeError(f"{owner}({asked[0]}=True) before te.initialize_ub: call it first, on all ranks")
    for name, mode in zip(names, module._modes, strict=True):
        if mode is not None and name not in LAYERS[mode]:
            raise ValueError(
                f"{owner}({asked[0]}=True) with ub_name={name!r} and parallel_mode={mode!r}: ub_name must be one of "
                f"{LAYERS[mode]}"
            )


def check_dtype(owner: str, params_dtype: torch.dtype | None) -> None:
    """Parameters are of a dtype that the kernels take."""
    if params_dtype is not None and params_dtype not in DTYPES:
        raise TypeError(f"{owner}(params_dtype={params_dtype}): must be torch.bfloat16, torch.float16 or torch.float32")


def check_construction(owner: str, modes: Iterable[str | None], given: Mapping[str, Any], sizes: Iterable[str]) -> None:
    """Arguments of a constructor that no layer could be built from. sizes: those that count features."""
    check_dtype(owner, given["params_dtype"])
    for name, kind in given["__class__"].__init__.__annotations__.items():
        if kind in ("bool", "bool | None"):
            flag(owner, name, given[name])
    for mode in modes:
        if mode not in MODES:
            near = remedy("parallel_mode", mode, MODES[1:])
            raise ValueError(f"{owner}(parallel_mode={mode!r}): must be one of {MODES}; {near}")
    for name in ("tp_size", *sizes):
        if type(given[name]) is not int or given[name] < 1:
            raise ValueError(f"{owner}({name}={given[name]!r}): must be an integer, at least 1")


def check_recipe(recipe: Recipe, device: torch.device, keeps_original: bool) -> None:
    """The recipe runs on this device and with this module's options."""
    supported, reason = check_recipe_support(recipe, device) if makes_data(device) else (True, "")
    if not supported:
        raise RuntimeError(f"{reason}; te.check_recipe_support(recipe, device) tells beforehand; use recipe 'bf16'")
    if keeps_original and recipe.delayed():
        raise ValueError(
            "save_original_input=True with DelayedScaling: quantizing again in backward would use other scales; use "
            "Float8CurrentScaling or save_original_input=False"
        )


def refuse_type(module: TeLiteModule, inp: Any) -> NoReturn:
    """What is no tensor is no input."""
    owner, kind = type(module).__name__, type(inp).__name__
    raise TypeError(f"{owner} got an input of type {kind}: must be a torch.Tensor; make it one")


def amp_dtype(inp: Tensor) -> torch.dtype | None:
    """Where torch.amp.autocast is on for inp's device: in which dtype."""
    kind = inp.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def check_input(module: TeLiteModule, inp: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that the activations of this call, and of all that are like it, have."""
    owner, features = type(module).__name__, weight.shape[-1]
    if inp.dim() == 0 or inp.shape[-1] != features:
        raise ValueError(
            f"{owner} got an input of shape {tuple(inp.shape)}: its last dimension must be in_features={features}; "
            "check the layer before it"
        )
    if inp.device != weight.device:
        raise ValueError(f"{owner} got an input on {inp.device}, its weight is on {weight.device}; move one of them")
    amp = amp_dtype(inp)
    dtype = inp.dtype if amp is None else amp
    if amp is None and inp.dtype != weight.dtype:
        raise TypeError(
            f"{owner} got an input of {inp.dtype} but its parameters are {weight.dtype}: outside of "
            "torch.amp.autocast they must agree; cast the input or set params_dtype"
        )
    if dtype not in DTYPES:
        raise TypeError(f"{owner} got an input of {dtype}: must be bfloat16, float16 or float32; cast it first")
    if inp.dim() == 1 and module.sequence_parallel:
        raise ValueError(
            f"{owner} with sequence parallelism got one token {tuple(inp.shape)}: needs [tokens, features]"
        )
    if module.tp_size > 1 and module.tp_group is None and any(module._modes):
        raise RuntimeError(
            f"{owner} was built with tp_size={module.tp_size} and no tp_group; call "
            "set_tensor_parallel_group(group) first"
        )
    return dtype


def refuse_uneven(module: TeLiteModule, inp: Tensor) -> NoReturn:
    """A row-parallel output is scattered along the input's dimension sequence_dim, which is the first by now."""
    refusal = (
        f"{type(module).__name__} with sequence parallelism got {inp.shape[0]} in dimension {module.sequence_dim} "
        f"of its input, which is scattered over tp_size={module.tp_size} ranks: must be a multiple of that; pad it"
    )
    compare(refusal, module.tp_group, inp.device)  # ranks that do not refuse are in their reduce-scatter
    raise ValueError(refusal)


def check_residual(residual: Tensor, inp: Tensor, weight: Tensor, plans: tuple[LinearPlan, ...]) -> None:
    """A residual is what the output will be, so that nothing is broadcast or rounded. weight: of the last linear."""
    plan = plans[0] if len(plans) == 1 else None  # what fc1 gathers fc2 scatters
    wanted = output_shape(inp.shape, weight.shape[0], plan), plans[-1].dtype, weight.device
    given = (tuple(residual.shape), residual.dtype, residual.device) if isinstance(residual, Tensor) else type(residual)
    if given != wanted:
        raise ValueError(
            f"residual {given} for an output {wanted}: must be like it, shape, dtype and device; add it to the output "
            "afterwards, or pass what the output will be (under sequence_dim=d dimension d is shown first)"
        )


def check_wgrad_targets(module: TeLiteModule, weights: tuple[Tensor, ...]) -> None:
    """fuse_wgrad_accumulation has somewhere to accumulate, delay_wgrad_compute a parameter to give .grad to: what a
    computed weight was made of would get nothing."""
    owner = type(module).__name__
    for weight in weights if module.fuse_wgrad_accumulation else ():
        grad: Any = getattr(weight, "main_grad", None)
        fits = isinstance(grad, Tensor) and grad.shape == weight.shape and grad.is_floating_point()
        fits = fits and grad.device == weight.device and grad.itemsize > 1 and 0 not in grad.stride()
        if weight.requires_grad and not fits:
            what = "no main_grad that is a tensor"
            if isinstance(grad, Tensor):
                what = f"a main_grad of {tuple(grad.shape)} {grad.dtype} on {grad.device}, strides {grad.stride()}"
            raise RuntimeError(
                f"{owner} has fuse_wgrad_accumulation=True but a weight of shape {tuple(weight.shape)} has {what}; set "
                "weight.main_grad (fp32, of the weight's shape and device) before the forward"
            )
    if module.delay_wgrad_compute and not all([weight.is_leaf for weight in weights]):
        raise RuntimeError(
            f"{owner} has delay_wgrad_compute=True but a weight that is computed from others (a parametrization, "
            "functional_call), which a gradient after backward would not reach; leave out delay_wgrad_compute"
        )


def followed(key: Any, owner: str, outstanding: replay.Outstanding, state: State | None) -> State | None:
    """What a call follows where replay.may_repeat(): `state`; computed again, what its first run followed.

    In a checkpoint of ours that is noted under `key`. Where another library's computes it again, it must be known and
    without state of its own. outstanding: what calls of `owner` followed."""
    return replay.recall(key, partial(_followed, owner, outstanding, state))


def _followed(owner: str, outstanding: replay.Outstanding, state: State | None) -> State | None:
    if torch._C._current_graph_task_id() == -1 or replay.replaying():
        return state
    inside = bool(OPEN.stack) and OPEN.stack[-1].in_backward
    states = (state,) if inside else outstanding.states() or (state,)
    recomputed = f"{owner} is recomputed"
    remedy = "use te.checkpoint, or torch's with use_reentrant=False and context_fn=te.checkpoint_context_fn"
    if len(states) > 1:
        names = " and ".join("high precision" if s is None or not s.enabled else str(s.recipe) for s in states)
        raise RuntimeError(
            f"{recomputed} outside of its autocast and has run under {names}, each of which this call may have had: "
            f"open the autocast inside the checkpointed function, or {remedy}"
        )
    first = states[0]
    if first is None or not first.enabled:
        return first if inside else None  # nothing is calibrated a second time
    kept = first.recipe.delayed() or (state and state.key) != first.key
    if kept and not first.recipe.stateless:
        raise RuntimeError(
            f"{recomputed} with {type(first.recipe).__name__} by a checkpoint that does not carry its scales, which "
            f"may have moved since; {remedy} (a CustomRecipe that has none says so: stateless=True)"
        )
    return first


def check_capture(module: object, state: Any) -> None:
    """In a capture with delayed scaling: scales take their step where the outermost autocast ends, in replays too."""
    if not (state.one_pass.captured or OPEN.graphs):
        raise RuntimeError(
            f"{type(module).__name__} runs with DelayedScaling in the capture of a CUDA graph, but its autocast began "
            "before the capture, so replays would take no step of the scales; open the autocast inside"
        )


def check_offered(
    module: TeLiteModule, state: State | None, fp8_output: bool, fp8_grad: bool, plans: tuple[LinearPlan, ...]
) -> tuple[Quantizer | None, Quantizer | None]:
    """Quantizers of the output and of the input's gradient, where they are asked for: only where there are any. A
    linear in high precision, whatever the reason, gives high precision."""
    x, y = plans[0].operands, plans[-1].operands
    found = []
    for name, asked, quantizer, operand in (
        ("fp8_output", fp8_output, y.output, y.fprop.a),
        ("fp8_grad", fp8_grad, x.grad_input, x.dgrad.a),
    ):
        flag(type(module).__name__, name, asked)
        if asked and quantizer is None and operand.format.label:
            assert state is not None
            raise ValueError(
                f"{type(module).__name__} got {name}=True under recipe {state.recipe.name!r}: only 'delayed' and "
                f"'current' give results whose one scale fits every reader; leave out {name}"
            )
        found.append(quantizer if asked else None)
    return found[0], found[1]
