"""What run_verbs.py checks of symmetric memory."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

import te_lite as te
from tests.distributed.overlapping import begin
from tests.distributed.verbs_checks import refused


def symmetric(device: torch.device) -> None:
    """A ring: each rank passes on what it gets, whoever is slow; values, signals on two channels, barriers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    begin(64, 16, dist.group.WORLD, device, symmetric_bytes=1 << 14)
    tensor, memory = te.symmetric_empty((2, 8), torch.float32, dist.group.WORLD, device)
    assert tensor.shape == (2, 8) and memory.peer(rank).data_ptr() == tensor.data_ptr()
    assert (memory.rank, memory.size) == (rank, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, draw = torch.full((8,), float(rank)), random.Random(rank)
    for turn in range(4 * size):
        half = turn % 2
        if turn > 1:
            memory.wait(right, 1)  # the half is read
        memory.put(right, mine, half, channel=0)
        if draw.random() < 0.3:
            torch.sum(torch.rand(200, 200))
        memory.wait(left)
        mine = tensor[half].clone()
        assert mine.eq((rank - 1 - turn) % size).all(), (turn, mine)
        memory.signal(left, 1)
    memory.barrier(2)
    other, second = te.symmetric_empty([3], torch.int64, dist.group.WORLD)
    other.fill_(rank)
    second.barrier()
    assert [int(second.peer(r)[0]) for r in range(size)] == [*range(size)]
    for _ in range(3):
        second.signal(right)  # no signal is lost
    for _ in range(3):
        second.wait(left)
    with refused(ValueError, "rank=9", "within"):
        memory.peer(9)
    with refused(ValueError, "channel=-1"):
        memory.wait(left, -1)
    with refused(RuntimeError, "needs 65536 bytes", r"15872 of 16384 are left", "symmetric_bytes=66048"):
        te.symmetric_empty((1 << 14,), torch.float32, dist.group.WORLD)
    te.destroy_ub()
    assert tensor.sum().isfinite()  # its memory stays while it is used
    with refused(RuntimeError, "destroy_ub"):
        memory.signal(right)
    with refused(RuntimeError, "call initialize_ub"):
        te.symmetric_empty([1], torch.float32, dist.group.WORLD)
    begin(64, 16, dist.group.WORLD, device)
    with refused(RuntimeError, "0 of 0 are left", "symmetric_bytes=256"):
        te.symmetric_empty([1], torch.float32, dist.group.WORLD)
    te.destroy_ub()
    for wrong in (-1, 1.5, True):
        with refused(ValueError, "symmetric_bytes="):
            begin(64, 16, dist.group.WORLD, device, symmetric_bytes=wrong)
