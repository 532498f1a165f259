"""Recording a body: the launches that it makes, which one call into C++ then issues for other tensors.

A body is a function whose launches follow from shapes, dtypes and addresses modulo 256 alone. While it runs as usual a
dispatch mode sees what it allocates, and launch() and product() note what they issue. Anything else that would run on
the device makes the recording fail, and such a body simply runs as it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from te_lite import _C
from te_lite._C import described
from te_lite.ops.registry import implementation

aten = torch.ops.aten
WANTED = os.environ.get("TE_LITE_RECORD", "1") not in ("", "0") and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_ALLOCATE = frozenset((aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default))
_ZEROS = frozenset((aten.new_zeros.default, aten.zeros.default))
_ALIGNED = 512  # bytes: as torch's own allocations

Fetch = Callable[[], tuple[Tensor | None, ...]]
Given = tuple[int, int]  # (slot, offset in bytes)


class Open(threading.local):
    """What this thread records into now."""

    recorder: Recorder | None = None


OPEN = Open()


class _Step(NamedTuple):
    issued: _C.Kernel | _C.GemmPlan | None  # None: zeros
    programs: int  # of a kernel
    values: tuple[Any, ...]
    tensors: tuple[tuple[int, Tensor], ...]  # (position of its address, the tensor)
    anywhere: int  # so many of the first positions may hold any address; later ones were seen modulo 256


class _View(NamedTuple):
    """A result that is no whole slot."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        base = base if base.dtype == self.dtype else base.view(self.dtype)
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


class Recorded:
    """A body as launches. given: tensors that a call brings, then those that fetches give; made: results that a call
    allocates; then one block of all that only the launches see."""

    def __init__(
        self, sequence: _C.Sequence, device: torch.device, fetches: list[Fetch],
        made: list[tuple[torch.Size, torch.dtype]], block: int, results: list[tuple[int, _View | None]],
    ) -> None:  # fmt: skip
        self._sequence, self.device, self._fetches, self._results = sequence, device.index, fetches, results
        allocations = [*made, (torch.Size((block,)), torch.uint8)] if block else made
        # Of at most one element in memory: empty_like() of them takes half the time of empty().
        self._made = [_like(shape, dtype, device) for shape, dtype in allocations]

    def run(self, inputs: tuple[Tensor | None, ...], addresses: bytes | None = None) -> list[Tensor]:
        """The body's results for inputs of the same description. addresses: with which described() gave that."""
        addresses = described(inputs)[1] if addresses is None else addresses
        more: list[Any] = []
        for fetch in self._fetches:
            more += fetch()
        for like in self._made:
            more.append(torch.empty_like(like))
        self._sequence.run(torch._C._cuda_getCurrentRawStream(self.device), addresses, more)
        slots: Any = (*inputs, *more)
        return [slots[slot] if view is None else view.of(slots[slot]) for slot, view in self._results]


class Recorder(TorchDispatchMode):
    """Sees a body run. inputs: all tensors that it reads or writes and does not make or fetch."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.why_not = ""  # it cannot be recorded; empty while it can
        self._fetches: list[Fetch] = []
        self._given: list[Tensor | None] = list(inputs)
        self._inputs = len(self._given)
        self._made: dict[int, Tensor] = {}  # as allocated, by storage; held, so that no address comes twice
        self._steps: list[_Step] = []

    def run(self, body: Callable[[], Any]) -> Any:
        """body() itself, seen."""
        OPEN.recorder = self
        try:
            with self:
                return body()
        finally:
            OPEN.recorder = None

    # what the body does

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        op = implementation(func)
        if op is not None:
            with self:
                return op.cuda(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATE or func in _ZEROS:
            self._made[out.untyped_storage()._cdata] = out
            if func in _ZEROS and out.numel():
                self._steps.append(_Step(None, 0, (), ((0, out),), 0))
        elif not _is_view(func):
            self.refuse(f"{func} runs")
        return out

    def refuse(self, why: str) -> None:
        self.why_not = self.why_not or why

    def fetched(self, fetch: Fetch, tensors: tuple[Tensor | None, ...]) -> None:
        """The body has `tensors` from fetch(), which each later call asks anew, in this order."""
        self._fetches.append(fetch)
        self._given += tensors

    def kernel(
        self, kernel: Any, programs: int, tensors: Sequence[Tensor | None], rest: tuple[Any, ...], anywhere: int
    ) -> None:
        """A launch, of addresses and then the rest. anywhere: so many of the first addresses may be any."""
        if not isinstance(kernel, _C.Kernel):
            return self.refuse("a kernel is launched by Triton")
        values = (*[None if t is None else 0 for t in tensors], *rest)
        present = tuple([(i, t) for i, t in enumerate(tensors) if t is not None])
        self._steps.append(_Step(kernel, programs, values, present, anywhere))

    def gemm(self, plan: _C.GemmPlan, tensors: Sequence[Tensor | None]) -> None:
        """A product, of tensors as GemmPlan.run takes their addresses."""
        self._steps.append(_Step(plan, 0, (), tuple([(i, t) for i, t in enumerate(tensors) if t is not None]), 0))

    # what was seen

    def finish(self, results: Sequence[Tensor]) -> Recorded | None:
        """The recording of the body that gave `results`; None where why_not says why. To be called once: afterwards it
        holds no tensor, for a dispatch mode is freed by the collector alone, and an output holds its graph."""
        try:
            return self._finish(results)
        finally:
            self._given, self._made, self._steps = [], {}, []

    def _finish(self, results: Sequence[Tensor]) -> Recorded | None:
        uses = self._uses()
        if self.why_not or not self._steps:
            return None
        device = self._steps[0].tensors[0][1].device
        kept, found = self._kept(results)
        offsets, block = _packed([(key, self._made[key], *span) for key, span in uses.items() if key not in kept])
        first, last = len(self._given), len(self._given) + len(kept)
        places = {key: (first + i, 0) for i, key in enumerate(kept)} | {key: (last, at) for key, at in offsets.items()}
        if self.why_not:
            return None
        sequence = _C.Sequence(last + bool(block))
        for step in self._steps:
            patches = [(position, *self._place(t, places)) for position, t in step.tensors if t.numel()]
            if isinstance(step.issued, _C.Kernel):
                sequence.add_kernel(step.issued, step.programs, step.values, patches)
            elif step.issued is not None:
                sequence.add_gemm(step.issued, patches)
            else:
                sequence.add_zeros(step.tensors[0][1].nbytes, *patches[0][1:])
        slots = [(at if isinstance(at, int) else places[at[0]][0], view) for at, view in found]
        return Recorded(sequence, device, self._fetches, list(kept.values()), block, slots)

    def _slot(self, t: Tensor) -> Given | None:
        """The given tensor that t is, or in which it lies."""
        at = t.data_ptr()
        found = [(i, 0) for i, g in enumerate(self._given) if g is t]  # a quantized weight has no address of its own
        if not found:
            found = [(i, at - g.data_ptr()) for i, g in enumerate(self._given) if g is not None and _holds(g, at)]
        # Any of the inputs that begin at one address will do: where they do is part of what a recording is found by.
        same = at and len({offset for _, offset in found}) == 1 and found[-1][0] < self._inputs
        if len(found) != 1 and not same:
            self.refuse(f"a {tuple(t.shape)} {t.dtype} lies in {len(found)} tensors that the body was given")
            return None
        return found[0]

    def _uses(self) -> dict[int, tuple[int, int]]:
        """The first and the last step that uses each allocation."""
        uses: dict[int, tuple[int, int]] = {}
        for i, step in enumerate(self._steps):
            for position, t in step.tensors:
                key = t.untyped_storage()._cdata
                if key in self._made:
                    uses[key] = uses.get(key, (i, i))[0], i
                elif t.numel() and (slot := self._slot(t)) and slot[0] >= self._inputs and position >= step.anywhere:
                    self.refuse("a kernel was compiled for the address of what is fetched")
        return uses

    def _place(self, t: Tensor, places: dict[int, Given]) -> Given:
        key = t.untyped_storage()._cdata
        if key not in self._made:
            slot = self._slot(t)
            assert slot is not None  # or _uses has refused
            return slot
        slot_, offset = places[key]
        return slot_, offset + t.data_ptr() - self._made[key].data_ptr()

    def _kept(self, results: Sequence[Tensor]) -> tuple[dict[int, Any], list[Any]]:
        """(allocations that results lie in, as a call is to make them: (shape, dtype); of each result (slot of a given
        tensor, or the allocation in a tuple; how it lies there))."""
        kept: dict[int, Any] = {}
        found: list[Any] = []
        for t in results:
            key = t.untyped_storage()._cdata
            if key in self._made and _is_whole(t):
                kept.setdefault(key, (t.shape, t.dtype))  # the first: outputs come before what is saved
        for t in results:
            key = t.untyped_storage()._cdata
            if key in self._made:
                base = self._made[key]
                shape, dtype = kept.setdefault(key, (base.shape, base.dtype))
                whole = _is_whole(t) and t.shape == shape and t.dtype == dtype
                found.append(((key,), None if whole else _view(t, None)))
                continue
            slot = self._slot(t)
            if slot is None:
                continue
            given: Any = self._given[slot[0]]
            same = slot[1] == 0 and (given.shape, given.dtype, given.stride()) == (t.shape, t.dtype, t.stride())
            if not same and given.dtype != t.dtype:
                self.refuse("a result is another view of what was given")
            found.append((slot[0], None if same else _view(t, given)))
        return kept, found


def _like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of which empty_like() has the strides of empty(shape): keys of recordings hold them. It keeps those of dense
    tensors, of one element or none, and would take zeros from them."""
    return torch.empty(shape if shape.numel() < 2 else (), dtype=dtype, device=device).expand(shape)


def _view(t: Tensor, base: Tensor | None) -> _View:
    offset: Any = t.storage_offset()
    return _View(t.dtype, t.shape, t.stride(), offset - (0 if base is None else base.storage_offset()))


def _is_whole(t: Tensor) -> bool:
    return t.is_contiguous() and t.storage_offset() == 0 and t.nbytes == t.untyped_storage().nbytes()


def _holds(given: Tensor, at: int) -> bool:
    extent = 1 + sum((size - 1) * step for size, step in zip(given.shape, given.stride(), strict=True))
    return given.data_ptr() <= at < given.data_ptr() + extent * given.element_size() and given.numel() > 0


def _is_view(func: Any) -> bool:
    """An op that computes nothing: its results alias its arguments."""
    returned = func._schema.returns
    aliases = bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    return (aliases and not func._schema.is_mutable) or func is aten._unsafe_view.default


def _packed(uses: list[tuple[int, Tensor, int, int]]) -> tuple[dict[int, int], int]:
    """(an offset for each allocation of (key, tensor, first, last step) in one block, the block's bytes): what no step
    uses together may lie in the same place."""
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # (start, stop, last step)
    end = 0
    for key, t, first, last in sorted(uses, key=lambda use: use[2]):
        size = -(-t.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
        taken = sorted(use for use in taken if use[2] >= first)
        start = 0
        for begin, stop, _ in taken:
            if begin - start >= size:
                break
            start = max(start, stop)
        offsets[key] = start
        taken.append((start, start + size, last))
        end = max(end, start + size)
    return offsets, end
