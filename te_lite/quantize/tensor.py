"""QuantizedTensor: a QTensor that passes through autograd and user code as a torch.Tensor."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from te_lite.ops.registry import FakeTensor
from te_lite.ops.source import DTYPES, Source, plain
from te_lite.quantize.flattened import Flattened, no_data
from te_lite.quantize.pickled import Spec, from_spec, to_spec
from te_lite.quantize.qtensor import QTensor, TensorFormat
from te_lite.quantize.quantizer import Quantizer

aten = torch.ops.aten
_DATA: Any = torch.Tensor.data  # a descriptor, which its type does not say
_RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
_PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor}  # also of chunk, narrow, x[a:b]


def source_of(values: Tensor) -> Source:
    """values[..., K] as the matrix [M, K] that a quantizer reads. ValueError without a dimension to scale along."""
    if not values.dim():
        raise ValueError("a tensor of shape () to quantize: must have at least one dimension; pass x.reshape(1)")
    values = values if values.dtype in DTYPES else values.float()
    return plain(values.reshape(math.prod(values.shape[:-1]), values.shape[-1]).contiguous())


def _fits(new: QTensor | None, q: QTensor) -> TypeGuard[QTensor]:
    """The bytes of `new` give every layout that `q` holds."""
    if new is None or new.format != q.format or new.shape != q.shape:
        return False
    return (q.row is None or new.row is not None) and (q.col is None or new.col is not None or q.format.col_from_row)


def quantized(src: Tensor, quantizer: Quantizer, *, row: bool = True, col: bool | None = None) -> QuantizedTensor:
    """src[..., K] quantized, to be written to through `quantizer`. col None: where it cannot be made from row."""
    col = not quantizer.format.col_from_row if col is None else col
    q, _ = quantizer.quantize(source_of(src.detach()), row=row, col=col)
    q.seed, q.col_scale = None, None if q.col is None else q.col_scale
    return QuantizedTensor(q, src.shape, quantizer=quantizer)


class SameToAutograd(torch.autograd.Function):
    """change(x), another form of the same numbers: the identity to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.dtype = x.dtype
        return change(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class QuantizedTensor(Flattened):
    """A tensor [..., K] held quantized; any operation on it that te_lite does not know works on dequantize().

    q: the quantized matrix [M, K] behind it, shared with its views. quantizer: makes new numbers when the tensor is
    written to, in the same memory; a tensor without one (from fp8_output, fp8_grad) is read only.
    """

    _high_precision_init_val: Tensor | None = None

    @staticmethod
    def __new__(cls, q: QTensor, shape: Sequence[int], quantizer: Quantizer | None = None) -> QuantizedTensor:
        data = q.col if q.row is None else q.row
        if data is None:
            raise RuntimeError(f"a QuantizedTensor {tuple(shape)} was cleared: nothing to view or copy; quantize anew")
        with torch.inference_mode(data.is_inference()):  # as its bytes, also where somebody only looks at them
            self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=q.dtype, device=data.device)
        self.q, self.quantizer = q, quantizer
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The same numbers as a plain tensor of `dtype` (default: self.dtype), rounded once."""
        dtype = self.dtype if dtype is None else dtype
        if self.requires_grad and torch.is_grad_enabled():
            return SameToAutograd.apply(self, lambda x: x._decoded(dtype))
        return self._decoded(dtype)

    def _decoded(self, dtype: torch.dtype) -> Tensor:
        return replace(self.q, dtype=dtype).dequantize().reshape(self.shape)

    def quantize_(self, src: Tensor) -> QuantizedTensor:
        """Writes the numbers of `src` (any dtype, a shape that expands to self's), quantized anew, into self."""
        with torch.no_grad():
            self.copy_(src)
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        values = self.dequantize().detach()
        values[key] = value
        self.quantize_(values)

    def _store(self, src: Tensor) -> None:
        """The numbers of `src` in self's memory, in every layout that is held; bytes where the formats agree."""
        q, new = self.q, src.q if isinstance(src, QuantizedTensor) else None
        if src.shape != self.shape or not _fits(new, q):
            values = (src if new is None else new.dequantize().reshape(src.shape)).to(self.device).expand(self.shape)
            assert self.quantizer is not None  # _written has seen to it
            new, _ = self.quantizer.quantize(source_of(values), row=q.row is not None, col=q.col is not None)
        new = replace(new)  # src is not to keep what operand() may make
        if q.col is not None:
            new.operand("col")
        each = zip(q.tensors[:4], new.tensors[:4], strict=True)
        for old, fresh in {id(old): (old, fresh) for old, fresh in each}.values():  # one scale may serve both layouts
            if old is not None and fresh is not None:
                old.copy_(fresh)
                if not old.is_inference():
                    torch.autograd.graph.increment_version(old)  # for graphs, which save it alone; torch does not here

    # layouts

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """True: the layout is held from now on, made from the other one where the format can; False: it is dropped.

        Raises RuntimeError for a layout that cannot be made, ValueError when none would be left.
        """
        q = self.q
        if rowwise_usage and q.row is None or columnwise_usage and q.col is None and not q.format.col_from_row:
            raise RuntimeError(
                f"{self._summary()} cannot make its {'rowwise' if q.row is None else 'columnwise'} data from what it "
                "holds; quantize the tensor again with both layouts"
            )
        if columnwise_usage:
            q.operand("col")
        keep_row = q.row is not None and rowwise_usage is not False
        keep_col = q.col is not None and columnwise_usage is not False
        if not (keep_row or keep_col):
            raise ValueError(f"{self._summary()} would hold no data at all; keep one layout")
        if not keep_row:
            q.row = q.row_scale = None
        if not keep_col:
            q.col = q.col_scale = None

    def free_caches(self) -> None:
        """Drops columnwise data that can be made from the rowwise data at any time."""
        if self.q.row is not None and self.q.format.col_from_row:
            self.update_usage(columnwise_usage=False)

    # what Transformer Engine's tensors offer

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensor]:
        """(tensors for ctx.save_for_backward, an empty twin to call restore_from_saved on)."""
        twin = self._like(self.q)
        twin.q = QTensor(self.q.format, self.q.shape, self.q.dtype)
        return list(self.q.tensors), twin

    def restore_from_saved(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Takes what prepare_for_saving gave from the front of `tensors`; returns the rest."""
        count = len(self.q.tensors)
        self.q = QTensor(self.q.format, self.q.shape, self.q.dtype, *tensors[:count])
        return list(tensors[count:])

    def get_high_precision_init_val(self) -> Tensor | None:
        """On the CPU, the value before quantization, if quantized_model_init was told to preserve it."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Frees what get_high_precision_init_val returns."""
        self._high_precision_init_val = None

    # copies, pickles, printing

    def share_memory_(self) -> QuantizedTensor:
        self.q.map(Tensor.share_memory_)
        return self

    @property
    def data(self) -> QuantizedTensor:
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            raise TypeError(
                f"{self._summary()} got .data of type {type(value).__name__}: must be a QuantizedTensor; write numbers "
                "with quantize_() or copy_(), and build a module of another dtype with params_dtype"
            )
        _DATA.__set__(self, value)
        self.q, self.quantizer = value.q, value.quantizer

    def _like(self, q: QTensor, shape: Sequence[int] | None = None) -> QuantizedTensor:
        return QuantizedTensor(q, self.shape if shape is None else shape, quantizer=self.quantizer)

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("q", "quantizer")}

    def __copy__(self) -> Tensor:
        made = self._like(self.q).requires_grad_(self.requires_grad)
        vars(made).update(self._attributes())
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = self._like(self.q.map(Tensor.clone)).requires_grad_(self.requires_grad)
        vars(made).update(copy.deepcopy(self._attributes(), memo))
        made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        if FakeTensor in map(type, self.q.tensors):
            return no_data, (self._stable_hash_for_caching(),)
        # A scale may be cut from a block, which would be stored as a whole.
        q = self.q.map(lambda t: t if t.untyped_storage().nbytes() == t.nbytes else t.clone())
        if q.row is not None and q.format.col_from_row:
            q.col = q.col_scale = None
        specs = to_spec(q.format), None if self.quantizer is None else to_spec(self.quantizer)
        shapes = tuple(q.shape), tuple(self.shape)
        # As bytes: plain pickle knows no fp8 storage.
        tensors = tuple(t if t is None or t.element_size() > 1 else t.view(torch.uint8) for t in q.tensors[:4])
        dtypes = tuple(None if t is None else t.dtype for t in q.tensors[:4])
        return _rebuild, (*specs, tensors, dtypes, *shapes, self.dtype, self.requires_grad, self._attributes())

    def _summary(self) -> str:
        q = self.q
        layouts = "+".join(name for name, data in (("row", q.row), ("col", q.col)) if data is not None) or "no data"
        return f"QuantizedTensor({tuple(self.shape)}, {self.dtype}, {q.format.label}, {layouts})"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # in torch the keyword has a name
        scale = self.q.operand_scale
        if scale is None or scale.__class__ is not Tensor or scale.is_meta or not self.numel():  # no data: in a graph
            return self._summary()
        scale = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
        low, high = scale.min().item(), scale.max().item()
        values = ", ".join(f"{value:.4g}" for value in self._decoded(self.dtype).flatten()[:4].tolist())
        more = ", ..." if self.numel() > 4 else ""
        access = "" if self.quantizer is not None else ", read only"
        return f"{self._summary()[:-1]}, scale_inv {low:.4g} to {high:.4g}, [{values}{more}]{access})"

    # operations

    @classmethod
    def _written(cls, func: Any, args: tuple, kwargs: dict) -> list[QuantizedTensor]:
        """The QuantizedTensors that `func` writes to, which need a quantizer; reading one is always fine."""
        if func.namespace == "c10d":  # collectives write to their first argument, which their schemas do not say
            written = [] if "send" in func.name() else tree_leaves(args[0])
        elif func._schema.is_mutable:
            names = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
            values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            written = tree_leaves([values.get(name) for name in names])
        else:
            return []
        written = [leaf for leaf in written if isinstance(leaf, cls)]
        if any(t.quantizer is None or func.namespace == "c10d" for t in written):
            raise RuntimeError(
                f"{func} would write to {written[0]._summary()}, which has no quantizer or is not one tensor to a "
                "collective; work on x.dequantize() (fp8_output and fp8_grad are for te_lite modules as neighbours; a "
                "part shares scales with the rest: write to the whole)"
            )
        return written

    def _part(self, cut: Tensor) -> QuantizedTensor | None:
        """What `cut` is of a contiguous tensor of self's shape: all of it, or rows, read only; None: another part."""
        width = self.shape[-1] if self.dim() else 0
        if not width or cut.shape[-1:] != self.shape[-1:] or not cut.is_contiguous() or self.q.row is None:
            return None
        start = cut.storage_offset() // width
        stop = start + cut.numel() // width
        if stop - start == self.q.shape[0]:
            return self._like(self.q, cut.shape)
        q = self.q.format.part(self.q, start, stop)
        return None if q is None else QuantizedTensor(q, cut.shape)

    def _restructured(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What `func` gives where it changes no number: an alias, a copy, another leading shape, parts; else None."""
        if func in (aten.detach.default, aten.alias.default):
            return self._like(self.q)
        if func is aten.clone.default:
            return self._like(self.q.map(Tensor.clone))
        if func is aten._to_copy.default:
            if kwargs.get("dtype") in (None, self.dtype):
                place = {"device": kwargs.get("device"), "non_blocking": kwargs.get("non_blocking", False)}
                return self._like(self.q.map(lambda t: t.to(copy=True, **place)))
            return func(self._decoded(torch.float32), **kwargs)  # rounded once, not to self.dtype before
        if func in _RESHAPES:
            shape = func(torch.empty(self.shape, device="meta"), *args[1:]).shape
            if shape and shape[-1] == self.shape[-1]:
                return self._like(self.q, shape)
        if func in _PARTS:
            cuts = func(torch.empty(self.shape, device="meta"), *args[1:], **kwargs)
            if isinstance(cuts, Tensor):
                return self._part(cuts)
            parts = [self._part(cut) for cut in cuts]
            return None if any(part is None for part in parts) else parts
        return None

    # Its type in torch is that of the function which turns it off.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.detach_.default:
            return args[0]  # autograd's alone
        written = cls._written(func, args, kwargs)
        if written and func is aten.copy_.default:
            written[0]._store(args[1] if isinstance(args[1], Tensor) else torch.tensor(args[1]))
            return written[0]
        if isinstance(args[0] if args else None, cls) and not written:
            if (same := args[0]._restructured(func, args, kwargs)) is not None:
                return same
            if func.name().endswith("_like") or func.name().startswith("aten::new_"):  # the numbers do not matter
                args = (torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:])
        plains = {id(t): t._decoded(t.dtype) for t in written}

        def as_plain(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            return plains[id(value)] if id(value) in plains else value._decoded(value.dtype)

        out = func(*tree_map(as_plain, args), **tree_map(as_plain, kwargs))
        for t in written:
            shape = tuple(plains[id(t)].shape)
            if shape != t.shape or torch.Tag.inplace_view in func.tags:
                raise RuntimeError(
                    f"{func} would leave {t._summary()} with the shape {shape} or in other memory: it keeps both; take "
                    "the result of an operation that writes to nothing, as in x = x.squeeze()"
                )
        for t in written:
            t._store(plains[id(t)])
            torch.autograd.graph.increment_version(t)  # torch does not do it for foreach ops here
        owners = {id(plains[id(t)]): t for t in written}
        return tree_map(lambda value: owners.get(id(value), value), out) if written else out


def _rebuild(
    format_spec: Spec, quantizer_spec: Spec | None, tensors: tuple, dtypes: tuple, q_shape: tuple[int, int],
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The tensor that __reduce_ex__ took apart."""
    format = from_spec(format_spec, TensorFormat)
    quantizer = None if quantizer_spec is None else from_spec(quantizer_spec, Quantizer, format=format)
    parts = (None if t is None else t.view(own) for t, own in zip(tensors, dtypes, strict=True))
    made = QuantizedTensor(QTensor(format, q_shape, dtype, *parts), shape, quantizer).requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


torch.serialization.add_safe_globals([_rebuild])  # for torch.load(weights_only=True)
