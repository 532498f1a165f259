"""te_lite._C's programs and host executor, with ranks as processes over one shared memory."""

import ctypes
import gc
import os
import threading
import time
import weakref

import pytest
import torch

import te_lite._C as _C
from tests.csrc import ranks
from tests.csrc.ranks import Memory, program, word

START = 2**32 - 3  # the first epochs pass 2^32
BYTES = 1000


@pytest.fixture
def alone():
    """A group of one."""
    memory = Memory(1)
    control = memory.control(0, timeout=0.3)
    executor = _C.Executor(-1, control)
    yield memory, control, executor
    executor.close()
    control.close()


def gather(memory: Memory, rank: int, slots: int) -> list[_C.Program]:
    """All-gather of BYTES from argument 0 into every peer's arena: a program a slot; segments push, wait, free."""
    out = []
    peers = [p for p in range(memory.size) if p != rank]
    for slot in range(slots):
        steps = []
        for p in peers:
            steps += [
                ("wait", memory.flags[rank] + 8 * p + 4, -slots, p, "room at"),
                ("after", 1),
                ("copy", 1, memory.arenas[p] + (slot * memory.size + rank) * BYTES, 0, 0, BYTES),
                ("set", 1, memory.flags[p] + 8 * rank, 0),
            ]
        steps += [("cut",), *(("wait", memory.flags[rank] + 8 * p, 0, p, "data from") for p in peers)]
        steps += [("cut",), *(("set", 0, memory.flags[p] + 8 * rank + 4, 0) for p in peers)]
        out.append(program(*steps, ("after", 0)))
    return out


def exchange(memory: Memory, rank: int, epochs: int, slots: int, delay: int, ignore_free: bool, slow: float) -> int:
    """How many of the pieces that arrived were wrong. slow: seconds that rank 1 takes before it reads."""
    control = memory.control(rank)
    executor = _C.Executor(-1, control)
    executor.set_delays(rank, delay)
    executor.set_ignore_free(ignore_free)
    programs = gather(memory, rank, slots)
    mine = ctypes.create_string_buffer(BYTES)
    wrong = 0
    for n in range(epochs):
        use, epoch = programs[n % slots], (START + n) % 2**32
        ctypes.memset(mine, (31 * rank + n) % 256, BYTES)
        control.announce(f"gather {n}", hash(("gather", n)))
        executor.issue(use, 0, epoch, 0, (ctypes.addressof(mine),))
        executor.issue(use, 1, epoch, 0, (ctypes.addressof(mine),))
        time.sleep(slow if rank == 1 else 0)
        for p in range(memory.size):
            got = ctypes.string_at(memory.arenas[rank] + (n % slots * memory.size + p) * BYTES, BYTES)
            wrong += p != rank and got != bytes([(31 * p + n) % 256]) * BYTES
        executor.issue(use, 2, epoch, 0, (ctypes.addressof(mine),))
    executor.synchronize()
    control.check()
    executor.close()
    control.close()
    return wrong


def started(memory: Memory, rank: int, *arguments: object) -> object:
    """The flags as if epoch START - 1 were done and all its buffers free, then exchange()."""
    for p in range(memory.size):
        word(memory.flags[rank] + 8 * p).value = word(memory.flags[rank] + 8 * p + 4).value = START - 1
    word(memory.flags[rank] + 2048).value = 1
    while not all(word(flags + 2048).value for flags in memory.flags):
        time.sleep(0.001)
    return exchange(memory, rank, *arguments)


@pytest.mark.parametrize("size, slots, delay", [(2, 1, 0), (2, 2, 300), (3, 2, 0), (3, 1, 300)])
def test_gather_is_right_in_every_epoch(size: int, slots: int, delay: int) -> None:
    assert ranks.run(size, started, 60, slots, delay, False, 0.0) == [0] * size


def test_free_counters_matter() -> None:
    assert ranks.run(2, started, 8, 1, 0, False, 0.02) == [0, 0]
    assert ranks.run(2, started, 8, 1, 0, True, 0.02)[1] > 0


def chain(memory: Memory, executor: _C.Executor, ordered: bool, rounds: int) -> int:
    """a -> b -> c by the copy stream, c -> d by the caller's, which is to wait; how often d was not a."""
    a, b, c, d = (memory.arenas[0] + i * 64 for i in range(4))
    order = [("after", 0)] if ordered else []
    copies = program(("after", 1), ("copy", 1, b, 0, 0, 4), ("copy", 1, c, 0, 64, 4), *order, ("copy", 0, d, 1, 0, 4))
    wrong = 0
    for n in range(rounds):
        word(a).value = n + 1
        executor.issue(copies, 0, 0, 0, (a, c))
        wrong += word(d).value != n + 1
        executor.synchronize()
    return wrong


def test_after_orders_streams(alone) -> None:
    memory, _, executor = alone
    executor.set_delays(7, 500)
    assert chain(memory, executor, True, 100) == 0
    assert chain(memory, executor, False, 100) > 0  # the test above can fail


def test_segments_and_negative_deltas(alone) -> None:
    memory, _, executor = alone
    flag = memory.flags[0]
    steps = _C.Program("buffer")
    steps.set(0, flag, -2)
    steps.cut()
    steps.set(1, flag + 4, 5)
    with pytest.raises(ValueError, match="segments 0 to 1 "):
        executor.issue(steps, 2, 1, 0, ())
    executor.issue(steps, 0, 1, 0, ())
    assert (word(flag).value, word(flag + 4).value) == (2**32 - 1, 0)
    executor.issue(steps, 1, 2**32 - 1, 0, ())
    executor.synchronize()
    assert word(flag + 4).value == 4


@pytest.mark.parametrize("stream", [0, 1])
def test_a_copy_of_rows_leaves_what_is_between(alone, stream: int) -> None:
    memory, _, executor = alone
    source, target = bytes(range(1, 41)), (ctypes.c_char * 60)()
    place = memory.arenas[0]
    ctypes.memmove(place, source, 40)
    steps = program(("copy", stream, ctypes.addressof(target) + 2, 0, 1, 5, 3, 20), ("after", 0))
    executor.issue(steps, 0, 0, 0, (place,))
    want = bytearray(60)
    for row in range(3):
        want[2 + 20 * row : 7 + 20 * row] = source[1 + 5 * row : 6 + 5 * row]
    assert target.raw == want


@pytest.mark.parametrize(
    "flag, epoch, there",
    [(5, 5, True), (4, 5, False), (0, START, True), (START, 0, False), (2**31 - 1, 0, True), (2**31, 0, False)],
)
def test_a_wait_is_cyclic(alone, flag: int, epoch: int, there: bool) -> None:
    memory, control, executor = alone
    word(memory.flags[0]).value = flag
    wait = program(("wait", memory.flags[0], 0, 0, "data from"))
    if there:
        executor.issue(wait, 0, epoch, 0, ())
    else:
        with pytest.raises(_C.GroupBroken):
            executor.issue(wait, 0, epoch, 0, ())
    assert (control.broken is None) == there


REFUSED = {
    "stream": (lambda e: program(("after", 2)), "stream 2: 0 is the caller's stream, 1 the copy stream"),
    "segment": (lambda e: e.issue(program(), 1, 0, 0, ()), "segments 0 to 0"),
    "arguments": (lambda e: e.issue(program(("copy", 0, 0, 2, 0, 1)), 0, 0, 0, (1, 2)), "takes 3 arguments"),
    "negative stream": (lambda e: program(("set", -1, 0, 0)), "stream -1: 0 is"),
    "negative argument": (lambda e: program(("copy", 0, 0, -1, 0, 1)), "argument -1: arguments count from 0"),
    "no rows": (lambda e: program(("copy", 0, 0, 0, 0, 8, 0)), "0 rows of 8 bytes"),
    "pitch": (lambda e: program(("copy", 0, 0, 0, 0, 8, 2, 7)), "8 bytes with a pitch of 7:"),
    "ranks": (lambda e: _C.Control(2, 2, [1, 2], None, 1.0), "rank 2 of 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(alone, case: str) -> None:
    call, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        call(alone[2])


def test_an_overdue_wait_names_everything(alone) -> None:
    memory, control, executor = alone
    target = memory.arenas[0]
    control.announce("linear 8192x3072", 1)
    wait = program(("wait", memory.flags[0], 2, 3, "room at"), ("copy", 1, target, 0, 0, 4))
    word(memory.flags[0]).value, word(target + 8).value = 6, 9
    begin = time.monotonic()
    with pytest.raises(_C.GroupBroken):
        executor.issue(wait, 0, 5, 0, (target + 8,))
    executor.synchronize()
    assert 0.3 < time.monotonic() - begin < 3
    said = "operation 1 (linear 8192x3072), buffer buffer: rank 0 has waited 0.3 s for room at rank 3: "
    assert control.broken.startswith(said + "epoch 7 is expected, 6 is seen")
    assert word(target).value == 0  # the copy behind the wait was dropped
    with pytest.raises(_C.GroupBroken, match="has waited"):
        executor.issue(program(), 0, 0, 0, ())
    with pytest.raises(_C.GroupBroken):
        control.announce("next", 2)


def test_breaking_the_group_ends_waits() -> None:
    memory = Memory(2)
    control, peer = memory.control(0), memory.control(1)
    executor = _C.Executor(-1, control)
    threading.Timer(0.2, peer.break_group, ("enough",)).start()
    wait = program(("wait", memory.flags[0], 0, 1, "data from"))
    with pytest.raises(_C.GroupBroken, match="^enough$"):
        executor.issue(wait, 0, 1, 0, ())
    executor.close()


def queued(memory: Memory, executor: _C.Executor) -> int:
    """Copies on their way that take a second; where the last of them goes."""
    executor.set_delays(1, 20000)
    place = memory.arenas[0]
    word(place).value = 9
    executor.issue(program(*[("copy", 1, place + 8 * i, 0, 0, 4) for i in range(1, 100)]), 0, 1, 0, (place,))
    return place + 8 * 99


def test_breaking_the_group_drops_what_is_queued(alone) -> None:
    memory, control, executor = alone
    last = queued(memory, executor)
    control.break_group("enough")
    executor.synchronize()
    assert word(last).value == 0


def test_closing_ends_waits_and_refuses_more(alone) -> None:
    memory, control, executor = alone
    last = queued(memory, executor)
    wait = program(("set", 0, memory.flags[0], 0), ("wait", memory.flags[0] + 4, 0, 0, "data from"))
    waiting = threading.Thread(target=executor.issue, args=(wait, 0, 1, 0, ()))
    waiting.start()
    while not word(memory.flags[0]).value:
        time.sleep(0.001)
    executor.close()
    executor.close()
    waiting.join()
    assert control.broken is None and word(last).value == 0
    with pytest.raises(RuntimeError, match="closed"):
        executor.issue(program(), 0, 1, 0, ())


def used() -> tuple[int, int, int]:
    """Resident pages, threads and descriptors of this process."""
    threads = len(os.listdir("/proc/self/task"))
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]), threads, len(os.listdir("/proc/self/fd"))


def test_opening_again_and_again_leaves_nothing() -> None:
    def once() -> None:
        memory = Memory(2)
        controls = [memory.control(rank) for rank in range(2)]
        executors = [_C.Executor(-1, control) for control in controls]
        view = torch.utils.dlpack.from_dlpack(_C.dlpack(memory.arenas[0], ranks.ARENA, -1, memory.map))
        view.fill_(1)
        for executor in executors:
            executor.issue(program(("copy", 1, memory.arenas[1], 0, 0, 64)), 0, 0, 0, (memory.arenas[0],))
            executor.synchronize()

    for _ in range(5):
        once()
    gc.collect()
    before = used()
    for _ in range(50):
        once()
    gc.collect()
    after = used()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 100  # pages; one leaked mapping a round would be over 1000


def test_dlpack_is_a_view_that_keeps_its_owner() -> None:
    class Owner:
        pass

    owner, gone = Owner(), []
    data = (ctypes.c_uint8 * 16)(*range(16))
    weakref.finalize(owner, gone.append, True)
    view = torch.utils.dlpack.from_dlpack(_C.dlpack(ctypes.addressof(data), 16, -1, owner))
    del owner
    assert (view.dtype, view.shape, str(view.device)) == (torch.uint8, (16,), "cpu")
    view[3] = 77
    assert data[3] == 77 and view.tolist() == list(data) and not gone
    holder = [view]
    del view
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert gone == [True]
    _C.dlpack(ctypes.addressof(data), 16, -1, object())  # a capsule that nobody takes
