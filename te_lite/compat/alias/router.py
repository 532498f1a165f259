"""Routing of tokens to experts, in plain torch: differentiable with respect to the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TINY = 1e-20  # so that scores which are all 0 divide to 0


def _score(logits: Tensor, function: str) -> Tensor:
    """fp32, before any normalization over the chosen."""
    x = logits.float()
    scores = {"softmax": lambda: x.softmax(-1), "sigmoid": x.sigmoid, "sqrtsoftplus": lambda: F.softplus(x).sqrt()}
    if function not in scores:
        raise ValueError(f"score_function={function!r}: must be one of {', '.join(scores)}; choose one")
    return scores[function]()


def _in_best_groups(scores: Tensor, topk: int, groups: int, group_topk: int) -> Tensor:
    """scores [T, E], -inf outside of each token's best groups, by the sum of a group's topk / group_topk largest."""
    by_group = scores.unflatten(-1, (groups, -1))
    best = by_group.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
    inside = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return by_group.masked_fill(~inside[..., None], -torch.inf).flatten(-2)


def fused_topk_with_score_function(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, score_function: str, expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits [T, E] -> (probabilities [T, E], 0 outside of the topk experts, in logits' dtype; who they are, bool).

    softmax: over all experts before the choice (use_pre_softmax), or over the chosen. sigmoid and sqrtsoftplus: divided
    by the sum over the chosen if topk > 1; expert_bias [E] takes part in the choice alone. num_groups, group_topk:
    experts are chosen within the best groups.
    """
    late = score_function == "softmax" and not use_pre_softmax
    scores = logits.float() if late else _score(logits, score_function)
    if expert_bias is not None and score_function == "softmax":
        raise ValueError(
            "expert_bias with score_function='softmax': it belongs to sigmoid and sqrtsoftplus; leave it out"
        )
    ranking = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    if group_topk:
        ranking = _in_best_groups(ranking, topk, num_groups or 1, group_topk)
    chosen = ranking.topk(topk, -1).indices
    values = scores.gather(-1, chosen)
    if late:
        values = values.softmax(-1)
    elif score_function != "softmax" and topk > 1:
        values = values / (values.sum(-1, keepdim=True) + _TINY)
    values = values * (scaling_factor or 1.0)
    probabilities = torch.zeros_like(scores).scatter(-1, chosen, values).to(logits.dtype)
    return probabilities, torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def fused_compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    """(who the topk experts are, bool [T, E]; the scores of all experts, normalized, fp32 [T, E])."""
    scores = _score(logits, score_function)
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
    chosen = scores.detach().topk(topk, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True), scores


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """coeff * E / (topk * T^2) * sum_e(sum_t probs[t, e] * tokens_per_expert[e]), in probs' dtype."""
    scale = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    return ((probs.float().sum(0) * tokens_per_expert).sum() * scale).to(probs.dtype)
