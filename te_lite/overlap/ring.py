"""Ring: the GEMM is cut by source or destination rank; copy engines move pieces while others are multiplied.

Works with every GEMM and number format, on CPU ranks and GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_lite.overlap.buffers import Gather, Scatter, following
from te_lite.overlap.schedule import Product
from te_lite.quantize.qtensor import QTensor


def gather_gemm(gemm: Product, own: QTensor, gather: Gather) -> Tensor:
    """gemm of the gathered tensor [R*m, k] -> [R*m, n]: this rank's shard first, the others in the order of arrival.

    Also this rank's own goes through its wire format, which may multiply a ragged shard in another than its own.
    """
    rank, size, m = gather.group.rank, gather.group.size, own.shape[0]
    out = own.row.new_empty(size * m, gemm.columns, dtype=gemm.dtype)
    for source in (rank, *following(rank, size)):
        shard = own.from_wire(own.wire("row"), "row", m) if source == rank else gather.shard(source)
        gemm(shard, out=out[source * m : (source + 1) * m])
    return out


def push_others(gemm: Product, a: QTensor, scatter: Scatter) -> None:
    """gemm of the other ranks' rows of a[R*m, k], each on its way to its owner once it is computed."""
    m = scatter.shape[0]
    for destination in following(scatter.group.rank, scatter.group.size):
        scatter.push(gemm(a.rows(destination * m, (destination + 1) * m)), destination)


def gemm_scatter(gemm: Product, a: QTensor, scatter: Scatter) -> Tensor:
    """Sum over ranks of gemm(a[R*m, k]), this rank's rows [m, n]: the others' rows are computed and sent first.

    Partials travel in gemm.dtype; this rank's own is not rounded before the sum.
    """
    push_others(gemm, a, scatter)
    first = scatter.group.rank * scatter.shape[0]
    return scatter.reduce(gemm(a.rows(first, first + scatter.shape[0]), torch.float32))
