"""What this machine can do, under Transformer Engine's names."""

from __future__ import annotations

from typing import Any

import torch

from te_lite.compat.alias import recipes
from te_lite.recipe import Recipe
from te_lite.recipe import check_recipe_support as _check_recipe


def check_fp8_support() -> tuple[bool, str]:
    """(True, "") where fp8 with one scale a tensor runs, else (False, why not). The CPU runs all recipes."""
    return _check_recipe("current")


def check_mxfp8_support() -> tuple[bool, str]:
    """(True, "") where MXFP8 runs, else (False, why not)."""
    return _check_recipe("mxfp8")


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """(True, "") where 1x128 and 128x128 blocks run, else (False, why not)."""
    return _check_recipe("blockwise")


def check_nvfp4_support() -> tuple[bool, str]:
    return False, "te_lite has no fp4"


def _answer(check: Any, return_reason: bool) -> Any:
    supported, reason = check()
    return (supported, reason) if return_reason else supported


def is_fp8_available(return_reason: bool = False) -> Any:
    return _answer(check_fp8_support, return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Any:
    return _answer(check_mxfp8_support, return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Any:
    return _answer(check_fp8_block_scaling_support, return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Any:
    return _answer(check_nvfp4_support, return_reason)


def is_bf16_available(return_reason: bool = False) -> Any:
    """The CPU and GPUs of compute capability 8.0 or higher."""
    good = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)
    reason = "" if good else "bf16 needs compute capability 8.0 or higher"
    return (good, reason) if return_reason else good


def get_device_compute_capability() -> tuple[int, int]:
    """The compute capability of the current CUDA device; raises where there is none."""
    return torch.cuda.get_device_capability()


def get_default_recipe() -> Recipe:
    """DelayedScaling(), what an autocast without a recipe follows."""
    return recipes.DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def check_recipe_support(recipe: Recipe) -> None:
    """RuntimeError with the reason where `recipe` does not run on this machine."""
    supported, reason = _check_recipe(recipe)
    if not supported:
        raise RuntimeError(f"{recipe.name!r} does not run here: {reason}")


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The fp8 dtype of activations and weights, or of gradients; a member of DType. AttributeError for recipes without
    a format."""
    format: Any = fp8_recipe.fp8_format  # type: ignore[attr-defined]
    return format.forward_dtype if fprop_tensor else format.backward_dtype


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """The largest number of that dtype."""
    return torch.finfo(get_fp8_torch_dtype(fp8_recipe, fprop_tensor)).max


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The number of which a group's rows are a multiple after Fp8Padding: 32 under mxfp8, else 16."""
    return 32 if recipe.mxfp8() else 16
