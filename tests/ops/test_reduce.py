"""The end of a reduce-scatter: a fixed order, one rounding, the same bits everywhere."""

import pytest
import torch

from te_lite.ops import reduce
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.fused import BF16, FP16, FP32
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import PATHS, device_of

# ranks, m, N, wire, own, bias, out
CASES = [
    (1, 3, 8, BF16, FP32, None, BF16),
    (2, 7, 24, BF16, FP32, BF16, BF16),
    (4, 130, 40, BF16, FP32, None, BF16),
    (4, 130, 40, FP16, FP16, FP32, FP32),
    (4, 33, 19, FP32, FP32, FP16, FP16),
    (8, 5, 1000, BF16, BF16, BF16, FP32),
    (4, 0, 8, BF16, FP32, None, BF16),
]


def data(ranks, m, n, wire, own, bias, device):
    def values(*shape):
        return torch.randn(*shape) * 2.0 ** torch.randint(-8, 9, shape)

    return (
        values(ranks, m, n).to(wire).to(device),
        values(m, n).to(own).to(device),
        None if bias is None else values(n).to(bias).to(device),
    )


def test_reduce_in_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("adds", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_order_and_rounding(case, path, adds):
    *sizes, out = case
    if path == "interpreted" and out == BF16:
        out = FP16  # the interpreter cuts bf16 off
    staging, own, bias = data(*sizes, device_of(path))
    residual = data(*sizes, device_of(path))[1].to(out) if adds else None
    for rank in range(case[0]):
        staging[rank] = float("nan")
        run = reduce._reduce_cuda if path == "interpreted" else reduce.reduce_slots
        got = run(staging, own, bias, rank, out, residual)
        total = torch.zeros_like(own, dtype=FP32)
        for step in range(1, case[0]):
            total = total + staging[(rank + step) % case[0]].float()
        total = total if residual is None else total + residual.float()
        total = total + own.float()
        want = (total if bias is None else total + bias.float()).to(out)
        assert_bitwise_equal("reduce_slots", got, want)
        staging[rank] = 0


@pytest.mark.parametrize("case", CASES[2:6], ids=str)
def test_the_order_matters(case):
    """With another rank's order the same values have other bits: the test above would notice."""
    *sizes, _ = case
    staging, own, bias = data(*sizes, "cpu")
    staging[0] = 0
    first = reduce.reduce_slots_ref(staging, own, bias, 0, FP32)
    assert not torch.equal(first, reduce.reduce_slots_ref(staging.flip(0), own, bias, case[0] - 1, FP32))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case):
    *sizes, out = case
    staging, own, bias = data(*sizes, "cpu")
    staging[0] = 0
    parts = [*staging.double(), own.double(), *([] if bias is None else [bias.double().expand(own.shape)])]
    want, magnitude = sum(parts), sum(part.abs() for part in parts)
    error = (reduce.reduce_slots(staging, own, bias, 0, out).double() - want).abs()
    unit = torch.finfo(out).eps / 2
    assert (error <= len(parts) * 2.0**-24 * magnitude + unit * want.abs() + torch.finfo(out).tiny).all()


def test_errors_and_registration():
    staging, own, bias = data(2, 4, 8, BF16, FP32, BF16, "cpu")
    with pytest.raises(ValueError, match=r"must be contiguous \[R, m, N\]"):
        reduce.reduce_slots(staging[:, :2], own, bias, 0, BF16)
    with pytest.raises(ValueError, match=r"must be contiguous \[R, m, N\]"):
        reduce.reduce_slots(staging, own[:, ::2], bias, 0, BF16)
    torch.library.opcheck(
        reduce._reduce_op.overload, (staging, own, bias, 1, BF16), test_utils=("test_schema", "test_faketensor")
    )
