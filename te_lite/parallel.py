"""Tensor parallelism as a value: the group, this rank's place in it, and the arithmetic of shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.distributed.nn  # noqa: F401

# torch.distributed.nn is imported here since whoever imports it after a group was made, as any optimizer's step does by
# way of torch._dynamo, keeps that group for good: it is the default of its functions. gloo's threads then outlive the
# program, and abort at exit now and then.

MODES = (None, "column", "row")


@dataclass(frozen=True, slots=True, eq=False)
class TensorParallel:
    """How one linear is split over a process group of `size` ranks; modules/checks.py has refused what cannot be.

    mode "column": weight [N/R, K]; "row": weight [N, K/R]; None: not split.
    sequence_parallel: activations outside the pair column..row are split along their first dimension.
    """

    mode: str | None = None
    size: int = 1
    group: dist.ProcessGroup = None  # type: ignore[assignment]  # None where nobody asks: not active
    sequence_parallel: bool = False

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


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether it is no group of torch.distributed, or no longer, since destroy_process_group() has ended it or all."""
    try:
        return not dist.get_process_group_ranks(group)
    except KeyError:
        return True


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The group's ranks, by their numbers in the world; RuntimeError where it was destroyed."""
    if is_destroyed(group):
        raise RuntimeError(
            "a process group that torch.distributed does not know, perhaps for it was destroyed, is in use: call "
            "destroy_ub(), give modules another group by set_tensor_parallel_group(group), and pass it to the verbs"
        )
    return tuple(dist.get_process_group_ranks(group))


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
