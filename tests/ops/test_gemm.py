"""GEMMs against fp64.

Bound of an element, from the order of operations alone: every partial sum is at most sum_k |a_k b_k|, so

    |out - truth| <= steps * step_error * sum_k |a_k b_k| * scales + u |truth|

steps, step_error: K additions in fp32 (2^-23 covers adders that truncate). On Hopper an fp8 product sum keeps 13
bits behind the largest addend; split accumulation does that for at most 128 products (4 instructions of 32) at
a time, fast accumulation for all of them. u: unit roundoff of the output, once.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from te_lite.ops import gemm
from te_lite.quantize.per_tensor import PerTensorFormat
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.paths import DEVICES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def within(out: Tensor, truth: Tensor, magnitude: Tensor, accumulation: float) -> bool:
    """magnitude: sum_k |a_k b_k|, scaled (and |bias|), of the truth's shape."""
    unit = torch.finfo(out.dtype).eps / 2
    smallest = torch.finfo(out.dtype).smallest_normal * unit
    error = (out.detach().cpu().double() - truth).abs()
    return bool((error <= accumulation * magnitude + (1 + accumulation) * unit * truth.abs() + smallest).all())


def fp8_accumulation(device: str, k: int, fast: bool) -> float:
    in_fp32 = (k + 4) * 2.0**-23
    if device == "cpu":
        return in_fp32
    return in_fp32 + (-(-k // 32) if fast else 4) * 2.0**-13


@dataclass(frozen=True)
class Fp8Case:
    m: int
    k: int
    n: int
    a: torch.dtype = E4M3
    b: torch.dtype = E4M3
    out: torch.dtype = BF16
    bias: torch.dtype | None = None
    fast: bool = False

    def __str__(self) -> str:
        dtypes = "-".join(str(t)[6:] for t in (self.a, self.b, self.out, self.bias) if t is not None)
        return f"{self.m}x{self.k}x{self.n}-{dtypes}{'-fast' * self.fast}"


FP8_CASES = [
    Fp8Case(0, 32, 48),
    Fp8Case(0, 32, 48, out=FP32, bias=FP32),
    Fp8Case(1, 16, 16, bias=BF16),
    Fp8Case(7, 48, 80, out=FP16, bias=FP16),
    Fp8Case(7, 48, 80, a=E5M2, out=FP32, bias=BF16),
    Fp8Case(33, 256, 64, b=E5M2, bias=FP32),
    Fp8Case(4092, 64, 32, out=FP32),
    Fp8Case(4092, 64, 32, a=E5M2, fast=True),
    Fp8Case(64, 512, 128, fast=True, bias=BF16),
    Fp8Case(16, 0, 32, out=FP16, bias=FP16),
    Fp8Case(16, 32, 0),
]


@dataclass
class Fp8Data:
    a: Tensor
    b: Tensor
    a_scale_inv: Tensor
    b_scale_inv: Tensor
    bias: Tensor | None
    truth: Tensor
    magnitude: Tensor

    def args(self, case: Fp8Case) -> tuple:
        return self.a, self.b, self.a_scale_inv, self.b_scale_inv, case.out, self.bias, case.fast


def fp8_data(case: Fp8Case, device: str) -> Fp8Data:
    a = (torch.randn(case.m, case.k) * 16).to(case.a)
    b = (torch.randn(case.n, case.k) * 16).to(case.b)
    a_scale_inv, b_scale_inv = 0.01 + torch.rand(1) * 0.1, 0.01 + torch.rand(1) * 0.1
    factor = a_scale_inv.double() * b_scale_inv.double()
    bias = None if case.bias is None else torch.randn(case.n).to(case.bias)
    added = torch.zeros(case.n).double() if bias is None else bias.double()
    truth = a.double() @ b.double().t() * factor + added
    magnitude = a.double().abs() @ b.double().abs().t() * factor + added.abs()
    on_device = (t if t is None else t.to(device) for t in (a, b, a_scale_inv, b_scale_inv, bias))
    return Fp8Data(*on_device, truth, magnitude)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_gemm_fp8(case: Fp8Case, device: str) -> None:
    data = fp8_data(case, device)
    out = gemm.gemm_fp8(*data.args(case))
    assert out.dtype == case.out and out.shape == (case.m, case.n) and out.is_contiguous()
    assert within(out, data.truth, data.magnitude, fp8_accumulation(device, case.k, case.fast))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FP8_CASES[2:9], ids=str)
def test_the_fp8_bound_bites(case: Fp8Case, device: str) -> None:
    """A scale for its inverse, one scale of the two, a forgotten bias, a lost last block of K."""
    data = fp8_data(case, device)
    accumulation = fp8_accumulation(device, case.k, case.fast)

    def passes(a: Tensor, b: Tensor, a_scale_inv: Tensor, b_scale_inv: Tensor, bias: Tensor | None) -> bool:
        out = gemm.gemm_fp8(a, b, a_scale_inv, b_scale_inv, case.out, bias, case.fast)
        return within(out, data.truth, data.magnitude, accumulation)

    a, b, sa, sb, bias = data.a, data.b, data.a_scale_inv, data.b_scale_inv, data.bias
    one = torch.ones_like(sa)
    assert passes(a, b, sa, sb, bias)
    assert not passes(a, b, 1 / sa, sb, bias)
    assert not passes(a, b, sa, one, bias)
    assert bias is None or not passes(a, b, sa, sb, None)
    assert not passes(a[:, :-16].contiguous(), b[:, :-16].contiguous(), sa, sb, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tokens", [0, 16, 4096])
def test_gemm_accumulate_fp8(tokens: int, dtype: torch.dtype, device: str) -> None:
    case = Fp8Case(48, tokens, 32, a=E5M2)
    data = fp8_data(case, device)
    before = torch.randn(48, 32).to(dtype)
    out = before.clone().to(device)
    PerTensorFormat().accumulate_(out, (data.a, data.a_scale_inv), (data.b, data.b_scale_inv), False)
    truth, magnitude = data.truth + before.double(), data.magnitude + before.double().abs()
    accumulation = fp8_accumulation(device, tokens + 1, False)
    assert within(out, truth, magnitude, accumulation)
    assert tokens == 0 or not within(out, data.truth, data.magnitude, accumulation)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_nan_and_zero(device: str) -> None:
    a = torch.zeros(5, 32, device=device)
    b = torch.ones(16, 32, device=device).to(E4M3)
    one = torch.ones(1, device=device)
    assert gemm.gemm_fp8(a.to(E4M3), b, one, one, BF16).eq(0).all()
    a[2, 3] = float("nan")
    out = gemm.gemm_fp8(a.to(E4M3), b, one, one, BF16)
    assert out[2].isnan().all() and out[[0, 1, 3, 4]].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_errors_name_value_rule_and_remedy(device: str) -> None:
    def operand(rows: int, cols: int, dtype: torch.dtype = E4M3) -> Tensor:
        return torch.zeros(rows, cols, device=device).to(dtype)

    one = torch.ones(1, device=device)
    with pytest.raises(ValueError, match=r"K=40.*multiples of 16.*pad"):
        gemm.gemm_fp8(operand(4, 40), operand(16, 40), one, one, BF16)
    with pytest.raises(ValueError, match=r"N=24.*multiples of 16.*pad"):
        gemm.gemm_fp8(operand(4, 32), operand(24, 32), one, one, BF16)
    with pytest.raises(ValueError, match=r"\[4, 32\] and b \[16, 48\].*equal.*pass"):
        gemm.gemm_fp8(operand(4, 32), operand(16, 48), one, one, BF16)
    with pytest.raises(ValueError, match=r"float8_e5m2 and float8_e5m2.*at most one.*E4M3"):
        gemm.gemm_fp8(operand(4, 32, E5M2), operand(16, 32, E5M2), one, one, BF16)
    with pytest.raises(TypeError, match=r"bfloat16.*must be.*quantize"):
        gemm.gemm_fp8(operand(4, 32, BF16), operand(16, 32), one, one, BF16)


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    n: int
    dtype: torch.dtype = BF16
    out: torch.dtype | None = None
    bias: torch.dtype | None = None
    transposed: bool = False

    def __str__(self) -> str:
        dtypes = "-".join(str(t)[6:] for t in (self.dtype, self.out, self.bias) if t is not None)
        return f"{self.m}x{self.k}x{self.n}-{dtypes}{'-transposed' * self.transposed}"


CASES = [
    Case(0, 24, 20),
    Case(0, 24, 20, bias=BF16),
    Case(5, 0, 20, FP32, bias=FP32),
    Case(1, 17, 3, FP32),
    Case(7, 33, 19, BF16, bias=BF16),
    Case(7, 33, 19, BF16, FP32, BF16),
    Case(7, 33, 19, FP16, FP32),
    Case(7, 33, 19, FP16, BF16, FP32),
    Case(7, 33, 19, FP32, BF16, BF16),
    Case(7, 33, 19, FP32, bias=BF16),
    Case(4092, 64, 40, BF16, transposed=True),
    Case(4092, 64, 40, FP32, bias=FP32, transposed=True),
    Case(64, 512, 64, BF16, FP32, transposed=True),
]


def strided(rows: int, cols: int, dtype: torch.dtype, device: str, transposed: bool) -> Tensor:
    shape = (cols, rows) if transposed else (rows, cols)
    value = torch.randn(shape).to(dtype).to(device)
    return value.t() if transposed else value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemm(case: Case, device: str) -> None:
    a = strided(case.m, case.k, case.dtype, device, case.transposed)
    b = strided(case.n, case.k, case.dtype, device, case.transposed)
    bias = None if case.bias is None else torch.randn(case.n).to(case.bias).to(device)
    a64, b64 = a.cpu().double(), b.cpu().double()
    added = torch.zeros(case.n).double() if bias is None else bias.cpu().double()
    truth, magnitude = a64 @ b64.t() + added, a64.abs() @ b64.abs().t() + added.abs()
    accumulation = (case.k + 1) * 2.0**-23
    expected = case.out or case.dtype
    if case.bias not in (None, expected):  # the bias is rounded to the output's type
        accumulation += torch.finfo(expected).eps / 2
    if expected not in (case.dtype, FP32):  # the product is rounded to the input's type, then to the output's
        accumulation += torch.finfo(case.dtype).eps / 2 + torch.finfo(expected).eps / 2

    out = gemm.gemm(a, b, case.out, bias)
    assert out.dtype == expected and out.shape == (case.m, case.n)
    assert within(out, truth, magnitude, accumulation)
    assert within(gemm.gemm_ref(a, b, case.out, bias), truth, magnitude, accumulation)
    if case.m and case.k:
        assert not within(gemm.gemm(a, b.flip(0), case.out, bias), truth, magnitude, accumulation)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (FP32, FP16), (FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, BF16)])
@pytest.mark.parametrize("tokens", [0, 1, 4092])
def test_gemm_accumulate(tokens: int, dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    """The order of addition is free, the number of roundings is not: a second one would exceed the bound."""
    out_dtype, dtype = dtypes
    before = torch.randn(24, 40).to(out_dtype)
    dy, x = torch.randn(tokens, 24).to(dtype).to(device), torch.randn(tokens, 40).to(dtype).to(device)
    dy64, x64 = dy.cpu().double(), x.cpu().double()
    truth, magnitude = before + dy64.t() @ x64, before.double().abs() + dy64.t().abs() @ x64.abs()
    accumulation = (tokens + 1) * 2.0**-23
    out, oracle = before.clone().to(device), before.clone()
    gemm.gemm_accumulate_(out, dy, x)
    gemm.gemm_accumulate_ref_(oracle, dy.cpu(), x.cpu())
    assert within(out, truth, magnitude, accumulation) and within(oracle, truth, magnitude, accumulation)
    assert tokens == 0 or not within(out - before.to(device), truth, magnitude, accumulation)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
def test_accumulation_without_a_temporary(out_dtype: torch.dtype) -> None:
    """A weight gradient is added by the GEMM's own epilogue."""
    dy, x = (torch.randn(64, 1024, device="cuda").bfloat16() for _ in range(2))
    out = torch.zeros(1024, 1024, device="cuda", dtype=out_dtype)
    gemm.gemm_accumulate_(out, dy, x)  # the first call may allocate a workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gemm.gemm_accumulate_(out, dy, x)
    assert torch.cuda.max_memory_allocated() - before < out.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_registration(device: str) -> None:
    case = Fp8Case(7, 48, 32, bias=BF16)
    checks = ("test_schema", "test_faketensor")
    # test_schema multiplies its inputs, which fp8 tensors cannot
    torch.library.opcheck(gemm._gemm_fp8_op.overload, fp8_data(case, device).args(case), test_utils=checks[1:])
    out, dy, x = (torch.randn(size, device=device) for size in ((24, 40), (8, 24), (8, 40)))
    torch.library.opcheck(gemm._gemm_accumulate_op.overload, (out, dy, x), test_utils=checks)


def test_the_oracle_is_the_cpu_op() -> None:
    case = Fp8Case(7, 48, 32, bias=BF16)
    args = fp8_data(case, "cpu").args(case)
    assert_bitwise_equal("gemm_fp8", gemm.gemm_fp8(*args), gemm.gemm_fp8_ref(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("m", [8, 24, 32])
def test_the_bits_of_a_small_fp8_gemm_do_not_move(m, fast_accum):
    """A thousand times the same product, into fresh memory and into a part of a larger result, as rings of
    userbuffers write it: results that are compared bit for bit rest on this."""
    a, b = (torch.randn(rows, 128, device="cuda").to(torch.float8_e4m3fn) for rows in (m, 32))
    scales = (torch.full((1,), value, device="cuda") for value in (0.013, 0.021))
    bias = torch.randn(32, device="cuda", dtype=torch.bfloat16)
    args = (a, b, *scales, torch.bfloat16, bias, fast_accum)
    want, moved = gemm.gemm_fp8(*args).view(torch.int16), torch.zeros((), dtype=torch.int64, device="cuda")
    whole = torch.empty(4 * m, 32, device="cuda", dtype=torch.bfloat16)
    for i in range(1000):
        part = whole[i % 4 * m : (i % 4 + 1) * m].fill_(float("nan"))
        gemm.gemm_fp8(*args, out=part)
        moved += (part.view(torch.int16) != want).sum() + (gemm.gemm_fp8(*args).view(torch.int16) != want).sum()
    assert not moved, f"{int(moved)} elements of 2000 results differ"
