"""Bulk: gathers and reduce-scatters through userbuffers, by copy engines, beside GEMMs that do not need them.

    copies        | x_shard_m to the others | partial sums to the others  |
    compute       | dgrad: partial = dy @ w | wgrad: dw = dy^T @ x        | sum of the partials

A call that does not fit the arena is Collective's on every rank, because shapes and capacity decide alone; with strict
it raises instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_lite.ops.registry import capturing
from te_lite.overlap.buffers import Gather, Scatter
from te_lite.overlap.collective import MOST_SHAPES, Collective
from te_lite.overlap.exchange import Gathering, Gemm, Outcome, Place, Summing
from te_lite.quantize.qtensor import Layout, QTensor


@dataclass(slots=True)
class Pushed:
    """A Summing whose partial sums are on their way."""

    gemm: Gemm
    partial: Tensor
    scatter: Scatter

    def result(self) -> Any:
        gemm, scatter, m = self.gemm, self.scatter, self.scatter.shape[0]
        first = scatter.group.rank * m
        own = self.partial[first : first + m]
        if gemm.epilogue is not None and gemm.bias is None and gemm.residual is None:
            return scatter.reduce(own, take=gemm.epilogue.of_slots)
        total = scatter.reduce(own, gemm.bias, residual=gemm.residual)
        return total if gemm.epilogue is None else gemm.epilogue(total)


class Bulk(Collective):
    """all_gather and reduce_scatter; the GEMMs beside them are whole."""

    name = "bulk"
    hides = True
    awaits = False  # the GEMM itself waits for the shards of a gather

    def __init__(self, place: Place, reason: str = "") -> None:
        super().__init__(place, reason)
        assert place.group is not None
        self.group = place.group
        self._settled: dict[tuple, Collective] = {}

    def settled(self, a: QTensor, gemm: Gemm | None, layout: Layout | None) -> Collective:
        graph = self.group.cuda and capturing()
        key: tuple = layout, a.format, a.dtype, a.shape, graph, self.group.closed
        if gemm is not None:
            b, epilogue = gemm.b, gemm.epilogue
            key += b.format, b.shape, gemm.layout, gemm.dtype, gemm.fast_accum, gemm.bias is None, gemm.residual is None
            key += epilogue.__class__, getattr(epilogue, "want", ""), getattr(epilogue, "activation", None)
        known = self._settled.get(key)
        if known is None:
            if len(self._settled) >= MOST_SHAPES:
                self._settled.clear()
            known = self._settled[key] = self._fallback(a, gemm, layout)
        return known

    def _fallback(self, a: QTensor, gemm: Gemm | None, layout: Layout | None) -> Collective:
        """The exchange that runs calls of these shapes: this one, or another where it refuses them. Exchanges override
        it: they ask super() first, and decide by shapes, by whether a CUDA graph is captured, and by whether the group
        is closed, all alike on every rank."""
        group, rows = self.group, a.shape[0]
        if group.closed:
            refusal = "destroy_ub() has ended its userbuffers since the forward began"
        elif layout is not None:
            refusal = group.gather_refusal(a, a.wgrad_layout if layout == "col" else layout)
        else:
            assert gemm is not None
            rows //= self.tp.size
            refusal = group.scatter_refusal(rows, gemm.columns, gemm.dtype)
        if not rows:  # nothing is moved
            return Collective(self.place)
        return self.refused(refusal) if refusal else self

    def refused(self, why: str) -> Collective:
        """What runs where this exchange does not. RuntimeError under strict."""
        place = self.place
        if place.strict:
            raise RuntimeError(
                f"{place.label} {place.gemm}: overlap by {place.method!r} was asked for and does not happen: {why}; or "
                "leave out strict=True"
            )
        return Collective(place, why)

    def all_gather(self, q: QTensor, layout: Layout, *, multiplied: bool = False, whole: bool = True) -> Gathering:
        layout = q.wgrad_layout if layout == "col" else layout
        gather = Gather(self.group, q, layout, own=whole, awaited=multiplied and self.awaits)
        self.place.note = Outcome(self.name, gather.sent, self.reason)
        return gather

    def reduce_scatter(self, gemm: Gemm, partial: Tensor) -> Summing:
        scatter = Scatter(self.group, (partial.shape[0] // self.tp.size, partial.shape[1]), gemm.dtype)
        self.place.note = Outcome(self.name, scatter.sent, self.reason)
        scatter.push_all(partial)
        return Pushed(gemm, partial, scatter)


class External(Bulk):
    """The gather that wgrad alone reads, hidden behind dgrad."""

    name = "external"
