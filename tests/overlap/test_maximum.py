"""The maximum over a group's ranks, which are threads: where each sends to, in which slot, for which epoch. The kernel,
which runs on GPUs only, is played by `played`; tests/ops/test_group_max.py has the kernel."""

import ctypes
import time

import pytest
import torch

from te_lite.overlap import maximum
from te_lite.overlap.maximum import Maximum
from tests.overlap.threads import LIMIT_S, count_from, in_group


def played(partials, slots, targets, done, word, delta, abort):
    epoch, ranks = (int(word[0]) + delta) & 0xFFFFFFFF, targets.numel()
    mine = int(partials.amax().view(1).view(torch.int32))
    for target in targets.tolist():
        ctypes.c_uint64.from_address(target + 8 * ranks * (epoch % 2)).value = epoch << 32 | mine
    words, deadline = slots.view(torch.int32).view(2, ranks, 2)[epoch % 2], time.monotonic() + LIMIT_S
    while not (words[:, 1] == maximum.signed(epoch)).all():
        assert time.monotonic() < deadline, f"epoch {epoch} of {words.tolist()}"
    assert int(done[0]) == maximum.signed((epoch - 1) & 0xFFFFFFFF)
    done[:1] = maximum.signed(epoch)
    return words[:, 0].contiguous().view(torch.float32).amax().view(1)


def played_elementwise(values, slots, targets, done, word, delta, abort):
    """Value by value, each as if it had the slots for itself."""
    ranks, count = targets.numel(), values.numel()
    before, words = done.clone(), slots.view(2, ranks, maximum.MOST_VALUES)
    epoch = (int(word[0]) + delta) & 0xFFFFFFFF
    for i, value in enumerate(values.view(torch.int32).tolist()):
        for target in targets.tolist():
            at = target + 8 * (ranks * (epoch % 2) * maximum.MOST_VALUES + i)
            ctypes.c_uint64.from_address(at).value = epoch << 32 | value
    arrived, deadline = words[epoch % 2, :, :count], time.monotonic() + LIMIT_S
    while not (arrived.clone().view(torch.int32).view(ranks, count, 2)[..., 1] == maximum.signed(epoch)).all():
        assert time.monotonic() < deadline, f"epoch {epoch}"
    assert before.tolist() == [maximum.signed((epoch - 1) & 0xFFFFFFFF), 0]
    done[:1] = maximum.signed(epoch)
    values.copy_(
        arrived.clone().view(torch.int32).view(ranks, count, 2)[..., 0].contiguous().view(torch.float32).amax(0)
    )


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(maximum, "group_max", played)
    monkeypatch.setattr(maximum, "group_maxima", played_elementwise)
    monkeypatch.setattr(maximum, "compiled_group_max", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


@pytest.mark.parametrize("first_epoch", [1, 2**31 - 2, 2**32 - 3])
@pytest.mark.parametrize("size", [2, 3])
def test_many_uses_of_two_slots_whatever_the_epoch(size, first_epoch):
    """Of eager calls and of captured ones in turn, which do not meet."""
    values = torch.rand(20, size, 5, generator=torch.Generator().manual_seed(0))

    def run(group):
        group.abort = None
        maxima = [Maximum(group.arena, graph, False) for graph in (False, True)]
        count_from(first_epoch, group, *maxima)
        group.exchange.all(None)
        for i, value in enumerate(values):
            assert maxima[i // 3 % 2].of(value[group.rank], group) == value.max(), f"use {i}"
        return maxima

    in_group(size, run)


@pytest.mark.parametrize("first_epoch", [1, 2**31 - 2, 2**32 - 3])
def test_values_one_by_one_in_ever_other_numbers(first_epoch):
    size, counts = 3, [1, 7, 1024, 3, 5000, 1024, 2]
    values = [torch.rand(size, count, generator=torch.Generator().manual_seed(count)) for count in counts]

    def run(group):
        group.abort = None
        maxima = [Maximum(group.arena, graph, True) for graph in (False, True)]
        count_from(first_epoch, group, *maxima)
        group.exchange.all(None)
        for i, all_values in enumerate(values):
            own = all_values[group.rank].clone()
            maxima[i % 2].of(own, group)
            assert torch.equal(own, all_values.amax(0))

    in_group(size, run)


def test_the_watcher_is_told_of_every_other_ranks_epoch(monkeypatch):
    class Program(maximum._C.Program):
        def expect(self, flag, delta, rank, kind):
            expected.append((flag, delta, rank))
            super().expect(flag, delta, rank, kind)

    expected = []
    monkeypatch.setattr(maximum._C, "Program", Program)

    def run(group):
        group.exchange.all(None)
        if group.rank == 1:
            Maximum(group.arena, False, False)
            at = group.arena.address("maximum", 0, 1) + 4
            assert expected == [(at + 8 * (3 * slot + rank), 0, rank) for slot in range(2) for rank in (2, 0)]
        group.exchange.all(None)

    in_group(3, run)


def test_cpu_ranks_have_none():
    assert in_group(2, lambda group: group.maximum("amax", torch.ones(3), elementwise=False)) == [None, None]
    assert in_group(2, lambda group: group.maximum("amax", torch.ones(3), elementwise=True)) == [None, None]
