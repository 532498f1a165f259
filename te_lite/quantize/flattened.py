"""The tensors that a quantized one holds: by Transformer Engine's names, and as torch.compile takes them.

To torch.compile they come with a value that says the rest: a traceable wrapper subclass. Graphs take and give the
tensors. They are compiled for the value, and for which tensors are held.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from te_lite.kept import sources
from te_lite.quantize.per_tensor import PerTensorFormat
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Quantizer

# Attributes, in the order of QTensor.tensors.
_NAMES = "_row", "_row_scale", "_col", "_col_scale", "_seed"


def no_data(key: str) -> None:
    """What the pickle of a tensor without data calls. torch 2.11 takes such a pickle for the key of a graph on disk."""
    raise RuntimeError("a QuantizedTensor without data was pickled: FakeTensorMode was open; pickle it outside")


class Flattened(torch.Tensor):
    """The base of QuantizedTensor, which says what q and quantizer are."""

    q: QTensor
    quantizer: Quantizer | None

    def _summary(self) -> str:
        raise NotImplementedError

    _row = property(lambda self: self.q.row)
    _row_scale = property(lambda self: self.q.row_scale)
    _col = property(lambda self: self.q.col)
    _col_scale = property(lambda self: self.q.col_scale)
    _seed = property(lambda self: self.q.seed)

    # as Transformer Engine's callers read them: bytes

    @property
    def _rowwise_data(self) -> Tensor | None:
        """uint8, of the tensor's shape."""
        return None if self.q.row is None else self.q.row.view(torch.uint8).view(self.shape)

    @property
    def _columnwise_data(self) -> Tensor | None:
        """uint8 [K, ...] of a tensor [..., K], without the padding; of its shape where it is not transposed."""
        (m, k), col, flat = self.q.shape, self.q.col, getattr(self.q.format, "flat", False)
        if col is None:
            return None
        return (col if flat else col[:, :m]).view(torch.uint8).view(self.shape if flat else (k, *self.shape[:-1]))

    _rowwise_scale_inv, _columnwise_scale_inv = _row_scale, _col_scale

    def _per_tensor(self) -> QTensor:
        if not isinstance(self.q.format, PerTensorFormat):
            raise AttributeError(f"{self._summary()} has no one scale; use _rowwise_data, _rowwise_scale_inv ...")
        return self.q

    _data = property(lambda self: self._per_tensor() and self._rowwise_data)
    _transpose = property(lambda self: self._per_tensor() and self._columnwise_data)
    _scale_inv = property(lambda self: self._per_tensor().operand_scale)

    def get_data_tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """(rowwise data, columnwise data); None for a layout that is not held."""
        return self.q.row, self.q.col

    def get_metadata(self) -> dict[str, Any]:
        """What the tensor is made of, scales and formats included."""
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        parts = dict(zip(names, self.q.tensors[:4], strict=True))
        return {**parts, "dtype": self.dtype, "format": self.q.format, "quantizer": self.quantizer}

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """(names of the tensors that are held, each once; the value)."""
        q = self.q
        held = [name for name, part in zip(_NAMES, q.tensors, strict=True) if part is not None]
        if q.col_scale is q.row_scale is not None:
            held.remove("_col_scale")  # one scale serves both layouts
        return held, (q.format, tuple(q.shape), q.dtype, self.quantizer)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], value: Any, shape: torch.Size, stride: Any) -> Tensor:
        """The tensor of __tensor_flatten__()'s tensors, by name, and value. shape: its own; it has no strides."""
        *described, quantizer = value
        q = QTensor(*described, *[parts.get(name) for name in _NAMES])
        if q.col is not None and q.col_scale is None:
            q.col_scale = q.row_scale
        make: Any = cls
        return make(q, shape, quantizer)

    def _stable_hash_for_caching(self) -> str:
        """By which torch finds graphs on disk that take such a tensor."""
        held, value = self.__tensor_flatten__()
        parts = [(t.shape, t.stride(), t.dtype, t.device) for t in map(partial(getattr, self), held)]
        return sha256(repr((sources(), self.shape, self.requires_grad, held, value, parts)).encode()).hexdigest()
