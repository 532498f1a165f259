"""Rotary position embedding against complex numbers."""

import pytest
import torch
import torch.nn.functional as F

from te_lite.modules import rope


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_rope(form, interleaved):
    """A rotation of complex numbers in fp64; the gradient is the rotation back."""
    s, b, h, d, turned = 12, 2, 3, 16, 8
    x = torch.randn(s, b, h, d, requires_grad=True)
    freqs = rope.RotaryPositionEmbedding(turned, interleaved=interleaved)(s).cpu()
    angle = torch.arange(s).double()[:, None] / 10000.0 ** (torch.arange(0, turned, 2).double() / turned)
    z = x.detach().double()[..., :turned]
    pairs = (z[..., 0::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
    z = torch.complex(*pairs) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    parts = (z.real, z.imag)
    flat = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    want = torch.cat((flat, x.detach().double()[..., turned:]), -1)
    options = {"interleaved": interleaved, "tensor_format": form}
    if form == "bshd":
        got = rope.apply_rotary_pos_emb(x.transpose(0, 1), freqs, **options).transpose(0, 1)
    elif form == "thd":  # the sequences one after the other: positions begin anew
        packed = x.transpose(0, 1).flatten(0, 1)
        ends = torch.tensor([0, s, 2 * s], dtype=torch.int32)
        got = rope.apply_rotary_pos_emb(packed, freqs, cu_seqlens=ends, **options).unflatten(0, (b, s)).transpose(0, 1)
    else:
        got = rope.apply_rotary_pos_emb(x, freqs, fused=True, **options)
        later = rope.apply_rotary_pos_emb(x[:4], freqs, start_positions=torch.tensor([3, 5]), **options)
        shifted = [rope.apply_rotary_pos_emb(F.pad(x[:4], (0,) * 6 + (n, 0)), freqs, **options)[n:] for n in (3, 5)]
        torch.testing.assert_close(later, torch.stack((shifted[0][:, 0], shifted[1][:, 1]), 1))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    got.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="cp_size"):
        rope.apply_rotary_pos_emb(x, freqs, cp_size=2)
    with pytest.raises(ValueError, match="positions"):
        rope.apply_rotary_pos_emb(x, freqs[:4])
