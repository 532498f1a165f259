"""transformer_engine.pytorch.graph: CUDA graphs that a framework captures itself, and make_graphed_callables as
Megatron-core calls it (docs/how-to/cuda-graphs.md).

A framework captures between set_capture_start() and set_capture_end(). Scales take no step there, so no graph holds
one: around the replays te.autocast takes the forward step, and what follows takes the backward step.

    forward, inside te.autocast:  add_fp8_tensors_to_global_buffer(module.fp8_meta) of each module; graph.replay()
    backward:                     graph.replay(); reduce_and_update_fp8_tensors(forward=False)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from te_lite.autocast import OPEN, Open, current
from te_lite.compat.alias import recipes
from te_lite.compat.alias.modules import Fp8Meta
from te_lite.compat.graphs import make_graphed_callables as _make_graphed_callables
from te_lite.modules.base import TeLiteModule
from te_lite.modules.verbs import DelayedScales
from te_lite.quantize.delayed import Pool, ScaleState
from te_lite.recipe import DelayedScaling
from te_lite.tables import warn_once

_capturing = ExitStack()
_backward_pools: set[Pool] = set()  # of graphs whose forward was replayed


def is_graph_capturing() -> bool:
    """Between set_capture_start and set_capture_end."""
    return Open.graphs


def set_capture_start() -> None:
    """From now on all threads' modules quantize their weights in each call, and this thread's scales take no step."""
    if not Open.graphs:
        Open.graphs = True
        _capturing.enter_context(OPEN.pools.recording(one_graph=False))


def set_capture_end() -> None:
    """Ends what set_capture_start began, in the same thread."""
    Open.graphs = False
    _capturing.close()


def graph_pool_handle() -> Any:
    """torch's, for `pool`."""
    return torch.cuda.graph_pool_handle()


def _states(modules: Sequence[nn.Module]) -> Iterator[ScaleState]:
    """Delayed scaling's, forward and backward, of all that is in `modules`."""
    for module in dict.fromkeys(child for one in modules for child in one.modules()):
        if isinstance(module, TeLiteModule | DelayedScales):
            scales = module._scales if isinstance(module, TeLiteModule) else module.states
            yield from scales._live.values()


def save_fp8_tensors(modules: Sequence[nn.Module], recipe: Any) -> list[tuple[ScaleState, Tensor, Tensor]]:
    """Histories and scales of the modules before a warm-up, for restore_fp8_tensors."""
    if not isinstance(recipe, DelayedScaling):
        return []
    return [(state, state.history.clone(), state.scale.clone()) for state in _states(modules)]


def restore_fp8_tensors(modules: Sequence[nn.Module], fp8_tensors: list[tuple[ScaleState, Tensor, Tensor]]) -> None:
    """Histories and scales are again what save_fp8_tensors found; those that were made since begin anew."""
    saved = {state: (history, scale) for state, history, scale in fp8_tensors}
    for state in _states(modules):
        fresh = torch.zeros_like(state.history), torch.ones_like(state.scale)
        state.load(*saved.get(state, fresh), state.key.fp8_max)


def add_fp8_tensors_to_global_buffer(fp8_meta: Fp8Meta) -> None:
    """Before the replay of a graph with this module: its scales take a step with those of the pass."""
    live = fp8_meta.module._scales._live
    if not live:
        return
    live["forward"].pool.touched = True
    _backward_pools.add(live["backward"].pool)
    state = current()
    if state is not None:
        state.one_pass.claimed = True  # so that no eager module takes the backward step before the graphs' backward


def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
    """The scales of the direction take their step: forward now, backward where the running backward ends, once."""
    if forward:
        OPEN.pools.update("forward")
        return
    for pool in _backward_pools:
        pool.touched = True
    for owner in {pool.key.owner for pool in _backward_pools}:
        if torch._C._current_graph_task_id() != -1:
            owner.close(first=False)
        else:
            owner.update("backward")


def forget_graphs() -> None:
    """Forgets the backward pools of replayed graphs, for FP8GlobalStateManager.reset()."""
    _backward_pools.clear()


def set_skip_fp8_weight_update_tensor(skip: bool) -> None:
    """Accepted: te_lite's graphs quantize weights in every micro-batch, which costs time and, under delayed scaling,
    takes a scale as fresh as the activations'."""
    if skip:
        warn_once(
            "skip_fp8_weight_update",
            "te_lite's modules in graphs that a framework captures quantize their weights in every micro-batch, not in "
            "the first one alone: cuda_graph_impl='transformer_engine' keeps them",
        )


def make_weak_ref(x: Any) -> Any:
    """A tensor in the memory of x that does not keep it; tuples, lists and dicts of them alike. Else x itself."""
    if isinstance(x, dict):
        return {key: make_weak_ref(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(map(make_weak_ref, x))
    if type(x) not in (Tensor, nn.Parameter):
        return x
    x = x.detach()
    size = x.element_size() * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
    make: Any = torch._C._construct_storage_from_data_pointer
    storage = make(x.data_ptr(), x.device, size if x.numel() else 0)
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())


class _Called(nn.Module):
    """A module by way of its __call__, which Megatron's layers override."""

    training = property(lambda self: self.inner.training, lambda self, mode: None)

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class _Leaving:
    """A graphed module that leaves out keyword arguments which are None and were not in its sample."""

    def __init__(self, graphed: Any) -> None:
        self.graphed, self.keys = graphed, {*graphed.slot.keys, "is_first_microbatch"}
        self.reset = graphed.reset

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = {key: value for key, value in kwargs.items() if value is not None or key in self.keys}
        return self.graphed(*args, **kept)


@functools.wraps(_make_graphed_callables)
def make_graphed_callables(modules: Any, *args: Any, **kwargs: Any) -> Any:
    """te_lite.make_graphed_callables. Under _order modules run by way of their __call__, and keyword arguments that are
    None may come with a call. _reuse_graph_input_output_buffers: accepted, at the price of memory."""
    for name in ("recipe", "fp8_recipe"):
        if kwargs.get(name) is not None:
            kwargs[name] = recipes.settled(kwargs[name])
    if kwargs.pop("_reuse_graph_input_output_buffers", False):
        warn_once(
            "_reuse_graph_input_output_buffers",
            "make_graphed_callables(_reuse_graph_input_output_buffers=True): te_lite's graphs have inputs and outputs "
            "of their own, which takes more memory",
        )
    if kwargs.get("_order") is None:
        return _make_graphed_callables(modules, *args, **kwargs)
    single = not isinstance(modules, tuple)
    layers = (modules,) if single else modules
    if all(isinstance(layer, nn.Module) for layer in layers):
        layers = tuple(map(_Called, layers))
    made = _make_graphed_callables(layers[0] if single else layers, *args, **kwargs)
    return tuple(map(_Leaving, made)) if isinstance(made, tuple) else _Leaving(made)
