"""LinearPlan: everything about one linear that is decided before it runs.

A module builds a plan when its recipe, dtype or group changes; forward and backward only follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.functional.parallel import Unsplit
from te_lite.functional.recordings import WANTED, Recordings
from te_lite.ops.nvtx import ENABLED, ranged
from te_lite.ops.transpose import PAD
from te_lite.overlap.alone import Beside
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor, TensorFormat, matmul, matmul_accumulate_
from te_lite.quantize.quantizer import GemmOperands


class WgradSink:
    """What becomes of a weight gradient: returned to autograd, in the weight's dtype. late: after backward. answers:
    autograd is to get what answer() gives."""

    late = answers = False

    @ranged("te_lite.wgrad")
    def __call__(self, weight: Tensor, fast_accum: bool, dy: QTensor, x: QTensor) -> Tensor | None:
        """dw[N, K] = dy.col[N, M] @ x.col[K, M]^T, put where it belongs; None where that is no tensor of its own.

        weight: the parameter itself, not what autograd saved of it: under saved-tensor hooks that is another tensor.
        """
        return matmul(dy, "col", x, "col", weight.dtype, fast_accum=fast_accum)

    def where(self, weight: Tensor) -> tuple[Tensor | None, bool]:
        """(what a call writes to beside its result, whether that is overwritten)."""
        return None, False

    def answer(self, weight: Tensor, dw: Tensor | None) -> Tensor | None:
        """What autograd gets for the weight in place of the result dw of the call, which is over."""
        return dw


class MainGrad(WgradSink):
    """Accumulated into weight.main_grad (overwritten where weight.overwrite_main_grad): Megatron's contract."""

    answers = True

    @ranged("te_lite.wgrad")
    def __call__(self, weight: Any, fast_accum: bool, dy: QTensor, x: QTensor) -> None:
        if getattr(weight, "overwrite_main_grad", False):
            weight.main_grad.zero_()
        matmul_accumulate_(weight.main_grad, dy, x, fast_accum)

    def where(self, weight: Any) -> tuple[Tensor | None, bool]:
        return getattr(weight, "main_grad", None), getattr(weight, "overwrite_main_grad", False)

    def answer(self, weight: Any, dw: Tensor | None) -> Tensor | None:
        """A dummy where Megatron's hooks look for a gradient, else None."""
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
        self.sink, self.copies_dy, self.copies_x, self.answers = sink, copies_dy, copies_x, sink.answers
        self.queue: deque[Callable[[], None]] = deque()

    def __call__(self, weight: Tensor, fast_accum: bool, dy: QTensor, x: QTensor) -> Tensor | None:
        dy, x = dy.keep(self.copies_dy), x.keep(self.copies_x)

        def run() -> None:
            if weight.numel() and not weight.untyped_storage().nbytes():
                raise RuntimeError(
                    f"backward_dw() for a weight {tuple(weight.shape)} whose memory is freed, as FSDP does after "
                    "backward: its gradient would reach nobody; leave out delay_wgrad_compute"
                )
            dw: Any = self.sink(weight, fast_accum, dy, x)
            if not isinstance(self.sink, MainGrad):
                weight.grad = dw if weight.grad is None else weight.grad.add_(dw)

        self.queue.append(run)
        return None

    def answer(self, weight: Tensor, dw: Tensor | None) -> Tensor | None:
        return self.sink.answer(weight, dw)

    def run_next(self) -> bool:
        """Computes the oldest weight gradient that was put off; False when there is none."""
        if not self.queue:
            return False
        self.queue.popleft()()
        return True


class PlanInfo(NamedTuple):
    """What overlap_report() says of a plan beside its exchanges. linear: "" for a module that is one linear, "fc1" or
    "fc2". formats: of the operands of the three GEMMs. shape: (K, N) on this rank. reason: what is not as asked."""

    linear: str
    recipe: str
    formats: tuple[str, str, str]
    shape: tuple[int, int]
    reason: str


class LinearPlan:
    """One linear: y = x @ w^T + b.

    operands: quantizers of the three GEMMs. parallel: how they run over ranks. sink: where dw goes. dtype: of y and dx.
    keep_original: backward quantizes the input again instead of keeping the quantized copy (save_original_input).
    recompute: the input had better be computed and quantized again than kept, where what it is computed from is kept.
    recompute_apart: also where a read of its own is needed for that. one_read: see one_read().
    beside: what of fprop's and dgrad's product a kernel computes where no tokens are gathered; None: nothing.
    compiled: in a graph of torch.compile, which serves any number of tokens.
    bias_dtype: of the bias' gradient. info: for the report, None where it shows no row. The rest follows from these.
    """

    def __init__(
        self, operands: GemmOperands, parallel: Unsplit, sink: WgradSink, dtype: torch.dtype,
        keep_original: bool = False, info: PlanInfo | None = None, recompute: bool = False, one_read: bool = False,
        compiled: bool = False, bias_dtype: torch.dtype = torch.float32, recompute_apart: bool = False,
        beside: tuple[Beside, Beside] | None = None,
    ) -> None:  # fmt: skip
        self.operands, self.parallel, self.sink, self.dtype = operands, parallel, sink, dtype
        self.bias_dtype = bias_dtype
        self.keep_original, self.info, self.one_read, self.compiled = keep_original, info, one_read, compiled
        self.tp = tp = parallel.tp
        fprop, dgrad, wgrad = operands.fprop, operands.dgrad, operands.wgrad
        self.x_is_wgrads = wgrad.b is fprop.a  # fprop and wgrad read the same quantized x
        self.dy_is_wgrads = wgrad.a is dgrad.a  # dgrad and wgrad read the same quantized dy
        self.w_is_dgrads = dgrad.b is fprop.b  # fprop and dgrad read the same quantized weight
        self.gathers_x, self.gathers_dy = tp.gathers_input, tp.gathers_grad
        # x is kept by row: the shard of this rank, which backward gathers again.
        self.keeps_rows = self.gathers_x and wgrad.b.format.col_from_row
        # What the GEMM before may leave of x, and of dy: Quantizer.wants_from_gemm.
        self.x_from_gemm = fprop.a.wants_from_gemm(dtype) if self.x_is_wgrads else ""
        self.dy_from_gemm = dgrad.a.wants_from_gemm(dtype) if self.dy_is_wgrads else ""
        # Kept a byte an element: x; the weight, in either layout, with one scale for all.
        self.x_in_bytes = _is_bytes(wgrad.b.format) and not keep_original
        self.w_in_bytes = self.w_is_dgrads and _is_bytes(fprop.b.format)
        self.recomputes_x = recompute and not sink.late  # wgrad after backward would need h until then
        self.recomputes_apart = recompute_apart and not sink.late
        self._beside = beside
        # fprop's quantized x leaves all that backward needs to quantize x again for wgrad.
        self.x_leaves_seed = self.x_is_wgrads or not wgrad.b.format.label
        # Of the module's bodies, where their launches follow from shapes: of its first linear's plan, see record().
        self.recordings: Recordings | None = None

    @property
    def recordable(self) -> bool:
        """Whether nothing but te_lite's own kernels and cublasLt runs for this linear, on one rank's GPU alone."""
        gemms = self.operands.fprop, self.operands.dgrad, self.operands.wgrad
        own = all(vars(type(q)).get("recordable") for gemm in gemms for q in (gemm.a, gemm.b))
        return WANTED and not ENABLED and own and type(self.parallel) is Unsplit and not self.sink.late

    def from_gemm(self, want: str, rows: int, weight: torch.Size, grad: bool = False) -> str:
        """`want` of fprop's product of x[rows, K], or with grad of dgrad's of dy[rows, N], where a GEMM is to be asked
        for it; else "". weight: (N, K). Where tokens are gathered the exchange knows what it makes of it."""
        if not want or (self.gathers_dy if grad else self.gathers_x):
            return want
        n, k = reversed(weight) if grad else weight
        return "" if self._beside is None else self._beside[grad](want, rows, n, k)

    def bytes_saved(self, tokens: int, features: int) -> int:
        """By keeping an input of the module's own, where it is kept, in fp8 and not in 16 bits."""
        return max(0, 2 * tokens - -(-tokens // PAD) * PAD) * features if self.x_in_bytes else 0

    def keeps_weight(self, saved: int, weight: Tensor, cached: QTensor | None) -> bool:
        """Whether the weight's col layout stays from forward to backward, which then need not quantize it again: where
        it takes no more than the bytes that were saved, and in graphs. cached: what is used in its place."""
        return self.w_in_bytes and cached is None and (self.compiled or weight.numel() <= saved)


def one_read(before: LinearPlan, operands: GemmOperands, tp: TensorParallel) -> bool:
    """Whether the input of a linear, an activation of what the linear before gives, can be quantized again in the pass
    that quantizes the gradient of that: after dgrad and before wgrad, which then stand apart and gather nothing."""
    same = before.dy_is_wgrads and operands.wgrad.b is operands.fprop.a
    return same and not tp.gathers_grad and before.operands.dgrad.a.gives_again(operands.wgrad.b)


def _is_bytes(format: TensorFormat) -> bool:
    return bool(format.label) and format.col_from_row and format.scales_product
