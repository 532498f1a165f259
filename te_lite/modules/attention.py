"""te.DotProductAttention: torch's scaled_dot_product_attention with Transformer Engine's arguments and layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.arguments import flag
from te_lite.checkpoint import checkpoint
from te_lite.functional.attention import Mask, Window, attend, attend_packed, lengths_of, mask_of
from te_lite.modules.weights import StatelessModule
from te_lite.parallel import group_size, shard


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
        wants_logit = flag("DotProductAttention", "return_max_logit", return_max_logit)
        if bottom_right_diagonal is not None:
            bottom_right_diagonal = flag("DotProductAttention", "bottom_right_diagonal", bottom_right_diagonal)
        _refuse(softmax_type=(softmax_type, "vanilla"), return_max_logit=(wants_logit, False))
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
        self.bottom_right_diagonal, self.attention_type = bottom_right_diagonal, attention_type
        mask_of(attn_mask_type, window_size, bottom_right_diagonal)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.tp_size = group_size(tp_group, tp_size)
        shard(num_attention_heads, self.tp_size, "num_attention_heads")
        self.num_gqa_groups_per_partition = shard(groups, self.tp_size, "num_gqa_groups")
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = channels**-0.5 if softmax_scale is None else float(softmax_scale)
        self.layer_number, self.attention_dropout = layer_number, attention_dropout
        sequence_parallel = flag("DotProductAttention", "sequence_parallel", sequence_parallel)
        self._rng_tracker = None if sequence_parallel else get_rng_state_tracker

    def set_context_parallel_group(
        self, cp_group: dist.ProcessGroup | None, cp_global_ranks: Any = None, cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:  # fmt: skip
        """NotImplementedError for a group of more than one rank."""
        alone = isinstance(cp_group, dist.ProcessGroup) and dist.get_world_size(cp_group) == 1
        if cp_group is not None and not alone:
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
        bias = self._bias(core_attention_bias_type, core_attention_bias)
        dropout = self.attention_dropout if self.training else 0.0
        run: Callable[..., Tensor] = attend
        args: tuple[Any, ...]
        if layout == "thd":
            if cu_seqlens_q is None or cu_seqlens_kv is None or bias is not None or mask.arbitrary:
                raise ValueError("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv, and takes no bias or mask")
            lengths = lengths_of(cu_seqlens_q, cu_seqlens_q_padded), lengths_of(cu_seqlens_kv, cu_seqlens_kv_padded)
            run, args = attend_packed, (*tensors, *lengths, mask, self.softmax_scale, dropout)
        else:
            q, k, v = (t.permute((1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)) for t in tensors)
            pads = self._pads(mask, attention_mask, cu_seqlens_q, cu_seqlens_kv, q, k)
            args = (q, k, v, mask, self.softmax_scale, dropout, *pads, bias)
        with self._rng_tracker().fork() if dropout and self._rng_tracker is not None else contextlib.nullcontext():
            if flag("DotProductAttention", "checkpoint_core_attention", checkpoint_core_attention):
                out = checkpoint(run, *args, use_reentrant=False, get_rng_state_tracker=self._rng_tracker)
            else:
                out = run(*args)
        if layout != "thd":
            out = out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3))
        return out.flatten(-2)

    def _bias(self, kind: str, bias: Tensor | None) -> Tensor | None:
        """What is added to the scaled logits."""
        kinds = ("no_bias", "pre_scale_bias", "post_scale_bias")
        if kind not in kinds or (kind == "no_bias") != (bias is None):
            raise NotImplementedError(
                f"core_attention_bias_type={kind!r} with a bias of type {type(bias).__name__}: te_lite's attention has "
                f"{', '.join(kinds)}, the last two with a tensor"
            )
        return bias * self.softmax_scale if bias is not None and kind == "pre_scale_bias" else bias

    def _check(self, tensors: tuple[Tensor, ...], layout: str) -> None:
        """Shapes and dtypes agree with the constructor and each other."""
        q, k, v = tensors
        dims = 3 if layout == "thd" else 4
        heads = self.num_attention_heads // self.tp_size, *[self.num_gqa_groups_per_partition] * 2
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
        heads = f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}"
        return f"{heads}, tp_size={self.tp_size}, {self.qkv_format}, {self.attn_mask_type}"
