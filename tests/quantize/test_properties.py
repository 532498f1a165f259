"""Every quantizer of every recipe: bytes and scales equal to the oracle's (formats.py), and what follows from them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import te_lite as te
from te_lite.ops.source import plain
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize import formats
from tests.quantize.cases import (
    CASES,
    DEVICES,
    FEW,
    FINITE,
    INF,
    KINDS,
    NAN,
    NORMAL,
    QUANTIZED,
    Matrix,
    check_dequantized,
    check_layouts,
    fill,
    matrices,
    oracle,
    quantizers,
)
from tests.quantize.formats import E4M3, LARGEST, Format


def test_every_recipe_is_there():
    names = {"bf16", "delayed", "current", "tensorwise", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp"}
    assert set(te.recipe.available()) >= names
    assert {case.label for case in CASES} >= names


# ---- properties ----


@DEVICES
@QUANTIZED
@FEW
@given(st.data())
def test_bytes_and_scales_are_the_oracles(case, device, data):
    matrix = data.draw(matrices(device))
    v = matrix.make(device)
    for label, quantizer, views in quantizers(case, matrix.dtype, device):
        check_layouts(label, quantizer, plain(v), v, views)


@DEVICES
@QUANTIZED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 48), (7, 127), (150, 272)], ids=str)
def test_every_kind_of_values(shape, kind, case, device):
    """What hypothesis draws at random, each at least once; and what is read back."""
    v = Matrix(shape, torch.bfloat16, kind, 5).make(device)
    for label, quantizer, views in quantizers(case, v.dtype, device):
        check_layouts(label, quantizer, plain(v), v, views)
        both = quantizer.quantize(plain(v), row=True, col=True)[0]
        check_dequantized(label, both, *oracle(views, quantizer, v), views)


def half_units(v: Tensor, format: Format, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 [M, K]: the error that rounding v to fp8 may leave.

    The spacing of numbers with b mantissa bits is at most 2^-b of the number, and among subnormals that of the
    smallest one; half of it, and one rounding each of scale, inverse scale, both products (fp32) and the result.
    """
    relative, smallest = (2.0**-4, 2.0**-9) if format.fp8 == E4M3 else (2.0**-3, 2.0**-16)
    subnormal = 0.5 * smallest * formats.spread(scale_inv.double(), v.shape, format.block)
    bound = torch.maximum(relative * v.double().abs(), subnormal)
    precision = torch.finfo(dtype)
    roundings = 4 * 2.0**-24 + (precision.eps / 2 if dtype != torch.float32 else 0)
    return bound + roundings * (v.double().abs() + bound) + precision.smallest_normal * precision.eps / 2


@DEVICES
@QUANTIZED
@FEW
@given(st.data())
def test_a_round_trip_errs_by_half_a_unit(case, device, data):
    matrix = data.draw(matrices(device, FINITE))
    v = matrix.make(device)
    for label, quantizer, views in quantizers(case, matrix.dtype, device):
        q = quantizer.quantize(plain(v), row=True, col=True)[0]
        for layout, format, want in zip(
            ("row", "col"), (views.row, views.col), oracle(views, quantizer, v), strict=True
        ):
            error = (q.dequantize(layout).double() - v.double()).abs().cpu()
            bound = half_units(v.cpu(), format, want.scale_inv, matrix.dtype)
            if views.delayed:  # the scale knows nothing of v: what saturates has no bound
                bound[v.cpu().double().abs() > LARGEST[format.fp8] * float(want.scale_inv)] = INF
            assert bool((error <= bound).all()), f"{label} {layout}: {float((error / bound).max())} of the bound"


@DEVICES
@QUANTIZED
@FEW
@given(st.data())
def test_values_survive_a_second_time(case, device, data):
    """dequantise, quantise, dequantise: the same values. Bytes may differ: a scale may have moved by a power of two.

    With scales that are no powers of two the largest value of a block comes back exact in bf16, but in fp32 only up
    to four roundings (scale, its inverse, twice), and so do all others.
    """
    matrix = data.draw(matrices(device, NORMAL, (torch.bfloat16, torch.float32)))
    v = matrix.make(device)
    for label, quantizer, views in quantizers(case, matrix.dtype, device):
        exact = matrix.dtype != torch.float32 or views.row.mx or views.row.pow2 or views.delayed
        for layout in ("row", "col"):
            wanted = {"row": layout == "row", "col": layout == "col"}
            once = quantizer.quantize(plain(v), **wanted)[0].dequantize(layout)
            twice = quantizer.quantize(plain(once), **wanted)[0].dequantize(layout)
            torch.testing.assert_close(
                twice, once, rtol=0 if exact else 4 * 2.0**-23, atol=0, msg=f"{label} {layout} {matrix}"
            )


@DEVICES
@QUANTIZED
def test_zeros_stay_zeros_and_nothing_else_notices(case, device):
    """A row of zeros is zeros, and the other rows are as they were (their amax is another row's or their own)."""
    v = fill((150, 140), "normal", 1)
    v[3] = 8.0  # every block's and every column's amax, so that no scale hangs on the row that goes
    v[140] = 8.0
    holed = v.clone()
    holed[70] = 0
    for label, quantizer, _ in quantizers(case, v.dtype, device):
        full, empty = (quantizer.quantize(plain(t.to(device)), row=True, col=True)[0] for t in (v, holed))
        nothing = quantizer.quantize(plain(torch.zeros_like(v).to(device)), row=True, col=True)[0]
        rest = torch.arange(150) != 70
        for layout in ("row", "col"):
            a, b = full.dequantize(layout).cpu(), empty.dequantize(layout).cpu()
            assert not b[70].any() and not nothing.dequantize(layout).any(), f"{label} {layout}"
            assert_bitwise_equal(f"{label} {layout}", b[rest], a[rest])


@DEVICES
@QUANTIZED
@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
def test_a_non_finite_value_harms_its_block_alone(value, case, device):
    """nan comes back as nan, inf as the largest value of its block's scale; other blocks keep their bits."""
    v = fill((150, 140), "normal", 2)
    spoilt = v.clone()
    spoilt[70, 65] = value
    for label, quantizer, views in quantizers(case, v.dtype, device):
        good, bad = (quantizer.quantize(plain(t.to(device)), row=True, col=True)[0] for t in (v, spoilt))
        for layout, format in (("row", views.row), ("col", views.col)):
            a, b = good.dequantize(layout).cpu(), bad.dequantize(layout).cpu()
            found = b[70, 65].item()
            assert found != found if value != value else found == -value or abs(found) > 0, f"{label} {layout} {found}"
            touched = formats.block_amax(torch.where(spoilt.isfinite(), 0.0, 1.0), format.block) > 0
            if views.delayed:
                touched = torch.zeros_like(touched)
            outside = ~formats.spread(touched, v.shape, format.block)
            outside[70, 65] = False
            assert_bitwise_equal(f"{label} {layout}", b[outside], a[outside])
