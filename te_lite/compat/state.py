"""State dicts of other libraries: torch's modules have no `_extra_state`, Transformer Engine's one of their own."""

from __future__ import annotations

import io
import pickle
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from te_lite.arguments import flag
from te_lite.modules.scale_state import NO_STATE
from te_lite.modules.weights import SpecModule

# What Transformer Engine's versions wrote for no state, as bytes; before 2.0 it was torch.save's file of None.
_NOTHING = (b"", *(pickle.dumps(value, protocol) for value in (None, dict[str, Any]()) for protocol in range(6)))


def _is_no_state(state: Any) -> bool:
    """Transformer Engine's extra state, as bytes, BytesIO or uint8 tensor, says that there is none. It is compared, not
    unpickled, which could run code."""
    if isinstance(state, Tensor):
        state = state.numpy(force=True).tobytes() if state.dtype == torch.uint8 else ""
    data = state.getvalue() if isinstance(state, io.BytesIO) else state
    if isinstance(data, bytes) and data.startswith(b"PK"):
        with suppress(Exception):  # as many kinds as there are ways to be no such file
            return torch.load(io.BytesIO(data), weights_only=True) is None
    return isinstance(data, bytes) and data in _NOTHING


NO_STATE.append(_is_no_state)


def _drop(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    state_dict.pop(f"{prefix}_extra_state", None)


def plain_state_dict(module: nn.Module, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
    """module.state_dict(prefix=prefix, keep_vars=keep_vars) without the `_extra_state` of the te_lite modules in it.

    It loads strictly into the same model of nn.Linear, nn.LayerNorm and nn.RMSNorm. The tensors are the module's own,
    as in state_dict(); other modules' extra states stay. Delayed scaling's histories and scales are left out.
    """
    keep_vars = flag("plain_state_dict", "keep_vars", keep_vars)
    with ExitStack() as hooks:
        # Each module drops its own, so that names which wrappers change on the way up do not matter.
        for child in {child for child in module.modules() if isinstance(child, SpecModule)}:
            hooks.callback(child.register_state_dict_post_hook(_drop).remove)
        return module.state_dict(prefix=prefix, keep_vars=keep_vars)
