"""What a Recorder sees of a body, on the CPU; tests/modules/test_recordings.py replays on a GPU."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch

from te_lite import _C
from te_lite._C import described
from te_lite.ops.recorder import OPEN, Recorder, Recording, called
from te_lite.ops.recording import Called, Moved, NotNow
from te_lite.ops.steps import view_of
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


def test_any_of_the_inputs_at_one_address_will_do():
    """As the scales of a quantized weight: one tensor for both layouts, or a view by column of those by row."""
    x, scale = torch.randn(8), torch.randn(4, 4)
    recorder = Recorder([x, scale, scale, scale.t()])
    assert recorder._slot(scale) == recorder._slot(scale.view(16)) == (1, 0) and recorder._slot(scale.t()[2:]) == (1, 8)
    assert not recorder.why_not


@pytest.mark.parametrize("fetched", [False, True])
def test_inputs_that_overlap_are_not_told_apart(fetched):
    """Nor is an input from what is fetched: no key says that they begin at one address."""
    scale = torch.randn(4, 4)
    recorder = Recorder([scale] if fetched else [scale, scale[1:]])
    if fetched:
        recorder.fetched(lambda: (scale,), (scale,))
    assert recorder._slot(scale[2:]) is None and "lies in 2 tensors" in recorder.why_not
    assert fetched or Recorder([scale, scale[1:]])._slot(scale[0]) == (0, 0)


def test_what_lies_in_fetched_tensors_is_found_and_equal_fetches_are_asked_once():
    x, scale, history = torch.randn(4), torch.randn(6), torch.zeros(3, 6)[:, 2:5]

    @dataclass(frozen=True)
    class Fetch:
        offset: int

        def __call__(self):
            return scale, history

    recorder = Recorder([x])
    for _ in range(2):
        recorder.fetched(Fetch(2), (scale, history))
    assert recorder._slot(scale[3]) == (1, 12) and recorder._slot(history[0, 1:2]) == (2, 4)
    assert recorder._fetches == [Fetch(2)] and not recorder.why_not


@pytest.mark.parametrize("why", [Moved, NotNow])
def test_a_replay_that_cannot_fetch_has_begun_nothing(why, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    turns, issued = Epochs(7), []

    def fetch():
        raise why

    call = Called(lambda t: issued.append(t), [(0, view_of(torch.randn(3), None))])
    recording = Recording([call], torch.device("cpu"), [fetch], [], 0, [(0, None)], [turns])
    with pytest.raises(why):
        recording.run((torch.randn(3),))
    assert turns.next == 7 and not issued


def test_what_a_recording_is_found_by():
    memory = torch.zeros(4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :].view(torch.bfloat16)

    def at(start, *shape, dtype=torch.bfloat16):
        return memory[start // 2 :].view(dtype)[: torch.Size(shape).numel()].view(shape)

    weight = quantized(torch.randn(4, 8, dtype=torch.bfloat16), Current(FORMATS[torch.float8_e4m3fn]))
    plain = at(0, 4, 8)
    differing = [
        (plain, None), (None, plain), (plain,), (plain, at(256, 4, 8)), (plain, plain), (at(256, 4, 8), plain, plain),
        (at(256, 4, 8), plain, at(256, 4, 8)), (plain, at(272, 4, 8)), (at(0, 8, 4), None), (at(0, 8, 4).t(), None),
        (at(0, 4, 8, dtype=torch.float16), None), (at(0, 4, 8, dtype=torch.int16), None), (at(0, 4, 1, 8), None),
        (weight, None), (),
    ]  # fmt: skip
    assert len({described(tensors) for tensors in differing}) == len(differing)
    again = [at(512, 4, 8), torch.nn.Parameter(at(768, 4, 8))]
    same = [described(each) for each in ((plain, at(256, 4, 8)), tuple(again), (again[1].detach(), again[0]))]
    assert same[0] == same[1] == same[2]


class Epochs:
    """Turns."""

    def __init__(self, first):
        self.next = first

    def turn(self):
        self.next += 1
        return self.next - 1


def test_a_replay_gives_what_was_given_and_what_it_makes(monkeypatch):
    """Of launches there are none."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    x, fetched, made = torch.randn(3), torch.randn(2), (torch.Size((4, 5)), torch.bfloat16)
    recorded = Recording(
        [_C.Sequence(6)], torch.device("cpu"), [lambda: (fetched, None)], [made], 0, [(4, None), (0, None)]
    )
    y, same = recorded.run((x, None))
    assert same is x and (y.shape, y.dtype) == made and y.is_contiguous()
    with pytest.raises(ValueError, match="5 values: not one for each slot"):
        recorded.run((x,))


def test_what_stays_in_its_place_and_what_is_counted(monkeypatch):
    """A program's copy and flags, by a sequence: addresses of a call's tensor and of fixed memory, epochs of turns."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    block = torch.zeros(_C.CONTROL_BYTES, dtype=torch.uint8)
    control = _C.Control(0, 1, [block.data_ptr()], block, 5.0)
    executor = _C.Executor(-1, control)
    to, flag, source = torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), torch.arange(64).byte()
    program = _C.Program("test")
    program.copy(1, to.data_ptr(), 0, 8, 16)
    program.set(1, flag.data_ptr(), 0)
    program.cut()
    program.wait(flag.data_ptr(), 0, 0, "data from")
    recorder = Recorder([source], fixed=[to, flag])
    turns, other = Epochs(7), Epochs(7)

    def body():
        recorder.announce(control, "first", 1)
        recorder.turn(other, other.turn(), to)  # of another buffer, at the same epoch now
        recorder.turn(turns, turns.turn(), flag)
        recorder.issue(executor, program, 0, 7, flag, 1, (source[4:],), turns)
        recorder.issue(executor, program, 1, 7, flag, 1, (), turns)
        recorder.issue(executor, program, 1, 7, flag, 1, (to[3:],), turns)

    try:
        recorder.run(body)
        recorded = recorder.finish([source])
        assert recorded is not None, recorder.why_not
        recorded.device = 0
        for step in range(3):
            given, other.next = torch.randint(0, 256, (64,)).byte(), 50 * step
            (same,) = recorded.run((given,))
            executor.synchronize()
            assert same is given and torch.equal(to, given[12:28]) and int(flag) == 8 + step
        assert control.broken is None
    finally:
        executor.close()
        control.close()


def test_an_epoch_of_nobodys_is_refused():
    recorder = Recorder([])
    recorder.run(lambda: recorder.issue(None, None, 0, 3, torch.zeros(1), 0, (), None))
    assert recorder.finish([]) is None and "took no turn" in recorder.why_not


def test_what_a_call_brings_is_its_own_wherever_it_lies(monkeypatch):
    """An input in memory that stays, as a caller's tensor in the arena is, moves from call to call."""
    monkeypatch.setattr("te_lite.ops.recorder._C.Sequence", Kept)
    arena = torch.empty(64)
    given, staging = arena[:8], arena[32:40]
    recorder = Recorder([given], [arena])
    recorder.run(lambda: recorder.gemm("plan", (given[2:], staging)))
    ((_, _, patches),) = recorder.finish([])._parts[0].added
    # Slots: the input, then the one that fixed memory is counted from.
    assert patches == [(0, 0, 8), (1, 1, staging.data_ptr())]


class Kept:
    """In a sequence's place: the steps that it was given."""

    def __init__(self, slots):
        self.slots, self.added, self.streams = slots, [], [0]

    def __getattr__(self, name):
        return lambda *args: self.added.append((name, *args))


def test_memory_of_a_use_is_free_when_that_ends(monkeypatch):
    """A piece that is being sent shares memory with nothing until its buffer's use ends, nor do two streams."""
    monkeypatch.setattr("te_lite.ops.recorder._C.Sequence", Kept)
    word = torch.zeros(1, dtype=torch.int32)
    for ends, overlaps in ((False, True), (True, False)):
        turns, use, recorder = Epochs(1), object(), Recorder([])

        def body(recorder=recorder, turns=turns, use=use, ends=ends):
            recorder.turn(turns, 1, word)
            one, two = torch.empty(100), torch.empty(100)
            recorder.issue("executor", "program", 0, 1, word, 1, (one,), use)
            if not ends:
                recorder.issue("executor", "program", 1, 1, word, 0, (), use)
            recorder.gemm("plan", (two, None, two))
            if ends:
                recorder.issue("executor", "program", 1, 1, word, 0, (), use)
            return one, two

        recorder.run(body)
        recorded = recorder.finish([])
        steps = {name: args for name, *args in recorded._parts[0].added}
        issued = [args for name, *args in recorded._parts[0].added if name == "add_issue"]
        (_, at, first), (_, slot, second) = issued[0][4][0], steps["add_gemm"][1][0]
        assert (first == second) == overlaps and at == slot


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


def test_what_python_calls_is_called_in_a_replay(monkeypatch):
    """With memory of the call and of the block, views of it, in the order of the body."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def body(x):
        doubled, out = torch.empty(4, 3), torch.empty(2, 3, dtype=torch.bfloat16)
        called(lambda a, b: b.copy_(2 * a), x.view(4, 3), doubled)
        called(lambda a, b: b.copy_(a + 1), doubled[2:], out)
        return out, x

    x = torch.randn(12)
    recorder = Recorder([x])
    out, _ = recorder.run(lambda: body(x))
    recorded = recorder.finish([out, x])
    assert recorded is not None and torch.equal(out, (2 * x.view(4, 3)[2:] + 1).bfloat16())
    for other in (torch.randn(12), torch.randn(12)):
        got, same = recorded.run((other,))
        assert same is other and torch.equal(got, (2 * other.view(4, 3)[2:] + 1).bfloat16())


def test_what_python_must_not_call():
    """With memory of userbuffers, which is no tensor of a call; and where it does not say what memory it uses."""
    memory, x = torch.zeros(64), torch.randn(4)
    recorder = Recorder([x], [memory])
    recorder.run(lambda: called(lambda a, b: b.copy_(a), x, memory[:4]))
    assert torch.equal(memory[:4], x) and recorder.finish([x]) is None
    assert "userbuffers" in recorder.why_not
    recorder = Recorder([x])
    recorder.run(lambda: called(lambda a, b: None, x, x[4:]))
    assert recorder.finish([x]) is None and "an empty tensor" in recorder.why_not
    recorder = Recorder([x])
    recorder.run(lambda: called(lambda: x.add_(1)))
    assert recorder.finish([x]) is None and "does not name its memory" in recorder.why_not
