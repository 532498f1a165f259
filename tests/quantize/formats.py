"""Oracle of every fp8 format, in plain torch from the formats' definitions; te_lite is not imported.

Each format is one program: cut v[M, K] into blocks, take one scale a block from its amax, multiply, round to the
nearest fp8 number. Formats differ in the block's shape and in the rule for the scale:

    per tensor  [M, K]     fp8_max / amax      TE's current scaling
    row, column [1, K]     the same            one scale a row of v, [M, 1] one a column
    blockwise   [1, 128], [128, 1], [128, 128]
    MX          [1, 32], [32, 1]               OCP Microscaling Formats (MX) v1.0: a power of two, one byte (E8M0)
    delayed     [M, K]     given

fp8: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
NAN_BYTE = 0x7F
FP32_MAX = torch.finfo(torch.float32).max

# ---- fp8 numbers ----


def code_points(fp8: torch.dtype) -> Tensor:
    """fp64 [n]: the finite magnitudes of codes 0, 1, 2, ..., increasing."""
    bits, bias, count = (3, 7, 0x7F) if fp8 == E4M3 else (2, 15, 0x7C)
    code = torch.arange(count)
    exponent, mantissa = code >> bits, (code & (2**bits - 1)).double() / 2**bits
    leading = (exponent > 0).double()  # subnormals have no leading 1 and the exponent of the smallest normal
    return (leading + mantissa) * torch.exp2(exponent.clamp(min=1).double() - bias)


_POINTS = {fp8: code_points(fp8) for fp8 in (E4M3, E5M2)}
_MIDDLES = {fp8: (points[1:] + points[:-1]) / 2 for fp8, points in _POINTS.items()}


def encode(v: Tensor, fp8: torch.dtype) -> Tensor:
    """fp32 -> uint8: nearest code, a tie to the even one; inf saturates; every nan is 0x7F."""
    magnitude = v.double().abs().clamp(max=LARGEST[fp8])
    middles = _MIDDLES[fp8]
    code = torch.searchsorted(middles, magnitude)
    tie = middles[code.clamp(max=len(middles) - 1)] == magnitude
    code = code + (tie & (code % 2 == 1))
    code = code + 0x80 * torch.signbit(v)
    return torch.where(v.isnan(), NAN_BYTE, code).to(torch.uint8)


def decode(data: Tensor, fp8: torch.dtype) -> Tensor:
    """uint8 -> fp32, exact."""
    table = torch.full((128,), torch.nan, dtype=torch.float32)
    table[: len(_POINTS[fp8])] = _POINTS[fp8].float()
    if fp8 == E5M2:
        table[0x7C] = torch.inf
    return torch.cat((table, -table))[data.long()]


# ---- blocks and their scales ----

Block = tuple[int | None, int | None]  # rows and columns of a block; None: all of the matrix


def _counts(shape: torch.Size, block: Block) -> list[tuple[int, int]]:
    """(size, number) of blocks along each dimension; the last block may be ragged."""
    sizes = [side or max(length, 1) for side, length in zip(block, shape, strict=True)]
    return [
        (size, 1 if side is None else -(-length // size))
        for side, size, length in zip(block, sizes, shape, strict=True)
    ]


def block_amax(v: Tensor, block: Block) -> Tensor:
    """fp32 [blocks of rows, blocks of columns]: largest |v| of each, nan where it holds one, 0 where it is empty."""
    (size_m, count_m), (size_k, count_k) = _counts(v.shape, block)
    m, k = v.shape
    padded = F.pad(v.float().abs(), (0, size_k * count_k - k, 0, size_m * count_m - m))
    return padded.view(count_m, size_m, count_k, size_k).amax((1, 3))


def spread(per_block: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """[blocks, blocks] -> [M, K]: each element's own value."""
    (size_m, _), (size_k, _) = _counts(shape, block)
    return per_block.repeat_interleave(size_m, 0)[: shape[0]].repeat_interleave(size_k, 1)[:, : shape[1]]


def e8m0(amax: Tensor, largest: float = 448.0) -> Tensor:
    """uint8: biased exponent of amax / largest rounded up to a power of two; nan 0xFF, inf 0xFE, zero 0."""
    # In fp64 a quotient is a power of two exactly when amax / largest is.
    mantissa, exponent = torch.frexp(amax.double() / largest)  # 0.5 <= mantissa < 1
    power = exponent.int() - (mantissa == 0.5).int()
    biased = (power + 127).clamp(0, 0xFE)
    biased = torch.where(amax == 0, 0, torch.where(amax.isinf(), 0xFE, biased))
    return torch.where(amax.isnan(), 0xFF, biased).to(torch.uint8)


def power_of_two(biased: Tensor, sign: int = 1) -> Tensor:
    """fp32 2^(sign * (e - 127)) of E8M0 bytes; nan of 0xFF."""
    value = torch.exp2(sign * (biased.double() - 127)).float()
    return torch.where(biased == 0xFF, torch.nan, value)


def division_scale(amax: Tensor, largest: float, limit: float, pow2: bool = False, eps: float = 0.0) -> Tensor:
    """fp32 largest / amax; amax at least eps; 1 where amax is 0, inf or nan; `limit` where it overflows; with pow2
    the next power of two below."""
    amax = torch.where(amax < eps, torch.tensor(eps, dtype=torch.float32), amax)
    scale = torch.tensor(largest, dtype=torch.float32) / amax
    scale = torch.where(scale.isinf(), limit, scale)
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)
    if not pow2:
        return scale
    return torch.exp2(torch.frexp(scale).exponent.double() - 1).float()


# ---- formats ----


class Quantized(NamedTuple):
    """data: uint8 [M, K], one fp8 byte an element. scale_inv: fp32 [blocks, blocks]. e8m0: the same as bytes (MX)."""

    data: Tensor
    scale_inv: Tensor
    e8m0: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """own_limit: a scale that overflows becomes the largest number of the source's dtype, not fp32's."""

    block: Block = (None, None)
    fp8: torch.dtype = E4M3
    mx: bool = False
    pow2: bool = False
    eps: float = 0.0
    own_limit: bool = False

    def scales(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(scale, inverse scale, E8M0 bytes) of each block."""
        amax = block_amax(v, self.block)
        if self.mx:
            bytes_ = e8m0(amax, LARGEST[self.fp8])
            return power_of_two(bytes_, -1), power_of_two(bytes_), bytes_
        limit = torch.finfo(v.dtype).max if self.own_limit else FP32_MAX
        scale = division_scale(amax, LARGEST[self.fp8], limit, self.pow2, self.eps)
        return scale, 1.0 / scale, None

    def quantize(self, v: Tensor, scale: Tensor | None = None) -> Quantized:
        """v[M, K] of any floating dtype; scale: fp32, one for the tensor, instead of the blocks' own (delayed)."""
        if scale is None:
            scale, inverse, bytes_ = self.scales(v)
        else:
            scale = scale.reshape(1, 1)
            inverse, bytes_ = 1.0 / scale, None
        data = encode(v.float() * spread(scale, v.shape, self.block), self.fp8)
        return Quantized(data, inverse, bytes_)

    def dequantize(self, q: Quantized, dtype: torch.dtype) -> Tensor:
        """bytes times inverse scale in fp32 (fp64 for fp64), rounded to dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        return (decode(q.data, self.fp8).to(wide) * spread(q.scale_inv, q.data.shape, self.block)).to(dtype)

    def round_trip(self, v: Tensor) -> Tensor:
        """What a consumer reads: dtype of v (fp64 is quantized from its fp32 value)."""
        return self.dequantize(self.quantize(v if v.dtype != torch.float64 else v.float()), v.dtype)


MX_ROW, MX_COL = Format((1, 32), mx=True), Format((32, 1), mx=True)


def blockwise(rows: int, columns: int, pow2: bool = True, eps: float = 0.0, fp8: torch.dtype = E4M3) -> Format:
    """1x128, 128x1 or 128x128."""
    return Format((rows, columns), fp8, pow2=pow2, eps=eps, own_limit=True)


def rowwise(pow2: bool = True) -> Format:
    """One scale a row."""
    return Format((1, None), pow2=pow2)


def columnwise(pow2: bool = True) -> Format:
    """One scale a column."""
    return Format((None, 1), pow2=pow2)
