"""Partial sums for a narrower wire: the bound of the docstring, what is not finite, the same bits everywhere."""

import pytest
import torch

from te_lite.ops import narrow as N
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.fused import BF16, FP16, FP32
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import DEVICES, PATHS, device_of

CASES = [(1, 128, BF16), (33, 256, FP32), (70, 384, BF16), (256, 128, FP16), (0, 128, BF16)]


def test_narrow_in_the_interpreter():
    run_interpreted(__file__)


def values(m, n, dtype):
    """Magnitudes over 2^-20 .. 2^15, blocks of zeros and of the least and largest magnitudes among them."""
    v = torch.randn(m, n) * 2.0 ** torch.randint(-20, 4, (m, n)) * 2.0 ** torch.randint(0, 8, (m, 1))
    v[1::5, :128] = 0
    v[2::5, -128:] *= torch.finfo(dtype).tiny
    v[3::5, -1] = torch.finfo(dtype).max / 2  # the largest itself may round to 2^128
    return v.to(dtype)


def run(path, x):
    data, scales = N._narrow_cuda(x) if path == "interpreted" else N.narrow(x.to(device_of(path)))
    return data.cpu(), scales.cpu()


@pytest.mark.parametrize("path", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bound(case, path):
    m, n, dtype = case
    x = values(*case)
    data, scales = run(path, x)
    assert data.dtype == torch.float8_e4m3fn and data.shape == (m, n) and scales.shape == (n // 128, m)
    x, error = x.double(), (N.widened(data, scales).double() - x.double()).abs()
    largest = x.view(m, n // 128, 128).abs().amax(2).repeat_interleave(128, 1)
    step = torch.maximum(largest / 224, torch.tensor(2.0**-126)) * 2.0**-10
    assert (error <= torch.maximum(2.0**-4 * x.abs(), step)).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_of_four_bits_arrive_as_they_are(case, path):
    m, n, dtype = case
    exponents = torch.randint(-3, 3, (m, n)) + torch.arange(m).view(-1, 1) % 7
    x = (torch.randint(-15, 16, (m, n)) * 2.0**exponents).to(dtype)
    assert_bitwise_equal("widened", N.widened(*run(path, x)), x.float())


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_the_bound_is_met(case):
    """It says no more than what happens: some value comes within a tenth of it."""
    x = values(*case)
    error = (N.widened(*N.narrow(x)).double() - x.double()).abs()
    assert 0.9 * 2.0**-4 <= (error / x.double().abs()).nan_to_num(0)[x.abs() * 2**6 > x.abs().amax(1, True)].max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_is_not_finite_arrives_as_nan(bad, path):
    x = torch.randn(3, 256)
    x[1, 130] = bad
    got = N.widened(*run(path, x))
    assert got[1, 128:].isnan().all() and got[1, :128].isfinite().all() and got[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_has_the_bits_of_the_oracle(case):
    x = values(*case)
    for got, want in zip(run("cuda", x), N.narrow_ref(x), strict=True):
        assert_bitwise_equal("narrow", got, want)


def test_errors_and_registration():
    for x in (torch.zeros(4, 100), torch.zeros(128), torch.zeros(128, 128).t()[:, :128][::2]):
        with pytest.raises(ValueError, match=r"must be contiguous \[M, N\], N a multiple of 128"):
            N.narrow(x)
    torch.library.opcheck(N._narrow_op.overload, (torch.randn(4, 128),), test_utils=("test_schema", "test_faketensor"))
