"""Memory of a checkpointed call: what its first run decided is decided the same way when it runs again.

A recomputed forward must use the scales of the first run, record no amax a second time and claim the same place in the
pass. These belong to the call, not to the modules, so any number of calls may be open at once, nested or out of order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_open: list[Frame] = []


class Frame:
    """One checkpointed call: values noted in its first run, handed out again in order in every later one."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._cursor = 0
        self.replaying = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around each run of the call's function; the first records, later ones replay."""
        self._cursor = 0
        _open.append(self)
        try:
            yield
        finally:
            _open.remove(self)
            self.replaying = True

    def recall(self, make: Callable[[], Any], depth: int) -> Any:
        if self.replaying:
            if self._cursor == len(self._values):
                raise RuntimeError(
                    f"recomputation asks for value {self._cursor + 1} of a checkpointed call that noted "
                    f"{self._cursor}: the function took another path the second time; make it deterministic"
                )
            self._cursor += 1
            return self._values[self._cursor - 1]
        value = _recall(make, depth - 1)
        self._values.append(value)
        return value


def _recall(make: Callable[[], Any], depth: int) -> Any:
    return make() if depth < 0 else _open[depth].recall(make, depth)


def recall(make: Callable[[], Any]) -> Any:
    """make() in the first run of a checkpointed call, or outside of any; the same value again when it is recomputed."""
    return make() if not _open else _recall(make, len(_open) - 1)


def is_open() -> bool:
    """True inside a checkpointed call."""
    return bool(_open)


def replaying() -> bool:
    """True while a checkpointed call is computed again."""
    return any(frame.replaying for frame in _open)


def in_foreign_recomputation() -> bool:
    """True when a forward runs inside a backward pass and no Frame of ours is open: another library recomputes it."""
    return not _open and torch._C._current_graph_task_id() != -1
