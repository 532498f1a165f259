"""te.Linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite.autocast import model_init
from te_lite.functional.linear import LinearFunction
from te_lite.modules.base import TeLiteModule
from te_lite.modules.weights import Init, ParamSpec, adjacent, default_init, join
from te_lite.parallel import shard

Split = tuple[str, ...] | dict[str, int] | None


def linear_specs(
    shape: tuple[int, int], mode: str | None, tp_size: int, sequence_parallel: bool, init: Init, late_grad: bool
) -> tuple[ParamSpec, ParamSpec]:
    """(weight, bias) of one linear of global `shape` (in, out), as this rank holds them."""
    features_in, features_out = shape
    if mode == "column":
        features_out = shard(features_out, tp_size, "out_features")
    elif mode == "row":
        features_in = shard(features_in, tp_size, "in_features")
    weight = ParamSpec((features_out, features_in), init, {"column": 0, "row": 1}.get(mode), True, late_grad=late_grad)
    making = model_init()
    if making is not None and not (features_out % making.multiple or features_in % making.multiple):
        weight = replace(weight, quantizer=making.quantizer, preserve=making.preserve)
    bias_spec = ParamSpec(
        (features_out,),
        nn.init.zeros_,
        0 if mode == "column" else None,
        sequence_parallel=mode == "row" and sequence_parallel,
    )
    return weight, bias_spec


def _split_sizes(split: Split, features: int) -> dict[str, int]:
    """Name -> rows for parameters_split; {"": features} when there is none."""
    if split is None:
        return {"": features}
    if isinstance(split, dict):
        sizes = {f"{name.rstrip('_')}_": size for name, size in split.items()}
    elif isinstance(split, (tuple, list)) and all(isinstance(name, str) for name in split) and split:
        if features % len(split):
            raise ValueError(
                f"parameters_split={split}: out_features={features} is not divisible by {len(split)}; use a dict"
            )
        sizes = {f"{name.rstrip('_')}_": features // len(split) for name in split}
    else:
        raise TypeError(f"parameters_split={split!r}: must be a tuple of names or a dict of name to number of rows")
    if not sizes or sum(sizes.values()) != features:
        raise ValueError(f"parameters_split={split}: sizes must add up to out_features={features}; adjust them")
    return sizes


class _OneLinear(TeLiteModule):
    """What Linear and LayerNormLinear share: one weight, one bias, either of them possibly split by name."""

    def _setup_linear(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        return_bias: bool,
        parameters_split: Split,
        init_method: Init | None,
    ) -> None:
        if parameters_split is not None and self.fuse_wgrad_accumulation:
            raise ValueError(
                "parameters_split with fuse_wgrad_accumulation=True: a joined weight has no main_grad of its own; use "
                "one of them"
            )
        if parameters_split is not None and self.delay_wgrad_compute:
            raise ValueError(
                "parameters_split with delay_wgrad_compute=True: the joined weight is no parameter; use one"
            )
        self.parallel_mode = self._modes[0]
        if isinstance(parameters_split, dict) and any(type(n) is not int or n < 1 for n in parameters_split.values()):
            raise ValueError(f"parameters_split={parameters_split}: every part needs a positive number of rows")
        weight, bias_spec = linear_specs(
            (in_features, out_features),
            self.parallel_mode,
            self.tp_size,
            self.sequence_parallel,
            init_method or default_init,
            self.delay_wgrad_compute,
        )
        self.out_features, self.in_features = weight.shape
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        splits = _split_sizes(parameters_split, out_features)
        if self.parallel_mode == "column":
            for name, size in splits.items():
                if size % self.tp_size:
                    raise ValueError(f"parameters_split {name!r} has {size} rows: must be divisible by {self.tp_size}")
            splits = {name: size // self.tp_size for name, size in splits.items()}
        if weight.quantizer is not None and len(splits) > 1:
            raise ValueError(
                f"parameters_split={parameters_split} under quantized_model_init: parts with scales of their own are "
                "not one operand of a GEMM; use one of them"
            )
        self.weight_names = [f"{name}weight" for name in splits]
        self.bias_names = [f"{name}bias" for name in splits]
        self._add_split(weight, self.weight_names, list(splits.values()))
        if bias:
            self._add_split(bias_spec, self.bias_names, list(splits.values()))
        else:
            for name in self.bias_names:
                self._add_no_bias(name)

    def _add_split(self, spec: ParamSpec, names: list[str], sizes: list[int]) -> None:
        specs = {name: replace(spec, shape=(size, *spec.shape[1:])) for name, size in zip(names, sizes, strict=True)}
        self._specs.update(specs)
        for name, param in adjacent(specs, self.params_dtype, self._device, self._fork).items():
            self.register_parameter(name, param)

    def _linear_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.in_features, self.out_features),)

    def _weight_versions(self) -> tuple[Any, ...]:
        return (sum(getattr(self, name)._version for name in self.weight_names),)

    def _weight(self) -> Tensor:
        return join([getattr(self, name) for name in self.weight_names])

    def _bias(self) -> Tensor | None:
        return join([getattr(self, name) for name in self.bias_names]) if self.use_bias else None


class Linear(_OneLinear):
    """y[..., N] = x[..., K] @ weight[N, K]^T + bias[N]; a drop-in for torch.nn.Linear and Transformer Engine's Linear.

    parallel_mode "column" splits N, "row" splits K over tp_group. With sequence_parallel the activations on the outer
    side are split along their dimension sequence_dim (default the first): a column-parallel linear gathers its input,
    a row-parallel one scatters its sum.

    params_dtype: bf16, fp16 or fp32 (default: torch's). device: default the GPU, or the CPU where there is none; "meta"
    puts initialisation off until reset_parameters(). return_bias: the bias is returned and not added.
    init_method(tensor) fills the weight (default: normal, 0.023), under get_rng_state_tracker's state rng_tracker_name.
    parameters_split: names (or name -> rows) under which weight and bias are registered in parts.
    fuse_wgrad_accumulation: weight.main_grad += dw. delay_wgrad_compute: dw waits for backward_dw().
    save_original_input: keep x itself for backward instead of its quantized copy.

    Raises ValueError for sizes that tp_size does not divide and for a group of another size, RuntimeError for
    ub_* flags before te.initialize_ub (docs/overlap.md).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Split = None,
        device: torch.device | str | None = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        sequence_dim: int = 0,
    ) -> None:
        super().__init__(locals(), (parallel_mode,), (ub_name,), ("in_features", "out_features"))
        self.save_original_input = save_original_input
        self._setup_linear(in_features, out_features, bias, return_bias, parameters_split, init_method)

    def _keep_original(self) -> bool:
        return self.save_original_input

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [..., in_features] -> y [..., out_features], or (y, bias) with return_bias.

        is_first_microbatch: True quantizes the weight and keeps it, False reuses it, None (default) keeps nothing.
        fp8_output, fp8_grad: give y, or the gradient of x, as a QuantizedTensor (under an fp8 recipe).
        """
        weight, bias = self._weight(), self._bias()
        inp = self._sequence_first(inp, fp8_output or fp8_grad)
        call = self._begin(inp, self.in_features, (weight,), is_first_microbatch, fp8_output, fp8_grad)
        return self._outputs(self._run(LinearFunction, call, inp, weight, bias if self.apply_bias else None), bias)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, mode={self.parallel_mode}, tp_size={self.tp_size}"
