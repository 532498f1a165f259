"""te_lite._C's control block: who runs what, who is gone, and why the group broke."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest

import te_lite._C as _C
from tests.csrc import ranks
from tests.csrc.ranks import Memory, program, word


def announcing(memory: Memory, rank: int, other: int) -> tuple[str, float]:
    """Rank `other` runs something else as operation 100, after more operations than the ring holds."""
    control = memory.control(rank)
    for n in range(1, 101):
        control.announce(f"{'X' if rank == other and n == 100 else 'Y'}{n}", -n if rank == other and n == 100 else n)
    begin = time.monotonic()
    while control.broken is None and time.monotonic() - begin < 10:
        time.sleep(0.005)
    took = time.monotonic() - begin
    time.sleep(0.1)
    control.close()
    return control.broken, took


def test_a_mismatch_is_named_on_every_rank() -> None:
    out = ranks.run(3, announcing, 2)
    says = "rank {} runs Y100, rank 2 runs X100 as operation 100"
    for said, took in out:
        assert said is not None and took < 2
        assert any(says.format(rank) in said for rank in (0, 1)), said


def test_the_same_program_everywhere_is_no_mismatch() -> None:
    memory = Memory(2)
    controls = [memory.control(rank) for rank in range(2)]
    for block in range(20):  # each in turn is ahead by more than the ring holds
        for control in controls[:: 1 if block % 2 else -1]:
            for n in range(200):
                control.announce(f"{block} {n}", -hash((block, n)))
            time.sleep(0.01)
    time.sleep(0.1)
    assert [control.broken for control in controls] == [None, None]


def waiting(memory: Memory, rank: int) -> str | None:
    control = memory.control(rank, silence=0.4)
    executor = _C.Executor(-1, control)
    try:
        executor.issue(program(("wait", memory.flags[rank], 0, 1, "data from")), 0, 1, 0, ())
    except _C.GroupBroken as broken:
        return str(broken)


def test_a_killed_rank_is_named() -> None:
    group = ranks.start(3, waiting)
    time.sleep(0.5)
    os.kill(group.processes[1].pid, signal.SIGKILL)
    out = ranks.finish(group, without=(1,))
    for rank in (0, 2):
        assert out[rank].startswith("rank 1 has stopped: no heartbeat for 0.4 s"), out[rank]


def late(memory: Memory, rank: int) -> str | None:
    time.sleep(1.2 * rank)
    control = memory.control(rank, silence=0.6)
    executor = _C.Executor(-1, control)
    mine, other = memory.flags[rank], memory.flags[1 - rank]
    executor.issue(program(("set", 0, other, 0), ("wait", mine, 0, 1 - rank, "data from")), 0, 1, 0, ())
    control.close()
    return control.broken


def test_a_late_rank_is_waited_for() -> None:
    assert ranks.run(2, late) == [None, None]


def test_a_rank_that_left_in_order_is_not_silent() -> None:
    memory = Memory(2)
    stays, leaves = memory.control(0, silence=0.3), memory.control(1)
    leaves.close()
    time.sleep(0.6)
    assert stays.broken is None


def test_the_first_reason_stays_and_reaches_all() -> None:
    memory = Memory(3)
    controls = [memory.control(rank) for rank in range(3)]
    controls[1].break_group("é" * 600)
    controls[1].break_group("second")
    time.sleep(0.2)
    assert [control.broken for control in controls] == ["é" * 511] * 3  # cut to 1023 bytes, not inside a character
    with pytest.raises(RuntimeError, match="^é+$"):
        controls[2].check()


def drop_in_a_child() -> None:
    memory = Memory(2)
    control, peer = memory.control(0), memory.control(1, silence=0.6)
    executor = _C.Executor(-1, control)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        executor.close()
        control.close()
        del executor, control
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(1.0)
    assert (control.broken, peer.broken) == (None, None)
    executor.issue(program(("set", 1, memory.flags[1], 0)), 0, 3, 0, ())
    executor.synchronize()
    assert word(memory.flags[1]).value == 3


def test_a_forked_child_drops_the_objects_without_a_word() -> None:
    """In a process that has nothing else: a collection in the child of one that ran other tests drops their objects
    too, of other libraries, of which not all survive a fork."""
    code = "from tests.csrc.test_control import drop_in_a_child; drop_in_a_child()"
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
