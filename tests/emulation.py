"""Quantized GEMM operands in plain torch, from the formats' formulas alone; te_lite is not imported.

An operand's quantizer here is a function Tensor -> Tensor that quantizes and dequantizes. Stateful ones
(delayed scaling) record what they saw; `update()` is the step that the library does at the end of a pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.quantize.formats import MX_COL, MX_ROW, Format, blockwise, columnwise, rowwise

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max


def amax_of(v: Tensor) -> Tensor:
    """fp32 [] largest |v|; nan counts as inf; 0 for an empty tensor."""
    if v.numel() == 0:
        return torch.zeros((), dtype=torch.float32)
    magnitude = v.detach().float().abs()
    return torch.where(magnitude.isnan(), torch.inf, magnitude).amax().cpu()


def divide(numerator: float, amax: Tensor) -> Tensor:
    """fp32 numerator / amax, IEEE, with an infinite quotient turned into fp32's largest value."""
    scale = torch.tensor(numerator, dtype=torch.float32) / amax
    return torch.where(scale.isinf(), torch.tensor(FP32_MAX), scale)


def current_scale(amax: Tensor, fp8_max: float, eps: float = 0.0, pow2: bool = False) -> Tensor:
    amax = torch.where(amax < eps, torch.tensor(eps, dtype=torch.float32), amax)
    if not bool(torch.isfinite(amax)) or float(amax) == 0.0:
        return torch.ones((), dtype=torch.float32)
    scale = divide(fp8_max, amax)
    if pow2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def round_trip(v: Tensor, scale: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """cast(clamp(v * scale)) / scale, as a consumer reads it: bytes times fp32(1 / scale); dtype of v."""
    top = FP8_MAX[fp8_dtype]
    scale = scale.to(v.device)
    data = (v.detach().float() * scale).clamp(-top, top).to(fp8_dtype)
    return data.to(v.dtype) * (1.0 / scale).to(v.dtype)


def identity(v: Tensor) -> Tensor:
    return v


@dataclass
class Current:
    """Per-tensor current scaling; `shards` > 1 gives each of the equal pieces along `dim` its own scale."""

    fp8_dtype: torch.dtype
    dim: int = 0
    shards: int = 1
    pow2: bool = False
    eps: float = 0.0

    def __call__(self, v: Tensor) -> Tensor:
        if v.numel() == 0:
            return v
        top = FP8_MAX[self.fp8_dtype]
        pieces = [
            round_trip(p, current_scale(amax_of(p), top, self.eps, self.pow2), self.fp8_dtype)
            for p in v.chunk(self.shards, self.dim)
        ]
        return torch.cat(pieces, self.dim)

    def update(self) -> None:
        pass


@dataclass
class Delayed:
    """Delayed scaling of one tensor: fp32 history [length] (row 0 is the current amax) and fp32 scale []."""

    fp8_dtype: torch.dtype
    length: int = 1024
    algo: str = "max"
    margin: int = 0
    history: Tensor = field(init=False)
    scale: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.history = torch.zeros(self.length, dtype=torch.float32)
        self.scale = torch.ones((), dtype=torch.float32)

    def __call__(self, v: Tensor) -> Tensor:
        self.record(v)
        return round_trip(v, self.scale, self.fp8_dtype)

    def record(self, v: Tensor) -> None:
        self.history[0] = torch.maximum(self.history[0], amax_of(v))

    def update(self) -> None:
        history = self.history
        if not bool(torch.isfinite(history[0])):
            history[0] = 0.0
        if float(history[0]) == 0.0:
            return
        amax = history.max() if self.algo == "max" else history[0].clone()
        rolled = history.roll(-1)
        rolled[0] = 0.0
        self.history = rolled
        if bool(torch.isfinite(amax)) and float(amax) > 0.0:
            self.scale = divide(FP8_MAX[self.fp8_dtype] * 2.0**-self.margin, amax)


@dataclass
class Blocks:
    """A block-scaled format; each of pieces[0] x pieces[1] equal parts of the tensor starts blocks of its own."""

    format: Format
    pieces: tuple[int, int] = (1, 1)

    def __call__(self, v: Tensor) -> Tensor:
        rows = [
            torch.cat([self.format.round_trip(part) for part in row.chunk(self.pieces[1], 1)], 1)
            for row in v.detach().chunk(self.pieces[0])
        ]
        return torch.cat(rows)


Quantize = Callable[[Tensor], Tensor]


@dataclass
class Operands:
    """How each operand of one linear's GEMMs is quantized: x and w in fprop, dy and w in dgrad, dy and x in wgrad.

    None: the same numbers as in the other GEMM (always so with one scale a tensor).
    """

    x: Quantize = identity
    w: Quantize = identity
    dy: Quantize = identity
    w_dgrad: Quantize | None = None
    dy_wgrad: Quantize | None = None
    x_wgrad: Quantize | None = None

    @property
    def quantized(self) -> bool:
        return self.x is not identity

    @property
    def wgrad_quantized(self) -> bool:
        return self.quantized and self.x_wgrad is not identity

    def update(self) -> None:
        for quantize in (self.x, self.w, self.dy):
            if hasattr(quantize, "update"):
                quantize.update()


def operands(
    recipe: str, mode: str | None = None, tp: int = 1, token_shards: int = 1, grad: torch.dtype = E5M2, **options
) -> Operands:
    """The operands of a linear under a te_lite recipe name with the recipe's defaults, or a name of harness.OPTIONS.

    Where each rank scales its own shard, so does the unsharded oracle: a weight always does (current
    scaling); dy of a column- and x of a row-parallel linear are sharded along features. x of a column- and dy
    of a row-parallel linear are whole on every rank (or their amax is reduced). Delayed scaling reduces its
    amaxes over the tensor-parallel group, so the whole tensor has one scale.
    """
    if recipe == "bf16":
        return Operands()
    if recipe == "delayed":
        return Operands(Delayed(E4M3, **options), Delayed(E4M3, **options), Delayed(grad, **options))
    if recipe == "current_per_shard":
        x, w, dy = _pieces(mode, tp, token_shards)
        return Operands(Blocks(Format(), x), Blocks(Format(), w), Blocks(Format(fp8=grad), dy))
    if recipe != "current":
        return _block_operands(recipe, mode, tp, token_shards)
    if mode == "column":
        return Operands(Current(E4M3), Current(E4M3, 0, tp), Current(grad, 1, tp))
    if mode == "row":
        return Operands(Current(E4M3, 1, tp), Current(E4M3, 1, tp), Current(grad))
    return Operands(Current(E4M3), Current(E4M3), Current(grad))


def _pieces(mode: str | None, tp: int, token_shards: int) -> tuple[tuple[int, int], ...]:
    """Into how many parts (along rows, along columns) ranks divide x [M, K], w [N, K] and dy [M, N].

    Along features always; along tokens only a tensor that is gathered, the others are whole on each rank.
    """
    if mode == "column":
        return (token_shards, 1), (tp, 1), (1, tp)
    return ((1, tp), (1, tp), (token_shards, 1)) if mode == "row" else ((1, 1),) * 3


def _block_operands(recipe: str, mode: str | None, tp: int, token_shards: int) -> Operands:
    """Blocks lie along each GEMM's inner dimension, so the two views of a tensor differ, and end with a rank's part.

    Rowwise, one scale for all tokens is agreed on by all ranks.
    """
    pow2, grad = not recipe.endswith("_fp32"), E5M2 if recipe.endswith("_hybrid") else E4M3
    recipe = recipe.removesuffix("_fp32").removesuffix("_hybrid")
    x, w, dy = _pieces(mode, tp, 1 if recipe.startswith("rowwise") else token_shards)
    if recipe == "rowwise_with_gw_hp":
        row = rowwise(pow2)
        return Operands(
            Blocks(row, x), Blocks(row, w), Blocks(row, dy), Blocks(Format(pow2=pow2), w), identity, identity
        )
    row, w_row, w_col, col = {
        "mxfp8": (MX_ROW, MX_ROW, MX_COL, MX_COL),
        "blockwise": (
            *(blockwise(1, 128, pow2), blockwise(128, 128, pow2)),
            *(blockwise(128, 128, pow2), blockwise(128, 1, pow2)),
        ),
        "rowwise": (rowwise(pow2), rowwise(pow2), columnwise(pow2), columnwise(pow2)),
    }[recipe]
    dy_row, dy_col = replace(row, fp8=grad), replace(col, fp8=grad)
    return Operands(
        Blocks(row, x), Blocks(w_row, w), Blocks(dy_row, dy), Blocks(w_col, w), Blocks(dy_col, dy), Blocks(col, x)
    )
