"""autocast: which recipe the modules inside use, and when delayed scaling takes a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_lite.arguments import flag
from te_lite.ops.registry import capturing
from te_lite.quantize import delayed, graph_scales, replay
from te_lite.quantize.params import weight_quantizer
from te_lite.quantize.quantizer import Quantizer
from te_lite.recipe import DelayedScaling, Recipe, as_recipe
from te_lite.tables import warn_once


class Pass:
    """One forward through the outermost autocast: remembers whether a module has claimed to be its first, and whether
    it began in the capture of a CUDA graph. pools: of the thread that opened it; None where no scale takes a step.
    any_module: of the class; a linear of te_lite has run in this process."""

    claimed = any_module = False

    def __init__(self, pools: delayed.Pools | None = None) -> None:
        self.captured, self.pools = capturing(), pools


class State:
    """What one autocast says that enables or, where not `enabled`, calibrates. key: what a module's plan depends on.
    pools: those whose scales the modules inside use; None where these are not delayed scaling's."""

    __slots__ = ("delayed", "enabled", "group", "key", "one_pass", "pools", "recipe")

    def __init__(self, enabled: bool, recipe: Recipe, group: Any, one_pass: Pass) -> None:
        self.enabled, self.recipe, self.group, self.one_pass = enabled, recipe, group, one_pass
        self.delayed = recipe.delayed()
        pools = one_pass.pools if self.delayed else None
        self.key = (recipe, group, enabled, pools)
        self.pools = pools if enabled else None


class Context(NamedTuple):
    """What an open autocast says: of quantization (None: neither enabled nor calibrating) and of overlap.

    in_backward: it was opened there, by a function that is computed again."""

    state: State | None
    strict: bool
    in_backward: bool


class ModelInit(NamedTuple):
    """How modules make their weights just now. multiple: features must be multiples of it, or stay as they are."""

    quantizer: Quantizer
    multiple: int
    preserve: bool


class Open(threading.local):
    """The autocasts that this thread is in, outermost first.

    inits: the same for quantized_model_init. pools: what delayed scaling keeps of this thread's forwards.
    graphs: of the class, for all threads; a framework is warming up or capturing CUDA graphs. Scales take their steps
    around the replays, and is_first_microbatch is not followed: a replay may be of any micro-batch, so it quantizes.
    """

    graphs = False

    def __init__(self) -> None:
        self.stack: list[Context] = []
        self.inits: list[ModelInit | None] = []
        self.pools = delayed.Pools()


OPEN = Open()


def current() -> State | None:
    """The innermost autocast's state, None where it neither enables nor calibrates fp8 or none is open."""
    return OPEN.stack[-1].state if OPEN.stack else None


class autocast(ContextDecorator):
    """Modules inside quantize their GEMMs by `recipe`.

    enabled: False leaves the modules inside in high precision, also within an enabled autocast.
    calibrating: with enabled=False, record the amaxes that delayed scaling would need, without quantizing.
    recipe: a te.recipe object or a name; default DelayedScaling().
    amax_reduction_group: ranks that share delayed scaling's amaxes; None: each module's tensor-parallel group. The
    world is never assumed (pass torch.distributed.group.WORLD for it).
    strict: a module inside whose communication was to overlap and does not raises RuntimeError with the reason.

    Delayed scaling's forward scales take a step when the outermost autocast ends, if gradients are enabled.
    Raises TypeError for arguments of another kind, ValueError for an unknown name.
    """

    def __init__(
        self, enabled: bool = True, calibrating: bool = False, recipe: Recipe | str | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None, *, strict: bool = False,
    ) -> None:  # fmt: skip
        if not enabled.__class__ is calibrating.__class__ is strict.__class__ is bool:
            given = {"enabled": enabled, "calibrating": calibrating, "strict": strict}
            enabled, calibrating, strict = [flag("autocast", name, value) for name, value in given.items()]
        if amax_reduction_group is not None and not isinstance(amax_reduction_group, dist.ProcessGroup):
            raise TypeError(f"amax_reduction_group={amax_reduction_group!r}: must be a process group or None")
        if not isinstance(recipe, Recipe):
            recipe = as_recipe(DelayedScaling() if recipe is None else recipe)
        self.recipe, self.group, self.strict = recipe, amax_reduction_group, strict
        self.enabled = enabled and recipe.is_fp8
        self.calibrating = calibrating and not self.enabled
        if self.calibrating and not recipe.delayed():
            warn_once("autocast", f"calibrating=True does nothing: recipe {recipe.name!r} keeps no amaxes")

    def __enter__(self) -> autocast:
        if torch.compiler.is_dynamo_compiling():
            from te_lite.modules.compiled import open_autocast

            return open_autocast(self)
        state, stack = None, OPEN.stack
        if self.enabled or self.calibrating:
            one_pass = next((outer.state.one_pass for outer in reversed(stack) if outer.state is not None), None)
            begins = one_pass is None
            if one_pass is None:
                # A recomputed call, perhaps on autograd's thread, goes on with the pools of its first run.
                pools = OPEN.pools
                one_pass = Pass(replay.recall("pools", lambda: pools) if replay.OPEN.frames else pools)
            state = State(self.enabled, self.recipe, self.group, one_pass)
            if begins and state.delayed and graph_scales.active and not one_pass.captured:
                graph_scales.begin(state)
        stack.append(Context(state, self.strict, torch._C._current_graph_task_id() != -1))
        return self

    def __exit__(self, exc_type: Any, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            from te_lite.modules.compiled import close_autocast

            return close_autocast(self, exc_type)
        stack = OPEN.stack
        state = stack.pop().state
        if state is None or exc_type is not None or (stack and any(outer.state is not None for outer in stack)):
            return
        if not Pass.any_module:
            warn_once("autocast", "no te_lite linear ran in te.autocast; for nn.Linear: te.convert_to_float8_training")
        # The first run of a reentrant checkpoint has gradients disabled although a backward will follow.
        frames = replay.OPEN.frames
        recomputed = torch._C._current_graph_task_id() != -1 or (frames and replay.replaying())
        pools = state.one_pass.pools
        if pools is not None and not recomputed and (torch.is_grad_enabled() or (frames and replay.is_open())):
            pools.update("forward")


@contextmanager
def restored(stack: list[Context]) -> Iterator[None]:
    """Inside, the open autocasts are those of `stack`, a copy made earlier; leaving takes no step of any scale."""
    outside, OPEN.stack = OPEN.stack, stack.copy()
    try:
        yield
    finally:
        OPEN.stack = outside


def reset() -> None:
    """Forgets open autocasts and the delayed-scaling pools."""
    OPEN.stack.clear()
    OPEN.inits.clear()
    delayed.reset()


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | str | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """te_lite modules built inside hold the weights of their linears quantized, and nowhere in high precision, but for
    weights whose sizes on this rank are not multiples of the recipe's feature_multiple (16).

    recipe: gives the weights' format (default DelayedScaling()); use the modules under an autocast with a recipe of
    that format. preserve_high_precision_init_val: param.get_high_precision_init_val() is the initial value on the CPU,
    for master weights, until param.clear_high_precision_init_val(). See docs/how-to/quantized-parameters.md.

    Raises ValueError for recipes whose GEMMs do not read a weight through one quantizer, TypeError for what is no bool.
    """
    made = None
    preserve = flag("quantized_model_init", "preserve_high_precision_init_val", preserve_high_precision_init_val)
    if flag("quantized_model_init", "enabled", enabled):
        recipe = as_recipe(DelayedScaling() if recipe is None else recipe)
        made = ModelInit(weight_quantizer(recipe), recipe.feature_multiple, preserve)
    OPEN.inits.append(made)
    try:
        yield
    finally:
        OPEN.inits.pop()


def model_init() -> ModelInit | None:
    """What the innermost quantized_model_init says; None outside of any and where it is not enabled."""
    return OPEN.inits[-1] if OPEN.inits else None
