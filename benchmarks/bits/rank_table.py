"""The cases of several ranks: tensor-parallel modules by every method of userbuffers, and without."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from case import OPTIONS, PER_TENSOR, RECIPES, STATEFUL, Case, Draw, Sizes
from digests import Recorder
from steps import Steps, build, prepare, record_state

import te_lite as te

SIZES = Sizes(128, 256, 192)  # of all ranks
TOKENS = 288  # of a rank, the most that userbuffers hold
# "tensorwise" is another name of "current".
EVERY = (*(name for name in (*RECIPES, *OPTIONS) if name not in ("tensorwise", "delayed_e4m3")),)
LIMIT_S = 120  # of a collective
FP32 = torch.float32
CACHED = ({"is_first_microbatch": True}, {"is_first_microbatch": False})

AG = {"ub_overlap_ag": True, "ub_overlap_rs": True}
BULK = {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
DGRAD = {"ub_overlap_rs_dgrad": True}
SCATTERS = ("proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad")
GATHERS = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")


def by(method: str, *gemms: str, **options: Any) -> dict[str, dict[str, Any]]:
    """ub_cfgs: these GEMMs by that method."""
    return {gemm: {"method": method, **options} for gemm in gemms}


RINGS = by("ring_exchange", *GATHERS)
# method -> (flags of the modules, ub_cfgs); flags None: no sequence parallelism. Userbuffers are made where ub_cfgs are
# given. wgrad of a row-parallel linear is "external" in all of them.
METHODS: dict[str, tuple[dict[str, bool] | None, dict[str, Any] | None]] = {
    "unsharded": (None, None),
    "collective": ({}, None),
    "bulk": (AG | BULK, RINGS | by("pipeline", "proj_fprop", "fc2_fprop")),
    "bulk_dgrad": ({"ub_bulk_dgrad": True}, RINGS),
    "ring_exchange": (AG | DGRAD, RINGS | by("ring_exchange", *SCATTERS)),
    "pipeline": (AG | DGRAD, RINGS | by("pipeline", *SCATTERS)),
    "external": (
        {"ub_overlap_ag": True} | DGRAD,
        RINGS | by("pipeline", *SCATTERS) | by("external", "proj_wgrad", "fc2_wgrad"),
    ),
    "fused": (AG | DGRAD, by("fused", *SCATTERS, *GATHERS)),
    "fused_bulk": (AG | BULK, by("fused", "proj_fprop", "fc2_fprop", *GATHERS)),
    "fused_narrow": (AG | DGRAD, by("fused", *GATHERS) | by("fused", *SCATTERS, fp8_buf=True)),
    "auto": (AG | BULK, by("auto", *SCATTERS, *GATHERS, "qkv_wgrad", "fc1_wgrad", "proj_wgrad", "fc2_wgrad")),
    "auto_dgrad": (AG | DGRAD, by("auto", *SCATTERS, *GATHERS)),
    "defaults": (AG | BULK, {}),
}
# layer -> (class, arguments of its constructor)
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "column": ("Linear", {"parallel_mode": "column", "ub_name": "qkv"}),
    "row": ("Linear", {"parallel_mode": "row", "ub_name": "proj"}),
    "normed": ("LayerNormLinear", {"parallel_mode": "column", "ub_name": "fc1", "normalization": "RMSNorm"}),
    "mlp": ("LayerNormMLP", {"set_parallel_mode": True, "activation": "swiglu"}),
}
# label -> options of Case; tokens are those of a rank.
COMMON: dict[str, dict[str, Any]] = {
    "": {"tokens": (64,)},
    "filled": {"tokens": (256,), "steps": 2, "residual": True},
    "ragged, residual": {"tokens": (7,), "residual": True, "build": {"bias": False}},
    "main_grad, cached": {
        "tokens": (32,),
        "main_grad": FP32,
        "build": {"fuse_wgrad_accumulation": True},
        "forward": CACHED,
    },
    "late wgrad": {"tokens": (48,), "build": {"delay_wgrad_compute": True}, "forward": ({}, {}), "pipelined": True},
}
# With a few methods and recipes only: they meet the schedules in the same way.
SPECIAL: dict[str, dict[str, Any]] = {
    "more than the buffers hold": {"tokens": (TOKENS + 16,), "steps": 2},
    "3-D": {"tokens": (24, 2), "build": {"return_bias": True}},
    "sequence_dim": {"tokens": (3, 24), "build": {"sequence_dim": 1}, "residual": True},
    "checkpoint": {"tokens": (32,), "run": "te_checkpoint", "forward": ({}, {}), "pipelined": True},
    "frozen x": {"tokens": (32,), "frozen": ("x",)},
    "frozen weights": {"tokens": (32,), "frozen": ("weight",), "residual": True},
    "only x": {"tokens": (19,), "frozen": ("weight", "bias", "norm")},
    "amp": {"tokens": (32,), "run": "amp", "dtype": FP32},
    "fp32": {"tokens": (32,), "dtype": FP32, "steps": 2},
    "no_grad": {"tokens": (32,), "run": "no_grad"},
    "pipelined": {"tokens": (32,), "forward": ({}, {}, {}), "pipelined": True},
}
OF_LAYER: dict[str, dict[str, dict[str, Any]]] = {
    "column": {
        "split": {"tokens": (32,), "build": {"parameters_split": ("q", "k")}},
        "input kept": {"tokens": (32,), "build": {"save_original_input": True}},
        "fp8_output, fp8_grad": {"tokens": (32,), "forward": ({"fp8_output": True, "fp8_grad": True},)},
    },
    "row": {"input kept": {"tokens": (33,), "build": {"save_original_input": True}}},
    "normed": {
        "norm returned": {"tokens": (32,), "build": {"return_layernorm_output": True}},
        "norm gathered": {
            "tokens": (17,),
            "build": {"return_layernorm_output": True, "return_layernorm_output_gathered": True},
        },
        "LayerNorm": {"tokens": (32,), "build": {"normalization": "LayerNorm"}},
    },
    "mlp": {
        "norm gathered": {
            "tokens": (32,),
            "build": {"return_layernorm_output": True, "return_layernorm_output_gathered": True},
        },
        "gelu": {"tokens": (40,), "build": {"activation": "gelu", "normalization": "LayerNorm"}},
        "checkpoint=True": {"tokens": (32,), "build": {"checkpoint": True}, "forward": ({}, {}), "pipelined": True},
    },
}
MAIN_METHODS = ("unsharded", "collective", "bulk", "ring_exchange", "pipeline")
SPECIAL_METHODS = ("unsharded", "collective", "bulk", "ring_exchange")
SPECIAL_RECIPES = ("bf16", "delayed", "current", "blockwise")
# On CPU ranks the other methods are rings, or combine what the main ones do.
FEW_RECIPES = ("bf16", "delayed", "current", "mxfp8", "rowwise_with_gw_hp")
FEW = ("", "ragged, residual")


def _possible(label: str, recipe: str) -> bool:
    if label == "input kept":
        return recipe not in STATEFUL
    return not label.startswith("fp8_") or recipe in ("bf16", *PER_TENSOR)


def _options(method: str, layer: str, recipe: str, device: torch.device) -> dict[str, dict[str, Any]]:
    """label -> options of Case, of one layer by one method under one recipe."""
    options = dict(COMMON)
    if method not in MAIN_METHODS and device.type == "cpu":
        options = {label: COMMON[label] for label in FEW} if recipe in FEW_RECIPES else {}
    if method in SPECIAL_METHODS and recipe in SPECIAL_RECIPES:
        options |= {label: given for label, given in (SPECIAL | OF_LAYER[layer]).items() if _possible(label, recipe)}
    return options


def cases(device: torch.device) -> Iterator[Case]:
    """Method by method, so that userbuffers are made once for each."""
    for method, (flags, _) in METHODS.items():
        for layer, (kind, given) in LAYERS.items():
            for recipe in EVERY:
                for label, option in _options(method, layer, recipe, device).items():
                    parallel = {**given, **(flags or {}), "sequence_parallel": flags is not None}
                    made = {"steps": 3 if recipe in STATEFUL else 2, **option}
                    made |= {"build": {**parallel, **option.get("build", {})}, "sizes": SIZES}
                    yield Case(kind, recipe, f"{layer} by {method} {label}".strip(), **made)


def method_of(case: Case) -> str:
    """The method in a case's name."""
    return case.label.split(" by ")[1].split(" ")[0]


def join(device: str) -> tuple[int, torch.device]:
    """This rank's number and device."""
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    backend = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=LIMIT_S))
    return dist.get_rank(), torch.device(device, local) if device == "cuda" else torch.device(device)


def leave() -> None:
    """Ends the world."""
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


class Buffers:
    """Userbuffers of one method after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._method = device, ""

    def of(self, method: str) -> None:
        """Makes those of `method`, unless they are there."""
        if method == self._method:
            return
        self.end()
        configs, size = METHODS[method][1], dist.get_world_size()
        if configs is not None:
            shape = [TOKENS * size, max(SIZES)]
            te.initialize_ub(shape, size, ub_cfgs=configs, tp_group=dist.group.WORLD, device=self._device)
        self._method = method

    def end(self) -> None:
        """Ends what is there: also after a case that raised, which may have left an exchange half done."""
        te.destroy_ub()
        self._method = ""


def agreed(error: Exception | None) -> None:
    """Returns when no rank had an error; raises this rank's where all had one. SystemExit where only some had."""
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, type(error).__name__ if error is not None else None)
    if len(set(said)) > 1:
        raise SystemExit(f"the ranks ended a case with {said}")
    if error is not None:
        raise error


def _shapes(case: Case, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of x and of the output on one rank."""
    mode, sharded = case.build.get("parallel_mode"), case.build["sequence_parallel"]
    along = case.build.get("sequence_dim", 0)
    full = [*case.tokens]
    full[along] *= size
    tokens_in, tokens_out = list(case.tokens) if sharded else full, list(case.tokens) if sharded else full
    k, n = case.features.k, case.width
    if mode == "row":
        tokens_in, k = full, k // size
    elif mode == "column":
        tokens_out, n = full, n // size
    return (*tokens_in, k), (*tokens_out, n)


def run_case(case: Case, recorder: Recorder, device: torch.device, buffers: Buffers) -> None:
    """A case on this rank. An error that all ranks have is raised and leaves the next case new userbuffers."""
    error = None
    buffers.of(method_of(case))
    try:
        _run(case, recorder, dist.get_rank(), device)
    except Exception as raised:  # told to the other ranks first
        error = raised
    try:
        agreed(error)
    except Exception:
        buffers.end()
        raise


def _run(case: Case, recorder: Recorder, rank: int, device: torch.device) -> None:
    """All steps; what the report says of the exchanges is kept as facts."""
    size = dist.get_world_size()
    module = build(case, device, rank, tp_group=dist.group.WORLD, tp_size=size, name=case.name)
    record_state(module, recorder, "initial")
    prepare(case, module, Draw(f"{case.name} parameters", device))  # vectors that ranks share are alike
    # Where ranks hold the same input, they draw the same.
    alike = not case.build["sequence_parallel"] and case.build.get("parallel_mode") != "row"
    seed = case.name if alike else f"{case.name} {rank}"
    steps = Steps(case, module, recorder, device, *_shapes(case, size), seed)
    for step in range(case.steps):
        steps.take(step)
    for row in te.overlap_report():
        if row["module"] == case.name:
            recorder.facts[row["gemm"]] = f"{row['schedule']}, {row['sent']} bytes sent"
