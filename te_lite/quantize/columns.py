"""Which states of delayed scaling lie side by side, the same on all ranks that reduce their amaxes.

Python frees a module that is part of a cycle, as one with a hook of its own may be, when it likes: on each rank at
another time. So what is gone keeps its columns until a state joins, and then the ranks agree on which of them go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_lite.ops.recording import Moved, NotNow
from te_lite.parallel import is_destroyed
from te_lite.watch import all_reduce_max

if TYPE_CHECKING:
    from te_lite.quantize.delayed import Pool, PoolKey, ScaleState

Column = tuple[Callable[[], Any], int]  # a state, weakly, and its size
Held = tuple["ScaleState | None", int]  # None: it is gone on this rank


def held(columns: Sequence[Column], key: PoolKey) -> list[Held]:
    """Those of `columns` that are not gone; where there is a group, on all of its ranks. Collective."""
    found = [(state(), n) for state, n in columns]
    alive = [state is not None for state, _ in found]
    if key.group is not None and found:
        flags = torch.tensor(alive, dtype=torch.float32, device=key.device)
        all_reduce_max(f"which modules have {key.direction} scales", flags, key.group)
        alive = flags.bool().tolist()
    return [one for one, keep in zip(found, alive, strict=True) if keep]


def side_by_side(columns: Sequence[Held], key: PoolKey) -> tuple[Tensor, Tensor]:
    """(history [length, total], scale [total]) of these; of what is gone here zeros and ones."""
    like: dict[str, Any] = {"dtype": torch.float32, "device": key.device}
    history = [torch.zeros(key.length, n, **like) if state is None else state.history for state, n in columns]
    scale = [torch.ones(n, **like) if state is None else state.scale for state, n in columns]
    return torch.cat(history, dim=1), torch.cat(scale)


def unused(key: PoolKey, members: int) -> bool:
    """Whether nobody will use a pool of so many states again, as all ranks of its group see it."""
    return not members if key.group is None else is_destroyed(key.group)


@dataclass(frozen=True, slots=True)
class ScaleFetch:
    """What each replay of a body that uses a state asks, once for all slots. pool, offset: where the state lay when the
    body was recorded."""

    state: ScaleState
    pool: Pool
    offset: int

    def __call__(self) -> tuple[Tensor, Tensor]:
        """(scales of the pool, history of the state), whose use is noted. Raises Moved where the state lies elsewhere,
        NotNow where it waits for an update to give it a place, perhaps the same."""
        if self.state.pool is not self.pool or self.state.offset != self.offset:
            raise NotNow if self.state.offset is None else Moved
        self.pool.touched = True
        return self.pool.steady(), self.state.history
