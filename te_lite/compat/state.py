"""State dicts of other libraries: torch's modules have no `_extra_state`, Transformer Engine's one of their own."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from te_lite.arguments import flag
from te_lite.modules.base import TeLiteModule
from te_lite.modules.scale_state import READERS, VERSION
from te_lite.modules.weights import SpecModule
from te_lite.ops.registry import FakeTensor

ALLOWED = "TE_LITE_PICKLED_STATE"  # 1: Transformer Engine's pickled scales are read
_WRAPPERS = "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"
# What Transformer Engine's versions wrote for no state, as bytes; from 0.12 to 1.13 it was torch.save's file of None.
_NOTHING = (b"", *(pickle.dumps(value, protocol) for value in (None, dict[str, Any]()) for protocol in range(6)))


class _Inert:
    """What a pickle names and te_lite does not need: a recipe, a format. It keeps what it is given and does nothing."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> _Inert:
        made = object.__new__(cls)
        made.args = args
        return made


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    """torch._utils._rebuild_tensor_v2, which would let a storage grow to what the file asks for."""
    if type(storage) is not torch.storage.TypedStorage:
        raise pickle.UnpicklingError(f"it makes a tensor of {type(storage).__name__}")
    return torch.empty(0, dtype=storage.dtype).set_(storage._untyped_storage).as_strided(size, stride, offset)


# Opcodes of protocols 3 to 5 that tensors and plain values need, by the names of pickle's constants.
_NEEDED = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "SHORT_BINBYTES BINBYTES EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS MEMOIZE "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE"
)


class _Reader(pickle._Unpickler):
    """Makes tensors, plain values and _Inert alone, so that no code of the file's runs and nothing else changes.

    The unpickler in Python: that in C does not let BUILD be replaced, and makes room for as many values as a file says.
    """

    stack: list[Any]
    pop_mark: Any  # () -> what was put on the stack since the last MARK

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._storages: dict[bytes, Any] = {}  # each once, however often a small file asks for it

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module.startswith("transformer_engine.") or full == "collections.OrderedDict":  # of a tensor's hooks
            return _Inert
        known = {"torch._utils._rebuild_tensor_v2": _tensor, "torch.storage._load_from_bytes": self._storage}
        if full not in known:
            raise pickle.UnpicklingError(f"it names {full}")
        return known[full]

    def _storage(self, data: bytes) -> Any:
        if type(data) is not bytes:
            raise pickle.UnpicklingError(f"it reads a storage from {type(data).__name__}")
        if data not in self._storages:
            self._storages[data] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return self._storages[data]

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it has what no pickle of tensors and plain values has")

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not _Inert or type(state) is not dict:
            raise pickle.UnpicklingError(f"it sets what {type(made).__name__} holds")
        vars(made).update(state)

    def _set(self, items: list[Any]) -> None:
        made = self.stack[-1]
        if type(made) is not dict or not all([type(key) is str for key in items[::2]]):  # a tuple's hash may take years
            raise pickle.UnpicklingError("it has a key that is no string")
        made.update(zip(items[::2], items[1::2], strict=True))

    def _set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _set_many(self) -> None:
        self._set(self.pop_mark())

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), _refuse),
        **{op: pickle._Unpickler.dispatch[op] for op in [getattr(pickle, name)[0] for name in _NEEDED.split()]},
        pickle.NEWOBJ[0]: pickle._Unpickler.dispatch[pickle.REDUCE[0]],  # a call, which _Inert alone takes
        pickle.BUILD[0]: _build, pickle.SETITEM[0]: _set_one, pickle.SETITEMS[0]: _set_many,
    }  # fmt: skip


def _scales(data: bytes, load: Callable[[bytes], Any]) -> Tensor | None:
    """Transformer Engine's histories and scales as the tensor that te_lite writes; empty or None where it has none, as
    under other recipes than delayed scaling. load: what `data` says. ValueError for what Transformer Engine does not
    write."""
    try:
        said = load(data)
        if said is None:
            return None
        if type(said) is not dict or (said and not said.keys() & {"recipe", "scale_fwd"}):
            raise ValueError("it is no dict with a recipe or scales")
        margin = vars(said["recipe"]).get("margin", 0) if "recipe" in said else 0  # before 2.0 the default recipe
        if "scale_fwd" not in said:
            return torch.empty(0)
        extra, length = said["extra_fp8_variables"], len(said["amax_history_fwd"])
        largest = [float(extra[f"fp8_max_{way}"]) * 2.0**-margin for way in ("fwd", "bwd")]
        parts: list[Tensor] = []
        for way in ("fwd", "bwd"):
            history, scale = said[f"amax_history_{way}"], said[f"scale_{way}"]
            if scale.dim() != 1 or history.shape != (length, *scale.shape):
                raise ValueError(f"history_{way} {tuple(history.shape)}, scale_{way} {tuple(scale.shape)}")
            parts += history, scale
        if not all([part.is_floating_point() and part.nbytes <= len(data) for part in parts]):
            raise ValueError("a history or scale is not of floating-point numbers that lie in the file")
        header = torch.tensor([VERSION, length, len(parts[1]), len(parts[3]), *largest], dtype=torch.float32)
        return torch.cat([header, *[part.reshape(-1).float() for part in parts]])
    except Exception as error:  # as many kinds as there are ways to be no such state
        raise ValueError(
            f"extra state is no pickle of Transformer Engine's scales ({error}); drop the *_extra_state keys from the "
            "state dict: a new module then starts with fresh scales"
        ) from error


def _read(state: Any) -> Any:
    """Transformer Engine's extra state as te_lite's: bytes, BytesIO or uint8 tensor; anything else as it is.

    torch reads torch.save's files, as 0.12 to 1.13 wrote them, and runs no code of theirs. A pickle that says
    that there is no state is compared, not unpickled, which could run code. Others are read with ALLOWED.
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
        try:
            said = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception:  # as many kinds as there are ways to be no such file
            return state
        return _scales(data, lambda _: said)
    return _scales(data, lambda data: _Reader(data).load()) if os.environ.get(ALLOWED) == "1" else state


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


def scales_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Delayed scaling's histories and scales of the linear modules of te_lite, by their names in `module`.

    For models of convert_to_float8_training and fuse, whose state_dict() has no key for them, so that it loads where it
    came from. Each is a 1-D fp32 tensor, of one size for histories of up to 1,024, which torch.distributed.checkpoint
    reads into. Names are those without the wrappers of torch.compile, checkpoints and FSDP.
    """
    return {name: TeLiteModule.get_extra_state(child) for name, child in _scaled(module).items()}


def load_scales_state_dict(module: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Takes what scales_state_dict() of the same model gave: a resumed step has the bits of the next one.

    Raises ValueError or TypeError, before it changes anything, where the names are not those of the model's modules, or
    a tensor is not what scales_state_dict() gives.
    """
    found = _scaled(module)
    if found.keys() != state_dict.keys():
        missing, unknown = sorted(found.keys() - state_dict.keys()), sorted(state_dict.keys() - found.keys())
        raise ValueError(
            f"load_scales_state_dict: missing {missing}, unknown {unknown}; must be the names of the model's modules: "
            "convert or fuse it as the one that was saved"
        )
    for name, child in found.items():
        copy.copy(child._scales).load(state_dict[name])  # which raises, while nothing has changed
    for name, child in found.items():
        TeLiteModule.set_extra_state(child, state_dict[name])


def _scaled(module: nn.Module) -> dict[str, TeLiteModule]:
    found = [(name.split("."), child) for name, child in module.named_modules() if isinstance(child, TeLiteModule)]
    return {".".join(part for part in parts if part not in _WRAPPERS): child for parts, child in found}
