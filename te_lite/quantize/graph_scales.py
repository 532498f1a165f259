"""Delayed scaling under torch.compile: the tensors that compiled code sees, and how they follow the pools.

Compiled code runs no Python, so it cannot ask a pool for a scale, nor say that it was used. It reads scales[n] and
takes maxima into amaxes[n], in place; both are a module's own and found again under the same names. Plain Python around
it does the rest, for all modules of the process: the outermost autocast brings their scales up to date where it begins,
and the forward maxima into the histories where it ends. Backward maxima get there, and backward scales take their step,
where the next one begins, or where somebody asks for the state. A step without maxima changes nothing.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_lite.ops.registry import makes_data

if TYPE_CHECKING:
    from te_lite.quantize.delayed import Pools, ScaleState

active = False  # code was compiled under delayed scaling: from then on autocasts come here
_all: weakref.WeakSet[GraphScales] = weakref.WeakSet()
_lock = threading.Lock()  # of _all: a thread may add to it while another goes through it


def _awaits_backward(amaxes: Any) -> bool:
    """Whether a graph holds it. Python holds a tensor once, however often."""
    return amaxes._use_count() > 1


class InGraph:
    """A ScaleState as quantizers use it, of tensors that a graph has."""

    def __init__(self, scales: Tensor, amaxes: Tensor) -> None:
        self.scales, self.amaxes = scales, amaxes

    def take(self, slot: int) -> tuple[Tensor, Tensor]:
        """(scale, where the maximum goes), of one use."""
        return self.scales[slot], self.amaxes[slot : slot + 1]


class GraphScales:
    """What compiled code has of a module's ScaleStates, fp32 [n] each.

    user: the State of the newest autocast that the module may have run under; None: of none. ready: the scales are
    those of an autocast like it. They are not where eager mode has states of another recipe or thread, which stay as
    they are as long as nothing is compiled for the module.
    """

    forward_scales: Tensor
    forward_amaxes: Tensor
    backward_scales: Tensor
    backward_amaxes: Tensor

    def __init__(self, states: Any, device: torch.device) -> None:
        """states: ScaleStates, see modules/scale_state.py."""
        self.states, self.device, self.ready = states, device, False
        self.compiled = False  # for this very module; another may run what was compiled for one that is like it
        self.user: Any = None
        self.states_now: tuple[ScaleState, ...] = ()  # of `user`: forward, backward
        self._held: list[Tensor] = []  # backward amaxes of earlier passes, which a graph may yet write to
        with torch.inference_mode(False):  # training may follow
            for direction, n in states.sizes.items():
                setattr(self, f"{direction}_scales", torch.ones(n, dtype=torch.float32, device=device))
                setattr(self, f"{direction}_amaxes", torch.zeros(n, dtype=torch.float32, device=device))
        with _lock:
            _all.add(self)

    def has_data(self) -> bool:
        """Now, and where it was made."""
        return makes_data(self.device) and type(self.forward_amaxes) is Tensor

    def follow(self, user: Any, using: bool) -> bool:
        """Whether states_now are from now on those under `user`, a State. using: code for it is being compiled."""
        pools, before, states = user.one_pass.pools, self.user, self.states
        mine = before is not None and before.one_pass.pools is pools
        same = mine and before.recipe == user.recipe and before.group is user.group and states.holds(self.states_now)
        self.compiled = self.compiled or using
        if same:
            self.ready = True
        else:
            asked = [(user.recipe, user.group, self.device, pools, direction) for direction in states.sizes]
            fits = all([states.fits(*given) for given in asked])
            self.ready = using or fits or (mine and self.compiled and not states.fixed())
            if not self.ready:
                return False
            self.states_now = tuple([states.state(*given) for given in asked])
        self.user = user
        return True

    def left(self, direction: str) -> tuple[ScaleState, list[Tensor]]:
        """(the state, all maxima that compiled code may have left for it)."""
        if direction == "forward":
            return self.states_now[0], [self.forward_amaxes]
        now, held = self.backward_amaxes, self._held
        if held or _awaits_backward(now):
            self._held = [amaxes for amaxes in (now, *held) if _awaits_backward(amaxes)]
            if _awaits_backward(now):
                with torch.inference_mode(False):
                    self.backward_amaxes = torch.zeros_like(now)
        return self.states_now[1], [now, *held]

    def settle(self) -> None:
        """Before somebody reads the state: what compiled code has left, and the step of the backward scales."""
        if self.user is not None:
            self.user.one_pass.pools.update("backward")
            collect(self.user.one_pass.pools, "forward")


def compiling(scales: GraphScales, user: Any) -> None:
    """Code that uses `scales` is being compiled under `user`, a State of delayed scaling."""
    global active
    if not active:
        active = True
        _follow(user, _known())
    _follow(user, [scales], using=True)


def begin(user: Any) -> None:
    """An outermost autocast of delayed scaling begins: `user` is its State."""
    user.one_pass.pools.update("backward")
    _follow(user, _known())


def _follow(user: Any, those: list[GraphScales], using: bool = False) -> None:
    those = [one for one in those if one.has_data() and one.follow(user, using)]
    if not those:
        return
    with torch.inference_mode(False):  # training may follow
        # Copies: what a graph holds stays what it was, and begins where its memory does, which graphs are compiled for.
        scales = torch._foreach_mul([state.scale for one in those for state in one.states_now], 1.0)
    for one, forward, backward in zip(those, scales[::2], scales[1::2], strict=True):
        one.forward_scales, one.backward_scales = forward, backward


def _known() -> list[GraphScales]:
    with _lock:
        return list(_all)


def collect(pools: Pools, direction: str) -> None:
    """Brings the maxima that compiled code has left into the histories of these pools."""
    rows, maxima, read = list[Tensor](), list[Tensor](), list[Tensor]()
    for one in _known():
        if one.user is not None and one.user.one_pass.pools is pools and one.has_data():
            state, left = one.left(direction)
            state.pool.touched = True
            left = [amaxes.data for amaxes in left]  # .data: a backward that comes later finds what it saved
            for amaxes in left[1:]:
                torch.maximum(left[0], amaxes, out=left[0])
            rows.append(state.history[0])
            maxima.append(left[0])
            read += left
    if rows:
        torch._foreach_maximum_(rows, maxima)
        torch._foreach_zero_(read)
