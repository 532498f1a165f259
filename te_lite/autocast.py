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
from te_lite.quantize import delayed, replay
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
    """What one autocast says that enables or, where not `enabled`, calibrates. key: what a module's plan depends on."""

    __slots__ = ("enabled", "group", "key", "one_pass", "recipe")

    def __init__(self, enabled: bool, recipe: Recipe, group: Any, one_pass: Pass) -> None:
        self.enabled, self.recipe, self.group, self.one_pass = enabled, recipe, group, one_pass
        self.key = (recipe, group, enabled, one_pass.pools if recipe.delayed() else None)


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


class _Open(threading.local):
    """The autocasts that this thread is in, outermost first.

    inits: the same for quantized_model_init. pools: what delayed scaling keeps of this thread's forwards.
    """

    def __init__(self) -> None:
        self.stack: list[Context] = []
        self.inits: list[ModelInit | None] = []
        self.pools = delayed.Pools()


_open = _Open()


def current(default: State | None = None) -> State | None:
    """The innermost autocast's state, None where it neither enables nor calibrates fp8; default: where none is open."""
    stack = _open.stack
    return stack[-1].state if stack else default


def strict() -> bool:
    """Whether the innermost autocast forbids that an overlap which was asked for does not happen."""
    return bool(_open.stack) and _open.stack[-1].strict


def opened_in_backward() -> bool:
    """Whether the innermost autocast was."""
    return bool(_open.stack) and _open.stack[-1].in_backward


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
        self.strict, enabled = flag("autocast", "strict", strict), flag("autocast", "enabled", enabled)
        calibrating = flag("autocast", "calibrating", calibrating)
        self.recipe = as_recipe(DelayedScaling() if recipe is None else recipe)
        if amax_reduction_group is not None and not isinstance(amax_reduction_group, dist.ProcessGroup):
            raise TypeError(f"amax_reduction_group={amax_reduction_group!r}: must be a process group or None")
        self.enabled = enabled and self.recipe.is_fp8
        self.calibrating = calibrating and not self.enabled
        if self.calibrating and not self.recipe.delayed():
            warn_once("autocast", f"calibrating=True does nothing: recipe {self.recipe.name!r} keeps no amaxes")
        self.group = amax_reduction_group

    def __enter__(self) -> autocast:
        state = None
        if self.enabled or self.calibrating:
            passes = (context.state.one_pass for context in reversed(_open.stack) if context.state is not None)
            # A recomputed call, perhaps on autograd's thread, goes on with the pools of its first run.
            one_pass = next(passes, None) or Pass(replay.recall("pools", lambda: _open.pools))
            state = State(self.enabled, self.recipe, self.group, one_pass)
        _open.stack.append(Context(state, self.strict, torch._C._current_graph_task_id() != -1))
        return self

    def __exit__(self, exc_type: Any, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            from te_lite.ops.untraced import untraced

            return untraced(autocast.__exit__, self, exc_type)
        state = _open.stack.pop().state
        if state is None or exc_type is not None or any(outer.state is not None for outer in _open.stack):
            return
        if not Pass.any_module:
            warn_once("autocast", "no te_lite linear ran in te.autocast; for nn.Linear: te.convert_to_float8_training")
        # The first run of a reentrant checkpoint has gradients disabled although a backward will follow.
        recomputed = replay.replaying() or replay.in_foreign_recomputation()
        if not recomputed and (torch.is_grad_enabled() or replay.is_open()):
            state.one_pass.pools.update("forward")


@contextmanager
def restored(stack: list[Context]) -> Iterator[None]:
    """Inside, the autocast state is `stack`, as snapshot() took it earlier; leaving takes no step of any scale."""
    outside, _open.stack = _open.stack, stack.copy()
    try:
        yield
    finally:
        _open.stack = outside


def snapshot() -> list[Context]:
    """The stack of open autocasts, for restored()."""
    return _open.stack.copy()


def reset() -> None:
    """Forgets open autocasts and the delayed-scaling pools."""
    _open.stack.clear()
    _open.inits.clear()
    delayed.reset()


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | str | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """te_lite modules built inside hold the weights of their linears quantized, and nowhere in high precision.

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
    _open.inits.append(made)
    try:
        yield
    finally:
        _open.inits.pop()


def model_init() -> ModelInit | None:
    """What the innermost quantized_model_init says; None outside of any and where it is not enabled."""
    return _open.inits[-1] if _open.inits else None
