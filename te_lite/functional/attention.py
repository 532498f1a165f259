"""Attention by torch.nn.functional.scaled_dot_product_attention, and the masks of Transformer Engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_lite.arguments import remedy

Window = tuple[int, int]
Lengths = tuple[Sequence[int], Sequence[int]]  # where each sequence begins, and how many tokens it has


@dataclass(frozen=True)
class Mask:
    """Which keys j a query i sees, of S_q queries and S_kv keys: those with -left <= j - i - d <= right, where d is
    S_kv - S_q if bottom_right, else 0. A negative bound is none."""

    padding: bool = False
    arbitrary: bool = False
    left: int = -1
    right: int = -1
    bottom_right: bool = True

    def seen(self, queries: Any, keys: Any, device: torch.device, shape: tuple[int, int]) -> Tensor | None:
        """bool [..., S_q, S_kv], None for all. queries, keys: how many are no padding, an int or [B, 1, 1, 1]."""
        if self.left < 0 and self.right < 0:
            return None
        distance = torch.arange(shape[1], device=device) - torch.arange(shape[0], device=device)[:, None]
        distance = distance - (keys - queries) if self.bottom_right else distance
        seen = distance <= self.right if self.right >= 0 else distance >= -self.left
        return seen & (distance >= -self.left) if self.left >= 0 else seen

    def is_causal(self, queries: int, keys: int) -> bool:
        """In torch's sense: all that is not in the future, counted from the first token."""
        return self.left < 0 and self.right == 0 and (queries == keys or not self.bottom_right)


_CAUSAL = Mask(right=0, bottom_right=False)
MASKS = {
    "no_mask": Mask(),
    "padding": Mask(padding=True),
    "arbitrary": Mask(arbitrary=True),
    "causal": _CAUSAL,
    "causal_bottom_right": replace(_CAUSAL, bottom_right=True),
    "padding_causal": replace(_CAUSAL, padding=True),
    "padding_causal_bottom_right": replace(_CAUSAL, padding=True, bottom_right=True),
}


def mask_of(kind: str, window: Window | None, bottom_right: bool | None) -> Mask:
    """The Mask of Transformer Engine's attn_mask_type, window_size and bottom_right_diagonal, by its rules: a causal
    mask says itself where its diagonal is, and the window (-1, 0), that of a causal mask, is none for the others."""
    name = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}.get(kind, kind)
    if name not in MASKS:
        raise ValueError(f"attn_mask_type={kind!r}: must be one of {', '.join(MASKS)}; {remedy('mask', kind, MASKS)}")
    mask = MASKS[name]
    left, right = window or (-1, -1)
    if min(left, right) < -1:
        raise ValueError(f"window_size={window}: both must be at least 0, or -1 for no bound; pass None for none")
    if mask.right == 0:
        return replace(mask, left=left)
    if (left, right) == (-1, 0):
        warnings.warn(
            f"window_size=(-1, 0) is that of causal masks, and none for attn_mask_type={kind!r}; pass (-1, -1) or None",
            stacklevel=2,
        )
        right = -1
    return replace(mask, left=left, right=right, bottom_right=bottom_right is None or bottom_right)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float = 0.0, q_pad: Tensor | None = None,
    k_pad: Tensor | None = None, hidden: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * q @ k^T + bias, over the keys that are seen) @ v, [B, H, S_q, D_v].

    q [B, H, S_q, D], k [B, G, S_kv, D], v [B, G, S_kv, D_v], H a multiple of G. q_pad, k_pad: both or none, bool
    [B, S], True where there is padding. hidden, in place of them: bool, broadcast to [B, H, S_q, S_kv], True where a
    key is not seen. A query that is padding or sees no key gives 0, and no gradient.
    """
    sizes = q.shape[-2], k.shape[-2]
    causal = mask.is_causal(*sizes) and q_pad is None and hidden is None and bias is None
    seen = None
    if not causal:
        counts: tuple[Any, Any] = sizes
        if q_pad is not None and k_pad is not None:
            counts = (~q_pad).sum(-1)[:, None, None, None], (~k_pad).sum(-1)[:, None, None, None]
            hidden = q_pad[:, None, :, None] | k_pad[:, None, None]
        seen = mask.seen(*counts, q.device, sizes)
        if hidden is not None:
            seen = ~hidden if seen is None else seen & ~hidden
    if seen is None and bias is None:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    empty = None
    if seen is not None:
        # A row without keys would be nan, in its gradient too: it sees all of them, and counts for nothing.
        empty = ~seen.any(-1, keepdim=True)
        seen = seen | empty
    if bias is not None:
        bias = bias.to(q.dtype)
        seen = bias if seen is None else torch.where(seen, bias, -torch.inf)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) if t.shape[1] != q.shape[1] else t for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=dropout, scale=scale)
    return out if empty is None else out.masked_fill(empty, 0.0)


def lengths_of(cu_seqlens: Tensor, padded: Tensor | None) -> Lengths:
    ends = cu_seqlens.tolist()
    counts = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return (ends if padded is None else padded.tolist())[: len(counts)], counts


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths, mask: Mask, scale: float, dropout: float
) -> Tensor:
    """attend() of each sequence of q [T, H, D], k and v [T, G, D] by itself: [T, H, D_v], 0 between sequences."""
    pieces, end = [], 0
    for q_begin, q_count, k_begin, k_count in zip(*q_lengths, *k_lengths, strict=True):
        if k_count:  # else its queries give 0, as what lies between sequences
            parts = (q, q_begin, q_count), (k, k_begin, k_count), (v, k_begin, k_count)
            own_q, own_k, own_v = (t[begin : begin + count].transpose(0, 1)[None] for t, begin, count in parts)
            pieces.append(q.new_zeros(q_begin - end, q.shape[1], v.shape[2]))
            pieces.append(attend(own_q, own_k, own_v, mask, scale, dropout)[0].transpose(0, 1))
            end = q_begin + q_count
    pieces.append(q.new_zeros(q.shape[0] - end, q.shape[1], v.shape[2]))
    return torch.cat(pieces)
