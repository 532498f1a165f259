"""Activation checkpointing that recomputes with the scales, random numbers and autocast of the first run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_map_only

from te_lite.arguments import flag
from te_lite.autocast import OPEN, restored
from te_lite.overlap.collective import all_gather
from te_lite.quantize.replay import Frame


class CheckpointedCall(AbstractContextManager):
    """What belongs to one checkpointed call: its frame of scales, the open autocasts, the RNG tracker's states.

    Entered for each run of the call, the first or a later one."""

    def __init__(self, get_rng_state_tracker: Callable[[], Any] | None = None) -> None:
        self.frame = Frame()
        self.autocasts = OPEN.stack.copy()
        self.tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
        self.rng_states = self.tracker.get_states() if self.tracker is not None else None

    def __enter__(self) -> None:
        stack = self._stack = ExitStack()
        if self.frame.replaying:
            stack.enter_context(restored(self.autocasts))
            if self.tracker is not None:
                stack.callback(self.tracker.set_states, self.tracker.get_states())
                self.tracker.set_states(self.rng_states)
        stack.enter_context(self.frame.run())

    def __exit__(self, *exc: Any) -> bool | None:
        return self._stack.__exit__(*exc)


def checkpoint_context_fn() -> tuple[AbstractContextManager, AbstractContextManager]:
    """For torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=te.checkpoint_context_fn)."""
    call = CheckpointedCall()
    return call, call


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = True, distribute_saved_activations: bool = False,
    tp_group: dist.ProcessGroup | None = None, get_rng_state_tracker: Callable[[], Any] | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """function(*args, **kwargs), keeping only its inputs; backward computes it again, bit for bit.

    get_rng_state_tracker: returns the CudaRNGStatesTracker whose states are rewound for the second run; torch's own
    generators are too, but with preserve_rng_state=False. distribute_saved_activations: each rank of tp_group keeps its
    part of the first input, which must be the same on all of them, and backward gathers it; hooks of torch's
    saved_tensors_hooks outside see none of the inputs then. tp_group is not needed otherwise. Other keywords go to
    `function`, except torch.utils.checkpoint's (context_fn, determinism_check, debug, early_stop, preserve_rng_state),
    which go there.

    Raises TypeError, ValueError for distribute_saved_activations without a plain tensor first or without tp_group.
    """
    if torch.compiler.is_dynamo_compiling():
        from te_lite.modules.compiled import checkpointed

        if distribute_saved_activations:
            kwargs |= {"distribute_saved_activations": True, "tp_group": tp_group}
        return checkpointed(checkpoint, function, args, use_reentrant, get_rng_state_tracker, kwargs)
    use_reentrant = flag("checkpoint", "use_reentrant", use_reentrant)
    keep: AbstractContextManager[Any] = nullcontext()
    if flag("checkpoint", "distribute_saved_activations", distribute_saved_activations):
        keep = keeps_parts(args[0] if args else None, tp_group)
    own = {"determinism_check", "debug", "early_stop", "context_fn", "preserve_rng_state"}
    options = {name: kwargs.pop(name) for name in own & kwargs.keys()}
    call = CheckpointedCall(get_rng_state_tracker)
    call.frame.alone = use_reentrant and torch._C._is_fwd_grad_enabled()

    def run(*inputs: Any) -> Any:
        with call:
            outputs = function(*inputs, **kwargs)
        # A reentrant checkpoint makes what it returns its own, the very tensor: no parameter.
        return outputs if torch.is_grad_enabled() else tree_map_only(torch.nn.Parameter, torch.Tensor.detach, outputs)

    with keep:
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **options)


class Kept(NamedTuple):
    """What is kept of an input. version: as it was saved, since torch does not compare it for what goes through hooks;
    None: it is this rank's part of a tensor that is the same on all ranks, padded to equal parts."""

    saved: Tensor
    version: int | None


def keeps_parts(first: Any, group: dist.ProcessGroup | None) -> AbstractContextManager[Any]:
    """Where `first` is saved for backward inside, each rank of the group keeps a part; backward gathers it."""
    if type(first) not in (Tensor, torch.nn.Parameter):
        raise TypeError(
            f"distribute_saved_activations=True: the first input is a {type(first).__name__}, must be a plain tensor; "
            "leave distribute_saved_activations out"
        )
    if group is None:
        raise ValueError("distribute_saved_activations=True got tp_group=None: pass the ranks that share the input")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    place = first.data_ptr(), first.shape, first.stride()
    like = torch.empty_like(first, device="meta")  # with first's strides, unless its elements share memory

    def pack(saved: Tensor) -> Kept:
        if (saved.data_ptr(), saved.shape, saved.stride()) != place or not saved.numel():
            return Kept(saved.detach(), saved._version)
        flat = saved.detach().reshape(-1)
        part = -(-flat.numel() // size)
        own = flat[part * rank : part * (rank + 1)]
        mine = flat.new_zeros(part)
        mine[: own.numel()] = own
        return Kept(mine, None)

    def unpack(kept: Kept) -> Tensor:
        if kept.version is not None:
            if kept.saved._version != kept.version:
                raise RuntimeError(
                    f"an input {tuple(kept.saved.shape)} of te.checkpoint was modified by an inplace operation before "
                    f"backward (version {kept.saved._version}, expected {kept.version}); pass a copy of it"
                )
            return kept.saved
        mine, what = kept.saved.view(torch.uint8), "all-gather of a checkpoint's input"  # not every backend knows all
        whole = all_gather(mine, group, what).view(like.dtype)[: like.numel()]
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=whole.device)
        return made.copy_(whole.view(like.shape))

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
