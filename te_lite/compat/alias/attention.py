"""What Transformer Engine's attention modules have and te_lite's do not need: models and frameworks read and set it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from te_lite.modules.attention import DotProductAttention
from te_lite.modules.multihead_attention import MultiheadAttention

_GROUPS: WeakKeyDictionary[nn.Module, dist.ProcessGroup | None] = WeakKeyDictionary()  # which no copy or pickle holds


def _telling(kind: type, tell: Callable[[Any, dict[str, Any]], None]) -> None:
    """kind's constructor calls tell(module, its arguments by name) at its end."""
    init: Any = kind.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    @functools.wraps(init)
    def telling(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(module, *args, **kwargs)
        given = signature.bind(module, *args, **kwargs)
        given.apply_defaults()
        tell(module, given.arguments)

    kind.__init__ = telling  # type: ignore[misc]


def _of_core(module: Any, given: dict[str, Any]) -> None:
    channels = given["kv_channels"]
    k, v = (channels, channels) if isinstance(channels, int) else channels
    module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v = k, v
    module.sequence_parallel, module.cp_comm_type = bool(given["sequence_parallel"]), given["cp_comm_type"]
    module.set_tensor_parallel_group(given["tp_group"])


def _of_layer(module: Any, given: dict[str, Any]) -> None:
    core, channels = module.core_attention, module.kv_channels
    module.tp_size, module.sequence_parallel = core.tp_size, core.sequence_parallel
    module.layer_number, module.get_rng_state_tracker = given["layer_number"], given["get_rng_state_tracker"]
    module.params_dtype = given["params_dtype"] or torch.get_default_dtype()
    module.hidden_size_per_attention_head = channels
    module.hidden_size_q, module.hidden_size_kv = channels * core.num_attention_heads, channels * core.num_gqa_groups
    module.num_attention_heads_per_partition = core.num_attention_heads // core.tp_size
    module.num_gqa_groups_per_partition = core.num_gqa_groups_per_partition


def set_tensor_parallel_group(module: DotProductAttention, tp_group: dist.ProcessGroup | None) -> None:
    """Kept as tp_group: no rank talks to another. tp_size and num_gqa_groups_per_partition say which heads are here."""
    _GROUPS[module] = tp_group


_set_context = DotProductAttention.set_context_parallel_group


def set_context_parallel_group(
    module: DotProductAttention, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None,
    cp_comm_type: str = "p2p",
) -> None:  # fmt: skip
    """DotProductAttention's, which keeps cp_comm_type."""
    _set_context(module, cp_group, cp_global_ranks, cp_stream, cp_comm_type)
    module.cp_comm_type = cp_comm_type  # type: ignore[assignment]


_ADDED: dict[str, Any] = {
    "set_tensor_parallel_group": set_tensor_parallel_group,
    "set_context_parallel_group": set_context_parallel_group,
    "tp_group": property(_GROUPS.get, set_tensor_parallel_group),
    "cp_group": None,
    "cp_global_ranks": None,
    "cp_stream": None,
}
for _name, _value in _ADDED.items():
    setattr(DotProductAttention, _name, _value)
_telling(DotProductAttention, _of_core)
_telling(MultiheadAttention, _of_layer)
