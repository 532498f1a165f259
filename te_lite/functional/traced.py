"""The modules' functions as torch.compile sees them: calls in dynamo's graph, into which the compiler behind it looks.

dynamo writes a call of `linears` into its graph and reads nothing of it. AOTAutograd then runs it on tensors without
data, forward and backward, as eager mode would, and sees te_lite's ops. So it must be a pure function of its arguments.
To be imported where dynamo traces: it imports dynamo, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from te_lite.functional.layer import Call, run_layer
from te_lite.functional.layernorm_linear import NormLinearLayer
from te_lite.functional.layernorm_mlp import MLPLayer
from te_lite.functional.linear import LINEAR
from te_lite.functional.norm import NormSpec
from te_lite.functional.parallel import LocalGemms
from te_lite.functional.plan import LinearPlan, Recompute, WgradSink
from te_lite.kept import sources
from te_lite.ops.activation import Activation
from te_lite.overlap.collective import Collective
from te_lite.overlap.exchange import Place
from te_lite.parallel import TensorParallel
from te_lite.quantize.graph_scales import InGraph
from te_lite.quantize.params import parameter_operand
from te_lite.quantize.quantizer import Site, operands_for
from te_lite.recipe import HighPrecision, Recipe


@dataclass(frozen=True)
class Kind:
    """What a compiled call is, but for its tensors: a value, so that modules that are alike share what is compiled.

    fits: of each linear, whether `recipe` quantizes it. keep_original, recompute: LinearPlan's. norm, activation: None
    where there is none. parts: of the first weight.
    """

    recipe: Recipe
    dtype: torch.dtype
    fits: tuple[bool, ...]
    keep_original: bool
    recompute: Recompute
    norm: NormSpec | None
    activation: Activation | None
    parts: int

    def plan(self, index: int, states: Mapping[str, InGraph], before: LinearPlan | None) -> LinearPlan:
        """The plan of the linear of that index, on one rank; its weight gradient is returned to autograd.

        states: of delayed scaling. before: of the linear before it."""
        tp = TensorParallel()
        recipe = self.recipe if self.fits[index] else HighPrecision()
        operands = operands_for(recipe, Site(index, self.dtype, tp, states.__getitem__, None))
        fprop, dgrad, wgrad = (Collective(Place(tp, gemm)) for gemm in ("fprop", "dgrad", "wgrad"))
        return LinearPlan(
            operands, LocalGemms(tp, (fprop, dgrad, wgrad)), WgradSink(), self.dtype, self.keep_original, None, before,
            self.recompute, compiled=True,
        )  # fmt: skip


_kinds: dict[str, Kind] = {}


@cache
def _process() -> str:
    return uuid4().hex


def name_of(kind: Kind) -> str:
    """As `linears` takes it. torch keeps on disk what it compiled, by such constants of a graph: the name is that of no
    other Kind, in no process, and of no other te_lite. What a recipe of others means is known in its process alone."""
    own = type(kind.recipe).__module__ == HighPrecision.__module__ and not kind.recipe.custom()
    name = f"{kind} {sources()} {'' if own else _process()}"
    _kinds[name] = kind
    return name


@torch.compiler.allow_in_graph
def linears(name: str, x: Tensor, *params: Tensor | None) -> list[Tensor]:
    """[y], and norm(x) where the norm says so. params: those of the Function's forward, of the first weight the first
    part; then, under delayed scaling, scales and amaxes for forward, the same for backward; then the other parts."""
    kind = _kinds[name]
    states: dict[str, InGraph] = {}
    parts: Any = ()
    if kind.parts > 1:
        first = 0 if kind.norm is None else 2
        parts, params = (params[first], *params[1 - kind.parts :]), params[: 1 - kind.parts]
        params = *params[:first], torch.cat(parts), *params[first + 1 :]
    if kind.recipe.delayed():
        held: Any = params[-4:]  # tensors
        params, states = params[:-4], {"forward": InGraph(*held[:2]), "backward": InGraph(*held[2:])}
    plans: tuple[LinearPlan, ...] = ()
    for i in range(len(kind.fits)):
        plans += (kind.plan(i, states, plans[-1] if plans else None),)
    weights: Any = params[0 if kind.norm is None else 2 :][: 2 * len(plans) : 2]
    grad = torch.is_grad_enabled()
    cached = [parameter_operand(w, plan.operands, grad, in_graph=True) for w, plan in zip(weights, plans, strict=True)]
    versions = tuple([part._version for part in parts])
    call = Call(plans, weights, tuple(cached), grad, parts=parts, versions=versions)
    layer: Any = LINEAR
    if kind.norm is not None:
        layer = NormLinearLayer(kind.norm) if kind.activation is None else MLPLayer(kind.norm, kind.activation)
    out = run_layer(layer, call, x, *params)
    return [out] if isinstance(out, Tensor) else list(out)
