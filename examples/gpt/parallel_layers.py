"""What a tensor parallel GPT needs around te_lite's modules: the collectives as autograd functions, and the
vocabulary-parallel embedding and cross-entropy.

S sequence length, B batch, H hidden, V vocabulary, R tp_size. Activations are [S, B, H]; sequence parallelism
cuts dim 0, so a rank holds [S/R, B, H]. group None stands for one rank: a collective is then the identity.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Group = dist.ProcessGroup | None

# the older names warn in new versions of torch; the newer ones are missing in old versions
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_raw(x_shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S/R, ...] -> [S, ...], no gradient."""
    x = x_shard.new_empty(x_shard.shape[0] * group.size(), *x_shard.shape[1:])
    _all_gather(x, x_shard.contiguous(), group=group)
    return x


def reduce_scatter_raw(x_partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, ...], one term a rank -> this rank's [S/R, ...] of the sum, no gradient."""
    x_shard = x_partial.new_empty(x_partial.shape[0] // group.size(), *x_partial.shape[1:])
    _reduce_scatter(x_shard, x_partial.contiguous(), group=group)
    return x_shard


def all_reduce_raw(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group in a new tensor, no gradient."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx_partial: Tensor):
        return all_reduce_raw(dx_partial, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce_raw(x_partial, group)

    @staticmethod
    def backward(ctx, dx: Tensor):
        return dx, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_raw(x_shard, group)

    @staticmethod
    def backward(ctx, dx_partial: Tensor):
        return reduce_scatter_raw(dx_partial, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_raw(x_partial, group)

    @staticmethod
    def backward(ctx, dx_shard: Tensor):
        return gather_raw(dx_shard, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        return _AllToAll.apply(dy, ctx.received, ctx.sent, ctx.group), None, None, None


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """y = x; dx = sum over ranks of dy. Before a column-parallel product of a replicated x."""
    return x if group is None else _Copy.apply(x, group)


def reduce_from_ranks(x_partial: Tensor, group: Group) -> Tensor:
    """y = sum over ranks of x; dx = dy. After a product whose terms lie on the ranks."""
    return x_partial if group is None else _Reduce.apply(x_partial, group)


def gather_sequence(x_shard: Tensor, group: Group) -> Tensor:
    """[S/R, ...] -> [S, ...]; dx = reduce-scatter of dy, because each rank's dy is only its own term."""
    return x_shard if group is None else _Gather.apply(x_shard, group)


def reduce_scatter_sequence(x_partial: Tensor, group: Group) -> Tensor:
    """[S, ...], one term a rank -> [S/R, ...] of the sum; dx = all-gather of dy."""
    return x_partial if group is None else _ReduceScatter.apply(x_partial, group)


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """x [sum(sent), ...], rows for each rank in turn -> [sum(received), ...], rows of each rank in turn; dx travels
    back."""
    return _AllToAll.apply(x, sent, received, group)


def vocabulary_range(vocab_size: int, group: Group) -> tuple[int, int]:
    """First and one past the last token whose row lies on this rank: V/R rows a rank, in rank order."""
    size, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    if vocab_size % size:
        raise ValueError(
            f"vocabulary of {vocab_size} is not divisible by tp_size {size}: each rank holds V/R rows. "
            "Pad the vocabulary (--vocab) to a multiple of --tp."
        )
    rows = vocab_size // size
    return rank * rows, (rank + 1) * rows


class VocabParallelEmbedding(nn.Module):
    """tokens int64 [S, B] -> x [S, B, H], or x_shard [S/R, B, H] with sequence parallelism.

    The rank holds rows [first, last) of the [V, H] table:

        x_partial[s, b] = table[tokens[s, b] - first] if first <= tokens[s, b] < last else 0
        x       = all_reduce(x_partial)                 without sequence parallelism
        x_shard = reduce_scatter(x_partial, dim=0)      with

    One rank contributes each row and all others exact zeros, so the sum is exact in any type.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        *,
        tp_group: Group,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tp_group, sequence_parallel
        self.first, self.last = vocabulary_range(vocab_size, tp_group)
        self.weight = nn.Parameter(torch.empty(self.last - self.first, hidden, dtype=params_dtype, device=device))
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < self.first) | (tokens >= self.last)
        rows = (tokens - self.first).masked_fill(elsewhere, 0)
        x_partial = F.embedding(rows, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_sequence(x_partial, self.group)
        return reduce_from_ranks(x_partial, self.group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """See vocab_parallel_cross_entropy. Keeps the softmax shard [..., V/R] and nothing else of that size."""

    @staticmethod
    def forward(ctx, logits_shard: Tensor, targets: Tensor, group: Group) -> Tensor:
        rows = logits_shard.shape[-1]
        first = 0 if group is None else rows * dist.get_rank(group)
        # fp32 at least: a sum of exponentials in bf16 would stall after 256 equal terms
        shifted = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32), copy=True)
        top = shifted.amax(dim=-1)
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted -= top.unsqueeze(-1)
        elsewhere = (targets < first) | (targets >= first + rows)
        local = (targets - first).masked_fill(elsewhere, 0).unsqueeze(-1)
        # one all-reduce for both sums: the target's logit (one rank has it) and the sum of exponentials
        sums = torch.stack([shifted.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0), torch.zeros_like(top)])
        softmax_shard = shifted.exp_()
        sums[1] = softmax_shard.sum(dim=-1)
        if group is not None:
            dist.all_reduce(sums, group=group)
        target_logit, exp_sum = sums
        softmax_shard /= exp_sum.unsqueeze(-1)
        ctx.save_for_backward(softmax_shard, local, elsewhere)
        ctx.dtype = logits_shard.dtype
        return exp_sum.log() - target_logit

    @staticmethod
    def backward(ctx, dloss: Tensor):
        softmax_shard, local, elsewhere = ctx.saved_tensors
        dlogits_shard = softmax_shard * dloss.unsqueeze(-1)
        own = dloss.masked_fill(elsewhere, 0).neg().unsqueeze(-1)
        dlogits_shard.scatter_add_(-1, local, own)
        return dlogits_shard.to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(logits_shard: Tensor, targets: Tensor, group: Group) -> Tensor:
    """logits_shard [..., V/R], targets int64 [...] in [0, V) -> loss [...] in nats, fp32 (fp64 of fp64 logits).

        logits = all_gather(logits_shard, dim=-1)                        never materialised
        loss   = log(sum(exp(logits - max))) - (logits[targets] - max)
        dlogits_shard = (softmax(logits) - onehot(targets))[this rank's columns] * dloss

    The maximum is taken over the whole group, so no exponential overflows and the sum is at least 1.
    """
    if targets.shape != logits_shard.shape[:-1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not fit logits {tuple(logits_shard.shape)}: each row of logits "
            "needs one target. Pass targets of shape logits.shape[:-1]."
        )
    return _VocabParallelCrossEntropy.apply(logits_shard, targets, group)
