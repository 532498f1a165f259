"""Recipes: frozen values that say how the operands of a linear's three GEMMs are quantized.

A recipe holds configuration only. `factory` names the function that turns it into quantizers ("module:function",
resolved when a plan is built), so that this file imports nothing of quantize/ and any stratum may import it.
Field names, order and defaults are Transformer Engine's; what it has no field for is keyword-only.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch

from te_lite.arguments import checked_device, remedy
from te_lite.recipe_base import Format, MMParams, QParams, Recipe


@dataclass(frozen=True)
class HighPrecision(Recipe):
    """No quantization: every GEMM in the activations' own dtype."""

    name: ClassVar[str] = "bf16"
    factory: ClassVar[str] = "te_lite.quantize.identity:operands"
    summary: ClassVar[str] = "no quantization, the baseline"
    memory: ClassVar[str] = "x 2 (4 in fp32), w 0"
    token_multiple: ClassVar[int] = 1
    feature_multiple: ClassVar[int] = 1


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
    summary: ClassVar[str] = "one scale a tensor from past steps: no extra pass over the data, keeps a history"

    def _check(self) -> None:
        for name, least, most, usual in (("margin", -64, 64, 0), ("amax_history_len", 1, 4096, 1024)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}={value!r}: must be an integer within [{least}, {most}]; {usual} is usual")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo={self.amax_compute_algo!r}: must be 'max' or 'most_recent' (callables are not "
                "supported: the update is one kernel for all modules)"
            )
        if self.scaling_factor_compute_algo is not None:
            raise ValueError(
                "scaling_factor_compute_algo: only None (fp8_max * 2^-margin / amax) is supported; use margin instead"
            )


_OPEN: Any = None  # for fields that _check settles: nobody reads None there


@dataclass(frozen=True)
class _PerOperand(Recipe):
    """A recipe that may scale each operand in its own way."""

    fp8_quant_fwd_inp: QParams = field(default=_OPEN, kw_only=True)
    fp8_quant_fwd_weight: QParams = field(default=_OPEN, kw_only=True)
    fp8_quant_bwd_grad: QParams = field(default=_OPEN, kw_only=True)

    def _fill_in(self, powers_of_2: bool) -> None:
        usual = QParams(power_2_scale=powers_of_2)
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
            elif not isinstance(getattr(self, name), QParams):
                raise TypeError(f"{name}={getattr(self, name)!r}: must be te.recipe.QParams(...) or None")


@dataclass(frozen=True)
class Float8CurrentScaling(_PerOperand):
    """Per-tensor scales from the tensor itself: scale = fp8_max / amax(tensor).

    use_power_2_scales: for the QParams that are not given. per_shard_scales: under sequence parallelism each rank
    scales its shard by itself and the scale travels with it, so that no amax reduction stands before a gather.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    per_shard_scales: bool = field(default=False, kw_only=True)
    name: ClassVar[str] = "current"
    factory: ClassVar[str] = "te_lite.quantize.per_tensor:current_operands"
    summary: ClassVar[str] = "one scale a tensor from the tensor itself: one more read of the data, stateless"

    def _check(self) -> None:
        self._fill_in(self.use_power_2_scales)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """fp8 in blocks of 1x32 along each GEMM's inner dimension, E8M0 scales (OCP Microscaling Formats v1.0).

    HYBRID: dy is E5M2."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    name: ClassVar[str] = "mxfp8"
    factory: ClassVar[str] = "te_lite.quantize.mxfp8:operands"
    summary: ClassVar[str] = "a power of two for every 32 values, multiplied in bf16: finest scales, stateless"
    memory: ClassVar[str] = "x 1.03, w 0 (cached 2.06)"
    token_multiple: ClassVar[int] = 32

    def _check(self) -> None:
        if self.margin != 0:
            raise ValueError(
                f"margin={self.margin}: must be 0, the MX specification fixes the scale by a block's amax; leave it out"
            )


@dataclass(frozen=True)
class Float8BlockScaling(_PerOperand):
    """fp8 with a scale for 1x128 values of x and dy along each GEMM's inner dimension, and for 128x128 of w.

    use_f32_scales: fp32 scales instead of powers of two, for the QParams that are not given. HYBRID: dy is E5M2,
    which no GEMM takes in blocks: dgrad and wgrad are products of dequantized operands in the activations' dtype.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    name: ClassVar[str] = "blockwise"
    factory: ClassVar[str] = "te_lite.quantize.blockwise:operands"
    summary: ClassVar[str] = "a scale for 1x128 of x and dy and for 128x128 of w: keeps outliers apart, stateless"
    memory: ClassVar[str] = "x 1.03, w 0 (cached 2)"
    token_multiple: ClassVar[int] = 128
    capability: ClassVar[tuple[int, int]] = (9, 0)
    below: ClassVar[tuple[int, int]] = (10, 0)  # cuBLAS has these scales on Hopper only
    cuda: ClassVar[tuple[int, int]] = (12, 9)

    def _check(self) -> None:
        self._fill_in(not self.use_f32_scales)
        for name, only in (("x_block_scaling_dim", 1), ("w_block_scaling_dim", 2), ("grad_block_scaling_dim", 1)):
            if getattr(self, name) != only:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be {only}; blocks are 1x128 for x and dy and 128x128 for w"
                )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(
                    f"{name}=MMParams(use_split_accumulator=False): must be True, each block's sum is scaled in fp32; "
                    "leave it out"
                )


@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """E4M3 with a scale for each row of x and each row of w; every GEMM has scales along its own inner dimension.

    use_power_2_scales: powers of two only. high_precision_wgrad: dgrad takes w with one scale a tensor, and wgrad
    runs in the activations' dtype (torchao's "rowwise_with_gw_hp").
    """

    use_power_2_scales: bool = True
    high_precision_wgrad: bool = False
    name: ClassVar[str] = "rowwise"
    factory: ClassVar[str] = "te_lite.quantize.rowwise:operands"
    summary: ClassVar[str] = "a scale a row: keeps tokens with outliers apart, stateless"
    capability: ClassVar[tuple[int, int]] = (9, 0)
    below: ClassVar[tuple[int, int]] = (10, 0)  # elsewhere torch has no fp32 result for such scales
    cuda: ClassVar[tuple[int, int]] = (12, 9)

    def _check(self) -> None:
        if self.high_precision_wgrad:  # an instance's own values hide the class's
            object.__setattr__(self, "name", "rowwise_with_gw_hp")
            object.__setattr__(self, "summary", "as rowwise, with weight gradients in high precision")
            object.__setattr__(self, "memory", "x 2 (4 in fp32), w 0 (cached 2)")


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Quantizers of your own (docs/how-to/write-a-quantizer.md).

    qfactory(role) -> Quantizer, or None for high precision; asked once for each operand of each GEMM when a module
    builds its plan. role: te_lite.quantize.custom.Role. Recipes are equal when their qfactory is: define it once, not
    as a new lambda at each step, or plans are built at each step. stateless: the quantizers keep nothing from call to
    call, so that torch's checkpoints may compute a call again outside of its autocast.
    """

    qfactory: Callable[[Any], Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False
    stateless: bool = field(default=False, kw_only=True)
    name: ClassVar[str] = "custom"
    factory: ClassVar[str] = "te_lite.quantize.custom:operands"
    summary: ClassVar[str] = "quantizers from a factory of your own"
    memory: ClassVar[str] = "what the quantizers keep"
    capability: ClassVar[tuple[int, int]] = (8, 0)  # of the kernels; a format's own GEMM may need more

    def _check(self) -> None:
        if not callable(self.qfactory):
            raise TypeError(
                f"CustomRecipe(qfactory={self.qfactory!r}): must be a function qfactory(role) -> Quantizer or None; "
                "pass the function itself"
            )


# A recipe, or "module:class" of one that stands elsewhere, imported when asked for (docs/how-to/write-a-quantizer.md).
_BY_NAME: dict[str, Recipe | str] = {
    "bf16": HighPrecision(),
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "tensorwise": Float8CurrentScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "blockwise": Float8BlockScaling(),
    "rowwise": RowwiseScaling(),
    "rowwise_with_gw_hp": RowwiseScaling(high_precision_wgrad=True),
}


def from_name(name: str) -> Recipe:
    """The recipe of that name with its defaults, e.g. from_name("delayed")."""
    if name not in _BY_NAME:
        near = remedy("recipe", name, _BY_NAME, f"nearest: {', '.join(sorted(_BY_NAME))}")
        raise ValueError(f"recipe {name!r} is not known; {near}; recipe.available() lists all")
    recipe = _BY_NAME[name]
    return resolve_name(recipe)() if isinstance(recipe, str) else recipe


@dataclass(frozen=True)
class RecipeInfo:
    """What a recipe is for and runs on, and the bytes it keeps for backward per element; str() is one line."""

    name: str
    summary: str
    hardware: str
    memory: str

    def __str__(self) -> str:
        return f"{self.name}: {self.summary}; runs on {self.hardware}; bytes kept an element: {self.memory}"


def available() -> dict[str, RecipeInfo]:
    """Name -> what the recipe is for; print the values, one line each."""
    recipes = ((name, from_name(name)) for name in _BY_NAME)
    return {
        name: RecipeInfo(name, r.summary, f"the CPU, or {r.needs}" if r.is_fp8 else "any device", r.memory)
        for name, r in recipes
    }


def as_recipe(recipe: Recipe | str) -> Recipe:
    """`recipe`, or the one of that name. TypeError for anything else."""
    recipe = from_name(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={reprlib.repr(recipe)}: must be a te_lite.recipe object or a name such as 'delayed'")
    return recipe


def check_recipe_support(recipe: Recipe | str, device: torch.device | str | None = None) -> tuple[bool, str]:
    """(True, "") when `recipe` runs on `device` (default: the current GPU, else the CPU), else (False, reason)."""
    recipe = as_recipe(recipe)
    try:
        device = checked_device(device)
    except ValueError as error:
        return False, str(error)
    if device.type == "cpu" or not recipe.is_fp8:
        return True, ""
    if device.type != "cuda":
        return False, f"recipe {recipe.name!r} needs a CUDA device or the CPU, not {device.type!r}"
    needs = f"recipe {recipe.name!r} needs {recipe.needs}"
    have = torch.cuda.get_device_capability(device)
    if have < recipe.capability or (recipe.below is not None and have >= recipe.below):
        return False, f"{needs}; {torch.cuda.get_device_name(device)} has {have[0]}.{have[1]}"
    built = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    if built < recipe.cuda:
        return False, f"{needs}; this torch was built for CUDA {torch.version.cuda}"
    return True, ""


def required_multiple(recipe: Recipe | str, tp_size: int = 1) -> int:
    """The number of tokens of which a multiple needs no padding, over all `tp_size` ranks of sequence parallelism.

    A multiple on each rank: 16 where scales are per tensor or row (and for custom recipes), 32 for mxfp8, 128 for
    blockwise, 1 for bf16. Other numbers of tokens give the same results: they are padded inside. Features are never
    padded: a linear whose features on a rank are not multiples of recipe.feature_multiple runs in high precision, and
    a warning and overlap_report() say so.
    """
    if type(tp_size) is not int or tp_size < 1:
        raise ValueError(f"tp_size={tp_size!r}: must be an integer, at least 1; pass the tensor-parallel group's size")
    return as_recipe(recipe).token_multiple * tp_size
