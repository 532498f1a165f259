"""torch.distributed's collectives as te_lite runs them: where userbuffers exist, no rank waits in one for ever.

gloo waits for a peer that failed, or runs something else, until its process ends, and then names nobody. So the ranks
of userbuffers agree on a collective before it begins. NCCL's are issued and not waited for: what runs is compared.

Without userbuffers gloo ends the process of a rank that receives more than it expects, by a signal. So ranks on the CPU
compare what each is about to run, and all raise the same error where that differs. It costs one small all-reduce for
each collective, 0.5 ms with 2 ranks on 2 cores: under 5% of a step of LayerNormMLP from 256 features and 512 tokens on.
TE_LITE_CHECK_RANKS: "cpu" (the default), "1" (GPUs too, where each collective then waits for its device) or "0" (off).
"""

from __future__ import annotations

import os
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.nvtx import ranged
from te_lite.ops.recorder import OPEN, called
from te_lite.ops.registry import capturing
from te_lite.parallel import ranks_of

CHECK_RANKS = os.environ.get("TE_LITE_CHECK_RANKS", "cpu")
if CHECK_RANKS not in ("cpu", "1", "0"):
    raise ValueError(f"TE_LITE_CHECK_RANKS={CHECK_RANKS!r}: must be cpu (also where it is not set), 1 or 0")
NAMING_S = 10.0  # how long after a broken connection a rank may still be named: longer than it may show no heartbeat


class Watch(Protocol):
    """What userbuffers know of their ranks. Both raise, on every rank, once one of them has failed."""

    def meet(self, text: str) -> None:
        """Every rank runs `text` next."""

    def maximum(self, what: str, values: Tensor, elementwise: bool) -> Tensor | None:
        """The largest of all ranks' values, as group_max gives it; elementwise the values, of which
        value i has become the largest value i of all ranks. None: by a collective."""

    def check(self) -> None:
        """Nothing, or the error."""


watches: dict[tuple[int, ...], Watch] = {}  # by ranks
_world: Callable[[], Any] = type(None)  # weakly, the world that these are ranks of


def watch(ranks: tuple[int, ...], by: Watch) -> None:
    """From now on `by` watches these ranks."""
    global _world
    watches[ranks], _world = by, weakref.ref(dist.group.WORLD)


def check_world() -> None:
    """RuntimeError where torch.distributed was left and begun again since userbuffers were made: its ranks may have
    other numbers now."""
    if watches and _world() is not dist.group.WORLD:
        raise RuntimeError(
            "userbuffers belong to a process group that was destroyed since they were made: call destroy_ub(), then "
            "initialize_ub() in the new one"
        )


def collective(what: str, tensor: Tensor, group: dist.ProcessGroup, run: Callable[..., Any], *given: Tensor) -> None:
    """run(*given), a collective over `group` that moves `tensor`; not for an empty one. RuntimeError, the same on every
    rank, where ranks have come to different ones and are watched or compared. given: all that it reads and writes."""
    if watches or compares(tensor.device):
        text = f"{what}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        members: Sequence[int] = ()
        if watches:
            try:
                members = dist.get_process_group_ranks(group)
            except KeyError:
                ranks_of(group)  # says what is wrong. No call where all is well, for a step comes here often
            if _world() is not dist.group.WORLD:
                check_world()
        for ranks, one in watches.items():
            if set(ranks).issubset(members):
                one.meet(text)
        if tuple(members) not in watches:  # which has compared them where they meet
            compare(text, group, tensor.device)
    if tensor.numel():
        called(partial(_watched, run), *given)


def _watched(run: Callable[..., Any], *given: Tensor) -> None:
    try:
        run(*given)
    except RuntimeError:
        _name_failed()
        raise


def _name_failed() -> None:
    """Raises the error of a rank that has failed, as soon as one is known."""
    deadline = time.monotonic() + NAMING_S
    while watches and time.monotonic() < deadline:
        for one in list(watches.values()):
            one.check()
        time.sleep(0.01)


def compares(device: torch.device) -> bool:
    """Whether ranks compare what they run on `device`; never in the capture of a CUDA graph."""
    return CHECK_RANKS == "cpu" and device.type == "cpu" or CHECK_RANKS == "1" and not capturing()


def compare(text: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Collective over `group`, where its ranks compare what they run and userbuffers do not: RuntimeError, the same on
    every rank, with what each runs, unless all run `text`."""
    if not compares(device) or _watch(group) is not None:
        return
    if OPEN.recorder is not None:
        OPEN.recorder.refuse("ranks compare what they run")
    hashed = zlib.crc32(text.encode())
    extremes = torch.tensor((hashed, -hashed), device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    if not int(extremes.sum()):  # the largest hash and minus the smallest
        return
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group)
    said = list(zip(ranks_of(group), texts, strict=True))
    found = (f"ranks {[rank for rank, other in said if other == one]}: {one}" for one in dict.fromkeys(texts))
    raise RuntimeError(
        f"the ranks of a group do not run the same: {'; '.join(found)}. All must call the same modules in the same "
        "order with the same recipe, dtype and shapes: under sequence parallelism each rank passes the same number of "
        "tokens, the first dimension; pad the shorter ones"
    )


@ranged("te_lite.amax_all_reduce")
def all_reduce_max(what: str, values: Tensor, group: dist.ProcessGroup) -> None:
    """values, not negative and no nan, becomes its elementwise maximum over the group."""
    by = _watch(group)
    if by is not None and values.numel() and by.maximum(what, values, elementwise=True) is not None:
        return
    collective(what, values, group, partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group), values)


def _watch(group: dist.ProcessGroup) -> Watch | None:
    """The Watch of userbuffers of exactly the group's ranks; None where there is none."""
    if not watches:
        return None
    if _world() is not dist.group.WORLD:
        check_world()
    try:
        return watches.get(tuple(dist.get_process_group_ranks(group)))
    except KeyError:
        return watches.get(ranks_of(group))


def group_max(what: str, partials: Tensor, group: dist.ProcessGroup) -> Tensor:
    """fp32 [1]: the largest of the partials [P] of all ranks of the group, which are not negative and no nan."""
    by = _watch(group)
    largest = None if by is None else by.maximum(what, partials, elementwise=False)
    if largest is None:
        largest = partials.new_empty(1)
        called(_largest_into, partials, largest)
        all_reduce_max(what, largest, group)
    return largest


def _largest_into(partials: Tensor, largest: Tensor) -> None:
    torch.amax(partials.view(-1), 0, keepdim=True, out=largest)


def reduce_sequence_parallel_grads(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """All-reduces (sum) the gradients of parameters marked `.sequence_parallel` over the tensor-parallel group.

    Under sequence parallelism each rank sees only its own tokens in norm weights and row-parallel biases; their
    gradients are partial sums. Call it after backward and before the optimizer. Takes `.grad`, or `main_grad`
    where the gradient was put there. `group` overrides the modules' own group. Gradients that share a group, dtype and
    device travel as one flat buffer. Returns how many parameters were reduced. RuntimeError for a marked parameter
    with a gradient and no group: that of a norm which stands in no module with a tp_group needs `group`.
    """
    buckets: dict[tuple, list[torch.Tensor]] = {}
    seen: set[int] = set()
    groups: dict[str, dist.ProcessGroup | None] = {}
    for name, child in module.named_modules():
        around = groups.get(name.rpartition(".")[0], group)  # a norm takes the group of the layer that it stands in
        tp_group = groups[name] = group if group is not None else getattr(child, "tp_group", None) or around
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
                    f"a parameter of {type(child).__name__} is marked sequence_parallel but no module "
                    "around it has a tp_group; pass the tensor-parallel group as group="
                )
            buckets.setdefault((tp_group, grad.dtype, grad.device), []).append(grad)
    for (tp_group, _, _), grads in buckets.items():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        collective("sequence-parallel gradients", flat, tp_group, partial(dist.all_reduce, flat, group=tp_group))
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
    return len(seen)
