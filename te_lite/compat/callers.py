"""Quantizers for callers, under Transformer Engine's names. Nothing in te_lite uses them: each wraps one of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.arguments import flag
from te_lite.ops.cast import FP8_MAX, amax
from te_lite.ops.source import Source, SumDtype
from te_lite.quantize.blockwise import BLOCK_FORMATS, Blocks
from te_lite.quantize.mxfp8 import MX, MXFormat
from te_lite.quantize.per_tensor import FORMATS, Current, PerTensorFormat, per_tensor_cast
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Quantized, Quantizer
from te_lite.quantize.tensor import QuantizedTensor, SameToAutograd, quantized, source_of
from te_lite.recipe import QParams
from te_lite.watch import group_max


@dataclass(frozen=True, slots=True, eq=False)
class Given(Quantizer):
    """scale as given; the amax of v is recorded in `amax`, as a maximum."""

    format: PerTensorFormat
    fused: bool = True
    scale: Tensor = field(kw_only=True)
    amax: Tensor = field(kw_only=True)

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        if self.scale.device != source.device or self.amax.device != source.device:
            raise ValueError(
                f"a tensor on {source.device}, scale on {self.scale.device}, amax on {self.amax.device}: must be on "
                "one device; move scale and amax to the tensor's"
            )
        return per_tensor_cast(self.format, source, row, col, bias_grad, self.scale, None, self.amax)[:2]


@dataclass(frozen=True, slots=True, eq=False)
class Kept(Current):
    """Current, which leaves amax and scale in the caller's tensors. existing: it takes the amax that is there."""

    amax: Tensor = field(kw_only=True)
    scale: Tensor = field(kw_only=True)
    existing: bool = False

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        if not self.existing:
            most = amax(source)
            self.amax.copy_(most.amax() if self.amax_group is None else group_max("amax", most, self.amax_group))
        cast = per_tensor_cast(self.format, source, row, col, bias_grad, None, self.amax, None, self.pow2, self.eps)
        self.scale.copy_(cast[0].seed)  # type: ignore[arg-type]  # one scale's seed is the scale
        return cast[:2]


class CallerQuantizer:
    """Tensor [..., K] -> QuantizedTensor of the same shape. rowwise, columnwise: the layouts that it holds.

    internal: set to True, no gradient passes through what it quantizes.
    """

    internal = False
    _SETTABLE: ClassVar[tuple[str, ...]] = ("_value", "rowwise_usage", "columnwise_usage", "internal")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._SETTABLE:
            can = ", ".join(self._SETTABLE[1:])
            raise AttributeError(
                f"{type(self).__name__}.{name} = {value!r}: a quantizer that is built keeps its numbers and rules, and "
                f"only {can} can be set; build one with {name}, if its class takes that"
            )
        object.__setattr__(self, name, value)

    def __init__(self, value: Quantizer, rowwise: bool, columnwise: bool) -> None:
        self._value = value
        self.rowwise_usage, self.columnwise_usage = self._flag("rowwise", rowwise), self._flag("columnwise", columnwise)

    def _flag(self, name: str, value: object) -> bool:
        return flag(type(self).__name__, name, value)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the bytes."""
        format: Any = self._value.format
        return format.dtype

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """`tensor` quantized; its gradient is that of the result. The result may be written to.

        out: update_quantized of it instead, without a gradient. dtype: the high precision that the result stands for;
        None: the tensor's. It changes no number.
        """
        if out is not None:
            if dtype not in (None, out.dtype):
                raise ValueError(f"quantize(out=, dtype={dtype}): out stands for {out.dtype}; leave dtype out")
            return self.update_quantized(tensor, out)
        _check_tensor(type(self).__name__, "tensor", tensor)

        def change(values: Tensor) -> QuantizedTensor:
            made = quantized(values, self._value, row=self.rowwise_usage, col=self.columnwise_usage)
            q = replace(made.q, dtype=made.q.dtype if dtype is None else dtype)
            return QuantizedTensor(q, made.shape, made.quantizer)

        return change(tensor.detach()) if self.internal else SameToAutograd.apply(tensor, change)

    __call__ = quantize

    def multi_quantize(self, list_of_tensors: Sequence[Tensor]) -> list[QuantizedTensor]:
        """Each tensor quantized by itself, in order."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(
        self, src: Tensor, dst: QuantizedTensor, *, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
        """Writes `src`, quantized, into the memory of `dst`, in every layout that it holds. Returns dst.

        noop_flag: fp32, one element on dst's device. Where it is not 0, dst stays as it is, and so do this
        quantizer's amax and scale. The host does not read it; src is quantized in any case.
        """
        if not isinstance(dst, QuantizedTensor) or dst.q.format != self._value.format:
            given = dst._summary() if isinstance(dst, QuantizedTensor) else type(dst).__name__
            raise TypeError(
                f"update_quantized got dst {given}: "
                f"must be a QuantizedTensor of format {self._value.format.label}; use make_empty()"
            )
        _check_tensor("update_quantized", "src", src)
        layouts = {"row": dst.q.row is not None, "col": dst.q.col is not None}
        if noop_flag is None:
            return dst.quantize_(quantized(src.expand(dst.shape), self._value, **layouts))
        check_scalar("update_quantized(noop_flag)", "noop_flag", noop_flag)
        written = [*dst.q.tensors[:4], *(getattr(self._value, name, None) for name in ("amax", "scale"))]
        # Of fp8 the bytes, for where() knows none.
        held = [t.view(torch.uint8) if t.element_size() == 1 else t for t in written if t is not None]
        before = [part.clone() for part in held]
        self.update_quantized(src, dst)
        for part, old in zip(held, before, strict=True):
            part.copy_(torch.where(noop_flag != 0, old, part))
        return dst

    def make_empty(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: Any = None,
        requires_grad: bool = False, pin_memory: bool = False,
    ) -> QuantizedTensor:  # fmt: skip
        """A tensor of zeros for update_quantized; dtype: the high precision it stands for. No rank waits for others.

        pin_memory: its memory on the CPU is pinned, for which torch needs a GPU.
        """
        zeros, value = torch.zeros(tuple(shape), dtype=dtype, device=device), self._value
        alone = Current(value.format, pow2=value.pow2, eps=value.eps) if isinstance(value, Current) else value
        made = quantized(zeros, alone, row=self.rowwise_usage, col=self.columnwise_usage)
        if self._flag("pin_memory", pin_memory):
            made.q = made.q.map(Tensor.pin_memory)
        made.quantizer = value
        return made.requires_grad_(self._flag("requires_grad", requires_grad))  # type: ignore[return-value]

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Which layouts later results hold; None leaves one as it is."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else self._flag("rowwise", rowwise)
        self.columnwise_usage = self.columnwise_usage if columnwise is None else self._flag("columnwise", columnwise)

    def get_usages(self) -> dict[str, bool]:
        """Which layouts results hold."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of _columnwise_data: [K, ...] of a tensor [..., K], but where it is not transposed (MXFP8, 1x128 of
        E5M2)."""
        *leading, last = rowwise_data_shape
        return (*leading, last) if getattr(self._value.format, "flat", False) else (last, *leading)

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether quantize takes it: any shape of one dimension or more, of floating-point numbers."""
        return inp.dim() > 0 and inp.is_floating_point()

    def copy(self) -> CallerQuantizer:
        """The same quantizer with a usage of its own; scale and amax are shared."""
        return copy.copy(self)

    def calibrate(self, tensor: Tensor) -> None:
        """Records what a scale would be taken from; only Float8Quantizer records anything."""


class _InBlocks(CallerQuantizer):
    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of _rowwise_scale_inv or _columnwise_scale_inv of a tensor of `shape`."""
        asked = self.copy()
        asked.set_usage(rowwise=not columnwise, columnwise=columnwise)
        scale = asked.make_empty(shape, device="meta").q.operand_scale
        assert scale is not None
        return tuple(scale.shape)


def _check_tensor(owner: str, name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{owner} got {name} of type {type(value).__name__}: must be a torch.Tensor; make it one")
    if not value.is_floating_point():
        raise TypeError(f"{owner} got {name} of {value.dtype}: must be of a floating-point type; cast it first")


def check_scalar(owner: str, name: str, value: Tensor | None) -> None:
    if not isinstance(value, Tensor) or (value.dtype, value.numel()) != (torch.float32, 1):
        given = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{owner}: {name} is {given}; must be a tensor of one fp32 element")


def check_dtype(owner: str, fp8_dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    if fp8_dtype not in allowed:
        raise TypeError(f"{owner}(fp8_dtype={fp8_dtype!r}): must be {' or '.join(map(str, allowed))}; pass one")


class Float8Quantizer(CallerQuantizer):
    """One scale for the tensor, q = v * scale. scale, amax: fp32, one element each; amax is written to."""

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        check_dtype("Float8Quantizer", fp8_dtype, tuple(FP8_MAX))
        check_scalar("Float8Quantizer(scale, amax)", "scale", scale)
        check_scalar("Float8Quantizer(scale, amax)", "amax", amax)
        super().__init__(Given(FORMATS[fp8_dtype], scale=scale, amax=amax), rowwise, columnwise)

    scale = property(lambda self: self._value.scale)
    amax = property(lambda self: self._value.amax)

    def create_tensor_from_data(
        self, data: Tensor, fake_dtype: torch.dtype = torch.float32, requires_grad: bool = False, internal: bool = False
    ) -> QuantizedTensor:
        """The tensor of these bytes [..., K], uint8 or fp8, by row, in the same memory: numbers = bytes / scale.

        fake_dtype: the high precision that it stands for. internal: accepted; te_lite has one class of tensors.
        """
        if data.dtype not in (torch.uint8, self.dtype) or not data.dim() or not data.is_contiguous():
            raise TypeError(
                f"create_tensor_from_data got {tuple(data.shape)} {data.dtype}, strides {data.stride()}: must be "
                f"contiguous bytes of torch.uint8 or {self.dtype}, of at least one dimension; pass such ones"
            )
        rows = data.detach().view(self.dtype).view(-1, data.shape[-1])
        q = QTensor(self._value.format, (rows.shape[0], rows.shape[1]), fake_dtype, rows, self.scale.reciprocal())
        made = QuantizedTensor(q, data.shape, self._value)
        return made.requires_grad_(requires_grad)  # type: ignore[return-value]

    def calibrate(self, tensor: Tensor) -> None:
        """amax = max(amax, |tensor|.max())."""
        _check_tensor("calibrate", "tensor", tensor)
        torch.maximum(self.amax, amax(source_of(tensor.detach())).amax(), out=self.amax)


class Float8CurrentScalingQuantizer(CallerQuantizer):
    """One scale for the tensor, from its amax, reduced over `amax_reduction_group` if with_amax_reduction.

    amax, scale: fp32, one element each, on the tensors' device, where both are left; None: nothing is kept between
    tensors, and `device` is not needed. use_existing_amax: the scale follows from `amax` as it is.
    """

    scale = property(lambda self: getattr(self._value, "scale", None))
    amax = property(lambda self: getattr(self._value, "amax", None))

    def __init__(
        self, fp8_dtype: torch.dtype, device: Any = None, *, rowwise: bool = True, columnwise: bool = True,
        use_existing_amax: bool = False, with_amax_reduction: bool = False,
        amax_reduction_group: dist.ProcessGroup | None = None, force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0, scale: Tensor | None = None, amax: Tensor | None = None,
    ) -> None:  # fmt: skip
        check_dtype("Float8CurrentScalingQuantizer", fp8_dtype, tuple(FP8_MAX))
        if self._flag("with_amax_reduction", with_amax_reduction) and amax_reduction_group is None:
            raise ValueError(
                "with_amax_reduction=True without amax_reduction_group: te_lite assumes no group; pass one"
            )
        group = amax_reduction_group if with_amax_reduction else None
        params = QParams(power_2_scale=self._flag("force_pow_2_scales", force_pow_2_scales), amax_epsilon=amax_epsilon)
        rule: dict[str, Any] = {"pow2": params.power_2_scale, "eps": params.amax_epsilon, "amax_group": group}
        existing, value = self._flag("use_existing_amax", use_existing_amax), Current(FORMATS[fp8_dtype], **rule)
        if existing and amax is None:
            raise ValueError("use_existing_amax=True without amax: nothing says which; pass amax=, fp32 [1]")
        if amax is not None or scale is not None:
            for name, given in (("amax", amax), ("scale", scale)):
                if given is not None:
                    check_scalar("Float8CurrentScalingQuantizer(scale, amax)", name, given)
            like: Any = scale if amax is None else amax
            amax, scale = (torch.zeros_like(like) if given is None else given for given in (amax, scale))
            value = Kept(FORMATS[fp8_dtype], **rule, amax=amax, scale=scale, existing=existing)
        super().__init__(value, rowwise, columnwise)


class MXFP8Quantizer(_InBlocks):
    """fp8 in blocks of 32 along a row and, columnwise, along a column; power-of-2 scales (OCP MX v1.0)."""

    def __init__(self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True) -> None:
        check_dtype("MXFP8Quantizer", fp8_dtype, tuple(FP8_MAX))
        super().__init__(MX(MXFormat(dtype=fp8_dtype)), rowwise, columnwise)


class Float8BlockQuantizer(_InBlocks):
    """fp8 in blocks of 1x128 (block_scaling_dim=1; columnwise 128x1) or 128x128 (2)."""

    def __init__(
        self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True, amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True, block_scaling_dim: int = 2, all_gather_usage: bool = False,
    ) -> None:  # fmt: skip
        check_dtype("Float8BlockQuantizer", fp8_dtype, tuple(FP8_MAX))
        if self._flag("all_gather_usage", all_gather_usage):
            raise NotImplementedError(
                "Float8BlockQuantizer(all_gather_usage=True): te_lite gathers its tensors as they are; leave it out"
            )
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim={block_scaling_dim!r}: must be 1 (1x128) or 2 (128x128); pass one")
        params = QParams(power_2_scale=self._flag("force_pow_2_scales", force_pow_2_scales), amax_epsilon=amax_epsilon)
        vectors, squares = BLOCK_FORMATS[fp8_dtype]
        format = vectors if block_scaling_dim == 1 else squares
        super().__init__(Blocks(format, pow2=params.power_2_scale, eps=params.amax_epsilon), rowwise, columnwise)


_KINDS: dict[type, type[CallerQuantizer]] = {
    Given: Float8Quantizer, Current: Float8CurrentScalingQuantizer, Kept: Float8CurrentScalingQuantizer,
    MX: MXFP8Quantizer, Blocks: Float8BlockQuantizer,
}  # fmt: skip


def for_callers(value: Quantizer, rowwise: bool = True, columnwise: bool = True) -> CallerQuantizer:
    """One of te_lite's quantizers as the class above that makes it; CallerQuantizer where none does."""
    kind = _KINDS.get(type(value), CallerQuantizer)
    made = kind.__new__(kind)
    CallerQuantizer.__init__(made, value, rowwise, columnwise)
    return made
