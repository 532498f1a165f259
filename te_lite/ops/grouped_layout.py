"""Where the tokens of each group lie: x[M, K] sorted by group (the expert of a mixture), one group after the other.

A layout is an int32 [2, G + 2] on x's device, made from the groups' ends by one small launch and read by every kernel
that knows groups, so that the host never waits for the sizes:

    row 0    0, the groups' ends, then the first row that is filled (see `fill_rest_`)
    row 1    0, the groups' ends with each group padded to a multiple of PAD, then the value filled in, fp32 bits

Padded, a group has at least PAD rows: a GEMM over its tokens then reads whole tiles, of zeros where the group is empty
(torch's fp8 one refuses to sum over nothing), and tile i of PAD rows belongs to one group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops.launch import begin, launch
from te_lite.ops.registry import register

PAD = 128  # rows: a tile of the GEMMs, a block of blockwise scaling, four of MXFP8's
MOST_GROUPS = 1023  # torch's grouped GEMMs take no more
_FILL_ROWS, _FILL_COLUMNS = 32, 512
_NAN_BITS = 0x7FC00000


def capacity(rows: int, groups: int) -> int:
    """The most rows that `rows` tokens in `groups` groups have when each group is padded."""
    return (rows // PAD + groups) * PAD


def lanes(groups: int) -> int:
    """The length of the vectors in which kernels find a tile's group. There are few different ones, for each is a
    kernel of its own."""
    return max(16, triton.next_power_of_2(groups))


def ends(layout: Tensor) -> Tensor:
    """int32 [G]: the groups' ends; where those given are invalid all are 0."""
    return layout[0, 1:-1]


def spans(layout: Tensor, groups: int) -> list[tuple[int, int, int, int]]:
    """(first row, end, first padded row, padded end) of each group. It waits for the layout's device."""
    rows, padded = layout[:, : groups + 1].tolist()
    return list(zip(rows, rows[1:], padded, padded[1:], strict=False))


def group_layout_ref(offs: Tensor, rows: int) -> Tensor:
    """The oracle of `group_layout`, which can refuse."""
    before = torch.cat([offs.new_zeros(1), offs[:-1]])
    if bool((offs < before).any()) or bool((offs > rows).any()):
        raise ValueError(
            f"offs {offs.tolist()} for {rows} rows: must be the end of each group, none below the one before and none "
            "beyond the rows; pass torch.cumsum(tokens of each expert, 0, dtype=torch.int32)"
        )
    padded = torch.cumsum(((offs - before + PAD - 1) // PAD).clamp(min=1) * PAD, 0)
    zero, last = offs.new_zeros(1), offs[-1:]
    return torch.stack([torch.cat([zero, offs, last]), torch.cat([zero, padded, zero])]).int()


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["offs"])
def _layout_kernel(offs, out, groups, rows, GROUPS: tl.constexpr, PADDED: tl.constexpr, NAN: tl.constexpr):
    begin()
    i = tl.arange(0, GROUPS)
    known = i < groups
    end = tl.load(offs + i, mask=known, other=0)
    before = tl.load(offs + i - 1, mask=known & (i > 0), other=0)
    bad = tl.max((known & ((end < before) | (end > rows))).to(tl.int32))
    end, before = tl.where(bad > 0, 0, end), tl.where(bad > 0, 0, before)
    padded = tl.where(known, tl.maximum((end - before + PADDED - 1) // PADDED, 1) * PADDED, 0)
    width = groups + 2
    tl.store(out + 1 + i, end, mask=known)
    tl.store(out + width + 1 + i, tl.cumsum(padded), mask=known)
    tl.store(out + i * width, tl.zeros([GROUPS], tl.int32), mask=i < 2)
    tl.store(out + width - 1, tl.max(end))
    tl.store(out + 2 * width - 1, tl.where(bad > 0, NAN, 0))


def _layout_cuda(offs: Tensor, rows: int) -> Tensor:
    groups = offs.shape[0]
    out = offs.new_empty((2, groups + 2))
    constants = (lanes(groups), PAD, _NAN_BITS)
    launch(_layout_kernel, 1, (offs,), (out,), (groups, rows), constants, 4)
    return out


# The layout of groups that end at offs, int32 [G], of x with `rows` rows. Ends that decrease, are negative or lie
# beyond x: ValueError on the CPU; on a GPU, where nobody waits for them, no row is in any group and `fill_rest_` gives
# nan.
group_layout = register(
    "group_layout(Tensor offs, int rows) -> Tensor",
    cpu=group_layout_ref,
    cuda=_layout_cuda,
    fake=lambda offs, rows: offs.new_empty((2, offs.shape[0] + 2)),
)


@triton.jit
def place(layout, groups, tile, per_group, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """(group, first row, end of the group's rows, first padded row) of the tile-th BLOCK rows, counted by padded rows.

    From `groups` on, the group says that there is no such tile. The first row may lie beyond the end. Without a layout
    the groups have per_group rows each, and padded rows are counted in each group.
    """
    if layout is None:
        tiles = tl.cdiv(per_group, BLOCK)
        group = tile // tiles
        padded = tile % tiles * BLOCK
        first, end = group * per_group + padded, (group + 1) * per_group
    else:
        padded = tile * BLOCK
        i = tl.arange(0, GROUPS)
        width = groups + 2
        group = tl.sum((tl.load(layout + width + 1 + i, mask=i < groups, other=0x7FFFFFFF) <= padded).to(tl.int32))
        first = tl.load(layout + group) + padded - tl.load(layout + width + group)
        end = tl.load(layout + group + 1)
    return group, first, end, padded


def fill_rest_ref_(y: Tensor, layout: Tensor) -> None:
    """The oracle of `fill_rest_`."""
    y[int(layout[0, -1]) :] = layout[1, -1:].view(torch.float32).to(y.dtype)


@triton.jit(do_not_specialize=["groups"])
def _fill_kernel(y, layout, groups, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    begin()
    first = tl.load(layout + groups + 1)
    m0 = tl.program_id(0) * BLOCK_M
    if m0 + BLOCK_M > first:
        value = tl.load(layout + 2 * groups + 3).to(tl.float32, bitcast=True)
        m = m0 + tl.arange(0, BLOCK_M)
        inside = (m >= first) & (m < rows)
        for n0 in range(0, cols, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            tile = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32) + value
            at = y + m[:, None].to(tl.int64) * cols + n[None, :]
            tl.store(at, tile.to(y.dtype.element_ty), mask=inside[:, None] & (n < cols)[None, :])


def _fill_cuda_(y: Tensor, layout: Tensor) -> None:
    rows, cols = y.shape
    numbers = (layout.shape[1] - 2, rows, cols)
    launch(_fill_kernel, -(-rows // _FILL_ROWS), (), (y, layout), numbers, (_FILL_ROWS, _FILL_COLUMNS), 4)


# The rows of y[M, N] that are in no group become 0; all become nan where the layout was made of invalid ends.
fill_rest_ = register("fill_rest_(Tensor(a!) y, Tensor layout) -> ()", cpu=fill_rest_ref_, cuda=_fill_cuda_)


def group_sums_ref(x: Tensor, layout: Tensor) -> Tensor:
    """The oracle of `group_sums`."""
    groups = layout.shape[1] - 2
    out = x.new_zeros((groups, x.shape[1]), dtype=torch.float32)
    for g, (first, end, *_) in enumerate(spans(layout, groups)):
        out[g] = x[first:end].float().sum(0)
    return out


@triton.jit(do_not_specialize=["groups"])
def _sums_kernel(x, layout, out, groups, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    begin()
    blocks = tl.cdiv(cols, BLOCK_N)
    group = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first, end = tl.load(layout + group), tl.load(layout + group + 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m0 in range(first, end, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        mask = (m < end)[:, None] & (n < cols)[None, :]
        total += tl.load(x + m[:, None].to(tl.int64) * cols + n[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + group.to(tl.int64) * cols + n, tl.sum(total, axis=0), mask=n < cols)


def _sums_cuda(x: Tensor, layout: Tensor) -> Tensor:
    groups, cols = layout.shape[1] - 2, x.shape[1]
    out = x.new_empty((groups, cols), dtype=torch.float32)
    launch(_sums_kernel, groups * -(-cols // 32), (), (x, layout, out), (groups, cols), (64, 32), 4)
    return out


# fp32 [G, N]: the sum of the rows of each group of x[M, N], in an order that depends on the group's size alone.
group_sums = register(
    "group_sums(Tensor x, Tensor layout) -> Tensor",
    cpu=group_sums_ref,
    cuda=_sums_cuda,
    fake=lambda x, layout: x.new_empty((layout.shape[1] - 2, x.shape[1]), dtype=torch.float32),
)
