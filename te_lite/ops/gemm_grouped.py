"""Grouped GEMMs by csrc/gemm_grouped.cu: clusters that share an operand, results that leave while the next tile comes.

Arguments are those of ops/grouped_gemm.py, which asks here first. Of few tokens a group, whose weight gradient takes
longer to write than to compute, it overlaps the two.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.gemm import FP8
from te_lite.ops.launch import sm_count
from te_lite.ops.nvrtc import TYPES, compiled, unavailable
from te_lite.ops.recorder import OPEN

ALIGNMENT = 16  # features, and bytes of an address: the tensor-copy unit's rule
SPLIT_STEPS = 4  # of 128 elements, which tensor cores sum where sums are not "fast"; docs/background/numerics.md
_NAMES = ("gemm_grouped.cu", "gemm_grouped_walk.h", "gemm_grouped.h", "hopper.h", "tensor_map.h")
_ARGUMENTS = struct.Struct("=3Q6i")
_SCALES = ("none", "group", "rows", "blocks")
_HALVES = (torch.bfloat16, torch.float16)
_ROWS = 256  # of a cluster's tile


class Kind(NamedTuple):
    """What the kernel is compiled for. rows: a product of rows, else a weight gradient. scaling: of a and b."""

    rows: bool
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    add: bool
    scaling: str
    fast: bool

    @property
    def split(self) -> int:
        return {"none": 0, "blocks": 1}.get(self.scaling, 0 if self.fast else SPLIT_STEPS)

    @property
    def columns(self) -> int:
        return 192 if self.split else 256

    @property
    def tokens_first(self) -> bool:
        return self.a not in FP8

    @property
    def macros(self) -> list[str]:
        first = int(self.tokens_first)
        values: dict[str, Any] = {"A_TYPE": TYPES[self.a], "B_TYPE": TYPES[self.b], "OUT_TYPE": TYPES[self.out]}
        values |= {"ROWS": int(self.rows), "ADD": int(self.add), "SCALES": _SCALES.index(self.scaling)}
        values |= {"A_T": first, "B_T": first, "SPLIT": self.split, "COLUMNS": self.columns}
        return [f"-D{name}={value}" for name, value in values.items()]


@cache
def _loaded(index: int, kind: Kind) -> _C.GroupedGemm:
    return _C.GroupedGemm(index, compiled(_NAMES, kind.macros), kind.a.itemsize, kind.columns, kind.tokens_first)


def _lies(*tensors: Tensor | None) -> bool:
    return all(t is None or (t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0) for t in tensors)


def _known(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, n: int, k: int) -> bool:
    """Whether the kernel can read these operands of products with n and k features."""
    if not n or not k or (n | k) % ALIGNMENT or unavailable(a.device) or not _lies(a, b):
        return False
    if a_scale is None or b_scale is None:
        return a.dtype == b.dtype and a.dtype in _HALVES
    both_e5m2 = a.dtype == b.dtype == FP8[1]  # no instruction
    return a.dtype in FP8 and b.dtype in FP8 and not both_e5m2 and _lies(a_scale, b_scale)


def takes_product(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaling: str, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether `product` computes this group_product of b[G, N, K]: of fp8 with a scale a group or a row."""
    if bias is not None or out_dtype not in _HALVES or scaling not in ("group", "rows") or not a.numel():
        return False
    dims = b_scale is not None and b_scale.dim() == (1 if scaling == "group" else 2)
    return dims and _known(a, b, a_scale, b_scale, *b.shape[1:])


def takes_wgrad(
    outs: Sequence[Tensor], a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaling: str
) -> bool:
    """Whether `wgrad` computes this one, to outs[g] [N, K], or adds it to outs of fp32; 16-bit operands inner first."""
    n, k = outs[0].shape
    if len(outs) > _C.MOST_GROUPED_OUTS or not a.numel():
        return False
    if scaling in ("group", "rows"):
        dims = 1 if scaling == "group" else 2
        if a_scale is None or b_scale is None or not a_scale.dim() == b_scale.dim() == dims:
            return False
    alike = outs[0].dtype in (torch.float32, *_HALVES) and {out.dtype for out in outs} == {outs[0].dtype}
    return alike and _lies(*outs) and _known(a, b, a_scale, b_scale, n, k)


def _launch(
    kind: Kind, a: Tensor, b: Tensor, outs: Sequence[Tensor], layout: Tensor, a_scale: Tensor | None,
    b_scale: Tensor | None, rows: int, cols: int, k: int, most: int,
) -> None:  # fmt: skip
    """most: clusters that may find a tile."""
    if OPEN.recorder is not None:
        OPEN.recorder.refuse("a grouped GEMM runs")
    index, groups = a.device.index, layout.shape[1] - 2
    apart = [0 if scale is None else scale.stride(0) for scale in (a_scale, b_scale)]
    if kind.rows and kind.scaling == "rows":
        apart[0] = 0  # a scale a token
    arguments = _ARGUMENTS.pack(
        layout.data_ptr(), *(0 if scale is None else scale.data_ptr() for scale in (a_scale, b_scale)),
        groups, rows, cols, k, *apart,
    )  # fmt: skip
    _loaded(index, kind).launch(
        2 * min(most, sm_count(a.device) // 2), torch._C._cuda_getCurrentRawStream(index),
        a.data_ptr(), a.shape[0], a.shape[1], b.data_ptr(), b.shape[:-1].numel(), b.shape[-1],
        [out.data_ptr() for out in outs], arguments,
    )  # fmt: skip


def product(
    out: Tensor, a: Tensor, b: Tensor, layout: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, scaling: str,
    fast: bool,
) -> None:  # fmt: skip
    """group_product of b[G, N, K], written to those rows of out[M, N] that are in a group."""
    kind = Kind(True, a.dtype, b.dtype, out.dtype, False, scaling, fast)
    groups, n, k = b.shape
    most = (-(-a.shape[0] // _ROWS) + groups) * -(-n // kind.columns)
    _launch(kind, a, b, [out], layout, a_scale, b_scale, 0, n, k, most)


def wgrad(
    outs: Sequence[Tensor], add: bool, a: Tensor, b: Tensor, layout: Tensor, a_scale: Tensor | None,
    b_scale: Tensor | None, scaling: str, fast: bool,
) -> None:  # fmt: skip
    """group_wgrad, written to outs[g] [N, K] or added to what is there."""
    n, k = outs[0].shape
    kind = Kind(False, a.dtype, b.dtype, outs[0].dtype, add, scaling, fast)
    most = len(outs) * -(-n // _ROWS) * -(-k // kind.columns)
    _launch(kind, a, b, outs, layout, a_scale, b_scale, n, k, 0, most)
