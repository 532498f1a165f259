"""Quantized tensors: data and scales per layout, and the wire format by which they travel.

Layouts of a logical matrix v[M, K]:
    row  data [M, K], the GEMM's inner dimension is K
    col  data [K, Mp], the transposed copy, the inner dimension is M padded to Mp (a format may keep [M, K] instead
         where it is dequantized before it is multiplied, or gathered before it is transposed)
Every GEMM of a linear is out[m, n] = a[m, k] @ b[n, k]^T, both operands in the layout whose last dimension is inner:
    fprop  y[M, N]  = x.row[M, K]  @ w.row[N, K]^T
    dgrad  dx[M, K] = dy.row[M, N] @ w.col[K, N]^T
    wgrad  dw[N, K] = dy.col[N, M] @ x.col[K, M]^T
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from te_lite.ops.gemm import gemm, gemm_accumulate_
from te_lite.ops.gemm_scaled import gemm_scaled_accumulate_
from te_lite.ops.transpose import PAD

Layout = Literal["row", "col"]
# Data with the inner dimension last, and its scale: a Tensor, but None in high precision, which no format's GEMM reads.
Scaled = tuple[Tensor, Any]


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """What a number format can do with its tensors. Subclasses are frozen values; callers ask them, never their class.

    label: what overlap_report() calls it; empty for high precision.
    gemm: operands multiply natively when their `gemm` agrees, otherwise both are dequantized first; empty: always.
    col_from_row: the col layout can be made from the row layout alone (so one gather serves fprop and wgrad).
    col_scales: (bytes, rows) of a scale of the col layout, a number wide; rows are 0 where nothing weighs that layout.
    shard_multiple: a gathered tensor multiplies natively where each rank's shard has a multiple of so many rows.
    scales_product: operands multiply as data alone, the product is scaled by tensor, by shard or by row of either.
    q, in methods: a QTensor, which subclasses take as Held.
    """

    label: ClassVar[str] = ""
    gemm: str = ""
    col_from_row: bool = True
    col_scales: ClassVar[tuple[float, int]] = 0, 0
    shard_multiple: int = 1
    scales_product: bool = False

    def dequantize(self, q: Any, layout: Layout) -> Tensor:
        """v[M, K] in q.dtype, from the data of `layout`, which q holds."""
        raise NotImplementedError

    def col_bytes(self, rows: int, columns: int) -> int:
        """What the col layout of v[rows, columns] takes, an fp8 byte a number, with its scales."""
        of_a_scale, its_rows = self.col_scales
        return int((-(-rows // PAD) * PAD + of_a_scale * -(-rows // its_rows)) * columns)

    def multiplies(self, other: TensorFormat) -> bool:
        """True where matmul takes operands of this format and of `other`, in that order."""
        return self.gemm == other.gemm != ""

    def make_col(self, q: Any) -> tuple[Tensor, Tensor | None]:
        """(data, scale) of the col layout from the row layout; only where col_from_row."""
        raise NotImplementedError

    def part(self, q: Any, start: int, stop: int) -> QTensor | None:
        """v[start:stop] of a tensor that holds its rows, by row, in the same memory; None where scales do not allow it.

        Here: one scale, or one a row."""
        scale = q.row_scale
        return q.rows(start, stop) if scale.numel() == 1 or scale.shape[0] == q.shape[0] else None

    def gathers_columns(self, rows: int) -> bool:
        """Whether wire("col") of shards of `rows` rows is concatenated along dim 1: [K, rows] to [K, R*rows]."""
        return False

    def wire(self, q: Any, layout: Layout) -> tuple[Tensor, ...]:
        """The tensors, sharded along dim 0 (but see gathers_columns), that a peer needs to use `q` in `layout`; scales
        included.

        Here: data and their scale."""
        return q.operand(layout)

    def from_wire(self, parts: tuple[Tensor, ...], layout: Layout, like: QTensor, rows: int) -> QTensor:
        """The gathered tensor of `rows` rows from gathered parts; `like` is this rank's own shard.

        Here: data and their scale; a scale that does not travel is that of `like`."""
        shape, kept = (rows, like.shape[1]), like.row_scale if layout == "row" else like.col_scale
        data, scale, *_ = *parts, kept
        if layout == "row":
            return QTensor(self, shape, like.dtype, data, scale)
        return QTensor(self, shape, like.dtype, col=data, col_scale=scale)

    def matmul(self, a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
               out: Tensor | None = None) -> Tensor:  # fmt: skip
        """a[m, k] @ b[n, k]^T (+ bias[n]) in out_dtype. out: memory that the result may be written to."""
        raise NotImplementedError

    def accumulate_(self, out: Tensor, a: Scaled, b: Scaled, fast_accum: bool) -> None:
        """out[m, n] += a[m, k] @ b[n, k]^T, the product in fp32."""
        out.add_(self.matmul(a, b, torch.float32, None, fast_accum))


@dataclass(frozen=True, slots=True)
class Fp8Format(TensorFormat):
    """fp8 bytes of `dtype`, row [M, K] and col [K, Mp]; inverse scales in fp32, one or one for each row of the data."""

    dtype: torch.dtype = torch.float8_e4m3fn

    def dequantize(self, q: Held, layout: Layout) -> Tensor:
        if layout == "row":
            return (q.row.float() * q.row_scale.view(-1, 1)).to(q.dtype)
        return (q.col[:, : q.shape[0]].float() * q.col_scale.view(-1, 1)).to(q.dtype).t().contiguous()

    def accumulate_(self, out: Tensor, a: Scaled, b: Scaled, fast_accum: bool) -> None:
        gemm_scaled_accumulate_(out, a[0], b[0], a[1], b[1], fast_accum)


@dataclass(slots=True)
class QTensor:
    """A logical matrix v[M, K] held in `format`, in one or both layouts.

    row_scale, col_scale: inverse scales, v = data * scale, as the format lays them out. dtype: the high-precision dtype
    it stands for. seed: what its quantizer needs to produce another layout of the same numbers later (as a scale).
    borrowed: memory belongs to a userbuffer and must not be kept.
    """

    format: TensorFormat
    shape: tuple[int, int]
    dtype: torch.dtype
    row: Tensor | None = None
    row_scale: Tensor | None = None
    col: Tensor | None = None
    col_scale: Tensor | None = None
    seed: Tensor | None = None
    borrowed: bool = field(default=False, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of the constructor."""
        return self.row, self.row_scale, self.col, self.col_scale, self.seed

    @property
    def operand_scale(self) -> Tensor | None:
        """The scale of the layout that is held, of row where both are."""
        return self.row_scale if self.row is not None else self.col_scale

    @property
    def regather_layout(self) -> Layout:
        """The layout in which a shard that wgrad will read is kept and gathered."""
        return "row" if self.format.col_from_row else "col"

    @property
    def wgrad_layout(self) -> Layout:
        """The layout in which a shard that wgrad alone will read is gathered, of as many bytes as regather_layout."""
        format = self.format
        return "col" if format.gathers_columns(self.shape[0]) or not format.col_from_row else "row"

    def operand(self, layout: Layout) -> Scaled:
        """The GEMM operand in `layout`; a missing col layout is made from the row layout where the format can."""
        if layout == "row":
            return self.row, self.row_scale  # type: ignore[return-value]  # who asks for rows has them
        if self.col is None:
            self.col, self.col_scale = self.format.make_col(self)
        return self.col, self.col_scale

    def only(self, layout: Layout) -> QTensor:
        """The smallest tensor from which operand(layout) can still be had."""
        by_row = layout == "row" or self.col is None
        parts = (self.row, self.row_scale) if by_row else (None, None, self.col, self.col_scale)
        return QTensor(self.format, self.shape, self.dtype, *parts, borrowed=self.borrowed)

    def seed_only(self) -> QTensor:
        """No data: just what Quantizer.again needs to make the same numbers again."""
        return QTensor(self.format, self.shape, self.dtype, seed=self.seed)

    def dequantize(self, layout: Layout | None = None) -> Tensor:
        """v[M, K] in the high-precision dtype; of `layout` where the layouts hold numbers of their own."""
        if layout is None or self.format.col_from_row:
            layout = "col" if self.row is None else "row"
        return self.format.dequantize(self, layout)

    def rows(self, start: int, stop: int) -> QTensor:
        """v[start:stop], the row layout alone; views."""
        scale = self.row_scale
        if scale is not None and scale.shape[0] == self.shape[0]:
            scale = scale[start:stop]
        assert self.row is not None
        row = self.row[start:stop]
        return QTensor(self.format, (row.shape[0], self.shape[1]), self.dtype, row, scale, borrowed=self.borrowed)

    def keep(self, given: bool = False) -> QTensor:
        """A tensor that may outlive the call: itself, or a copy where its memory belongs to a userbuffer. given: also
        where it is not quantized, and so may be what the caller gave."""
        return self.map(Tensor.clone) if self.borrowed or (given and not self.format.label) else self

    def map(self, change: Callable[[Tensor], Tensor]) -> QTensor:
        """change() of each tensor, none of which belongs to a userbuffer any more."""
        return QTensor(self.format, self.shape, self.dtype, *(None if t is None else change(t) for t in self.tensors))

    def wire(self, layout: Layout) -> tuple[Tensor, ...]:
        return self.format.wire(self, layout)

    def from_wire(self, parts: tuple[Tensor, ...], layout: Layout, rows: int) -> QTensor:
        return self.format.from_wire(parts, layout, self, rows)


class Held(QTensor):
    """For types alone: a QTensor of which a format's method reads the layout that is asked for, which is there."""

    row: Tensor
    row_scale: Tensor
    col: Tensor
    col_scale: Tensor


def matmul(
    a: QTensor, a_layout: Layout, b: QTensor, b_layout: Layout, out_dtype: torch.dtype, bias: Tensor | None = None,
    fast_accum: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[m, n] = a[m, k] @ b[n, k]^T (+ bias[n]), each operand in the named layout (see the module docstring).

    Operands of formats that no GEMM multiplies together are dequantized first. out: where to write it.
    """
    a_row: Any = a.row  # a tensor where it is read
    b_row: Any = b.row
    if a.format.gemm == b.format.gemm == "high_precision":
        a_data = a_row if a_layout == "row" else a_row.t()
        return gemm(a_data, b_row if b_layout == "row" else b_row.t(), out_dtype, bias, out)
    if not a.format.multiplies(b.format):
        return gemm(_plain(a, a_layout, a.dtype), _plain(b, b_layout, a.dtype), out_dtype, bias, out)
    # operand() without a call where what it gives is there.
    row, col = (a_row, a.row_scale), a.col
    a_operand = row if a_layout == "row" else a.operand("col") if col is None else (col, a.col_scale)
    row, col = (b_row, b.row_scale), b.col
    b_operand = row if b_layout == "row" else b.operand("col") if col is None else (col, b.col_scale)
    product = a.format.matmul(a_operand, b_operand, out_dtype, bias, fast_accum, out)
    return product if out is None or product.data_ptr() == out.data_ptr() else out.copy_(product)


def matmul_accumulate_(out: Tensor, a: QTensor, b: QTensor, fast_accum: bool = False) -> None:
    """out[n, k] += a.col[n, m] @ b.col[k, m]^T: a weight gradient added where it is kept."""
    if a.format.multiplies(b.format):
        a.format.accumulate_(out, a.operand("col"), b.operand("col"), fast_accum)
    else:
        gemm_accumulate_(out, _plain(a, "col", a.dtype).t(), _plain(b, "col", a.dtype).t())


def _plain(q: QTensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The operand dequantized to the other operand's dtype: a parameter's own may be wider under torch.amp."""
    v = (q if q.dtype == dtype else replace(q, dtype=dtype)).dequantize(layout)
    return v if layout == "row" else v.t()
