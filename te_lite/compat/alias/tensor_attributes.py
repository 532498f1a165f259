"""What Transformer Engine's quantized tensors have and te_lite's do not need: data and scales that a caller sets, a
quantizer for callers, caches made and dropped by hand. Importing this module adds it to QuantizedTensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from te_lite.compat.alias.names import NotThere
from te_lite.compat.callers import CallerQuantizer, for_callers
from te_lite.quantize.blockwise import BlockFormat
from te_lite.quantize.flattened import Flattened
from te_lite.quantize.per_tensor import PerTensorFormat
from te_lite.quantize.tensor import QuantizedTensor

_plain_quantize_, _plain_decoded = QuantizedTensor.quantize_, QuantizedTensor._decoded


def _quantizer(tensor: QuantizedTensor) -> CallerQuantizer | None:
    """What writes to the tensor, for the layouts that it holds; None where nothing does."""
    q = tensor.q
    return None if tensor.quantizer is None else for_callers(tensor.quantizer, q.row is not None, q.col is not None)


def set_quantizer(tensor: QuantizedTensor, quantizer: CallerQuantizer | None) -> None:
    """It writes to the tensor from now on; None: nothing does. TypeError for one of another format."""
    if quantizer is not None and getattr(getattr(quantizer, "_value", None), "format", None) != tensor.q.format:
        raise TypeError(
            f"_quantizer of {tensor._summary()} got {type(quantizer).__name__}: must be a quantizer of format "
            f"{tensor.q.format.label}, or None"
        )
    tensor.quantizer = None if quantizer is None else quantizer._value


def _update_quantizer(tensor: QuantizedTensor, quantizer: CallerQuantizer) -> None:
    """Another quantizer of the same format writes to the tensor. RuntimeError for a tensor that has none."""
    if tensor.quantizer is None:
        raise RuntimeError(f"{tensor._summary()} has no quantizer to replace; set _quantizer")
    set_quantizer(tensor, quantizer)


def _fp8_dtype(tensor: QuantizedTensor) -> torch.dtype:
    """The dtype of the tensor's bytes, a member of DType."""
    q: Any = tensor.q
    data = q.col if q.row is None else q.row
    return q.format.dtype if data is None else data.dtype


def _refuse(tensor: QuantizedTensor, name: str, given: Any, rule: str) -> ValueError:
    said = f"{tuple(given.shape)} {given.dtype} on {given.device}" if isinstance(given, Tensor) else repr(given)
    return ValueError(f"{name} of {tensor._summary()} got {said}: must be {rule}")


def _bytes(tensor: QuantizedTensor, name: str, data: Any, *shapes: tuple[int, ...]) -> Tensor:
    """data as fp8: uint8 or the tensor's own dtype, in one piece, of one of `shapes` or flat; else ValueError."""
    dtype, allowed = _fp8_dtype(tensor), ((tensor.numel(),), *shapes)
    good = isinstance(data, Tensor) and data.dtype in (torch.uint8, dtype) and data.device == tensor.device
    if not good or tuple(data.shape) not in allowed or not data.is_contiguous():
        either = " or ".join(map(str, dict.fromkeys(allowed)))
        rule = f"contiguous {either} of torch.uint8 or {dtype} on {tensor.device}, or None to drop them"
        raise _refuse(tensor, name, data, rule)
    return data.detach().view(dtype)


def set_rows(tensor: QuantizedTensor, data: Tensor | None) -> None:
    """The rowwise bytes lie in `data` from now on, with the scale as it is; None drops them. Columnwise bytes that were
    made from the old ones are dropped."""
    q = tensor.q
    if q.row is None:
        if data is not None:
            raise _refuse(tensor, "_rowwise_data", data, "None, for it holds no rows; quantize it anew")
    elif data is None:
        tensor.update_usage(rowwise_usage=False)
    else:
        q.row = _bytes(tensor, "_rowwise_data", data, tuple(q.shape), tuple(tensor.shape)).view(q.row.shape)
        tensor.free_caches()


def set_columns(tensor: QuantizedTensor, data: Tensor | None) -> None:
    """The columnwise bytes lie in `data` from now on; None drops them. The scale is as it is, or made from that of the
    rows where the format can.

    Raises NotImplementedError where te_lite pads columns, so that they cannot lie there.
    """
    q = tensor.q
    if data is None:
        if q.col is not None:
            tensor.update_usage(columnwise_usage=False)
        return
    if q.col is None and (q.row is None or not q.format.col_from_row):
        raise _refuse(tensor, "_columnwise_data", data, "None, for it has no scales of columns; quantize it anew")
    (m, k), lead = q.shape, tuple(tensor.shape[:-1])
    flat = getattr(q.format, "flat", False)
    data = _bytes(tensor, "_columnwise_data", data, *((m, k), (*lead, k)) if flat else ((k, m), (k, *lead)))
    shape = (k, -(-m // 16) * 16) if q.col is None else tuple(q.col.shape)
    if math.prod(shape) != data.numel():
        raise NotImplementedError(
            f"_columnwise_data of {tensor._summary()}: te_lite pads its columns to {shape}, so they cannot lie in the "
            "bytes that were given; use a number of rows that is a multiple of 16"
        )
    if q.col is None:
        q.col_scale = q.format.make_col(q)[1]
    q.col = data.view(shape)


def _set_scale(tensor: QuantizedTensor, name: str, part: str, scale: Tensor | None) -> None:
    """`scale` in the place of the one that is held. One that serves both layouts is set for both, and columns that are
    made from rows get theirs. ValueError for another kind of tensor than that, and for any where none is held."""
    q = tensor.q
    held = getattr(q, part)
    if held is None:
        if scale is not None:
            raise _refuse(tensor, name, scale, "None, for it holds none; quantize it anew")
        return
    like = isinstance(scale, Tensor) and (scale.dtype, scale.device) == (held.dtype, held.device)
    if scale is None or not like or not (scale.shape == held.shape or scale.numel() == held.numel() == 1):
        rule = f"{tuple(held.shape)} {held.dtype} on {held.device}"
        if held.numel() > 1:
            rule += " (get_scale_shape): transpose those of Transformer Engine, and leave their padding out"
        raise _refuse(tensor, name, scale, rule)
    scale = scale.detach().view(held.shape)
    setattr(q, part, scale)
    other = "col_scale" if part == "row_scale" else "row_scale"
    if isinstance(q.format, PerTensorFormat) and scale.numel() == 1:
        setattr(q, other, None if getattr(q, other) is None else scale)
    elif part == "row_scale" and q.row is not None and q.col is not None and q.format.col_from_row:
        q.col_scale = q.format.make_col(q)[1]


def _set_scale_inv(tensor: QuantizedTensor, scale: Tensor | None) -> None:
    part = "col_scale" if tensor._per_tensor().row is None else "row_scale"
    _set_scale(tensor, "_scale_inv", part, scale)


def _scale_of(name: str, part: str) -> property:
    return property(getattr(Flattened, name).fget, lambda tensor, scale: _set_scale(tensor, name, part, scale))


def remake_columns(tensor: QuantizedTensor) -> None:
    """Columnwise data from the rowwise data as it is now, in the memory that it has. RuntimeError where the format
    cannot make it."""
    q = tensor.q
    if q.col is None or q.row is None or not q.format.col_from_row:
        tensor.update_usage(columnwise_usage=True)
        return
    for held, made in zip((q.col, q.col_scale), q.format.make_col(q), strict=True):
        if held is not None and made is not None and held is not made:
            held.copy_(made)


def _per_tensor_only(method: Callable[..., Any]) -> property:
    """By its presence callers know Float8Tensor."""
    return property(lambda self: self._per_tensor() and method.__get__(self))


def _set_transpose_invalid(tensor: QuantizedTensor, invalid: bool) -> None:
    """True: the transpose is dropped, and made again when it is wanted. False says what holds where there is one."""
    if invalid:
        tensor.free_caches()
    elif tensor._per_tensor().col is None:
        raise RuntimeError(f"_transpose_invalid = False: {tensor._summary()} has no transpose; set _transpose first")


def _is_2D_scaled(tensor: QuantizedTensor) -> bool:
    """128x128 blocks, not 1x128."""
    format = tensor.q.format
    if type(format) is not BlockFormat:
        raise AttributeError(f"{tensor._summary()} has no blocks of 128")
    return format.square


def make_like(
    tensor: QuantizedTensor, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None,
    requires_grad: bool = False, data: Tensor | None = None, data_transpose: Tensor | None = None,
) -> QuantizedTensor:  # fmt: skip
    """Another tensor with the bytes, scales and quantizer of `tensor`, in the same memory, outside of its graph.

    shape: with as many elements and the same last dimension. dtype: the high precision that it stands for. data: bytes
    in the place of the rows; the columns are left out. data_transpose: in the place of columns. Raises ValueError for
    other shapes.
    """
    asked = tuple(shape if shape is not None else tensor.shape if data is None else data.shape)
    if not asked or asked[-1] != tensor.shape[-1] or math.prod(asked) != tensor.numel():
        raise ValueError(
            f"make_like(shape={asked}) of {tensor._summary()}: must have as many elements and the same last dimension"
        )
    q = replace(tensor.q, dtype=tensor.q.dtype if dtype is None else dtype)
    made = QuantizedTensor(q, asked, tensor.quantizer)
    if data is not None:
        set_rows(made, data)
        if data_transpose is None:  # columns with scales of their own would keep the old numbers
            made.update_usage(columnwise_usage=False)
    if data_transpose is not None:
        set_columns(made, data_transpose)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def _clear(tensor: QuantizedTensor) -> None:
    """Lets go of bytes and scales, also of its views. It has no numbers from then on, and can be given none."""
    q = tensor.q
    q.row = q.row_scale = q.col = q.col_scale = q.seed = None


def _decoded(tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    if tensor.q.row is None and tensor.q.col is None:
        raise RuntimeError(f"{tensor._summary()} was cleared, so it has no numbers; quantize into a new tensor")
    return _plain_decoded(tensor, dtype)


def _copy_from_storage(tensor: QuantizedTensor, src: QuantizedTensor) -> None:
    """Copies bytes and scales in each layout that both hold, and drops what `src` has not. TypeError or RuntimeError
    for another kind of tensor, ValueError where no layout would be left."""
    if not isinstance(src, QuantizedTensor):
        raise TypeError(f"copy_from_storage got {type(src).__name__}: must be a QuantizedTensor; use quantize_")
    if src.q.format != tensor.q.format or src.q.shape != tensor.q.shape:
        raise RuntimeError(f"copy_from_storage: {src._summary()} has other bytes than {tensor._summary()}; use copy_")
    tensor.update_usage(None if src.q.row is not None else False, None if src.q.col is not None else False)
    for held, given in zip(tensor.q.tensors[:4], src.q.tensors[:4], strict=True):
        if held is not None and given is not None:
            held.copy_(given)


def _quantize_(tensor: QuantizedTensor, src: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
    """QuantizedTensor.quantize_. noop_flag: fp32 [1]; where it is not 0, the tensor stays as it is."""
    quantizer = None if noop_flag is None else _quantizer(tensor)
    if quantizer is None:
        return _plain_quantize_(tensor, src)
    return quantizer.update_quantized(src, tensor, noop_flag=noop_flag)


def _data_tensors(tensor: QuantizedTensor, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
    """(_rowwise_data, _columnwise_data); one of them alone where the other is not asked for."""
    if rowwise_data and columnwise_data:
        return tensor._rowwise_data, tensor._columnwise_data
    if not (rowwise_data or columnwise_data):
        raise ValueError("get_data_tensors(False, False): nothing is asked for; ask for one")
    return tensor._rowwise_data if rowwise_data else tensor._columnwise_data


def _set_data(tensor: QuantizedTensor, data: Tensor | None) -> None:
    tensor._per_tensor()
    set_rows(tensor, data)


def _set_transpose(tensor: QuantizedTensor, data: Tensor | None) -> None:
    tensor._per_tensor()
    set_columns(tensor, data)


_ROWS = property(Flattened._rowwise_data.fget, set_rows)  # type: ignore[attr-defined]
_COLUMNS = property(Flattened._columnwise_data.fget, set_columns)  # type: ignore[attr-defined]
_ADDED: Any = {
    "_quantizer": property(_quantizer, set_quantizer), "_get_quantizer": _quantizer,
    "update_quantizer": _update_quantizer, "_fp8_dtype": property(_fp8_dtype),
    "_dtype": property(lambda self: self.dtype),
    "_rowwise_data": _ROWS, "_columnwise_data": _COLUMNS,
    "_data": property(QuantizedTensor._data.fget, _set_data),
    "_transpose": property(QuantizedTensor._transpose.fget, _set_transpose),
    "_rowwise_scale_inv": _scale_of("_rowwise_scale_inv", "row_scale"),
    "_columnwise_scale_inv": _scale_of("_columnwise_scale_inv", "col_scale"),
    "_scale_inv": property(Flattened._scale_inv.fget, _set_scale_inv),
    "_transpose_invalid": property(lambda self: self._per_tensor().col is None, _set_transpose_invalid),
    "_create_transpose": _per_tensor_only(remake_columns), "_create_columnwise": remake_columns,
    "_reset_caches": QuantizedTensor.free_caches, "remove_caches": QuantizedTensor.free_caches,
    "_is_2D_scaled": property(_is_2D_scaled), "make_like": staticmethod(make_like),
    "to_dtype": lambda self, dtype: make_like(self, dtype=dtype), "clear": _clear, "_decoded": _decoded,
    "copy_from_storage": _copy_from_storage, "quantize_": _quantize_, "get_data_tensors": _data_tensors,
    "get_usages": lambda self: {"rowwise": self.q.row is not None, "columnwise": self.q.col is not None},
}  # fmt: skip


def _named(quantizer: CallerQuantizer, name: str) -> Any:
    """For names that a quantizer does not have."""
    raise NotThere(f"{type(quantizer).__name__}.{name}: te_lite does not have it (docs/reference/not-there.md)")


CallerQuantizer.__getattr__ = _named  # type: ignore[attr-defined]
for _name, _value in _ADDED.items():
    setattr(QuantizedTensor, _name, _value)
