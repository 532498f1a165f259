"""Arena: one block of memory a rank, mapped by all ranks of a group, cut into named buffers with slots.

    arena = Arena(rank, size, device)
    arena.reserve("gather", bytes, slots)        # any number of these
    arena.commit(exchange)                       # collective: allocate, exchange handles, map
    arena.address("gather", slot, rank)          # where a slot of any rank lies in this process
    arena.view("gather", slot)                   # this rank's own, or that of another rank, as uint8

Host memory is anonymous shared memory (memfd): nothing is left behind by a process that is killed. GPU memory comes
from the driver, exported as file descriptors too. Peers' memory is reached by plain loads, stores and copies; no
multicast object is made and no stride between ranks is assumed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_lite import _C
from te_lite.overlap.bootstrap import Rendezvous, share_fds

ALIGNMENT = 256  # bytes, of every slot: whatever a copy engine or a GEMM asks for


def aligned(size: int) -> int:
    """`size` rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class HostMemory:
    """Shared host memory behind a file descriptor, zero-filled when made. Unmapped when nothing refers to it."""

    def __init__(self, fd: int, size: int) -> None:
        self.bytes = size
        self._map = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def share_memory(exchange: Rendezvous, size: int, device: torch.device) -> list[Any]:
    """`size` bytes of every rank, mapped here by file descriptors, in the order of ranks: host memory for the CPU, else
    the driver's, on `device`. Collective."""
    fds: dict[int, int] = {}  # by rank
    here = device.type == "cpu"
    what = "host memory" if here else "GPU memory"
    load: Any = HostMemory if here else partial(_C.CudaMemory.import_fd, device.index)

    def make() -> Any:
        """This rank's, whose descriptor is in fds as soon as there is one."""
        if not here:
            memory = _C.CudaMemory.vmm(device.index, size)
            fds[exchange.rank] = memory.export_fd()
            return memory
        fd = fds[exchange.rank] = os.memfd_create("te_lite", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return HostMemory(fd, size)

    try:
        own = exchange.step(f"allocating {what} for peers", make)
        share_fds(exchange, fds)

        def map_all() -> list[Any]:
            return [own if rank == exchange.rank else load(fds[rank], own.bytes) for rank in range(exchange.size)]

        return exchange.step(f"mapping the peers' {what}", map_all)
    finally:
        for fd in fds.values():
            os.close(fd)


class Arena:
    """See the module docstring. device: where this rank's memory lies ("cpu" or "cuda:n")."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.bytes = 0
        self._places: dict[str, tuple[int, int, int]] = {}  # name -> (offset, bytes of a slot, slots)
        self._memory: list[Any] = []

    def reserve(self, name: str, size: int, slots: int = 1) -> None:
        """Room for `slots` slots of `size` bytes each, before commit."""
        assert not self._memory and name not in self._places
        slot = aligned(size)
        self._places[name] = (self.bytes, slot, slots)
        self.bytes += slot * slots

    def commit(self, exchange: Rendezvous) -> None:
        """Allocates and maps on all ranks, or raises BootstrapError on all of them. Collective."""
        self._memory = share_memory(exchange, self.bytes, self.device)

    def release(self) -> None:
        """Lets go of the memory; views that still live keep it."""
        self._memory = []

    def slot_bytes(self, name: str) -> int:
        """Bytes of one slot of buffer `name`."""
        return self._places[name][1]

    def address(self, name: str, slot: int, rank: int) -> int:
        """Where a slot of `rank` lies in this process."""
        offset, size, slots = self._places[name]
        assert 0 <= slot < slots
        return self._memory[rank].address + offset + slot * size

    def view(self, name: str, slot: int, rank: int | None = None) -> Tensor:
        """A slot of this rank, or of `rank`, as uint8 [bytes]. It keeps the memory mapped for as long as it lives."""
        rank = self.rank if rank is None else rank
        return self._seen(self.address(name, slot, rank), self.slot_bytes(name), rank)

    def whole(self) -> Tensor:
        """All of this rank's, as view() gives a slot."""
        return self._seen(self._memory[self.rank].address, self.bytes, self.rank)

    def _seen(self, address: int, size: int, rank: int) -> Tensor:
        ordinal = -1 if self.device.type == "cpu" else self.device.index
        capsule = _C.dlpack(address, size, ordinal, self._memory[rank])
        return torch.from_dlpack(capsule)
