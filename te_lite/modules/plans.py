"""From a module, a recipe and a mesh to the plans of its linears: every decision about a step falls here."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from te_lite.autocast import Pass, State
from te_lite.functional.parallel import parallel_linear
from te_lite.functional.plan import LinearPlan, PlanInfo
from te_lite.functional.recordings import Recordings
from te_lite.modules.checks import check_recipe
from te_lite.modules.weights import check_param
from te_lite.overlap.one_rank import fused_products
from te_lite.overlap.userbuffers import exchanges_for, group_of
from te_lite.parallel import TensorParallel, ranks_of
from te_lite.quantize.quantizer import GemmOperands, Site, observer, operands_for
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.recipe import HighPrecision, Recipe
from te_lite.tables import warn_once

if TYPE_CHECKING:
    from te_lite.modules.base import TeLiteModule

# The newest plans of every module that has run. The lock: a thread may build plans while another reports.
PLANNED: WeakKeyDictionary[TeLiteModule, tuple[LinearPlan, ...]] = WeakKeyDictionary()
PLANNED_LOCK = Lock()
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def build_plans(
    module: TeLiteModule, state: State | None, dtype: torch.dtype, weights: tuple[Tensor, ...], strict: bool
) -> tuple[LinearPlan, ...]:
    """One plan for each linear of `module`, the newest of which overlap_report() is made. dtype: of activations."""
    recipe = HighPrecision() if state is None else state.recipe
    check_recipe(recipe, weights[0].device, module.save_original_input)
    for name, spec in module._specs.items():
        packed = len(spec.shape) == 2 or name.startswith("layer_norm")  # a linear's bias is copied where it is not
        check_param(type(module).__name__, spec, name, getattr(module, name), weights[0].device, packed)
    module._quantized = any(isinstance(param, QuantizedTensor) for param in module.parameters(recurse=False))
    Pass.any_module = True
    plans: tuple[LinearPlan, ...] = ()
    for i, weight in enumerate(weights):
        plans += (_build_plan(module, i, recipe, state, dtype, weight, strict, plans[-1] if plans else None),)
    if weights[0].is_cuda and all(plan.recordable for plan in plans):
        plans[0].recordings = recordings_of(plans, weights)
    with PLANNED_LOCK:
        PLANNED[module] = plans
    return plans


def recordings_of(plans: tuple[LinearPlan, ...], weights: tuple[Tensor, ...]) -> Recordings:
    """For the bodies of plans that are all recordable."""
    places = [place for plan in plans for place in plan.places]
    group = group_of(places[0].tp.group, weights[0].device) if places else ""
    largest = max(weight.numel() for weight in weights)
    if plans[0].shared is not None:  # recorded bodies quantize x for themselves: all siblings are recorded, or none
        largest = max(plans[0].shared[0].features) * weights[0].shape[1]
    return Recordings(largest, places, None if isinstance(group, str) else group)


def quantizers(
    recipe: Recipe, state: State | None, index: int, dtype: torch.dtype, tp: TensorParallel, device: torch.device,
    scales: Any,
) -> GemmOperands:  # fmt: skip
    """The quantizers of the linear `index`, one of those that share `scales`.

    scales: ScaleStates, asked under delayed scaling alone."""
    group = tp.group if state is None or state.group is None else state.group
    pools = None if state is None else state.one_pass.pools
    calibrating = state is not None and not state.enabled

    def scale_state(direction: str) -> Any:
        return scales.state(recipe, group, device, pools, direction)

    return operands_for(recipe, Site(index, dtype, tp, scale_state, group, calibrating))


def _build_plan(
    module: TeLiteModule, index: int, recipe: Recipe, state: State | None, dtype: torch.dtype, weight: Tensor,
    strict: bool, before: LinearPlan | None,
) -> LinearPlan:  # fmt: skip
    mode, gemm_name, device = module._modes[index], module.gemm_names[index], weight.device
    shape = weight.shape[1], weight.shape[0]
    tp = TensorParallel(mode, module.tp_size, module.tp_group, module.sequence_parallel)
    if tp.active:
        ranks_of(tp.group)  # refuses one that was destroyed
    multiple = recipe.feature_multiple
    fits = not recipe.is_fp8 or all(size % multiple == 0 for size in shape)
    used: Recipe = recipe if fits else HighPrecision()
    reasons = [] if fits else [f"features {shape} are not multiples of {multiple}"]
    calibrating = state is not None and not state.enabled
    what = f"{type(module).__name__}(name={module.name!r}){gemm_name and '.' + gemm_name}"
    if not (fits or calibrating):
        said = f"{what} runs in {dtype}, not by {recipe.name!r}: {reasons[0]}"
        warn_once(ref(module), f"{said}; pad them, or use te.autocast(enabled=False)")
    layer = module._ub_names[index] or ""
    exchanges, alone = exchanges_for(tp, module._ub_flags, layer, module.name, device, strict, str(used))
    operands = quantizers(used, state, index, dtype, tp, device, module._scales)
    if (watching := observer()) is not None:
        operands = watching.watch(operands, module, gemm_name)
    short = SHORT_NAMES[dtype]
    gathered = operands.wgrad.b if tp.gathers_input else operands.wgrad.a if tp.gathers_grad else None
    native = operands.wgrad.a.format.multiplies(operands.wgrad.b.format)
    if gathered is not None and native and gathered.format.shard_multiple > 1:
        reasons.append(f"{short} where a rank's tokens are not a multiple of {gathered.format.shard_multiple}")
    if isinstance(weight, QuantizedTensor) and weight.q.format != operands.fprop.b.format:
        reasons.append(f"the weight is kept in {weight.q.format.label}, another format than that of its GEMMs")
        if used.is_fp8 and not calibrating:
            said = f"{what} quantizes its weight anew in each call by {recipe.name!r}: {reasons[-1]}"
            warn_once(ref(module), f"{said}; use the recipe of quantized_model_init")
    name, reason = short if calibrating or not used.is_fp8 else used.name, "; ".join(filter(None, (*reasons, alone)))
    info = PlanInfo(gemm_name, name, operands.labels(short), shape, reason)
    # What a quantizer of one's own makes of x may be of no use to others.
    apart = not used.is_fp8 or used.custom() or calibrating or watching is not None or tp.gathers_input
    shared = None if apart or operands.wgrad.b is not operands.fprop.a else module._shared
    plan = LinearPlan(
        operands, parallel_linear(tp, exchanges), module._sinks[index], dtype, module.save_original_input, info, before,
        module._recompute, fused=fused_products(operands, dtype, device),
        weight=(sum(shared[0].features) if shared else shape[1], shape[0]),
        # Read as it is, or joined of its parts in each call, it is not worth keeping: a cast is.
        caches=True if weight.dtype != dtype and len(module._linear_names()[index][0]) == 1 else None,
    )  # fmt: skip
    plan.shared = shared
    return plan
