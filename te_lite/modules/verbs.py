"""The verbs of an exchange for layers of your own: checks and plans.

    y_i     = all_gather(x_shard) @ w_i^T + b_i              all_gather_linear
    y_shard = reduce_scatter(x @ w^T) + b + residual         linear_reduce_scatter
    handle  = all_gather(x_shard), reduce_scatter(x)         begin here, finish at handle.wait()

The work is in functional/: linear.py, verbs.py and transfers.py.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite import epoch
from te_lite.arguments import flag, remedy
from te_lite.autocast import OPEN, Pass, State, current
from te_lite.functional.layer import Call, run_layer
from te_lite.functional.linear import LINEAR
from te_lite.functional.parallel import parallel_linear
from te_lite.functional.plan import LinearPlan, WgradSink
from te_lite.functional.transfers import Handle
from te_lite.functional.verbs import GatherLinears, Prepared
from te_lite.modules import checks
from te_lite.modules.backward_thread import backward_on_calling_thread
from te_lite.modules.plans import quantizers
from te_lite.modules.scale_state import ScaleStates
from te_lite.ops.registry import capturing
from te_lite.ops.source import DTYPES
from te_lite.overlap.collective import Collective
from te_lite.overlap.exchange import Place
from te_lite.overlap.exchanges import EXCHANGES
from te_lite.overlap.userbuffers import GEMMS, Exchanges, group_of
from te_lite.parallel import TensorParallel, group_size, is_destroyed
from te_lite.quantize import replay
from te_lite.recipe import HighPrecision, Recipe, as_recipe
from te_lite.tables import warn_once

P = ParamSpec("P")
T = TypeVar("T")
Weights = TypeVar("Weights", Tensor, tuple[Tensor, ...])
Plans = tuple[LinearPlan, ...]
Planned = tuple[Plans, int]  # the dimension, counted from the front
MOST_PLANS = 256  # kept for all calls without DelayedScales


class DelayedScales(nn.Module):
    """What delayed scaling keeps between the calls of one linear verb. Make one beside the weights, for so many of
    them, and pass it as scales=; in a layer's attribute it is part of the layer's state_dict. Other recipes ignore it.

    Forward scales take their step when the outermost te.autocast ends, backward scales at the end of backward.
    """

    def __init__(self, weights: int = 1) -> None:
        super().__init__()
        if type(weights) is not int or weights < 1:
            raise ValueError(f"DelayedScales(weights={weights!r}): must be an integer, at least 1")
        self.weights, self.states, self.plans = weights, ScaleStates(weights), dict[tuple, Planned]()

    def get_extra_state(self) -> Tensor:
        """One fp32 tensor, as the modules have it."""
        return self.states.dump()

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state gave."""
        self.states.load(state)
        self.plans.clear()  # they have the states of before

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"plans": {}}


_plans: dict[tuple, Planned] = {}  # of calls without DelayedScales. A key: the verb, its group, ..., epoch.number
atexit.register(_plans.clear)  # they hold process groups, which must not outlive torch.distributed
_outstanding = replay.Outstanding()


def _eager(function: Callable[P, T]) -> Callable[P, T]:
    """torch.compile leaves the function to Python."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            from te_lite.ops.untraced import untraced

            return untraced("te_lite's linear verbs run their collectives in Python", function, *args, **kwargs)
        return function(*args, **kwargs)

    return run


def _exchanges(verb: str, tp: TensorParallel, n: int, device: torch.device, overlap: str | None, strict: bool,
               text: str) -> Exchanges:  # fmt: skip
    """The exchanges of fprop, dgrad and wgrad of n linears. Several linears sum dx before it is scattered: in bulk,
    behind their wgrads.
    text: what the ranks must agree on, beside what travels."""
    found = group_of(tp.group, device) if tp.active else "the group has one rank"
    if overlap is None or isinstance(found, str):
        if overlap is not None and strict:
            raise RuntimeError(f"te.{verb}: overlap was asked for and does not happen: {found}; or leave strict out")
        return tuple([Collective(Place(tp, gemm, label=text)) for gemm in GEMMS])
    back = overlap if EXCHANGES[overlap].gathers or tp.mode == "column" else "auto"
    methods = (overlap, back, "external") if n == 1 else (overlap, "bulk", "bulk")
    strict = strict or found.strict
    each = zip(GEMMS, methods, strict=True)
    return tuple([EXCHANGES[method](Place(tp, gemm, found, method, text, strict=strict)) for gemm, method in each])


def _strict(verb: str, strict: Any) -> bool:
    """Whether the call or the open te.autocast is strict."""
    return flag(f"te.{verb}", "strict", strict) or bool(OPEN.stack and OPEN.stack[-1].strict)


def _group(verb: str, group: Any) -> int:
    """Its size."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"te.{verb}(group={group!r}): must be a process group; torch.distributed.group.WORLD is one")
    return group_size(group, 1)


def _dimension(verb: str, x: Any, dim: Any, last: bool) -> int:
    """dim, counted from the front. last: it may be the last one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"te.{verb} got an input of type {type(x).__name__}: must be a torch.Tensor; make it one")
    if type(dim) is not int or not -x.dim() <= dim < x.dim() or dim % x.dim() >= x.dim() - (not last):
        rule = "one of its dimensions" + ("" if last else ", but not the last, which the weight multiplies")
        raise ValueError(f"te.{verb}(dim={dim!r}) of a tensor {list(x.shape)}: must be {rule}")
    return dim % x.dim()


def _activations(verb: str, x: Tensor, weights: tuple, biases: tuple) -> torch.dtype:
    """The dtype of the call's activations."""
    if len(biases) != len(weights) or not weights:
        raise ValueError(f"te.{verb} got {len(weights)} weights and {len(biases)} biases: one bias or None a weight")
    amp = checks.amp_dtype(x)
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        good = isinstance(w, Tensor) and w.dim() == 2 and w.shape[1] == x.shape[-1]
        if not good or not (b is None or (isinstance(b, Tensor) and b.shape == w.shape[:1])):
            given = [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (w, b)]
            raise ValueError(f"te.{verb}: weight and bias {i} are {given}: must be [N, {x.shape[-1]}] and [N] or None")
        if w.device != x.device or (amp is None and w.dtype != x.dtype) or (amp or x.dtype) not in DTYPES:
            raise TypeError(
                f"te.{verb} got x of {x.dtype} on {x.device}, weight {i} of {w.dtype} on {w.device}: both must be "
                "bfloat16, float16 or float32, the same outside of torch.amp.autocast; cast or move one"
            )
    return amp or x.dtype


def _planned(verb: str, mode: str, x: Tensor, weights: tuple, biases: tuple, group: Any, dim: Any, recipe: Any,
             scales: Any, overlap: Any, strict: bool, state: State | None) -> Planned:  # fmt: skip
    """Checks what the key of a call stands for, and plans it."""
    size, dim = _group(verb, group), _dimension(verb, x, dim, False)
    dtype = _activations(verb, x, weights, biases)
    names = [name for name, kind in EXCHANGES.items() if (kind.gathers if mode == "column" else kind.scatters)]
    if overlap is not None and overlap not in names:
        near = remedy("exchange", overlap, names)
        raise ValueError(f"te.{verb}(overlap={overlap!r}): must be one of {names} or None; {near}")
    used = as_recipe(recipe) if recipe is not None else HighPrecision() if state is None else state.recipe
    if recipe is not None and used.delayed():
        raise ValueError(
            f"te.{verb}(recipe={recipe}): delayed scales take their step where te.autocast ends; open "
            "te.autocast(recipe=...) around the call and leave out recipe="
        )
    checks.check_recipe(used, x.device, False)
    multiple, shapes = used.feature_multiple, " and ".join(str(list(weight.shape)) for weight in weights)
    if any(features % multiple for weight in weights for features in weight.shape):
        what = f"te.{verb} of weights {shapes} runs in {dtype}, not by {used.name!r}: features are not multiples of"
        warn_once(f"te.{verb}", f"{what} {multiple}; pad them, or pass recipe='bf16'")
        used = HighPrecision()
    Pass.any_module = True
    tp, n = TensorParallel(mode, size, group, True), len(weights)
    exchanges = _exchanges(verb, tp, n, x.device, overlap, strict, f"te.{verb}(dim={dim}) of {shapes}, recipe {used},")
    parallel = (parallel_linear if n == 1 else Prepared)(tp, exchanges)
    states = None if scales is None else scales.states
    operands = [quantizers(used, state, i, dtype, tp, x.device, states) for i in range(n)]
    return tuple([LinearPlan(each, parallel, WgradSink(), dtype) for each in operands]), dim


def _linear(verb: str, mode: str, x: Tensor, weights: tuple, biases: tuple, group: Any, residual: Any, dim: Any,
            recipe: Any, scales: Any, overlap: str | None, strict: Any) -> tuple[Tensor, ...]:  # fmt: skip
    grad, strict = torch.is_grad_enabled(), _strict(verb, strict)
    state = current() if recipe is None else None
    if recipe is None and replay.may_repeat():
        state = checks.followed(f"state of te.{verb}", f"te.{verb}", _outstanding, state)
    delayed = state is not None and state.delayed
    if delayed and getattr(scales, "weights", 0) != len(weights):
        kind = f"te.DelayedScales(weights={len(weights)})"
        raise RuntimeError(
            f"te.{verb} under delayed scaling got scales={scales!r}: must be a {kind} that lives between the calls; "
            "keep one beside the weights, or use another recipe"
        )
    operands = [(t.shape, t.dtype, t.device) if isinstance(t, Tensor) else type(t) for t in (*weights, *biases)]
    here = (x.dtype, x.device, x.shape[-1:], x.dim(), checks.amp_dtype(x)) if isinstance(x, Tensor) else type(x)
    given = dim if type(dim) is int else None, recipe if isinstance(recipe, str | Recipe) else type(recipe)
    key = verb, group, *given, here, *operands, overlap, strict, state and state.key, epoch.number
    kept = scales.plans if delayed else _plans
    planned = kept.get(key)
    if planned is None:
        # Userbuffers that have gone, and groups that were destroyed, whose threads and files a plan would keep.
        for stale in [one for one in list(_plans) if one[-1] != epoch.number or is_destroyed(one[1])]:
            _plans.pop(stale, None)
        if delayed or len(kept) >= MOST_PLANS:  # a second plan of the same scales would go on with those of before
            kept.clear()
        asked = (group, dim, recipe, scales, overlap, strict, state)
        planned = kept[key] = _planned(verb, mode, x, weights, biases, *asked)
        if recipe is None:  # computed again, a call with recipe= follows that
            _outstanding.start(state)
    plans, dim = planned
    if mode == "row" and x.shape[dim] % plans[0].tp.size:
        rule = f"dimension {dim} is scattered over {plans[0].tp.size} ranks, must be a multiple of that; pad it"
        raise ValueError(f"te.{verb} got x {list(x.shape)}: {rule}")
    if delayed and capturing():
        checks.check_capture(scales, state)
        scales.states.fix()
    if grad and x.is_cuda:
        backward_on_calling_thread()
    x = x.movedim(dim, 0) if dim else x
    if residual is not None:
        residual = residual.movedim(dim, 0) if dim and isinstance(residual, Tensor) else residual
        checks.check_residual(residual, x, weights[0], plans)
    pools = state.pools if delayed and state is not None else None
    if pools is not None:
        pools.expect()
    note = _outstanding.note(state, grad) if recipe is None else None
    call = Call(plans, weights, (None,) * len(plans), grad, pools=pools, note=note)
    if len(plans) == 1:
        ys = (run_layer(LINEAR, call, x, *weights, *biases, residual),)
    else:
        ys = (GatherLinears.apply if grad else partial(GatherLinears.forward, None))(call, x, *weights, *biases)
    return tuple([y.movedim(0, dim).contiguous() for y in ys]) if dim else ys


@_eager
def all_gather_linear(
    x_shard: Tensor, weights: Weights, group: dist.ProcessGroup, *, bias: Any = None, dim: int = 0,
    recipe: Recipe | str | None = None, scales: DelayedScales | None = None, overlap: str | None = "auto",
    strict: bool = False,
) -> Weights:  # fmt: skip
    """y_i[..., N_i] = all_gather(x_shard[..., K]) @ weights[i][N_i, K]^T + bias[i][N_i], one gather for all weights.

    weights, bias: a tensor and a tensor, or None, which gives y; or a tuple of each, which gives a tuple of y_i.
    dim: of x_shard, along which the shards of all ranks are concatenated in rank order; any but the last.
    recipe: a te.recipe object or name; default: that of the open te.autocast, else high precision.
    scales: for delayed scaling, which the open te.autocast must choose: a te.DelayedScales(weights=how many).
    overlap: how the gather hides behind the GEMM, through the userbuffers of exactly this group (te.initialize_ub):
    "auto", "ring_exchange" or "fused"; collectively where there are none, or with None.
    strict: RuntimeError, with the reason, where that does not overlap.

    Backward: dx_shard = reduce_scatter(sum of dy_i @ w_i), dw_i = dy_i^T @ all_gather(x_shard); the shard is kept,
    quantized, and gathered again. It has no second derivative. Every rank of the group must make the same calls.

    Raises ValueError for a shape, dim, overlap or recipe that does not fit, TypeError for a dtype, a device, or what is
    no process group, RuntimeError under delayed scaling without scales for just so many weights.
    """
    one = isinstance(weights, Tensor)
    many, biases = [(t,) if one else tuple(t) for t in (weights, () if bias is None and not one else bias)]
    given = (group, None, dim, recipe, scales, overlap, strict)
    ys: Any = _linear("all_gather_linear", "column", x_shard, many, biases or (None,) * len(many), *given)
    return ys[0] if one else ys


@_eager
def linear_reduce_scatter(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, bias: Tensor | None = None, residual: Tensor | None = None,
    dim: int = 0, recipe: Recipe | str | None = None, scales: DelayedScales | None = None,
    overlap: str | None = "auto", strict: bool = False,
) -> Tensor:  # fmt: skip
    """y_shard[..., N] = reduce_scatter(x[..., K] @ weight[N, K]^T) + bias[N] + residual[..., N].

    dim: of x, along which the sum over the ranks is cut, a part for each rank; any but the last, a multiple of the
    group's size. residual: like y_shard, in shape, dtype and device. bias and residual are added once, to the sum.
    overlap: how the reduce-scatter hides behind the GEMM: "auto", "ring_exchange", "pipeline", "fused" or None.
    recipe, scales, strict: as of all_gather_linear.

    Backward: dy = all_gather(dy_shard), dx = dy @ weight, dw = dy^T @ x; the gradient of bias is this rank's part of
    a sum over the ranks, as that of a row-parallel te.Linear.

    Raises what all_gather_linear raises, and ValueError for a dim that is no multiple of the group's size and for a
    residual unlike y_shard.
    """
    given = (group, residual, dim, recipe, scales, overlap, strict)
    return _linear("linear_reduce_scatter", "row", x, (weight,), (bias,), *given)[0]


@_eager
def all_gather(x_shard: Tensor, group: dist.ProcessGroup, *, dim: int = 0, strict: bool = False) -> Handle:
    """Begins an all-gather along `dim`; handle.wait() gives the shards of all ranks in rank order. Any dtype.

    Through the userbuffers of exactly this group by copy engines, which take no multiprocessor; wait() then copies the
    result out of its slot. Where there are none, or x does not fit, by torch.distributed (strict: RuntimeError).
    Backward is a reduce_scatter, which begins where wait() was called and ends where this was.

    Raises ValueError for a dim that x_shard does not have, TypeError for what is no tensor or no process group.
    """
    _group("all_gather", group)
    dim = _dimension("all_gather", x_shard, dim, True)
    return Handle("all_gather", x_shard, group, dim, _strict("all_gather", strict))


@_eager
def reduce_scatter(x: Tensor, group: dist.ProcessGroup, *, dim: int = 0, strict: bool = False) -> Handle:
    """Begins a reduce-scatter along `dim`, a multiple of the group's size; handle.wait() gives this rank's part of the
    sum over the ranks.

    As of all_gather. Through userbuffers the sum runs in wait(), in fp32 in the order of ranks rank + 1, rank + 2, ...,
    rank, rounded once. bfloat16, float16 or float32. Backward is an all_gather.

    Raises what all_gather raises, and ValueError for another dtype and a dim that is no multiple of the group's size.
    """
    size, dim = _group("reduce_scatter", group), _dimension("reduce_scatter", x, dim, True)
    if x.shape[dim] % size or x.dtype not in DTYPES:
        rule = f"must be bfloat16, float16 or float32, and dimension {dim} a multiple of the group's {size} ranks"
        raise ValueError(f"te.reduce_scatter got {x.dtype} {list(x.shape)}: {rule}; cast or pad it")
    return Handle("reduce_scatter", x, group, dim, _strict("reduce_scatter", strict))
