"""QuantizedTensor: a QTensor that passes through autograd and user code as a torch.Tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from te_lite.quantize.qtensor import QTensor

aten = torch.ops.aten
_SAME_NUMBERS = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default}


class QuantizedTensor(torch.Tensor):
    """A tensor [..., K] held quantized; any operation on it that te_lite does not know works on dequantize().

    What fp8_output and fp8_grad return. q: the quantized matrix [M, K] behind it.
    """

    q: QTensor

    @staticmethod
    def __new__(cls, q: QTensor, shape: tuple[int, ...], requires_grad: bool = False) -> QuantizedTensor:
        device = (q.row if q.row is not None else q.col).device
        self = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=q.dtype, device=device, requires_grad=requires_grad
        )
        self.q = q
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def dequantize(self) -> Tensor:
        """The same numbers in the high-precision dtype."""
        return self.q.dequantize().reshape(self.shape)

    def __repr__(self) -> str:
        return f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, format={self.q.format})"

    @classmethod
    def _written(cls, func: Any, args: tuple, kwargs: dict) -> bool:
        """True when `func` writes to a QuantizedTensor; reading one into a plain tensor is fine."""
        values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return any(isinstance(leaf, cls) for name in written for leaf in tree_leaves(values.get(name)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args else None
        if func._schema.is_mutable and cls._written(func, args, kwargs):
            raise RuntimeError(
                f"{func} would write to a QuantizedTensor: its numbers are fixed; work on x.dequantize(), and ask for "
                "fp8_output or fp8_grad only where the neighbour is a te_lite module"
            )
        if isinstance(self, cls):
            plain_copy = func is not aten._to_copy.default or kwargs.get("dtype", self.dtype) == self.dtype
            if func in _SAME_NUMBERS and plain_copy and "device" not in kwargs:
                return cls(self.q, tuple(self.shape))
            if func in _RESHAPES and args[1] and args[1][-1] == self.shape[-1]:
                shape = torch.empty(self.shape, device="meta").view(args[1]).shape
                return cls(self.q, tuple(shape))

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))
