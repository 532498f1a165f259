"""te.DotProductAttention: torch's scaled_dot_product_attention with Transformer Engine's arguments and layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from te_lite.arguments import flag, remedy
from te_lite.checkpoint import checkpoint
from te_lite.modules.weights import StatelessModule
from te_lite.parallel import group_size, shard

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
    """The Mask of Transformer Engine's attn_mask_type, window_size and bottom_right_diagonal."""
    name = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}.get(kind, kind)
    if name not in MASKS:
        raise ValueError(f"attn_mask_type={kind!r}: must be one of {', '.join(MASKS)}; {remedy('mask', kind, MASKS)}")
    mask = MASKS[name]
    left, right = window or (-1, -1)
    if min(left, right) < -1:
        raise ValueError(f"window_size={window}: both must be at least 0, or -1 for no bound; pass None for none")
    mask = replace(mask, left=left, right=mask.right if mask.right == 0 else right)
    return mask if bottom_right is None else replace(mask, bottom_right=bottom_right)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float = 0.0, q_pad: Tensor | None = None,
    k_pad: Tensor | None = None, hidden: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * q @ k^T + bias, over the keys that are seen) @ v, [B, H, S_q, D_v].

    q [B, H, S_q, D], k [B, G, S_kv, D], v [B, G, S_kv, D_v], H a multiple of G. q_pad, k_pad: bool [B, S], True where
    there is padding. hidden: bool, broadcast to [B, H, S_q, S_kv], True where a key is not seen. A query that is
    padding or sees no key gives 0, and no gradient.
    """
    sizes = q.shape[-2], k.shape[-2]
    causal = mask.is_causal(*sizes) and q_pad is None and hidden is None and bias is None
    seen = None
    if not causal:
        counts: tuple[Any, Any] = sizes
        if q_pad is not None and k_pad is not None:
            counts = (~q_pad).sum(-1)[:, None, None, None], (~k_pad).sum(-1)[:, None, None, None]
        seen = mask.seen(*counts, q.device, sizes)
        for hides in (
            hidden,
            None if k_pad is None else k_pad[:, None, None],
            None if q_pad is None else q_pad[:, None, :, None],
        ):
            if hides is not None:
                seen = ~hides if seen is None else seen & ~hides
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


def _lengths(cu_seqlens: Tensor, padded: Tensor | None) -> Lengths:
    ends = cu_seqlens.tolist()
    counts = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return (ends if padded is None else padded.tolist())[: len(counts)], counts


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths, mask: Mask, scale: float, dropout: float
) -> Tensor:
    """attend() of each sequence of q [T, H, D], k and v [T, G, D] by itself: [T, H, D_v], 0 between sequences."""
    pieces, end = [], 0
    for q_begin, q_count, k_begin, k_count in zip(*q_lengths, *k_lengths, strict=True):
        parts = (q, q_begin, q_count), (k, k_begin, k_count), (v, k_begin, k_count)
        own_q, own_k, own_v = (t[begin : begin + count].transpose(0, 1)[None] for t, begin, count in parts)
        pieces.append(q.new_zeros(q_begin - end, q.shape[1], v.shape[2]))
        if k_count:
            pieces.append(attend(own_q, own_k, own_v, mask, scale, dropout)[0].transpose(0, 1))
        else:
            pieces.append(q.new_zeros(q_count, q.shape[1], v.shape[2]))
        end = q_begin + q_count
    pieces.append(q.new_zeros(q.shape[0] - end, q.shape[1], v.shape[2]))
    return torch.cat(pieces)


def _refuse(**given: Any) -> None:
    """NotImplementedError for an argument that asks for what is not done. name=(value, usual)."""
    for name, (value, usual) in given.items():
        if value is not None and value != usual:
            raise NotImplementedError(
                f"DotProductAttention({name}={value!r}): te_lite's attention has no {name} but {usual!r}; leave it out"
            )


class DotProductAttention(StatelessModule):
    """Attention of queries, keys and values, by torch.nn.functional.scaled_dot_product_attention. No parameters.

    num_attention_heads, num_gqa_groups: of all tp_size ranks. kv_channels: of a head; a pair where keys and values
    differ. qkv_format: "sbhd", "bshd" or "thd". attn_mask_type: "no_mask", "causal", "padding", "padding_causal",
    "arbitrary", and the causal ones with "_bottom_right". window_size: (left, right) keys around the diagonal.
    softmax_scale: default kv_channels ** -0.5. attention_dropout: while training, under get_rng_state_tracker's state.

    Context parallelism, softmax_type but "vanilla" and return_max_logit raise NotImplementedError.
    """

    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Window | None = None, bottom_right_diagonal: bool | None = None, sequence_parallel: bool = False,
        tp_size: int = 1, get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None, layer_number: int | None = None, attention_type: str = "self",
        cp_group: dist.ProcessGroup | None = None, cp_global_ranks: Any = None, cp_stream: Any = None,
        cp_comm_type: str = "p2p", softmax_scale: float | None = None, softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        _refuse(softmax_type=(softmax_type, "vanilla"), return_max_logit=(return_max_logit, False))
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if num_attention_heads % groups:
            raise ValueError(
                f"num_attention_heads={num_attention_heads}: must be a multiple of num_gqa_groups={groups}"
            )
        if qkv_format not in ("sbhd", "bshd", "thd") or attention_type not in ("self", "cross"):
            raise ValueError(
                f"qkv_format={qkv_format!r}, attention_type={attention_type!r}: must be 'sbhd', 'bshd' or 'thd', and "
                "'self' or 'cross'; pass one of them"
            )
        if not 0.0 <= attention_dropout < 1.0:
            raise ValueError(
                f"attention_dropout={attention_dropout!r}: must be at least 0 and below 1; pass 0.0 for none"
            )
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.bottom_right_diagonal, self.attention_type, self.layer_number = (
            bottom_right_diagonal,
            attention_type,
            layer_number,
        )
        mask_of(attn_mask_type, window_size, bottom_right_diagonal)
        tp_size = group_size(tp_group, tp_size)
        self.num_attention_heads = shard(num_attention_heads, tp_size, "num_attention_heads")
        self.num_gqa_groups = shard(groups, tp_size, "num_gqa_groups")
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = channels**-0.5 if softmax_scale is None else float(softmax_scale)
        self.attention_dropout = attention_dropout
        self._rng_tracker = (
            None if flag("DotProductAttention", "sequence_parallel", sequence_parallel) else get_rng_state_tracker
        )

    def set_context_parallel_group(
        self, cp_group: dist.ProcessGroup | None, cp_global_ranks: Any = None, cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:  # fmt: skip
        """NotImplementedError for a group of more than one rank."""
        if cp_group is not None and not (
            isinstance(cp_group, dist.ProcessGroup) and dist.get_world_size(cp_group) == 1
        ):
            raise NotImplementedError(
                "DotProductAttention(cp_group=...): te_lite has no context parallelism; leave it None"
            )

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any = None,
        qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
        window_size: Window | None = None, checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, fast_zero_fill: bool = True, inference_params: Any = None,
        pad_between_seqs: bool | None = None, fp8_output: bool = False, num_splits: int | None = 1,
        bottom_right_diagonal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """q [S_q, B, H, D], k and v [S_kv, B, G, D] (sbhd), [B, S, H, D] (bshd) or [T, H, D] (thd) -> y with heads and
        channels flattened, [S_q, B, H * D_v] and so on.

        attention_mask: bool, True where a key is not seen: [B, 1, 1, S] for "padding" (a pair of them for queries and
        keys in cross attention), broadcast to [B, H, S_q, S_kv] for "arbitrary". cu_seqlens [B + 1]: where sequences
        end, for thd and instead of a padding mask; with _padded where they begin in memory. thd runs one attention for
        each sequence, and the host waits for cu_seqlens. core_attention_bias [.., H, S_q, S_kv] is added to the scaled
        logits ("post_scale_bias") or before the scale ("pre_scale_bias"). max_seqlen, fast_zero_fill, num_splits and
        pad_between_seqs change no number and are accepted.
        """
        kinds = ("no_bias", "pre_scale_bias", "post_scale_bias")
        if core_attention_bias_type not in kinds or (core_attention_bias_type == "no_bias") != (
            core_attention_bias is None
        ):
            raise NotImplementedError(
                f"core_attention_bias_type={core_attention_bias_type!r} with a bias of type "
                f"{type(core_attention_bias).__name__}: te_lite's attention has {', '.join(kinds)}, two with a tensor"
            )
        _refuse(
            inference_params=(inference_params, None), fp8_output=(fp8_output, False), alibi_slopes=(alibi_slopes, None)
        )
        layout = qkv_format or self.qkv_format
        mask = mask_of(
            attn_mask_type or self.attn_mask_type, self.window_size if window_size is None else window_size,
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
        )  # fmt: skip
        tensors = query_layer, key_layer, value_layer
        self._check(tensors, layout)
        dropout = self.attention_dropout if self.training else 0.0
        run: Callable[..., Tensor]
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None or core_attention_bias is not None or mask.arbitrary:
                raise ValueError("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv, and takes no bias or mask")
            lengths = _lengths(cu_seqlens_q, cu_seqlens_q_padded), _lengths(cu_seqlens_kv, cu_seqlens_kv_padded)
            args: tuple[Any, ...] = (*tensors, *lengths, mask, self.softmax_scale, dropout)
            run, back = attend_packed, None
        else:
            order, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if layout == "sbhd" else ((0, 2, 1, 3), (0, 2, 1, 3))
            q, k, v = (t.permute(order) for t in tensors)
            pads = self._pads(mask, attention_mask, cu_seqlens_q, cu_seqlens_kv, q, k)
            bias = core_attention_bias
            if bias is not None and core_attention_bias_type == "pre_scale_bias":
                bias = bias * self.softmax_scale
            args = (q, k, v, mask, self.softmax_scale, dropout, *pads, bias)
            run = attend
        with self._fork() if dropout else contextlib.nullcontext():
            if flag("DotProductAttention", "checkpoint_core_attention", checkpoint_core_attention):
                out = checkpoint(run, *args, use_reentrant=False, get_rng_state_tracker=self._rng_tracker)
            else:
                out = run(*args)
        return (out if back is None else out.permute(back)).flatten(-2)

    def _fork(self) -> Any:
        return contextlib.nullcontext() if self._rng_tracker is None else self._rng_tracker().fork()

    def _check(self, tensors: tuple[Tensor, ...], layout: str) -> None:
        """Shapes and dtypes agree with the constructor and each other."""
        q, k, v = tensors
        dims = 3 if layout == "thd" else 4
        heads = self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups
        given = [(tuple(t.shape), t.dtype) for t in tensors]
        if any(t.dim() != dims for t in tensors) or tuple(t.shape[-2] for t in tensors) != heads:
            raise ValueError(
                f"DotProductAttention got q, k, v of {given} as {layout}: must have {dims} dimensions, heads {heads} "
                "on this rank in the last but one; reshape them, or pass qkv_format"
            )
        if not q.dtype == k.dtype == v.dtype or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
            raise ValueError(
                f"DotProductAttention got q, k, v of {given}: dtypes, keys and channels must agree; check them"
            )

    @staticmethod
    def _pads(
        mask: Mask, hidden: Any, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None, q: Tensor, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(padding of queries [B, S_q], of keys [B, S_kv], a mask of the caller's): what `mask` asks for."""
        if mask.arbitrary:
            if not isinstance(hidden, Tensor):
                raise ValueError(
                    "attn_mask_type='arbitrary' without attention_mask: pass a bool tensor, True where unseen"
                )
            return None, None, hidden.bool()
        if not mask.padding:
            return None, None, None
        if hidden is not None:
            pair = hidden if isinstance(hidden, (tuple, list)) else (hidden, hidden)
            q_pad, k_pad = (pad.bool().reshape(pad.shape[0], pad.shape[-1]) for pad in pair)
        elif cu_seqlens_q is not None and cu_seqlens_kv is not None:
            both = ((cu_seqlens_q, q), (cu_seqlens_kv, k))
            q_pad, k_pad = (
                torch.arange(t.shape[-2], device=t.device) >= c.diff()[:, None].to(t.device) for c, t in both
            )
        else:
            raise ValueError("attn_mask_type with padding: pass attention_mask, or cu_seqlens_q and cu_seqlens_kv")
        return q_pad, k_pad, None

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, {self.qkv_format}, {self.attn_mask_type}"
        )
