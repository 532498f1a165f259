"""Schedules: who communicates what, and when, for one linear's whole forward and backward.

A schedule is handed the GEMMs as functions of quantized tensors and owns every byte that travels between ranks. The
program of a linear without communication is `Local`; `Collective` (collective.py) is the specification with it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from te_lite.quantize.qtensor import QTensor

Fprop = Callable[[QTensor], Tensor]
Dgrad = Callable[[QTensor], Tensor]
Wgrad = Callable[[QTensor, QTensor], Tensor | None]


class Schedule:
    """name: shown by overlap_report(). regathers: backward gathers x again, so forward keeps only the local shard."""

    name: str
    regathers: bool = False

    def fprop(self, gemm: Fprop, x: QTensor) -> Tensor:
        """y of this rank from x of this rank; gemm(x) is x.row @ w.row^T."""
        raise NotImplementedError

    def backward(
        self, dgrad: Dgrad | None, wgrad: Wgrad | None, dy: QTensor, dy_wgrad: QTensor, x: QTensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(dx of this rank, whatever wgrad returned). dy_wgrad is dy itself unless wgrad uses another number format.

        dgrad(dy) is dy.row @ w.col^T, wgrad(dy, x) is dy.col @ x.col^T; None where that gradient is not wanted.
        """
        raise NotImplementedError


class Local(Schedule):
    """No communication."""

    name = "local"

    def fprop(self, gemm: Fprop, x: QTensor) -> Tensor:
        return gemm(x)

    def backward(
        self, dgrad: Dgrad | None, wgrad: Wgrad | None, dy: QTensor, dy_wgrad: QTensor, x: QTensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        dx = None if dgrad is None else dgrad(dy)
        dw = None if wgrad is None else wgrad(dy_wgrad, x)
        return dx, dw
