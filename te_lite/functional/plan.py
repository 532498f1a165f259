"""LinearPlan: everything about one linear that is decided before it runs.

A module builds a plan when something changes that it depends on, such as its recipe, dtype or group; forward and
backward only follow it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite.functional.parallel import LocalGemms
from te_lite.functional.recordings import Recordings
from te_lite.functional.shared_input import SharedInput
from te_lite.ops.nvtx import ENABLED, ranged
from te_lite.ops.recorder import WANTED
from te_lite.overlap.exchange import Place
from te_lite.overlap.one_rank import FusedProducts
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import QTensor, matmul, matmul_accumulate_
from te_lite.quantize.quantizer import GemmOperands
from te_lite.quantize.replay import backward_may_follow


class PendingWgrad(NamedTuple):
    """A weight gradient that is still to be computed: dw[N, K] = dy.col[N, M] @ x.col[K, M]^T. Sinks take any product
    with these methods: functional/grouped.py has that of all groups, dw[G, N, K]."""

    fast_accum: bool
    dy: QTensor
    x: QTensor

    def __call__(self, dtype: torch.dtype) -> Tensor:
        return matmul(self.dy, "col", self.x, "col", dtype, fast_accum=self.fast_accum)

    def write(self, add: bool, out: Tensor) -> None:
        """add: out += dw, else out = dw. Groups take several, one for each."""
        if add:
            matmul_accumulate_(out, self.dy, self.x, self.fast_accum)
        else:
            matmul(self.dy, "col", self.x, "col", out.dtype, fast_accum=self.fast_accum, out=out)

    def keep(self, copies_dy: bool, copies_x: bool) -> PendingWgrad:
        """One that may outlive backward. copies_...: where it is not quantized, it may be the caller's memory."""
        return self._replace(dy=self.dy.keep(copies_dy), x=self.x.keep(copies_x))


class WgradSink:
    """What becomes of a weight gradient. This class: it is returned to autograd, in the weight's dtype. Others say how
    they differ. takes: they are called with the PendingWgrad and put the product elsewhere. late: after backward.
    answers: autograd gets what answer() gives."""

    late = answers = takes = False

    def __call__(self, wgrad: Any, *weights: Any) -> Tensor | None:
        """wgrad, put where it belongs; None where that is no tensor of its own.

        weights: the parameter itself, not what autograd saved of it: under saved-tensor hooks that is another tensor.
        Of groups one for all [G, N, K], or one for each [N, K].
        """
        return wgrad(weights[0].dtype)

    def where(self, weight: Tensor) -> tuple[Tensor | None, bool]:
        """(what a call writes to beside its result, whether that is replaced)."""
        return None, False

    def answer(self, dw: Tensor | None, *weights: Any) -> Tensor | None:
        """What autograd gets in place of the result dw of the call, which is over."""
        return dw


class MainGrad(WgradSink):
    """Added to weight.main_grad: Megatron's contract. It replaces what is there where weight.overwrite_main_grad, and
    once where weight.main_grad_is_old, which a forward of the first micro-batch sets."""

    answers = takes = True

    def __call__(self, wgrad: Any, *weights: Any) -> None:
        targets, replaced = zip(*map(self.where, weights), strict=True)
        # Groups may share one, and no fp8 GEMM writes fp64.
        apart = len(set(map(id, targets))) == len(targets) and targets[0].dtype != torch.float64
        add = not (apart and all(replaced))
        for grad in compress(targets, replaced) if add else ():
            grad.zero_()
        wgrad.write(add, *targets)
        for weight in compress(weights, replaced):
            weight.main_grad_is_old = False

    def where(self, weight: Any) -> tuple[Tensor | None, bool]:
        replaced = getattr(weight, "overwrite_main_grad", False) or getattr(weight, "main_grad_is_old", False)
        return getattr(weight, "main_grad", None), replaced

    def answer(self, dw: Tensor | None, *weights: Any) -> Tensor | None:
        for weight in weights:
            if getattr(weight, "main_grad_is_old", False):  # a replay has written without a call
                weight.main_grad_is_old = False
        return dummy_grad(weights)


def expect_new_sum(weights: tuple[Any, ...], grad: bool) -> None:
    """The next gradient of each of these weights is the first one of a sum: it replaces main_grad. grad: gradients are
    enabled. A call that is computed again says nothing: its first run did, perhaps in a checkpoint's autograd.Function.
    """
    if torch._C._current_graph_task_id() == -1 and (grad or backward_may_follow()):
        for weight in weights:
            if weight.requires_grad:
                weight.main_grad_is_old = True


def dummy_grad(weights: tuple[Any, ...]) -> Tensor | None:
    """A gradient that nobody reads where Megatron's hooks look for one, else None."""
    first = weights[0]
    if not hasattr(first, "grad_added_to_main_grad"):
        return None
    for weight in weights:
        weight.grad_added_to_main_grad = True
    zeroed = any([getattr(weight, "zero_out_wgrad", False) for weight in weights])
    like = first if len(weights) == 1 else first.expand(len(weights), *first.shape)
    return (torch.zeros_like if zeroed else torch.empty_like)(like, requires_grad=False)


class DelayedWgrads(WgradSink):
    """Weight gradients delayed until backward_dw(), first in, first out.

    copies: keep()'s. What may be the caller's is copied: after backward the caller may write there, and a receive, a
    collective or `.data` leaves no trace by which to notice.
    """

    late = takes = True

    def __init__(self, sink: WgradSink, copies: tuple[bool, bool]) -> None:
        self.sink, self.copies, self.answers = sink, copies, sink.answers
        self.queue: deque[Callable[[], None]] = deque()

    def __call__(self, wgrad: Any, *weights: Any) -> Tensor | None:
        self.queue.append(partial(self._run, wgrad.keep(*self.copies), *weights))
        return None

    def _run(self, wgrad: Any, *weights: Any) -> None:
        for weight in weights:
            if weight.numel() and not weight.untyped_storage().nbytes():
                raise RuntimeError(
                    f"backward_dw() for a weight {tuple(weight.shape)} whose memory is freed, as FSDP does after "
                    "backward: its gradient would reach nobody; leave out delay_wgrad_compute"
                )
        dw: Any = self.sink(wgrad, *weights)
        if not isinstance(self.sink, MainGrad):
            for weight, one in zip(weights, [dw] if dw.dim() == weights[0].dim() else dw.unbind(), strict=True):
                weight.grad = one if weight.grad is None else weight.grad.add_(one)

    def answer(self, dw: Tensor | None, *weights: Any) -> Tensor | None:
        return dummy_grad(weights)  # the rest is for the call that waits

    def run_next(self) -> bool:
        """Computes the oldest delayed weight gradient; False when there is none."""
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


class Recompute(Enum):
    """Where backward computes and quantizes a linear's input again, in place of keeping it, if what that is computed
    from is kept."""

    NOWHERE = 0
    ONE_READ = 1  # in a pass that reads it anyway, where the recipe has one: one_read()
    ELSE_APART = 2  # in that pass; where the recipe has none, in one of its own
    ALWAYS = 3  # as ELSE_APART, and in one of its own too where that pass does not run, for a GEMM makes its result


class LinearPlan:
    """One linear: y = x @ w^T + b.

    operands: quantizers of the three GEMMs. parallel: how they run over ranks. sink: where dw goes. dtype: of y and dx.
    keep_original: backward quantizes the input again instead of keeping the quantized copy (save_original_input).
    before: the plan of the linear whose output the input is computed from, if any; recompute: what is then asked for.
    fused: what of fprop's and dgrad's product a kernel computes where no tokens are gathered; None: nothing.
    compiled: in a graph of torch.compile, which serves any number of tokens.
    weight: (N, K) of what may stay from forward to backward: its weight, or those of all that share x; None: nothing.
    caches: whether is_first_microbatch keeps anything of the weight; None: where it is quantized for fprop.
    info: for the report, None where it shows no row. The rest follows from these.
    """

    def __init__(
        self, operands: GemmOperands, parallel: LocalGemms, sink: WgradSink, dtype: torch.dtype,
        keep_original: bool = False, info: PlanInfo | None = None, before: LinearPlan | None = None,
        recompute: Recompute = Recompute.NOWHERE, compiled: bool = False, fused: FusedProducts | None = None,
        weight: tuple[int, int] | None = None, caches: bool | None = None,
    ) -> None:  # fmt: skip
        self.operands, self.parallel, self.sink, self.dtype = operands, parallel, sink, dtype
        self.keep_original, self.info, self.compiled = keep_original, info, compiled
        self.tp = tp = parallel.tp
        fprop, dgrad, wgrad = operands.fprop, operands.dgrad, operands.wgrad
        self.x_is_wgrads = wgrad.b is fprop.a  # fprop and wgrad read the same quantized x
        self.dy_is_wgrads = wgrad.a is dgrad.a  # dgrad and wgrad read the same quantized dy
        self.caches = bool(fprop.b.format.label) if caches is None else caches
        self.w_is_dgrads = dgrad.b is fprop.b  # fprop and dgrad read the same quantized weight
        # An infinite dy would become a number; in fp16 a GradScaler asks whether there was one.
        self.hides_overflow = dtype is torch.float16 and bool(dgrad.a.format.label or wgrad.a.format.label)
        self.gathers_x, self.gathers_dy = tp.gathers_input, tp.gathers_grad
        # x is kept by row: the shard of this rank, which backward gathers again.
        self.keeps_rows = self.gathers_x and wgrad.b.format.col_from_row
        # What the GEMM before may leave of x, and of dy: Quantizer.wants_from_gemm.
        self.x_from_gemm = fprop.a.wants_from_gemm(dtype) if self.x_is_wgrads else ""
        self.dy_from_gemm = dgrad.a.wants_from_gemm(dtype) if self.dy_is_wgrads else ""
        # The weight's col layout stays from forward to backward, which then need not quantize it again, where saved
        # bytes are at least these. Not in a graph of torch.compile, which serves any number of tokens.
        self.weight_bytes: float = math.inf
        if weight is not None and self.w_is_dgrads and fprop.b.format.col_scales[1]:
            self.weight_bytes = fprop.b.format.col_bytes(*weight)
        self.one_read = before is not None and one_read(before, operands, tp)
        if before is None or sink.late:  # wgrad after backward would need what the input is computed from until then
            recompute = Recompute.NOWHERE
        shares_read = self.one_read and bool(fprop.a.format.label)
        self.recomputes_apart = recompute is Recompute.ALWAYS or (recompute is Recompute.ELSE_APART and not shares_read)
        self.recomputes_x = self.recomputes_apart or (recompute is not Recompute.NOWHERE and shares_read)
        self._fused = fused
        # Whether a kernel may leave something of fprop's and of dgrad's product for the next GEMM. Where tokens are
        # gathered, the exchange knows.
        fprop_makes, dgrad_makes = (bool(fused[0].spans), bool(fused[1].spans)) if fused else (False, False)
        self.makes = self.gathers_x or fprop_makes, self.gathers_dy or dgrad_makes
        # fprop's quantized x leaves all that backward needs to quantize x again for wgrad.
        self.x_leaves_seed = self.x_is_wgrads or not wgrad.b.format.label
        # Whether there is nothing in it but three products of tensors as they are.
        others = fprop.b, dgrad.a, dgrad.b, wgrad.a, wgrad.b
        is_plain = self.x_from_gemm == "high precision" and all(quantizer is fprop.a for quantizer in others)
        asks = tp.active or type(sink) is not WgradSink or keep_original or compiled or ENABLED
        self.is_torchs = is_plain and not asks
        # Of the module's bodies, where their launches follow from shapes: of its first linear's plan.
        self.recordings: Recordings | None = None
        # With which linears it shares its quantized input, and its number among them.
        self.shared: tuple[SharedInput, int] | None = None

    @property
    def recordable(self) -> bool:
        """Whether nothing but te_lite's own kernels, exchanges and cublasLt runs for this linear."""
        gemms = self.operands.fprop, self.operands.dgrad, self.operands.wgrad
        own = all(vars(type(q)).get("recordable") for gemm in gemms for q in (gemm.a, gemm.b))
        return WANTED and not ENABLED and own and not self.sink.late

    @property
    def places(self) -> list[Place]:
        """The places of its exchanges."""
        return [one.place for one in self.parallel.exchanges] if self.tp.active else []

    @ranged("te_lite.wgrad")
    def put_wgrad(self, param: Tensor, dy: QTensor, x: QTensor) -> Tensor | None:
        """The weight gradient, put where it belongs; None where that is no tensor of its own."""
        fast_accum = self.operands.wgrad.fast_accum
        if self.sink.takes:
            return self.sink(PendingWgrad(fast_accum, dy, x), param)
        return matmul(dy, "col", x, "col", param.dtype, fast_accum=fast_accum)  # as PendingWgrad, in a call less

    def from_gemm(self, want: str, rows: int, weight: Tensor, grad: bool = False) -> str:
        """`want` of fprop's product of x[rows, K], or with grad of dgrad's of dy[rows, N], where a GEMM is to be asked
        for it; else "". For a plan that `makes` something and gathers nothing. weight: [N, K]."""
        n, k = reversed(weight.shape) if grad else weight.shape
        return "" if self._fused is None else self._fused[grad](want, rows, n, k)

    def bytes_saved(self, tokens: int, features: int) -> int:
        """By keeping an input of the module's own, where it is kept, in fp8 and not in 16 bits; 0 where compiled."""
        format = self.operands.wgrad.b.format
        weighed = format.col_scales[1] and not (self.keep_original or self.compiled)
        return max(0, 2 * tokens * features - format.col_bytes(tokens, features)) if weighed else 0


def inf_to_nan(dy: Tensor) -> Tensor:
    """dy with nan in the place of inf, for a linear that hides_overflow: a GradScaler must find it in the gradients,
    where quantization makes inf a number and leaves nan."""
    return dy.nan_to_num(torch.nan, torch.nan, torch.nan)


def one_read(before: LinearPlan, operands: GemmOperands, tp: TensorParallel) -> bool:
    """Whether fc2's input, act(h) of fc1's output h, can be quantized again while h is read for its gradient: first
    fc2's dgrad, then one read of h that gives dh and act(h), then fc2's wgrad. Nothing of it may be gathered."""
    same = before.dy_is_wgrads and operands.wgrad.b is operands.fprop.a
    return same and not tp.gathers_grad and before.operands.dgrad.a.gives_again(operands.wgrad.b)
