"""te.Linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite.autocast import model_init
from te_lite.functional.linear import run_linear
from te_lite.modules.base import TeLiteModule
from te_lite.modules.weights import Init, ParamSpec, default_init, join
from te_lite.parallel import shard

Split = tuple[str, ...] | dict[str, int] | None


def add_linear(
    module: TeLiteModule, mode: str | None, features_in: int, features_out: int, init: Init | None, use_bias: bool,
    parts: dict[str, int],
) -> tuple[int, int]:  # fmt: skip
    """Adds weight and bias of one linear as this rank holds them; returns the weight's shape. parts: prefix of names ->
    rows, for each of which there are a weight and a bias. Features and rows are those of all ranks."""
    if mode == "column":
        features_out = shard(features_out, module.tp_size, "out_features")
        parts = {name: shard(rows, module.tp_size, f"parameters_split {name!r}") for name, rows in parts.items()}
    elif mode == "row":
        features_in = shard(features_in, module.tp_size, "in_features")
    split, late_grad = {"column": 0, "row": 1}.get(mode or ""), module.delay_wgrad_compute
    weight = ParamSpec((features_out, features_in), init or default_init, split, True, late_grad=late_grad)
    making = model_init()
    if making is not None and not (features_out % making.multiple or features_in % making.multiple):
        weight = replace(weight, quantizer=making.quantizer, preserve=making.preserve)
        if len(parts) > 1:
            raise ValueError(
                f"parameters_split={tuple(parts)} under quantized_model_init: parts with scales of their own are not "
                "one operand of a GEMM; use one of them"
            )
    partial_grad = True if mode == "row" and module.sequence_parallel else None
    bias_split = 0 if mode == "column" else None
    bias = ParamSpec((features_out,), nn.init.zeros_, bias_split, sequence_parallel=partial_grad)
    module._add_params({f"{name}weight": replace(weight, shape=(n, features_in)) for name, n in parts.items()}, True)
    module._add_biases({f"{name}bias": replace(bias, shape=(rows,)) for name, rows in parts.items()}, use_bias)
    return features_out, features_in


def _split_sizes(split: Split, features: int) -> dict[str, int]:
    """Name -> rows for parameters_split; {"": features} when there is none."""
    if split is None:
        return {"": features}
    if not isinstance(split, (dict, tuple, list)) or not all(isinstance(name, str) for name in split):
        raise TypeError(f"parameters_split, a {type(split).__name__}: must be a tuple of names or a dict, name -> rows")
    count = len(split) or 1
    if not isinstance(split, dict) and features % count:
        raise ValueError(f"parameters_split={split}: out_features={features} is not divisible by {count}; use a dict")
    rows = split if isinstance(split, dict) else dict.fromkeys(split, features // count)
    if any(type(size) is not int or size < 1 for size in rows.values()):
        raise ValueError(f"parameters_split={split}: every part needs a positive number of rows")
    sizes = {f"{name.rstrip('_')}_": size for name, size in rows.items()}
    if sum(sizes.values()) != features:
        raise ValueError(f"parameters_split={split}: sizes must add up to out_features={features}; adjust them")
    return sizes


class _OneLinear(TeLiteModule):
    """What Linear and LayerNormLinear share: one weight and one bias, both possibly split by name."""

    _compute: Callable[..., Any]  # y, or (y, norm(x))

    def __init__(self, given: Mapping[str, Any]) -> None:
        """given: the arguments of the subclass's constructor, by name."""
        super().__init__(given, (given["parallel_mode"],), (given["ub_name"],), ("in_features", "out_features"))
        parameters_split, out_features = given["parameters_split"], given["out_features"]
        for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
            if parameters_split is not None and given[option]:
                raise ValueError(
                    f"parameters_split with {option}=True: a joined weight is no parameter and has no main_grad of its "
                    "own; use one of them"
                )
        self.parallel_mode = self._modes[0]
        parts = _split_sizes(parameters_split, out_features)
        self.weight_names = [f"{name}weight" for name in parts]
        self.bias_names = [f"{name}bias" for name in parts]
        self.out_features, self.in_features = add_linear(
            self, self.parallel_mode, given["in_features"], out_features, given["init_method"], self.use_bias, parts
        )

    def _linear_names(self) -> list[tuple[list[str], list[str]]]:
        return [(self.weight_names, self.bias_names)]

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False,
        *, residual: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """x [..., in_features] -> y [..., out_features]; with return_bias (y, bias); with return_layernorm_output the
        norm's output comes last.

        is_first_microbatch: True quantizes the weight and keeps it, False reuses it, None (default) keeps nothing.
        After True the first gradient of the weight replaces main_grad.
        fp8_output, fp8_grad: give y, or the gradient of x, as a QuantizedTensor (under an fp8 recipe).
        residual [..., out_features]: added to y, of whose shape, dtype and device it is (else ValueError); where y is
        the sum of a fused or ring reduce-scatter in the same pass, before the only rounding (with fp8_buf after it).
        """
        if torch.compiler.is_dynamo_compiling():
            from te_lite.modules.compiled import call

            return call(self, _OneLinear.forward, inp, is_first_microbatch, fp8_output, fp8_grad, residual)
        parts: tuple[Tensor, ...] = ()
        if len(self.weight_names) == 1:
            weight: Any = self._parameters.get(self.weight_names[0])  # without torch's __getattr__, which takes 0.6 us
            weight = getattr(self, self.weight_names[0]) if weight is None else weight
            bias = getattr(self, self.bias_names[0]) if self.use_bias else None
        else:
            parts = tuple([getattr(self, name) for name in self.weight_names])
            weight = join(parts)
            bias = join(tuple([getattr(self, name) for name in self.bias_names])) if self.use_bias else None
        moves = self.sequence_dim and self.sequence_parallel
        if moves:
            inp, residual = [self._sequence_first(t, fp8_output or fp8_grad) for t in (inp, residual)]
        begun = self._begin(inp, (weight,), is_first_microbatch, fp8_output, fp8_grad, residual, parts)
        out = self._compute(begun, inp, weight, None if self.return_bias else bias, residual)
        return self._outputs(out, bias) if moves or self.return_bias or out.__class__ is tuple else out


class Linear(_OneLinear):
    """y[..., N] = x[..., K] @ weight[N, K]^T + bias[N]; a drop-in for torch.nn.Linear and Transformer Engine's Linear.

    parallel_mode "column" splits N, "row" splits K over tp_group. With sequence_parallel the activations on the outer
    side are split along their dimension sequence_dim (default the first): a column-parallel linear gathers its input,
    a row-parallel one scatters its sum.

    params_dtype: bf16, fp16 or fp32 (default: torch's). device: "cuda" and None mean an open device context's, else the
    GPU, or the CPU where there is none; "meta" puts initialisation off until reset_parameters().
    return_bias: the bias is returned and not added.
    init_method(tensor) fills the weight (default: normal, 0.023), under get_rng_state_tracker's state rng_tracker_name.
    parameters_split: names (or name -> rows) under which weight and bias are registered in parts.
    fuse_wgrad_accumulation: weight.main_grad += dw; the first one after is_first_microbatch=True replaces it.
    delay_wgrad_compute: dw waits for backward_dw().
    save_original_input: keep x itself for backward instead of its quantized copy.

    Raises ValueError for sizes that tp_size does not divide and for a group of another size, RuntimeError for
    ub_* flags before te.initialize_ub (docs/how-to/overlap.md).
    """

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: dist.ProcessGroup | None = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, rng_tracker_name: str | None = None,
        init_method: Init | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None, parameters_split: Split = None,
        device: torch.device | str | None = "cuda", ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        save_original_input: bool = False, name: str | None = None, *, sequence_dim: int = 0,
    ) -> None:  # fmt: skip
        given = locals()
        super().__init__(given)
        self.save_original_input = save_original_input

    _compute = staticmethod(run_linear)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, mode={self.parallel_mode}, tp_size={self.tp_size}"
