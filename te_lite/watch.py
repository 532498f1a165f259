"""torch.distributed's collectives as te_lite runs them: where userbuffers exist, no rank waits in one for ever.

gloo waits for a peer that failed, or runs something else, until its process ends, and then names nobody. So the ranks
of userbuffers agree on a collective before it begins. NCCL's are issued and not waited for: what runs is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from te_lite.ops.nvtx import nvtx_range

NAMING_S = 10.0  # how long after a broken connection a rank may still be named: longer than it may show no heartbeat


class Watch(Protocol):
    """What userbuffers know of their ranks. Both raise, on every rank, once one of them has failed."""

    def meet(self, text: str) -> None:
        """Every rank runs `text` next."""

    def check(self) -> None:
        """Nothing, or the error."""


watches: dict[tuple[int, ...], Watch] = {}  # by ranks


def collective(what: str, tensor: Tensor, group: dist.ProcessGroup, run: Callable[[], Any]) -> None:
    """run(), a collective over `group` that moves `tensor`; not for an empty one."""
    if watches:
        members = dist.get_process_group_ranks(group)
        for ranks, watch in watches.items():
            if all(rank in members for rank in ranks):
                watch.meet(f"{what}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
    if not tensor.numel():
        return
    try:
        run()
    except RuntimeError:
        deadline = time.monotonic() + NAMING_S
        while watches and time.monotonic() < deadline:
            for watch in list(watches.values()):
                watch.check()
            time.sleep(0.01)
        raise


def all_reduce_max(what: str, values: Tensor, group: dist.ProcessGroup) -> None:
    """values becomes its elementwise maximum over the group."""
    with nvtx_range("te_lite.amax_all_reduce"):
        collective(what, values, group, partial(dist.all_reduce, values, dist.ReduceOp.MAX, group))
