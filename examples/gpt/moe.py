"""A mixture of experts in the place of a block's MLP: router, dispatch without a capacity, experts spread over ranks.

T this rank's tokens, H hidden, F ffn, E experts, k of them a token, R ep_size. A rank holds E/R experts in a row.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import te_lite as te

from .mesh import Mesh
from .parallel_layers import all_to_all


@dataclass(frozen=True)
class MoEConfig:
    """balance: the factor of the load-balancing loss. recipe: what the experts' GEMMs follow."""

    experts: int
    top_k: int
    balance: float
    recipe: te.recipe.Recipe


class _WithPenalty(torch.autograd.Function):
    """y = x; the gradient of penalty is 1: it is added to the loss without being carried there."""

    @staticmethod
    def forward(ctx, x: Tensor, penalty: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor):
        return dx, dx.new_ones((), dtype=torch.float32)


def imbalance(p: Tensor, counts: Tensor) -> Tensor:
    """E sum_e f_e P_e, the load-balancing loss of Switch Transformers (Fedus et al., 2021, equation 4): f_e the share
    of the choices that fell on expert e, P_e the mean of p[T, E] over tokens. 1 where both are even.

    counts [E]: choices over all data parallel ranks. f has no gradient, so the mean of this over the ranks is the loss
    of all their tokens.
    """
    return len(counts) * (counts / counts.sum() * p.mean(0)).sum()


class MixtureOfExperts(nn.Module):
    """x [..., H] -> residual + y:

        n = rms_norm(x);  p[T, E] = softmax(n @ router^T) in fp32
        w[T, k], e[T, k] = the k largest p, divided by their sum, and their experts
        y[t] = sum_j w[t, j] * (silu(gate) * up) @ fc2[e[t, j]]^T,  gate, up = halves of n[t] @ fc1[e[t, j]]^T

    Every choice is computed, however many fall on one expert. With R = 1 the host reads no number of tokens. An
    expert's weights have allreduce = False, Megatron's mark: other ranks of the ep group hold other experts.
    """

    def __init__(
        self, hidden: int, ffn: int, moe: MoEConfig, mesh: Mesh, params_dtype: torch.dtype, fuse_wgrad: bool
    ) -> None:
        super().__init__()
        self.moe, self.mesh = moe, mesh
        like = {"params_dtype": params_dtype, "device": mesh.device}
        local = moe.experts // mesh.ep_size
        self.norm = te.RMSNorm(hidden, **like)
        self.router = nn.Parameter(torch.empty(moe.experts, hidden, dtype=params_dtype, device=mesh.device))
        options = {"bias": False, "fuse_wgrad_accumulation": fuse_wgrad, **like}
        self.fc1 = te.GroupedLinear(local, hidden, 2 * ffn, **options)
        self.fc2 = te.GroupedLinear(local, ffn, hidden, **options)
        for linear in (self.fc1, self.fc2):
            for i, weight in enumerate(linear.parameters()):
                weight.allreduce, weight.expert = False, mesh.ep_rank * local + i
        # choices of each expert in training, over all ranks
        self.register_buffer("chosen", torch.zeros(moe.experts, device=mesh.device), persistent=False)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] -> p fp32 [T, E], w fp32 [T, k], e int64 [T, k]."""
        p = F.linear(tokens.float(), self.router.float()).softmax(-1)
        weight, expert = p.topk(self.moe.top_k, dim=-1)
        return p, weight / weight.sum(-1, keepdim=True), expert

    def mlp(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """rows [N, H] sorted by this rank's experts, sizes int64 [E/R] on the device -> [N, H]."""
        # an expert's amaxes belong to the ranks that hold it
        recipe, group = self.moe.recipe, self.mesh.expert_group
        with te.autocast(enabled=recipe.is_fp8, recipe=recipe, amax_reduction_group=group):
            gate, up = self.fc1(rows, sizes).chunk(2, dim=-1)
            return self.fc2(F.silu(gate) * up, sizes)

    def over_ranks(self, rows: Tensor, counts: Tensor) -> Tensor:
        """mlp() of rows [T k, H] sorted by all experts, counts int64 [E], wherever the experts are: rows travel there
        and back. A rank receives them by sender, and sorts them by expert."""
        group, size = self.mesh.ep_group, self.mesh.ep_size
        if group is None:
            return self.mlp(rows, counts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        by_sender = arriving.view(size, -1)  # [R, E/R]
        # the only numbers that the host waits for
        sent, received = torch.stack((counts.view(size, -1).sum(1), by_sender.sum(1))).tolist()
        arrived = all_to_all(rows, sent, received, group)
        local = torch.arange(by_sender.shape[1], device=rows.device).repeat(size)
        order = local.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
        y = restore(self.mlp(arrived[order], by_sender.sum(0)), order)
        return all_to_all(y, received, sent, group)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        p, weight, expert = self.route(tokens)
        choices = expert.flatten()
        # neither bincount nor one_hot: both make the host wait for the largest value
        counts = torch.zeros(self.moe.experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, choices, torch.ones_like(choices))
        order = choices.argsort(stable=True)
        y = restore(self.over_ranks(tokens.repeat_interleave(self.moe.top_k, 0)[order], counts), order)
        y = (y.unflatten(0, weight.shape) * weight.unsqueeze(-1)).sum(1).to(x.dtype).view_as(x)
        if not torch.is_grad_enabled():
            return residual + y
        if self.mesh.dp_group is not None:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.mesh.dp_group)
        self.chosen += counts
        return _WithPenalty.apply(residual + y, self.moe.balance * imbalance(p, counts))


def restore(rows: Tensor, order: Tensor) -> Tensor:
    """Undoes rows = before[order]."""
    return torch.empty_like(rows).index_copy(0, order, rows)


def is_expert(parameter: Tensor) -> bool:
    """Whether the parameter belongs to one expert, which not every data parallel rank holds."""
    return not getattr(parameter, "allreduce", True)


def busiest(model: nn.Module) -> list[float]:
    """Of each layer the share of the choices that fell on its busiest expert, over an even share; [] without experts.
    nan before the first step."""
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    shares = [float(layer.chosen.max() / layer.chosen.mean()) for layer in layers]
    return [share if math.isfinite(share) else math.nan for share in shares]
