"""Ring: the GEMM is cut by source or destination rank; copy engines move pieces while others are multiplied.

Works with every GEMM and number format, on CPU ranks and GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_lite.overlap.buffers import Gather, Scatter
from te_lite.overlap.group import Group
from te_lite.overlap.programs import following
from te_lite.overlap.schedule import Product
from te_lite.quantize.qtensor import QTensor

PIECE_ELEMENTS = 4 << 20  # 128 tiles of 128 x 256
BALANCED_BYTES = 3000, 5500  # of a row, whose product takes an H200 about as long as it takes the links to move


def gather_gemm(gemm: Product, own: QTensor, gather: Gather) -> Tensor:
    """gemm of the gathered tensor [R*m, k] -> [R*m, n]: this rank's shard first, the others in the order of arrival.

    Also this rank's own goes through its wire format, which may multiply a ragged shard in another than its own.
    """
    rank, size, m = gather.group.rank, gather.group.size, own.shape[0]
    out = own.row.new_empty(size * m, gemm.columns, dtype=gemm.dtype)
    gemm.b.operand(gemm.b_layout)  # made now, if it has to be: both streams read it
    with gather.group.in_turns() as turn:
        for i, source in enumerate((rank, *following(rank, size))):
            with turn(i):
                shard = own.from_wire(own.wire("row"), "row", m) if source == rank else gather.shard(source)
                gemm(shard, out=out[source * m : (source + 1) * m])
    return out


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


def cuts_of(gemm: Product, a: QTensor, size: int) -> tuple[int, ...]:
    """cuts() for gemm(a[R*m, k])."""
    data = a.operand("row")[0]
    return cuts(size, a.shape[0] // size, gemm.columns, data.shape[1] * data.element_size())


def counts(gemm: Product, a: QTensor, size: int) -> tuple[int, ...]:
    """What "auto" tries beside the rule: all of a scatter's partials [m, n] in so many pieces, of whole tiles."""
    m, rule = a.shape[0] // size, set(cuts_of(gemm, a, size))
    return tuple(count for count in (1, 2, 4) if not (m % 256 or m % (128 * count)) and rule != {count})


def begin_scatter(gemm: Product, a: QTensor, group: Group, narrow: bool = False, count: int = 0) -> Scatter:
    """What gemm_scatter of a[R*m, k] sends by. narrow: only in the fused schedule, whose place this one may take.
    count: of each partial's pieces; 0: by rule."""
    cuts = (count,) * (group.size - 1) if count else cuts_of(gemm, a, group.size)
    return Scatter(group, (a.shape[0] // group.size, gemm.columns), gemm.dtype, cuts)


def gemm_scatter(gemm: Product, a: QTensor, scatter: Scatter) -> Tensor:
    """Sum over ranks of gemm(a[R*m, k]), sum_bias and residual, this rank's rows [m, n]: the others' are computed and
    sent first.

    Partials travel in gemm.dtype; this rank's own is not rounded before the sum.
    """
    for destination, cut in zip(following(scatter.group.rank, scatter.group.size), scatter.cuts, strict=True):
        rows = scatter.shape[0] // cut
        for piece in range(cut):
            first = destination * scatter.shape[0] + piece * rows
            scatter.push(gemm(a.rows(first, first + rows)), destination, piece)
    first = scatter.group.rank * scatter.shape[0]
    own = gemm(a.rows(first, first + scatter.shape[0]), torch.float32)
    return scatter.reduce(own, gemm.sum_bias, residual=gemm.residual)
