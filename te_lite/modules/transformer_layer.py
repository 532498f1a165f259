"""te.TransformerLayer: attention and MLP with their residual connections, under Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from te_lite.arguments import remedy
from te_lite.functional.attention import Window, mask_of
from te_lite.modules.checks import amp_dtype, check_construction
from te_lite.modules.layernorm_mlp import LayerNormMLP
from te_lite.modules.multihead_attention import SHARED, Composed, Masked, MultiheadAttention, Rotary, part_name
from te_lite.modules.norm import NORMS
from te_lite.modules.weights import Init, default_init
from te_lite.overlap.userbuffers import UB_FLAGS

# Arguments of attention and MLP alike, and those of attention alone.
BOTH = (*SHARED, "init_method", "output_layer_init_method", "normalization", "zero_centered_gamma", "set_parallel_mode")
ATTENTION = (
    "num_attention_heads", "kv_channels", "attention_dropout", "layernorm_epsilon", "layer_number", "num_gqa_groups",
    "fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps",
    "qk_norm_before_rope", "softmax_type",
)  # fmt: skip


class TransformerLayer(Composed):
    """x + self_attention(x), then + inter_attention of it and encoder_output (layer_type="decoder"), then +
    layernorm_mlp of that; each with its norm in front, in a row.

    apply_residual_connection_post_layernorm: what is added is the norm's output. output_layernorm: self attention has
    no norm, and one follows the MLP, `layernorm`. parallel_attention_mlp: x + self_attention(x) + layernorm_mlp(x).
    hidden_dropout: of what attention and MLP give, while training. drop_path_rate: of samples, whose x alone is left,
    not in cross attention. Where neither is asked for, and nothing but x is added, proj and fc2 add it themselves
    (Linear's `residual`).

    self_attn_mask_type, window_size, bottom_right_diagonal: of self attention; enc_dec_...: of cross attention.
    attn_input_format: "sbhd", "bshd" or "thd". ub_tp_comm_overlap: whether the other ub_... flags have any effect.
    sequence_parallel: along dimension sequence_dim (default the first, in "bshd" the batch, as in Transformer Engine).
    The other arguments are MultiheadAttention's and LayerNormMLP's.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1,
        init_method: Init | None = None, output_layer_init_method: Init | None = None, layer_number: int | None = None,
        kv_channels: int | None = None, self_attn_mask_type: str = "causal", window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None, enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None, enc_dec_window_size: Window | None = None,
        tp_group: dist.ProcessGroup | None = None, tp_size: int = 1, params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None, fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None, micro_batch_size: int | None = None, sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False, output_layernorm: bool = False,
        parallel_attention_mlp: bool = False, layer_type: str = "encoder", drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False, fuse_qkv_params: bool = False, rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True, ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True, ub_overlap_rs: bool = True, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True, ub_bulk_wgrad: bool = True, bias: bool = True, activation: str = "gelu",
        activation_params: dict[str, Any] | None = None, normalization: str = "LayerNorm",
        device: torch.device | str | None = "cuda", attn_input_format: str = "sbhd", name: str | None = None,
        qk_norm_type: str | None = None, qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla", *, delay_wgrad_compute: bool = False, sequence_dim: int = 0,
    ) -> None:  # fmt: skip
        given = locals()
        super().__init__()
        check_construction("TransformerLayer", (), given, ("hidden_size", "ffn_hidden_size", "num_attention_heads"))
        _check(given)
        self.layer_type, self.attn_input_format = layer_type, attn_input_format
        self.output_layernorm, self.parallel_attention_mlp = output_layernorm, parallel_attention_mlp
        self.apply_residual_connection_post_layernorm = post = apply_residual_connection_post_layernorm
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self._adds_inside = not (hidden_dropout or drop_path_rate or post)
        returned = {"return_bias": not (self._adds_inside or parallel_attention_mlp)}
        overlap = {flag: given[flag] and ub_tp_comm_overlap for flag in UB_FLAGS}
        both = {key: given[key] for key in BOTH} | overlap | returned | {"return_layernorm_output": post}
        both["output_layer_init_method"] = output_layer_init_method or default_init  # never init_method
        attention: dict[str, Any] = both | {key: given[key] for key in ATTENTION}

        self.self_attention = MultiheadAttention(
            hidden_size, attn_mask_type=self_attn_mask_type, window_size=window_size, qkv_format=attn_input_format,
            bottom_right_diagonal=bottom_right_diagonal, input_layernorm=not output_layernorm,
            name=part_name(name, "self_attention"), **attention,
        )  # fmt: skip
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, attn_mask_type=enc_dec_attn_mask_type, window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, qkv_format=attn_input_format,
                input_layernorm=True, attention_type="cross", name=part_name(name, "inter_attention"), **attention,
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation,
            activation_params=activation_params, name=part_name(name, "layernorm_mlp"), **both,
        )  # fmt: skip
        if output_layernorm:
            partial_grads = self.layernorm_mlp.sequence_parallel
            self.layernorm = NORMS[normalization](
                hidden_size, layernorm_epsilon, partial_grads, params_dtype, zero_centered_gamma, device=device
            )

    def forward(
        self, hidden_states: Tensor, attention_mask: Masked = None, self_attn_mask_type: str | None = None,
        window_size: Window | None = None, bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None, enc_dec_attn_mask: Masked = None,
        enc_dec_attn_mask_type: str | None = None, enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None, is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False, inference_params: Any = None, rotary_pos_emb: Rotary = None,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """x [S, B, hidden_size] (sbhd), [B, S, hidden_size] (bshd) or [T, hidden_size] (thd) -> y of the same shape.

        Under torch.amp.autocast x is cast to its dtype first, so the residual has it too. encoder_output: of x's
        layout. cu_seqlens_q...: of x, also as keys of self attention; cu_seqlens_kv...: of encoder_output.
        rotary_pos_emb and core_attention_bias go to both attentions. The other arguments are MultiheadAttention's.
        """
        if self.layer_type == "encoder" and encoder_output is not None:
            raise ValueError("TransformerLayer(layer_type='encoder') got an encoder_output; use layer_type='decoder'")
        amp = amp_dtype(hidden_states)
        x = hidden_states if amp is None else hidden_states.to(amp)
        shared = {
            "is_first_microbatch": is_first_microbatch, "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params, "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type, "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q, "fast_zero_fill": fast_zero_fill, "pad_between_seqs": pad_between_seqs,
        }  # fmt: skip
        own = {
            **shared, "attention_mask": attention_mask, "attn_mask_type": self_attn_mask_type,
            "window_size": window_size, "bottom_right_diagonal": bottom_right_diagonal, "cu_seqlens_kv": cu_seqlens_q,
            "cu_seqlens_kv_padded": cu_seqlens_q_padded, "max_seqlen_kv": max_seqlen_q,
        }  # fmt: skip
        first = {"is_first_microbatch": is_first_microbatch}
        if self.parallel_attention_mlp:
            added = {"residual": x} if self._adds_inside else {}
            out = self.layernorm_mlp(x, **first, residual=self.self_attention(x, **own, **added))
            return out if self._adds_inside else x + self._dropped(out, True)
        x = self._added(self.self_attention, x, own)
        if self.layer_type == "decoder":
            cross = {
                **shared, "attention_mask": enc_dec_attn_mask, "attn_mask_type": enc_dec_attn_mask_type,
                "window_size": enc_dec_window_size, "bottom_right_diagonal": enc_dec_bottom_right_diagonal,
                "cu_seqlens_kv": cu_seqlens_kv, "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
                "max_seqlen_kv": max_seqlen_kv, "encoder_output": encoder_output,
            }  # fmt: skip
            x = self._added(self.inter_attention, x, cross, drops_path=False)
        x = self._added(self.layernorm_mlp, x, first)
        return self.layernorm(x) if self.output_layernorm else x

    def _added(self, block: Any, x: Tensor, given: dict[str, Any], drops_path: bool = True) -> Tensor:
        """x, or the norm of it that block returns, and what block gives of x."""
        if self._adds_inside:
            return block(x, **given, residual=x)
        out, bias, *normed = block(x, **given)
        out = out if bias is None else (out + bias).to(out.dtype)  # under torch.amp a bias is fp32
        return self._dropped(out, drops_path) + (normed[0] if normed else x)

    def _dropped(self, out: Tensor, drops_path: bool) -> Tensor:
        """out after dropout, and after the loss of some samples, in the others scaled up."""
        if not self.training:
            return out
        if self.hidden_dropout:
            out = F.dropout(out, self.hidden_dropout)
        if self.drop_path_rate and drops_path:
            shape = [1] * out.dim()
            batch = int(self.attn_input_format == "sbhd")
            shape[batch] = out.shape[batch]
            kept = F.dropout(torch.ones(shape, device=out.device), self.drop_path_rate)
            out = (out * kept).to(out.dtype)
        return out


def _check(given: dict[str, Any]) -> None:
    """What attention and MLP do not see."""
    kind, types = given["layer_type"], ("encoder", "decoder")
    if kind not in types:
        raise ValueError(f"layer_type={kind!r}: must be one of {types}; {remedy('layer_type', kind, types)}")
    for name in ("hidden_dropout", "drop_path_rate"):
        if not 0.0 <= given[name] < 1.0:
            raise ValueError(f"{name}={given[name]!r}: must be at least 0 and below 1; pass 0.0 for none")
    others = ("apply_residual_connection_post_layernorm", "output_layernorm")
    if given["parallel_attention_mlp"] and (kind == "decoder" or any(given[name] for name in others)):
        raise ValueError(
            f"parallel_attention_mlp=True with layer_type={kind!r}, {', '.join(f'{o}={given[o]}' for o in others)}: "
            "attention and MLP read one x; use an encoder without the two options"
        )
    if given["drop_path_rate"] and given["attn_input_format"] == "thd":
        raise NotImplementedError("drop_path_rate with attn_input_format='thd': te_lite drops no packed samples")
    mask_of(given["enc_dec_attn_mask_type"], given["enc_dec_window_size"], given["enc_dec_bottom_right_diagonal"])
