"""What the fused GEMMs share: csrc/gemm_fused.cu, compiled when it is first used, and what its kernels take.

CUDA and not Triton 3.6, which has neither clusters that share an operand nor warps that store one tile, piece by piece,
while others multiply the next.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops.activation import Activation
from te_lite.ops.cast import transform
from te_lite.ops.flags import signed
from te_lite.ops.flops import launched
from te_lite.ops.gemm import FP8, check_fp8
from te_lite.ops.gemm_scaled import one_for_all
from te_lite.ops.nvrtc import TYPES, compiled
from te_lite.ops.recorder import OPEN
from te_lite.ops.source import plain
from te_lite.ops.steps import EpochArgument

ALIGNMENT = 16  # bytes, the tensor-copy unit's rule for addresses and rows
ALIGNED_COLUMNS = 8  # of the output: what 16 bytes hold
_ARGUMENTS = struct.Struct("=29Q11i4x")
_NO_RANKS = (0,) * _C.MOST_FUSED_RANKS
_DELTA = 29  # the 64-bit word of them whose lower half is delta
Begin = int | Tensor  # where a map begins: an address, or a view that begins there
ROWS = 256  # of a pair of tiles, one below the other, that a cluster of two multiplies
_SCALES = ("none", "tensor", "row")
SWIGLU = Activation.of("swiglu")
_ACTS = ("", "high precision", "amax", "fp8")


class Kind(NamedTuple):
    """What the kernel is compiled for. scales: "none", "tensor" (of a also one a rank) or "row". b_t: b[N, K] lies as
    [K, N]. columns: of a tile. split: fp8 without fast accumulation. act: what becomes of `activation` of a gather's
    output, or with grad of its gradient, see ops/gemm_gather.py; fp8: its type there; act_t: by columns too. narrow: a
    scatter's partials travel as ops/narrow.py makes them. residual: it is added to a scatter's sum."""

    gather: bool
    a: torch.dtype
    b: torch.dtype
    scales: str
    out: torch.dtype
    ranks: int
    b_t: bool
    columns: int
    split: bool = False
    act: str = ""
    grad: bool = False
    fp8: torch.dtype = FP8[0]
    narrow: bool = False
    residual: bool = False
    activation: Activation = SWIGLU
    act_t: bool = True

    @property
    def macros(self) -> list[str]:
        values: dict[str, Any] = {"A_TYPE": TYPES[self.a], "B_TYPE": TYPES[self.b], "OUT_TYPE": TYPES[self.out]}
        values |= {"SCALES": _SCALES.index(self.scales), "RANKS": self.ranks, "COLUMNS": self.columns}
        values |= {"A_T": 0, "B_T": int(self.b_t), "GATHER": int(self.gather), "SPLIT": int(self.split)}
        values |= {"NARROW": int(self.narrow), "ACT": _ACTS.index(self.act), "GRAD": int(self.grad)}
        values |= {"ACT_TYPE": TYPES[self.fp8], "ACT_T": int(self.act_t), "RESIDUAL": int(self.residual)}
        values |= {"ACTIVATION": self.activation.name}
        values |= {name.upper(): f"{value.hex()}f" for name, value in self.activation.named.items()}
        return [f"-D{name}={value}" for name, value in values.items()]


_HEADERS = ("consumer", "grad", "slots", "walk", "activation", "fused")
_NAMES = ("gemm_fused.cu", *(f"gemm_{name}.h" for name in _HEADERS), "hopper.h", "tensor_map.h")


@cache
def _loaded(index: int, kind: Kind) -> _C.FusedGemm:
    sizes, act_bytes = (kind.a.itemsize, kind.columns), 1 if kind.act == "fp8" else 2
    cubin = compiled(_NAMES, kind.macros)
    return _C.FusedGemm(index, cubin, kind.gather, *sizes, kind.b_t, kind.grad, kind.narrow, act_bytes)


@dataclass(slots=True, kw_only=True)
class Arguments:
    """FusedArguments of csrc/gemm_fused.h: the same fields in the same order. None is a null pointer."""

    arrived: Sequence[int] = ()
    scales_to: Sequence[int] = ()
    ready: Tensor
    free: Tensor | None = None
    counters: Tensor
    word: Tensor
    abort: Tensor
    a_scale: Tensor | None
    own_scale: Tensor | None = None
    b_scale: Tensor | None
    bias: Tensor | None
    act_scale: Tensor | None = None
    act_scale_inv: Tensor | None = None
    amax: Tensor | None = None
    slot_scales: Tensor | None = None
    delta: int
    m: int
    n: int
    k: int
    rank: int
    flags: int
    blocks: int = 1
    lag: int = 0
    pairs: int
    columns: int
    scales: int

    def packed(self) -> bytes:
        """As the struct lies in memory."""
        values = [getattr(self, name) for name in Arguments.__slots__]
        of_ranks = [(*to, *_NO_RANKS)[: len(_NO_RANKS)] for to in values[:2]]
        addresses = [0 if t is None else t.data_ptr() for t in values[2:15]]
        return _ARGUMENTS.pack(*of_ranks[0], *of_ranks[1], *addresses, signed(self.delta), *values[16:])

    def tensors(self) -> list[tuple[int, Tensor]]:
        """(which 64-bit word of packed(), the tensor whose address it is)."""
        found = [getattr(self, name) for name in Arguments.__slots__[2:15]]
        return [(2 * len(_NO_RANKS) + i, t) for i, t in enumerate(found) if t is not None]


def launch(
    kind: Kind, clusters: int, arguments: Arguments, *, a: Tensor, b: Tensor, other: Tensor, h: Tensor | None = None,
    to: Sequence[Begin], act: Sequence[Begin] = (), act_t: Sequence[Begin] = (),
) -> None:  # fmt: skip
    """a to act_t: of FusedMaps in csrc/gemm_fused.h."""
    launched(a, b)
    index, packed, maps = a.device.index, arguments.packed(), (to, act, act_t)
    addresses = [[one if isinstance(one, int) else one.data_ptr() for one in places] for places in maps]
    operands = a.data_ptr(), b.data_ptr(), other.data_ptr(), 0 if h is None else h.data_ptr()
    gemm, (of_to, of_act, of_act_t) = _loaded(index, kind), addresses
    stream = torch._C._cuda_getCurrentRawStream(index)
    gemm.launch(2 * clusters, stream, *operands, of_to, of_act, of_act_t, packed)
    if OPEN.recorder is None:
        return
    given = [a, b, other, h, *to, *act, *act_t]
    tensors = [(i, t) for i, t in enumerate(given) if isinstance(t, Tensor)]
    tensors += [(len(given) + word, t) for word, t in arguments.tensors()]
    words = [*operands, *itertools.chain(*addresses), *struct.unpack(f"={len(packed) // 8}Q", packed)]
    epoch = EpochArgument(len(given) + _DELTA, arguments.delta & 0xFFFFFFFF, arguments.word)
    OPEN.recorder.fused(gemm, 2 * clusters, (len(to), len(act), len(act_t)), words, tensors, epoch)


def widened(bias: Tensor | None) -> Tensor | None:
    """bias[N] in fp32; where a recording looks, by a kernel that it can repeat."""
    if bias is None or bias.dtype == torch.float32 or OPEN.recorder is None:
        return bias if bias is None else bias.float()
    exact: Any = transform(plain(bias.view(1, -1)), hp_dtype=torch.float32).hp
    return exact.view(-1)


def spread(scale: Tensor, length: int) -> Tensor:
    """[length] of a scale [length], or [1] for all; where a recording looks, by a kernel that it can repeat."""
    if scale.numel() == length or OPEN.recorder is None:
        return scale.expand(length).contiguous()
    return one_for_all(scale, length)


def check(name: str, a: Tensor, b: Tensor, shard: int, ranks: int) -> None:
    """ValueError or TypeError unless these kernels can multiply a, `ranks` shards of `shard` rows, and b."""
    (m, k), (n, k_b) = a.shape, b.shape
    if a.dtype in FP8 or b.dtype in FP8:
        check_fp8(a, b)
    elif a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{name} of {a.dtype} and {b.dtype}: must both be bfloat16, float16 or fp8; cast them")
    if k != k_b or not k or k * a.element_size() % ALIGNMENT:
        raise ValueError(
            f"{name} of a [{m}, {k}] and b [{n}, {k_b}]: the last dimensions must be equal, not 0, and a row "
            f"a multiple of {ALIGNMENT} bytes; pad the features, or take a schedule with a plain GEMM"
        )
    if m != shard * ranks:
        raise ValueError(f"{name}: {m} rows for {ranks} ranks with {shard} each: must be the product; pass all shards")
    for what, t, rows in (("a", a, a), ("b", b, b.t() if transposed(b) else b)):
        if rows.shape[1] * t.element_size() % ALIGNMENT or not aligned(rows):
            raise ValueError(
                f"{name}: {what} {list(t.shape)} has strides {t.stride()}: must be contiguous, each row at a multiple "
                f"of {ALIGNMENT} bytes; pad it"
            )


def aligned(t: Tensor) -> bool:
    """Whether t is contiguous and begins where the tensor-copy unit can read it."""
    return t.is_contiguous() and not (t.is_cuda and t.data_ptr() % ALIGNMENT)


def transposed(b: Tensor) -> bool:
    """Whether b[N, K] lies as [K, N], which tensor cores read as well where elements have 16 bits."""
    return b.element_size() == 2 and not b.is_contiguous() and b.t().is_contiguous()


def scale_kinds(a_scale: Tensor | None, b_scale: Tensor | None, m: int, n: int, ranks: int = 0) -> tuple[str, str]:
    """What the scales of a [m, K] and b [n, K] are: "none", "tensor" (one for all), "shard" (one a rank) or "row"."""
    if a_scale is None and b_scale is None:
        return "none", "none"
    # Of one row only, or of as many ranks as rows, the meanings agree: the last one here counts.
    known_a, known_b = {ranks: "shard", m: "row", 1: "tensor"}, {n: "row", 1: "tensor"}
    for what, scale, known in (("a", a_scale, known_a), ("b", b_scale, known_b)):
        if scale is None or scale.dtype != torch.float32 or not scale.is_contiguous() or scale.numel() not in known:
            found = None if scale is None else (scale.dtype, tuple(scale.shape))
            raise ValueError(
                f"scales of {what}: {found}; must be contiguous fp32 with so many elements: {sorted(known)}, and given "
                f"for both or none; pass what the quantizer made"
            )
    assert a_scale is not None and b_scale is not None
    return known_a[a_scale.numel()], known_b[b_scale.numel()]


def widest(a_kind: str, b_kind: str) -> str:
    """The kernel's kind of scales for those of a and b."""
    return max("tensor" if a_kind == "shard" else a_kind, b_kind, key=_SCALES.index)
