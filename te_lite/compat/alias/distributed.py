"""transformer_engine.pytorch.distributed: checkpoints in all their forms, and what surrounds a recomputation."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.checkpoint import checkpoint as _checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """te_lite.checkpoint; also in the old order (function, distribute_saved_activations, get_rng_state_tracker,
    tp_group, *args), which is known by the bool in its second place."""
    first, tracker, group = (*args, None, None, None)[:3]
    old = isinstance(first, bool) and (tracker is None or callable(tracker))
    if old and len(args) >= 3 and (group is None or isinstance(group, dist.ProcessGroup)):
        kwargs |= {"distribute_saved_activations": first, "get_rng_state_tracker": tracker, "tp_group": group}
        args = args[3:]
    return _checkpoint(function, *args, **kwargs)


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Nothing but a warning: what a module keeps for its backward is not sharded over the ranks of FSDP."""
    warnings.warn(
        "prepare_te_modules_for_fsdp: te_lite shards nothing that forward keeps, so each rank holds all of its own; "
        "leave the call out",
        stacklevel=2,
    )


class _Recompute(threading.local):
    enabled = phase = False


_RECOMPUTE = _Recompute()


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Around both runs of a call that a framework computes again in backward; recompute_phase: the second.

    It only keeps what the two functions below answer: te_lite's modules find out by themselves that they are computed
    again, and refuse it under delayed scaling, whose scales may have moved (docs/how-to/recompute.md).
    """
    before = _RECOMPUTE.enabled, _RECOMPUTE.phase
    _RECOMPUTE.enabled, _RECOMPUTE.phase = activation_recompute, activation_recompute and recompute_phase
    try:
        yield
    finally:
        _RECOMPUTE.enabled, _RECOMPUTE.phase = before


def is_fp8_activation_recompute_enabled() -> bool:
    """Inside activation_recompute_forward(True, ...)."""
    return _RECOMPUTE.enabled


def in_fp8_activation_recompute_phase() -> bool:
    """Inside activation_recompute_forward(True, True)."""
    return _RECOMPUTE.phase


def get_all_rng_states() -> dict[str, torch.Generator]:
    """Generators that a CUDA graph must register, beside torch's own: none. te_lite's CudaRNGStatesTracker puts its
    states into torch's generator, and in a capture torch refuses that."""
    return {}


def get_dummy_wgrad(shape: list[int] | tuple[int, ...], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """A gradient that nobody reads, where the real one was added to main_grad. zero: of zeros."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.zeros if zero else torch.empty)(tuple(shape), dtype=dtype, device=device)
