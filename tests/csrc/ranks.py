"""Ranks as forked processes over one memfd: control blocks, then flags, then an arena for each rank."""

import ctypes
import mmap
import multiprocessing
import os
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import te_lite._C as _C

PAGE = 4096
ARENA = 16 * PAGE


def word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


class Memory:
    """The shared memory of a group, as each rank maps it."""

    def __init__(self, size: int) -> None:
        self.size = size
        fd = os.memfd_create("ranks")
        control = -(-size * _C.CONTROL_BYTES // PAGE) * PAGE
        os.ftruncate(fd, control + size * (PAGE + ARENA))
        self.map = mmap.mmap(fd, 0)
        os.close(fd)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.flags = [self.base + control + r * PAGE for r in range(size)]
        self.arenas = [self.base + control + size * PAGE + r * ARENA for r in range(size)]
        self.blocks = [self.base + r * _C.CONTROL_BYTES for r in range(size)]

    def control(self, rank: int, timeout: float = 20.0, silence: float = 5.0) -> _C.Control:
        return _C.Control(rank, self.size, self.blocks, self.map, timeout, silence)


def start(size: int, body: Callable, *arguments: object) -> SimpleNamespace:
    """Forks `size` processes that call body(memory, rank, *arguments)."""
    fork = multiprocessing.get_context("fork")
    memory, results = Memory(size), fork.SimpleQueue()

    def run(rank: int) -> None:
        try:
            results.put((rank, body(memory, rank, *arguments)))
        except BaseException:  # whatever it is, the parent must not wait for a result
            results.put((rank, traceback.format_exc()))

    processes = [fork.Process(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    return SimpleNamespace(processes=processes, results=results)


def finish(ranks: SimpleNamespace, without: tuple[int, ...] = ()) -> dict[int, object]:
    """What each rank returned, except for those that were killed."""
    out = dict(ranks.results.get() for rank in range(len(ranks.processes)) if rank not in without)
    for process in ranks.processes:
        process.join(20)
    return out


def run(size: int, body: Callable, *arguments: object) -> list:
    out = finish(start(size, body, *arguments))
    return [out[rank] for rank in range(size)]
