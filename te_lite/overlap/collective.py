"""Collective: torch.distributed's all-gather and reduce-scatter around the GEMMs. The specification.

With R ranks, m = M / R tokens a rank under sequence parallelism:

                      column-parallel, w[N/R, K]          row-parallel, w[N, K/R]
    forward           x = all_gather(x_shard[m, K])       y_part = x @ w^T
                      y = x @ w^T                         y_shard[m, N] = reduce_scatter(y_part)
    backward          dx_part = dy @ w                    dy = all_gather(dy_shard[m, N])
                      dx_shard = reduce_scatter(dx_part)  dx = dy @ w
                      x = all_gather(x_shard), dw = dy^T x    dw = dy^T x

Without sequence parallelism both gathers vanish and both reduce-scatters are all-reduces.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.nvtx import ranged
from te_lite.overlap.exchange import Exchange, Gathering, Gemm, Note, Place, Summing
from te_lite.quantize.qtensor import Layout, QTensor
from te_lite.watch import collective

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
    collective(what, shard, group, partial(_all_gather_into, out, shard.contiguous(), group=group))
    return out


@ranged("te_lite.reduce_scatter")
def reduce_scatter(summand: Tensor, group: dist.ProcessGroup, what: str = "reduce-scatter") -> Tensor:
    """[R*m, N] partial sums on each of R ranks -> [m, N]: this rank's tokens, summed. No autograd."""
    wire = summand.to(_wire_dtype(group, summand.dtype))
    out = wire.new_empty(wire.shape[0] // dist.get_world_size(group), *wire.shape[1:])
    collective(what, summand, group, partial(_reduce_scatter_into, out, wire, group=group))
    return out.to(summand.dtype)


@ranged("te_lite.all_reduce")
def all_reduce(summand: Tensor, group: dist.ProcessGroup, what: str = "all-reduce") -> Tensor:
    """[M, N] partial sums on each rank -> [M, N] summed on all; may reuse the input's memory. No autograd."""
    wire = summand.to(_wire_dtype(group, summand.dtype))
    collective(what, summand, group, partial(dist.all_reduce, wire, group=group))
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


class Collective(Exchange):
    """Nothing is hidden. reason: why this exchange stands in for another."""

    name = "collective"

    def __init__(self, place: Place, reason: str = "") -> None:
        super().__init__(place)
        self.reason = reason

    def note(self, sent: int) -> None:
        """What this call moves, for the report."""
        self.place.note = Note(self.name, sent, self.reason)

    def all_gather(self, q: QTensor, layout: Layout, *, multiplied: bool = False, whole: bool = True) -> Gathering:
        return Gathered(self, q, q.regather_layout if layout == "col" else layout)

    def all_gather_gemm(self, gemm: Gemm, gathering: Gathering) -> Any:
        return gemm(gathering.whole())

    def reduce_scatter(self, gemm: Gemm, partial: Tensor) -> Summing:
        tp, scatters = self.tp, self.tp.sequence_parallel
        self.note(partial.nbytes * (tp.size - 1) // tp.size * (1 if scatters else 2))
        text = self.place.text(f"{self.place.gemm}'s {'reduce-scatter' if scatters else 'all-reduce'}", partial)
        total = (reduce_scatter if scatters else all_reduce)(partial, tp.group, text)
        return Summed(gemm.finish(total if gemm.bias is None else total.add_(gemm.bias)))

    def gemm_reduce_scatter(self, gemm: Gemm, a: QTensor) -> Any:
        return self.reduce_scatter(gemm, gemm.product(a)).result()
