"""The oracle itself: numbers worked out by hand, and torch's casts where both are defined."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quantize import formats
from tests.quantize.formats import E4M3, E5M2, LARGEST, Format, decode, encode

NAN, INF = float("nan"), float("inf")
FP8 = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def fp32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---- fp8 ----


@FP8
def test_decoding_is_what_torch_reads(fp8):
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(decode(codes, fp8).nan_to_num(7e7), codes.view(fp8).float().nan_to_num(7e7))


@pytest.mark.parametrize(
    "value, byte",
    [
        (1.0, 0x38), (-1.0, 0xB8), (0.0, 0x00), (-0.0, 0x80), (448.0, 0x7E), (2.0**-9, 0x01), (2.0**-6, 0x08),
        (2.0**-10, 0x00), (3 * 2.0**-10, 0x02), (2.0**-10 * 1.001, 0x01),  # ties go to even, above them up
        (17.0, 0x58), (19.0, 0x5A), (464.0, 0x7E), (1e30, 0x7E), (INF, 0x7E), (-INF, 0xFE), (NAN, 0x7F), (-NAN, 0x7F),
    ],
)  # fmt: skip
def test_e4m3_by_hand(value, byte):
    assert encode(fp32(value), E4M3).item() == byte


@pytest.mark.parametrize(
    "value, byte",
    [(1.0, 0x3C), (57344.0, 0x7B), (61440.0, 0x7B), (INF, 0x7B), (-1e9, 0xFB), (2.0**-16, 0x01), (2.0**-17, 0x00),
     (1.125, 0x3C), (1.375, 0x3E), (NAN, 0x7F)],
)  # fmt: skip
def test_e5m2_by_hand(value, byte):
    assert encode(fp32(value), E5M2).item() == byte


@FP8
def test_every_code_and_every_middle(fp8):
    """A code encodes to itself; halfway between two lies the even one, and a hair to either side decides."""
    points = formats.code_points(fp8)
    codes = torch.arange(len(points))
    assert encode(points.float(), fp8).tolist() == codes.tolist()
    middle = ((points[1:] + points[:-1]) / 2).float()
    assert encode(middle, fp8).tolist() == [i + i % 2 for i in codes[:-1].tolist()]
    assert encode(torch.nextafter(middle, fp32(INF)), fp8).tolist() == codes[1:].tolist()
    assert encode(torch.nextafter(middle, fp32(0.0)), fp8).tolist() == codes[:-1].tolist()


@FP8
@given(st.lists(st.floats(-440, 440, width=32), min_size=1, max_size=64))
def test_encoding_is_torchs_cast_where_nothing_saturates(fp8, values):
    v = fp32(*values)
    assert torch.equal(encode(v, fp8), v.to(fp8).view(torch.uint8))


# ---- scales ----


@pytest.mark.parametrize(
    "amax, byte",
    [
        (448.0, 127), (449.0, 128), (447.0, 127), (224.0, 126), (225.0, 127), (1.0, 119), (2.0**-127 * 448, 0),
        (2.0**-126 * 448, 1), (2.0**-127 * 449, 1), (1e-40, 0), (2.0**-149, 0), (0.0, 0), (INF, 0xFE), (NAN, 0xFF),
        (3.3895313892515355e38, 247),
    ],
)  # fmt: skip
def test_e8m0_by_hand(amax, byte):
    assert formats.e8m0(fp32(amax)).item() == byte


def test_e8m0_is_the_smallest_power_that_fits():
    """Of every mantissa: amax <= 448 * 2^e < 2 * amax. A product with fp32's 1 / 448 has the same exponent."""
    amax = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)
    power = formats.power_of_two(formats.e8m0(amax)).double()
    assert bool((amax <= 448 * power).all()) and bool((448 * power < 2 * amax).all())
    mantissa, exponent = torch.frexp(amax * torch.tensor(1 / 448, dtype=torch.float32))
    assert torch.equal(torch.exp2(exponent.double() - (mantissa == 0.5).int()), power)


def test_every_e8m0_byte_is_its_power_of_two():
    for e in range(255):
        byte = torch.tensor([e], dtype=torch.uint8)
        assert formats.power_of_two(byte).item() == 2.0 ** (e - 127)
        assert formats.power_of_two(byte, -1).item() == 2.0 ** (127 - e)
    assert math.isnan(formats.power_of_two(torch.tensor([255], dtype=torch.uint8)).item())


@pytest.mark.parametrize(
    "amax, options, scale",
    [
        (448.0, {}, 1.0), (224.0, {}, 2.0), (300.0, {"pow2": True}, 1.0), (100.0, {"pow2": True}, 4.0),
        (0.0, {}, 1.0), (INF, {}, 1.0), (NAN, {}, 1.0), (0.5, {"eps": 1.0}, 448.0), (0.0, {"eps": 1.0}, 448.0),
        (1e-37, {}, 3e38), (1e-37, {"pow2": True}, 2.0**127), (7.0, {"largest": 57344.0}, 8192.0),
    ],
)  # fmt: skip
def test_division_scale_by_hand(amax, options, scale):
    got = formats.division_scale(fp32(amax), **{"largest": 448.0, "limit": 3e38, **options})
    assert got.item() == torch.tensor(scale, dtype=torch.float32).item()


# ---- blocks ----


def test_blocks_by_hand():
    """[3, 5] in blocks of 2 x 2: ragged at the right and the bottom."""
    v = torch.arange(15.0).view(3, 5)
    assert formats.block_amax(v, (2, 2)).tolist() == [[6, 8, 9], [11, 13, 14]]
    assert formats.block_amax(-v, (1, None)).tolist() == [[4], [9], [14]]
    assert formats.block_amax(v, (None, 1)).tolist() == [[10, 11, 12, 13, 14]]
    assert formats.spread(torch.tensor([[1, 2, 3], [4, 5, 6]]), v.shape, (2, 2)).tolist() == [
        [1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]  # fmt: skip


@pytest.mark.parametrize("block, scales", [((None, None), (1, 1)), ((1, None), (0, 1)), ((None, 1), (1, 7)),
                                           ((32, 1), (0, 7)), ((1, 32), (0, 1)), ((128, 128), (0, 1))])  # fmt: skip
def test_no_rows(block, scales):
    q = Format(block).quantize(torch.zeros(0, 7))
    assert q.data.shape == (0, 7) and q.scale_inv.shape == scales and bool((q.scale_inv == 1).all())


def test_mx_by_hand():
    """Two blocks of 32: amax 448 * 2^3 has scale 2^3; amax 1.5 has 2^-8 (1.5 / 448 is between 2^-9 and 2^-8)."""
    v = torch.zeros(1, 40)
    v[0, 3], v[0, 4], v[0, 32], v[0, 39] = 3584.0, 8.0, 1.5, -(2.0**-8)
    q = formats.MX_ROW.quantize(v)
    assert q.e8m0.tolist() == [[130, 119]] and q.scale_inv.tolist() == [[8.0, 2.0**-8]]
    assert [q.data[0, i].item() for i in (3, 4, 32, 39)] == [0x7E, 0x38, 0x7C, 0xB8]
    assert torch.equal(formats.MX_COL.quantize(v.t()).data, q.data.t())


def test_a_nan_spoils_its_mx_block_alone_and_inf_saturates():
    v = torch.ones(2, 64)
    v[0, 5], v[1, 40] = NAN, -INF
    q = formats.MX_ROW.quantize(v)
    assert q.e8m0.tolist() == [[0xFF, 119], [119, 0xFE]]
    back = formats.MX_ROW.dequantize(q, torch.float32)
    assert bool(back[0, :32].isnan().all()) and bool((back[0, 32:] == 1).all()) and bool((back[1, :32] == 1).all())
    assert back[1, 40].item() == -INF and back[1, 41].item() == 0.0  # 448 * 2^127 is beyond fp32


def test_an_overflowing_scale_takes_the_formats_limit():
    v = torch.full((1, 4), 1e-38, dtype=torch.bfloat16)
    limits = torch.finfo(torch.bfloat16).max, formats.FP32_MAX
    for format, limit in zip((formats.blockwise(1, 128, pow2=False), formats.rowwise(pow2=False)), limits, strict=True):
        assert format.quantize(v).scale_inv.item() == (1.0 / fp32(limit)).item()
    assert formats.rowwise().quantize(v).scale_inv.item() == formats.blockwise(1, 128).quantize(v).scale_inv.item()


@pytest.mark.parametrize("block", [(None, None), (1, None), (None, 1), (1, 128), (128, 1), (128, 128)])
def test_the_largest_of_each_block_becomes_the_largest_code(block):
    """Without powers of two every block uses the whole range; a scale of another block would not."""
    v = torch.randn(150, 140) * torch.exp(torch.randn(150, 1) + torch.randn(1, 140))
    q = Format(block).quantize(v)
    top = formats.block_amax(decode(q.data, E4M3), block)
    assert bool((top == LARGEST[E4M3]).all())
