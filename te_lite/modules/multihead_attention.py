"""te.MultiheadAttention: linears around te.DotProductAttention, under Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite.arguments import remedy
from te_lite.functional.attention import Window
from te_lite.modules.attention import DotProductAttention
from te_lite.modules.base import TeLiteModule
from te_lite.modules.checks import check_construction
from te_lite.modules.layernorm_linear import LayerNormLinear
from te_lite.modules.linear import Linear
from te_lite.modules.norm import NORMS
from te_lite.modules.rope import apply_rotary_pos_emb
from te_lite.modules.weights import Init, StatelessModule
from te_lite.overlap.userbuffers import UB_FLAGS
from te_lite.parallel import group_size

Rotary = Tensor | tuple[Tensor, Tensor] | None  # angles of queries and keys
Masked = Tensor | tuple[Tensor, Tensor] | None  # what is not seen, of queries and keys
SHARED = (
    "fuse_wgrad_accumulation", "tp_group", "tp_size", "get_rng_state_tracker", "sequence_parallel", "params_dtype",
    "device", "bias", "delay_wgrad_compute", "sequence_dim",
)  # fmt: skip  # arguments of all linears


def part_name(name: str | None, part: str) -> str:
    """The name of what a module of this name holds as `part`."""
    return f"{name}.{part}" if name else part


class Composed(nn.Module):
    """A module whose linears are modules of their own."""

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The group of the linears. te.reduce_sequence_parallel_grads takes it for the norms beside them."""
        return next(m.tp_group for m in self.modules() if isinstance(m, TeLiteModule))

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """The group for tp_size > 1, when the constructor did not get one; its size must be tp_size."""
        for module in self.modules():
            if isinstance(module, TeLiteModule):
                module.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(self, cp_group: Any, *others: Any, **named: Any) -> None:
        """NotImplementedError for a group of more than one rank."""
        for module in self.modules():
            if isinstance(module, DotProductAttention):
                module.set_context_parallel_group(cp_group, *others, **named)

    def need_backward_dw(self) -> bool:
        """True where delay_wgrad_compute is set: backward then leaves weight gradients to backward_dw()."""
        return any(m.need_backward_dw() for m in self.modules() if isinstance(m, TeLiteModule))

    def backward_dw(self) -> None:
        """Computes the oldest delayed weight gradients of all linears; RuntimeError where none wait."""
        late = [m for m in self.modules() if isinstance(m, TeLiteModule) and m.need_backward_dw()]
        if late and not any([m.run_delayed() for m in reversed(late)]):
            raise RuntimeError(f"backward_dw() of {type(self).__name__}: must follow a backward, once for each")


class L2Norm(StatelessModule):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension, in fp32 and rounded once."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, inp: Tensor) -> Tensor:
        x = inp.float()
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)).to(inp.dtype)


class MultiheadAttention(Composed):
    """y = proj(attention(q, k, v)): q, k and v by one linear of x; in cross attention k and v by one of encoder_output.

    Linears, by the attributes that hold them: `layernorm_qkv` with input_layernorm, else `qkv`; in cross attention
    `layernorm_query` or `query_layer`, and `key_value`; `proj`. `core_attention` is a DotProductAttention. Without
    fuse_qkv_params weights and biases of q, k and v are parameters of their own ("query_weight" ...). In a fused one
    the rows of each GQA group lie together, [q heads, k, v]; with qkv_weight_interleaved=False all q, all k, all v.

    kv_channels: of a head (default hidden_size / num_attention_heads). qk_norm_type: "RMSNorm", "LayerNorm" or
    "L2Normalization" of each head of q and k, with qk_norm_eps, after the rotary embedding or before it
    (qk_norm_before_rope). return_layernorm_output: the input norm's output is returned too, where there is one.
    set_parallel_mode: heads are split over tp_group; q, k and v are column-parallel, proj is row-parallel, and the
    gradients of a qk norm are partial sums, marked `.sequence_parallel`. Without it tp_size has no effect.
    layer_number, seq_length and micro_batch_size are accepted and not needed. The other arguments are
    LayerNormLinear's, Linear's and DotProductAttention's.
    """

    q_norm: nn.Module | None
    k_norm: nn.Module | None
    key_value: nn.Module

    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, init_method: Init | None = None,
        output_layer_init_method: Init | None = None, layer_number: int | None = None, attn_mask_type: str = "causal",
        window_size: Window | None = None, bottom_right_diagonal: bool | None = None,
        tp_group: dist.ProcessGroup | None = None, tp_size: int = 1, num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False, get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False, params_dtype: torch.dtype | None = None, return_bias: bool = False,
        return_layernorm_output: bool = False, input_layernorm: bool = False, attention_type: str = "self",
        set_parallel_mode: bool = False, fuse_qkv_params: bool = False, zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True, rotary_pos_interleaved: bool = False, ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False, bias: bool = True, normalization: str = "LayerNorm",
        device: torch.device | str | None = "cuda", qkv_format: str = "sbhd", name: str | None = None,
        qk_norm_type: str | None = None, qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False,
        seq_length: int | None = None, micro_batch_size: int | None = None, softmax_type: str = "vanilla", *,
        delay_wgrad_compute: bool = False, sequence_dim: int = 0,
    ) -> None:  # fmt: skip
        given = locals()
        super().__init__()
        check_construction("MultiheadAttention", (), given, ("hidden_size", "num_attention_heads"))
        size = group_size(tp_group, tp_size)
        for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
            if given[option] and not fuse_qkv_params:
                raise ValueError(f"{option}=True without fuse_qkv_params: q, k and v must be one parameter; pass True")
        if sequence_parallel and size > 1 and not set_parallel_mode:
            raise ValueError(
                "sequence_parallel=True without set_parallel_mode: tokens would see those of this rank alone; pass both"
            )
        self.kv_channels = kv_channels or hidden_size // num_attention_heads
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.core_attention = DotProductAttention(
            num_attention_heads, self.kv_channels, groups, attention_dropout, qkv_format, attn_mask_type, window_size,
            bottom_right_diagonal, sequence_parallel and size > 1, size if set_parallel_mode else 1,
            get_rng_state_tracker, layer_number=layer_number, attention_type=attention_type, softmax_type=softmax_type,
        )  # fmt: skip
        self.attention_type, self.input_layernorm, self.qkv_format = attention_type, input_layernorm, qkv_format
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.qkv_weight_interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        self.q_norm = self.k_norm = None
        if qk_norm_type is not None:
            self.q_norm, self.k_norm = self._qk_norms(given, set_parallel_mode and size > 1)
        self._add_linears(given, self.kv_channels * num_attention_heads, self.kv_channels * groups)

    def _qk_norms(self, given: Mapping[str, Any], partial_grads: bool) -> list[nn.Module]:
        kind, eps, known = given["qk_norm_type"], given["qk_norm_eps"], ("RMSNorm", "LayerNorm", "L2Normalization")
        if kind == "L2Normalization":
            return [L2Norm(eps)] * 2
        if kind not in known:
            near = remedy("qk_norm_type", kind, known)
            raise ValueError(f"MultiheadAttention(qk_norm_type={kind!r}): must be one of {known} or None; {near}")
        options = {"params_dtype": given["params_dtype"], "device": given["device"]}
        return [NORMS[kind](self.kv_channels, eps, partial_grads, **options) for _ in range(2)]

    def _add_linears(self, given: Mapping[str, Any], q: int, kv: int) -> None:
        """given: the constructor's arguments. q, kv: features of the queries, and of the keys or values."""
        hidden, name, split = given["hidden_size"], given["name"], not given["fuse_qkv_params"]
        modes = ("column", "row") if given["set_parallel_mode"] else (None, None)
        common = {key: given[key] for key in SHARED}
        column = common | {key: given[key] for key in UB_FLAGS if key != "ub_overlap_rs"}
        column |= {"init_method": given["init_method"], "parallel_mode": modes[0], "ub_name": "qkv"}
        norm = {key: given[key] for key in ("normalization", "zero_centered_gamma", "return_layernorm_output")}
        norm["eps"] = given["layernorm_epsilon"]

        def add(attribute: str, parts: dict[str, int], normed: bool, splits: bool = split) -> None:
            kind: Any = LayerNormLinear if normed else Linear
            options = column | (norm if normed else {}) | {"parameters_split": parts if splits else None}
            self.add_module(attribute, kind(hidden, sum(parts.values()), name=part_name(name, attribute), **options))

        normed = self.input_layernorm
        if self.attention_type == "self":
            self._first = "layernorm_qkv" if normed else "qkv"
            add(self._first, {"query": q, "key": kv, "value": kv}, normed)
        else:
            self._first = "layernorm_query" if normed else "query_layer"
            add(self._first, {"query": q}, normed, split and normed)  # query_layer's names are Transformer Engine's too
            add("key_value", {"key": kv, "value": kv}, False)
        self.proj = Linear(
            q, hidden, init_method=given["output_layer_init_method"], return_bias=self.return_bias,
            parallel_mode=modes[1], ub_overlap_rs=given["ub_overlap_rs"], ub_overlap_ag=given["ub_overlap_ag"],
            ub_name="proj", name=part_name(name, "proj"), **common,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: Masked = None, encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None, window_size: Window | None = None, bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None, checkpoint_core_attention: bool = False, inference_params: Any = None,
        rotary_pos_emb: Rotary = None, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None, *, residual: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """x [S_q, B, hidden_size] (sbhd), [B, S_q, hidden_size] (bshd) or [T, hidden_size] (thd) -> y of that shape;
        with return_bias (y, bias of proj); with return_layernorm_output the norm's output comes last.

        encoder_output: what keys and values are computed from in cross attention, of x's layout with S_kv tokens.
        rotary_pos_emb: fp32 [S, 1, 1, d], the angles of each position for q and k, or a pair of them. residual: as
        Linear's, added to y. The other arguments are DotProductAttention's; is_first_microbatch is Linear's.
        """
        cross = self.attention_type == "cross"
        if cross != (encoder_output is not None):
            raise ValueError(
                f"MultiheadAttention(attention_type={self.attention_type!r}) got an encoder_output of type "
                f"{type(encoder_output).__name__}: cross attention needs a tensor, self attention None"
            )
        outputs = getattr(self, self._first)(hidden_states, is_first_microbatch)
        first, *normed = outputs if isinstance(outputs, tuple) else (outputs,)
        if cross:
            q = first.unflatten(-1, (-1, self.kv_channels))
            k, v = self._split(self.key_value(encoder_output, is_first_microbatch), (1, 1))
        else:
            q, k, v = self._split(first, (self.num_attention_heads // self.num_gqa_groups, 1, 1))
        lengths = (cu_seqlens_q, cu_seqlens_q_padded), (cu_seqlens_kv, cu_seqlens_kv_padded)
        q, k = self._placed(q, k, rotary_pos_emb, lengths)
        out = self.core_attention(
            q, k, v, attention_mask, None, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded,
            max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size, checkpoint_core_attention,
            core_attention_bias_type, core_attention_bias, alibi_slopes, fast_zero_fill, inference_params,
            pad_between_seqs, bottom_right_diagonal=bottom_right_diagonal,
        )  # fmt: skip
        projected = self.proj(out, is_first_microbatch, residual=residual)
        if not normed:
            return projected
        return (*projected, *normed) if self.return_bias else (projected, *normed)

    def _split(self, t: Tensor, parts: tuple[int, ...]) -> list[Tensor]:
        """[..., part * G, D] for each of the parts of t [..., sum(parts) * G * D], G the GQA groups of this rank."""
        groups, total = self.core_attention.num_gqa_groups_per_partition, sum(parts)
        if not self.qkv_weight_interleaved:
            return list(t.unflatten(-1, (total * groups, -1)).split([part * groups for part in parts], -2))
        pieces = t.unflatten(-1, (groups, total, -1)).split(parts, -2)
        return [piece.flatten(-3, -2) for piece in pieces]

    def _placed(
        self, q: Tensor, k: Tensor, angles: Rotary, lengths: tuple[tuple[Tensor | None, Tensor | None], ...]
    ) -> tuple[Tensor, Tensor]:
        """q and k normalised and rotated, in the order that was asked for. lengths: cu_seqlens and its padded form."""

        def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

        if self.qk_norm_before_rope:
            q, k = normed(q, k)
        if angles is not None:
            pair = angles if isinstance(angles, tuple) else (angles, angles)
            form, interleaved = self.qkv_format, self.rotary_pos_interleaved
            q, k = [
                apply_rotary_pos_emb(t, freqs, form, interleaved=interleaved, cu_seqlens=ends, cu_seqlens_padded=padded)
                for t, freqs, (ends, padded) in zip((q, k), pair, lengths, strict=True)
            ]
        return (q, k) if self.qk_norm_before_rope else normed(q, k)
