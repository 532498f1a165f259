"""What frameworks change on modules that are built: parallel_mode, sequence_parallel, the tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from te_lite.functional.plan import DelayedWgrads
from te_lite.modules.base import UNPLANNED, TeLiteModule
from te_lite.modules.linear import _OneLinear
from te_lite.parallel import MODES, group_size

_PARALLEL = "parallel_mode", "sequence_parallel"
_assign, _set_group = TeLiteModule.__setattr__, TeLiteModule.set_tensor_parallel_group
_register = TeLiteModule.register_wgrad_accumulation_and_reduce_hooks


def set_attribute(module: TeLiteModule, name: str, value: Any) -> None:
    """TeLiteModule.__setattr__: later calls follow what parallel_mode and sequence_parallel are set to. Parameters stay
    as they are. ValueError for a mode that there is not."""
    if name not in _PARALLEL or "_sinks" not in module.__dict__ or module.__dict__.get(name, value) == value:
        _assign(module, name, value)
        return
    if name == "parallel_mode" and isinstance(module, _OneLinear):
        if value not in MODES:
            raise ValueError(f"{type(module).__name__}.parallel_mode = {value!r}: must be one of {MODES}; choose one")
        module._modes, module._scatters = (value,), value == "row"
    _assign(module, name, value)
    module._planned = UNPLANNED
    for index, sink in enumerate(module._sinks):
        if isinstance(sink, DelayedWgrads):  # a backward may follow a forward under what was set before
            now = module._callers(index)
            sink.copies = sink.copies[0] or now[0], sink.copies[1] or now[1]


def set_tensor_parallel_group(module: TeLiteModule, tp_group: dist.ProcessGroup | None) -> None:
    """TeLiteModule's. A module that is whole on each rank takes a group of any size, and has no use for it: frameworks
    set one on all modules."""
    whole = module.tp_size == 1 and not any(module._modes)
    if not (whole and group_size(tp_group, 1) > 1):
        _set_group(module, tp_group)


def register_wgrad_accumulation_and_reduce_hooks(module: TeLiteModule, *hook: Any, **named: Any) -> None:
    """TeLiteModule's, by Transformer Engine's name of the argument too."""
    if "wgrad_accumulation_and_reduce_hook" in named:
        named["hook"] = named.pop("wgrad_accumulation_and_reduce_hook")
    _register(module, *hook, **named)
