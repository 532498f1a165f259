"""transformer_engine.pytorch.Fp8Padding and Fp8Unpadding: each group of rows filled up with zeros, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_lite.autocast import current


class _Padding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, m_splits: Sequence[int]) -> list[int]:
        """Each size as a multiple of align_size, by default of 32 under mxfp8, else of 16."""
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"{len(m_splits)} sizes for num_gemms={self.num_gemms}: must be one for each; check them")
        state = current()
        align = self.align_size or (32 if state is not None and state.recipe.mxfp8() else 16)
        return [-(-rows // align) * align for rows in m_splits]


class Fp8Padding(_Padding):
    """rows [sum(m_splits), K] -> (the same with each group filled up with zeros, the groups' new sizes)."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        sizes = self._padded(m_splits)
        if sizes == list(m_splits):
            return inp, sizes
        parts = zip(inp.split(list(m_splits)), sizes, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, size - len(part))) for part, size in parts]), sizes


class Fp8Unpadding(_Padding):
    """What Fp8Padding gave, or rows made of it, without the filling. m_splits: the sizes before."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        sizes = self._padded(m_splits)
        if sizes == list(m_splits):
            return inp
        return torch.cat([part[:rows] for part, rows in zip(inp.split(sizes), m_splits, strict=True)])
