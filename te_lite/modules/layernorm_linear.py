"""te.LayerNormLinear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.functional.layer import Call, run_layer
from te_lite.functional.layernorm_linear import NormLinearLayer
from te_lite.modules.linear import Split, _OneLinear
from te_lite.modules.norm import layer_of
from te_lite.modules.weights import Init


class LayerNormLinear(_OneLinear):
    """y = norm(x) @ weight^T + bias: the norm writes what the GEMM reads, quantized where the recipe says so.

    As Linear, without rng_tracker_name and save_original_input, and: normalization "LayerNorm" or "RMSNorm", eps,
    zero_centered_gamma (weight stored minus one). return_layernorm_output: norm(x) is returned too, as the last of the
    outputs; return_layernorm_output_gathered: that output is gathered along tokens under sequence parallelism.

    Raises what Linear raises, and ValueError for parallel_mode "row": the norm needs whole rows.
    """

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: dist.ProcessGroup | None = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, init_method: Init | None = None, bias: bool = True,
        normalization: str = "LayerNorm", return_bias: bool = False, params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, parameters_split: Split = None,
        zero_centered_gamma: bool = False, device: torch.device | str | None = "cuda", ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_name: str | None = None, delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None, name: str | None = None, *, sequence_dim: int = 0,
    ) -> None:  # fmt: skip
        given = locals()
        if parallel_mode == "row":
            raise ValueError("LayerNormLinear(parallel_mode='row'): the norm needs whole rows; use 'column' or None")
        super().__init__(given)

    def _compute(self, call: Call, inp: Tensor, *weights: Tensor | None) -> Any:
        layer = layer_of(self, NormLinearLayer)
        return run_layer(layer, call, inp, self.layer_norm_weight, self.layer_norm_bias, *weights)
