"""The cases of one process: every module with every recipe, and what each can be asked for beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from case import OPTIONS, PER_TENSOR, RECIPES, STATEFUL, Case, Sizes

ACTIVATIONS = ("gelu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu")
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP")
EVERY = (*RECIPES, *OPTIONS)
# With quantized parameters: of the recipes whose GEMMs all read a weight through one quantizer.
WITH_PARAMETERS = ("delayed", "current", "blockwise", "rowwise", "mxfp8")
CACHED = ({"is_first_microbatch": True}, {"is_first_microbatch": False}, {"is_first_microbatch": False})
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# On a GPU also at sizes where GEMMs fill it, tiles are many and operands ragged.
LARGE = Sizes(2048, 3072, 4096)
LARGE_TOKENS = (4096,)
UNEVEN, UNEVEN_TOKENS = Sizes(1040, 1552, 2064), (3, 683)

# label -> options of Case that hold for every module and every recipe.
GENERAL: dict[str, dict[str, Any]] = {
    "": {},
    "ragged, residual": {"tokens": (37,), "residual": True, "build": {"bias": False}},
    "3-D": {"tokens": (3, 21), "build": {"return_bias": True}},
    "one token": {"tokens": (1,), "residual": True},
    "vector": {"tokens": ()},
    "no tokens": {"tokens": (0,), "steps": 2},
    "cached weights": {"forward": CACHED},
    "cached weights, pipelined": {"forward": CACHED, "pipelined": True, "tokens": (23,)},
    "two microbatches": {"forward": ({}, {}), "pipelined": True},
    "main_grad": {"main_grad": FP32, "build": {"fuse_wgrad_accumulation": True}, "forward": ({}, {})},
    "main_grad in bf16, ragged": {
        "main_grad": BF16,
        "build": {"fuse_wgrad_accumulation": True, "bias": False},
        "tokens": (41,),
    },
    "late wgrad": {"build": {"delay_wgrad_compute": True}, "forward": ({}, {}), "pipelined": True},
    "late wgrad, main_grad, cached": {
        "main_grad": FP32,
        "build": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
        "forward": CACHED,
    },
    "checkpoint": {"run": "te_checkpoint", "forward": ({}, {}), "pipelined": True},
    "reentrant checkpoint": {"run": "te_checkpoint_reentrant", "residual": True},
    "torch's checkpoint": {"run": "torch_checkpoint"},
    "checkpoint of cached weights": {"run": "te_checkpoint", "forward": CACHED},
    "amp": {"run": "amp", "dtype": FP32, "tokens": (40,)},
    "amp, input in bf16": {"run": "amp", "dtype": FP32, "input_dtype": BF16, "build": {"return_bias": True}},
    "no_grad": {"run": "no_grad", "forward": CACHED},
    "frozen x": {"frozen": ("x",)},
    "frozen weights": {"frozen": ("weight",)},
    "frozen weights and biases": {"frozen": ("weight", "bias"), "residual": True},
    "only x and residual": {"frozen": ("weight", "bias", "norm"), "residual": True, "tokens": (37,)},
    "only weights": {"frozen": ("x", "bias", "norm"), "main_grad": FP32, "build": {"fuse_wgrad_accumulation": True}},
    "only biases": {"frozen": ("x", "weight")},
    "frozen all": {"frozen": ("x", "weight", "bias", "norm")},
    "twice in a pass": {"run": "twice"},
    "high precision inside": {"run": "high_precision_inside"},
    "fp32": {"dtype": FP32, "tokens": (40,)},
    "fp16": {"dtype": FP16},
    "inf and nan": {"special": True, "tokens": (50,), "steps": 2},
}
# What the modules with a norm can be asked for beside.
NORMED: dict[str, dict[str, Any]] = {
    "RMSNorm": {"build": {"normalization": "RMSNorm"}},
    "RMSNorm, zero-centred, ragged": {
        "tokens": (29,),
        "build": {"normalization": "RMSNorm", "zero_centered_gamma": True, "eps": 1e-3},
    },
    "zero-centred": {"build": {"zero_centered_gamma": True}},
    "norm returned": {"build": {"return_layernorm_output": True}, "forward": ({}, {})},
    "norm returned, RMSNorm, bias returned": {
        "build": {"return_layernorm_output": True, "normalization": "RMSNorm", "return_bias": True},
        "tokens": (2, 19),
    },
    "frozen norm": {"frozen": ("layer_norm",)},
    "only the norm": {"frozen": ("x", "fc1_", "fc2_", "residual"), "residual": True},
}
SPLIT = {
    "split in two": {"build": {"parameters_split": ("q", "k")}, "forward": CACHED},
    "split in three, ragged": {"build": {"parameters_split": {"q": 32, "k": 32, "v": 16}, "bias": False}},
}
# Recipes that have a quantizer for outputs, and bf16, where the output is a plain tensor.
QUANTIZED_RESULTS = {
    "fp8_output": {"forward": ({"fp8_output": True},), "tokens": (37,)},
    "fp8_grad": {"forward": ({"fp8_grad": True},)},
    "fp8_output, fp8_grad, cached": {"forward": tuple({**f, "fp8_output": True, "fp8_grad": True} for f in CACHED)},
}
MLP = {
    "checkpoint=True": {"build": {"checkpoint": True, "activation": "swiglu"}, "forward": ({}, {}), "pipelined": True},
    "checkpoint=True, main_grad": {
        "build": {"checkpoint": True, "fuse_wgrad_accumulation": True, "return_layernorm_output": True},
        "main_grad": FP32,
    },
    "frozen fc1": {"frozen": ("fc1",)},
    "frozen fc2": {"frozen": ("fc2",), "build": {"activation": "swiglu"}},
    "frozen fc1 and x": {"frozen": ("fc1", "layer_norm", "x")},
}


def _split(options: dict[str, Any], recipe: str) -> dict[str, Any]:
    """`options` with parts that add up to the features of this recipe's cases."""
    total = Case("Linear", recipe).features.n
    split = options["build"]["parameters_split"]
    if isinstance(split, dict):
        split = {"q": total - 48, "k": 32, "v": 16}
    return {**options, "build": {**options["build"], "parameters_split": split}}


def module_cases(kind: str, recipe: str) -> Iterator[Case]:
    """All cases of a module that holds linears under a recipe."""
    options = dict(GENERAL)
    if kind != "Linear":
        options |= NORMED
    if kind == "LayerNormMLP":
        options |= MLP
        options |= {name: {"build": {"activation": name}} for name in ACTIVATIONS}
        for name in ("gelu", "swiglu"):
            options[f"{name}, no bias"] = {"build": {"activation": name, "bias": False}, "tokens": (37,)}
    else:
        options |= {label: _split(given, recipe) for label, given in SPLIT.items()}
        if recipe in ("bf16", *PER_TENSOR):
            options |= QUANTIZED_RESULTS
    if kind == "Linear" and recipe not in STATEFUL:
        kept = {"save_original_input": True}
        options["input kept"] = {"build": kept}
        options["input kept, ragged, late"] = {"build": kept | {"delay_wgrad_compute": True}, "tokens": (37,)}
    if recipe in WITH_PARAMETERS:
        options["quantized parameters"] = {"initial": recipe}
        options["quantized parameters, cached, ragged"] = {"initial": recipe, "forward": CACHED, "tokens": (37,)}
        options["quantized parameters, main_grad"] = {
            "initial": recipe,
            "main_grad": FP32,
            "build": {"fuse_wgrad_accumulation": True},
        }
        options["quantized parameters of another format"] = {"initial": "current" if recipe != "current" else "mxfp8"}
    for label, given in options.items():
        yield Case(kind, recipe, label, **given)


def large_cases(kind: str, recipe: str) -> Iterator[Case]:
    """Sizes for a GPU."""
    build = {"bias": False, **({} if kind == "Linear" else {"normalization": "RMSNorm"})}
    if kind == "LayerNormMLP":
        build["activation"] = "swiglu"
    yield Case(kind, recipe, "large", build, LARGE_TOKENS, LARGE, steps=2, residual=True)
    main = {"fuse_wgrad_accumulation": True}
    yield Case(kind, recipe, "large, main_grad", main, LARGE_TOKENS, LARGE, steps=2, main_grad=FP32)
    yield Case(kind, recipe, "uneven", {}, UNEVEN_TOKENS, UNEVEN, steps=2, forward=CACHED)


def norm_cases() -> Iterator[Case]:
    """The norms alone; recipes do not reach them."""
    for kind in ("LayerNorm", "RMSNorm"):
        for dtype in (BF16, FP16, FP32):
            for tokens in ((48,), (37,), (3, 21), (1,), (0,), (300,)):
                for centred in (False, True):
                    label = f"{dtype} {tokens} {'zero-centred' if centred else ''}"
                    build = {"zero_centered_gamma": centred}
                    yield Case(kind, "bf16", label, build, tokens, Sizes(160, 0, 0), dtype)
        yield Case(kind, "bf16", "amp", {}, (40,), Sizes(64, 0, 0), FP32, run="amp")
        yield Case(kind, "bf16", "frozen x", {}, (40,), Sizes(64, 0, 0), frozen=("x",))
        yield Case(kind, "bf16", "frozen", {}, (40,), Sizes(64, 0, 0), frozen=("weight", "bias"))
        yield Case(kind, "bf16", "no_grad", {}, (40,), Sizes(64, 0, 0), run="no_grad")
        yield Case(kind, "bf16", "inf and nan", {}, (40,), Sizes(64, 0, 0), special=True)
        yield Case(kind, "bf16", "wide", {}, (19,), Sizes(5136, 0, 0))


# On a GPU each kernel is compiled for each activation and dtype: these recipes go through all of them.
COMPILED_OFTEN = ("bf16", "delayed", "mxfp8")


def compiled_often(case: Case) -> bool:
    """Whether a GPU leaves the case out: compiling its kernels takes long, and other cases show the same."""
    unusual = case.build.get("activation") not in (None, "gelu", "swiglu", "srelu") or case.label == "fp16"
    return unusual and case.recipe not in COMPILED_OFTEN


def cases(device: torch.device) -> Iterator[Case]:
    """Everything that one process runs."""
    yield from norm_cases()
    for recipe in EVERY:
        for kind in KINDS:
            found = module_cases(kind, recipe)
            if device.type == "cuda":
                yield from (case for case in found if not compiled_often(case))
                yield from large_cases(kind, recipe)
            else:
                yield from found
