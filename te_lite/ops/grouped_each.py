"""Grouped products one group after the other, by cublasLt, where the host knows how many tokens each group has.

Arguments are those of ops/grouped_gemm.py; `sizes`, the tokens of each group, take the place of its layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_lite.ops import gemm_scaled as scaled
from te_lite.ops.cublaslt import product
from te_lite.ops.gemm import FP8, FP8_ALIGNMENT, gemm, gemm_accumulate_
from te_lite.ops.grouped_layout import PAD

# What can be computed so: (product, operands) of ops/grouped_gemm.py's tables; "added": a "groups" one, to fp32.
KNOWN = {(product, kind) for product in ("rows", "groups", "added") for kind in ("16", "fast", "exact", "blocks")}
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
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaling: str,
    bias: Tensor | None, inner_first: bool, fast: bool, sizes: Sequence[int],
) -> None:  # fmt: skip
    """group_product, written to out[M, N]."""
    end = 0
    for g, size in enumerate(sizes):
        rows, end = slice(end, end + size), end + size
        left, right, one = a[rows], b[g].t() if inner_first else b[g], None if bias is None else bias[g]
        if a_scale is None or b_scale is None:
            _high_precision(out[rows], left, right, one)
        elif size:
            given = left, right, a_scale[g].view(1) if scaling == "group" else a_scale[rows], _of_group(b_scale, g)
            plain = size % scaled._ROWS_OF_SCALES == 0 and (one is None or one.dtype == out.dtype)
            if not plain or not product(out[rows], left, right, *scaled._as_read(*given), one, fast):
                value = scaled._product_fp32(*given, fast)
                out[rows].copy_(value if one is None else value.add_(one))


def _high_precision(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if out.dtype in (a.dtype, torch.float32):
        gemm(a, b, out.dtype, bias, out)
    else:
        out.copy_(gemm(a, b, torch.float32, bias))


def _of_group(scale: Tensor, g: int) -> Tensor:
    """Scales of a group's operand as a GEMM takes them: [1], one a row, or blocks."""
    return scale[g] if scale.dim() > 1 else scale[g].view(1)


def wgrad_each(
    outs: Sequence[Tensor], add: bool, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None,
    scaling: str, fast: bool, sizes: Sequence[int],
) -> None:  # fmt: skip
    """group_wgrad, written to outs[g] [N, K] or added to what is there; in high precision of operands inner first."""
    row = tile = 0
    for g, (out, size) in enumerate(zip(outs, sizes, strict=True)):
        rows, tiles = slice(row, row + size), slice(tile, tile + max(1, -(-size // PAD)))
        row, tile = rows.stop, tiles.stop
        if not add and not size:
            out.zero_()
        elif add and scaling == "none":
            gemm_accumulate_(out, a[rows], b[rows])  # of no tokens it does nothing
        elif a_scale is None or b_scale is None:
            _high_precision(out, a[rows].t(), b[rows].t(), None)
        elif size:
            left, right = (t[:, tiles.start * PAD : tile * PAD] for t in (a, b))  # zeros follow the tokens
            scales = [s[tiles].t() if scaling == "blocks" else _of_group(s, g) for s in (a_scale, b_scale)]
            given = left, right, scales[0], scales[1]
            if add:
                scaled.gemm_scaled_accumulate_(out, *given, fast)
            elif not product(out, left, right, *scaled._as_read(*given), None, fast):
                out.copy_(scaled._product_fp32(*given, fast))
