"""Groups whose ranks are threads of this process: the whole protocol on shared memory, without starting ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from te_lite.ops.flags import signed
from te_lite.overlap.bootstrap import Rendezvous
from te_lite.overlap.config import layer_methods
from te_lite.overlap.group import Group
from te_lite.overlap.maximum import Maximum
from te_lite.quantize.identity import HIGH_PRECISION
from te_lite.quantize.qtensor import QTensor

T = TypeVar("T")
LIMIT_S = 30.0


class Table:
    """Where the threads of a group lay down what they tell each other."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=LIMIT_S), [None] * size


class ThreadExchange(Rendezvous):
    """An Rendezvous among threads. ranks: as the world would number them."""

    def __init__(self, rank: int, table: Table, ranks: tuple[int, ...] | None = None) -> None:
        self.rank, self.size, self.table = rank, len(table.values), table
        self.ranks = ranks or tuple(range(self.size))

    def all(self, value: T) -> list[T]:
        self.table.values[self.rank] = value
        self.table.barrier.wait()
        values = list(self.table.values)
        self.table.barrier.wait()
        return values


def on_threads(size: int, run: Callable[[int, ThreadExchange], T], ranks: tuple[int, ...] | None = None) -> list[T]:
    """run(rank, exchange) on `size` threads at once; what each returned, or the first error."""
    table = Table(size)

    def start(rank: int) -> T:
        try:
            return run(rank, ThreadExchange(rank, table, ranks))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(start, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def make_group(exchange: Rendezvous, tokens: int = 64, hidden: int = 32, **options: Any) -> Group:
    """A group on the CPU with the default methods."""
    return Group(exchange, torch.device("cpu"), tokens, hidden, torch.bfloat16, layer_methods(None, 1), **options)


def count_from(first_epoch: int, group: Group, *maxima: Maximum) -> None:
    """As if all slots had been used so often that this epoch is next. On every rank, before any use."""
    before, unsigned = signed(first_epoch - 1), (first_epoch - 1) & 0xFFFFFFFF
    for name, (_, _, slots) in group.arena._places.items():
        if name.endswith(".flags") or name.startswith("maxim"):
            for slot in range(slots):
                group.arena.view(name, slot).view(torch.int32).fill_(before)
    for buffer in group._buffers.values():
        buffer._epochs = [unsigned] * len(buffer._epochs)
    for maximum in maxima:
        maximum._epoch = unsigned
        maximum._done[:1] = before


def in_group(size: int, run: Callable[[Group], T], first_epoch: int = 1, **options: Any) -> list[T]:
    """run(group) on every rank of a group of threads, closed afterwards."""

    def start(rank: int, exchange: ThreadExchange) -> T:
        group = make_group(exchange, **options)
        group.exchange = exchange  # for tests that meet in between
        count_from(first_epoch, group)
        exchange.all(None)
        try:
            return run(group)
        finally:
            group.close()

    return on_threads(size, start)


def plain(v: torch.Tensor) -> QTensor:
    """v[M, K] as a high-precision operand."""
    return QTensor(HIGH_PRECISION, tuple(v.shape), v.dtype, row=v)


def poison(group: Group) -> None:
    """0xFF into every byte of this rank's slots: NaN in every number format, while no exchange is under way."""
    for name in ("gather", "scatter"):
        for slot in range(2):
            group.arena.view(name, slot).fill_(0xFF)
