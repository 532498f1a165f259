"""te.LayerNormMLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.arguments import flag
from te_lite.checkpoint import checkpoint as recompute
from te_lite.functional.layer import run_layer
from te_lite.functional.layernorm_mlp import MLPLayer
from te_lite.functional.plan import Recompute
from te_lite.modules.base import TeLiteModule
from te_lite.modules.linear import add_linear
from te_lite.modules.norm import layer_of
from te_lite.modules.weights import Init
from te_lite.ops.activation import Activation

# The estimate of recomputation_cost(): bytes a second of a cast, measured on an H100 (3.8e12 on an H200); bytes an
# element of a GEMM's operands -> its peak in flop a second, and bytes a value by which forward writes less.
CAST_RATE = 2.9e12
GEMMS = {1: (1.3e15, 1), 2: (0.7e15, 0)}
MOST_COST = 0.02  # of a step, for which activation(h) is computed again by default


def recomputation_cost(hidden_size: int, glu: bool) -> float:
    """How much longer a step of an MLP takes where backward computes a = activation(h) again in a pass of its own.

    An estimate. In the pass that computes the gradient of h (LinearPlan.one_read) it costs only a write, which forward
    under fp8 is spared.

    T tokens, F features of a, so that h is [T, G * F] with G = 2 for a glu, else 1; operands of b bytes an element.

        the pass  reads h, 2 G T F bytes, and writes a, b T F; under fp8 forward need not write a by column, T F less
        the step  6 (G + 1) T F hidden_size flop: three GEMMs for each of fc1 and fc2

    T and F cancel, on tensor-parallel ranks too. Of fp8 and 16 bits the larger one counts, so that bf16 recomputes only
    where all recipes do; but delayed scaling keeps a where fc1's GEMM makes it and no pass reads h. With a glu and
    hidden_size 8,192: 1.2%; hidden_size 4,096: 2.4%.
    """
    g = 2 if glu else 1
    costs = [
        (2 * g + size - spared) / CAST_RATE / (6 * (g + 1) * hidden_size / rate)
        for size, (rate, spared) in GEMMS.items()
    ]
    return max(costs)


class LayerNormMLP(TeLiteModule):
    """y = activation(norm(x) @ fc1_weight^T + fc1_bias) @ fc2_weight^T + fc2_bias.

    activation: a name that docs/reference/modules.md lists. activation_params: those of its parameters that are not to
    have their default, by name. For the gated ones, "...glu", fc1_weight is [2 * ffn_hidden_size, hidden_size], the
    gate's half first; on a tensor-parallel rank [gate shard; up shard]. set_parallel_mode=True makes fc1
    column-parallel and fc2 row-parallel. init_method fills fc1_weight, output_layer_init_method fc2_weight. seq_length
    and micro_batch_size are accepted and not needed. checkpoint=True keeps only x and computes the rest again in
    backward. recompute_activation=True keeps the input of the activation and not its result, which backward computes
    again, with the same bits; None: where fp8 does so in the pass that computes the gradient of the input, and where
    there is no such pass if recomputation_cost() is at most MOST_COST; not where fc2's dgrad makes that gradient under
    delayed scaling. The other arguments are LayerNormLinear's.
    """

    gemm_names = ("fc1", "fc2")
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False,
        return_bias: bool = False, get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None, tp_size: int = 1, init_method: Init | None = None, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu", activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Init | None = None, fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None, return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False, seq_length: int | None = None,
        micro_batch_size: int | None = None, set_parallel_mode: bool = False, zero_centered_gamma: bool = False,
        device: torch.device | str | None = "cuda", ub_overlap_ag: bool = False, name: str | None = None,
        ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        checkpoint: bool = False, *, sequence_dim: int = 0, recompute_activation: bool | None = None,
    ) -> None:  # fmt: skip
        given = locals()
        act = Activation.of(activation, activation_params)
        modes = ("column", "row") if flag("LayerNormMLP", "set_parallel_mode", set_parallel_mode) else (None, None)
        super().__init__(given, modes, ("fc1", "fc2"), ("hidden_size", "ffn_hidden_size"))
        self.activation, self.activation_params, self._act = activation, activation_params, act
        self.checkpoint = checkpoint
        self.recompute_activation = None if recompute_activation is None else bool(recompute_activation)
        cheap = recomputation_cost(hidden_size, act.glu) <= MOST_COST
        self._recompute = Recompute.ELSE_APART if cheap else Recompute.ONE_READ
        if recompute_activation is not None:
            self._recompute = Recompute.ALWAYS if recompute_activation else Recompute.NOWHERE
        self.hidden_size = hidden_size
        wide = ffn_hidden_size * (2 if act.glu else 1)
        if set_parallel_mode and ffn_hidden_size % self.tp_size:
            raise ValueError(f"ffn_hidden_size={ffn_hidden_size} is not divisible by tp_size={self.tp_size}; pad it")
        init2 = output_layer_init_method or init_method
        add_linear(self, modes[0], hidden_size, wide, init_method, bias, {"fc1_": wide})
        add_linear(self, modes[1], ffn_hidden_size, hidden_size, init2, bias, {"fc2_": hidden_size})

    def _linear_names(self) -> list[tuple[list[str], list[str]]]:
        return [(["fc1_weight"], ["fc1_bias"]), (["fc2_weight"], ["fc2_bias"])]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, *, residual: Tensor | None = None) -> Any:
        """x [..., hidden_size] -> y of the same shape; with return_bias (y, fc2_bias); with return_layernorm_output the
        norm's output comes last. is_first_microbatch and residual are Linear's."""
        if torch.compiler.is_dynamo_compiling():
            from te_lite.modules.compiled import call

            return call(self, LayerNormMLP.forward, inp, is_first_microbatch, False, False, residual)
        moves = self.sequence_dim and self.sequence_parallel
        if moves:
            inp, residual = self._sequence_first(inp), self._sequence_first(residual)
        if self.checkpoint and torch.is_grad_enabled():
            out = recompute(self._forward, inp, is_first_microbatch, residual, use_reentrant=False)
        else:
            out = self._forward(inp, is_first_microbatch, residual)
        if not (moves or self.return_bias or out.__class__ is tuple):
            return out
        return self._outputs(out, self.fc2_bias if self.use_bias else None)

    def _forward(self, inp: Tensor, is_first_microbatch: bool | None, residual: Tensor | None) -> Any:
        """y, or (y, norm(x))."""
        norm, fc1, fc2 = (self.layer_norm_weight, self.layer_norm_bias), self.fc1_weight, self.fc2_weight
        call = self._begin(inp, (fc1, fc2), is_first_microbatch, False, False, residual)
        fc1_bias = self.fc1_bias if self.use_bias else None
        fc2_bias = self.fc2_bias if self.use_bias and not self.return_bias else None
        layer = layer_of(self, MLPLayer, self._act)
        return run_layer(layer, call, inp, *norm, fc1, fc1_bias, fc2, fc2_bias, residual)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden_size}, fc1={tuple(self.fc1_weight.shape)}, activation={self.activation}"
