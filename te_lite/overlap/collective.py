"""Collective: torch.distributed's all-gather and reduce-scatter around the GEMMs. The specification.

With R ranks, m = M / R tokens a rank under sequence parallelism:

                      column-parallel, w[N/R, K]          row-parallel, w[N, K/R]
    forward           x = all_gather(x_shard[m, K])       y_part = x @ w^T
                      y = x @ w^T                         y_shard[m, N] = reduce_scatter(y_part)
    backward          dx_part = dy @ w                    dy = all_gather(dy_shard[m, N])
                      dx_shard = reduce_scatter(dx_part)  dx = dy @ w
                      x = all_gather(x_shard), dw = dy^T x    dw = dy^T x

Without sequence parallelism both gathers vanish and both reduce-scatters are all-reduces.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.nvtx import nvtx_range
from te_lite.overlap.schedule import Backward, Gradients, Note, Product, Schedule
from te_lite.parallel import TensorParallel
from te_lite.quantize.qtensor import Layout, QTensor
from te_lite.watch import collective

# torch 2.13 renames both and warns about the old names.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _wire_dtype(group: dist.ProcessGroup, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums travel: gloo adds in the wire's dtype, rounding at each step, so fp32 there."""
    return torch.float32 if dist.get_backend(group) == "gloo" else dtype


def all_gather(shard: Tensor, group: dist.ProcessGroup, what: str = "all-gather") -> Tensor:
    """[m, ...] on each of R ranks -> [R*m, ...] on all, in rank order. No autograd. what: for messages."""
    if shard.is_floating_point() and shard.element_size() == 1:  # not every backend knows fp8
        return all_gather(shard.view(torch.uint8), group, what).view(shard.dtype)
    out = shard.new_empty(shard.shape[0] * dist.get_world_size(group), *shard.shape[1:])
    with nvtx_range("te_lite.all_gather"):
        collective(what, shard, group, partial(_all_gather_into, out, shard.contiguous(), group=group))
    return out


def reduce_scatter(summand: Tensor, group: dist.ProcessGroup, what: str = "reduce-scatter") -> Tensor:
    """[R*m, N] partial sums on each of R ranks -> [m, N]: this rank's tokens, summed. No autograd."""
    wire = summand.to(_wire_dtype(group, summand.dtype))
    out = wire.new_empty(wire.shape[0] // dist.get_world_size(group), *wire.shape[1:])
    with nvtx_range("te_lite.reduce_scatter"):
        collective(what, summand, group, partial(_reduce_scatter_into, out, wire, group=group))
    return out.to(summand.dtype)


def all_reduce(summand: Tensor, group: dist.ProcessGroup, what: str = "all-reduce") -> Tensor:
    """[M, N] partial sums on each rank -> [M, N] summed on all; may reuse the input's memory. No autograd."""
    wire = summand.to(_wire_dtype(group, summand.dtype))
    with nvtx_range("te_lite.all_reduce"):
        collective(what, summand, group, partial(dist.all_reduce, wire, group=group))
    return wire.to(summand.dtype)


class Collective(Schedule):
    """See the module docstring."""

    name = "collective"

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp

    def _note(self, gemm: str, sent: int) -> None:
        """What `gemm` moved, with the reason that was noted for this call, if any."""
        old = self.notes.get(gemm)
        self.notes[gemm] = Note("collective", sent, old.reason if old is not None and not old.sent else "")

    def gather(self, gemm: str, q: QTensor, layout: Layout) -> QTensor:
        """The whole tensor from every rank's shard, moved as its wire format. gemm: which one needs it."""
        shards = q.wire(layout)
        self._note(gemm, sum(part.nbytes for part in shards) * (self.tp.size - 1))
        parts = tuple(all_gather(part, self.tp.group, self._text(f"{gemm}'s all-gather", q)) for part in shards)
        return q.from_wire(parts, layout, q.shape[0] * self.tp.size)

    def _text(self, what: str, q: QTensor | Tensor) -> str:
        """What the ranks must agree on. q: what is moved or multiplied."""
        return what

    def _regather(self, q: QTensor, gemm: str = "wgrad") -> QTensor:
        return self.gather(gemm, q, q.regather_layout)

    def _sum(self, gemm: str, summand: Tensor) -> Tensor:
        scatters = self.tp.sequence_parallel
        self._note(gemm, summand.nbytes * (self.tp.size - 1) // self.tp.size * (1 if scatters else 2))
        text = self._text(f"{gemm}'s {'reduce-scatter' if scatters else 'all-reduce'}", summand)
        return (reduce_scatter if scatters else all_reduce)(summand, self.tp.group, text)

    def _gemm_sum(self, name: str, gemm: Product, a: QTensor) -> Tensor:
        total = self._sum(name, gemm(a))
        for addend in (gemm.sum_bias, gemm.residual):
            total = total if addend is None else total.add_(addend)
        return total

    def fprop(self, gemm: Product, x: QTensor) -> Tensor:
        if self.tp.mode == "column":
            return gemm(self.gather("fprop", x, "row") if self.tp.sequence_parallel else x)
        return self._gemm_sum("fprop", gemm, x)

    def backward(self, of: Backward) -> Gradients:
        dgrad, wgrad, dy, dy_wgrad, x = of
        if self.tp.gathers_grad:
            if dgrad is not None or of.one_gather:
                dy_rows = self.gather("dgrad", dy, "row")
            if wgrad is not None:
                dy_wgrad = dy_rows if of.one_gather else self._regather(dy_wgrad)
            dy = dy_rows if dgrad is not None else None
        dx = None if dgrad is None else dgrad(dy)
        if dx is not None and self.tp.mode == "column":
            dx = self._sum("dgrad", dx)
        if wgrad is None:
            return dx, None
        return dx, wgrad(dy_wgrad, self._regather(x) if self.tp.gathers_input else x)
