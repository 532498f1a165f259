"""Bodies of forward and backward on a GPU, recorded where the host takes longer than the device (ops/recorder.py).

A body is Layer.forward or Layer.backward for one call. Its first run is an ordinary one. The next ones are recorded,
until that works, five at most. Later ones are replayed: their launches alone are issued. Where what a replay fetches
has moved, the recording is dropped, and the body counts as run once.

Between ranks a replay takes the turns that the body took, announces what it announced and issues the same programs:
the other ranks cannot tell it from the body.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite import epoch
from te_lite._C import described
from te_lite.functional.saved import Item, Specs, flatten
from te_lite.ops.gemm import reduces_low
from te_lite.ops.memory import allocated, room
from te_lite.ops.recorder import Recorder
from te_lite.ops.recording import Moved, NotNow, Recording
from te_lite.ops.registry import capturing, unwatched
from te_lite.overlap.exchange import Outcome, Place
from te_lite.overlap.group import Group
from te_lite.quantize.replay import OPEN as CHECKPOINTS

MOST_FLOPS = 1 << 37  # of one product; an estimate of where a layer takes the device longer than the host
MOST_FLOPS_BETWEEN_RANKS = 1 << 41  # an exchange takes the host several times as long as the product that hides it
_NUMBERS = itertools.count()
_UNSEEN = Outcome("", 0)  # in place of a note while a body is recorded
_MOST_KEYS = 256  # of one module; each token count makes some
_MOST_RUNS = 6  # before a body is given up; the first ones compile what later ones find, some only after a pass


class Flattened(NamedTuple):
    """What a body gives, as flatten() has it. spec_id: equal numbers, equal specs; None: not known."""

    tensors: list[Tensor]
    specs: Specs
    spec_id: int | None = None


class Known(NamedTuple):
    """A recorded body. specs, spec_id: of its results. notes: what it puts into the report of exchanges."""

    recording: Recording
    specs: Specs
    spec_id: int | None
    notes: list[tuple[Place, Outcome | None]]


class Recordings:
    """The recordings of one module, by all that its launches follow from.

    largest_weight: its elements. places: of its exchanges. group: the userbuffers of their ranks, also where the module
    moves its tokens without them."""

    def __init__(self, largest_weight: int, places: Sequence[Place] = (), group: Group | None = None) -> None:
        self._known: dict[tuple, Known | int] = {}  # the int: so many runs gave no recording
        self._spec_ids: dict[tuple, int] = {}
        self._asks: dict[tuple, int] = {}  # bytes that the first run has allocated, those given back included
        self._places, self._group, self._epoch = places, group, epoch.number
        most = MOST_FLOPS_BETWEEN_RANKS if places else MOST_FLOPS
        self._most_tokens = most // (2 * max(1, largest_weight))

    def try_replay(self, decided: tuple, inputs: tuple[Tensor | None, ...]) -> tuple[tuple | None, Flattened | None]:
        """Replays the body where it is recorded. (key, results): it was. (key, None): it must run, by run(key, ...).
        (None, None): it must run by itself.

        decided: all that the body depends on beside shapes, dtypes and addresses of `inputs`. inputs: all tensors that
        it reads or writes. The first is [..., features] of all tokens."""
        # In a checkpoint the scales come from its first run, not from where a recording fetches them.
        # And what collectives are announced to is what there was when they were recorded.
        if not unwatched() or CHECKPOINTS.frames or self._epoch != epoch.number:
            return None, None
        key: tuple = decided, reduces_low(), described(inputs)
        group = self._group
        if group is not None:
            if capturing():
                return None, None
            key += (group.next_slots(),)
        known: Any = self._known.get(key, 0)
        if known.__class__ is int:
            first: Any = inputs[0]  # the host does not hold up large layers
            wanted = known < _MOST_RUNS and first.numel() <= first.shape[-1] * self._most_tokens
            return key if wanted else None, None
        if torch._C._cuda_getDevice() != known.recording.device:
            return None, None
        try:
            results = known.recording.run(inputs)
        except NotNow:
            return None, None
        except Moved:
            self._known[key] = 1
            return key, None
        except BaseException as error:
            if group is not None:
                labels = dict.fromkeys(place.label or "a linear without overlap" for place in self._places)
                group.failed(f"a recorded pass over {', '.join(labels)}", error)
            raise
        for place, note in known.notes:
            place.note = note
        return key, Flattened(results, known.specs, known.spec_id)

    def run(self, key: tuple, inputs: Sequence[Tensor | None], body: Callable[[], Sequence[Item]]) -> Flattened:
        """body(), for which try_replay() gave `key`. All runs under a key but the first are recorded, if that works."""
        runs: Any = self._known.get(key, 0)  # since try_replay() another thread may have recorded it
        if not on_one_gpu(inputs) or capturing() or runs.__class__ is not int:
            return self._flattened(body())
        if len(self._known) >= _MOST_KEYS:
            for kept in (self._known, self._spec_ids, self._asks):
                kept.clear()
        self._known[key] = runs + 1
        if not runs:
            before = allocated()
            taken = self._flattened(body())
            self._asks[key] = allocated() - before
            return taken
        if 2 * self._asks.get(key, 0) > room():  # a recorder holds all that the body allocates until it has ended
            return self._flattened(body())
        old = [place.note for place in self._places]
        for place in self._places:
            place.note = _UNSEEN
        recorder = Recorder(inputs, () if self._group is None else self._group.fixed())
        try:
            taken = self._flattened(recorder.run(body))
            notes = [(place, place.note) for place in self._places if place.note is not _UNSEEN]
        finally:
            for place, note in zip(self._places, old, strict=True):
                place.note = note if place.note is _UNSEEN else place.note
        recording = recorder.finish(taken.tensors)
        if recording is not None:
            self._known[key] = Known(recording, taken.specs, taken.spec_id, notes)
        return taken

    def _flattened(self, items: Iterable[Item]) -> Flattened:
        tensors, specs = flatten(items)
        # Numbers do not come again: a backward may ask by one that is not kept any more.
        return Flattened(tensors, specs, self._spec_ids.setdefault(tuple(specs), next(_NUMBERS)))


def on_one_gpu(inputs: Sequence[Tensor | None]) -> bool:
    """Whether all of them lie on the current GPU."""
    current = torch.cuda.current_device()
    return all(t is None or (t.is_cuda and t.device.index == current) for t in inputs)
