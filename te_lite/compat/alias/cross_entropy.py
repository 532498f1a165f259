"""Cross entropy of logits whose vocabulary is split over tensor-parallel ranks, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _ParallelCrossEntropy(torch.autograd.Function):
    """loss[t] = logsumexp_v(x[t, v]) - (1 - e) x[t, target] - e mean_v(x[t, v]), v over the shards of all ranks.

    Where the smoothing e is 0, the mean is not computed: x may hold -inf. A target that is no v counts as x = -inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, smoothing: float, ignored: int, group: Any) -> Tensor:
        ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))

        def reduced(t: Tensor, op: Any) -> Tensor:
            if ranks > 1:
                dist.all_reduce(t, op, group=group)
            return t

        v, local = x.float(), target - rank * x.shape[-1]
        here = (local >= 0) & (local < x.shape[-1])
        local = torch.where(here, local, 0)
        top = reduced(v.amax(-1), dist.ReduceOp.MAX)
        v = v - top[:, None]
        exp = v.exp()
        vocabulary = ranks * x.shape[-1]
        sums = [exp.sum(-1), torch.where(here, v.gather(-1, local[:, None])[:, 0], 0.0)]
        if smoothing:
            sums.append(v.sum(-1))
        total, at_target, *over_all = reduced(torch.stack(sums), dist.ReduceOp.SUM)
        at_target = torch.where((target >= 0) & (target < vocabulary), at_target, -torch.inf)
        loss = total.log() - (1.0 - smoothing) * at_target
        if smoothing:
            loss = loss - smoothing / vocabulary * over_all[0]
        wanted = target != ignored
        ctx.save_for_backward(exp / total[:, None], local, here, wanted)
        ctx.smoothing, ctx.vocabulary, ctx.dtype = smoothing, vocabulary, x.dtype
        return torch.where(wanted, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, here, wanted = ctx.saved_tensors
        dx = probabilities - ctx.smoothing / ctx.vocabulary
        dx.scatter_add_(-1, local[:, None], -(1.0 - ctx.smoothing) * here.float()[:, None])
        return (dx * torch.where(wanted, grad, 0.0)[:, None]).to(ctx.dtype), None, None, None, None


def parallel_cross_entropy(
    inp: Tensor | None = None, target: Tensor | None = None, label_smoothing: float = 0.0, reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None, ignore_idx: int = -100, is_cg_capturable: bool = False, *,
    _input: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """inp [S, B, V / ranks], target [S, B] -> fp32 loss [S, B], or its mean over what is not ignored (reduce_loss). A
    target beyond the vocabulary has the loss inf, as in Transformer Engine.

    dist_process_group: the ranks that hold the other parts of the vocabulary. is_cg_capturable: accepted; nothing waits
    for the host. _input: inp's older name. Unlike Transformer Engine's, inp keeps its values.
    """
    inp = inp if _input is None else _input
    if inp is None or target is None:
        raise TypeError("parallel_cross_entropy needs logits and targets; pass inp and target")
    flat = target.reshape(-1)
    loss = _ParallelCrossEntropy.apply(
        inp.reshape(-1, inp.shape[-1]), flat, label_smoothing, ignore_idx, dist_process_group
    )
    return loss.sum() / (flat != ignore_idx).sum().clamp(min=1) if reduce_loss else loss.view(target.shape)
