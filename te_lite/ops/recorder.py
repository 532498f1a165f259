"""Recording a body: the launches that it makes, which one call into C++ then issues for other tensors.

A body is a function whose launches follow from shapes, dtypes and addresses modulo 256 alone. While it runs as usual a
dispatch mode sees what it allocates, and launch() and product() note what they issue. Anything else that would run on
the device makes the recording fail, and such a body simply runs as it is.

Between ranks a body also takes turns in buffers, each of which gives it a number, an epoch; it issues programs that
hold them, announces operations, and reads memory that stays in its place. Whose turn it is decides where in a buffer
things lie: it is for the caller to tell recordings of different turns apart.
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
from te_lite.ops.recorded import Fetch, Recorded, Turns, View, packed
from te_lite.ops.registry import implementation

aten = torch.ops.aten
_WORD = os.environ.get("TE_LITE_RECORD", "1")
if _WORD not in ("", "0", "1"):
    raise ValueError(f"TE_LITE_RECORD={_WORD!r}: must be 0 or 1; leave it out for 1")
WANTED = _WORD not in ("", "0") and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_ALLOCATE = frozenset((aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default))
_ZEROS = frozenset((aten.new_zeros.default, aten.zeros.default))

Given = tuple[int, int]  # (slot, offset in bytes)


class Open(threading.local):
    """What this thread records into now."""

    recorder: Recorder | None = None


OPEN = Open()


class _Step(NamedTuple):
    add: Callable[[_C.Sequence, list[tuple[int, int, int]], list[tuple[int, int]]], None]  # to a sequence
    tensors: tuple[tuple[int, Tensor], ...] = ()  # (position of its address, the tensor)
    anywhere: int = 0  # so many of the first positions may hold any address; later ones were seen modulo 256
    numbers: tuple[tuple[int, int], ...] = ()  # (position, which turn's epoch)
    use: object = None  # of a buffer: until its last step the tensors of all of them are read
    stream: int = 0  # its handle, where it is not that of the body


class Recorder(TorchDispatchMode):
    """Sees a body run. inputs: all tensors that it reads or writes and does not make or fetch, but for those that lie
    in `fixed`: memory that stays in its place as long as the recording is used."""

    def __init__(self, inputs: Sequence[Tensor | None], fixed: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._fixed = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in fixed]
        self._turns: list[tuple[Turns, int, Tensor]] = []  # with its epoch in the run that is seen, and its word
        self._stream = _current_stream()
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
        except BaseException:
            self._forget()
            raise
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
                self._step(lambda to, at, _: to.add_zeros(out.nbytes, *at[0][1:]), (out,))
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
        self, kernel: Any, programs: int, tensors: Sequence[Tensor | None], rest: tuple[Any, ...], anywhere: int,
        epoch: tuple[int, int, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """A launch, of addresses and then the rest. anywhere: so many of the first addresses may be any. epoch: where
        in all of them an epoch stands, the one that does, and the word of what gave it."""
        if not isinstance(kernel, _C.Kernel):
            return self.refuse("a kernel is launched by Triton")
        values = (*[None if t is None else 0 for t in tensors], *rest)
        numbers = () if epoch is None else ((epoch[0], self._turn(*epoch[1:])),)
        self._step(lambda to, at, turns: to.add_kernel(kernel, programs, values, at, turns), tensors, anywhere, numbers)

    def gemm(self, plan: _C.GemmPlan, tensors: Sequence[Tensor | None]) -> None:
        """A product, of tensors as GemmPlan.run takes their addresses."""
        self._step(lambda to, at, _: to.add_gemm(plan, at), tensors)

    def fused(
        self, gemm: _C.FusedGemm, programs: int, counts: tuple[int, int, int], words: list[int],
        tensors: Sequence[tuple[int, Tensor]], epoch: tuple[int, int, Tensor],
    ) -> None:  # fmt: skip
        """A fused GEMM, whose kernel is compiled for no addresses. words: as Sequence.add_fused takes values; tensors:
        (which of them is its address, a tensor, or a view of where the address points). epoch: as of kernel()."""
        numbers = ((epoch[0], self._turn(*epoch[1:])),)
        self._steps.append(
            _Step(
                lambda to, at, turns: to.add_fused(gemm, programs, counts, words, at, turns),
                tuple(tensors), len(words), numbers, stream=self._side(),
            )
        )  # fmt: skip

    # between ranks

    def turn(self, turns: Turns, epoch: int, word: Tensor) -> None:
        """The body has taken a turn, which gave it `epoch`. word: by which what gave it is known, and of which kernels
        count epochs."""
        self._turns.append((turns, epoch, word))

    def issue(
        self, executor: _C.Executor, program: _C.Program, segment: int, epoch: int, word: Tensor, count: int,
        tensors: Sequence[Tensor], use: object,
    ) -> None:  # fmt: skip
        """A segment of a program, whose `count` arguments are the addresses of tensors and then zeros. word: as of
        turn()."""
        present = tuple([(1 + i, t) for i, t in enumerate(tensors)])
        numbers = ((0, self._turn(epoch, word)),)
        self._steps.append(
            _Step(
                lambda to, at, turns: to.add_issue(executor, program, segment, count, at, turns), present, 1 + count,
                numbers, use, self._side(),
            )
        )  # fmt: skip

    def announce(self, control: _C.Control, operation: str, value: int) -> None:
        self._step(lambda to, _, __: to.add_announce(control, operation, value))

    def waits(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """What comes on a stream waits for what another has been given."""
        handles = [0 if one.cuda_stream == self._stream else one.cuda_stream for one in (stream, other)]
        self._steps.append(_Step(lambda to, _, __: to.add_wait(*handles), stream=-1))

    def _turn(self, epoch: int, word: Tensor) -> int:
        """Which turn gave the epoch. Two slots of one buffer may be at the same one: they go on together."""
        found = [i for i, (_, given, its) in enumerate(self._turns) if given == epoch and its is word]
        if not found:
            self.refuse("what waits for an epoch took no turn, as on one rank")
        return found[0] if found else 0

    def _side(self) -> int:
        current = _current_stream()
        return 0 if current == self._stream else current

    def _step(
        self, add: Any, tensors: Sequence[Tensor | None] = (), anywhere: int = 0,
        numbers: tuple[tuple[int, int], ...] = (),
    ) -> None:  # fmt: skip
        present = tuple([(i, t) for i, t in enumerate(tensors) if t is not None])
        self._steps.append(_Step(add, present, anywhere, numbers, stream=self._side()))

    # what was seen

    def finish(self, results: Sequence[Tensor]) -> Recorded | None:
        """The recording of the body that gave `results`; None where why_not says why. To be called once: afterwards it
        holds no tensor, for a dispatch mode is freed by the collector alone, and an output holds its graph."""
        try:
            return self._finish(results)
        finally:
            self._forget()

    def _forget(self) -> None:
        self._given, self._made, self._steps, self._turns = [], {}, [], []

    def _finish(self, results: Sequence[Tensor]) -> Recorded | None:
        uses = self._uses()
        if self.why_not or not any(step.tensors for step in self._steps):
            return None
        device = next(step for step in self._steps if step.tensors).tensors[0][1].device
        kept, found = self._kept(results)
        offsets, block = packed([(key, self._made[key], *span) for key, span in uses.items() if key not in kept])
        first, last = len(self._given), len(self._given) + len(kept)
        places = {key: (first + i, 0) for i, key in enumerate(kept)} | {key: (last, at) for key, at in offsets.items()}
        if self.why_not:
            return None
        zero = last + bool(block)  # the slot from which fixed memory is counted; behind it those of epochs
        sequence, on = _C.Sequence(zero + 1 + len(self._turns)), 0
        for step in self._steps:
            if step.stream not in (on, -1):
                on = step.stream
                sequence.on(on)
            patches = [(position, *self._place(t, places, zero)) for position, t in step.tensors if t.numel()]
            step.add(sequence, patches, [(position, zero + 1 + turn) for position, turn in step.numbers])
        slots = [(at if isinstance(at, int) else places[at[0]][0], view) for at, view in found]
        turns = [turns for turns, _, _ in self._turns]
        return Recorded(sequence, device, self._fetches, list(kept.values()), block, slots, turns)

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

    def _is_fixed(self, t: Tensor) -> bool:
        """Whether it lies in fixed memory, and in nothing that a call brings: callers own some of it."""
        at = t.data_ptr()
        if not any(first <= at < last for first, last in self._fixed):
            return False
        return not any(g is not None and _holds(g, at) for g in self._given)

    def _uses(self) -> dict[int, tuple[int, int]]:
        """The first and the last step that uses each allocation."""
        uses: dict[int, tuple[int, int]] = {}
        # What a buffer's use was given is read until its last step; and what two streams use, while both do.
        ends = {id(step.use): i for i, step in enumerate(self._steps) if step.use is not None}
        waits = [i for i, step in enumerate(self._steps) if step.stream == -1]
        for i, step in enumerate(self._steps):
            begin, end = i, i if step.use is None else ends[id(step.use)]
            if waits and waits[0] <= end and begin <= waits[-1]:
                begin, end = min(begin, waits[0]), max(end, waits[-1])
            for position, t in step.tensors:
                key = t.untyped_storage()._cdata
                if key in self._made:
                    known = uses.get(key, (begin, end))
                    uses[key] = min(known[0], begin), max(known[1], end)
                elif not t.numel() or self._is_fixed(t):
                    continue
                elif (slot := self._slot(t)) and slot[0] >= self._inputs and position >= step.anywhere:
                    self.refuse("a kernel was compiled for the address of what is fetched")
        return uses

    def _place(self, t: Tensor, places: dict[int, Given], zero: int) -> Given:
        key = t.untyped_storage()._cdata
        if key not in self._made:
            if self._is_fixed(t):
                return zero, t.data_ptr()
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


def _current_stream() -> int:
    """The handle; 0 also where there are no GPUs."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if torch.cuda.is_initialized() else 0


def wait_stream(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
    """stream.wait_stream(other), which a recording sees."""
    stream.wait_stream(other)
    if OPEN.recorder is not None:
        OPEN.recorder.waits(stream, other)


def _view(t: Tensor, base: Tensor | None) -> View:
    offset: Any = t.storage_offset()
    return View(t.dtype, t.shape, t.stride(), offset - (0 if base is None else base.storage_offset()))


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
