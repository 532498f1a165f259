"""Bodies of forward and backward on a GPU, recorded where the host takes longer than the device (ops/recorder.py).

A body is Layer.forward or Layer.backward for one call. Its first run is an ordinary one, its second is recorded, and
later ones are replayed: their launches alone are issued.

Between ranks a replay takes the turns that the body took, announces what it announced and issues the same programs:
the other ranks cannot tell it from the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_lite._C import described
from te_lite.functional.saved import Item, Shells, taken_apart
from te_lite.ops.gemm import reduces_low
from te_lite.ops.recorder import Recorded, Recorder
from te_lite.ops.registry import capturing, unwatched
from te_lite.overlap.exchange import Note, Place
from te_lite.quantize import replay

MOST_FLOPS = 1 << 37  # of one product; an estimate of where a layer takes the device longer than the host
MOST_FLOPS_BETWEEN_RANKS = 1 << 41  # an exchange takes the host several times as long as the product that hides it
_MOST = 256  # kept for one module; each token count makes some
_TRIES = 6  # the first calls compile and allocate what later ones find, some only after a pass has ended

Taken = tuple[list[Tensor], Shells]  # what a body gives, as taken_apart() has it
# A recording, the shells of its results and what it tells the report of exchanges, or how often the body has run.
Known = tuple[Recorded, Shells, list[tuple[Place, Note | None]]] | int


class Recordings:
    """The recordings of one module, by all that its launches follow from.

    weights: elements of its largest weight. places: of exchanges that go through the userbuffers of one group."""

    def __init__(self, weights: int, places: Sequence[Place] = ()) -> None:
        self._known: dict[tuple, Known] = {}
        self._places, self._group = places, next((place.group for place in places), None)
        most = MOST_FLOPS_BETWEEN_RANKS if places else MOST_FLOPS
        self._most_tokens = most // (2 * max(1, weights))

    def look_up(self, decided: tuple, inputs: tuple[Tensor | None, ...]) -> tuple[tuple | None, Taken | None]:
        """(key, results). Where the body is recorded, it has been replayed, and these are its results. Else results is
        None: the body must run, through run(key, ...), or by itself where key is None too.

        decided: all that the body depends on beside shapes, dtypes and addresses of `inputs`. inputs: all tensors that
        it reads or writes. The first is [..., features] of all tokens."""
        # In a checkpoint the scales come from its first run, not from where a recording fetches them.
        if not unwatched() or replay.OPEN.frames:
            return None, None
        description, addresses = described(inputs)
        key: tuple = decided, reduces_low(), description
        group = self._group
        if group is not None:
            if group.closed or capturing():
                return None, None
            key += (group.turns(),)
        known: Any = self._known.get(key, 0)
        if known.__class__ is int:
            first: Any = inputs[0]  # the host does not hold up large layers
            wanted = known < _TRIES and first.numel() <= first.shape[-1] * self._most_tokens
            return key if wanted else None, None
        recorded, shells, notes = known
        if torch._C._cuda_getDevice() != recorded.device:
            return None, None
        if group is None:
            return key, (recorded.run(inputs, addresses), shells)
        try:
            results = recorded.run(inputs, addresses)
        except BaseException as error:
            labels = dict.fromkeys(place.label for place in self._places)
            group.failed(f"a recorded pass over {', '.join(labels)}", error)
            raise
        for place, note in notes:
            place.note = note
        return key, (results, shells)

    def run(self, key: tuple, inputs: Sequence[Tensor | None], body: Callable[[], Sequence[Item]]) -> Taken:
        """body(), for which look_up() gave `key`. The second run under a key is recorded."""
        tries: Any = self._known.get(key, 0)  # since look_up() another thread may have recorded it
        if not on_one_gpu(inputs) or capturing() or tries.__class__ is not int:
            return taken_apart(body())
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = tries + 1
        if not tries:
            return taken_apart(body())
        before = [place.note for place in self._places]
        recorder = Recorder(inputs, () if self._group is None else self._group.fixed())
        tensors, shells = taken_apart(recorder.run(body))
        recorded = recorder.finish(tensors)
        if recorded is not None:
            both = zip(self._places, before, strict=True)
            self._known[key] = recorded, shells, [(place, place.note) for place, note in both if place.note is not note]
        return tensors, shells


def on_one_gpu(inputs: Sequence[Tensor | None]) -> bool:
    """Whether all of them lie on the current GPU."""
    current = torch.cuda.current_device()
    return all(t is None or (t.is_cuda and t.device.index == current) for t in inputs)
