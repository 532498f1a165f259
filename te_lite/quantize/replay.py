"""Memory of a checkpointed call: what its first run decided is decided the same way when it runs again.

A recomputed forward must use the scales of the first run, record no amax a second time and claim the same place in the
pass. These belong to the call, not to the modules, so any number of calls may be open at once, nested or out of order.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx


class Open(threading.local):
    """The checkpointed calls that this thread is in, outermost first. Where there is none, recall() is make()."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []


OPEN = Open()


class Frame:
    """One checkpointed call: values noted in its first run, handed out again in order in every later one."""

    def __init__(self) -> None:
        self._values: list[tuple[Any, Any]] = []
        self._cursor = 0
        self._making = False
        self.replaying = False
        self.grad = torch.is_grad_enabled()  # a backward may follow
        self.alone = False  # reentrant, and in no autograd.Function of others: it lives as long as its own

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around each run of the call's function; the first records, later ones replay."""
        self._cursor = 0
        OPEN.frames.append(self)
        try:
            yield
        finally:
            OPEN.frames.remove(self)
            self.replaying = True

    def recall(self, key: Any, make: Callable[[], Any]) -> Any:
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
            value = make()
        finally:
            self._making = False
        self._values.append((key, value))
        return value


def recall(key: Any, make: Callable[[], Any]) -> Any:
    """make() in the first run of a checkpointed call, or outside of any; the same value again when it is recomputed.

    key: what the value is, to notice a recomputation that takes another path. The innermost open call asks the ones
    around it.
    """
    for frame in OPEN.frames:
        make = partial(frame.recall, key, make)
    return make()


def is_open() -> bool:
    """True inside a checkpointed call that a backward may follow."""
    return any(frame.grad for frame in OPEN.frames)


def replaying() -> bool:
    """True while a checkpointed call is computed again."""
    return bool(OPEN.frames) and any(frame.replaying for frame in OPEN.frames)


def may_repeat() -> bool:
    """Whether what runs now may be computed again, or is: in a checkpoint of ours, or in a backward."""
    return torch._C._current_graph_task_id() != -1 or bool(OPEN.frames)


class Note:
    """What the calls of one module followed under one autocast.

    It lives as long as one of them may be computed again. It is held by the call's own node in the graph (by its Call),
    by the node of each autograd.Function in whose forward the call ran, as in a reentrant checkpoint's, and by the hook
    of torch's other checkpoint."""

    def __init__(self, state: Any) -> None:
        self.state = state


def _added(states: tuple, state: Any) -> tuple:
    """With `state`, where none has its key; two are enough to know that there are several."""
    known = (state and state.key) in [one and one.key for one in states]
    return states if known else (*states[-1:], state)


def _in_function() -> bool:
    """Inside the forward of an autograd.Function, which turns forward derivatives off."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def _functions() -> Iterator[FunctionCtx]:
    """Those whose forward this thread is in, as the contexts that their backward will be given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",) and isinstance(ctx := frame.f_locals.get("ctx"), FunctionCtx):
            yield ctx
        frame = frame.f_back


def _hold(holder: Any, note: Note) -> None:
    vars(holder).setdefault("te_lite_notes", set()).add(note)


def backward_may_follow() -> bool:
    """Of a call without gradients: whether it runs in an autograd.Function, such as a checkpoint's, that has one."""
    around = list(_functions()) if _in_function() else []
    return any(ctx.next_functions for ctx in around)  # type: ignore[attr-defined]


class Outstanding:
    """What calls of one module followed that another library's checkpoint may compute again, where the autocast around
    their first run is closed: a State, or None."""

    def __init__(self) -> None:
        self._notes: list[weakref.ref[Note]] = []
        self._ever: tuple = ()
        self._unheld: tuple = ()
        self._current: Callable[[], Note | None] = type(None)

    def start(self, state: Any) -> None:
        """From now on calls follow `state`."""
        self._current, self._ever = type(None), _added(self._ever, state)

    def note(self, state: Any, grad: bool) -> Note | None:
        """The Note of a call, for its Call. None where the call wants no gradient, as in an evaluation. grad: gradients
        are enabled."""
        inside = not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
        if not (grad or inside):
            return None
        note = self._current()
        if note is None or (note.state and note.state.key) != (state and state.key):  # the second: another thread's
            note = Note(state)
            self._current = weakref.ref(note)
            self._notes = [ref for ref in self._notes if ref()] + [self._current]
        if not inside:
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if hooks is not None and hooks[1].__module__ == "torch.utils.checkpoint":
                # What unpacks the tensors that torch's checkpoint without reentrance does not keep lives as long as the
                # function may be computed again, whatever becomes of the module's own node.
                _hold(hooks[1], note)
        else:
            alone = [frame for frame in OPEN.frames[:1] if frame.alone and not frame.replaying]
            holders: list[Any] = alone or list(_functions())
            for holder in holders:
                _hold(holder, note)
            if not holders:
                self._unheld = _added(self._unheld, state)  # no graph that is known holds it
        return note

    def states(self) -> tuple:
        """What a call may have followed that is computed again: one state, or nobody can tell. Empty: none was made."""
        if len(self._ever) < 2 or not (torch.is_grad_enabled() or _in_function()):  # no_grad in a function: no Note
            return self._ever
        found = self._unheld
        for note in filter(None, [ref() for ref in self._notes]):
            found = _added(found, note.state)
        return found or self._ever
