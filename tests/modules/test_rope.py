"""Rotary position embedding against complex numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

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


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_angles_of_each_sample(form):
    x, freqs = torch.randn(6, 2, 3, 8), torch.randn(9, 2, 1, 8)
    options = {"tensor_format": form, "start_positions": torch.tensor([3, 1])}
    given = x if form == "sbhd" else x.transpose(0, 1)
    got = rope.apply_rotary_pos_emb(given, freqs, **options)
    got = got if form == "sbhd" else got.transpose(0, 1)
    for b, start in ((0, 3), (1, 1)):
        one = rope.apply_rotary_pos_emb(x[:, b : b + 1], freqs[start : start + 6, b : b + 1])
        assert torch.equal(got[:, b : b + 1], one)


@pytest.mark.parametrize("shape", [(6, 3, 1, 8), (6, 1, 3, 8), (6, 8)], ids=str)
def test_freqs_of_other_shapes(shape):
    with pytest.raises(ValueError, match="must be .positions, 1 or 2, 1, channels."):
        rope.apply_rotary_pos_emb(torch.randn(6, 2, 3, 8), torch.randn(shape))


def test_the_embedding_as_callers_know_it():
    """Its buffer stands in checkpoints, which may lack it; a factor alone does nothing."""
    module = rope.RotaryPositionEmbedding(16, seq_len_interpolation_factor=4, rotary_base=500.0)
    assert torch.equal(module(4), rope.RotaryPositionEmbedding(16, rotary_base=500.0)(4))
    scaled = rope.RotaryPositionEmbedding(16, 1.0, 4, 2)
    torch.testing.assert_close(scaled(8), rope.RotaryPositionEmbedding(16)(8) / 4)
    torch.testing.assert_close(scaled(16), rope.RotaryPositionEmbedding(16)(16) / 8)
    state = module.state_dict()
    assert state.keys() == {"inv_freq"}
    assert module.load_state_dict(state) == module.load_state_dict({}) == ([], [])
    kept = module.rotary_base, module.seq_len_interpolation_factor, module.pretrained_max_position_embeddings
    assert kept == (500.0, 4, None)


def rotated(x, angle, interleaved):
    """One channel pair after the other, in fp64: x [H, D], angle [D' / 2]."""
    half, out = len(angle), x.double().clone()
    for i, turn in enumerate(angle.double()):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = x[:, one].double(), x[:, other].double()
        out[:, one], out[:, other] = a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_start_positions(form, gaps, interleaved):
    """Each sequence from its own position on, token by token; what lies between packed sequences is at position 0."""
    starts, dim = [1, 7, 3], 8
    freqs = rope.RotaryPositionEmbedding(dim, interleaved=interleaved)(30).cpu()
    options = {"interleaved": interleaved, "start_positions": torch.tensor(starts), "tensor_format": form}
    if form == "thd":
        ends, begins = [0, 8, 9, 24], [0, 10, 12, 29] if gaps else [0, 8, 9, 24]
        options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)
        options["cu_seqlens_padded"] = torch.tensor(begins) if gaps else None
        x = torch.randn(begins[-1], 2, 16)
        where = {b + i: start + i for b, start, n in zip(begins, starts, (8, 1, 15)) for i in range(n)}  # noqa: B905
        tokens = {(at,): where.get(at, 0) for at in range(len(x))}
    else:
        x = torch.randn(*((5, 3) if form == "sbhd" else (3, 5)), 2, 16)
        tokens = {((s, b) if form == "sbhd" else (b, s)): starts[b] + s for b in range(3) for s in range(5)}
    want = torch.empty_like(x, dtype=torch.float64)
    for at, position in tokens.items():
        angle = position / 10000.0 ** (torch.arange(0, dim, 2).double() / dim)
        want[at] = rotated(x[at], angle, interleaved)
    got = rope.apply_rotary_pos_emb(x, freqs, **options)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form, shape, starts, ends, said", [
    ("sbhd", (4, 2, 1, 8), None, None, "from 0 to 3"),
    ("bshd", (2, 4, 1, 8), None, None, "from 0 to 3"),
    ("thd", (9, 1, 8), None, [0, 5, 9], "from 0 to 4"),
    ("sbhd", (2, 2, 1, 8), [0, 2], None, "from 0 to 3"),
    ("bshd", (2, 2, 1, 8), [2, 1], None, "from 1 to 3"),
    ("thd", (4, 1, 8), [1, 3], [0, 2, 4], "from 1 to 4"),
    ("sbhd", (2, 2, 1, 8), [0, -1], None, "from -1 to 1"),
])  # fmt: skip
def test_positions_beyond_freqs(form, shape, starts, ends, said):
    """The value, the rule and the remedy. One position less is taken."""
    freqs, given = rope.RotaryPositionEmbedding(8)(8).cpu(), {"tensor_format": form}
    given["start_positions"] = starts if starts is None else torch.tensor(starts)
    given["cu_seqlens"] = ends if ends is None else torch.tensor(ends)
    with pytest.raises(ValueError, match=rf"{said}, freqs those from 0 to 2: must have .*make freqs longer"):
        rope.apply_rotary_pos_emb(torch.randn(shape), freqs[:3], **given)
    if min(starts or [0]) >= 0:
        assert (
            rope.apply_rotary_pos_emb(torch.randn(shape), freqs[: int(said.split()[-1]) + 1], **given).isfinite().all()
        )


def test_positions_that_cannot_be_read():
    """Traced and without data: they are not read, and nothing is traced but one graph."""
    x, freqs, ends = torch.randn(9, 1, 8), rope.RotaryPositionEmbedding(8)(9).cpu(), torch.tensor([0, 5, 9])
    given = {"tensor_format": "thd", "start_positions": torch.tensor([1, 2])}
    traced = torch.compile(rope.apply_rotary_pos_emb, fullgraph=True, backend="eager")
    want = rope.apply_rotary_pos_emb(x, freqs, cu_seqlens=ends, **given)
    torch.testing.assert_close(traced(x, freqs, cu_seqlens=ends, **given), want)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert rope.apply_rotary_pos_emb(x, freqs, cu_seqlens=ends, **given).shape == x.shape


@pytest.mark.gpu
def test_positions_on_a_gpu_are_not_waited_for():
    x, freqs = torch.randn(9, 1, 8, device="cuda"), rope.RotaryPositionEmbedding(8)(9)
    ends, starts = torch.tensor([0, 5, 9], device="cuda"), torch.tensor([1, 2], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rope.apply_rotary_pos_emb(x, freqs, "thd", starts, cu_seqlens=ends)
        with pytest.raises(ValueError, match="make freqs longer"):
            rope.apply_rotary_pos_emb(x[:, None], freqs[:8], "sbhd", starts[:1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
