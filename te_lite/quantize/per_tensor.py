"""fp8 with one scale a tensor: delayed scaling (scales of earlier steps) and current scaling (the tensor's own).

Formulas: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433); scales: docs/background/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.ops.cast import amax, transform
from te_lite.ops.gemm import apart, gemm_fp8
from te_lite.ops.norm import Formula, norm_cast
from te_lite.ops.registry import capturing
from te_lite.ops.source import Source, SumDtype
from te_lite.ops.transpose import PAD, transpose
from te_lite.parallel import TensorParallel, ranks_of
from te_lite.quantize import replay
from te_lite.quantize.delayed import ScaleState
from te_lite.quantize.identity import HIGH_PRECISION, Calibrating, Identity
from te_lite.quantize.qtensor import Fp8Format, Held, Layout, QTensor, Scaled, TensorFormat
from te_lite.quantize.quantizer import Both, GemmOperands, GemmQuantizers, Quantized, Quantizer, Site
from te_lite.recipe import DelayedScaling, Float8CurrentScaling, QParams
from te_lite.watch import group_max

LEAST_COLUMNS = 256  # tokens of a shard: rows of so many bytes travel at the links' rate (docs/notebook/schedules.md)
INPUTS_PER_GEMM = 3  # forward slots: input, weight, output (Transformer Engine's order)
GRADS_PER_GEMM = 2  # backward slots: grad_output, grad_input


@dataclass(frozen=True, slots=True)
class PerTensorFormat(Fp8Format):
    """fp8 data and one fp32 inverse scale; v = data * inverse scale. The col layout is a transpose of the bytes.

    The scale is agreed on by all ranks before the cast (a shared amax), so only data travels.
    """

    gemm: str = "fp8_per_tensor"
    col_scales: ClassVar[tuple[float, int]] = 0, 1
    scales_product: bool = True

    @property
    def label(self) -> str:  # type: ignore[override]  # of the class in the base, as BlockFormat's
        return "e4m3" if self.dtype == torch.float8_e4m3fn else "e5m2"

    def make_col(self, q: Held) -> tuple[Tensor, Tensor]:
        return transpose(q.row), q.row_scale

    def gathers_columns(self, rows: int) -> bool:
        return rows % PAD == 0 and rows >= LEAST_COLUMNS

    def wire(self, q: Held, layout: Layout) -> tuple[Tensor, ...]:
        return (q.operand(layout)[0],)

    def matmul(self, a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
               out: Tensor | None = None) -> Tensor:  # fmt: skip
        if a[1].numel() == b[1].numel() == 1:
            return gemm_fp8(a[0], b[0], a[1], b[1], out_dtype, bias, fast_accum, out)
        return _matmul_shards(a, b, out_dtype, bias, fast_accum)

    def accumulate_(self, out: Tensor, a: Scaled, b: Scaled, fast_accum: bool) -> None:
        if a[1].numel() == b[1].numel() == 1:
            Fp8Format.accumulate_(self, out, a, b, fast_accum)
        else:
            TensorFormat.accumulate_(self, out, a, b, fast_accum)


def _matmul_shards(a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """matmul of operands that hold a scale a shard: [R, 1] for shards of a's rows, [1, R] for shards of the inner
    dimension, in either operand."""
    (a_data, a_scale), (b_data, b_scale) = a, b
    if a_scale.shape[-1] == 1 and b_scale.numel() == 1:
        parts = zip(a_data.chunk(a_scale.numel()), apart(a_scale), strict=True)
        return torch.cat([gemm_fp8(x, b_data, s, b_scale, out_dtype, bias, fast_accum) for x, s in parts])
    shards = max(a_scale.numel(), b_scale.numel())
    a_scales, b_scales = (apart(scale) * (shards // scale.numel()) for scale in (a_scale, b_scale))
    pieces = zip(a_data.chunk(shards, 1), b_data.chunk(shards, 1), a_scales, b_scales, strict=True)
    products = [
        gemm_fp8(x.contiguous(), y.contiguous(), s, t, torch.float32, None, fast_accum) for x, y, s, t in pieces
    ]
    total = torch.stack(products).sum(0)
    return (total if bias is None else total + bias).to(out_dtype)


@dataclass(frozen=True, slots=True)
class PerShardFormat(PerTensorFormat):
    """A shard with a scale of its own that travels with it; gathered, scale [R, 1] by row and [1, R] by column.

    The GEMM is cut by shard: R products by row, a sum of R by column.
    """

    def dequantize(self, q: Held, layout: Layout) -> Tensor:
        scale = (q.row_scale if layout == "row" else q.col_scale).view(-1)
        data = q.row if layout == "row" else q.col[:, : q.shape[0]].t()
        return (data.float() * scale.repeat_interleave(q.shape[0] // scale.numel()).unsqueeze(1)).to(q.dtype)

    def make_col(self, q: Held) -> tuple[Tensor, Tensor]:
        return transpose(q.row), q.row_scale.view(1, -1)

    def gathers_columns(self, rows: int) -> bool:
        return False

    def wire(self, q: Held, layout: Layout) -> tuple[Tensor, ...]:
        return q.row, q.row_scale

    def from_wire(self, parts: tuple[Tensor, ...], layout: Layout, like: QTensor, rows: int) -> QTensor:
        whole: Any = QTensor(self, (rows, like.shape[1]), like.dtype, parts[0], parts[1].view(-1, 1))
        if like.shape[0] % PAD == 0:
            return whole
        # Shards end off the pad.
        return QTensor(HIGH_PRECISION, whole.shape, whole.dtype, self.dequantize(whole, "row"))


FORMATS = {dtype: PerTensorFormat(dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
_PER_SHARD = {dtype: PerShardFormat(dtype=dtype, shard_multiple=PAD) for dtype in FORMATS}


def per_tensor_cast(
    format: Fp8Format, source: Source, row: bool, col: bool, bias_grad: SumDtype, scale: Tensor | None,
    amax: Tensor | None = None, amax_out: Tensor | None = None, pow2: bool = False, eps: float = 0.0,
    x: QTensor | None = None,
) -> Both:  # fmt: skip
    """What a quantizer gives, by transform(); the seed is the scale. x: of a gradient of an activation, what the
    activation was quantized to; in its place comes its col layout, from the same read."""
    act_format: Any = None if x is None else x.format
    made = transform(
        source, fp8_dtype=format.dtype, row=row, col=col, scale=scale, amax=amax, amax_out=amax_out, pow2=pow2, eps=eps,
        bias_grad=bias_grad, act_dtype=act_format and act_format.dtype, act_scale=None if x is None else x.seed,
    )  # fmt: skip
    shape: Any = tuple(source.x.shape) if source.kind != "act" else (source.rows, source.cols)
    inverse, seed = made.scale_inv, made.scale if scale is None else scale
    q = QTensor(format, shape, source.x.dtype, made.row, inverse, made.col, inverse, seed)
    if x is not None:
        x = QTensor(x.format, x.shape, x.dtype, None, None, made.act, made.act_scale_inv, x.seed)
    return q, made.bias_grad, x


@dataclass(frozen=True, slots=True)
class PerTensor(Quantizer):
    """By one scale, which is the seed. quantize() is quantize_and_again() without x."""

    format: Fp8Format

    def again(self, source: Source, earlier: QTensor) -> QTensor:
        return per_tensor_cast(self.format, source, False, True, None, earlier.seed)[0]

    def gives_again(self, x: Quantizer) -> bool:
        return {type(self), type(x)} <= {Delayed, Current}  # a subclass may quantize otherwise


@dataclass(frozen=True, slots=True)
class Current(PerTensor):
    """scale = fp8_max / amax(v), the amax reduced over `amax_group` where v is about to be gathered."""

    from_gemm: ClassVar[str] = "amax"
    recordable: ClassVar[bool] = True

    format: Fp8Format
    fused: bool = True
    needs_amax: bool = True
    pow2: bool = False
    eps: float = 0.0
    amax_group: dist.ProcessGroup | None = None

    def quantize_and_again(self, grad: Source, row: bool, col: bool, bias_grad: SumDtype, x: QTensor | None) -> Both:
        most = amax(grad) if grad.amax is None else grad.amax
        if self.amax_group is not None:
            most = group_max("amax for current scaling", most, self.amax_group)
        return per_tensor_cast(self.format, grad, row, col, bias_grad, None, most, None, self.pow2, self.eps, x)

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        return Current.quantize_and_again(self, source, row, col, bias_grad, None)[:2]


@dataclass(frozen=True, slots=True)
class Delayed(PerTensor):
    """scale from the state's history; the amax of v is recorded there in the same pass."""

    from_gemm: ClassVar[str] = "fp8"
    recordable: ClassVar[bool] = True

    format: Fp8Format
    fused: bool = True
    state: ScaleState = None  # type: ignore[assignment]  # there wherever it quantizes
    slot: int = 0

    def take_scale(self) -> tuple[Tensor, Tensor | None]:
        return self.state.take(self.slot)

    def quantize_and_again(self, grad: Source, row: bool, col: bool, bias_grad: SumDtype, x: QTensor | None) -> Both:
        scale, amax_out = self.state.take(self.slot)
        return per_tensor_cast(self.format, grad, row, col, bias_grad, scale, None, amax_out, x=x)

    def quantize(self, source: Source, *, row: bool = True, col: bool = False, bias_grad: SumDtype = None) -> Quantized:
        scale, amax_out = self.state.take(self.slot)  # as quantize_and_again, with one call less
        return per_tensor_cast(self.format, source, row, col, bias_grad, scale, None, amax_out)[:2]

    def quantize_for_all(self, source: Source, col: bool) -> tuple[QTensor, Any]:
        """With the amax of these values alone: in the state are those of earlier ones too."""
        scale, amax_out = self.state.take(self.slot)
        if amax_out is None:  # a checkpointed call that is computed again, which adopts nothing
            return per_tensor_cast(self.format, source, True, col, None, scale)[0], None
        amax = torch.zeros_like(amax_out)
        q = per_tensor_cast(self.format, source, True, col, None, scale, None, amax)[0]
        torch.maximum(amax_out, amax, out=amax_out)
        return q, amax

    def adopts(self, other: Quantizer, q: QTensor, noted: Any) -> bool:
        """By the scale of `other`: where both have always read the same tensors, on all ranks that share amaxes, their
        scales are equal. Not where a step was taken since, beside checkpointed calls, which note each scale, and for
        CUDA graphs, which hold each state alone."""
        if type(other) is not Delayed or self.format != other.format or capturing() or replay.OPEN.frames:
            return False
        mine, theirs, seed = self.state, other.state, q.seed
        if mine.pool is not theirs.pool or mine.pool.fixed or seed is None or noted is None:
            return False
        if seed.untyped_storage()._cdata != theirs.scale.untyped_storage()._cdata:
            return False
        amax: Any = mine.amax_at(self.slot)
        torch.maximum(amax, noted, out=amax)
        return True

    def norm_rows(self, x: Tensor, *formula: *Formula) -> tuple[QTensor, Tensor | None, Tensor] | None:
        if x.dtype == torch.float32:
            return None  # norm_cast may sum in another order than norm_stats
        scale, amax_out = self.take_scale()
        row, scale_inv, mean, rstd = norm_cast(x, *formula, scale, self.format.dtype, amax_out)
        return QTensor(self.format, (row.shape[0], row.shape[1]), x.dtype, row, scale_inv, seed=scale), mean, rstd


def _check_delayed(recipe: DelayedScaling, tp: TensorParallel, amax_group: dist.ProcessGroup | None) -> None:
    if not (tp.active and tp.sequence_parallel):
        return
    if not recipe.reduce_amax:
        raise ValueError(
            "DelayedScaling(reduce_amax=False) with sequence parallelism: ranks would scale shards of one tensor "
            "differently; use reduce_amax=True or Float8CurrentScaling"
        )
    ranks = set(ranks_of(amax_group or tp.group))
    missing = set(ranks_of(tp.group)) - ranks
    if missing:
        raise ValueError(
            f"amax group {sorted(ranks)} lacks tensor-parallel ranks {sorted(missing)}: with sequence parallelism it "
            "must contain the whole tensor-parallel group; leave fp8_group=None for that group"
        )


def delayed_operands(recipe: DelayedScaling, site: Site) -> GemmOperands:
    """Delayed scaling: x and w (and y) in the forward format, dy (and dx) in the backward format."""
    if not site.calibrating:
        _check_delayed(recipe, site.tp, site.amax_group)  # before any state is made or resized
    forward, backward = site.state("forward"), site.state("backward")
    first, first_grad = INPUTS_PER_GEMM * site.gemm, GRADS_PER_GEMM * site.gemm
    if site.calibrating:
        plain = Identity(target=site.dtype)
        saw_x, saw_w = (Calibrating(target=site.dtype, state=forward, slot=first + i) for i in range(2))
        return GemmOperands(GemmQuantizers(saw_x, saw_w), GemmQuantizers(plain, saw_w), GemmQuantizers(plain, saw_x))
    fwd, bwd = FORMATS[recipe.fp8_format.forward_dtype], FORMATS[recipe.fp8_format.backward_dtype]
    x, w, y = (Delayed(fwd, state=forward, slot=first + i) for i in range(INPUTS_PER_GEMM))
    dy, dx = (Delayed(bwd, state=backward, slot=first_grad + i) for i in range(GRADS_PER_GEMM))
    return GemmOperands(GemmQuantizers(x, w, fast_accum=True), GemmQuantizers(dy, w), GemmQuantizers(dy, x), y, dx)


def current_operands(recipe: Float8CurrentScaling, site: Site) -> GemmOperands:
    """Current scaling: as delayed_operands, each tensor scaled by itself."""
    fwd, bwd = FORMATS[recipe.fp8_format.forward_dtype], FORMATS[recipe.fp8_format.backward_dtype]

    def current(format: PerTensorFormat, params: QParams, gathered: bool = False) -> Current:
        alone = gathered and recipe.per_shard_scales
        group = site.tp.group if gathered and not alone else None
        format = _PER_SHARD[format.dtype] if alone else format
        return Current(format, pow2=params.power_2_scale, eps=params.amax_epsilon, amax_group=group)

    x = current(fwd, recipe.fp8_quant_fwd_inp, site.tp.gathers_input)
    w = current(fwd, recipe.fp8_quant_fwd_weight)
    dy = current(bwd, recipe.fp8_quant_bwd_grad, site.tp.gathers_grad)
    return GemmOperands(
        fprop=GemmQuantizers(x, w, not recipe.fp8_gemm_fprop.use_split_accumulator),
        dgrad=GemmQuantizers(dy, w, not recipe.fp8_gemm_dgrad.use_split_accumulator),
        wgrad=GemmQuantizers(dy, x, not recipe.fp8_gemm_wgrad.use_split_accumulator),
        output=current(fwd, recipe.fp8_quant_fwd_inp),
        grad_input=current(bwd, recipe.fp8_quant_bwd_grad),
    )
