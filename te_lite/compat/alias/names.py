"""What each module of `transformer_engine` holds: a table, one line for names that stand in one module of te_lite."""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from te_lite.compat.alias.finder import VERSION

_ALIAS = "te_lite.compat.alias"
_RECIPES = (
    "Recipe Format MMParams QParams DelayedScaling Float8CurrentScaling MXFP8BlockScaling Float8BlockScaling "
    "CustomRecipe"
)
_CONTEXTS = "autocast fp8_autocast quantized_model_init fp8_model_init"
_SUPPORT = (
    "check_fp8_support check_mxfp8_support check_fp8_block_scaling_support check_nvfp4_support get_default_recipe "
    "get_default_fp8_recipe is_fp8_available is_mxfp8_available is_fp8_block_scaling_available is_nvfp4_available "
    "is_bf16_available get_device_compute_capability"
)
_OF_RECIPES = (
    "check_recipe_support get_fp8_torch_dtype get_fp8_te_dtype=get_fp8_torch_dtype get_fp8_max "
    "get_align_size_for_quantization"
)
_QUANTIZERS = "Float8Quantizer Float8CurrentScalingQuantizer MXFP8Quantizer Float8BlockQuantizer"
_TENSORS = (
    "Float8Tensor MXFP8Tensor Float8BlockwiseQTensor Float8TensorStorage=Float8Tensor MXFP8TensorStorage=MXFP8Tensor "
    "Float8BlockwiseQTensorStorage=Float8BlockwiseQTensor"
)
_MOE = "moe_permute moe_permute_with_probs moe_unpermute moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs"
_RECOMPUTE = "activation_recompute_forward is_fp8_activation_recompute_enabled in_fp8_activation_recompute_phase"
_GRAPH = (
    "make_graphed_callables set_capture_start set_capture_end is_graph_capturing graph_pool_handle save_fp8_tensors "
    "restore_fp8_tensors"
)
_UB = "destroy_ub UserBufferQuantizationMode"

# (module below transformer_engine, where its names stand, the names; "a=b": te_lite's b under the name a).
# "": te_lite has no such class; building one raises NotImplementedError, asking isinstance is False.
TABLE = (
    ("common.recipe", f"{_ALIAS}.recipes", _RECIPES),
    ("common.recipe", "", "NVFP4BlockScaling"),
    ("pytorch", "te_lite", f"Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm DotProductAttention {_UB}"),
    ("pytorch", f"{_ALIAS}.userbuffers", "initialize_ub"),
    ("pytorch", "te_lite", "CudaRNGStatesTracker QuantizedTensor QuantizedTensorStorage=QuantizedTensor"),
    ("pytorch", "te_lite.compat.callers", "Quantizer=CallerQuantizer"),
    ("pytorch", "te_lite", "TransformerLayer MultiheadAttention RotaryPositionEmbedding"),
    ("pytorch", f"{_ALIAS}.grouped", "GroupedLinear"),
    ("pytorch", f"{_ALIAS}.graph", "make_graphed_callables"),
    ("pytorch", f"{_ALIAS}.contexts", _CONTEXTS),
    ("pytorch", f"{_ALIAS}.manager", "FP8GlobalStateManager"),
    ("pytorch", f"{_ALIAS}.support", _SUPPORT),
    ("pytorch", f"{_ALIAS}.distributed", "checkpoint"),
    ("pytorch", "te_lite", _QUANTIZERS),
    ("pytorch", f"{_ALIAS}.tensors", _TENSORS),
    ("pytorch.quantization", f"{_ALIAS}.contexts", _CONTEXTS),
    ("pytorch.quantization", f"{_ALIAS}.manager", "FP8GlobalStateManager"),
    ("pytorch.quantization", f"{_ALIAS}.support", f"{_SUPPORT} {_OF_RECIPES}"),
    ("pytorch.fp8", f"{_ALIAS}.contexts", _CONTEXTS),
    ("pytorch.fp8", f"{_ALIAS}.manager", "FP8GlobalStateManager"),
    ("pytorch.fp8", f"{_ALIAS}.support", f"{_SUPPORT} {_OF_RECIPES}"),
    ("pytorch.distributed", f"{_ALIAS}.distributed", f"checkpoint {_RECOMPUTE} get_all_rng_states"),
    ("pytorch.distributed", f"{_ALIAS}.distributed", "prepare_te_modules_for_fsdp"),
    ("pytorch.distributed", "te_lite", "CudaRNGStatesTracker"),
    ("pytorch.graph", f"{_ALIAS}.graph", _GRAPH),
    ("pytorch.module", "te_lite", f"Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm {_UB}"),
    ("pytorch.module", f"{_ALIAS}.grouped", "GroupedLinear"),
    ("pytorch.module", f"{_ALIAS}.userbuffers", "initialize_ub"),
    ("pytorch.module.base", "te_lite", _UB),
    ("pytorch.module.base", f"{_ALIAS}.userbuffers", "initialize_ub"),
    ("pytorch.module.base", "te_lite.modules.base", "TransformerEngineBaseModule=TeLiteModule"),
    ("pytorch.module.base", f"{_ALIAS}.distributed", "get_dummy_wgrad"),
    ("pytorch.module.linear", "te_lite", "Linear"),
    ("pytorch.module.layernorm_linear", "te_lite", "LayerNormLinear"),
    ("pytorch.module.layernorm_mlp", "te_lite", "LayerNormMLP"),
    ("pytorch.module.layernorm", "te_lite", "LayerNorm"),
    ("pytorch.module.rmsnorm", "te_lite", "RMSNorm"),
    ("pytorch.module.grouped_linear", f"{_ALIAS}.grouped", "GroupedLinear"),
    ("pytorch.transformer", "te_lite", "TransformerLayer"),
    ("pytorch.attention", "te_lite", "DotProductAttention MultiheadAttention"),
    ("pytorch.attention.multi_head_attention", "te_lite", "MultiheadAttention"),
    ("pytorch.attention.dot_product_attention", "te_lite", "DotProductAttention"),
    ("pytorch", "", "InferenceParams"),
    ("pytorch.attention", "", "InferenceParams"),
    ("pytorch.attention.inference", "", "InferenceParams"),
    ("pytorch.attention", "te_lite.modules.rope", "apply_rotary_pos_emb RotaryPositionEmbedding"),
    ("pytorch.attention.rope", "te_lite.modules.rope", "apply_rotary_pos_emb RotaryPositionEmbedding"),
    ("pytorch.tensor", "te_lite", f"QuantizedTensor QuantizedTensorStorage=QuantizedTensor {_QUANTIZERS}"),
    ("pytorch.tensor", "te_lite.compat.callers", "Quantizer=CallerQuantizer"),
    ("pytorch.tensor", f"{_ALIAS}.tensors", _TENSORS),
    ("pytorch.tensor", f"{_ALIAS}.tensors", "replace_raw_data cast_master_weights_to_fp8"),
    ("pytorch.tensor.float8_tensor", "te_lite", "Float8Quantizer Float8CurrentScalingQuantizer"),
    ("pytorch.tensor.float8_tensor", f"{_ALIAS}.tensors", "Float8Tensor"),
    ("pytorch.tensor.mxfp8_tensor", "te_lite", "MXFP8Quantizer"),
    ("pytorch.tensor.mxfp8_tensor", f"{_ALIAS}.tensors", "MXFP8Tensor"),
    ("pytorch.tensor.float8_blockwise_tensor", "te_lite", "Float8BlockQuantizer"),
    ("pytorch.tensor.float8_blockwise_tensor", f"{_ALIAS}.tensors", "Float8BlockwiseQTensor"),
    ("pytorch.tensor.quantized_tensor", "te_lite", "QuantizedTensor QuantizedTensorStorage=QuantizedTensor"),
    ("pytorch.tensor.quantized_tensor", "te_lite.compat.callers", "Quantizer=CallerQuantizer"),
    ("pytorch.tensor.utils", f"{_ALIAS}.tensors", "replace_raw_data cast_master_weights_to_fp8"),
    ("pytorch.tensor.utils", f"{_ALIAS}.tensors", "post_all_gather_processing"),
    ("pytorch.quantized_tensor", "te_lite", "QuantizedTensor QuantizedTensorStorage=QuantizedTensor"),
    ("pytorch.quantized_tensor", "te_lite.compat.callers", "Quantizer=CallerQuantizer"),
    ("pytorch.float8_tensor", f"{_ALIAS}.tensors", "Float8Tensor"),
    ("pytorch.constants", f"{_ALIAS}.tensors", "TE_DType TE_DType_To_Torch DType"),
    ("pytorch", f"{_ALIAS}.tensors", "DType"),
    ("pytorch.ops", "", "Sequential FusibleOperation"),
    ("pytorch.optimizers", f"{_ALIAS}.optimizers", "FusedAdam FusedSGD"),
    ("pytorch.optimizers", f"{_ALIAS}.optimizers", "multi_tensor_applier multi_tensor_scale multi_tensor_l2norm"),
    ("pytorch.cross_entropy", f"{_ALIAS}.cross_entropy", "parallel_cross_entropy"),
    ("pytorch.router", f"{_ALIAS}.router", "fused_topk_with_score_function fused_compute_score_for_moe_aux_loss"),
    ("pytorch.router", f"{_ALIAS}.router", "fused_moe_aux_loss"),
    ("pytorch.permutation", f"{_ALIAS}.permutation", _MOE),
    ("pytorch", f"{_ALIAS}.permutation", _MOE),
    ("pytorch", "te_lite", "Fp8Padding Fp8Unpadding"),
    ("pytorch.module", "te_lite", "Fp8Padding Fp8Unpadding"),
    ("pytorch", f"{_ALIAS}.cross_entropy", "parallel_cross_entropy"),
    ("pytorch.utils", f"{_ALIAS}.graph", "make_weak_ref"),
    ("pytorch.utils", f"{_ALIAS}.support", "is_bf16_compatible=is_bf16_available is_bf16_available"),
    ("pytorch.utils", f"{_ALIAS}.support", "get_device_compute_capability"),
)  # fmt: skip


def _modules() -> dict[str, list[tuple[str, str]]]:
    made: dict[str, list[tuple[str, str]]] = {"transformer_engine": [], "transformer_engine_torch": []}
    made["transformer_engine_torch"].append((f"{_ALIAS}.tensors", "DType"))
    for below, where, names in TABLE:
        parts = below.split(".")
        for depth in range(1, len(parts)):
            made.setdefault(".".join(["transformer_engine", *parts[:depth]]), [])
        made.setdefault(f"transformer_engine.{below}", []).extend((where, name) for name in names.split())
    return made


MODULES = _modules()  # full name of a module -> (where, name) of each of its names


class NotThere(NotImplementedError, AttributeError):
    """A name of Transformer Engine that te_lite does not have. As an AttributeError it leaves hasattr() False, and
    `from ... import name` raises ImportError, which libraries expect of an older Transformer Engine."""


@functools.cache
def _no_class(full: str) -> type:
    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{full}: te_lite does not have it (docs/reference/not-there.md)")

    module, _, name = full.rpartition(".")
    return type(name, (), {"__new__": refuse, "__module__": module, "__doc__": "te_lite does not have it."})


def _missing(module: str, name: str) -> Any:
    """For names that are not in the module's dict: a submodule, imported now; else NotThere."""
    full = f"{module}.{name}"
    if full in MODULES:
        return import_module(full)
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise NotThere(f"{full}: te_lite has nothing under this name (docs/reference/not-there.md)")


def fill(module: ModuleType) -> None:
    """The names of MODULES as attributes of a new module, in it and not copied."""
    full = module.__name__
    values: dict[str, Any] = {}
    for where, entry in MODULES[full]:
        name, _, own = entry.partition("=")
        if where:
            values[name] = getattr(import_module(where), own or name)
        else:
            values[name] = _no_class(f"{full}.{name}")
    vars(module).update(values, __all__=sorted(values), __getattr__=functools.partial(_missing, full))
    if full == "transformer_engine.pytorch":
        # Lightning knows Transformer Engine's modules by this name, which pickles of whole modules hold too.
        for value in values.values():
            if isinstance(value, type) and issubclass(value, nn.Module):
                value.__module__ = full
    if full == "transformer_engine":
        module.__version__ = VERSION  # type: ignore[attr-defined]
