"""Grouped products one group after the other, by cublasLt, where the host knows how many tokens each group has.

Arguments are those of ops/grouped_gemm.py; `sizes`, the tokens of each group, take the place of its layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_lite.ops import gemm_scaled as scaled
from te_lite.ops.cublaslt import product
from te_lite.ops.gemm import FP8, FP8_ALIGNMENT, gemm_accumulate_
from te_lite.ops.grouped_layout import PAD

# What can be computed so: (product, operands) of ops/grouped_gemm.py's tables; "added": a "groups" one, to fp32.
KNOWN = {("added", kind) for kind in ("16", "fast", "exact", "blocks")} | {("rows", "blocks"), ("groups", "blocks")}
# What is, where sizes are known. Empty: no GPU has measured it; `benchmarks/grouped.py --sections products` does.
EACH: set[tuple[str, str]] = set()
LEAST = 1 << 35  # multiplications a group: 90 us of a GPU, in which the host finds an algorithm for another size


def takes(
    kind: tuple[str, str], a: Tensor, b: Tensor, scaling: str, sizes: Sequence[int] | None, n: int, k: int
) -> bool:
    """Whether this product is computed here. n, k: features; so aligned, every group begins where cublasLt reads."""
    if sizes is None or kind not in EACH or (n | k) % FP8_ALIGNMENT or sum(sizes) * n * k < LEAST * len(sizes):
        return False
    known = scaling in ("none", "group") or a.dtype == b.dtype == FP8[0]
    return known and torch.cuda.get_device_capability(a.device) == (9, 0)


def product_each(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, sizes: Sequence[int]
) -> None:
    """group_product of "blocks", written to out[M, N]."""
    end = 0
    for g, size in enumerate(sizes):
        rows, end = slice(end, end + size), end + size
        if size:
            left, right, one = a[rows], b[g], None if bias is None else bias[g]
            scales = a_scale[rows], b_scale[g]
            plain = size % scaled._ROWS_OF_SCALES == 0 and (one is None or one.dtype == out.dtype)
            if not plain or not product(out[rows], left, right, *scaled._as_read(left, right, *scales), one):
                out[rows].copy_(scaled.gemm_fp8_blockwise(left, right, *scales, out.dtype, one))


def wgrad_each(
    outs: Sequence[Tensor], add: bool, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None,
    scaling: str, fast: bool, sizes: Sequence[int],
) -> None:  # fmt: skip
    """group_wgrad, written to outs[g] [N, K] or added to what is there; in high precision of operands inner first."""
    row = tile = 0
    for g, (out, size) in enumerate(zip(outs, sizes, strict=True)):
        rows, tiles = slice(row, row + size), slice(tile, tile + max(1, -(-size // PAD)))
        row, tile = rows.stop, tiles.stop
        if not add and (not size or scaling == "none"):
            out.zero_()
        if a_scale is None or b_scale is None:
            gemm_accumulate_(out, a[rows], b[rows])  # of no tokens it does nothing
        elif size:
            left, right = (t[:, tiles.start * PAD : tile * PAD] for t in (a, b))  # zeros follow the tokens
            scales = [s[tiles].t() if scaling == "blocks" else s[g].view(-1) for s in (a_scale, b_scale)]
            given = left, right, scales[0], scales[1]
            if add:
                scaled.gemm_scaled_accumulate_(out, *given, fast)
            elif not product(out, left, right, *scaled._as_read(*given), None, fast):
                out.copy_(scaled._product_fp32(*given, fast))
