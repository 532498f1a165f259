"""Modules of te_lite built from a reference.Spec, run, and compared with the oracle."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import Closeness, assert_close_to_oracle
from tests import reference
from tests.reference import ALL_ACTIVATIONS, LINEAR, LN_MLP, Quantization, Spec, quantization, stored_in

# Recipes that are not the defaults of a name; the oracle knows them by these.
OPTIONS = {
    "current_per_shard": te.recipe.Float8CurrentScaling(per_shard_scales=True),
    "blockwise_fp32": te.recipe.Float8BlockScaling(use_f32_scales=True),
    "mxfp8_hybrid": te.recipe.MXFP8BlockScaling(fp8_format=te.recipe.Format.HYBRID),
    "blockwise_hybrid": te.recipe.Float8BlockScaling(fp8_format=te.recipe.Format.HYBRID),
    "rowwise_fp32": te.recipe.RowwiseScaling(use_power_2_scales=False),
}
# More than one scale a tensor.
BLOCKED = ("mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp", *OPTIONS)
RECIPES = ("bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")
FP8 = RECIPES[1:]


def with_activations(recipes: Iterable[str]) -> list[Any]:
    """(recipe, activation, device): all pairs on the CPU. On a GPU each pair is compiled, so there all activations with
    two recipes, and two activations with the others."""
    made = []
    for recipe, activation in itertools.product(recipes, ALL_ACTIVATIONS):
        few = recipe in ("bf16", "delayed") or activation in ("gelu", "swiglu")
        made += [pytest.param(recipe, activation, *one.values, marks=one.marks) for one in device_params()[: 1 + few]]
    return made


def under(recipe: str | te.recipe.Recipe | None, **kwargs: Any):
    """The autocast of a recipe, by name (also of OPTIONS) or as a value; "bf16" (or None): no autocast at all."""
    if recipe is None or recipe == "bf16":
        return contextlib.nullcontext()
    value = recipe
    if isinstance(recipe, str):
        value = OPTIONS[recipe] if recipe in OPTIONS else te.recipe.from_name(recipe)
    return te.autocast(enabled=True, recipe=value, **kwargs)


def common_arguments(spec: Spec) -> dict[str, Any]:
    """Constructor arguments that follow from the spec (none for the norms)."""
    args: dict[str, Any] = {"bias": spec.bias}
    if spec.kind != LINEAR:
        args.update(normalization=spec.normalization, zero_centered_gamma=spec.zero_centered, eps=spec.eps)
    if spec.kind == LN_MLP:
        args.update(activation=spec.activation)
        if spec.tp > 1:
            args.update(set_parallel_mode=True)
    elif spec.mode is not None:
        args.update(parallel_mode=spec.mode)
    return args


def build(
    spec: Spec,
    k: int,
    n: int = 0,
    ffn: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    parameters: dict[str, Tensor] | None = None,
    **extra: Any,
) -> torch.nn.Module:
    """The te_lite module of `spec`; `parameters` (already this rank's shards) are copied in."""
    args = {**common_arguments(spec), "params_dtype": dtype, "device": device, **extra}
    if spec.kind == LN_MLP:
        module = te.LayerNormMLP(k, ffn, **args)
    else:
        module = getattr(te, spec.kind)(k, n, **args)
    if parameters is not None:
        load(module, parameters)
    return module


def load(module: torch.nn.Module, parameters: dict[str, Tensor]) -> None:
    """Copies every named parameter; the module's own names must be exactly these."""
    own = dict(module.named_parameters())
    own = {name: p for name, p in own.items() if p.numel()}
    assert set(own) == set(parameters), f"parameters {sorted(own)} are not {sorted(parameters)}"
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value.to(own[name].dtype))


def leaf(t: Tensor, device: str | torch.device = "cpu") -> Tensor:
    """A fresh leaf that asks for a gradient."""
    return t.detach().to(device).clone().requires_grad_()


def step(
    module: torch.nn.Module,
    x: Tensor,
    dy: Tensor | None,
    recipe: str | te.recipe.Recipe | None = "bf16",
    **forward: Any,
) -> dict[str, Tensor]:
    """One forward and backward; {"out", "dx", gradients by parameter name}; gradients start from None."""
    device = next(module.parameters()).device
    module.zero_grad(set_to_none=True)
    x = leaf(x, device)
    with under(recipe):
        out = module(x, **forward)
    result = {"out": out.detach().clone()}
    if dy is not None:
        out.backward(dy.to(device).reshape(out.shape))
        result["dx"] = x.grad
        result.update({k: p.grad for k, p in module.named_parameters() if p.grad is not None})
    return result


# Tensor cores add fp8 products with 14 bits. That noise tips a few values over an fp8 rounding boundary, each by a
# quarter of itself in E5M2, so one realisation says little of how far another may be off: the worst of several does.
REALISATIONS = 6


def _error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).square().sum())


@dataclass
class Oracle:
    """Truth (fp64) and low-precision reference of one module over steps, each with its own quantizer
    state.
    """

    spec: Spec
    parameters: dict[str, Tensor]
    recipe: str = "bf16"
    dtype: torch.dtype = torch.bfloat16
    device: str | torch.device = "cpu"  # where the results come from that will be compared

    def __post_init__(self) -> None:
        self.truth_state = quantization(self.recipe, self.spec)
        self.reference_state = quantization(self.recipe, self.spec)

    def step(self, x: Tensor, dy: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(truth, reference) of one forward and backward; delayed scales move on afterwards."""
        truth = self._run(x, dy, self.truth_state, reference.TRUTH)
        cuda = torch.device(self.device).type == "cuda"
        tries = REALISATIONS if self.recipe != "bf16" and cuda else 1
        states = [copy.deepcopy(self.reference_state) for _ in range(tries - 1)] + [self.reference_state]
        # The first adds exactly, as the CPU does.
        lows = [self._run(x, dy, state, stored_in(self.dtype, i > 0)) for i, state in enumerate(states)]
        return truth, {name: max((low[name] for low in lows), key=lambda t: _error(t, truth[name])) for name in truth}

    def _run(self, x: Tensor, dy: Tensor | None, q: Quantization, arith: reference.Arithmetic):
        result = reference.run(self.spec, self.parameters, x, dy, q, arith)
        q.update()
        return result


def compare(label: str, got: dict[str, Tensor], truth: dict, low: dict) -> list[Closeness]:
    """Every tensor of `got` against the oracle; missing gradients are an error."""
    names = [name for name in truth if name != "ln_out" or "ln_out" in got]
    missing = [name for name in names if name not in got]
    assert not missing, f"{label}: no {missing} in {sorted(got)}"
    return [
        assert_close_to_oracle(f"{label} {name}", got[name].reshape(truth[name].shape), truth[name], low[name])
        for name in names
    ]


def check(
    spec: Spec,
    recipe: str = "bf16",
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    m: int | None = None,
    k: int | None = None,
    n: int | None = None,
    ffn: int | None = None,
    steps: int | None = None,
    **extra: Any,
) -> None:
    """Steps of module and oracle compared; delayed scaling two, the second with scales from the first.

    Sizes default to several blocks and a ragged one where a recipe has blocks, and magnitudes are then spread.
    """
    # One shard with a scale of its own is plain current scaling, which spread magnitudes would only underflow.
    blocked = recipe in BLOCKED and not (recipe == "current_per_shard" and spec.tp == 1)
    given, default = (m, k, n, ffn), (144, 176, 272, 160) if blocked else (48, 64, 80, 96)
    m, k, n, ffn = (size if size is not None else usual for size, usual in zip(given, default, strict=True))
    p = reference.make_parameters(spec, k, n, ffn, dtype=dtype)
    # fp16 has not the range. Tensor cores keep 14 bits of the largest of 32 products: of values 2^-18 apart that cancel
    # nothing is left for an fp32 result, so there the CPU's are compared, and CUDA's in bf16.
    fp32_on_cuda = dtype == torch.float32 and torch.device(device).type == "cuda"
    spread = blocked and dtype != torch.float16 and not fp32_on_cuda
    p = reference.spread_parameters(spec, p) if spread else p
    module = build(spec, k, n, ffn, dtype=dtype, device=device, parameters=p, **extra)
    oracle = Oracle(spec, p, recipe, dtype, device)
    width = k if spec.kind == LN_MLP else n
    for i in range(steps or (2 if recipe == "delayed" else 1)):
        x = reference.make_tokens(m, k, seed=10 + i, dtype=dtype)
        dy = reference.make_tokens(m, width, seed=20 + i, dtype=dtype, scale=0.1)
        if spread:
            x, dy = reference.spread_tokens(spec, x, dy)
        got = step(module, x, dy, recipe)
        truth, low = oracle.step(x, dy)
        compare(f"{spec} {recipe} step {i}", got, truth, low)


def through_a_file(state: Any) -> Any:
    """`state` as torch.load reads it with weights_only=True from what torch.save wrote."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def has_scales(state: Tensor) -> bool:
    """Whether an extra state holds scales; else all of it but its header's counts is zero. Norms have an empty one."""
    assert not state.numel() or state[1] or not state[4:].any()
    return bool(state.numel() and state[1])


def delayed_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """{"history_fwd" [L, 3n], "scale_fwd" [3n], "history_bwd" [L, 2n], "scale_bwd" [2n]} of n linears.

    Columns of a linear: input, weight, output forward; grad_output, grad_input backward. Read from the extra state,
    one fp32 tensor [version, L, 3n, 2n, 2 maxima, history_fwd, scale_fwd, history_bwd, scale_bwd, zeros]; {} without
    one.
    """
    flat = module.get_extra_state().detach().cpu()
    if not has_scales(flat):
        return {}
    version, length, nf, nb = (int(v) for v in flat[:4])
    assert version == 1, version
    sizes = (length * nf, nf, length * nb, nb)
    hf, sf, hb, sb = flat[6 : 6 + sum(sizes)].split(sizes)
    views = {"history_fwd": hf.view(length, nf), "scale_fwd": sf, "history_bwd": hb.view(length, nb), "scale_bwd": sb}
    return {name: value.clone() for name, value in views.items()}
