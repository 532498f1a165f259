"""Recording a body: the launches that it makes, which one call into C++ then issues for other tensors.

A body is a function whose launches follow from shapes, dtypes and addresses modulo 256 alone. While it runs as usual a
dispatch mode sees what it allocates, and launch() and product() note what they issue. Anything else that would run on
the device makes the recording fail, and such a body simply runs as it is.

Between ranks a body also takes turns in buffers, each of which gives it a number, an epoch; it issues programs that
hold them, announces operations, and reads memory that stays in its place. Which slot of a buffer a turn gets decides
where things lie: recordings of other slots are other ones, and the caller's key says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from te_lite import _C
from te_lite.ops.recording import Called, Fetch, Recording, packed
from te_lite.ops.registry import implementation
from te_lite.ops.steps import (
    BETWEEN,
    Address,
    EpochArgument,
    EpochCounter,
    Step,
    Turn,
    View,
    holds,
    is_view,
    is_whole,
    view_of,
)

aten = torch.ops.aten
_WORD = os.environ.get("TE_LITE_RECORD", "1")
if _WORD not in ("", "0", "1"):
    raise ValueError(f"TE_LITE_RECORD={_WORD!r}: must be 0 or 1; leave it out for 1")
WANTED = _WORD not in ("", "0") and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_ALLOCATE = frozenset((aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default))
_ZEROS = frozenset((aten.new_zeros.default, aten.zeros.default))


class Open(threading.local):
    """What this thread records into now."""

    recorder: Recorder | None = None


OPEN = Open()


def called(function: Callable[..., object], *tensors: Tensor) -> None:
    """function(*tensors), which launches no kernel of te_lite's: Python calls it in every replay of the body too. It
    must use no other memory."""
    if OPEN.recorder is None:
        function(*tensors)
    else:
        OPEN.recorder.call(function, tensors)


class Recorder(TorchDispatchMode):
    """Sees a body run. inputs: all tensors that it reads or writes and does not make or fetch, but for those that lie
    in `fixed`: memory that stays in its place as long as the recording is used."""

    def __init__(self, inputs: Sequence[Tensor | None], fixed: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._fixed = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in fixed]
        self._turns: list[Turn] = []
        self._stream = _current_stream()
        self.why_not = ""  # it cannot be recorded; empty while it can
        self._fetches: list[Fetch] = []
        self._given: list[Tensor | None] = list(inputs)
        self._inputs = len(self._given)
        self._made: dict[int, Tensor] = {}  # as allocated, by storage; held, so that no address comes twice
        self._steps: list[Step] = []
        self._calling = False

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
        if self._calling:
            return func(*args, **(kwargs or {}))
        op = implementation(func)
        if op is not None:
            with self:  # torch has taken this mode off; what the op itself allocates must be seen too
                return op.cuda(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATE or func in _ZEROS:
            self._made[out.untyped_storage()._cdata] = out
            if func in _ZEROS and out.numel():
                self._step(lambda sequence, addresses, _: sequence.add_zeros(out.nbytes, *addresses[0][1:]), (out,))
        elif not is_view(func):
            self.refuse(f"{func} runs")
        return out

    def refuse(self, why: str) -> None:
        self.why_not = self.why_not or why

    def call(self, function: Callable[..., object], tensors: Sequence[Tensor]) -> None:
        """See called()."""
        if not tensors or _current_stream() != self._stream:
            self.refuse("a collective does not name its memory, or runs beside the body's stream")
        self._calling = True
        try:
            function(*tensors)
        finally:
            self._calling = False
        self._steps.append(Step(lambda *_: None, tuple(enumerate(tensors)), len(tensors), called=function))

    def fetched(self, fetch: Fetch, tensors: tuple[Tensor | None, ...]) -> None:
        """The body has `tensors` from fetch(), or what lies in them. Each later call asks it anew, in this order, and
        equal ones once."""
        if fetch not in self._fetches:
            self._fetches.append(fetch)
            self._given += tensors

    def kernel(
        self, kernel: Any, programs: int, tensors: Sequence[Tensor | None], rest: tuple[Any, ...], unaligned: int,
        epoch: EpochArgument | None = None,
    ) -> None:  # fmt: skip
        """A launch, of addresses and then the rest. unaligned: of so many tensors the first, as launch() has them."""
        if not isinstance(kernel, _C.Kernel):
            return self.refuse("a kernel is not compiled yet, or launched by Triton")
        values = (*[None if t is None else 0 for t in tensors], *rest)

        def add(sequence: _C.Sequence, addresses: Any, epochs: Any) -> None:
            sequence.add_kernel(kernel, programs, values, addresses, epochs)

        self._step(add, tensors, unaligned, () if epoch is None else (self._placed(epoch),))

    def gemm(self, plan: _C.GemmPlan, tensors: Sequence[Tensor | None]) -> None:
        """A product, of tensors as GemmPlan.run takes their addresses."""
        self._step(lambda sequence, addresses, _: sequence.add_gemm(plan, addresses), tensors)

    def fused(
        self, gemm: _C.FusedGemm, programs: int, counts: tuple[int, int, int], words: list[int],
        tensors: Sequence[tuple[int, Tensor]], epoch: EpochArgument,
    ) -> None:  # fmt: skip
        """A fused GEMM, whose kernel is compiled for no alignment. words: as Sequence.add_fused takes values; tensors:
        (which of them is its address, a tensor, or a view of where the address points)."""

        def add(sequence: _C.Sequence, addresses: Any, epochs: Any) -> None:
            sequence.add_fused(gemm, programs, counts, words, addresses, epochs)

        self._add(Step(add, tuple(tensors), len(words), (self._placed(epoch),)))

    # between ranks

    def turn(self, counter: EpochCounter, epoch: int, word: Tensor) -> None:
        """The body has taken a turn, which gave it `epoch`. word: the counter's int32 on the device, 0 outside of CUDA
        graphs, to which kernels add a number. Here only which one it is counts: it says whose epoch a number is."""
        self._turns.append(Turn(counter, epoch, word))

    def issue(
        self, executor: _C.Executor, program: _C.Program, segment: int, epoch: int, word: Tensor, count: int,
        tensors: Sequence[Tensor], use: object,
    ) -> None:  # fmt: skip
        """A segment of a program, whose `count` arguments are the addresses of tensors and then zeros. word: as of
        turn()."""
        present = tuple([(1 + i, t) for i, t in enumerate(tensors)])

        def add(sequence: _C.Sequence, addresses: Any, epochs: Any) -> None:
            sequence.add_issue(executor, program, segment, count, addresses, epochs)

        self._add(Step(add, present, 1 + count, (self._placed(EpochArgument(0, epoch, word)),), use))

    def announce(self, control: _C.Control, operation: str, value: int) -> None:
        self._step(lambda sequence, *_: sequence.add_announce(control, operation, value))

    def waits(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """What comes on a stream waits for what another has been given."""
        handles = [0 if one.cuda_stream == self._stream else one.cuda_stream for one in (stream, other)]
        self._steps.append(Step(lambda sequence, *_: sequence.add_wait(*handles), stream=BETWEEN))

    def _placed(self, argument: EpochArgument) -> tuple[int, int]:
        """(position, which turn gave the epoch). Two slots of one buffer may be at the same epoch; since the key says
        which of them comes next, they are so in every replay."""
        found = [i for i, turn in enumerate(self._turns) if turn.epoch == argument.epoch and turn.word is argument.word]
        if not found:
            self.refuse("the body took no turn for an epoch: a fused GEMM on one rank counts none")
        return argument.position, found[0] if found else 0

    def _step(
        self, add: Any, tensors: Sequence[Tensor | None] = (), unaligned: int = 0,
        epochs: tuple[tuple[int, int], ...] = (),
    ) -> None:  # fmt: skip
        self._add(Step(add, tuple([(i, t) for i, t in enumerate(tensors) if t is not None]), unaligned, epochs))

    def _add(self, step: Step) -> None:
        current = _current_stream()
        self._steps.append(step if current == self._stream else step._replace(stream=current))

    # what was seen

    def finish(self, results: Sequence[Tensor]) -> Recording | None:
        """The recording of the body that gave `results`; None where why_not says why. To be called once: afterwards it
        holds no tensor. Python frees a dispatch mode late, and an output would keep its whole graph."""
        try:
            return self._finish(results)
        finally:
            self._forget()

    def _forget(self) -> None:
        self._given, self._made, self._steps, self._turns = [], {}, [], []

    def _finish(self, results: Sequence[Tensor]) -> Recording | None:
        uses = self._lifetimes()
        if self.why_not or not any(step.tensors for step in self._steps):
            return None
        device = next(step for step in self._steps if step.tensors).tensors[0][1].device
        kept, found = self._kept(results)
        offsets, block = packed([(key, self._made[key], *span) for key, span in uses.items() if key not in kept])
        first, last = len(self._given), len(self._given) + len(kept)
        places = {key: Address(first + i, 0) for i, key in enumerate(kept)}
        places |= {key: Address(last, at) for key, at in offsets.items()}
        if self.why_not:  # _kept refuses too
            return None
        fixed_slot = last + bool(block)
        slots = fixed_slot + 1 + len(self._turns)
        parts: list[_C.Sequence | Called] = [_C.Sequence(slots)]
        stream = 0
        for step in self._steps:
            if step.called is not None:
                views = [self._as_view(t, places) for _, t in step.tensors]
                parts += [Called(step.called, views), _C.Sequence(slots)]
                stream = 0
                continue
            sequence: Any = parts[-1]
            if step.stream not in (stream, BETWEEN):
                stream = step.stream
                sequence.on(stream)
            addresses = [(position, *self._address(t, places, fixed_slot)) for position, t in step.tensors if t.numel()]
            step.add(sequence, addresses, [(position, fixed_slot + 1 + turn) for position, turn in step.epochs])
        if self.why_not:
            return None
        given = [(at if isinstance(at, int) else places[at[0]].slot, view) for at, view in found]
        counters = [turn.counter for turn in self._turns]
        return Recording(parts, device, self._fetches, list(kept.values()), block, given, counters)

    def _as_view(self, t: Tensor, places: dict[int, Address]) -> tuple[int, View]:
        if not t.numel() or (t.untyped_storage()._cdata not in self._made and self._is_fixed(t)):
            self.refuse("Python calls something for an empty tensor, or for what lies in userbuffers")
            return 0, view_of(t, None)
        slot, offset = self._address(t, places, 0)
        return slot, View(t.dtype, t.shape, t.stride(), offset // t.element_size())

    def _slot(self, t: Tensor) -> Address | None:
        """The given tensor that t is, or in which it lies. Refuses where several could be meant."""
        at = t.data_ptr()
        found = [(i, 0) for i, g in enumerate(self._given) if g is t]  # a quantized weight has no address of its own
        if not found:
            found = [(i, at - g.data_ptr()) for i, g in enumerate(self._given) if g is not None and holds(g, at)]
        # Any of the inputs that begin at one address will do: where they do is part of what a recording is found by.
        same = at and len({offset for _, offset in found}) == 1 and found[-1][0] < self._inputs
        if len(found) != 1 and not same:
            self.refuse(f"a {tuple(t.shape)} {t.dtype} lies in {len(found)} tensors that the body was given")
            return None
        return Address(*found[0])

    def _is_fixed(self, t: Tensor) -> bool:
        """Whether its address is the same in every call. What a call brings may lie in an arena too, as the tensors of
        te.symmetric_empty, and is another one in the next call."""
        at = t.data_ptr()
        if not any(first <= at < last for first, last in self._fixed):
            return False
        return not any(g is not None and holds(g, at) for g in self._given)

    def _lifetimes(self) -> dict[int, tuple[int, int]]:
        """The first and the last step that uses each allocation."""
        uses: dict[int, tuple[int, int]] = {}
        # What a buffer's use was given is read until the last step of that use. From the first wait between streams to
        # the last, two of them may run, so what is used there is in use throughout.
        ends = {id(step.use): i for i, step in enumerate(self._steps) if step.use is not None}
        waits = [i for i, step in enumerate(self._steps) if step.stream == BETWEEN]
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
                elif (given := self._slot(t)) and given.slot >= self._inputs and position >= step.unaligned:
                    # The key says how inputs are aligned, and says it of nothing that is fetched.
                    self.refuse("a kernel was compiled for the alignment of what is fetched")
        return uses

    def _address(self, t: Tensor, places: dict[int, Address], fixed_slot: int) -> Address:
        key = t.untyped_storage()._cdata
        if key in self._made:
            slot, offset = places[key]
            return Address(slot, offset + t.data_ptr() - self._made[key].data_ptr())
        if self._is_fixed(t):
            return Address(fixed_slot, t.data_ptr())
        given = self._slot(t)
        assert given is not None  # or _lifetimes has refused
        return given

    def _kept(self, results: Sequence[Tensor]) -> tuple[dict[int, Any], list[Any]]:
        """(allocations that results lie in, as a call is to make them: (shape, dtype); of each result (slot of a given
        tensor, or the allocation in a tuple; how it lies there))."""
        kept: dict[int, Any] = {}
        found: list[Any] = []
        for t in results:
            key = t.untyped_storage()._cdata
            if key in self._made and is_whole(t):
                kept.setdefault(key, (t.shape, t.dtype))  # the first: outputs come before what is saved
        for t in results:
            key = t.untyped_storage()._cdata
            if key in self._made:
                base = self._made[key]
                shape, dtype = kept.setdefault(key, (base.shape, base.dtype))
                whole = is_whole(t) and t.shape == shape and t.dtype == dtype
                found.append(((key,), None if whole else view_of(t, None)))
                continue
            where = self._slot(t)
            if where is None:
                continue
            given: Any = self._given[where.slot]
            same = where.offset == 0 and (given.shape, given.dtype, given.stride()) == (t.shape, t.dtype, t.stride())
            if not same and given.dtype != t.dtype:
                self.refuse(f"a result of {t.dtype} lies in a given tensor of {given.dtype}")
            found.append((where.slot, None if same else view_of(t, given)))
        return kept, found


def _current_stream() -> int:
    """The handle; 0 also where there are no GPUs."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if torch.cuda.is_initialized() else 0
