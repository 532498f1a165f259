"""Tokens sorted by expert and back, in plain torch. row_id_map: int64 [2, N], the token and the expert of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def _only_masks(map_type: str) -> None:
    if map_type != "mask":
        raise NotImplementedError(f"map_type={map_type!r}: te_lite permutes by masks [tokens, experts]; pass 'mask'")


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """inp [T, H] -> (rows [N, H] grouped by expert, each in the order of tokens; row_id_map).

    routing_map: bool or int [T, E]. num_out_tokens: N; None or below 0 counts it, for which the host waits.
    """
    _only_masks(map_type)
    by_expert = routing_map.bool().t().reshape(-1)
    given = num_out_tokens is not None and num_out_tokens >= 0
    count = num_out_tokens if given else int(by_expert.sum())
    at = by_expert.byte().argsort(descending=True, stable=True)[:count]
    row_id_map = torch.stack((at % len(inp), at // len(inp))) if len(inp) else at.new_empty(2, 0)
    return inp.index_select(0, row_id_map[0]), row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """moe_permute, and probs [T, E] of each row, [N]."""
    rows, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    token, expert = row_id_map
    return rows, probs[token, expert], row_id_map


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: torch.Size | None = None,
    map_type: str = "mask", probs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows [N, H] added up by token, each times merging_probs[token, expert] if given: [T, H], summed in fp32.

    restore_shape: (T, H), needed where merging_probs [T, E] does not say T. probs: its older name.
    """
    _only_masks(map_type)
    merging_probs = probs if merging_probs is None else merging_probs
    if restore_shape is None and merging_probs is None:
        raise ValueError(
            "moe_unpermute without restore_shape and merging_probs: nothing says how many tokens there are"
        )
    tokens = len(merging_probs) if restore_shape is None else restore_shape[0]  # type: ignore[arg-type]  # one is there
    token, expert = row_id_map
    rows = inp.float() if merging_probs is None else inp.float() * merging_probs[token, expert].float()[:, None]
    return torch.zeros(tokens, inp.shape[-1], device=inp.device).index_add(0, token, rows).to(inp.dtype)


def _rows_of_chunks(rows: int, split_sizes: Tensor, sorted_index: Tensor, device: torch.device) -> Tensor:
    """int64 [rows]: which row each comes from. The host does not wait for the sizes."""
    sizes, order = split_sizes.reshape(-1).to(device), sorted_index.to(device)
    first = (sizes.cumsum(0) - sizes)[order]
    end = sizes[order].cumsum(0)
    at = torch.arange(rows, device=device)
    chunk = torch.searchsorted(end, at, right=True)
    return at + (first + sizes[order] - end)[chunk]


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """inp [N, H] cut into chunks of split_sizes rows, which add up to N and follow each other in the order
    sorted_index."""
    return inp.index_select(0, _rows_of_chunks(len(inp), split_sizes, sorted_index, inp.device))


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """moe_sort_chunks_by_index of inp [N, H] and of probs [N]."""
    rows = _rows_of_chunks(len(inp), split_sizes, sorted_index, inp.device)
    return inp.index_select(0, rows), probs.index_select(0, rows)
