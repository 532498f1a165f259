"""Activation checkpointing that recomputes with the scales, random numbers and autocast of the first run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.utils._pytree import tree_map_only

from te_lite.arguments import flag
from te_lite.autocast import restored, snapshot
from te_lite.quantize.replay import Frame


class CheckpointedCall(AbstractContextManager):
    """What belongs to one checkpointed call: its frame of scales, the open autocasts, the RNG tracker's states.

    Entered for each run of the call, the first or a later one."""

    def __init__(self, get_rng_state_tracker: Callable[[], Any] | None = None) -> None:
        self.frame = Frame()
        self.autocasts = snapshot()
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
    generators always are. tp_group is accepted and not needed. Other keywords go to `function`, except those of
    torch.utils.checkpoint (context_fn, determinism_check, debug, early_stop), which go there.
    """
    if torch.compiler.is_dynamo_compiling():
        from te_lite.modules.compiled import checkpointed

        return checkpointed(checkpoint, function, args, use_reentrant, get_rng_state_tracker, kwargs)
    use_reentrant = flag("checkpoint", "use_reentrant", use_reentrant)
    if flag("checkpoint", "distribute_saved_activations", distribute_saved_activations):
        raise NotImplementedError(
            "distribute_saved_activations=True: te_lite keeps a checkpoint's inputs whole; use sequence_parallel=True, "
            "which shards them by construction"
        )
    own = {"determinism_check", "debug", "early_stop", "context_fn", "preserve_rng_state"}
    options = {name: kwargs.pop(name) for name in own & kwargs.keys()}
    call = CheckpointedCall(get_rng_state_tracker)
    call.frame.alone = use_reentrant and torch._C._is_fwd_grad_enabled()

    def run(*inputs: Any) -> Any:
        with call:
            outputs = function(*inputs, **kwargs)
        # A reentrant checkpoint makes what it returns its own, the very tensor: no parameter.
        return outputs if torch.is_grad_enabled() else tree_map_only(torch.nn.Parameter, torch.Tensor.detach, outputs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **options)
