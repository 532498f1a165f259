"""A CUDA graph played on the CPU, for tests of what replays read and write.

In a capture ops run, for they have to return something; at its end what they wrote is put back and the memory that they
allocated is poisoned, so that whatever is used of it later without a replay is nan. A replay runs the same ops on the
same tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_lite.quantize.tensor import QuantizedTensor


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        parts = leaf.q.tensors if isinstance(leaf, QuantizedTensor) else (leaf,)
        yield from (part.untyped_storage() for part in parts if isinstance(part, Tensor))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # by storage: it, and its bytes
        self.made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self.before and storage._cdata not in self.made:
                self.before[storage._cdata] = storage, storage.clone()
        out = func(*args, **kwargs)
        for storage in _storages(out):
            if storage._cdata not in self.before:
                self.made.setdefault(storage._cdata, storage)
        self.ops.append((func, args, kwargs, out))
        return out


class CpuGraph:
    """As torch.cuda.CUDAGraph and torch.cuda.graph in one."""

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self._recorder = _Recorder()
        with contextlib.ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("te_lite.") and hasattr(module, "capturing"):  # whoever asks
                    stack.enter_context(mock.patch.object(module, "capturing", lambda: True))
            stack.callback(self._undo)
            stack.enter_context(self._recorder)
            yield

    def _undo(self) -> None:
        for storage, bytes_before in self._recorder.before.values():
            storage.copy_(bytes_before)
        for storage in self._recorder.made.values():
            storage.fill_(0xFF)  # nan in every type of floating point

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self._recorder.ops:
            again = func(*args, **kwargs)
            for to, value in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(to, Tensor) and to.data_ptr() != value.data_ptr():
                    to.copy_(value)
