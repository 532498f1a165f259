"""Groups of tokens for tests of the grouped ops, and what is expected of them, group by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from te_lite.ops import grouped_cast, grouped_mx
from te_lite.ops.grouped_layout import PAD, group_layout_ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Sizes of groups, and tokens that are in none of them.
RAGGED = {
    "empty, one token, unaligned": ((5, 0, 130, 1), 4),
    "whole tiles": ((128, 256), 0),
    "one group": ((77,), 0),
    "no tokens": ((0, 0, 0), 0),
    "first and last empty": ((0, 17, 33, 0), 0),
}
# More groups than a few tiles or streams; for tests that name them, since every kernel would take long over them.
MANY = {"many, odd": ((129, 1023, 7, 515, 0, 257, 1, 130), 0)}


def offs_of(sizes: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).int()


def spans_of(sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(first row, end, first padded row, padded end) of each group, counted here."""
    row = padded = 0
    for size in sizes:
        pad = max(1, -(-size // PAD)) * PAD
        yield row, row + size, padded, padded + pad
        row, padded = row + size, padded + pad


def layout_of(sizes: tuple[int, ...], rest: int = 0, device: str = "cpu") -> Tensor:
    return group_layout_ref(offs_of(sizes), sum(sizes) + rest).to(device)


def special(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows and columns of very different size; a zero row, zeros, inf, nan, where there is room."""
    x = torch.randn(m, n) * torch.exp(3 * torch.randn(m, 1)) * torch.exp(3 * torch.randn(1, n))
    if m > 32:
        x[3], x[8:16, :32] = 0.0, 0.0
        x[20, 40 % n], x[21, 1] = float("inf"), float("nan")
    return x.to(dtype)


def poisoned(monkeypatch: Any, path: str) -> None:
    """Ops of casts write to outputs that hold 0x7F in every byte; in the interpreter their kernels run."""

    outputs = {
        (grouped_cast, "_rows_op"): (3, 5),
        (grouped_cast, "_cast_op"): (8, 11),
        (grouped_cast, "_blocks_op"): (5, 9),
        (grouped_mx, "_mx_op"): (2, 6),
    }
    for (module, name), (first, end) in outputs.items():
        op = getattr(module, name)

        def run(*args: Any, op: Any = op, first: int = first, end: int = end) -> None:
            for out in args[first:end]:
                if out is not None:
                    whole = out.as_strided((out.untyped_storage().nbytes() // out.element_size(),), (1,), 0)
                    whole.view(torch.uint8).fill_(0x7F)
            (op.cuda if path == "interpreted" else op)(*args)

        monkeypatch.setattr(module, name, run)
    if path == "interpreted":
        monkeypatch.setattr(grouped_cast, "_amax_op", grouped_cast._amax_op.cuda)


def same(name: str, got: Tensor, want: Tensor) -> None:
    """The same bytes, whatever the type; of values one nan is as good as another."""
    got, want = got.detach().cpu(), want.detach().cpu()
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}, {want.shape}"
    if got.dtype.itemsize == 1:
        got, want = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    else:
        got, want = (torch.nan_to_num(t.float(), nan=3e38) for t in (got, want))
    wrong = (got != want).nonzero()
    assert not len(wrong), f"{name}: {len(wrong)} differ, first at {wrong[0].tolist()}: {got[tuple(wrong[0])]}"
