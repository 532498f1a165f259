"""LinearPlan: everything about one linear that is decided before it runs.

A module builds a plan when its recipe, dtype or group changes; forward and backward only follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from te_lite.ops.transpose import padded_rows
from te_lite.overlap.schedule import Schedule
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor, TensorFormat, matmul, matmul_accumulate_
from te_lite.quantize.quantizer import GemmOperands


class WgradSink:
    """What becomes of a weight gradient: returned to autograd, in the weight's dtype. late: after backward."""

    late = False

    def __call__(self, weight: Tensor, dy: QTensor, x: QTensor, fast_accum: bool) -> Tensor | None:
        """dw[N, K] = dy.col[N, M] @ x.col[K, M]^T, put where it belongs; returns what autograd gets for the weight.

        weight: the parameter itself, not what autograd saved of it: under saved-tensor hooks that is another tensor.
        """
        return matmul(dy, "col", x, "col", weight.dtype, fast_accum=fast_accum)


class MainGrad(WgradSink):
    """Accumulated into weight.main_grad (overwritten where weight.overwrite_main_grad): Megatron's contract."""

    def __call__(self, weight: Tensor, dy: QTensor, x: QTensor, fast_accum: bool) -> Tensor | None:
        if getattr(weight, "overwrite_main_grad", False):
            weight.main_grad.zero_()
        matmul_accumulate_(weight.main_grad, dy, x, fast_accum)
        return self.answer(weight)

    @staticmethod
    def answer(weight: Tensor) -> Tensor | None:
        """What autograd gets: a dummy where Megatron's hooks look for a gradient, else None."""
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight, requires_grad=False)


class DelayedWgrads(WgradSink):
    """Weight gradients put off until backward_dw(), first in, first out.

    copies_dy, copies_x: whether it may be the caller's memory where it is not quantized. It is copied then: after
    backward the caller may write there, and a receive, a collective or `.data` leaves no trace by which to notice.
    """

    late = True

    def __init__(self, sink: WgradSink, copies_dy: bool, copies_x: bool) -> None:
        self.sink, self.copies_dy, self.copies_x = sink, copies_dy, copies_x
        self.queue: deque[Callable[[], None]] = deque()

    def __call__(self, weight: Tensor, dy: QTensor, x: QTensor, fast_accum: bool) -> Tensor | None:
        dy, x = dy.keep(self.copies_dy), x.keep(self.copies_x)

        def run() -> None:
            if weight.numel() and not weight.untyped_storage().nbytes():
                raise RuntimeError(
                    f"backward_dw() for a weight {tuple(weight.shape)} whose memory is freed, as FSDP does after "
                    "backward: its gradient would reach nobody; leave out delay_wgrad_compute"
                )
            dw = self.sink(weight, dy, x, fast_accum)
            if not isinstance(self.sink, MainGrad):
                weight.grad = dw if weight.grad is None else weight.grad.add_(dw)

        self.queue.append(run)
        return None if not isinstance(self.sink, MainGrad) else MainGrad.answer(weight)

    def run_next(self) -> bool:
        """Computes the oldest weight gradient that was put off; False when there is none."""
        if not self.queue:
            return False
        self.queue.popleft()()
        return True


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """One linear: y = x @ w^T + b.

    operands: quantizers of the three GEMMs. schedule: communication. sink: where dw goes. dtype: of y and dx.
    bias_in_gemm: the GEMM adds the bias, and no ranks' products are summed (else the schedule adds bias and residual).
    keep_original: backward quantizes the input again instead of keeping the quantized copy (save_original_input).
    """

    operands: GemmOperands
    schedule: Schedule
    sink: WgradSink
    tp: TensorParallel
    dtype: torch.dtype
    bias_in_gemm: bool
    keep_original: bool = False

    def bytes_saved(self, tokens: int, features: int, need_w: bool) -> int:
        """By keeping an input of the module's own in fp8, and not in 16 bits. need_w: for dw, else none is kept."""
        kept = need_w and _is_bytes(self.operands.wgrad.b.format) and not self.keep_original
        return max(0, 2 * tokens - padded_rows(tokens)) * features if kept else 0

    def keeps_weight(self, saved: int, weight: Tensor, cached: QTensor | None, need_x: bool) -> bool:
        """Whether the weight's col layout stays from forward to backward, which then need not quantize it again: where
        it takes no more than the bytes that were saved. cached: what is used in its place. need_x: for dx."""
        quantizer = self.operands.fprop.b
        wanted = need_x and cached is None and quantizer is self.operands.dgrad.b
        return wanted and _is_bytes(quantizer.format) and weight.numel() <= saved


def _is_bytes(format: TensorFormat) -> bool:
    """Whether either layout is a byte an element, and one scale for all of them."""
    return bool(format.label) and format.col_from_row and format.scales_product
