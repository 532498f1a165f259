"""The state of delayed scaling: amax histories and scales, and the one place that updates them.

A ScaleState belongs to one module and direction; states that are updated together (same group, formula and device)
lie side by side in a Pool, so that an update is one all-reduce and one kernel for all modules. An update replaces the
pool's scale tensor and never writes to the old one: a scale taken by a forward stays what it was.

Pools belong to the thread that runs the forwards, so that no thread takes a step of what another is recording. Backward
may run on any thread: it steps the pools that its pass was opened with.

A CUDA graph reads scales and writes histories where they lay when it was captured. From then on their pool is fixed,
for good: it takes no more states, an update writes to the scales where they are, each use takes a copy of its scale.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.delayed import FP32_MAX, delayed_update
from te_lite.ops.recorder import OPEN, WANTED, Recorder, Recording
from te_lite.ops.recording import Moved, NotNow
from te_lite.ops.registry import capturing, makes_data, unwatched
from te_lite.quantize import graph_scales, replay
from te_lite.watch import all_reduce_max


class PoolKey(NamedTuple):
    """What states must have in common to be updated together. fp8_max includes the margin: fp8_max * 2^-margin."""

    direction: str  # "forward" or "backward"; "none": of tensors without data (meta, fake), which take no steps
    length: int
    fp8_max: float
    algorithm: str
    group: dist.ProcessGroup | None  # None: no reduction
    device: torch.device
    owner: Pools


class ScaleState:
    """Amax history [length, n] (row 0: the current step) and scales [n] of one module in one direction."""

    def __init__(self, key: PoolKey, n: int, like: ScaleState | None = None) -> None:
        if capturing():
            raise RuntimeError(
                "delayed scaling has no scales yet for this module, recipe and group, and the capture of a CUDA graph "
                "cannot make them; run the module once before the capture"
            )
        self.key, self.n = key, n
        with torch.inference_mode(False):  # training may follow an evaluation that made the state
            self.history = torch.zeros(key.length, n, dtype=torch.float32, device=key.device)
            self._scale = torch.ones(n, dtype=torch.float32, device=key.device)
        self.offset: int | None = None  # among the pool's columns, once they hold this state's
        self.sizes, self.place = [n], 0  # place: among the states there; else as of a pool of this one
        self._amax: list[Tensor] | None = None
        self.join()
        if like is not None:
            with like.key.owner.lock:  # its thread may be at an update that moves it
                self.load(like.history, like.scale, like.key.fp8_max)

    def join(self) -> None:
        """The pool for states like this one, which takes it up at the next update."""
        owner = self.key.owner
        with owner.lock:
            # A pool keeps its group, and is dropped by an update only where it was used before.
            owner.pools = [pool for pool in owner.pools if pool.fixed or len(pool.members)]
            free = (pool for pool in owner.pools if pool.key == self.key and not pool.fixed)
            self.pool = next(free, None) or Pool(self.key)
            self.pool.members[self], self.pool.merged = None, 0
        graph_scales.changed()

    def fix(self) -> None:
        """Before a CUDA graph captures a use."""
        if self.offset is None:  # evaluated only: no update has put it beside others
            Pool(self.key).hold([self], self.history, self._scale)
        self.pool.fix()

    @property
    def scale(self) -> Tensor:
        return self._scale if self.offset is None else self.pool.scale[self.offset : self.offset + self.n]

    def scale_at(self, slot: int) -> Tensor:
        """fp32, one element: the scale of `slot`, never written to again (if taken before a capture fixed its pool: by
        any later update)."""
        if self.offset is None:
            return self._scale[slot]
        return self.pool.steady()[self.offset + slot]

    def take(self, slot: int) -> tuple[Tensor, Tensor | None]:
        """For one use: (scale_at(slot), or in forward what the first run took when a checkpointed call is recomputed;
        amax_at(slot))."""
        if replay.OPEN.frames or self.offset is None or self.pool.fixed:
            forward = self.key.direction == "forward"
            scale = replay.recall(("scale", slot), lambda: self.scale_at(slot)) if forward else self.scale_at(slot)
            return scale, self.amax_at(slot)
        pool = self.pool
        pool.touched = True
        if OPEN.recorder is not None:
            OPEN.recorder.fetched(ScaleFetch(self, pool, self.offset), (pool.scale, self.history))
        return pool.scale[self.offset + slot], (self._amax or self._amaxes())[slot]

    def amax_at(self, slot: int) -> Tensor | None:
        """fp32 [1] to take the maximum into; None while a checkpointed call is recomputed (it was recorded already)."""
        if replay.replaying():
            return None
        self.pool.touched = True
        return (self._amax or self._amaxes())[slot]

    def _amaxes(self) -> list[Tensor]:
        self._amax = [self.history[0, i : i + 1] for i in range(self.n)]
        return self._amax

    @torch.inference_mode(False)
    def load(self, history: Tensor, scale: Tensor, fp8_max: float) -> None:
        """Takes over a history of any length (row 0 and the newest rows that fit) and scales made for `fp8_max`."""
        rows = min(history.shape[0], self.key.length) - 1
        self.history.zero_()
        self.history[0].copy_(history[0])
        if rows:
            self.history[-rows:].copy_(history[-rows:])
        self._scale = torch.empty_like(self._scale).copy_(scale)
        if fp8_max != self.key.fp8_max:  # another format or margin; a scale that was never set stays 1
            changed = (self._scale * (self.key.fp8_max / fp8_max)).clamp(torch.finfo(torch.float32).tiny, FP32_MAX)
            self._scale = torch.where(self._scale == 1, 1.0, changed)
        if self.pool.fixed:
            self.scale.copy_(self._scale)
        elif self.offset is not None:
            self.history = self.history.clone()
            self.offset, self.place, self._amax, self.pool.merged = None, 0, None, 0
        graph_scales.changed()


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


class Pool:
    """States that are updated together, side by side: history [length, total], scale [total]."""

    def __init__(self, key: PoolKey) -> None:
        self.key = key
        self.scale = self._history = torch.empty(0)
        self.touched = False  # a member was used since the last update
        self.merged = 0  # so many members lie in `scale` and `_history`
        self.sizes: list[int] = []  # of the states that lie there
        self.fixed = False
        self.copy: Tensor | None = None  # of `scale`, in Pools.recording()
        self.members: weakref.WeakKeyDictionary[ScaleState, None] = weakref.WeakKeyDictionary()  # in order
        self._stepping = threading.Lock()  # two threads may run backwards of one thread's forwards
        self._launch: Recording | int = 0  # of _launch_step(), or how often recording it was tried
        key.owner.pools.append(self)

    def fix(self) -> None:
        """From now on all tensors stay where they are; members that lie elsewhere yet go to another pool."""
        self.fixed, self._launch = True, 0
        _fixed.add(self)
        with self.key.owner.lock:
            for state in list(self.members):
                if state.offset is None:
                    state.join()

    def steady(self) -> Tensor:
        """`scale`, or a copy: no update will write to it. Where none may come, one copy does: it is a kernel."""
        if not self.fixed:
            return self.scale
        copy = self.scale.clone() if self.copy is None else self.copy
        self.copy = copy if self.key.owner.one_graph else None
        return copy

    def hold(self, states: list[ScaleState], history: Tensor, scale: Tensor) -> None:
        """history[length, total], scale[total] are those of the states, side by side, from now on."""
        self.scale, self._history, self._launch, self.merged, offset = scale, history, 0, len(states), 0
        self.sizes = [state.n for state in states]
        for place, state in enumerate(states):
            state.pool.members.pop(state, None)
            self.members[state] = None
            state.pool, state.history, state._amax = self, history[:, offset : offset + state.n], None
            state.place, state.offset, offset = place, offset, offset + state.n
        graph_scales.changed()

    def update(self) -> None:
        """One step of every member: reduce row 0 over the group, roll the histories, compute new scales. None under a
        FakeTensorMode, where fake scales would take the place of real ones."""
        alone = unwatched()
        if not (alone or makes_data(self.key.device)):
            return
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # training may follow
                return self.update()
        with self._stepping:  # and not under the owner's lock, for ranks wait for each other below
            if not (self.fixed or 0 < self.merged == len(self.members)):
                owner = self.key.owner
                with owner.lock:
                    states = list(self.members)
                    if not states:
                        owner.pools = [pool for pool in owner.pools if pool is not self]
                        return
                    history = torch.cat([state.history for state in states], dim=1)
                    self.hold(states, history, torch.cat([state.scale for state in states]))
            self.touched = False
            if self.key.group is not None:
                what = f"amaxes of {self.key.direction} for delayed scaling"
                all_reduce_max(what, self._history[0], self.key.group)
            known: Any = self._launch
            given, here = (self._history, self.scale), WANTED and alone and self.scale.is_cuda
            here = here and self.key.device.index == torch._C._cuda_getDevice()
            if known.__class__ is Recording and here:
                (self.scale,) = known.run(given)
            elif here and known < 2:  # the first run compiles
                recorder = Recorder(given)
                (self.scale,) = made = recorder.run(self._launch_step)
                self._launch = recorder.finish(made) or known + 1
            else:
                (self.scale,) = self._launch_step()

    def _launch_step(self) -> list[Tensor]:
        scale = self.scale if self.fixed else torch.empty_like(self.scale)
        delayed_update(self._history, self.scale, self.key.fp8_max, self.key.algorithm, scale)
        return [scale]


class Pools:
    """The pools of the modules that one thread runs forward, and when they take a step of their backward scales."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.thread = threading.current_thread()
        self.lock = threading.RLock()  # of the list, and of what lies in which pool
        self.held = self.one_graph = False  # in recording()
        self._pending = False  # a module ran backward and its pass' first one did not, since the last step
        self._end: Callable[[], Any] = lambda: None  # a weak reference: the engine drops what it queued, on errors
        self.followed: graph_scales.Followed | None = None  # by the newest outermost autocast
        self.maxima: graph_scales.Maxima | None = None
        _owners.add(self)

    def update(self, direction: str) -> None:
        """Updates the pools of `direction` that were used since their last update, in the order in which they were
        made; in a capture, of these only the fixed ones.

        A pool's group must use it alike on all of its ranks; ranks outside of the group need not take part.
        """
        if graph_scales.active and not (self.held or capturing()):
            graph_scales.collect(self, direction)
        for pool in () if self.held else self.pools:  # the list is never cut, but replaced
            if pool.touched and pool.key.direction == direction and (pool.fixed or not capturing()):
                pool.update()

    def step_taken(self) -> None:
        """The step of backward scales that have come from another thread with the maxima of their last backward. Where
        gradients are off it waits: ranks evaluate as they like, and a step may need all of them."""
        for pool in self.pools if torch.is_grad_enabled() else ():
            if pool.touched and pool.key.direction == "backward" and not pool.fixed:
                pool.update()

    def close(self, first: bool) -> None:
        """After a module's backward. first: of its pass, which is the last to get here, so that all gradients are known
        and the step is taken; where it gets no backward, the end of backward() takes it."""
        self._pending = not first
        if first:
            self.update("backward")
        else:
            self.expect()

    def expect(self) -> None:
        """In a backward: its end takes the step that may be pending then. In checkpoints' backwards inside of it the
        engine would call too early, so what is recomputed, which comes before them, expects it already."""
        if torch._C._current_graph_task_id() == -1 or self._end() is not None:
            return

        def end() -> None:
            pending, self._pending, self._end = self._pending, False, lambda: None
            if pending:
                self.update("backward")

        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    @contextmanager
    def recording(self, one_graph: bool = True) -> Iterator[list[Pool]]:
        """Inside, amaxes are recorded and no scale takes a step. Gives a list: at the end, of the pools that were used
        inside, which are then as much in need of a step as before. one_graph: one at most is captured inside."""
        before, used = {pool: pool.touched for pool in self.pools}, list[Pool]()
        for pool in before:
            pool.touched = False
        self.held, self.one_graph = True, one_graph
        try:
            yield used
        finally:
            self.held = self.one_graph = False
            used += [pool for pool in self.pools if pool.touched]
            for pool in self.pools:
                pool.touched, pool.copy = before.get(pool, False), None


@torch.inference_mode(False)
def fix_together(states: list[ScaleState]) -> None:
    """Before CUDA graphs capture uses of all of these. Those that no update has put beside others are put beside each
    other, so that one step is one kernel for all of them."""
    alone: dict[PoolKey, list[ScaleState]] = {}
    for state in states:
        if state.offset is None:
            alone.setdefault(state.key, []).append(state)
    for key, members in alone.items():
        touched = any([state.pool.touched for state in members])
        history = torch.cat([state.history for state in members], dim=1)
        Pool(key).hold(members, history, torch.cat([state.scale for state in members]))
        members[0].pool.touched = touched
    for state in states:
        state.fix()


_owners: weakref.WeakSet[Pools] = weakref.WeakSet()
_fixed: set[Pool] = set()  # graphs replay on when thread and modules are gone


def reset() -> None:
    """Forgets all pools; states that still live keep their numbers and are not updated any more."""
    for owner in list(_owners):
        owner.pools, owner.followed, owner.maxima = [], None, None
    _fixed.clear()


atexit.register(reset)  # a pool's key holds a process group, which must not outlive torch.distributed
