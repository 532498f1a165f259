"""GEMM + reduce-scatter in one launch, by csrc/gemm_fused.cu.

others' rows of a @ b^T   stored straight into the owner's staging, across the links, and flagged block by block
this rank's rows          once their flags are there: slots + residual + product + bias, in fp32, rounded once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops import gemm_fused as fused
from te_lite.ops.gemm_fused import ALIGNED_COLUMNS, ROWS, Kind
from te_lite.ops.launch import sm_count
from te_lite.ops.narrow import BLOCK, E4M3

MOST_BLOCKS = 8


def blocks(m: int) -> int:
    """In how many blocks of equally many pairs of tiles m rows are stored and awaited."""
    pairs = -(-m // ROWS)
    return next(count for count in range(MOST_BLOCKS, 0, -1) if pairs % count == 0)


def tile_columns(m: int, n: int, ranks: int, clusters: int) -> int:
    """Narrow tiles where wide ones would be only a few for each cluster: what the others wait for is sent earlier."""
    return 256 if ranks * -(-m // ROWS) * -(-n // 256) >= 3 * clusters else 128


def lag(others: int, blocks: int, clusters: int) -> int:
    """By how many blocks of `others` pairs own rows follow: all clusters are then busy for about two tiles, in which
    the flags come. More would leave the links idle at the end."""
    return min(blocks, -(-2 * clusters // others))


class Narrow(NamedTuple):
    """Partial sums that travel as ops/narrow.py makes them. scales[R, N/128, m]: of staging, which is E4M3. to[r]:
    address of scales[this rank] in rank r's memory. dtype: of the sum."""

    scales: Tensor
    to: Sequence[int]
    dtype: torch.dtype


def gemm_scatter(
    a: Tensor, b: Tensor, to: Sequence[int], arrived: Sequence[int], staging: Tensor, ready: Tensor, free: Tensor,
    counters: Tensor, epoch: Tensor, delta: int, abort: Tensor, rank: int, a_scale: Tensor | None = None,
    b_scale: Tensor | None = None, bias: Tensor | None = None, fast_accum: bool = True, narrow: Narrow | None = None,
    residual: Tensor | None = None, count: int = 0,
) -> Tensor:  # fmt: skip
    """out[m, N] = sum over ranks of a[R*m, K] @ b[N, K]^T * scales, this rank's rows, + bias[N] + residual[m, N],
    which is of out's type; rounded once.

    to[r]: address of [m, N] in rank r's memory, its staging[this rank]; arrived[r]: there, of its ready[this rank, 0].
    staging[R, m, N], of out's type bf16 or fp16; its own entry is not read. count: of blocks, 0 for blocks(m). ready
    int32 [R, P], P at least count: block i of staging[s] is there once ready[s, i] has reached epoch[0] + delta
    (ops/flags.py). free int32 [R]: to[r] may be written once free[r] has reached epoch[0] + delta - 1. counters: int32,
    R * count + 1 zeros, zeros again at the end. The order of sums is that of ops/reduce.py: the same bits on every run,
    with every count. Garbage after an abort. Scales: fp32 inverses, both or none; a_scale [1] or [R*m], b_scale [1] or
    [N]. a, b, fast_accum: as in ops/gemm_gather.py.
    narrow: m and N are multiples of 128 then, and partials are rounded from fp32; not with a residual.
    Errors: ValueError, TypeError.
    """
    ranks, m, n = staging.shape
    fused.check("GEMM and reduce-scatter", a, b, m, ranks)
    count = count or blocks(m)
    if -(-m // ROWS) % count:
        raise ValueError(f"{count} blocks of {m} rows: must divide {-(-m // ROWS)}, the pairs of tiles; take blocks(m)")
    dtype = narrow.dtype if narrow else staging.dtype
    fits = 2 <= ranks <= _C.MOST_FUSED_RANKS and n % ALIGNED_COLUMNS == 0 and n == b.shape[0]
    fits &= not narrow or (staging.dtype == E4M3 and m % BLOCK == n % BLOCK == 0)
    if not fits or dtype not in (torch.bfloat16, torch.float16) or not staging.is_contiguous():
        raise ValueError(
            f"staging {list(staging.shape)} of {staging.dtype} for b {list(b.shape)}: must be contiguous [R, m, N], "
            f"R from 2 to {_C.MOST_FUSED_RANKS}, N a multiple of {ALIGNED_COLUMNS}, bf16 or fp16, or narrow E4M3 for "
            f"such a sum with m and N multiples of {BLOCK}; take a ring"
        )
    found = [*ready.shape, *free.shape, counters.numel()]
    needed = [ranks, count, ranks, ranks * count + 1]
    if len(found) != 4 or found[0] != ranks or found[2] != ranks or found[1] < count or found[3] < needed[3]:
        raise ValueError(
            f"flags and counters {found}: must be {needed}, the second and the last or more; reserve as many"
        )
    fits = residual is None or (residual.shape == (m, n) and residual.dtype == dtype and fused.aligned(residual))
    if residual is not None and (narrow is not None or not fits):
        raise ValueError(
            f"residual {list(residual.shape)} of {residual.dtype}, strides {residual.stride()}, partials of "
            f"{staging.dtype}: must be contiguous {[m, n]} of {dtype} from a multiple of {fused.ALIGNMENT} bytes on, "
            "and partials not narrow; pass a clone, or add it afterwards"
        )
    scales = fused.widest(*fused.scale_kinds(a_scale, b_scale, ranks * m, n))
    if scales == "row" and a_scale is not None and b_scale is not None:
        a_scale, b_scale = fused.spread(a_scale, ranks * m), fused.spread(b_scale, n)
    out = a.new_empty((m, n), dtype=dtype)
    bias = fused.widened(bias)
    clusters = sm_count(a.device) // 2
    split = a.dtype in fused.FP8 and not fast_accum
    wide = 128 if split else tile_columns(m, n, ranks, clusters)
    pairs, columns = -(-m // ROWS) // count, -(-n // wide)
    behind = lag((ranks - 1) * pairs * columns, count, clusters)
    kind = Kind(
        gather=False, a=a.dtype, b=b.dtype, scales=scales, out=dtype, ranks=ranks, b_t=fused.transposed(b),
        columns=wide, split=split, narrow=bool(narrow), residual=residual is not None,
    )  # fmt: skip
    arguments = fused.Arguments(
        arrived=arrived, scales_to=narrow.to if narrow else (), ready=ready, free=free, counters=counters, word=epoch,
        abort=abort, a_scale=a_scale, b_scale=b_scale, bias=bias, slot_scales=narrow and narrow.scales, delta=delta,
        m=m, n=n, k=a.shape[1], rank=rank, flags=ready.shape[1], blocks=count, lag=behind, pairs=pairs,
        columns=columns, scales=m if scales == "row" else 0,
    )  # fmt: skip
    fused.launch(
        kind, min(clusters, ranks * count * pairs * columns), arguments, a=a, b=b, other=staging, h=residual,
        to=[*to[:rank], out, *to[rank + 1 :]],
    )  # fmt: skip
    return out
