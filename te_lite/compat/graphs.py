"""te.make_graphed_callables: modules as CUDA graphs under Transformer Engine's signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from te_lite.arguments import flag
from te_lite.autocast import autocast, restored
from te_lite.compat import graph_capture
from te_lite.compat.graph_capture import Capturing, Event
from te_lite.compat.graph_replay import Graphed, Original, Slot
from te_lite.compat.names import named
from te_lite.recipe import DelayedScaling, Recipe, as_recipe

NAME = "make_graphed_callables"


@named
def make_graphed_callables(
    modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
    sample_kwargs: Any = None, fp8_enabled: Any = None, fp8_calibrating: bool | None = None,
    fp8_recipe: Recipe | str | None = None, fp8_group: dist.ProcessGroup | None = None,
    fp8_weight_caching: bool | None = None, enabled: Any = None, calibrating: bool | None = None,
    recipe: Recipe | str | None = None, amax_reduction_group: dist.ProcessGroup | None = None,
    cache_quantized_params: bool | None = None, _order: Sequence[int] | None = None,
    _num_layers_per_chunk: int | Sequence[int] | None = None, pool: Any = None, retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False, clone_param_grads_on_return: bool = False,
    pre_warmup_hook: Callable[[], Any] | None = None, post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Any = None,
) -> Any:  # fmt: skip
    """The modules, whose forward and backward from now on replay CUDA graphs.

    modules: an nn.Module, or a tuple in the order in which they run; all in train(), or all in eval(), which gets
    graphs of forward alone. In the other mode a module goes on as its own. Its own hooks run as before.
    sample_args: a tuple of CUDA tensors, for several modules a tuple of such tuples: the memory from which graphs read
    their inputs. sample_kwargs: likewise, dicts. A call takes what is like its sample, and copies it there.
    num_warmup_iters: eager runs before the capture, at least 1. They leave no gradient, amax, scale or random state.
    allow_unused_input: an input that requires a gradient may get none.
    enabled (a bool, or one a module; default: where a recipe is given), calibrating, recipe, amax_reduction_group: of
    the te.autocast that is inside of the graphs. Under delayed scaling put a te.autocast with the same recipe around
    all that is one pass: its end takes the step of the scales. A module called without takes its own.
    cache_quantized_params: each call says is_first_microbatch=True, which quantizes the weights, or False.
    _order: chunks, counted from 1, in the order of a pipeline schedule: n is a forward of chunk n, -n the backward of
    its oldest one. modules are then the layers of all chunks, sample_args is theirs for each micro-batch, chunk by
    chunk; the result is a tuple of functions in the order of sample_args. _num_layers_per_chunk: default: all alike.
    pool: of torch.cuda.graph_pool_handle(). retain_graph_in_backward: a backward may be replayed again.
    clone_param_grads_on_return: gradients of parameters in memory of their own, at the price of a copy; else the next
    backward of the same graph overwrites them, except what .grad accumulates.
    pre_warmup_hook, post_warmup_hook: called once before and after the warm-up.
    fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching: older names of the five.

    Outputs and gradients of inputs lie in memory of the graph, which the next call with the same graph overwrites.
    Raises NotImplementedError for _reuse_graph_input_output_buffers, capture_time_hooks, orders with fractions and
    delay_wgrad_compute; a call raises ValueError for inputs unlike the sample, RuntimeError for parameters that were
    replaced and for backwards out of order.
    """
    caches = flag(
        NAME, *_given("cache_quantized_params", cache_quantized_params, "fp8_weight_caching", fp8_weight_caching)
    )
    observes = flag(NAME, *_given("calibrating", calibrating, "fp8_calibrating", fp8_calibrating))
    unused = flag(NAME, "allow_unused_input", allow_unused_input)
    retain = flag(NAME, "retain_graph_in_backward", retain_graph_in_backward)
    clones = flag(NAME, "clone_param_grads_on_return", clone_param_grads_on_return)
    reuses = flag(NAME, "_reuse_graph_input_output_buffers", _reuse_graph_input_output_buffers)
    if reuses or capture_time_hooks is not None:
        name = "capture_time_hooks" if capture_time_hooks is not None else "_reuse_graph_input_output_buffers"
        raise NotImplementedError(f"{NAME}({name}=...): te_lite does not do it; leave it out")
    single = not isinstance(modules, tuple)
    layers: tuple[Any, ...] = (modules,) if single else modules
    _check_modules(layers)
    recipe = _one("recipe", recipe, "fp8_recipe", fp8_recipe)
    group = _one("amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group)
    asked = _one("enabled", enabled, "fp8_enabled", fp8_enabled)
    on = _enabled(asked, recipe, len(layers))
    contexts = [_context(yes, observes, recipe, group, asked is None) for yes in on]
    if type(num_warmup_iters) is not int or num_warmup_iters < 1:
        raise ValueError(f"{NAME}(num_warmup_iters={num_warmup_iters!r}): must be an integer, at least 1: it compiles")
    events = _events(_order, _num_layers_per_chunk, len(layers))
    samples = _samples(single, sample_args, sample_kwargs, sum(not event.backward for event in events))
    used = as_recipe(DelayedScaling() if recipe is None else recipe)

    with ExitStack() as stack, restored([]):
        each = []
        for layer, yes, context in zip(layers, on, contexts, strict=True):
            original = Original(layer, used if yes else None, caches)
            each.append(Capturing(original, context, stack))
        slots = _slots(samples, events, each)
        captures = graph_capture.Captures(pool, [t for slot in slots for t in slot.inputs])
        stack.enter_context(graph_capture.weights_restored(each))
        with graph_capture.no_trace(each), captures.warm_up():
            if pre_warmup_hook is not None:
                pre_warmup_hook()
            pairs = [(slots[event.slot], each[event.module]) for event in events if not event.backward]
            graph_capture.warm_up(pairs, num_warmup_iters, unused)
            if post_warmup_hook is not None:
                post_warmup_hook()
        graph_capture.record(events, slots, each, captures, retain)
    for slot in slots:
        slot.clones = clones
    return _results(layers, slots, single, _order is not None)


def _given(name: str, value: Any, older_name: str, older: Any) -> tuple[str, Any]:
    """The argument with the name under which it was given."""
    if value is not None and older is not None:
        raise ValueError(f"{NAME} got both {name} and {older_name}, its older name: pass {name} alone")
    return (name, value) if older is None else (older_name, older)


def _one(*names_and_values: Any) -> Any:
    return _given(*names_and_values)[1]


def _enabled(enabled: Any, recipe: Any, count: int) -> list[bool]:
    """Whether the autocast of each module is enabled."""
    each = enabled if isinstance(enabled, tuple) else (recipe is not None if enabled is None else enabled,) * count
    if len(each) != count:
        raise ValueError(f"{NAME}(enabled={enabled!r}) for {count} modules: must be a bool, or a tuple of one a module")
    return [flag(NAME, "enabled", one) for one in each]


def _context(
    on: bool, observes: bool, recipe: Recipe | str | None, group: Any, silent: bool
) -> Callable[[], AbstractContextManager[Any]]:
    """What opens a module's autocast. silent: nobody said anything of it, so a converted module follows its own."""
    if silent and not (on or observes):
        return nullcontext
    return partial(autocast, on, observes, recipe if on or observes else None, group)


def _check_modules(layers: tuple[Any, ...]) -> None:
    if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():
        raise RuntimeError(f"{NAME} in torch.amp.autocast keeps no cast weights: open it with cache_enabled=False")
    wrong = [type(one).__name__ for one in layers if not isinstance(one, nn.Module)]
    if wrong or not layers:
        got = wrong[0] if wrong else "an empty tuple"
        raise TypeError(f"{NAME} got {got}: must be an nn.Module or a tuple of them")
    if len({id(one) for one in layers}) < len(layers):
        raise ValueError(f"{NAME} got a module twice: each has graphs of its own; use _order for several micro-batches")
    if len({one.training for one in layers}) > 1:
        raise RuntimeError(f"{NAME} got modules in train() and in eval(): put all in one of them")
    for one in layers:
        graph_capture.refuse_what_no_graph_holds(one)


def _events(order: Sequence[Any] | None, per_chunk: Any, layers: int) -> list[Event]:
    """What is captured, in this order. A slot is a place in sample_args."""
    if order is None:
        if per_chunk is not None:
            raise ValueError(f"{NAME}(_num_layers_per_chunk={per_chunk!r}) without _order: chunks are of a pipeline's")
        forward = [Event(i, i, False) for i in range(layers)]
        return forward + [Event(i, i, True) for i in reversed(range(layers))]
    if any(isinstance(one, float) and not one.is_integer() for one in order):
        raise NotImplementedError(f"{NAME}(_order={order!r}): fractions are of delay_wgrad_compute, which is not there")
    entries = [int(one) for one in order]
    chunks = max(entries, default=0)
    micro_batches = entries.count(1)
    sizes = [layers // chunks] * chunks if per_chunk is None and chunks else per_chunk
    sizes = [sizes] * chunks if isinstance(sizes, int) else list(sizes or ())
    each = [entries.count(sign * chunk) for chunk in range(1, chunks + 1) for sign in (1, -1)]
    if not micro_batches or set(each) != {micro_batches} or sum(each) != len(entries):
        raise ValueError(
            f"{NAME}(_order={order!r}): must name each chunk from 1 on as often forward as backward, all as often; it "
            f"names them {each} times"
        )
    if len(sizes) != chunks or sum(sizes) != layers:
        raise ValueError(
            f"{NAME} got {layers} modules for {chunks} chunks of {sizes or '?'} layers: _num_layers_per_chunk must add "
            "up to the modules"
        )
    done, events = dict.fromkeys(entries, 0), list[Event]()
    for entry in entries:
        size, first, nth = sizes[abs(entry) - 1], sum(sizes[: abs(entry) - 1]), done[entry]
        done[entry] += 1
        if entry < 0 and done[entry] > done[-entry]:
            raise ValueError(f"{NAME}(_order={order!r}): a backward of chunk {-entry} comes before its forward")
        at = first * micro_batches + nth * size
        places = range(size) if entry > 0 else reversed(range(size))
        events += [Event(at + i, first + i, entry < 0) for i in places]
    return events


def _samples(single: bool, sample_args: Any, sample_kwargs: Any, count: int) -> list[tuple[tuple, dict[str, Any]]]:
    """Arguments of each slot."""
    if single and not (isinstance(sample_args, tuple) and len(sample_args) == count and count > 1):
        sample_args, sample_kwargs = (sample_args,), None if sample_kwargs is None else (sample_kwargs,)
    sample_kwargs = ({},) * len(sample_args) if sample_kwargs is None else sample_kwargs
    if len(sample_args) != count or len(sample_kwargs) != count:
        raise ValueError(
            f"{NAME} got {len(sample_args)} sample_args and {len(sample_kwargs)} sample_kwargs: must be {count}, one a "
            "module, under _order one a module and micro-batch"
        )
    for args, kwargs in zip(sample_args, sample_kwargs, strict=True):
        wrong = [type(t).__name__ for t in tree_leaves((args, kwargs)) if type(t) not in (Tensor, nn.Parameter)]
        if wrong or not isinstance(args, tuple) or not isinstance(kwargs, dict):
            what = f"a {wrong[0]} in its samples" if wrong else "a sample"
            raise TypeError(
                f"{NAME} got {what}: each of sample_args must be a tuple and each of sample_kwargs a dict of plain "
                "tensors; hand the module other arguments by functools.partial or a module around it"
            )
    return list(zip(sample_args, sample_kwargs, strict=True))


def _slots(
    samples: list[tuple[tuple, dict[str, Any]]], events: Sequence[Event], modules: Sequence[Capturing]
) -> list[Slot]:
    """In the order of samples. A tensor that is the sample of several gets memory for each."""
    seen, live = set[int](), set[Slot]()

    def own(sample: Tensor) -> Tensor:
        at = sample.data_ptr()
        made = sample.detach().clone() if at in seen else sample.detach()
        seen.add(at)
        return made.requires_grad_(sample.requires_grad)

    of = {event.slot: modules[event.module].original for event in events}
    return [Slot(of[i], tree_map(own, args), tree_map(own, kwargs), live) for i, (args, kwargs) in enumerate(samples)]


def _results(layers: tuple[Any, ...], slots: list[Slot], single: bool, ordered: bool) -> Any:
    made = [Graphed(slot) for slot in slots]
    if ordered:
        return made[0] if single and len(made) == 1 else tuple(made)
    for layer, graphed in zip(layers, made, strict=True):
        layer.forward = graphed
    return layers[0] if single else layers
