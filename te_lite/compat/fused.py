"""The modules that te.fuse puts in the place of a decoder layer's: the same objects, with other classes.

Every parameter stays where it was, the same object under the same name. So checkpoints, optimizers and wrappers see
the model that they know. A product of several weights joins them: without a copy where they lie side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_lite.functional.layer import Call
from te_lite.modules.base import TeLiteModule
from te_lite.modules.layernorm_linear import LayerNormLinear
from te_lite.modules.layernorm_mlp import LayerNormMLP
from te_lite.modules.weights import give_own_storages, join


class Own(NamedTuple):
    """What a module was: its class, the attributes that others hide, and the names of those others."""

    kind: type[nn.Module]
    hidden: dict[str, Any]
    names: tuple[str, ...]


_INTERNALS = frozenset(vars(nn.Module()))  # parameters, children, hooks, training


def become(module: nn.Module, kind: type[nn.Module], state: dict[str, Any]) -> None:
    """Makes `module` a `kind` with these attributes; whoever holds it still does. back() undoes it."""
    values, state = vars(module), {name: value for name, value in state.items() if name not in _INTERNALS}
    own = Own(type(module), {name: values[name] for name in state if name in values}, tuple(state))
    values.update(state, _own=own)
    module.__class__ = kind
    if isinstance(module, TeLiteModule):
        module._renewed()  # state was made on the meta device


def back(module: nn.Module) -> None:
    """Undoes become()."""
    own: Own = vars(module).pop("_own")
    for name in own.names:
        vars(module).pop(name, None)
    vars(module).update(own.hidden)
    module.__class__ = own.kind


def pack(modules: tuple[nn.Module, ...]) -> None:
    """Puts the weights of `modules` side by side in memory, and the biases. What shares its memory already, with a flat
    buffer of somebody or with other processes, stays where it is."""
    for name in ("weight", "bias"):
        params = [module._parameters.get(name) for module in modules]
        plain = [p for p in params if type(p) is nn.Parameter and not p.is_meta and not p.is_inference()]
        plain = [p for p in plain if p.is_contiguous() and (p.is_cuda or not p.is_shared())]
        alone = [p for p in plain if p.untyped_storage().nbytes() == p.nbytes]
        if len(alone) < max(2, len(params)) or len({(p.dtype, p.device, p.shape[1:]) for p in alone}) > 1:
            continue
        block = torch.cat([p.detach() for p in alone])
        for p, part in zip(alone, block.split([len(p) for p in alone]), strict=True):
            p.data = part


class _Part(nn.Module):
    """A linear's parameters, which a fused module reads. _group: the modules whose parameters lie side by side."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    _group: tuple[nn.Module, ...]

    reset_parameters = nn.Linear.reset_parameters
    extra_repr = nn.Linear.extra_repr

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        pack(self._group)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        give_own_storages(self, destination, prefix)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        pack(self._group)  # assign=True replaces them


class Columns(_Part):
    """A q_proj, k_proj or v_proj: the columns that are its own of what the layer's input_layernorm gives."""

    _index: int
    _columns: tuple[int, int, int]  # first, end, those of all three

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., q + k + v] -> [..., out_features]."""
        first, end, total = self._columns
        if hidden.shape[-1] != total:
            raise RuntimeError(
                f"a fused q_proj, k_proj or v_proj got {tuple(hidden.shape)}: must be what its layer's input_layernorm "
                f"gives, [..., {total}]; te.unfuse(model) before other uses"
            )
        if not torch.compiler.is_dynamo_compiling():
            version, parts = getattr(hidden, "_te_lite_parts", (None, ()))
            if parts and version == hidden._version:
                return parts[self._index]
        return hidden[..., first:end]


class Held(_Part):
    """A gate_proj, up_proj or down_proj, whose product is computed in its mlp."""

    def forward(self, _: Tensor) -> Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("a fused gate_proj, up_proj or down_proj runs in its mlp alone; te.unfuse(model) first")


class Passed(nn.Module):
    """A post_attention_layernorm, whose norm is computed in the mlp after it."""

    weight: Tensor
    zero_centered_gamma: bool

    def reset_parameters(self) -> None:
        """The identity."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        """The input itself."""
        return hidden


class FusedNormLinear(LayerNormLinear):
    """An input_layernorm with q_proj, k_proj and v_proj: y[..., q + k + v] of x[..., hidden], of which those take
    their columns. No state passes between them but y itself.

    In eager mode y carries them, split once: backward then joins three gradients in one pass, not in three of y's
    size. v is a copy, or what attention keeps of it would keep all of y.
    """

    weight: Tensor
    _group: tuple[Any, ...]  # q_proj, k_proj, v_proj: not children, they are their attention's

    layer_norm_weight = property(lambda self: self.weight)
    q_weight, q_bias = property(lambda self: self._group[0].weight), property(lambda self: self._group[0].bias)
    k_weight, k_bias = property(lambda self: self._group[1].weight), property(lambda self: self._group[1].bias)
    v_weight, v_bias = property(lambda self: self._group[2].weight), property(lambda self: self._group[2].bias)

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state  # no key in checkpoints
    reset_parameters = Passed.reset_parameters  # type: ignore[assignment]  # the linears reset their own

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]  # as the norm's
        """[..., hidden] -> [..., q + k + v]."""
        y: Any = LayerNormLinear.forward(self, hidden)
        if not torch.compiler.is_dynamo_compiling() and y.requires_grad:
            q, k, v = y.unsafe_split_with_sizes([part.out_features for part in self._group], -1)  # no views: no cycle
            y._te_lite_parts = y._version, (q, k, v.contiguous())
        return y


class FusedMLP(LayerNormMLP):
    """An mlp with the post_attention_layernorm before it."""

    _layer_norm: tuple[Any]  # post_attention_layernorm, which is no child
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    layer_norm_weight = property(lambda self: self._layer_norm[0].weight)
    gate_weight, gate_bias = property(lambda self: self.gate_proj.weight), property(lambda self: self.gate_proj.bias)
    up_weight, up_bias = property(lambda self: self.up_proj.weight), property(lambda self: self.up_proj.bias)
    fc1_weight = property(lambda self: join((self.gate_proj.weight, self.up_proj.weight)))
    fc1_bias = property(lambda self: join((self.gate_proj.bias, self.up_proj.bias)))
    fc2_weight = property(lambda self: self.down_proj.weight)
    fc2_bias = property(lambda self: self.down_proj.bias)

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Nothing: each of its parameters is another module's."""

    def _linear_names(self) -> list[tuple[list[str], list[str]]]:
        return [(["gate_weight", "up_weight"], ["gate_bias", "up_bias"]), (["fc2_weight"], ["fc2_bias"])]

    def _begin(self, inp: Tensor, weights: tuple[Tensor, ...], *options: Any) -> Call:
        first, fp8_output, fp8_grad, residual = options
        parts = self.gate_proj.weight, self.up_proj.weight
        return super()._begin(inp, weights, first, fp8_output, fp8_grad, residual, parts)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # as the mlp's
        """[..., hidden] -> the same shape."""
        return LayerNormMLP.forward(self, x)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden_size}, ffn={self.down_proj.in_features}, activation={self.activation}"
