"""te.LayerNorm, te.RMSNorm, and the norm's parameters inside LayerNormLinear and LayerNormMLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from te_lite.arguments import flag, remedy
from te_lite.functional.layer import unsafe_view
from te_lite.functional.norm import NormFunction, NormSpec
from te_lite.modules.checks import amp_dtype, check_dtype
from te_lite.modules.weights import ParamSpec, StatelessModule, check_param, default_device
from te_lite.ops.source import DTYPES


def norm_spec(normalization: str, eps: float, zero_centered_gamma: bool) -> NormSpec:
    if normalization not in tuple(NORMS):  # whatever was given, also what has no hash
        near = remedy("normalization", normalization, NORMS)
        raise ValueError(f"normalization={normalization!r}: must be one of {tuple(NORMS)}; {near}")
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"eps={eps!r}: must be finite and >= 0; 1e-5 is usual")
    return NormSpec(float(eps), normalization == "RMSNorm", bool(zero_centered_gamma))


def norm_params(spec: NormSpec, shape: tuple[int, ...], sequence_parallel: bool | None) -> dict[str, ParamSpec]:
    """weight of that shape and, for LayerNorm, bias; identity at the start."""
    ones_or_zeros = nn.init.zeros_ if spec.zero_centered else nn.init.ones_
    params = {"weight": ParamSpec(shape, ones_or_zeros, sequence_parallel=sequence_parallel)}
    if not spec.rms:
        params["bias"] = ParamSpec(shape, nn.init.zeros_, sequence_parallel=sequence_parallel)
    return params


def add_norm(module: Any, features: int, given: Mapping[str, Any]) -> None:
    """The norm in front of a linear in `module`. given: the arguments of the module's constructor, by name."""
    for option in ("normalization", "eps", "zero_centered_gamma", "return_layernorm_output"):
        setattr(module, option, given[option])
    module.return_layernorm_output_gathered = given["return_layernorm_output_gathered"] and module.sequence_parallel
    module._norm, module._layer = norm_spec(module.normalization, module.eps, module.zero_centered_gamma), None
    specs = norm_params(module._norm, (features,), module.sequence_parallel or None)
    module._add_params({f"layer_norm_{key}": spec for key, spec in specs.items()})
    if module._norm.rms:
        module.layer_norm_bias = None


def layer_of(module: Any, make: Callable[..., Any], *more: Any) -> Any:
    """make(spec, *more) of the norm that add_norm gave, with the outputs that the module's attributes ask for now; the
    same object as long as these are the same."""
    layer, returned, gathered = module._layer, module.return_layernorm_output, module.return_layernorm_output_gathered
    if layer is None or layer.spec.returned != returned or layer.spec.gathered != gathered:
        module._norm = replace(module._norm, returned=returned, gathered=gathered)
        layer = module._layer = make(module._norm, *more)
    return layer


class _Norm(StatelessModule):
    normalization: str
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, normalized_shape: int | tuple[int, ...] | None = None, eps: float = 1e-5,
        sequence_parallel: bool | None = None, params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False, hidden_size: int | None = None, device: Any = None,
    ) -> None:  # fmt: skip
        owner = type(self).__name__
        super().__init__()
        size = normalized_shape if normalized_shape is not None else hidden_size
        shape: tuple[Any, ...] = tuple(size) if isinstance(size, (tuple, list, torch.Size)) else (size,)
        if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
            raise ValueError(f"normalized_shape={normalized_shape!r}: must be a positive size or a tuple of them")
        check_dtype(owner, params_dtype)
        self.normalized_shape, self.eps, self.zero_centered_gamma = shape, eps, zero_centered_gamma
        self._spec = norm_spec(self.normalization, eps, flag(owner, "zero_centered_gamma", zero_centered_gamma))
        self._device, self.params_dtype = default_device(device), params_dtype or torch.get_default_dtype()
        self.sequence_parallel = flag(owner, "sequence_parallel", sequence_parallel)
        self._add_params(norm_params(self._spec, shape, self.sequence_parallel))
        if self._spec.rms:
            self.register_parameter("bias", None)

    def forward(self, inp: Tensor) -> Tensor:
        """x [..., *normalized_shape] -> the same shape, in x's dtype (the autocast dtype under torch.amp)."""
        owner = type(self).__name__
        if not isinstance(inp, Tensor):
            raise TypeError(f"{owner} got an input of type {type(inp).__name__}: must be a torch.Tensor; make it one")
        last = tuple(inp.shape[-len(self.normalized_shape) :])
        if last != self.normalized_shape:
            raise ValueError(f"{owner} got an input of shape {tuple(inp.shape)}: must end in {self.normalized_shape}")
        if inp.dtype not in DTYPES:
            raise TypeError(f"{owner} got an input of {inp.dtype}: must be bfloat16, float16 or float32; cast it first")
        params = self.weight, self.bias
        for name, param in zip(self._specs, params, strict=False):
            if param is not None and (param.device != inp.device or not param.is_contiguous()):
                check_param(owner, self._specs[name], name, param, inp.device, True)
        amp = amp_dtype(inp)
        x = inp if amp is None else inp.to(amp)
        if len(last) > 1:
            params = params[0].flatten(), None if params[1] is None else params[1].flatten()
        args = (self._spec, x.flatten(-len(last)), *params)
        y = NormFunction.apply(*args) if torch.is_grad_enabled() else NormFunction.forward(None, *args)
        return y if len(last) == 1 else unsafe_view(y, inp.shape)

    def _load_from_state_dict(self, state_dict, prefix, *others) -> None:
        for name in self._specs:  # older versions kept them flat
            kept, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(kept, Tensor) and kept.dim() == 1 < own.dim() and kept.numel() == own.numel():
                state_dict[prefix + name] = kept.view(own.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimensions (Ba et al., arXiv 1607.06450).

    zero_centered_gamma: (1 + weight). sequence_parallel marks the parameters for reduce_sequence_parallel_grads.
    """

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimensions (Zhang and Sennrich, arXiv 1910.07467)."""

    normalization = "RMSNorm"


NORMS: dict[str, type[_Norm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
