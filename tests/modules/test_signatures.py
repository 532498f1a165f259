"""Constructors and forwards take Transformer Engine's arguments in its order with its defaults (2.20.2)."""

import inspect

import pytest

import te_lite as te

LINEAR = (
    "in_features out_features sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None tp_size=1 "
    "get_rng_state_tracker=None rng_tracker_name=None init_method=None bias=True return_bias=False params_dtype=None "
    "parallel_mode=None parameters_split=None device='cuda' ub_overlap_ag=False ub_overlap_rs=False "
    "ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False ub_name=None delay_wgrad_compute=False "
    "symmetric_ar_type=None save_original_input=False name=None"
)
LAYERNORM_LINEAR = (
    "in_features out_features eps=1e-05 sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None tp_size=1 "
    "get_rng_state_tracker=None init_method=None bias=True normalization='LayerNorm' return_bias=False "
    "params_dtype=None parallel_mode=None return_layernorm_output=False return_layernorm_output_gathered=False "
    "parameters_split=None zero_centered_gamma=False device='cuda' ub_overlap_ag=False ub_overlap_rs=False "
    "ub_overlap_rs_dgrad=False ub_bulk_wgrad=False ub_bulk_dgrad=False ub_name=None delay_wgrad_compute=False "
    "symmetric_ar_type=None name=None"
)
LAYERNORM_MLP = (
    "hidden_size ffn_hidden_size eps=1e-05 sequence_parallel=False return_bias=False get_rng_state_tracker=None "
    "tp_group=None tp_size=1 init_method=None bias=True normalization='LayerNorm' activation='gelu' "
    "activation_params=None output_layer_init_method=None fuse_wgrad_accumulation=False params_dtype=None "
    "return_layernorm_output=False return_layernorm_output_gathered=False seq_length=None micro_batch_size=None "
    "set_parallel_mode=False zero_centered_gamma=False device='cuda' ub_overlap_ag=False name=None "
    "ub_overlap_rs=False ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False delay_wgrad_compute=False "
    "symmetric_ar_type=None checkpoint=False"
)
ATTENTION = (
    "hidden_size num_attention_heads kv_channels=None attention_dropout=0.1 layernorm_epsilon=1e-05 init_method=None "
    "output_layer_init_method=None layer_number=None attn_mask_type='causal' window_size=None "
    "bottom_right_diagonal=None tp_group=None tp_size=1 num_gqa_groups=None fuse_wgrad_accumulation=False "
    "get_rng_state_tracker=None sequence_parallel=False params_dtype=None return_bias=False "
    "return_layernorm_output=False input_layernorm=False attention_type='self' set_parallel_mode=False "
    "fuse_qkv_params=False zero_centered_gamma=False qkv_weight_interleaved=True rotary_pos_interleaved=False "
    "ub_overlap_ag=False ub_overlap_rs=False ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False "
    "bias=True normalization='LayerNorm' device='cuda' qkv_format='sbhd' name=None qk_norm_type=None "
    "qk_norm_eps=1e-06 qk_norm_before_rope=False seq_length=None micro_batch_size=None softmax_type='vanilla'"
)
LAYER = (
    "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups=None layernorm_epsilon=1e-05 hidden_dropout=0.1 "
    "attention_dropout=0.1 init_method=None output_layer_init_method=None layer_number=None kv_channels=None "
    "self_attn_mask_type='causal' window_size=None bottom_right_diagonal=None enc_dec_attn_mask_type='no_mask' "
    "enc_dec_bottom_right_diagonal=None enc_dec_window_size=None tp_group=None tp_size=1 params_dtype=None "
    "get_rng_state_tracker=None fuse_wgrad_accumulation=False seq_length=None micro_batch_size=None "
    "sequence_parallel=False apply_residual_connection_post_layernorm=False output_layernorm=False "
    "parallel_attention_mlp=False layer_type='encoder' drop_path_rate=0.0 set_parallel_mode=False "
    "fuse_qkv_params=False rotary_pos_interleaved=False zero_centered_gamma=False qkv_weight_interleaved=True "
    "ub_tp_comm_overlap=False ub_overlap_ag=True ub_overlap_rs=True ub_overlap_rs_dgrad=False ub_bulk_dgrad=True "
    "ub_bulk_wgrad=True bias=True activation='gelu' activation_params=None normalization='LayerNorm' device='cuda' "
    "attn_input_format='sbhd' name=None qk_norm_type=None qk_norm_eps=1e-06 qk_norm_before_rope=False "
    "softmax_type='vanilla'"
)
ROPE = (
    "rotary_pos_emb=None core_attention_bias_type='no_bias' core_attention_bias=None alibi_slopes=None "
    "cu_seqlens_q=None cu_seqlens_kv=None cu_seqlens_q_padded=None cu_seqlens_kv_padded=None max_seqlen_q=None "
    "max_seqlen_kv=None fast_zero_fill=True pad_between_seqs=None"
)
ATTENTION_FORWARD = (
    "hidden_states attention_mask=None encoder_output=None attn_mask_type=None window_size=None "
    "bottom_right_diagonal=None is_first_microbatch=None checkpoint_core_attention=False inference_params=None "
)
LAYER_FORWARD = (
    "hidden_states attention_mask=None self_attn_mask_type=None window_size=None bottom_right_diagonal=None "
    "encoder_output=None enc_dec_attn_mask=None enc_dec_attn_mask_type=None enc_dec_window_size=None "
    "enc_dec_bottom_right_diagonal=None is_first_microbatch=None checkpoint_core_attention=False "
    "inference_params=None "
)
NORM = (
    "normalized_shape=None eps=1e-05 sequence_parallel=None params_dtype=None zero_centered_gamma=False "
    "hidden_size=None device=None"
)
FORWARD = "inp is_first_microbatch=None fp8_output=False fp8_grad=False"
AUTOCAST = "enabled=True calibrating=False recipe=None amax_reduction_group=None"

CASES = [
    (te.Linear.__init__, LINEAR),
    (te.LayerNormLinear.__init__, LAYERNORM_LINEAR),
    (te.LayerNormMLP.__init__, LAYERNORM_MLP),
    (te.LayerNorm.__init__, NORM),
    (te.RMSNorm.__init__, NORM),
    (te.Linear.forward, FORWARD),
    (te.LayerNormLinear.forward, FORWARD),
    (te.LayerNormMLP.forward, "inp is_first_microbatch=None"),
    (te.MultiheadAttention.__init__, ATTENTION),
    (te.MultiheadAttention.forward, ATTENTION_FORWARD + ROPE),
    (te.TransformerLayer.__init__, LAYER),
    (te.TransformerLayer.forward, LAYER_FORWARD + ROPE),
    (te.autocast.__init__, AUTOCAST),
    (
        te.initialize_ub,
        "shape tp_size use_fp8=False quantization_modes=None dtype=torch.bfloat16 ub_cfgs=None bootstrap_backend=None",
    ),
    (te.destroy_ub, ""),
    (te.fp8_autocast, "enabled=True calibrating=False fp8_recipe=None fp8_group=None"),
]


def spelled(function) -> str:
    """Names and defaults in positional order; what te_lite adds is keyword-only and left out."""
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self" or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        default = repr(parameter.default)
        words.append(name if parameter.default is inspect.Parameter.empty else f"{name}={default}")
    return " ".join(words)


@pytest.mark.parametrize("function, expected", CASES, ids=lambda v: getattr(v, "__qualname__", ""))
def test_arguments_order_and_defaults(function, expected):
    assert spelled(function) == expected
