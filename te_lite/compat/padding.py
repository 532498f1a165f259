"""Padding of groups for callers of Transformer Engine's GroupedLinear: te.GroupedLinear takes groups of any size."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_lite.autocast import current


class _Padding(nn.Module):
    """num_gemms: groups. align_size: rows of which each group becomes a multiple; None: 32 under mxfp8, else 16."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        for name, value in (("num_gemms", num_gemms), ("align_size", align_size)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{type(self).__name__}({name}={value!r}): must be an integer, at least 1")
        self.num_gemms, self.align_size = num_gemms, align_size

    def _sizes(self, inp: Tensor, m_splits: Sequence[int], padded: bool) -> tuple[list[int], list[int]]:
        """(sizes of the groups, sizes once padded), of which inp has the first, or `padded` the second."""
        state = current()
        align = self.align_size or (32 if state is not None and state.recipe.mxfp8() else 16)
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else [index(size) for size in m_splits]
        wide = [-(-size // align) * align for size in sizes]
        rows = sum(wide if padded else sizes)
        if len(sizes) != self.num_gemms or inp.shape[0] != rows:
            raise ValueError(
                f"{type(self).__name__} got an input of {inp.shape[0]} rows and m_splits {sizes}: must be the rows of "
                f"{self.num_gemms} groups, together {rows}"
            )
        return sizes, wide


class Fp8Padding(_Padding):
    """Appends rows of zeros to each group. Not needed in front of te.GroupedLinear, which pads inside.

    num_gemms: groups. align_size: rows of which each group becomes a multiple; None: 32 under mxfp8, else 16.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """(x [M, K] padded, the padded sizes of the groups); x itself where nothing is missing. ValueError: sizes that
        do not add up to M."""
        sizes, wide = self._sizes(inp, m_splits, False)
        if sizes == wide:
            return inp, sizes
        parts = zip(inp.split(sizes), sizes, wide, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, to - size)) for part, size, to in parts]), wide


class Fp8Unpadding(_Padding):
    """Takes the rows away that Fp8Padding appended. num_gemms, align_size: its."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """x [M, K] of a padded input; m_splits: the sizes before the padding."""
        sizes, wide = self._sizes(inp, m_splits, True)
        if sizes == wide:
            return inp
        return torch.cat([part[:size] for part, size in zip(inp.split(wide), sizes, strict=True)])
