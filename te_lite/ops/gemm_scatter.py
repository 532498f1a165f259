"""GEMM + reduce-scatter in one launch: csrc/gemm_scatter.cu, compiled when it is first used.

    others' rows of a @ b^T   stored straight into the owner's staging, across the links, and flagged block by block
    this rank's rows          once their flags are there: slots + product + bias, in fp32, rounded once

CUDA and not Triton 3.6, which has neither clusters that share an operand nor warps that store one tile, piece by piece,
while others multiply the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops import gemm_tiles as tiles
from te_lite.ops.flags import signed
from te_lite.ops.launch import sm_count

_SOURCES = Path(__file__).resolve().parents[1] / "csrc"
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_SCALES = ("none", "tensor", "row")
ALIGNED_COLUMNS = 8  # what a row's 16 bytes hold
ROWS = 256  # of a pair of tiles; a block has a multiple of these rows
MOST_BLOCKS = 8


@cache
def unavailable(device: torch.device) -> str:
    """Why the kernel cannot run on a device, or ""."""
    if device.type != "cuda":
        return "the fused reduce-scatter needs a GPU"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "the fused reduce-scatter is written for compute capability 9.0"
    return "" if _has_compiler() else "the fused reduce-scatter is compiled at run time: pip install cuda-bindings"


@cache
def _has_compiler() -> bool:
    try:
        from cuda.bindings import nvrtc  # takes long to import

        return nvrtc.nvrtcVersion()[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
    except (ImportError, RuntimeError, OSError):  # none, or one without the library that it binds
        return False


@cache
def compiled(*kind: Any) -> bytes:
    """The kernel for arguments of `macros`, as a cubin. RuntimeError with the compiler's words."""
    from cuda.bindings import nvrtc  # takes long to import

    def checked(result: nvrtc.nvrtcResult, *values: object) -> object:
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"compiling gemm_scatter.cu: {result.name}")
        return values[0] if values else None

    names = ["gemm_scatter.cu", "gemm_scatter.h", "hopper.h"]
    source, *headers = ((_SOURCES / name).read_bytes() for name in names)
    main, *included = (name.encode() for name in names)
    program = checked(*nvrtc.nvrtcCreateProgram(source, main, len(headers), headers, included))
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *macros(*kind)]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * checked(*nvrtc.nvrtcGetProgramLogSize(program))
        checked(*nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"compiling gemm_scatter.cu: {result.name}\n{log.decode()}")
    cubin = b" " * checked(*nvrtc.nvrtcGetCUBINSize(program))
    checked(*nvrtc.nvrtcGetCUBIN(program, cubin))
    checked(*nvrtc.nvrtcDestroyProgram(program))
    return cubin


def macros(
    a: torch.dtype, b: torch.dtype, scales: str, out: torch.dtype, ranks: int, b_t: bool, columns: int
) -> list[str]:
    """What gemm_scatter.cu is compiled with."""
    values = {"A_TYPE": _TYPES[a], "B_TYPE": _TYPES[b], "OUT_TYPE": _TYPES[out]}
    values |= {"SCALES": _SCALES.index(scales), "RANKS": ranks, "COLUMNS": columns, "B_T": int(b_t)}
    return [f"-D{name}={value}" for name, value in values.items()]


@cache
def _loaded(index: int, a: torch.dtype, *kind: Any) -> _C.GemmScatter:
    *_, b_t, columns = kind
    with torch.cuda.device(index):
        return _C.GemmScatter(compiled(a, *kind), a.itemsize, columns, b_t)


def blocks(m: int) -> int:
    """In how many blocks of equally many pairs of tiles m rows are stored and awaited."""
    pairs = -(-m // ROWS)
    return next(count for count in range(MOST_BLOCKS, 0, -1) if pairs % count == 0)


def tile_columns(m: int, n: int, ranks: int, clusters: int) -> int:
    """Narrow tiles where wide ones would be only a few for each cluster: what the others wait for is sent earlier."""
    return 256 if ranks * -(-m // ROWS) * -(-n // 256) >= 3 * clusters else 128


def lag(others: int, blocks: int, clusters: int) -> int:
    """By how many blocks of `others` pairs own rows follow: all clusters are then busy for about two tiles, in which
    the flags come. More would leave the links idle at the end."""
    return min(blocks, -(-2 * clusters // others))


def gemm_scatter(
    a: Tensor, b: Tensor, to: Sequence[int], arrived: Sequence[int], staging: Tensor, ready: Tensor, free: Tensor,
    counters: Tensor, epoch: Tensor, delta: int, abort: Tensor, rank: int, a_scale: Tensor | None = None,
    b_scale: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[m, N] = sum over ranks of a[R*m, K] @ b[N, K]^T * scales, this rank's rows, + bias[N]; rounded once.

    to[r]: address of [m, N] in rank r's memory, its staging[this rank]; arrived[r]: there, of its ready[this rank, 0].
    staging[R, m, N], of out's type bf16 or fp16; its own entry is not read. ready int32 [R, P], P at least blocks(m):
    block i of staging[s] is there once ready[s, i] has reached epoch[0] + delta (ops/flags.py). free int32 [R]: to[r]
    may be written once free[r] has reached epoch[0] + delta - 1. counters: int32, R * blocks(m) + 1 zeros, zeros again
    at the end. The order of sums is that of ops/reduce.py: the same bits on every run. Garbage after an abort. Scales:
    fp32 inverses, both or none; a_scale [1] or [R*m], b_scale [1] or [N]. a, b: as in ops/gemm_gather.py. Errors:
    ValueError, TypeError.
    """
    ranks, m, n = staging.shape
    tiles.check("GEMM and reduce-scatter", a, b, m, ranks)
    count = blocks(m)
    fits = 2 <= ranks <= _C.MOST_SCATTER_RANKS and n % ALIGNED_COLUMNS == 0 and n == b.shape[0]
    if not fits or staging.dtype not in (torch.bfloat16, torch.float16) or not staging.is_contiguous():
        raise ValueError(
            f"staging {list(staging.shape)} of {staging.dtype} for b {list(b.shape)}: must be contiguous [R, m, N], "
            f"R from 2 to {_C.MOST_SCATTER_RANKS}, N a multiple of {ALIGNED_COLUMNS}, bf16 or fp16; take a ring"
        )
    found = [*ready.shape, *free.shape, counters.numel()]
    needed = [ranks, count, ranks, ranks * count + 1]
    if len(found) != 4 or found[0] != ranks or found[2] != ranks or found[1] < count or found[3] < needed[3]:
        raise ValueError(
            f"flags and counters {found}: must be {needed}, the second and the last or more; reserve as many"
        )
    scales = max(tiles.scale_kinds(a_scale, b_scale, ranks * m, n), key=_SCALES.index)
    if scales == "row":
        a_scale, b_scale = a_scale.expand(ranks * m).contiguous(), b_scale.expand(n).contiguous()
    out = a.new_empty((m, n), dtype=staging.dtype)
    bias = None if bias is None else bias.float()
    tensors = (ready, free, counters, epoch, abort, a_scale, b_scale, bias)
    clusters = sm_count(a.device) // 2
    wide = tile_columns(m, n, ranks, clusters)
    pairs, columns = -(-m // ROWS) // count, -(-n // wide)
    kernel = _loaded(a.device.index, a.dtype, b.dtype, scales, out.dtype, ranks, tiles.transposed(b), wide)
    behind = lag((ranks - 1) * pairs * columns, count, clusters)
    kernel.launch(
        2 * min(clusters, ranks * count * pairs * columns),
        torch._C._cuda_getCurrentRawStream(a.device.index),
        a.data_ptr(),
        b.data_ptr(),
        staging.data_ptr(),
        [*to[:rank], out.data_ptr(), *to[rank + 1 :]],
        arrived,
        [0 if t is None else t.data_ptr() for t in tensors],
        [signed(delta), m, n, a.shape[1], rank, ready.shape[1], count, behind, pairs, columns],
    )
    return out
