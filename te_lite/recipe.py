"""Recipes: frozen values that say how the operands of a linear's three GEMMs are quantized.

A recipe holds configuration only. `factory` names the function in quantize/ that turns it into quantizers
("module:function", resolved when a plan is built), so that this file imports nothing of te_lite and any stratum may
import it. Field names, order and defaults are Transformer Engine's.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import ClassVar, NamedTuple

import torch


class FormatRange(NamedTuple):
    """Largest finite magnitude of the forward and of the backward type."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """fp8 formats: E4M3 and E5M2 everywhere, or HYBRID: E4M3 forward, E5M2 for gradients."""

    E4M3 = FormatRange(448.0, 448.0)
    E5M2 = FormatRange(57344.0, 57344.0)
    HYBRID = FormatRange(448.0, 57344.0)

    @property
    def forward_dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self is Format.E5M2 else torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self is Format.E4M3 else torch.float8_e5m2


@dataclass(frozen=True)
class QParams:
    """How one operand is scaled: powers of two only, and the smallest amax that is believed."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.amax_epsilon < float("inf"):
            raise ValueError(f"amax_epsilon={self.amax_epsilon!r}: must be finite and >= 0; pass 0.0 for none")


@dataclass(frozen=True)
class MMParams:
    """How one GEMM accumulates: split (promoted to fp32 as it goes) or fast."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes."""

    name: ClassVar[str]
    factory: ClassVar[str]
    summary: ClassVar[str]

    def delayed(self) -> bool:
        return self.name == "delayed"

    def float8_current_scaling(self) -> bool:
        return self.name == "current"

    def float8_per_tensor_scaling(self) -> bool:
        return self.name in ("delayed", "current")

    def mxfp8(self) -> bool:
        return self.name == "mxfp8"

    def float8_block_scaling(self) -> bool:
        return self.name == "blockwise"

    def custom(self) -> bool:
        return self.name == "custom"

    @property
    def is_fp8(self) -> bool:
        return self.name != "bf16"


def _refuse_types(recipe: Recipe) -> None:
    """Fields whose default is a bool, an int or a string hold nothing else (True is no length, "no" is no bool)."""
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        if isinstance(item.default, (bool, int, str)) and type(value) is not type(item.default):
            raise TypeError(
                f"{type(recipe).__name__}({item.name}={value!r}): must be {type(item.default).__name__}; the default "
                f"is {item.default!r}"
            )


def _refuse_attention(recipe: Recipe) -> None:
    for flag in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, flag):
            raise ValueError(
                f"{type(recipe).__name__}({flag}=True): te_lite has no fp8 attention; leave {flag}=False and run "
                "attention in bf16 between the modules"
            )


def _refuse_format(recipe: Recipe, allowed: tuple[Format, ...]) -> None:
    if recipe.fp8_format not in allowed:
        names = ", ".join(f"Format.{f.name}" for f in allowed)
        raise ValueError(
            f"{type(recipe).__name__}(fp8_format={recipe.fp8_format!r}): must be one of {names}: E5M2 has too few "
            "mantissa bits for activations and weights"
        )


@dataclass(frozen=True)
class HighPrecision(Recipe):
    """No quantization: every GEMM in the activations' own dtype."""

    name: ClassVar[str] = "bf16"
    factory: ClassVar[str] = "te_lite.quantize.identity:operands"
    summary: ClassVar[str] = "no quantization; any device; the baseline"


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Per-tensor scales from the amax of earlier steps: scale = fp8_max * 2^-margin / amax(history).

    amax_history_len: steps remembered. amax_compute_algo: "max" of the history or "most_recent".
    reduce_amax: take the maximum over the amax group (each module's tensor-parallel group unless autocast names one).
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    name: ClassVar[str] = "delayed"
    factory: ClassVar[str] = "te_lite.quantize.per_tensor:delayed_operands"
    summary: ClassVar[str] = "per-tensor scales from past steps; no extra pass over the data; keeps a history"

    def __post_init__(self) -> None:
        _refuse_types(self)
        _refuse_format(self, (Format.E4M3, Format.HYBRID))
        _refuse_attention(self)
        if not -64 <= self.margin <= 64:
            raise ValueError(
                f"margin={self.margin!r}: must be an integer within [-64, 64] (a power of two); 0 is usual"
            )
        length = self.amax_history_len
        if not 1 <= length <= 4096:
            raise ValueError(f"amax_history_len={length!r}: must be an integer within [1, 4096]; 1024 is usual")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo={self.amax_compute_algo!r}: must be 'max' or 'most_recent' (callables are not "
                "supported: the update is one kernel for all modules)"
            )
        if self.scaling_factor_compute_algo is not None:
            raise ValueError(
                "scaling_factor_compute_algo: only None (fp8_max * 2^-margin / amax) is supported; use margin instead"
            )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the tensor itself: scale = fp8_max / amax(tensor); stateless."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = field(default=MMParams(use_split_accumulator=False))
    fp8_gemm_dgrad: MMParams = field(default=MMParams(use_split_accumulator=True))
    fp8_gemm_wgrad: MMParams = field(default=MMParams(use_split_accumulator=True))
    fp8_dpa: bool = False
    fp8_mha: bool = False
    name: ClassVar[str] = "current"
    factory: ClassVar[str] = "te_lite.quantize.per_tensor:current_operands"
    summary: ClassVar[str] = "per-tensor scales from the tensor itself; one more read of the data; stateless"

    def __post_init__(self) -> None:
        _refuse_types(self)
        _refuse_format(self, (Format.E4M3, Format.HYBRID))
        _refuse_attention(self)
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, QParams(power_2_scale=self.use_power_2_scales))
            elif not isinstance(getattr(self, name), QParams):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be te.recipe.QParams(...) or None")
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not isinstance(getattr(self, name), MMParams):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be te.recipe.MMParams(...)")


_BY_NAME: dict[str, type[Recipe]] = {
    "bf16": HighPrecision,
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "tensorwise": Float8CurrentScaling,
}


def from_name(name: str) -> Recipe:
    """The recipe of that name with its defaults, e.g. from_name("delayed")."""
    if name not in _BY_NAME:
        near = difflib.get_close_matches(str(name), _BY_NAME, n=2) or sorted(_BY_NAME)
        raise ValueError(f"recipe {name!r} is not known; nearest: {', '.join(near)}; recipe.available() lists all")
    return _BY_NAME[name]()


def available() -> dict[str, str]:
    """Name -> one line on what the recipe is for."""
    return {name: cls.summary for name, cls in _BY_NAME.items()}


def check_recipe_support(recipe: Recipe | str, device: torch.device | str | None = None) -> tuple[bool, str]:
    """(True, "") when `recipe` runs on `device` (default: the current GPU, else the CPU), else (False, reason)."""
    recipe = from_name(recipe) if isinstance(recipe, str) else recipe
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu" or not recipe.is_fp8:
        return True, ""
    if device.type != "cuda":
        return False, f"recipe {recipe.name!r} needs a CUDA device or the CPU, not {device.type!r}"
    if not torch.cuda.is_available():
        return False, f"recipe {recipe.name!r} on {device}: torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        have = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        return False, f"recipe {recipe.name!r} needs fp8 tensor cores (compute capability 8.9 or more); {have}"
    return True, ""
