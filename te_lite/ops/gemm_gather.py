"""All-gather + GEMM in one launch, by csrc/gemm_fused.cu: it multiplies the shards of the other ranks as they arrive.

    a[R * m, K] = all_gather(own[m, K])                  # here: copies into `gathered`, with flags
    out[R * m, N] = a @ b[N, K]^T * a_scale * b_scale + bias

    copies    | from rank+1 | from rank+2 | ...
    kernel    | own shard | rank+1 | rank+2 | ...             (polls ready[source, 0] where the source changes)

Of h = out = [gate | up] it also computes activation(h), of h as rounded, while it multiplies the next tile; or, where
out is the gradient of activation(h), of out as rounded h's gradient.
The kernel occupies every multiprocessor while it waits: what sets the flags must not need one (copy engines do not).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops import gemm_fused as fused
from te_lite.ops.activation import Activation
from te_lite.ops.gemm_fused import ALIGNED_COLUMNS, ROWS, Kind
from te_lite.ops.launch import sm_count
from te_lite.ops.recorder import OPEN

_RATES = {256: 1.0, 224: 0.985, 192: 0.97, 128: 0.9}  # of tiles of so many columns: narrow ones load more for a product


def tile_columns(m: int, n: int, ranks: int, b_t: bool, clusters: int) -> int:
    """The tile whose rounds over the device take least. The same on all ranks: a function of sizes and the device."""

    def cost(columns: int) -> float:
        rounds = -(-ranks * -(-m // ROWS) * -(-n // columns) // clusters)
        return rounds * columns / _RATES[columns]

    return min((columns for columns in _RATES if not (b_t and columns % 64)), key=cost)


class Wanted(NamedTuple):
    """What gemm_gather makes of its product, v.

    h None: the product is h[M, 2F] = [gate | up], and v[M, F] = activation(h).
    h[M, 2F] given: the product is the gradient of activation(h), and v[M, 2F] that of h.
    act: "": nothing; "high precision": v in h's type; "amax": its maxima; "fp8": v in `fp8`, clamped, at
    scale fp32 [1]. With col it then comes transposed too; amax, fp32 [1], becomes the largest of itself and all
    magnitudes, if given.
    """

    act: str = ""
    h: Tensor | None = None
    scale: Tensor | None = None
    amax: Tensor | None = None
    fp8: torch.dtype = fused.FP8[0]
    activation: Activation = fused.SWIGLU
    col: bool = True


NOTHING = Wanted()


class Computed(NamedTuple):
    """v[M, W] of Wanted; what was not asked for is None.

    data [M, W], of h's type or fp8; data_t [W, M] fp8, a transposed copy; scale_inv fp32 [1]; amax fp32 [P], P <= 1024,
    partial maxima of magnitudes before rounding, nan counting as inf.
    """

    data: Tensor | None = None
    data_t: Tensor | None = None
    scale_inv: Tensor | None = None
    amax: Tensor | None = None


def act_refusal(m: int, n: int, act: str, grad: bool, split: bool) -> str:
    """Why gemm_gather of shards of m rows and n columns does not make `act` of its product, or "". grad: h is given.
    split: the product is one of fp8 without fast accumulation."""
    multiple = 64 if grad else 32
    if split and not grad:
        return "a product with split accumulation: its sums leave no registers for both halves of h"
    if n % multiple or (act == "fp8" and m % 16):
        return f"{m} rows a rank and {n} columns: must be multiples of 16, for fp8, and {multiple}"
    return ""


def gemm_gather(
    own: Tensor, gathered: Tensor, b: Tensor, ready: Tensor, counters: Tensor, epoch: Tensor, delta: int, abort: Tensor,
    rank: int, own_scale: Tensor | None = None, gathered_scale: Tensor | None = None, b_scale: Tensor | None = None,
    bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, fast_accum: bool = True,
    wanted: Wanted = NOTHING,
) -> tuple[Tensor | None, Computed]:  # fmt: skip
    """out[R * m, N] = all shards [R * m, K] @ b[N, K]^T * scales + bias[N], rounded once to bf16 or fp16; None where it
    is a gradient of which more than the maxima is wanted.

    own[m, K]: this rank's shard. gathered[R * m, K]: the others', in rank order; its rows of this rank do not count.
    ready int32 [R, P]: shard s with its scales is there once ready[s, 0] has reached epoch[0] + delta (ops/flags.py).
    counters: int32, at least one zero, zero again at the end. Result garbage if abort[0] becomes nonzero.
    Scales, fp32 inverses, all three or none. A scale of a for all: own_scale [1], gathered_scale the same tensor; one a
    shard: [1], [R]; one a row: [m], [R * m]. b_scale: [1], or [N] but not beside one a shard. gathered_scale is read
    after the flags.
    a, b: both bf16, both fp16, where b may also lie as [K, N]; or fp8 with at most one E5M2. fast_accum: of fp8, as in
    ops/gemm.py; without it what tensor cores sum is added up in fp32 every 512 elements of K. On CUDA devices of
    compute capability 9.0. Errors: ValueError, TypeError.
    """
    (m, k), (n, _), ranks = own.shape, b.shape, ready.shape[0]
    fused.check("gather and GEMM", gathered, b, m, ranks)
    if ranks > _C.MOST_FUSED_RANKS or n % ALIGNED_COLUMNS or out_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{ranks} ranks, N={n}, output of {out_dtype}: must be at most {_C.MOST_FUSED_RANKS}, a multiple of "
            f"{ALIGNED_COLUMNS}, bf16 or fp16; take a ring"
        )
    kinds = fused.scale_kinds(gathered_scale, b_scale, ranks * m, n, ranks)
    if kinds == ("shard", "row"):
        raise ValueError("a scale a shard of a beside one a row of b: must be one for all of b; take a ring")
    scales = fused.widest(*kinds)
    if scales == "row" and own_scale is not None and gathered_scale is not None and b_scale is not None:
        own_scale, b_scale = fused.spread(own_scale, m), fused.spread(b_scale, n)
        gathered_scale = fused.spread(gathered_scale, ranks * m) if kinds[0] == "tensor" else gathered_scale
    apart = {"row": m, "tensor": int(kinds[0] == "shard"), "none": 0}[scales]
    bias = fused.widened(bias)
    split, grad = own.dtype in fused.FP8 and not fast_accum, bool(wanted.act) and wanted.h is not None
    if wanted.act and (refusal := act_refusal(m, n, wanted.act, grad, split)):
        raise ValueError(f"an activation of {refusal}; compute it apart")
    _check_wanted(wanted, (ranks * m, 2 * n), out_dtype, own.device)
    clusters = sm_count(own.device) // 2
    wide = 256 if wanted.act else tile_columns(m, n, ranks, fused.transposed(b), clusters)
    wide = 128 if split or grad else wide  # registers
    pairs, columns = -(-m // ROWS), -(-n // wide)
    clusters = min(clusters, ranks * pairs * columns)
    out = None if grad and wanted.act != "amax" else own.new_empty((ranks * m, n), dtype=out_dtype)
    width = 2 * n if grad else n // 2
    made = _allocate(own, (ranks * m, width), wanted, out_dtype, clusters)
    amax = made.amax if wanted.act == "amax" else wanted.amax
    kind = Kind(
        gather=True, a=own.dtype, b=b.dtype, scales=scales, out=out_dtype, ranks=ranks, b_t=fused.transposed(b),
        columns=wide, split=split, act=wanted.act, grad=grad, fp8=wanted.fp8, act_t=wanted.col or wanted.act != "fp8",
        activation=wanted.activation,
    )  # fmt: skip
    arguments = fused.Arguments(
        ready=ready, counters=counters, word=epoch, abort=abort, a_scale=gathered_scale, own_scale=own_scale,
        b_scale=b_scale, bias=bias, act_scale=wanted.scale, act_scale_inv=made.scale_inv, amax=amax, delta=delta, m=m,
        n=n, k=k, rank=rank, flags=ready.shape[1], pairs=pairs, columns=columns, scales=apart,
    )  # fmt: skip
    fused.launch(
        kind, clusters, arguments, a=gathered, b=b, other=own, h=wanted.h if grad else None,
        to=_shards(out, ranks, m * n), act=_shards(made.data, ranks, m * width), act_t=_shards(made.data_t, ranks, m),
    )  # fmt: skip
    return out, made


def _check_wanted(wanted: Wanted, needed: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """needed: of h."""
    for name, value in (("scale", wanted.scale), ("amax", wanted.amax)):
        given = value is not None and (value.dtype, value.numel(), value.device) == (torch.float32, 1, device)
        if not given and (value is not None or (wanted.act == "fp8" and name == "scale")):
            raise ValueError(f"{name} for act {wanted.act!r}: must be one fp32 on {device}; pass a view of one element")
    h = wanted.h
    if h is not None and not wanted.col:
        raise ValueError("col=False for a gradient: wgrad reads its columns; leave it out")
    if h is not None and (tuple(h.shape) != needed or h.dtype != dtype or not fused.aligned(h)):
        raise ValueError(
            f"h {list(h.shape)} of {h.dtype}, strides {h.stride()}: must be contiguous {list(needed)} of {dtype} that "
            f"begins at a multiple of {fused.ALIGNMENT} bytes; pass the h that forward computed, or a clone"
        )


def _shards(whole: Tensor | None, ranks: int, elements: int) -> list[fused.Begin]:
    """Where each rank's begin, so many elements apart."""
    if whole is None:
        return []
    if OPEN.recorder is None:
        return [whole.data_ptr() + rank * elements * whole.element_size() for rank in range(ranks)]
    flat = whole.view(-1)
    return [flat[rank * elements :] for rank in range(ranks)]


def _allocate(own: Tensor, shape: tuple[int, int], wanted: Wanted, dtype: torch.dtype, clusters: int) -> Computed:
    if wanted.act == "amax":
        return Computed(amax=own.new_empty((4 if wanted.h is None else 2) * clusters, dtype=torch.float32))
    if wanted.act == "fp8":
        data_t = own.new_empty(shape[::-1], dtype=wanted.fp8) if wanted.col else None
        return Computed(own.new_empty(shape, dtype=wanted.fp8), data_t, own.new_empty(1, dtype=torch.float32))
    return Computed(own.new_empty(shape, dtype=dtype)) if wanted.act else Computed()
