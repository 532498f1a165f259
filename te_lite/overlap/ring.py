"""Ring: the GEMM is cut by source or destination rank; copy engines move pieces while others are multiplied.

    copies        | shard of rank+1 | shard of rank+2 | ...
    compute       | own shard @ b^T | rank+1's @ b^T  | rank+2's @ b^T | ...            all_gather_gemm

    copies                          | to rank+1       | to rank+2       | ...
    compute       | rank+1's rows   | rank+2's rows   | ... | own rows  | sum           gemm_reduce_scatter

Works with every GEMM and number format, on CPU ranks and GPUs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from te_lite.ops.launch import wait_stream
from te_lite.overlap.buffers import Scatter
from te_lite.overlap.bulk import Bulk, External
from te_lite.overlap.collective import Collective
from te_lite.overlap.exchange import Gemm, Place
from te_lite.quantize.qtensor import Layout, QTensor

PIECE_ELEMENTS = 4 << 20  # 128 tiles of 128 x 256
BALANCED_BYTES = 3000, 5500  # of a row, whose product takes an H200 about as long as it takes the links to move


def cuts(size: int, m: int, n: int, row_bytes: int) -> tuple[int, ...]:
    """In how many pieces the partials [m, n] for the others are pushed, in their order; row_bytes: of a GEMM's row.

    One or two, as half a partial still fills a GPU with tiles and a push has a price of its own. The last in two, so
    that the owner's first rows wait for less. The first, where copies take about as long as GEMMs or longer, because
    then the sooner they begin the sooner they end; the others where both take as long, or copies would wait for GEMMs.
    """
    if m % 256 or m * n < 2 * PIECE_ELEMENTS:
        return (1,) * (size - 1)
    first = 1 + (row_bytes < BALANCED_BYTES[1])
    middle = 1 + (BALANCED_BYTES[0] <= row_bytes < BALANCED_BYTES[1])
    return (first, *[middle] * (size - 3), 2)[: size - 1] if size > 2 else (2,)


def cuts_of(gemm: Gemm, a: QTensor, size: int) -> tuple[int, ...]:
    """cuts() for gemm(a[R*m, k])."""
    assert a.row is not None
    return cuts(size, a.shape[0] // size, gemm.columns, a.row.shape[1] * a.row.element_size())


class Ring(Bulk):
    """count: pieces of each partial that is sent; 0: by the rule of cuts()."""

    name = "ring"
    gathers = scatters = True

    def __init__(self, place: Place, reason: str = "", count: int = 0) -> None:
        super().__init__(place, reason)
        self.count = count

    def _fallback(self, a: QTensor, gemm: Gemm | None, layout: Layout | None) -> Collective:
        found = super()._fallback(a, gemm, layout)
        return External(self.place) if found is self and gemm is None else found

    def all_gather_gemm(self, gemm: Gemm, gathering: Any) -> Any:
        """This rank's shard first, then those of rank + 1, rank + 2, ... This rank's is multiplied as the others
        receive it: in its wire format, where that differs from its own. gathering: a Gather.

        On GPUs the odd GEMMs run on a stream beside the caller's: each begins on the multiprocessors that the last
        tiles of the one before leave idle. Not by two host threads at once, whose streams might wait for each other;
        nor for a scatter, whose pieces the others wait for, since one may overtake another.
        """
        own, group, side = gathering.q, self.group, self.group.side_stream
        rank, size, m = group.rank, group.size, own.shape[0]
        out = own.row.new_empty(size * m, gemm.columns, dtype=gemm.dtype)
        gemm.b.operand(gemm.layout)  # made now, if it has to be: both streams read it
        shard = own.format.from_wire(own.format.wire(own, "row"), "row", own, m)
        if side is not None:
            main = torch.cuda.current_stream(group.device)
            wait_stream(side, main)
        try:
            for i, source in enumerate((rank, *group.others)):
                with nullcontext() if side is None or i % 2 == 0 else torch.cuda.stream(side):
                    shard = shard if source == rank else gathering.shard(source)
                    gemm.product(shard, gemm.bias, None, out[source * m : (source + 1) * m])
        finally:
            if side is not None:
                wait_stream(main, side)
        return gemm.finish(out)

    def counts(self, gemm: Gemm, a: QTensor) -> tuple[int, ...]:
        """What `Auto` tries beside the rule: all of a scatter's partials [m, n] in so many pieces, of whole tiles."""
        m, rule = a.shape[0] // self.tp.size, set(cuts_of(gemm, a, self.tp.size))
        return tuple(count for count in (1, 2, 4) if not (m % 256 or m % (128 * count)) and rule != {count})

    def scatter(self, gemm: Gemm, a: QTensor) -> Scatter:
        """What the partial sums of gemm(a[R*m, k]) travel by."""
        size = self.group.size
        cut = (self.count,) * (size - 1) if self.count else cuts_of(gemm, a, size)
        scatter = Scatter(self.group, (a.shape[0] // size, gemm.columns), gemm.dtype, cut)
        self.note(scatter.sent, "fp8_buf is for fused kernels" if self.place.narrow else "")
        return scatter

    def gemm_reduce_scatter(self, gemm: Gemm, a: QTensor) -> Any:
        """The others' rows are computed and sent first. Partials travel in gemm.dtype; this rank's own is not rounded
        before the sum."""
        scatter = self.scatter(gemm, a)
        m = scatter.shape[0]
        for destination, cut in zip(self.group.others, scatter.cuts, strict=True):
            rows = m // cut
            for piece in range(cut):
                first = destination * m + piece * rows
                scatter.push(gemm.product(a.rows(first, first + rows)), destination, piece)
        first = scatter.group.rank * m
        own = gemm.product(a.rows(first, first + m), None, torch.float32)
        total = scatter.reduce(own, gemm.bias, residual=gemm.residual)
        return total if gemm.epilogue is None else gemm.epilogue(total)


class Pipeline(Ring):
    """What Transformer Engine calls a GEMM whose output is scattered in pieces."""

    name = "pipeline"
    gathers = False
