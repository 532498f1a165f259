"""Partial sums for a narrower wire: the bound that the oracle states, and what is not finite."""

import pytest
import torch

from te_lite.ops.narrow import narrow_ref, widened_ref
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.fused import BF16, FP16, FP32

CASES = [(1, 128, BF16), (33, 256, FP32), (70, 384, BF16), (256, 128, FP16), (0, 128, BF16)]


def values(m, n, dtype):
    """Magnitudes over 2^-20 .. 2^15, blocks of zeros and of the least and largest magnitudes among them."""
    v = torch.randn(m, n) * 2.0 ** torch.randint(-20, 4, (m, n)) * 2.0 ** torch.randint(0, 8, (m, 1))
    v[1::5, :128] = 0
    v[2::5, -128:] *= torch.finfo(dtype).tiny
    v[3::5, -1] = torch.finfo(dtype).max / 2  # the largest itself may round to 2^128
    return v.to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bound(case):
    m, n, dtype = case
    x = values(*case)
    data, scales = narrow_ref(x)
    assert data.dtype == torch.float8_e4m3fn and data.shape == (m, n) and scales.shape == (n // 128, m)
    x, error = x.double(), (widened_ref(data, scales).double() - x.double()).abs()
    largest = x.view(m, n // 128, 128).abs().amax(2).repeat_interleave(128, 1)
    step = torch.maximum(largest / 224, torch.tensor(2.0**-126)) * 2.0**-10
    assert (error <= torch.maximum(2.0**-4 * x.abs(), step)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_of_four_bits_arrive_as_they_are(case):
    m, n, dtype = case
    exponents = torch.randint(-3, 3, (m, n)) + torch.arange(m).view(-1, 1) % 7
    x = (torch.randint(-15, 16, (m, n)) * 2.0**exponents).to(dtype)
    assert_bitwise_equal("widened", widened_ref(*narrow_ref(x)), x.float())


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_the_bound_is_met(case):
    """It says no more than what happens: some value comes within a tenth of it."""
    x = values(*case)
    error = (widened_ref(*narrow_ref(x)).double() - x.double()).abs()
    assert 0.9 * 2.0**-4 <= (error / x.double().abs()).nan_to_num(0)[x.abs() * 2**6 > x.abs().amax(1, True)].max()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_arrives_as_nan(bad):
    x = torch.randn(3, 256)
    x[1, 130] = bad
    got = widened_ref(*narrow_ref(x))
    assert got[1, 128:].isnan().all() and got[1, :128].isfinite().all() and got[[0, 2]].isfinite().all()
