"""Ranks as forked processes over one memfd (control blocks, flags, an arena for each rank), programs and scripts."""

import ctypes
import mmap
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
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


def program(*steps: tuple, name: str = "buffer") -> _C.Program:
    """("copy", 1, ...) is program.copy(1, ...)."""
    out = _C.Program(name)
    for kind, *arguments in steps:
        getattr(out, kind)(*arguments)
    return out


def script(body: str, folder: Path | None = None, **env: str) -> str:
    """What a script prints, in a process of its own; folder: where it finds libcuda.so.1."""
    path = {} if folder is None else {"LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", body, _C.__file__],
        env={**os.environ, **path, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
