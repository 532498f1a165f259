"""Recordings without a GPU: a stand-in for ops/recorder.py that repeats the ops which a body ran, for other tensors.

Whatever a body takes from elsewhere than its inputs, what it allocates and fetch() stays as it was in the run that was
seen, as on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from te_lite.functional import recordings
from te_lite.modules import base
from te_lite.modules.plans import recordings_of
from te_lite.ops import recorder
from te_lite.ops.steps import holds, is_view


def _place(t: Tensor) -> tuple:
    """By which one tensor is known from another as long as both live."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


class Replayed:
    """As Recording. steps: (function, arguments with the slots of tensors in their place); results: slots. fetches:
    asked before anything else is done, each in the place of the step that it is the function of."""

    device = None
    runs = 0

    def __init__(self, steps: list[tuple[Any, Any, Any]], fetches: list[Any], results: list[Any], turns: list[Any]):
        self.steps, self.fetches, self.results, self.turns = steps, fetches, results, turns

    def run(self, inputs: Any) -> list[Tensor]:
        fetched = {fetch: fetch() for fetch in self.fetches}
        self.runs += 1
        slots, epochs = list(inputs), [turns.turn() for turns in self.turns]
        for func, args, kwargs in self.steps:
            args, kwargs = tree_map_only(Slot, partial(Slot.of, slots=slots), (args, kwargs))
            args = tree_map_only(Turn, lambda turn: epochs[turn.index], args)
            out = fetched[func] if func in fetched else func(*args, **kwargs)
            slots += [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        return [slot.of(slots) for slot in self.results]


def described(inputs: tuple[Tensor | None, ...]) -> tuple:
    """As recordings are found, but wherever tensors lie: on the CPU addresses differ modulo 256."""
    at = [None if t is None else t.data_ptr() or i for i, t in enumerate(inputs)]
    return tuple([t if t is None else (t.shape, t.stride(), t.dtype, at.index(at[i])) for i, t in enumerate(inputs)])


class Slot:
    def __init__(self, index: int) -> None:
        self.index = index

    def of(self, slots: list[Any]) -> Any:
        return slots[self.index]


class Turn:
    """The epoch of a turn."""

    def __init__(self, index: int) -> None:
        self.index = index


class OpRecorder(TorchDispatchMode):
    """As Recorder."""

    def __init__(self, inputs: Any, fixed: Any = ()) -> None:
        super().__init__()
        self.calling = False
        self.foreign = False  # something computes with a tensor that it was not given
        self.fixed = [t.untyped_storage() for t in fixed]
        self.turns: list[tuple[Any, int, Tensor]] = []
        self.steps: list[tuple[Any, Any, Any]] = []
        self.slots: list[Any] = list(inputs)  # held, so that no place comes twice
        self.fetches: list[Any] = []
        self.whole: list[Tensor] = []  # what they gave
        self.known = {_place(t): i for i, t in reversed(list(enumerate(self.slots))) if t is not None}

    def run(self, body: Any) -> Any:
        recorder.OPEN.recorder = self  # type: ignore[assignment]
        try:
            with self:
                return body()
        finally:
            recorder.OPEN.recorder = None

    def _add(self, *tensors: Tensor | None) -> None:
        for t in tensors:
            if t is not None:
                self.known[_place(t)] = len(self.slots)
            self.slots.append(t)

    def _slot(self, t: Tensor) -> Any:
        """The tensor itself where it is of nobody's giving or making."""
        index = self.known.get(_place(t))
        return self._view(t) if index is None else Slot(index)

    def _view(self, t: Tensor) -> Any:
        """Of a tensor that lies in what was fetched, as a step: fetched tensors are given whole."""
        at, size = t.data_ptr(), t.element_size()
        found = [g for g in self.whole if g.dtype == t.dtype and holds(g, at)]
        if not found:
            return t
        offset = found[0].storage_offset() + (at - found[0].data_ptr()) // size
        base = self.known[_place(found[0])]
        self.steps.append((torch.as_strided, (Slot(base), t.shape, t.stride(), offset), {}))
        self._add(t)
        return Slot(len(self.slots) - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.calling:
            return func(*args, **(kwargs or {}))
        given = tree_map_only(Tensor, self._slot, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) and not self._is_fixed(t) for t in tree_flatten(given)[0]):
            self.foreign = self.foreign or not is_view(func)
            return out
        self.steps.append((func, *given))
        self._add(*[t for t in tree_flatten(out)[0] if isinstance(t, Tensor)])
        return out

    def _is_fixed(self, t: Tensor) -> bool:
        at = t.data_ptr()
        inside = any(memory.data_ptr() <= at < memory.data_ptr() + memory.nbytes() for memory in self.fixed)
        return inside and not any(slot is not None and holds(slot, at) for slot in self.slots)

    def refuse(self, why: str) -> None:
        self.foreign = True

    def turn(self, turns: Any, epoch: int, word: Tensor) -> None:
        self.turns.append((turns, epoch, word))

    def issue(
        self, executor: Any, program: Any, segment: int, epoch: int, word: Tensor, count: int, tensors: Any, use: object
    ) -> None:  # fmt: skip
        found = [i for i, (_, given, its) in enumerate(self.turns) if given == epoch and its is word]
        if not found:  # the use of a verb, which ends in this body
            self.foreign = True
            return
        turn = Turn(found[0])
        slots = [self._slot(t) for t in tensors]
        self.foreign = self.foreign or any(isinstance(slot, Tensor) and not self._is_fixed(slot) for slot in slots)

        def issued(epoch: int, *tensors: Tensor) -> tuple:
            addresses = [t.data_ptr() for t in tensors]
            executor.issue(program, segment, epoch, 0, (*addresses, *[0] * (count - len(addresses))))
            return ()

        self.steps.append((issued, (turn, *slots), {}))

    def announce(self, control: Any, operation: str, value: int) -> None:
        self.steps.append((lambda: control.announce(operation, value) and None, (), {}))

    def call(self, function: Any, tensors: Any) -> None:
        slots = tuple([self._slot(t) for t in tensors])
        self.foreign = self.foreign or not tensors or any(isinstance(slot, Tensor) for slot in slots)
        self.calling = True
        try:
            function(*tensors)
        finally:
            self.calling = False
        self.steps.append((lambda *tensors: (function(*tensors), ())[1], slots, {}))

    def fetched(self, fetch: Any, tensors: tuple[Tensor | None, ...]) -> None:
        if fetch not in self.fetches:
            self.fetches.append(fetch)
            self.steps.append((fetch, (), {}))
            given = [t for t in tensors if t is not None]
            self.whole += given
            self._add(*given)

    def finish(self, results: list[Tensor]) -> Replayed | None:
        slots = [self._slot(t) for t in results]
        turns = [turns for turns, _, _ in self.turns]
        self.slots, self.known, self.turns = [], {}, []
        if self.foreign or any(isinstance(slot, Tensor) for slot in slots):
            return None
        return Replayed(self.steps, self.fetches, slots, turns)


def record_on_cpu(monkeypatch: Any) -> None:
    """From now on modules record on the CPU too."""
    build = base.build_plans

    def build_recorded(*args: Any) -> Any:
        plans = build(*args)
        if all(plan.recordable for plan in plans):
            plans[0].recordings = recordings_of(plans, args[3])
        return plans

    monkeypatch.setattr(base, "build_plans", build_recorded)
    monkeypatch.setattr(recordings, "described", described)
    monkeypatch.setattr(recordings, "Recorder", OpRecorder)
    monkeypatch.setattr(recordings, "on_one_gpu", lambda inputs: True)
    monkeypatch.setattr(recordings, "room", lambda: 1 << 40)
    monkeypatch.setattr(recordings, "allocated", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
