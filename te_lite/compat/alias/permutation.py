"""Tokens sorted by expert and back, in plain torch.

row_id_map: int64 [2, N], the token of each row, and where its probability stands among the token's: at the expert, or
by index at the place that the expert has there. A row for which the routing map has nothing left, where the caller gave
a larger N, has token -1: it is 0, counts for no token and has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _by_index(map_type: str) -> bool:
    if map_type not in ("mask", "index"):
        raise ValueError(f"map_type={map_type!r}: must be 'mask' or 'index'; pass one of them")
    return map_type == "index"


def _index_row_id_map(inp: Tensor, index: Tensor, num_out_tokens: int | None) -> Tensor:
    """The row_id_map where index [T, topk] says which experts each token chose."""
    count = num_out_tokens if num_out_tokens and num_out_tokens > 0 else index.numel()
    if index.dim() != 2 or len(inp) != len(index) or index.dtype == torch.bool or count > index.numel():
        raise ValueError(
            f"moe_permute of {len(inp)} tokens with an index {index.dtype} {tuple(index.shape)}, num_out_tokens="
            f"{num_out_tokens}: must be the experts' numbers [tokens, topk], and at most their product; a mask is "
            "map_type='mask'"
        )
    at = index.reshape(-1).argsort(stable=True)[:count]
    topk = max(1, index.shape[1])
    return torch.stack((at // topk, at % topk))


def _row_id_map(inp: Tensor, routing_map: Tensor, num_out_tokens: int | None) -> Tensor:
    """The row_id_map for moe_permute's arguments."""
    if len(inp) != len(routing_map):
        raise ValueError(f"moe_permute of {len(inp)} tokens with a routing_map of {len(routing_map)}: must be as many")
    by_expert = routing_map.bool().t().reshape(-1)
    given = num_out_tokens is not None and num_out_tokens >= 0
    count: Any = num_out_tokens if given else int(by_expert.sum())
    if count > len(by_expert):
        raise ValueError(
            f"num_out_tokens={count} for {tuple(routing_map.shape)} tokens and experts: must be at most their product"
        )
    routed, at = by_expert.byte().sort(descending=True, stable=True)
    routed, at, tokens = routed[:count].bool(), at[:count], max(1, len(inp))
    return torch.stack((torch.where(routed, at % tokens, -1), at // tokens))


def _rows(inp: Tensor, token: Tensor, wanted: Tensor) -> Tensor:
    """inp[token], 0 where it is not wanted, which a row of no token is not to be."""
    return torch.where(wanted[:, None], inp.index_select(0, token.clamp(min=0)), 0)


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """inp [T, H] -> (rows [N, H] grouped by expert, each in the order of tokens; row_id_map).

    routing_map: bool or int [T, E]. num_out_tokens: N, at most T * E; None or below 0 counts it, for which the host
    waits. ValueError where the sizes do not fit together.
    map_type "index": routing_map is int [T, topk], the experts of each token. The first num_out_tokens rows are kept,
    by default or at 0 all T * topk.
    """
    make = _index_row_id_map if _by_index(map_type) else _row_id_map
    row_id_map = make(inp, routing_map, num_out_tokens)
    return _rows(inp, row_id_map[0], row_id_map[0] >= 0), row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """moe_permute, and probs [T, E] of each row, [N]. Rows of probability 0, as padded routing maps have, are 0."""
    token, expert = row_id_map = _row_id_map(inp, routing_map, num_out_tokens)
    of_rows = torch.where(token >= 0, probs[token, expert], 0)
    return _rows(inp, token, of_rows != 0), of_rows, row_id_map


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None = None, restore_shape: torch.Size | None = None,
    map_type: str = "mask", probs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows [N, H] added up by token, each times merging_probs[token, expert] if given: [T, H], summed in fp32.

    restore_shape: (T, H), needed where merging_probs [T, E] does not say T. probs: its older name. map_type "index":
    merging_probs is [T, topk], and may be left out where topk is 1 and all rows are there.
    """
    merging_probs = probs if merging_probs is None else merging_probs
    if _by_index(map_type) and merging_probs is None and restore_shape is None:
        each = torch.arange(len(inp), device=inp.device)
        restore_shape = inp.shape if torch.equal(row_id_map[0].sort().values, each) else None
    if restore_shape is None and merging_probs is None:
        raise ValueError(
            "moe_unpermute without restore_shape and merging_probs: nothing says how many tokens there are"
        )
    tokens = len(merging_probs) if restore_shape is None else restore_shape[0]  # type: ignore[arg-type]  # one is there
    token, expert = row_id_map
    rows = torch.where((token >= 0)[:, None], inp, 0).float()
    if merging_probs is not None:
        rows = rows * merging_probs[token, expert].float()[:, None]
    sums = torch.zeros(tokens + 1, inp.shape[-1], device=inp.device)  # the last one of the rows of no token
    return sums.index_add(0, torch.where(token < 0, tokens, token), rows)[:-1].to(inp.dtype)


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
