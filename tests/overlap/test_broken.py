"""Userbuffers on ranks that are threads, when something goes wrong: every rank ends, and says which rank and what."""

import threading
import time

import pytest
import torch

from te_lite import _C
from te_lite.overlap import arena
from te_lite.overlap.arena import HostMemory
from te_lite.overlap.bootstrap import BootstrapError
from te_lite.overlap.buffers import Gather
from tests.overlap.threads import LIMIT_S, in_group, make_group, on_threads, plain


def shard(rank: int) -> torch.Tensor:
    return torch.randn(5, 32, generator=torch.Generator().manual_seed(rank)).bfloat16()


def until_broken(group) -> None:
    """Raises GroupBroken, or comes back when the limit has passed."""
    for _ in range(int(LIMIT_S / 0.02)):
        group.control.check()
        time.sleep(0.02)


def broken(group, text: str) -> str:
    """The message with which the group is broken, which must come within the limit."""
    with pytest.raises(_C.GroupBroken) as caught:
        until_broken(group)
    assert text in str(caught.value), str(caught.value)
    return str(caught.value)


def test_ranks_that_do_not_run_the_same_are_named_on_all():
    def run(group):
        for _ in range(3):
            group.announce("fc1 fprop, bf16 [5, 32]")
        group.announce(f"fc1 fprop, bf16 [{5 + group.rank // 2}, 32]")
        return broken(group, "as operation 4")

    for text in in_group(3, run):  # rank 2 is compared with rank 0 here and with rank 1 there
        assert "bf16 [5, 32]" in text and "rank 2 runs fc1 fprop, bf16 [6, 32]" in text


def test_an_error_in_one_rank_ends_the_operation_on_all():
    def run(group):
        with pytest.raises((ValueError, _C.GroupBroken)) as caught:
            with group.operation("fc1 fprop"):
                gather = Gather(group, plain(shard(group.rank)), "row", own=True)
                if group.rank == 1:
                    raise ValueError("a GEMM went wrong")
                gather.whole()
                gather.close()
                until_broken(group)
        assert isinstance(caught.value, ValueError if group.rank == 1 else _C.GroupBroken)
        assert "rank 5 failed in fc1 fprop: ValueError: a GEMM went wrong" in broken(group, "")
        with pytest.raises(_C.GroupBroken, match="a GEMM went wrong"):
            group.announce("the next call")

    def start(rank, exchange):
        group = make_group(exchange)
        try:
            run(group)
        finally:
            group.close()

    on_threads(3, start, ranks=(3, 5, 9))


def test_a_wait_that_is_overdue_names_whom_it_waits_for(monkeypatch):
    monkeypatch.setenv("TE_LITE_UB_TIMEOUT", "0.5")

    def run(group):
        if group.rank == 1:
            time.sleep(1.5)
            return broken(group, "")
        with pytest.raises(_C.GroupBroken) as caught, group.operation("fc2 dgrad"):
            Gather(group, plain(shard(0)), "row", own=False).shard(1)
        return str(caught.value)

    first, second = in_group(2, run)
    assert first == second
    for part in ("fc2 dgrad", "gather[0]", "rank 0 has waited", "data from rank 1", "epoch 1 is expected, 0 is seen"):
        assert part in first, first


def test_fused_kernels_that_one_rank_cannot_run_are_refused_on_all(monkeypatch):
    """It and a ring wait for different flags. Where all can, nobody refuses."""
    here = threading.local()
    monkeypatch.setattr("te_lite.overlap.group.unavailable", lambda device: here.reason)

    def run(reasons):
        def start(rank, exchange):
            here.reason = reasons[rank]
            group = make_group(exchange)
            group.close()
            return group.no_fused

        return on_threads(3, start)

    assert run(["", "", "no compiler"]) == ["no compiler"] * 3
    assert run(["", "", ""]) == [""] * 3


@pytest.mark.parametrize("step", ["allocating", "mapping"])
def test_memory_that_one_rank_cannot_map_is_every_ranks_error(monkeypatch, step):
    """With the rank that failed and its reason. It can be tried again."""
    here = threading.local()

    class Memory(HostMemory):
        def __init__(self, fd, size):
            here.made = getattr(here, "made", 0) + 1
            if here.rank == 2 and here.made == (1 if step == "allocating" else 2):
                raise OSError("no memory for you")
            super().__init__(fd, size)

    def run(rank, exchange):
        here.rank = rank
        with pytest.raises(BootstrapError, match=rf"{step} .* rank 2 \(OSError: no memory for you\)") as caught:
            make_group(exchange)
        make_group(exchange).close()
        return str(caught.value)

    monkeypatch.setattr(arena, "HostMemory", Memory)
    assert len(set(on_threads(3, run))) == 1
