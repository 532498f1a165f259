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
