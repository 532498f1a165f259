"""Transformer Engine's modules in the place of a Llama's, by hand, for benchmarks/llama.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.peer_steps import library
from te_lite.compat.fused import pack

HEAD = "lm_head"


def to_convert(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and HEAD not in name


def swap_in_te(model: nn.Module) -> None:
    """Transformer Engine's Linear, with the same weight, in the place of each nn.Linear but the head."""
    te, _ = library("te")
    for name, linear in list(model.named_modules()):
        if not to_convert(linear, name):
            continue
        weight = linear.weight
        swapped = te.Linear(
            linear.in_features, linear.out_features, bias=False, params_dtype=weight.dtype, device=str(weight.device)
        )
        nn.Module.register_parameter(swapped, "weight", weight)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped)


class NormQkv(nn.Module):
    """A norm with q, k and v in one product, split once: the tensor carries its parts to q_proj, k_proj and v_proj, as
    te_lite.fuse has it."""

    def __init__(self, product: nn.Module, widths: Sequence[int]) -> None:
        super().__init__()
        self.product, self.widths = product, list(widths)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        y.parts = y.unsafe_split_with_sizes(self.widths, -1)  # type: ignore[attr-defined]
        return y


class Part(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, y: Tensor) -> Tensor:
        return y.parts[self.index]  # type: ignore[attr-defined]


def fuse_by_te(model: nn.Module) -> list[nn.Parameter]:
    """Transformer Engine's LayerNormLinear and LayerNormMLP in the place of each layer's parts. Returns the parameters
    that are new: fc1's. Weights of q, k and v are put side by side, so that they are read as one."""
    te, _ = library("te")
    made = []
    for layer in list(model.modules()):
        if not hasattr(layer, "post_attention_layernorm"):
            continue
        attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        pack(projections)
        weights = [linear.weight for linear in projections]
        eps = getattr(norms[0], "variance_epsilon", None) or norms[0].eps
        options = {"eps": eps, "bias": False, "normalization": "RMSNorm"}
        options |= {"params_dtype": weights[0].dtype, "device": str(weights[0].device)}
        widths = {part: len(weight) for part, weight in zip("qkv", weights, strict=True)}
        product = te.LayerNormLinear(weights[0].shape[1], sum(widths.values()), parameters_split=widths, **options)
        merged = te.LayerNormMLP(*mlp.up_proj.weight.shape[::-1], activation="swiglu", **options)
        made.append(nn.Parameter(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])))
        given = {f"{part}_weight": weight for part, weight in zip("qkv", weights, strict=True)}
        for module, parameters in (
            (product, {"layer_norm_weight": norms[0].weight, **given}),
            (
                merged,
                {"layer_norm_weight": norms[1].weight, "fc1_weight": made[-1], "fc2_weight": mlp.down_proj.weight},
            ),
        ):
            for key, parameter in parameters.items():
                nn.Module.register_parameter(module, key, parameter)
        layer.input_layernorm, layer.post_attention_layernorm = NormQkv(product, widths.values()), nn.Identity()
        attention.q_proj, attention.k_proj, attention.v_proj = Part(0), Part(1), Part(2)
        layer.mlp = merged
    return made
