"""All-gathers and reduce-scatters of plain tensors that begin and finish apart, for callers, with autograd.

    begin         | copies of x_shard to the others, beside whatever the caller runs |
    wait                                                                             | sum, or copy out of the slot

Backward has the same gap, upside down: the backward of wait() begins the transposed exchange, and the backward of begin
finishes it. Autograd runs what was issued in between in between.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.functional.saved import backward_method, forward_method
from te_lite.overlap.buffers import Gather, Scatter
from te_lite.overlap.bulk import Bulk
from te_lite.overlap.collective import _all_gather_into, _reduce_scatter_into, _wire_dtype
from te_lite.overlap.exchange import Gemm, Place
from te_lite.overlap.group import Operation
from te_lite.overlap.userbuffers import group_of
from te_lite.parallel import TensorParallel
from te_lite.quantize.identity import HIGH_PRECISION
from te_lite.quantize.qtensor import QTensor
from te_lite.watch import collective

TRANSPOSED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


class Transfer:
    """An exchange of x along `dim` that has begun, as autograd does not see it.

    Where it goes through userbuffers, its slot is wanted again after SLOTS uses of its buffer. The use that wants it
    finishes this one first, on every rank alike, so that an unfinished transfer makes nobody wait for ever.
    """

    def __init__(self, verb: str, x: Tensor, group: dist.ProcessGroup, dim: int, strict: bool) -> None:
        self.verb, self.group, self.dim, self.strict = verb, group, dim, strict
        self.back: Transfer | None = None
        self._result: Tensor | None = None
        x = x.detach().resolve_conj().resolve_neg().movedim(dim, 0)  # of what torch does lazily no bytes are there
        self._rest, self.text = x.shape[1:], f"te.{verb}(dim={dim}), {x.dtype} {list(x.shape)}"
        tp = TensorParallel("column", dist.get_world_size(group), group, True)
        found = group_of(group, x.device) if tp.active else "the group has one rank"
        if isinstance(found, str) and strict and tp.active:
            raise RuntimeError(f"te.{verb}: overlap was asked for and does not happen: {found}; or leave strict out")
        x = x.contiguous().view(x.shape[0], self._rest.numel())
        begun: Callable[[], Tensor] | None = None
        if not isinstance(found, str) and x.numel():
            place = Place(tp, f"of {list(x.shape)}", found, "bulk", f"te.{verb}", strict=strict or found.strict)
            begun = self._through_userbuffers(Bulk(place), x)
        self._finish = begun or self._collectively(x)

    def _through_userbuffers(self, bulk: Bulk, x: Tensor) -> Callable[[], Tensor] | None:
        """What finishes it; None where x does not fit."""
        ub, gathers = bulk.group, self.verb == "all_gather"
        q = QTensor(HIGH_PRECISION, (x.shape[0], x.shape[1]), x.dtype, x)
        gemm = Gemm(QTensor(HIGH_PRECISION, (x.shape[1], 0), x.dtype), "row", x.dtype, False, "")  # says how wide x is
        if bulk.settled(q, None if gathers else gemm, "row" if gathers else None) is not bulk:
            return None
        with ub.operation(self.text):
            begun: Any = bulk.all_gather(q, "row") if gathers else bulk.reduce_scatter(gemm, x)
        use: Gather | Scatter = begun if gathers else begun.scatter
        held, slot, verb, text, own = use.buffer.held, use.slot, self.verb, self.text, weakref.WeakMethod(self.result)
        held[slot] = self.result

        def finish() -> Tensor:  # without self, which has it
            if ub.closed:
                raise RuntimeError(f"te.{verb}: destroy_ub() has ended its userbuffers before wait(); wait first")
            if held.get(slot) == own():
                del held[slot]
            with ExitStack() as on_error, torch.inference_mode(False):
                on_error.push(Operation(ub, text))  # tells the others; not announced again
                if not gathers:
                    return begun.result()
                whole: Any = begun.whole().map(torch.clone).row
                begun.close()
                return whole

        return finish

    def _collectively(self, x: Tensor) -> Callable[[], Tensor]:
        size, works, dtype, gathers = dist.get_world_size(self.group), list[Any](), x.dtype, self.verb == "all_gather"
        if gathers:
            x = x.view(torch.uint8) if x.numel() else x  # no backend knows every dtype
            run, out = _all_gather_into, x.new_empty(x.shape[0] * size, x.shape[1])
        else:
            x = x.to(_wire_dtype(self.group, x.dtype))
            run, out = _reduce_scatter_into, x.new_empty(x.shape[0] // size, x.shape[1])
        collective(self.text, x, self.group, lambda: works.append(run(out, x, group=self.group, async_op=True)))

        def finish() -> Tensor:
            for work in works:
                work.wait()
            return out.view(dtype) if gathers else out.to(dtype)

        return finish

    def result(self) -> Tensor:
        """The gathered tensor, or this rank's part of the sum, once it is there; in memory of its own."""
        if self._result is None:
            whole = self._finish()
            self._result = whole.view(whole.shape[0], *self._rest).movedim(0, self.dim).contiguous()
            del self._finish  # and with it x
        return self._result


class Begin(torch.autograd.Function):
    """An empty tensor by which autograd knows x; backward gives the gradient that End's backward has begun."""

    @forward_method
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return x.new_empty(0)

    @backward_method
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        back, ctx.transfer.back = ctx.transfer.back, None
        return back.result(), None


class End(torch.autograd.Function):
    """The result of a transfer; backward begins the transposed one."""

    @forward_method
    def forward(ctx: Any, token: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        out, transfer._result = transfer.result(), None  # no cycle: the result knows this node
        return out

    @backward_method
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        it = ctx.transfer
        it.back = Transfer(TRANSPOSED[it.verb], dy, it.group, it.dim, it.strict)
        return dy.new_empty(0), None


class Handle:
    """An exchange that has begun. wait() gives its result, in memory of the caller's own; every call the same tensor.

    What was given must not be written to before. A handle that is dropped without wait() warns: its result is lost. Not
    in a backward: a checkpoint's recomputation ends early. Nobody hangs: what it sends is on its way, and what it
    receives is taken when the slot is needed again.
    """

    _out: Tensor | None = None
    _waited = True  # before the transfer has begun, or where that raises, there is nothing to wait for

    def __init__(self, verb: str, x: Tensor, group: dist.ProcessGroup, dim: int, strict: bool) -> None:
        self._transfer = Transfer(verb, x, group, dim, strict)
        self._waited = torch._C._current_graph_task_id() != -1
        self._token = Begin.apply(x, self._transfer)

    def wait(self) -> Tensor:
        """The gathered tensor, or this rank's part of the sum. On a GPU the caller's stream waits, not the host."""
        self._waited = True
        if self._out is None:
            # Where the transfer began says whether it has a gradient: who waits first may do so under no_grad.
            with torch.inference_mode(False), torch.set_grad_enabled(self._token.requires_grad):
                self._out = End.apply(self._token, self._transfer)
        return self._out

    def __del__(self) -> None:
        if not self._waited and not sys.is_finalizing():
            text = f"{self._transfer.text} was dropped without wait(): its result is lost; keep the handle and wait"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
