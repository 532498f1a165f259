"""Exchanges: how what one GEMM reads or gives travels between the ranks of a group, as four verbs.

A linear's forward and backward (functional/parallel.py) are written once over the verbs; an exchange says when the
bytes move. With R ranks, tokens M = R * m, and `_shard_m` for what is split by tokens:

    all_gather(a_shard_m, layout)      begins; a[M, k] = the shards of all ranks, in their order, is read later
    all_gather_gemm(gemm, gathering)   gemm(a)
    reduce_scatter(gemm, partial)      begins; y_shard_m = this rank's rows of the sum of partial[M, n] over the ranks
    gemm_reduce_scatter(gemm, a)       the same of the products of all ranks

What is summed ends as what is not: with gemm.finish(). `Collective` is the specification: torch.distributed's
all-gather and reduce-scatter around the GEMMs. `Bulk`, `Ring` and `Fused` go through userbuffers, each of them the one
before with other GEMMs; `Auto` picks among them. The table of exchanges is in exchanges.py. Who moves what, under
sequence parallelism:

                      column-parallel, w[N/R, K]          row-parallel, w[N, K/R]
    forward           x = all_gather(x_shard[m, K])       y_part = x @ w^T
                      y = x @ w^T                         y_shard[m, N] = reduce_scatter(y_part)
    backward          dx_part = dy @ w                    dy = all_gather(dy_shard[m, N])
                      dx_shard = reduce_scatter(dx_part)  dx = dy @ w
                      x = all_gather(x_shard), dw = dy^T x    dw = dy^T x

Without sequence parallelism both gathers vanish and both reduce-scatters are all-reduces.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.arrange import contiguous
from te_lite.ops.nvtx import ranged
from te_lite.ops.recorder import called
from te_lite.overlap.exchange import Gathering, Gemm, Outcome, Place, Summing
from te_lite.quantize.qtensor import Layout, QTensor
from te_lite.watch import collective

MOST_SHAPES = 4096  # of calls, that one exchange remembers
_NOTHING: AbstractContextManager[Any] = nullcontext()
# torch 2.13 renames both and warns about the old names.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _wire_dtype(group: dist.ProcessGroup, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums travel: gloo adds in the wire's dtype, rounding at each step, so fp32 there."""
    return torch.float32 if dist.get_backend(group) == "gloo" else dtype


@ranged("te_lite.all_gather")
def all_gather(shard: Tensor, group: dist.ProcessGroup, what: str = "all-gather") -> Tensor:
    """[m, ...] on each of R ranks -> [R*m, ...] on all, in rank order. No autograd. what: for messages."""
    if shard.is_floating_point() and shard.element_size() == 1:  # not every backend knows fp8
        return all_gather(shard.view(torch.uint8), group, what).view(shard.dtype)
    out = shard.new_empty(shard.shape[0] * dist.get_world_size(group), *shard.shape[1:])
    collective(what, shard, group, partial(_all_gather_into, group=group), out, contiguous(shard))
    return out


@ranged("te_lite.reduce_scatter")
def reduce_scatter(summand: Tensor, group: dist.ProcessGroup, what: str = "reduce-scatter") -> Tensor:
    """[R*m, N] partial sums on each of R ranks -> [m, N]: this rank's tokens, summed. No autograd."""
    wire = summand.to(_wire_dtype(group, summand.dtype))
    out = wire.new_empty(wire.shape[0] // dist.get_world_size(group), *wire.shape[1:])
    collective(what, summand, group, partial(_reduce_scatter_into, group=group), out, wire)
    return out.to(summand.dtype)


@ranged("te_lite.all_reduce")
def all_reduce(summand: Tensor, group: dist.ProcessGroup, what: str = "all-reduce") -> Tensor:
    """[M, N] partial sums on each rank -> [M, N] summed on all; may reuse the input's memory. No autograd."""
    wire = summand.to(_wire_dtype(group, summand.dtype))
    collective(what, summand, group, partial(dist.all_reduce, group=group), wire)
    return wire.to(summand.dtype)


class Gathered:
    """A Gathering whose collective runs when it is read first."""

    def __init__(self, exchange: Collective, q: QTensor, layout: Layout) -> None:
        self.exchange, self.q, self.layout = exchange, q, layout
        self._whole: QTensor | None = None

    def whole(self) -> QTensor:
        if self._whole is None:
            place, q = self.exchange.place, self.q
            shards = q.wire(self.layout)
            self.exchange.note(sum([part.nbytes for part in shards]) * (place.tp.size - 1))
            text = place.text(f"{place.gemm}'s all-gather", q)
            parts = tuple([all_gather(part, place.tp.group, text) for part in shards])
            self._whole = q.from_wire(parts, self.layout, q.shape[0] * place.tp.size)
        return self._whole

    def close(self) -> None:
        self._whole = None


class Summed:
    """A Summing that is done."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def result(self) -> Any:
        return self._result


class Collective:
    """The verbs, by torch.distributed; nothing is hidden. Another exchange is a subclass of Bulk, or of one that
    inherits from it, which serves some of them differently, and a line in exchanges.py.

    hides: behind GEMMs. gathers, scatters: whether users may ask for it (ub_cfgs) where a GEMM reads gathered tokens,
    and where it gives what is scattered. name: as the report calls it. reason: why it stands in for another.
    """

    name = "collective"
    gathers = scatters = hides = False

    def __init__(self, place: Place, reason: str = "") -> None:
        self.place, self.tp, self.reason = place, place.tp, reason
        self._operations: dict[tuple, AbstractContextManager[Any]] = {}

    def settled(self, a: QTensor, gemm: Gemm | None, layout: Layout | None) -> Collective:
        """The exchange that a call takes, the same on every rank: this one, or one that stands in for it.

        a: what is gathered in `layout`, for `gemm` or, with None, to be read later; with layout None: what is
        multiplied and then scattered. Raises RuntimeError under strict, before anything has begun.
        """
        return self

    def operation(self, what: str, q: QTensor, gemm: Gemm | None = None) -> AbstractContextManager[Any]:
        """Around the verbs of one call: where a rank fails inside, the others hear of it. As of Place.text."""
        group = self.place.group
        if group is None or group.closed:
            return _NOTHING
        key = what, q.format, q.dtype, q.shape, None if gemm is None else (gemm.b.shape, gemm.layout)
        known = self._operations.get(key)
        if known is None:
            if len(self._operations) >= MOST_SHAPES:
                self._operations.clear()
            known = self._operations[key] = group.operation(self.place.text(what, q, gemm))
        return known

    def note(self, sent: int, remark: str = "") -> None:
        """What this call moves, for the report."""
        self.place.note = Outcome(self.name, sent, "; ".join(filter(None, (self.reason, remark))))

    def all_gather(self, q: QTensor, layout: Layout, *, multiplied: bool = False, whole: bool = True) -> Gathering:
        """multiplied: all_gather_gemm will take it. whole: whole() will be called."""
        return Gathered(self, q, q.regather_layout if layout == "col" else layout)

    def all_gather_gemm(self, gemm: Gemm, gathering: Gathering) -> Any:
        """gemm of the gathered tensor. Leaves the gathering open."""
        return gemm(gathering.whole())

    def reduce_scatter(self, gemm: Gemm, partial: Tensor) -> Summing:
        """The sum over ranks of partial[M, n], which gemm.product() gave and nobody writes to before result()."""
        tp, scatters = self.tp, self.tp.sequence_parallel
        self.note(partial.nbytes * (tp.size - 1) // tp.size * (1 if scatters else 2))
        text = self.place.text(f"{self.place.gemm}'s {'reduce-scatter' if scatters else 'all-reduce'}", partial)
        total = (reduce_scatter if scatters else all_reduce)(partial, tp.group, text)
        if gemm.bias is not None:
            called(Tensor.add_, total, gemm.bias)
        return Summed(gemm.finish(total))

    def gemm_reduce_scatter(self, gemm: Gemm, a: QTensor) -> Any:
        """gemm.finish() of the sum over ranks of the products with a, this rank's rows."""
        return self.reduce_scatter(gemm, gemm.product(a)).result()
