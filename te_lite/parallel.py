"""Tensor parallelism as a value: the group, this rank's place in it, and the arithmetic of shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

MODES = (None, "column", "row")


@dataclass(frozen=True, slots=True, eq=False)
class TensorParallel:
    """How one linear is split over a process group of `size` ranks.

    mode "column": weight [N/R, K]; "row": weight [N, K/R]; None: not split.
    sequence_parallel: activations outside the pair column..row are split along their first dimension.
    """

    mode: str | None = None
    size: int = 1
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"parallel_mode={self.mode!r}: must be one of {MODES}")
        if self.size < 1:
            raise ValueError(f"tp_size={self.size}: must be at least 1")

    @property
    def active(self) -> bool:
        """True when ranks must talk to each other."""
        return self.size > 1 and self.mode is not None

    @property
    def gathers_input(self) -> bool:
        """Forward all-gathers x along tokens (column-parallel with sequence parallelism)."""
        return self.active and self.sequence_parallel and self.mode == "column"

    @property
    def gathers_grad(self) -> bool:
        """Backward all-gathers dy along tokens (row-parallel with sequence parallelism)."""
        return self.active and self.sequence_parallel and self.mode == "row"


def shard(features: int, tp_size: int, what: str) -> int:
    """`features` / tp_size, or a ValueError naming `what`."""
    if features % tp_size:
        raise ValueError(
            f"{what}={features} is not divisible by tp_size={tp_size}; choose a multiple of {tp_size} "
            f"(next: {-(-features // tp_size) * tp_size})"
        )
    return features // tp_size


def group_size(group: dist.ProcessGroup | None, tp_size: int) -> int:
    """The tensor-parallel size that `group` and `tp_size` agree on.

    A group given with tp_size left at 1 decides alone (Transformer Engine's behaviour); any other difference is an
    error.
    """
    if group is None:
        return tp_size
    if not dist.is_initialized():
        raise RuntimeError("tp_group was given but torch.distributed is not initialised; call init_process_group first")
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError("tp_group does not contain this rank; pass the group that this rank belongs to")
    if tp_size not in (1, size):
        raise ValueError(f"tp_size={tp_size} but tp_group has {size} ranks; pass tp_size={size} or the right group")
    return size


def reduce_sequence_parallel_grads(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """All-reduces (sum) the gradients of parameters marked `.sequence_parallel` over the tensor-parallel group.

    Under sequence parallelism each rank sees only its own tokens in norm weights and row-parallel biases; their
    gradients are partial sums. Call it after backward and before the optimizer. Takes `.grad`, or `main_grad`
    where the gradient was put there. `group` overrides the modules' own group. Gradients that share a group, dtype and
    device travel as one flat buffer. Returns how many parameters were reduced.
    """
    buckets: dict[tuple, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for child in module.modules():
        tp_group = group if group is not None else getattr(child, "tp_group", None)
        for param in child.parameters(recurse=False):
            if not getattr(param, "sequence_parallel", False) or id(param) in seen:
                continue
            added = getattr(param, "grad_added_to_main_grad", False) or param.grad is None
            grad = getattr(param, "main_grad", None) if added else param.grad
            if grad is None:
                continue
            seen.add(id(param))
            if tp_group is None:
                raise RuntimeError(
                    f"a parameter of {type(child).__name__} is marked sequence_parallel but its module has no "
                    "tp_group; call set_tensor_parallel_group or pass group="
                )
            buckets.setdefault((tp_group, grad.dtype, grad.device), []).append(grad)
    for (tp_group, _, _), grads in buckets.items():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=tp_group)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
    return len(seen)
