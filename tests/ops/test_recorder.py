"""What a Recorder sees of a body, on the CPU; tests/modules/test_recordings.py replays on a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from te_lite.ops.recorder import OPEN, Recorder
from te_lite.quantize.per_tensor import FORMATS, Current
from te_lite.quantize.tensor import quantized


def test_an_op_that_computes_is_refused():
    x = torch.randn(4, 4)
    recorder = Recorder([x])
    out = recorder.run(lambda: x @ x)
    assert torch.equal(out, x @ x) and OPEN.recorder is None
    assert "aten.mm" in recorder.why_not and recorder.finish([out]) is None


def test_allocations_views_and_zeros_are_not():
    x = torch.randn(4, 4)
    recorder = Recorder([x])
    recorder.run(lambda: (x.t()[1:], torch.empty(3).view(3, 1), x.new_zeros(2)))
    assert not recorder.why_not


def test_quantized_weights_are_told_apart():
    """None of them has an address of its own."""
    given = [quantized(torch.randn(16, 16), Current(FORMATS[torch.float8_e4m3fn])) for _ in range(2)]
    recorder = Recorder(given)
    assert [recorder._slot(t) for t in given] == [(0, 0), (1, 0)] and not recorder.why_not
    twice = Recorder([given[0], given[0]])
    assert twice._slot(given[0]) is None and "lies in 2 tensors" in twice.why_not


def test_an_error_in_the_body_ends_the_recording():
    with pytest.raises(ZeroDivisionError):
        Recorder([]).run(lambda: 1 // 0)
    assert OPEN.recorder is None


def test_nothing_is_held_afterwards():
    """An output of a Function gets its graph later, in the very tensor that the body returned."""
    gc.disable()
    try:
        recorder = Recorder([torch.randn(2)])
        made = recorder.run(lambda: torch.empty(3))
        left = weakref.ref(made)
        recorder.finish([made])
        del made
        assert left() is None
    finally:
        gc.enable()
