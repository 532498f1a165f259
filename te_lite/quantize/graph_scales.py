"""Delayed scaling under torch.compile: the tensors that compiled code sees, and how they follow the pools.

Compiled code runs no Python, so it cannot ask a pool for a scale, nor say that it was used. It reads scales[n] and
takes maxima into amaxes[n], in place; both are a module's own and found again under the same names. Plain Python around
it does the rest, for all modules of the process: the outermost autocast brings their scales up to date where it begins,
and the forward maxima into the histories where it ends. Backward maxima get there, and backward scales take their step,
where the next one begins, or where somebody asks for the state. A step without maxima changes nothing.

This goes through all modules at each step. What is the same at the next step is worked out once and kept in the Pools:
Followed for the scales, Maxima for the maxima. changed() makes both stale, for all threads.

Threads that run forwards each see their own modules: a module belongs to the thread whose autocast it ran under last.
Another thread may take it over where code is compiled for it there, or where that thread has ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_lite.ops.registry import makes_data

if TYPE_CHECKING:
    from te_lite.quantize.delayed import Pools, ScaleState

active = False  # code was compiled under delayed scaling: from then on autocasts come here
_all: weakref.WeakSet[GraphScales] = weakref.WeakSet()
_lock = threading.Lock()  # of _all: a thread may add to it while another goes through it
LIVE = threading.RLock()  # of which states modules have
_now = object()  # another one after each change
_written: Any = object()  # another one after each change of which tensors the scales are written to
_uses: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
_CPU = torch.device("cpu")


def changed() -> None:
    """To be called after a change of which modules there are, which states they have, or where these lie."""
    global _now
    _now = object()


class Here(threading.local):
    """What holds in this thread. ready: of one module, that its scales are those of an autocast like the newest one
    here. brought: of all, weakly, the Followed that did it last."""

    def __init__(self) -> None:
        self.ready = False  # no default of the class, which torch 2.11's tracing would take for the value
        self.brought: Callable[[], Any] = type(None)


_here = Here()


def _awaits_backward(amaxes: Any) -> bool:
    """Whether a graph holds it. Python holds a tensor once, however often."""
    return _uses(amaxes) > 1


class InGraph:
    """A ScaleState as quantizers use it, of tensors that a graph has."""

    def __init__(self, scales: Tensor, amaxes: Tensor) -> None:
        self.scales, self.amaxes = scales, amaxes

    def take(self, slot: int) -> tuple[Tensor, Tensor]:
        """(scale, where the maximum goes), of one use."""
        return self.scales[slot], self.amaxes[slot : slot + 1]


class GraphScales:
    """What compiled code has of a module's ScaleStates, fp32 [n] each.

    user: the State of the newest autocast that the module may have run under; None: of none. here.ready: the scales are
    those of an autocast like it. They are not where eager mode has states of another recipe or thread, which stay as
    they are as long as nothing is compiled for the module.
    """

    forward_scales: Tensor
    forward_amaxes: Tensor
    backward_scales: Tensor
    backward_amaxes: Tensor

    def __init__(self, states: Any, device: torch.device) -> None:
        """states: ScaleStates, see modules/scale_state.py."""
        self.states, self.device, self.here = states, device, Here()
        self.compiled = False  # for this very module; another may run what was compiled for one that is like it
        self.user: Any = None
        self.states_now: tuple[ScaleState, ...] = ()  # of `user`: forward, backward
        self._held: list[Tensor] = []  # backward amaxes of earlier passes, which a graph may yet write to
        with torch.inference_mode(False):  # training may follow
            sizes = states.sizes.values()  # forward, backward
            amaxes = [torch.zeros(n, dtype=torch.float32, device=device) for n in sizes]
        self.forward_amaxes, self.backward_amaxes = amaxes
        self.make_scales()
        with _lock:
            _all.add(self)
        changed()

    def has_data(self) -> bool:
        """Now, and where it was made."""
        return makes_data(self.device) and type(self.forward_amaxes) is Tensor

    def follow(self, user: Any, using: bool) -> bool:
        """Whether states_now are from now on those under `user`, a State. using: code for it is being compiled."""
        pools, before, states = user.one_pass.pools, self.user, self.states
        theirs = None if before is None else before.one_pass.pools
        mine = theirs is pools
        self.compiled = self.compiled or using
        if mine and before.recipe == user.recipe and before.group is user.group and states.holds(self.states_now):
            return True
        takes = self.compiled and not states.fixed() and (mine or (theirs is not None and not theirs.thread.is_alive()))
        waits = (using or takes) and self.hand_over(pools)
        asked = [(user.recipe, user.group, self.device, pools, direction) for direction in states.sizes]
        with LIVE:
            if not (using or takes or all([states.fits(*given) for given in asked])):
                return False
            self.states_now = tuple([states.state(*given) for given in asked])
            self.user = user
        if waits:
            self.states_now[1].pool.touched = True
        changed()
        return True

    @torch.inference_mode(False)  # training may follow
    def make_scales(self) -> None:
        """In memory that begins where graphs that were compiled for another module expect it."""
        global _written
        made = [torch.ones(n, dtype=torch.float32, device=self.device) for n in self.states.sizes.values()]
        self.forward_scales, self.backward_scales = made
        storages = [one.untyped_storage()._cdata for one in made]
        # Of each tensor, its storage, and how often that is used as long as no graph holds the tensor or a view of it.
        self.unheld = list(zip(made, storages, map(torch._C._storage_Use_Count, storages), strict=True))
        _written = object()

    def left(self) -> Tensor:
        """All maxima that compiled code has left for backward. The caller reads and clears them."""
        now, held = self.backward_amaxes, self._held
        if held or _awaits_backward(now):
            self._held = [amaxes for amaxes in (now, *held) if _awaits_backward(amaxes)]
            if _awaits_backward(now):
                with torch.inference_mode(False):
                    self.backward_amaxes = torch.zeros_like(now)
            for amaxes in [amaxes.data for amaxes in held]:
                torch.maximum(now.data, amaxes, out=now.data)
                amaxes.zero_()
        return now.data  # not `now`: a backward that comes later finds what it saved

    @torch.inference_mode(False)  # training may follow
    def hand_over(self, to: Pools) -> bool:
        """Before the states go on in these pools, if they are others: their histories take what compiled code has left.
        Whether backward scales then wait for a step, which the pools that they leave would have given them."""
        there = self.user is None or self.user.one_pass.pools is to
        if there or self.states.fixed() or not self.states.holds(self.states_now):
            return False
        forward, backward = self.forward_amaxes.data, self.left()
        waits = bool(backward.any())
        for state, maxima in zip(self.states_now, (forward, backward), strict=True):
            torch.maximum(state.history[0], maxima, out=state.history[0])
            maxima.zero_()
        return waits

    def settle(self) -> None:
        """Before somebody reads the state: what compiled code has left, and the step of the backward scales."""
        if self.user is not None:
            self.user.one_pass.pools.update("backward")
            collect(self.user.one_pass.pools, "forward")


class Followed:
    """The modules that follow an autocast and those that do not, and where the scales lie. It holds for later autocasts
    that are like it. Keeps no module alive."""

    def __init__(self, user: Any, those: list[GraphScales], using: bool = False) -> None:
        """user: the autocast's State. using: code is being compiled for those under it."""
        self.user, self._since, self._laid_out = user, _now, object()
        self._gathered: Any = None
        asked = [(weakref.ref(one), one.follow(user, using)) for one in those if one.has_data()]
        self._ready, self._others = [ref for ref, yes in asked if yes], [ref for ref, yes in asked if not yes]

    def fits(self, user: Any) -> bool:
        """Whether Followed(user, all modules) would be the same."""
        mine = self.user
        return self._since is _now and mine.recipe == user.recipe and mine.group is user.group

    def _lay_out(self) -> None:
        """Sources are pools, and states that lie in none yet. Each has a copy, split into parts, for a pool's next step
        gives it another tensor."""
        self._laid_out, first, places = _now, dict[Any, int](), list[int]()
        self._sources, self._parts = list[tuple[Any, Tensor]](), list[Tensor]()
        those = [one for ref in self._ready if (one := ref()) is not None]
        for state in [state for one in those for state in one.states_now]:
            source = state if state.offset is None else state.pool
            if source not in first:
                first[source] = len(self._parts)
                self._sources.append((source, torch.empty_like(source.scale)))
                self._parts += self._sources[-1][1].split(source.sizes)
            places.append(first[source] + state.place)
        self._places = list(zip(map(weakref.ref, those), places[::2], places[1::2], strict=True))
        self._gathered = None

    def _gather(self) -> None:
        """The tensors to write to, and for each what is written there."""
        those = [(one, parts) for ref, *parts in self._places if (one := ref()) is not None]
        self._gathered, unheld = _written, [item for one, _ in those for item in one.unheld]
        self._to = [tensor for tensor, *_ in unheld]
        self._storages, self._unheld = [storage for _, storage, _ in unheld], [uses for *_, uses in unheld]
        self._from = [self._parts[i] for _, parts in those for i in parts]

    def _let_go(self) -> None:
        """What a graph holds stays what it was: other tensors take the place of those."""
        for one in [one for ref, *_ in self._places if (one := ref()) is not None]:
            if any([_uses(t) > 1 or torch._C._storage_Use_Count(at) > uses for t, at, uses in one.unheld]):
                one.make_scales()

    @torch.inference_mode(False)  # training may follow
    def bring(self) -> None:
        """Writes the scales of now to those of the modules."""
        with self.user.one_pass.pools.lock:  # another thread's update may move states
            if self._laid_out is not _now:
                self._lay_out()
            for source, copy in self._sources:
                copy.copy_(source.scale)
        if self._gathered is not _written:
            self._gather()
        # map: no calls of Python's own, for a process may have hundreds of modules.
        uses = [*map(torch._C._storage_Use_Count, self._storages)]
        if uses != self._unheld or max(map(_uses, self._to), default=1) > 1:
            self._let_go()
            self._gather()
        if self._to:
            torch._foreach_copy_(self._to, self._from)
        if _here.brought() is not self:
            _here.brought = weakref.ref(self)
            for refs, ready in ((self._ready, True), (self._others, False)):
                for one in [one for ref in refs if (one := ref()) is not None]:
                    one.here.ready = ready


class Maxima:
    """Where compiled code leaves maxima for these pools, and the rows of the histories that take them. Keeps no module
    and no state alive."""

    @torch.inference_mode(False)  # training may follow
    def __init__(self, pools: Pools) -> None:
        self.since = _now
        those = [one for one in _known() if one.user is not None and one.user.one_pass.pools is pools]
        self._those, self._forward = list(map(weakref.ref, those)), [one.forward_amaxes.data for one in those]
        states = {"forward": [one.states_now[0] for one in those], "backward": [one.states_now[1] for one in those]}
        self._pools = {way: {state.pool for state in found} for way, found in states.items()}
        self._rows = {way: [state.history[0] for state in found] for way, found in states.items()}

    def collect(self, direction: str) -> None:
        """Takes what is there now, and leaves zeros."""
        rows, maxima = self._rows[direction], self._forward
        if direction == "backward":
            alive = [(row, one) for row, ref in zip(rows, self._those, strict=True) if (one := ref()) is not None]
            rows, maxima = [row for row, _ in alive], [one.left() for _, one in alive]
        for pool in self._pools[direction]:
            pool.touched = True
        if rows:
            torch._foreach_maximum_(rows, maxima)
            torch._foreach_zero_(maxima)


def compiling(scales: GraphScales, user: Any) -> None:
    """Code that uses `scales` is being compiled under `user`, a State of delayed scaling."""
    global active
    if not active:
        active = True
        Followed(user, _known()).bring()
    followed = Followed(user, [scales], using=True)
    user.one_pass.pools.step_taken()
    followed.bring()
    changed()


def begin(user: Any) -> None:
    """An outermost autocast of delayed scaling begins: `user` is its State."""
    pools = user.one_pass.pools
    pools.update("backward")
    if makes_data(_CPU):  # no FakeTensorMode is open
        if pools.followed is None or not pools.followed.fits(user):
            pools.followed = Followed(user, _known())
            pools.step_taken()
        pools.followed.bring()


def collect(pools: Pools, direction: str) -> None:
    """Brings the maxima that compiled code has left into the histories of these pools."""
    if makes_data(_CPU):
        with pools.lock:  # another thread's update may move states
            if pools.maxima is None or pools.maxima.since is not _now:
                pools.maxima = Maxima(pools)
            pools.maxima.collect(direction)


def _known() -> list[GraphScales]:
    with _lock:
        return list(_all)
