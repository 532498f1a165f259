"""The userbuffers of one tensor-parallel group: arena, copy stream, control, and what fits into them."""

from __future__ import annotations

import warnings
import zlib
from contextlib import AbstractContextManager
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.flags import compiled_wait
from te_lite.ops.group_max import MOST_RANKS, MOST_VALUES
from te_lite.ops.launch import side_stream
from te_lite.ops.nvrtc import unavailable
from te_lite.ops.recorder import OPEN
from te_lite.ops.registry import capturing
from te_lite.overlap.arena import Arena, share_memory
from te_lite.overlap.bootstrap import BootstrapError, Rendezvous, host_identity, timeout_s
from te_lite.overlap.buffers import PIECES, SLOTS, Buffer, Gather, Scatter
from te_lite.overlap.choice import Choices
from te_lite.overlap.maximum import Maximum
from te_lite.overlap.programs import WORD, following, gathered_bytes
from te_lite.overlap.symmetric import CHANNELS, MOST_TENSORS, Space
from te_lite.quantize.qtensor import Layout, QTensor

if TYPE_CHECKING:
    from te_lite.overlap.config import LayerMethods

SCALE_SHARE = 8  # room for scales beside 16-bit data: the finest, one fp32 a 32 values of one byte, are an eighth


class Operation(AbstractContextManager[None]):
    """See Group.operation. Any number of calls may use it, one after the other."""

    __slots__ = ("group", "hashed", "text")

    def __init__(self, group: Group, text: str) -> None:
        self.group, self.text, self.hashed = group, text, zlib.crc32(text.encode())

    def __enter__(self) -> None:
        control = self.group.control
        control.announce(self.text, self.hashed)
        if OPEN.recorder is not None:
            OPEN.recorder.announce(control, self.text, self.hashed)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.group.failed(self.text, error)


class Group:
    """Made by all its ranks together. tokens, hidden: the largest gathered operand [tokens, hidden] in `dtype`.

    graphs: slots of their own for calls captured in CUDA graphs. symmetric: bytes for Space. Raises BootstrapError, on
    all ranks alike, where the ranks cannot map each other's memory.
    """

    def __init__(
        self, exchange: Rendezvous, device: torch.device, tokens: int, hidden: int, dtype: torch.dtype,
        layers: LayerMethods, *, strict: bool = False, graphs: bool = False, symmetric: int = 0,
    ) -> None:  # fmt: skip
        self.ranks, self.rank, self.size, self.device = exchange.ranks, exchange.rank, exchange.size, device
        self.shape, self.dtype, self.layers, self.strict = (tokens, hidden), dtype, layers, strict
        self.cuda, self.others = device.type == "cuda", tuple(following(self.rank, self.size))
        hosts = exchange.all(host_identity())
        if len(set(hosts)) > 1:
            places = {host: [self.ranks[i] for i, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)}
            where = ", ".join(f"ranks {ranks} on {host.split()[0]}" for host, ranks in places.items())
            raise BootstrapError(f"the group spans hosts: {where}; userbuffers need shared memory")
        self.closed = False
        # Of all ranks: one that took a ring where the others do not would wait for them, and they for it.
        self.no_fused = next(filter(None, exchange.all(unavailable(device))), "")
        self.choices = Choices(exchange, device)
        self.arena = Arena(self.rank, self.size, device)
        whole = tokens * hidden * dtype.itemsize
        names = ("gather", "scatter", *(("gather.graph", "scatter.graph") if graphs else ()))
        for name in names:
            room = whole + whole // SCALE_SHARE + 4096 * self.size if name.startswith("gather") else whole
            self.arena.reserve(name, room + 256 * self.size, SLOTS)
        self.arena.reserve("symmetric", symmetric)
        self._flags = self.arena.bytes  # where they begin: all that follows, zero as all new memory is
        for name in names:
            self.arena.reserve(f"{name}.flags", WORD * self.size * (PIECES + 1), SLOTS)
        for kind in product((False, True), repeat=2):
            Maximum.reserve(self.arena, *kind)
        self.arena.reserve("signals", WORD * self.size * CHANNELS, MOST_TENSORS * (symmetric > 0))
        self.arena.commit(exchange)
        self._control_memory = share_memory(exchange, _C.CONTROL_BYTES, torch.device("cpu"))
        self._buffers = {name: Buffer(self.arena, name, name.endswith(".graph")) for name in names}
        # By whether the call is captured in a CUDA graph, and elementwise; none on CPU ranks.
        self._maxima: dict[tuple[bool, bool], Maximum] = {}
        self.symmetric = Space(self)
        try:
            exchange.step("starting userbuffers", self._watch)
        except BaseException:
            self._stop()
            raise

    def _watch(self) -> None:
        """Control, executor and what they need; may fail on this rank alone."""
        addresses = [memory.address for memory in self._control_memory]
        self.control = _C.Control(
            self.rank, self.size, addresses, self._control_memory, timeout_s(), names=list(self.ranks)
        )
        self.stream = self.side_stream = None
        if not self.cuda:
            self.executor = _C.Executor(-1, self.control)
            return
        self.stream, self.side_stream = torch.cuda.Stream(self.device, priority=-1), side_stream(self.device)
        flags = self.arena.address("gather.flags", 0, self.rank), self.arena.bytes - self._flags
        wait = compiled_wait(self.device)
        self.executor = _C.Executor(self.device.index, self.control, self.stream.cuda_stream, *flags, wait)
        word = _C.dlpack(self.executor.abort_address, 4, self.device.index, self.executor)
        self.abort = torch.from_dlpack(word).view(torch.int32)
        if self.size > MOST_RANKS:
            return
        graphs = (False, True) if "gather.graph" in self._buffers else (False,)
        for kind in product(graphs, (False, True)):
            self._maxima[kind] = Maximum(self.arena, *kind)

    # one call

    def buffer(self, kind: str) -> Buffer:
        """The buffer for "gather" or "scatter" that this call uses."""
        graph = f"{kind}.graph"
        return self._buffers[graph if graph in self._buffers and capturing() else kind]

    def issue(
        self, use: Gather | Scatter, segment: int, arguments: tuple[int, ...], tensors: tuple[Tensor, ...] = ()
    ) -> None:  # fmt: skip
        """A segment of its program, in one call. tensors: whose addresses the arguments are; others are not read.
        RuntimeError once the group is broken."""
        main = torch._C._cuda_getCurrentRawStream(self.device.index) if self.cuda else 0
        words = use.buffer.words
        word = 0 if words is None else words.data_ptr() + WORD * use.slot
        self.executor.issue(use.program, segment, use.epoch, main, arguments, word)
        if OPEN.recorder is not None:
            zero, count = use.buffer.zero, len(arguments)
            OPEN.recorder.issue(self.executor, use.program, segment, use.epoch, zero, count, tensors, use)

    def announce(self, text: str) -> None:
        """The group's next operation: every rank must run the same. RuntimeError once the group is broken."""
        self.control.announce(text, zlib.crc32(text.encode()))
        if OPEN.recorder is not None:
            OPEN.recorder.refuse(f"{text} runs once")

    def meet(self, text: str) -> None:
        """As announce, before a collective of torch.distributed. On CPU ranks it returns once all of them have come to
        the same, since gloo hangs or ends the process where ranks differ; NCCL's hosts go on."""
        meet = self.control.announce if self.cuda else self.control.agree
        meet(text, zlib.crc32(text.encode()))
        if OPEN.recorder is not None:
            OPEN.recorder.announce(self.control, text, zlib.crc32(text.encode()))

    def maximum(self, what: str, values: Tensor, elementwise: bool) -> Tensor | None:
        """fp32 [1], the largest of all ranks' values, which are not negative; elementwise the values, of which
        value i becomes the largest value i of all ranks. None where a collective must do that: on CPU ranks, under a
        capture without cuda_graphs, and for more values than fit."""
        fits = values.numel() <= MOST_VALUES and values.is_contiguous() and values.dtype == torch.float32
        maximum = self._maxima.get((capturing(), elementwise))
        if maximum is None or values.device != self.device or (elementwise and not fits):
            return None
        with self.operation(f"{what} through userbuffers{f', {list(values.shape)}' if elementwise else ''}"):
            largest = maximum.of(values, self)
        return values if elementwise else largest

    def next_slots(self) -> tuple[int, ...]:
        """Which slot the next use of each buffer and maximum takes, outside of CUDA graphs: where its data lies."""
        maxima = [maximum.next for (graph, _), maximum in self._maxima.items() if not graph]
        return (self._buffers["gather"].next, self._buffers["scatter"].next, *maxima)

    def fixed(self) -> list[Tensor]:
        """All memory of this rank that its uses read and write, beside what they are given."""
        found = [self.arena.whole(), *([self.abort] if self.cuda else ())]
        for buffer in self._buffers.values():
            found += [buffer.zero, buffer.counters]
        for maximum in self._maxima.values():
            found += maximum.fixed
        return found

    def failed(self, text: str, error: BaseException) -> None:
        """This rank has failed in an operation: tells the others, unless it was told by them."""
        if not isinstance(error, _C.GroupBroken):
            what = f"{type(error).__name__}: {error}"
            self.control.break_group(f"rank {self.ranks[self.rank]} failed in {text}: {what}")
        self.executor.synchronize()  # what is being copied goes with the caller's frame

    def check(self) -> None:
        """RuntimeError once the group is broken."""
        self.control.check()

    def operation(self, text: str) -> Operation:
        """Around one exchange of the whole group: announced, and over for all ranks if this rank fails in it."""
        return Operation(self, text)

    # what fits

    def gather_refusal(self, q: QTensor, layout: Layout) -> str:
        """Why `q` cannot be gathered through the arena, or "". A function of shape and capacity alone."""
        return self._refusal("gather", gathered_bytes([part.nbytes for part in q.wire(layout)], self.size))

    def scatter_refusal(self, rows: int, columns: int, dtype: torch.dtype) -> str:
        """Why partial sums [rows, columns] of each rank cannot be scattered through the arena, or ""."""
        return self._refusal("scatter", rows * columns * dtype.itemsize * self.size)

    def _refusal(self, kind: str, needed: int) -> str:
        if capturing() and f"{kind}.graph" not in self._buffers:
            return "captured in a CUDA graph: initialize_ub(..., cuda_graphs=True) reserves buffers for graphs"
        room = self._buffers[kind].capacity
        if needed > room:
            return (
                f"{needed} bytes are more than the userbuffer's {room}: initialize_ub was given the shape "
                f"{list(self.shape)}; give it the largest [tokens, hidden] of the run"
            )
        return ""

    def close(self) -> None:
        """Ends copies and watchers. Memory goes when the last tensor that views it is gone, whoever keeps the group:
        modules do, in their plans, until their next call."""
        self.closed = True
        if self.cuda:
            torch.cuda.synchronize(self.device)
        self.executor.synchronize()
        self._stop()

    def _stop(self) -> None:
        control: _C.Control | None = getattr(self, "control", None)  # _watch may have failed before
        for part in (getattr(self, "executor", None), control):
            if part is not None:
                part.close()
        for buffer in self._buffers.values():
            buffer.release()
        for maximum in self._maxima.values():
            maximum.release()
        self._buffers.clear()
        self._maxima.clear()
        self.arena.release()
        if control is not None and control.broken and not control.told:
            text = f"results may be wrong: userbuffers were broken when they ended: {control.broken}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
