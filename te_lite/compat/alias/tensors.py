"""Classes of quantized tensors that isinstance answers to, transformer_engine_torch.DType, and fp8 parameters under a
distributed optimizer. te_lite has one class of quantized tensors; its format says which of Transformer Engine's it is.
What Transformer Engine's tensors have beside te_lite's is in tensor_attributes.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from te_lite.compat.alias import tensor_attributes
from te_lite.compat.alias.names import NotThere
from te_lite.compat.callers import CallerQuantizer, check_dtype, check_scalar
from te_lite.ops.block_cast import BLOCK
from te_lite.ops.cast import FP8_MAX, saturated, scale_from_amax_ref
from te_lite.ops.source import plain
from te_lite.quantize.blockwise import SQUARES, BlockFormat
from te_lite.quantize.mxfp8 import MXFormat
from te_lite.quantize.per_tensor import FORMATS, PerShardFormat, PerTensorFormat
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.tensor import QuantizedTensor


class _Members(type):
    """isinstance(x, cls): x is the value of one of cls's members."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return any([instance is member for name, member in vars(cls).items() if name[0] == "k"])

    def __getattr__(cls, name: str) -> Any:
        raise NotThere(
            f"DType.{name}: te_lite has no such type; it has {', '.join(n for n in vars(cls) if n[0] == 'k')}"
        )


class DType(metaclass=_Members):
    """transformer_engine_torch.DType: each member is the torch dtype itself, which te_lite's quantizers take."""

    kByte = torch.uint8
    kInt32 = torch.int32
    kInt64 = torch.int64
    kFloat32 = torch.float32
    kFloat16 = torch.float16
    kBFloat16 = torch.bfloat16
    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2
    kFloat8E8M0 = torch.float8_e8m0fnu


TE_DType_To_Torch = {value: value for name, value in vars(DType).items() if name[0] == "k"}
TE_DType = TE_DType_To_Torch


class _ByFormat(type(QuantizedTensor)):  # type: ignore[misc]  # torch.Tensor's own metaclass, which has no public name
    """isinstance(x, cls): x is a QuantizedTensor of one of cls.formats. cls(...) is cls.build(...)."""

    formats: tuple[type, ...]
    build: Callable[..., QuantizedTensor] | None = None
    make_like = staticmethod(tensor_attributes.make_like)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, QuantizedTensor) and type(instance.q.format) in cls.formats

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.build is not None:
            return cls.build(*args, **kwargs)
        raise NotImplementedError(
            f"{cls.__name__}(...): te_lite makes these tensors by a quantizer; use quantizer.quantize or make_empty"
        )


def _of_bytes(
    shape: Sequence[int], dtype: torch.dtype, *, data: Tensor | None = None, fp8_scale_inv: Tensor,
    fp8_dtype: torch.dtype, requires_grad: bool = False, data_transpose: Tensor | None = None,
    quantizer: CallerQuantizer | None = None, device: Any = None, fake_dtype: torch.dtype | None = None,
) -> QuantizedTensor:  # fmt: skip
    """The tensor [..., K] of bytes that are there, in their memory; numbers = bytes * fp8_scale_inv.

    data: uint8 or fp8, as many as `shape` has; data_transpose: the same [K, ...]. One of them may be None. quantizer:
    writes to it; None: it is read only. dtype, fake_dtype: the high precision that it stands for; device: the data's.
    Raises ValueError for bytes of another number or shape, TypeError for what is not fp8 or not of one format.
    """
    check_dtype("Float8Tensor", fp8_dtype, tuple(FORMATS))
    check_scalar("Float8Tensor", "fp8_scale_inv", fp8_scale_inv)
    given = data if data is not None else data_transpose
    if given is None or not shape:
        raise ValueError("Float8Tensor: no data or no dimension; pass data or data_transpose, and a shape")
    q = QTensor(FORMATS[fp8_dtype], (math.prod(shape[:-1]), shape[-1]), dtype if fake_dtype is None else fake_dtype)
    q.row, q.row_scale = given.new_empty(q.shape, dtype=fp8_dtype), fp8_scale_inv.detach().view(1)
    made = QuantizedTensor(q, shape)
    tensor_attributes.set_quantizer(made, quantizer)
    if data is not None:
        tensor_attributes.set_rows(made, data)
    if data_transpose is not None:
        tensor_attributes.set_columns(made, data_transpose)
    if data is None:
        tensor_attributes.set_rows(made, None)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


class Float8Tensor(QuantizedTensor, metaclass=_ByFormat):
    """One scale a tensor."""

    formats = PerTensorFormat, PerShardFormat
    build = staticmethod(_of_bytes)


class MXFP8Tensor(QuantizedTensor, metaclass=_ByFormat):
    """A scale for 32 values."""

    formats = (MXFormat,)


class Float8BlockwiseQTensor(QuantizedTensor, metaclass=_ByFormat):
    """A scale for 1x128 or 128x128 values."""

    formats = (BlockFormat,)


def _row(weight: Any, what: str) -> Tensor:
    """The rowwise bytes of a quantized weight whose columnwise bytes follow from them."""
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"{what} got a {type(weight).__name__}: must be a quantized parameter; pass those alone")
    q = weight.q
    if q.row is None or not (isinstance(weight, Float8Tensor) or q.format == SQUARES):
        raise NotImplementedError(
            f"{what} of {weight._summary()}: te_lite does it for weights with one scale a tensor or for 128x128, whose "
            "bytes by row are all; use recipe delayed, current or blockwise, or parameters in high precision"
        )
    return q.row


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """The weight's bytes lie in `new_raw_data` (uint8, of as many elements) from now on, with the values they have."""
    row = _row(tensor, "replace_raw_data")
    new = new_raw_data.detach().view(row.dtype).view(row.shape)
    new.copy_(row)
    tensor.q.row = new


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """After the bytes of weights were written by an all-gather: what was made from the old ones is made again, in the
    same memory, where CUDA graphs read it."""
    for weight in model_weights:
        if isinstance(weight, QuantizedTensor):
            if weight.q.col is not None and weight.q.format.col_from_row:
                tensor_attributes.remake_columns(weight)
            torch.autograd.graph.increment_version(weight)


def cast_master_weights_to_fp8(
    model_weights: Sequence[Any], master_weights: Sequence[Tensor | None], start_offsets: Sequence[int | None],
    group: dist.ProcessGroup, fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:  # fmt: skip
    """Each rank writes the bytes of its master shard into its weights, with scales that all ranks of `group` agree on.

    master_weights: a flat shard of each weight, or None; start_offsets: where it begins in the flattened weight. An
    all-gather of the bytes then gives what weight.quantize_(whole master) would give, bit for bit.
    """
    if fsdp_shard_model_weights is not None and any(shard is not None for shard in fsdp_shard_model_weights):
        raise NotImplementedError(
            "cast_master_weights_to_fp8(fsdp_shard_model_weights=...): te_lite has no such shards"
        )
    for weight, master, start in zip(model_weights, master_weights, start_offsets, strict=True):
        row = _row(weight, "cast_master_weights_to_fp8")
        mine = slice(0, 0) if master is None else slice(start, (start or 0) + master.numel())
        whole = torch.zeros(row.shape, device=row.device)  # 0 where other ranks have a shard: it raises no maximum
        if master is not None:
            whole.view(-1)[mine] = master.detach().reshape(-1).float()
        cast = _agreed_squares if weight.q.format == SQUARES else _agreed_scale
        q_row, scale = cast(whole, weight, group)
        row.view(-1)[mine] = q_row.view(-1)[mine]
        weight.q.row_scale.copy_(scale)
    if not manual_post_all_gather_processing:
        post_all_gather_processing(model_weights)


def _agreed_scale(whole: Tensor, weight: Any, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(bytes, inverse scale) of a weight with one scale, its amax that of all ranks."""
    q, _ = replace(weight.quantizer, amax_group=group).quantize(plain(whole))
    return q.row, q.row_scale


def _agreed_squares(whole: Tensor, weight: Any, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(bytes [M, K], inverse scales) of a weight in 128x128 blocks, their amaxes those of all ranks."""
    (m, k), rule = whole.shape, weight.quantizer
    tiles = F.pad(whole, (0, -k % BLOCK, 0, -m % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    amax = tiles.abs().amax((1, 3))
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    scale = scale_from_amax_ref(amax, FP8_MAX[torch.float8_e4m3fn], rule.eps, rule.pow2)
    values = (tiles * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:m, :k]
    return saturated(values, FP8_MAX[torch.float8_e4m3fn]).to(torch.float8_e4m3fn), 1.0 / scale
