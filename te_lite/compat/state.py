"""State dicts of other libraries: torch's modules have no `_extra_state`, Transformer Engine's one of their own."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from te_lite.arguments import flag
from te_lite.modules.scale_state import READERS, VERSION
from te_lite.modules.weights import SpecModule
from te_lite.ops.registry import FakeTensor

ALLOWED = "TE_LITE_PICKLED_STATE"  # 1: Transformer Engine's pickled scales are read
# What Transformer Engine's versions wrote for no state, as bytes; before 2.0 it was torch.save's file of None.
_NOTHING = (b"", *(pickle.dumps(value, protocol) for value in (None, dict[str, Any]()) for protocol in range(6)))


class _Inert:
    """What a pickle names and te_lite does not need: a recipe, a format. It keeps what it is given and does nothing."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> _Inert:
        made = object.__new__(cls)
        made.args = args
        return made


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _Reader(pickle.Unpickler):
    """Makes tensors, plain values and _Inert alone, so that no code of the file's runs."""

    _KNOWN: ClassVar[dict[str, Any]] = {
        "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
        "torch.storage._load_from_bytes": _storage,
        "collections.OrderedDict": OrderedDict,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("transformer_engine."):
            return _Inert
        if (known := self._KNOWN.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known


def _from_pickle(data: bytes) -> Tensor:
    """Transformer Engine's histories and scales as the tensor that te_lite writes; empty where it has none, as under
    other recipes than delayed scaling. ValueError for what Transformer Engine does not write."""
    try:
        said = _Reader(io.BytesIO(data)).load() or {}
        if "scale_fwd" not in dict(said):
            return torch.empty(0)
        extra = said["extra_fp8_variables"]
        margin = vars(said["recipe"]).get("margin", 0) if "recipe" in said else 0  # before 2.0 the default recipe
        largest = [float(extra[f"fp8_max_{way}"]) * 2.0**-margin for way in ("fwd", "bwd")]
        forward, backward = ([said[f"amax_history_{way}"], said[f"scale_{way}"]] for way in ("fwd", "bwd"))
        sizes = [part.numel() for _, part in (forward, backward)]
        header = torch.tensor([VERSION, forward[0].shape[0], *sizes, *largest], dtype=torch.float32)
        return torch.cat([header, *[part.reshape(-1).float() for part in (*forward, *backward)]])
    except Exception as error:  # as many kinds as there are ways to be no such pickle
        raise ValueError(
            f"extra state is no pickle of Transformer Engine's scales ({error}); drop the *_extra_state keys from the "
            "state dict: a new module then starts with fresh scales"
        ) from error


def _read(state: Any) -> Any:
    """Transformer Engine's extra state as te_lite's: bytes, BytesIO or uint8 tensor; anything else as it is.

    One that says that there is none is compared, not unpickled, which could run code. Others are read with ALLOWED.
    """
    if isinstance(state, Tensor):
        if state.dtype != torch.uint8 or state.is_meta or isinstance(state, FakeTensor):
            return state
        data: Any = state.numpy(force=True).tobytes()
    else:
        data = state.getvalue() if isinstance(state, io.BytesIO) else state
    if not isinstance(data, bytes):
        return state
    if data in _NOTHING:
        return None
    if data.startswith(b"PK"):  # torch.save's file
        with suppress(Exception):  # as many kinds as there are ways to be no such file
            return None if torch.load(io.BytesIO(data), weights_only=True) is None else state
        return state
    return _from_pickle(data) if os.environ.get(ALLOWED) == "1" else state


READERS.append(_read)


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
