"""A rank that runs ahead waits for room, what another still reads is not written over; and who has waits watched."""

import time

import pytest
import torch

from te_lite.overlap import programs
from te_lite.overlap.buffers import SLOTS, Gather, Scatter
from te_lite.testing.numerics import assert_bitwise_equal
from tests.overlap.test_buffers import LIMIT_S, gathered, plain, shard
from tests.overlap.threads import in_group


@pytest.mark.parametrize("ignore_free", [False, True])
def test_a_slow_reader_keeps_its_slot(ignore_free):
    """Rank 0 runs ahead into a slot that rank 1 still reads. Without the free counters that corrupts what is read."""

    def run(group):
        group.executor.set_ignore_free(ignore_free)
        if group.rank == 0:
            for use in range(SLOTS + 1):
                Gather(group, plain(shard(0, use)), "row", own=False).close()
            return None
        first = Gather(group, plain(shard(1, 0)), "row", own=True)
        view, limit = first.whole().row, time.monotonic() + (LIMIT_S if ignore_free else 0.5)
        while torch.equal(view, gathered(2, 0)) and time.monotonic() < limit:
            time.sleep(0.01)
        seen = view.clone()
        first.close()
        for use in range(1, SLOTS + 1):
            Gather(group, plain(shard(1, use)), "row", own=False).close()
        return seen

    _, seen = in_group(2, run)
    if ignore_free:
        assert_bitwise_equal("what a later use has written", seen[:5], shard(0, SLOTS))
    else:
        assert_bitwise_equal("what was read", seen, gathered(2, 0))


@pytest.mark.parametrize("ignore_free", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_slow_reader_of_partials_keeps_its_slot(at_once, ignore_free):
    """The same of a reduce-scatter, whose first push waits for room, or its only one."""

    def send(group, use: int) -> Scatter:
        exchange, partial = Scatter(group, (6, 32), torch.bfloat16), torch.full((6, 32), 1.0 + use).bfloat16()
        if at_once:
            exchange.push_all(torch.cat([partial, partial]))
        else:
            exchange.push(partial, 1 - group.rank)
        return exchange

    def run(group):
        group.executor.set_ignore_free(ignore_free)
        if group.rank == 0:
            for use in range(SLOTS + 1):
                send(group, use).close()
            return None
        first = send(group, 0)
        group.issue(first, first._wait, (0,))
        view, limit = first.staging[0], time.monotonic() + (LIMIT_S if ignore_free else 0.5)
        while (view == 1).all() and time.monotonic() < limit:
            time.sleep(0.01)
        seen = view.clone()
        first.close()
        for use in range(1, SLOTS + 1):
            send(group, use).close()
        return seen

    _, seen = in_group(2, run)
    assert (seen[-1] == 1).all() != ignore_free
    assert ignore_free or (seen == 1).all()


@pytest.mark.parametrize("awaited", [False, True])
def test_a_gather_that_a_kernel_waits_for_has_that_watched(awaited, monkeypatch):
    """By the call that pushes, of every other rank: there is no other call before the kernel."""

    class Program(programs._C.Program):
        def cut(self):
            steps.append("cut")
            super().cut()

        def expect(self, flag, delta, rank, kind):
            steps.append((flag, delta, rank, kind))
            super().expect(flag, delta, rank, kind)

    steps = []
    monkeypatch.setattr(programs._C, "Program", Program)

    def run(group):
        if group.rank == 1:
            buffer = group.buffer("gather")
            programs.gather_program(buffer, 0, (64,), 1, False, awaited)
            wanted = [(buffer.ready(0, 1, rank), 0, rank, "data from") for rank in (2, 0)]
            assert steps[: steps.index("cut")] == (wanted if awaited else [])
            assert all(step == "cut" for step in steps[steps.index("cut") :])
        group.exchange.all(None)

    in_group(3, run)
