"""Memory of a checkpointed call: what its first run decided is decided the same way when it runs again.

A recomputed forward must use the scales of the first run, record no amax a second time and claim the same place in the
pass. These belong to the call, not to the modules, so any number of calls may be open at once, nested or out of order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Open(threading.local):
    """The checkpointed calls that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []


_open = _Open()


class Frame:
    """One checkpointed call: values noted in its first run, handed out again in order in every later one."""

    def __init__(self) -> None:
        self._values: list[tuple[Any, Any]] = []
        self._cursor = 0
        self._making = False
        self.replaying = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around each run of the call's function; the first records, later ones replay."""
        self._cursor = 0
        _open.frames.append(self)
        try:
            yield
        finally:
            _open.frames.remove(self)
            self.replaying = True

    def recall(self, key: Any, make: Callable[[], Any], depth: int) -> Any:
        if self._making:  # part of a value that is being noted as a whole
            return make()
        if self.replaying:
            noted, value = self._values[self._cursor] if self._cursor < len(self._values) else (None, None)
            if noted != key:
                raise RuntimeError(
                    f"recomputation of a checkpointed call asks for {key} where its first run noted {noted}: the "
                    "function took another path the second time; make it deterministic"
                )
            self._cursor += 1
            return value
        self._making = True
        try:
            value = recall(key, make, depth - 1)
        finally:
            self._making = False
        self._values.append((key, value))
        return value


def recall(key: Any, make: Callable[[], Any], depth: int | None = None) -> Any:
    """make() in the first run of a checkpointed call, or outside of any; the same value again when it is recomputed.

    key: what the value is, to notice a recomputation that takes another path. depth: the innermost call that is asked,
    which asks those around it; by default the innermost that is open.
    """
    depth = len(_open.frames) - 1 if depth is None else depth
    return make() if depth < 0 else _open.frames[depth].recall(key, make, depth)


def is_open() -> bool:
    """True inside a checkpointed call."""
    return bool(_open.frames)


def replaying() -> bool:
    """True while a checkpointed call is computed again."""
    return any(frame.replaying for frame in _open.frames)


def in_foreign_recomputation() -> bool:
    """True when a forward runs inside a backward pass and no Frame of ours is open: another library recomputes it."""
    return not _open.frames and torch._C._current_graph_task_id() != -1
