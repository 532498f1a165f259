"""Grouped products group by group, by cublasLt, where the host knows how many tokens each group has.

Arguments are those of ops/grouped_gemm.py; `sizes`, the tokens of each group, take the place of its layout. Groups take
turns on two streams, so that the next one fills the SMs that the last tiles of one leave idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from te_lite.ops import gemm_scaled as scaled
from te_lite.ops.cublaslt import product
from te_lite.ops.gemm import FP8, FP8_ALIGNMENT, apart, gemm, gemm_accumulate_
from te_lite.ops.grouped_layout import PAD
from te_lite.ops.launch import side_stream
from te_lite.ops.recorder import OPEN

# Multiplications a group: 50 to 90 us of a GPU, in which the host issues a GEMM, or finds an algorithm for a new size.
# From there on this was faster than the kernels for all groups with every recipe (benchmarks/grouped.py).
LEAST = 1 << 35


def takes(a: Tensor, b: Tensor, scaling: str, sizes: Sequence[int] | None, n: int, k: int) -> bool:
    """Whether this product is computed here. n, k: features; so aligned, every group begins where cublasLt reads."""
    if sizes is None or a.element_size() > 2 or (n | k) % FP8_ALIGNMENT or sum(sizes) * n * k < LEAST * len(sizes):
        return False
    known = scaling in ("none", "group") or a.dtype == b.dtype == FP8[0]
    return known and torch.cuda.get_device_capability(a.device) == (9, 0)


def _in_turn(device: torch.device, one: Callable[[int], None], groups: int) -> None:
    """one(g) for each group, on the current stream and on one beside it, for which it then waits."""
    if device.type != "cuda" or OPEN.recorder is not None:  # recordings of groups keep to one stream
        for g in range(groups):
            one(g)
        return
    with torch.cuda.device(device):
        current, side = torch.cuda.current_stream(), side_stream(device)
        side.wait_stream(current)
        try:
            for g in range(groups):
                torch.cuda.set_stream(side if g % 2 else current)
                one(g)
        finally:
            torch.cuda.set_stream(current)
            current.wait_stream(side)


def _by_group(scale: Tensor) -> Sequence[Tensor]:
    """Scales of each group's operand as a GEMM takes them: [1], one a row, or blocks."""
    return scale.unbind() if scale.dim() > 1 else apart(scale)


def _parts(t: Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[Tensor]:
    return t.narrow(dim, 0, sum(sizes)).split(list(sizes), dim)


def _high_precision(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if out.dtype in (a.dtype, torch.float32) and (bias is None or bias.dtype == out.dtype):  # gemm rounds any other
        gemm(a, b, out.dtype, bias, out)
    else:
        out.copy_(gemm(a, b, torch.float32, bias))


def product_each(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaling: str,
    bias: Tensor | None, inner_first: bool, fast: bool, sizes: Sequence[int],
) -> None:  # fmt: skip
    """group_product, written to out[M, N]."""
    outs, lefts, rights = _parts(out, sizes), _parts(a, sizes), (b.mT if inner_first else b).unbind()
    of_a: Sequence[Tensor] = ()
    if a_scale is not None:
        of_a = _by_group(a_scale) if scaling == "group" else _parts(a_scale, sizes)
    of_b = () if b_scale is None else _by_group(b_scale)
    biases = [None] * len(sizes) if bias is None else bias.unbind()

    def one(g: int) -> None:
        to, left, right, added = outs[g], lefts[g], rights[g], biases[g]
        if not of_a or not of_b:
            _high_precision(to, left, right, added)
        elif sizes[g]:
            given = left, right, of_a[g], of_b[g]
            plain = added is None or added.dtype == to.dtype  # any other is added before rounding
            if plain and scaling == "blocks" and sizes[g] % scaled.ROWS_OF_SCALES:
                to.copy_(scaled.gemm_fp8_blockwise(*given, to.dtype, added))
            elif not plain or not product(to, left, right, *scaled._as_read(*given), added, fast):
                value = scaled._product_fp32(*given, fast)
                to.copy_(value if added is None else value.add_(added))

    _in_turn(out.device, one, len(sizes))


def wgrad_each(
    outs: Sequence[Tensor], add: bool, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None,
    scaling: str, fast: bool, sizes: Sequence[int],
) -> None:  # fmt: skip
    """group_wgrad, written to outs[g] [N, K] or added to what is there; in high precision of operands inner first."""
    tiles = [max(1, -(-size // PAD)) for size in sizes]  # zeros follow a group's tokens
    whole = [PAD * count for count in tiles]
    of: list[Sequence[Tensor]] = []
    if a_scale is None or b_scale is None:
        lefts, rights = _parts(a, sizes), _parts(b, sizes)
    else:
        lefts, rights = _parts(a, whole, 1), _parts(b, whole, 1)
        for scale in (a_scale, b_scale):
            of.append(_parts(scale.t(), tiles, 1) if scaling == "blocks" else _by_group(scale))

    def one(g: int) -> None:
        to, left, right = outs[g], lefts[g], rights[g]
        if not add and not sizes[g]:
            to.zero_()
        elif add and not of:
            gemm_accumulate_(to, left, right)  # of no tokens it does nothing
        elif not of:
            _high_precision(to, left.t(), right.t(), None)
        elif sizes[g]:
            given = left, right, of[0][g], of[1][g]
            if add:
                scaled.gemm_scaled_accumulate_(to, *given, fast)
            elif not product(to, left, right, *scaled._as_read(*given), None, fast):
                to.copy_(scaled._product_fp32(*given, fast))

    _in_turn(outs[0].device, one, len(sizes))
