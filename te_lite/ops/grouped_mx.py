"""MXFP8 of all groups in one launch, as ops/grouped_cast.py, for GEMMs in high precision: Hopper has no others for it.

Blocks of 32 along rows, and along columns from each group's first token on. What is multiplied at once is written as
values in x's dtype, in the read that finds the scales; what is kept for later as E4M3 data with E8M0 scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_lite.ops import grouped_cast_kernels as kernels
from te_lite.ops.block_cast import E4M3, MX_BLOCK, _cast_ref, dequantize_blocks_ref
from te_lite.ops.grouped_cast import PLAIN, Shape, shape_of
from te_lite.ops.registry import register


class MX(NamedTuple):
    """What `group_mx` wrote; None where it was not asked for."""

    row_values: Tensor | None  # as x
    col: Tensor | None  # E4M3, as x
    col_scale: Tensor | None  # E8M0 in uint8 [P/32, C]
    col_values: Tensor | None  # as x


def group_mx(x: Tensor, layout: Tensor | None, *, row: bool = False, col: bool = False, values: bool = False) -> MX:
    """MX blocks of 32 along each group's rows and columns; one read, one launch.

    row: what the blocks along rows hold, in x's dtype (exact in bf16 above 2^-126). col: the data and scales of the
    blocks along columns, or with `values` what they hold. Nothing is transposed.
    """
    shape = shape_of(x, layout)
    kept, scales = col and not values, -(-shape.padded // MX_BLOCK) * (shape.groups if shape.per_group else 1)
    out = MX(
        torch.empty_like(x) if row else None,
        x.new_empty(x.shape, dtype=E4M3) if kept else None,
        x.new_empty((scales, shape.cols), dtype=torch.uint8) if kept else None,
        torch.empty_like(x) if col and values else None,
    )
    _mx_op(x, layout, *out)
    return out


def _mx_spans(shape: Shape, layout: Tensor | None) -> list[tuple[int, int, int]]:
    """(first row, end, first row of scales) of each group."""
    blocks = -(-shape.padded // MX_BLOCK) if layout is None else 0  # by which the next group's lie behind
    return [(first, end, g * blocks + out0 // MX_BLOCK) for g, (first, end, out0, _) in enumerate(shape.spans(layout))]


def _mx_ref(x, layout, row_values, col, col_scale, col_values):
    shape, v = shape_of(x, layout), x.reshape(-1, x.shape[-1]).float()
    rule = (True, 0.0, True, torch.finfo(x.dtype).max)
    for first, end, block in _mx_spans(shape, layout):
        if row_values is not None:
            q, stored = _cast_ref(v[first:end], (1, MX_BLOCK), *rule)
            values = dequantize_blocks_ref(q, stored, 1, MX_BLOCK, x.dtype)
            row_values.view(-1, shape.cols)[first:end] = values
        if col is not None or col_values is not None:
            q, stored = _cast_ref(v[first:end], (MX_BLOCK, 1), *rule)
            if col is not None:
                col.view(-1, shape.cols)[first:end] = q
                col_scale[block : block + len(stored)] = stored
            if col_values is not None:
                values = dequantize_blocks_ref(q, stored, MX_BLOCK, 1, x.dtype)
                col_values.view(-1, shape.cols)[first:end] = values


def _mx_cuda(x, layout, *out):
    shape_of(x, layout).launch(kernels.group_mx_kernel, kernels.MX_CONFIG, (x, layout, *out), PLAIN)


_mx_op = register(
    "group_mx(Tensor x, Tensor? layout, Tensor(a!)? row_values, Tensor(b!)? col, Tensor(c!)? col_scale, "
    "Tensor(d!)? col_values) -> ()",
    cpu=_mx_ref,
    cuda=_mx_cuda,
)


def _mx_values_ref(data: Tensor, layout: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out, shape = data.new_empty(data.shape, dtype=dtype), shape_of(data, layout)
    for first, end, block in _mx_spans(shape, layout):
        part = slice(block, block - (first - end) // MX_BLOCK)
        q = data.view(-1, shape.cols)[first:end]
        out.view(-1, shape.cols)[first:end] = dequantize_blocks_ref(q, scale[part], MX_BLOCK, 1, dtype)
    return out


def _mx_values_cuda(data: Tensor, layout: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out, kernel = data.new_empty(data.shape, dtype=dtype), kernels.group_mx_values_kernel
    shape_of(data, layout).launch(kernel, kernels.MX_VALUES_CONFIG, (data, layout, scale, out))
    return out


# What the blocks along columns of `group_mx` hold, in `dtype`; data and scale are its col and col_scale.
group_mx_values = register(
    "group_mx_values(Tensor data, Tensor? layout, Tensor scale, ScalarType dtype) -> Tensor",
    cpu=_mx_values_ref,
    cuda=_mx_values_cuda,
    fake=lambda data, layout, scale, dtype: data.new_empty(data.shape, dtype=dtype),
)
