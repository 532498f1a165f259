"""te_lite: fused Transformer modules with pluggable quantizers and overlapped tensor parallelism.

import te_lite as te
layer = te.LayerNormLinear(1024, 3072, params_dtype=torch.bfloat16)
with te.fp8_autocast(enabled=True, fp8_recipe=te.recipe.DelayedScaling()):
    y = layer(x)
"""

from types import ModuleType as _ModuleType

from te_lite import _requirements

_requirements.check()

# Public names, one a line; `as` says that they are given on.
from te_lite import recipe as recipe
from te_lite.autocast import autocast as autocast
from te_lite.checkpoint import checkpoint as checkpoint
from te_lite.checkpoint import checkpoint_context_fn as checkpoint_context_fn
from te_lite.compat.callers import Float8BlockQuantizer as Float8BlockQuantizer
from te_lite.compat.callers import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from te_lite.compat.callers import Float8Quantizer as Float8Quantizer
from te_lite.compat.callers import MXFP8Quantizer as MXFP8Quantizer
from te_lite.compat.contexts import FP8GlobalStateManager as FP8GlobalStateManager
from te_lite.compat.contexts import fp8_autocast as fp8_autocast
from te_lite.compat.contexts import fp8_model_init as fp8_model_init
from te_lite.compat.contexts import quantized_model_init as quantized_model_init
from te_lite.compat.convert import ConversionReport as ConversionReport
from te_lite.compat.convert import convert_to_float8_training as convert_to_float8_training
from te_lite.compat.fuse import FuseReport as FuseReport
from te_lite.compat.fuse import fuse as fuse
from te_lite.compat.fuse import unfuse as unfuse
from te_lite.compat.graphs import make_graphed_callables as make_graphed_callables
from te_lite.compat.names import missing as _missing
from te_lite.compat.padding import Fp8Padding as Fp8Padding
from te_lite.compat.padding import Fp8Unpadding as Fp8Unpadding
from te_lite.compat.rng import CudaRNGStatesTracker as CudaRNGStatesTracker
from te_lite.compat.state import load_scales_state_dict as load_scales_state_dict
from te_lite.compat.state import plain_state_dict as plain_state_dict
from te_lite.compat.state import scales_state_dict as scales_state_dict
from te_lite.diagnostics.report import format_report as format_report
from te_lite.diagnostics.report import overlap_report as overlap_report
from te_lite.diagnostics.statistics import collect_statistics as collect_statistics
from te_lite.functional.transfers import Handle as Handle
from te_lite.modules.attention import DotProductAttention as DotProductAttention
from te_lite.modules.base import free_caches as free_caches
from te_lite.modules.grouped_linear import GroupedLinear as GroupedLinear
from te_lite.modules.grouped_mm import scaled_grouped_mm as scaled_grouped_mm
from te_lite.modules.layernorm_linear import LayerNormLinear as LayerNormLinear
from te_lite.modules.layernorm_mlp import LayerNormMLP as LayerNormMLP
from te_lite.modules.linear import Linear as Linear
from te_lite.modules.multihead_attention import MultiheadAttention as MultiheadAttention
from te_lite.modules.norm import LayerNorm as LayerNorm
from te_lite.modules.norm import RMSNorm as RMSNorm
from te_lite.modules.rope import RotaryPositionEmbedding as RotaryPositionEmbedding
from te_lite.modules.transformer_layer import TransformerLayer as TransformerLayer
from te_lite.modules.verbs import DelayedScales as DelayedScales
from te_lite.modules.verbs import all_gather as all_gather
from te_lite.modules.verbs import all_gather_linear as all_gather_linear
from te_lite.modules.verbs import linear_reduce_scatter as linear_reduce_scatter
from te_lite.modules.verbs import reduce_scatter as reduce_scatter
from te_lite.overlap.config import UserBufferQuantizationMode as UserBufferQuantizationMode
from te_lite.overlap.symmetric import SymmetricMemory as SymmetricMemory
from te_lite.overlap.userbuffers import destroy_ub as destroy_ub
from te_lite.overlap.userbuffers import initialize_ub as initialize_ub
from te_lite.overlap.userbuffers import symmetric_empty as symmetric_empty
from te_lite.quantize.tensor import QuantizedTensor as QuantizedTensor
from te_lite.recipe import check_recipe_support as check_recipe_support
from te_lite.recipe import required_multiple as required_multiple
from te_lite.watch import reduce_sequence_parallel_grads as reduce_sequence_parallel_grads

__version__ = "0.1.0"
_public = {name: value for name, value in globals().items() if name[0] != "_"}
__all__ = ["recipe", *(name for name, value in _public.items() if not isinstance(value, _ModuleType))]
__getattr__ = _missing("te_lite", __all__)
