"""te_lite: fused Transformer modules with pluggable quantizers and overlapped tensor parallelism.

import te_lite as te
layer = te.LayerNormLinear(1024, 3072, params_dtype=torch.bfloat16)
with te.fp8_autocast(enabled=True, fp8_recipe=te.recipe.DelayedScaling()):
    y = layer(x)
"""

from te_lite import _requirements

_requirements.check()

from te_lite import recipe  # noqa: E402
from te_lite.autocast import (  # noqa: E402
    FP8GlobalStateManager,
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from te_lite.checkpoint import checkpoint, checkpoint_context_fn  # noqa: E402
from te_lite.convert import ConversionReport, convert_to_float8_training  # noqa: E402
from te_lite.modules.base import free_caches  # noqa: E402
from te_lite.modules.layernorm_linear import LayerNormLinear  # noqa: E402
from te_lite.modules.layernorm_mlp import LayerNormMLP  # noqa: E402
from te_lite.modules.linear import Linear  # noqa: E402
from te_lite.modules.norm import LayerNorm, RMSNorm  # noqa: E402
from te_lite.overlap.config import UserBufferQuantizationMode  # noqa: E402
from te_lite.overlap.report import format_report, overlap_report  # noqa: E402
from te_lite.overlap.userbuffers import destroy_ub, initialize_ub  # noqa: E402
from te_lite.quantize.callers import (  # noqa: E402
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)
from te_lite.quantize.statistics import collect_statistics  # noqa: E402
from te_lite.quantize.tensor import QuantizedTensor  # noqa: E402
from te_lite.recipe import check_recipe_support, required_multiple  # noqa: E402
from te_lite.rng import CudaRNGStatesTracker  # noqa: E402
from te_lite.watch import reduce_sequence_parallel_grads  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "CudaRNGStatesTracker",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "QuantizedTensor",
    "RMSNorm",
    "UserBufferQuantizationMode",
    "autocast",
    "check_recipe_support",
    "checkpoint",
    "checkpoint_context_fn",
    "collect_statistics",
    "convert_to_float8_training",
    "destroy_ub",
    "format_report",
    "fp8_autocast",
    "fp8_model_init",
    "free_caches",
    "initialize_ub",
    "overlap_report",
    "quantized_model_init",
    "recipe",
    "reduce_sequence_parallel_grads",
    "required_multiple",
]
