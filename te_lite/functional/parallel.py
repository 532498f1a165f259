"""A linear's GEMMs over the ranks of a group: column- and row-parallel, forward and backward, written once over the
verbs of an exchange (overlap/collective.py), where the table of who moves what is.

backward(dgrad, wgrad, dy, dy_wgrad, x) gives (dgrad's result, wgrad's). dgrad: a Gemm of dy.row and the weight by
column; wgrad(dy, x): of dy.col and x.col; None where that gradient is not wanted. dy_wgrad is dy itself unless wgrad
uses another number format. dy and x are those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from te_lite.overlap.collective import Collective
from te_lite.overlap.exchange import Gemm
from te_lite.overlap.one_rank import multiply
from te_lite.overlap.userbuffers import Exchanges
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor, TensorFormat

Wgrad = Callable[[QTensor, QTensor], Tensor | None]
Results = tuple[Any, Tensor | None]
Read = Any  # a QTensor; None where no gradient that is wanted reads it

# Where dgrad hides a second gather of dy: it computes long enough (columns of dx), and more than a push's own price is
# moved (bytes of a shard).
COLUMNS_HIDE, COLUMNS_FROM = 3072, 4 << 20
# What the ranks must agree on, by whether dgrad and wgrad run.
_BACKWARD = {
    (True, True): "backward for dgrad and wgrad",
    (True, False): "backward for dgrad",
    (False, True): "backward for wgrad",
}
_NO_WGRAD = "no weight gradient to hide the scatter of dx behind"


class LocalGemms:
    """The GEMMs of one linear on one rank, without communication; subclasses add the exchanges. rows: M of the newest
    forward GEMM, for the report."""

    rows = 0

    def __init__(self, tp: TensorParallel, exchanges: Exchanges) -> None:
        self.tp, self.exchanges = tp, exchanges
        self.fprop, self.dgrad, self.wgrad = exchanges

    def forward(self, gemm: Gemm, x: QTensor) -> Any:
        """gemm(x) of all ranks, this rank's part."""
        self.rows = x.shape[0]
        return gemm(x) if gemm.epilogue is None or not gemm.epilogue.want else multiply(gemm, x)

    def backward(self, dgrad: Gemm | None, wgrad: Wgrad | None, dy: Read, dy_wgrad: Read, x: Read) -> Results:
        """(dx, dw), each None where it is not wanted. dy: as dgrad reads it; dy_wgrad and x: as wgrad reads them."""
        dx = None
        if dgrad is not None:
            dx = dgrad(dy) if dgrad.epilogue is None or not dgrad.epilogue.want else multiply(dgrad, dy)
        return dx, None if wgrad is None else wgrad(dy_wgrad, x)

    def wants_columns(self, format: TensorFormat, rows: int, width: int, columns: int) -> bool:
        """Whether dy[rows, width] of this rank had better be quantized by column too, to be gathered so for wgrad.
        columns: of dx."""
        return False


class Column(LocalGemms):
    """w[N/R, K], with sequence parallelism: x is gathered; dx is summed and scattered.

    bulk: backward hides each exchange behind the GEMM that has nothing to do with it, the gather of x behind dgrad, the
    reduce-scatter of dx behind wgrad. Otherwise dgrad scatters its own output and x is gathered beside it.
    """

    def __init__(self, tp: TensorParallel, exchanges: Exchanges) -> None:
        super().__init__(tp, exchanges)
        # An exchange has the name of the GEMM that it runs beside, not of what it moves. "": no overlap asked for.
        asked = [exchange.place.method for exchange in (self.dgrad, self.wgrad)]
        self.bulk = any(asked) and asked[0] in ("", "bulk")

    def forward(self, gemm: Gemm, x: QTensor) -> Any:
        """y[M, N/R] = gemm(all_gather(x))"""
        self.rows = x.shape[0] * self.tp.size
        exchange = self.fprop.settled(x, gemm, "row")
        with self.fprop.operation("fprop", x, gemm):
            gathering = exchange.all_gather(x, "row", multiplied=True, whole=False)
            y = exchange.all_gather_gemm(gemm, gathering)
            gathering.close()
        return y

    def backward(self, dgrad: Gemm | None, wgrad: Wgrad | None, dy: Read, dy_wgrad: Read, x: Read) -> Results:
        """x = all_gather(x);  dx = reduce_scatter(dgrad(dy));  dw = wgrad(dy_wgrad, x)"""
        gathers, scatters = (self.dgrad, self.wgrad) if self.bulk else (self.wgrad, self.dgrad)
        self.dgrad.place.note = self.wgrad.place.note = None
        if self.bulk and wgrad is None:
            scatters = self._not_hidden()
        gathering = summing = dx = dw = None
        if wgrad is not None:
            gathers = gathers.settled(x, None, "col")
        if dgrad is not None:
            scatters = scatters.settled(dy, dgrad, None)
        with self.dgrad.operation(_BACKWARD[dgrad is not None, wgrad is not None], dy_wgrad if dy is None else dy):
            if wgrad is not None:
                gathering = gathers.all_gather(x, "col")
            if dgrad is not None and self.bulk:
                summing = scatters.reduce_scatter(dgrad, dgrad.product(dy))
            elif dgrad is not None:
                dx = scatters.gemm_reduce_scatter(dgrad, dy)
            if wgrad is not None and gathering is not None:
                dw = wgrad(dy_wgrad, gathering.whole())
                gathering.close()
            if summing is not None:
                dx = summing.result()
        return dx, dw

    def _not_hidden(self) -> Collective:
        """What scatters dx where no weight gradient is computed."""
        wgrad: Any = self.wgrad
        if not wgrad.hides:
            return Collective(self.dgrad.place)
        wgrad.refused(_NO_WGRAD)  # raises under strict
        return Collective(self.dgrad.place, _NO_WGRAD)


class ColumnWhole(LocalGemms):
    """w[N/R, K] where each rank holds all tokens: dx is all-reduced."""

    def backward(self, dgrad: Gemm | None, wgrad: Wgrad | None, dy: Read, dy_wgrad: Read, x: Read) -> Results:
        """dx = all_reduce(dgrad(dy));  dw = wgrad(dy_wgrad, x)"""
        dx = None if dgrad is None else self.dgrad.gemm_reduce_scatter(dgrad, dy)
        return dx, None if wgrad is None else wgrad(dy_wgrad, x)


class RowWhole(LocalGemms):
    """w[N, K/R] where each rank holds all tokens: y is all-reduced."""

    def forward(self, gemm: Gemm, x: QTensor) -> Any:
        """y[M, N] = all_reduce(gemm(x))"""
        self.rows = x.shape[0]
        return self.fprop.gemm_reduce_scatter(gemm, x)


class Row(LocalGemms):
    """w[N, K/R], with sequence parallelism: y is summed and scattered; dy is gathered.

    Where wgrad needs another number format, or had better have columns of its own, dy is gathered a second time beside
    dgrad.
    """

    def forward(self, gemm: Gemm, x: QTensor) -> Any:
        """y[M/R, N] = reduce_scatter(gemm(x))"""
        self.rows = x.shape[0]
        exchange = self.fprop.settled(x, gemm, None)
        with self.fprop.operation("fprop", x, gemm):
            return exchange.gemm_reduce_scatter(gemm, x)

    def wants_columns(self, format: TensorFormat, rows: int, width: int, columns: int) -> bool:
        """Where dgrad hides both gathers: the transposition of the whole dy is spared."""
        hides = columns >= COLUMNS_HIDE and rows * width >= COLUMNS_FROM
        return self.wgrad.hides and hides and format.gathers_columns(rows)

    def backward(self, dgrad: Gemm | None, wgrad: Wgrad | None, dy: Read, dy_wgrad: Read, x: Read) -> Results:
        """dy = all_gather(dy), dy_wgrad = all_gather(dy_wgrad);  dx = dgrad(dy);  dw = wgrad(dy_wgrad, x)"""
        self.dgrad.place.note = self.wgrad.place.note = None
        by_row: Any = None  # the exchange that gathers dy by row, where somebody reads it so
        by_col: Any = None  # the one that gathers dy_wgrad by column
        rows: Any = None  # what these have begun
        columns: Any = None
        dx = dw = None
        from_rows = wgrad is not None and dy_wgrad is dy and dy.format.col_from_row  # wgrad reads the gathered rows
        if dgrad is not None or from_rows:
            by_row = self.dgrad.settled(dy, dgrad, "row")
        if wgrad is not None and not from_rows:
            by_col = self.wgrad.settled(dy_wgrad, None, "col")
        elif from_rows and dgrad is not None and (width := dgrad.b.shape[1]) >= COLUMNS_HIDE:
            if self.wants_columns(dy.format, dy.shape[0], dy.shape[1], width):
                second = self.wgrad.settled(dy, None, "col")
                if by_row.hides and second.hides:
                    by_col, from_rows = second, False
        with self.dgrad.operation(_BACKWARD[dgrad is not None, wgrad is not None], dy_wgrad if dy is None else dy):
            if by_row is not None:
                rows = by_row.all_gather(dy, "row", multiplied=dgrad is not None, whole=from_rows)
            if by_col is not None:
                columns = by_col.all_gather(dy_wgrad, "col")
            if dgrad is not None:
                dx = by_row.all_gather_gemm(dgrad, rows)
            if rows is not None and not from_rows:
                rows.close()  # now: behind wgrad, the close of columns would wait until this one's flags are set
            if wgrad is not None:
                read = rows if from_rows else columns
                dw = wgrad(read.whole(), x)
                read.close()
        return dx, dw


def parallel_linear(tp: TensorParallel, exchanges: Exchanges) -> LocalGemms:
    """How a linear split as `tp` says runs."""
    if not tp.active:
        return LocalGemms(tp, exchanges)
    if tp.mode == "column":
        return (Column if tp.sequence_parallel else ColumnWhole)(tp, exchanges)
    return (Row if tp.sequence_parallel else RowWhole)(tp, exchanges)
