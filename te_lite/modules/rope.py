"""Rotary position embedding (Su et al., arXiv 2104.09864), in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_lite.arguments import flag
from te_lite.modules.weights import default_device
from te_lite.ops.registry import makes_data


class RotaryPositionEmbedding(nn.Module):
    """Angles of each position: forward(S) -> fp32 [S, 1, 1, dim].

    Where seq_len_interpolation_factor and pretrained_max_position_embeddings are both given, positions are divided by
    the factor, or by S / pretrained_max_position_embeddings where S lies beyond what the factor stretches that to.
    """

    def __init__(
        self, dim: int, rotary_percent: float = 1.0, seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None, rotary_base: float = 10000.0, interleaved: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.seq_len_interpolation_factor, self.rotary_base = seq_len_interpolation_factor, rotary_base
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = flag("RotaryPositionEmbedding", "interleaved", interleaved)
        powers = torch.arange(0, dim, 2, dtype=torch.float32, device=default_device(None)) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**powers)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """fp32 [max_seq_len, 1, 1, dim]: the angles of positions offset, offset + 1, ..."""
        inv_freq: Tensor = self.inv_freq  # type: ignore[assignment]  # of a buffer torch knows no more
        positions = torch.arange(max_seq_len, device=inv_freq.device, dtype=torch.float32) + offset
        factor, pretrained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and pretrained is not None:
            positions = positions / (max_seq_len / pretrained if max_seq_len > pretrained * factor else factor)
        angles = torch.outer(positions, inv_freq)
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return angles[:, None, None, :]

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *others) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *others)
        if f"{prefix}inv_freq" in missing:  # it follows from the arguments
            missing.remove(f"{prefix}inv_freq")


def _rotated(t: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as (-b, a): neighbours where interleaved, else the two halves."""
    a, b = (t[..., 0::2], t[..., 1::2]) if interleaved else t.chunk(2, -1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def _positions(t: Tensor, form: str, start: Tensor | None, cu_seqlens: Tensor | None, padded: Tensor | None) -> Tensor:
    """The position of each token, in the shape of t without heads and channels; 0 between packed sequences. Without
    `start` a batch has size 1: all its sequences have the same positions."""
    if form not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"tensor_format={form!r}: must be 'sbhd', 'bshd' or 'thd'; pass one")
    at = torch.arange(t.shape[form == "bshd"], device=t.device)
    if form != "thd":
        positions = at[None] if start is None else at + start.to(at)[:, None]
        return positions if form == "bshd" else positions.T
    if cu_seqlens is None:
        raise ValueError("apply_rotary_pos_emb(tensor_format='thd') without cu_seqlens: pass where sequences begin")
    begins = (cu_seqlens if padded is None else padded).to(at)
    own = torch.searchsorted(begins, at, right=True) - 1
    position, lengths = at - begins[own], F.pad(cu_seqlens.to(at).diff(), (0, 1))
    first = 0 if start is None else F.pad(start.to(at), (0, 1))[own]
    return torch.where(position < lengths[own], position + first, 0)


def _check_range(t: Tensor, count: int, start: Tensor | None, sizes: Any) -> None:
    """ValueError where t's sequences need others than `count` positions. sizes: their length, or cu_seqlens. A tensor
    that is on a GPU or traced is not read: it counts as zeros, the least that it may hold."""
    read = not torch.compiler.is_compiling() and makes_data(t.device)
    first, sizes = [
        0 if value is None or isinstance(value, Tensor) and not (read and value.device.type == "cpu") else value
        for value in (start, sizes)
    ]
    ends = first + (sizes.diff() if isinstance(sizes, Tensor) else sizes)
    low = min(first.tolist(), default=0) if isinstance(first, Tensor) else first
    high = max(ends.tolist(), default=0) if isinstance(ends, Tensor) else ends
    if low < 0 or high > count:
        raise ValueError(
            f"apply_rotary_pos_emb of t {tuple(t.shape)} has positions from {low} to {high - 1}, freqs those from 0 to "
            f"{count - 1}: must have them all; make freqs longer, or check start_positions and cu_seqlens"
        )


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Tensor | None = None,
    interleaved: bool = False, fused: bool = False, cu_seqlens: Tensor | None = None, cp_size: int = 1,
    cp_rank: int = 0, *, cu_seqlens_padded: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """t [S, B, H, D], [B, S, H, D] or [T, H, D] with its first d channels rotated by freqs [S', 1, 1, d], or, but for
    the last form, [S', B, 1, d].

    The angles are those of a token's position in its sequence (plus start_positions [B]). cu_seqlens [B + 1]: where the
    sequences of thd end; cu_seqlens_padded: where they begin in memory, if there are gaps. The arithmetic is fp32,
    rounded once to t's dtype. fused: accepted; there is one way. Context parallelism raises NotImplementedError.

    ValueError for other shapes of freqs, and for positions that it does not have. start_positions and cu_seqlens on a
    GPU are not read for that, so that nothing waits: there a position beyond freqs ends in torch's device-side assert
    of an index, and a negative one counts from the end. Under torch.compile they are not read either.
    """
    if cp_size != 1:
        raise NotImplementedError(f"apply_rotary_pos_emb(cp_size={cp_size}): te_lite has no context parallelism")
    positions = _positions(t, tensor_format, start_positions, cu_seqlens, cu_seqlens_padded)
    sizes = cu_seqlens if tensor_format == "thd" else t.shape[tensor_format == "bshd"]
    _check_range(t, len(freqs), start_positions, sizes)
    batch = 1 if tensor_format == "thd" else t.shape[tensor_format == "sbhd"]
    if freqs.dim() != 4 or freqs.shape[2] != 1 or freqs.shape[1] not in (1, batch):
        raise ValueError(f"freqs {tuple(freqs.shape)}: must be [positions, 1 or {batch}, 1, channels]; reshape it")
    own: Any = 0  # each sequence's column of freqs
    if freqs.shape[1] > 1:
        own = torch.arange(batch, device=t.device).view((1, -1) if tensor_format == "sbhd" else (-1, 1))
    angles = freqs.float()[positions, own]
    turned, rest = t[..., : angles.shape[-1]].float(), t[..., angles.shape[-1] :]
    turned = turned * angles.cos() + _rotated(turned, interleaved) * angles.sin()
    return torch.cat((turned.to(t.dtype), rest), -1)
