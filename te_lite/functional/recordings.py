"""Bodies of forward and backward on a GPU, recorded where the host takes longer than the device (ops/recorder.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_lite.functional.saved import Item, Shells, put_together, taken_apart
from te_lite.ops.gemm import reduces_low
from te_lite.ops.recorder import Recorded, Recorder
from te_lite.ops.registry import capturing, unwatched
from te_lite.quantize import replay

MOST_FLOPS = 1 << 37  # of one product; an estimate of where a layer takes the device longer than the host
WANTED = os.environ.get("TE_LITE_RECORD", "1") not in ("", "0")
_MOST = 256  # kept for one module; each token count makes some
_TRIES = 16  # the first calls compile and allocate what later ones find, some only after a pass has ended

Body = Callable[[], Sequence[Item]]
Known = tuple[Recorded, Shells] | int  # or how often a body of this kind has run


class Recordings:
    """Of one module's forward and backward, by what decides about the launches. weights: elements of its largest."""

    def __init__(self, weights: int) -> None:
        self._known: dict[tuple, Known] = {}
        self._most_tokens = MOST_FLOPS // (2 * max(1, weights))

    def run(self, decided: tuple, inputs: Sequence[Tensor | None], body: Body) -> Sequence[Item]:
        """body(), or its launches alone. decided: all that the body depends on beside shapes, dtypes and addresses of
        `inputs`, which are all tensors that it reads or writes, first one [..., features] of all tokens."""
        if not unwatched() or replay.OPEN.frames:  # a checkpoint hands out the scales that its first run took
            return body()
        key = (
            decided,
            reduces_low(),
            tuple([t if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 255) for t in inputs]),
        )
        known = self._known.get(key, 0)
        if not isinstance(known, int):
            recorded, shells = known
            if torch._C._cuda_getDevice() != recorded.device.index:
                return body()
            return put_together(shells, recorded.run(inputs))
        if known == _TRIES or capturing() or not self._fit(inputs):
            return body()
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = known + 1
        return body() if not known else self._record(key, inputs, body)

    def may_serve(self, x: Tensor) -> bool:
        """Whether a body of x[..., features] is small enough. Of others the inputs need not be held while it runs."""
        return x.numel() <= x.shape[-1] * self._most_tokens

    def _fit(self, inputs: Sequence[Tensor | None]) -> bool:
        first: Any = inputs[0]
        current = torch.cuda.current_device()
        here = all(t is None or (t.is_cuda and t.device.index == current) for t in inputs)
        return here and self.may_serve(first)

    def _record(self, key: tuple, inputs: Sequence[Tensor | None], body: Body) -> Sequence[Item]:
        recorder = Recorder(inputs)
        items = recorder.run(body)
        tensors, shells = taken_apart(items)
        recorded = recorder.finish(tensors)
        if recorded is not None:
            self._known[key] = recorded, shells
        return items
