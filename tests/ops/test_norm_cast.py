"""A norm that writes fp8 in one read of x, against the two kernels that it stands for: the same bits."""

import copy
import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import te_lite as te
from te_lite.ops import cast, norm, norm_kernels, source
from te_lite.quantize.per_tensor import Delayed
from te_lite.testing.numerics import assert_bitwise_equal, assert_close_to_oracle
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import DEVICES, PATHS, device_of, not_interpreted
from tests.ops.test_compile_sm90 import TUNED, compile_sm90, resources

EPS = 1e-5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    x: torch.dtype = BF16
    rms: bool = False
    zero_centered: bool = False
    gamma: torch.dtype = FP32
    beta: bool = True
    fp8: torch.dtype = E4M3

    def __str__(self) -> str:
        kinds = "-".join(str(t).rpartition(".")[2] for t in (self.x, self.gamma, self.fp8))
        flags = "-rms" * self.rms + "-zero_centered" * self.zero_centered + "-nobeta" * (not self.beta)
        return f"{self.m}x{self.n}-{kinds}{flags}"


CASES = [
    Case(1, 1, FP16),
    Case(1, 17, FP16, gamma=FP16),
    Case(7, 33, FP16, rms=True),
    Case(7, 33, FP16, zero_centered=True, beta=False),
    Case(31, 64, FP16, rms=True, zero_centered=True, gamma=FP16, fp8=E5M2),
    Case(5, 300, FP16),
    Case(0, 48, FP16),
    Case(5, 80, BF16),
    Case(4092, 48, BF16, gamma=BF16),
    Case(67, 1000, FP16, rms=True),
    Case(130, 4096, BF16, rms=True, gamma=BF16),
    Case(130, 4096, BF16, fp8=E5M2),
    Case(9, 5120, BF16, rms=True),
    Case(300, 8192, BF16, rms=True, gamma=BF16),
    Case(300, 8192, FP16, gamma=FP16),
    Case(300, 8192, BF16),
    Case(13, 12288, BF16, rms=True, zero_centered=True),
    Case(13, 12288, BF16, gamma=BF16),
    Case(3, 16384, FP16),
    Case(2, 32768, BF16, gamma=BF16),
    Case(2, 32767, BF16, rms=True),
]
SMALL = 2500  # elements; the interpreter is slow


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.randn(case.m, case.n) * 2 + torch.randn(case.m, 1)
    gamma = torch.randn(case.n) * 0.3 + (0.0 if case.zero_centered else 1.0)
    beta = torch.randn(case.n).to(case.gamma).to(device) if case.beta and not case.rms else None
    return x.to(case.x).to(device), gamma.to(case.gamma).to(device), beta


def one_read(path: str, x: Tensor, args: tuple, scale: Tensor, fp8: torch.dtype, amax_out: Tensor | None) -> tuple:
    """(row, scale_inv, mean, rstd); outputs are poisoned before."""
    if path != "interpreted":
        return norm.norm_cast(x, *args, scale, fp8, amax_out)
    scale_inv = torch.full((1,), NAN)
    row, mean, rstd = norm._forward_cuda(x, *args, scale, fp8, scale_inv, amax_out)
    return row, scale_inv, None if args[3] else mean, rstd


def two_reads(path: str, x: Tensor, args: tuple, scale: Tensor, fp8: torch.dtype, amax_out: Tensor | None) -> tuple:
    """The program of norm_cast's docstring."""
    gamma, beta, _, rms, zero_centered = args
    if path == "interpreted":
        mean, rstd, _ = norm._stats_cuda(x, *args, False)
        made = source.norm(x, None if rms else mean, rstd, gamma, beta, zero_centered)
        out = cast.transform(made, fp8_dtype=fp8, row=True, scale=scale, amax_out=amax_out, op=cast._transform_cuda)
        return out.row, out.scale_inv, None if rms else mean, rstd
    mean, rstd, _ = norm.norm_stats(x, *args, False)
    made = source.norm(x, mean, rstd, gamma, beta, zero_centered)
    out = cast.transform(made, fp8_dtype=fp8, row=True, scale=scale, amax_out=amax_out)
    return out.row, out.scale_inv, mean, rstd


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """torch.empty hands out nan: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def compare(case: Case, path: str, x: Tensor, gamma: Tensor, beta: Tensor | None, scale: float) -> None:
    args, results = (gamma, beta, EPS, case.rms, case.zero_centered), []
    scale = torch.tensor([scale], device=x.device)
    for run in (one_read, two_reads):
        history = torch.full((3, 5), 0.25, device=x.device)
        results.append((*run(path, x, args, scale, case.fp8, history[1, 3]), history))
    for name, got, want in zip(("row", "scale_inv", "mean", "rstd", "amax"), *results, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            words = {1: torch.uint8, 4: torch.int32}[got.element_size()]
            assert got.shape == want.shape and got.dtype == want.dtype
            assert_bitwise_equal(name, got.view(words), want.view(words))
    # Without amax_out nothing else changes.
    row = one_read(path, x, args, scale, case.fp8, None)[0]
    assert torch.equal(row.view(torch.uint8), results[0][0].view(torch.uint8))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_two_reads(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "interpreted":
        monkeypatch.setattr(norm, "sm_count", lambda device: 1)
        if case.m * case.n > SMALL or BF16 in (case.x, case.gamma):
            pytest.skip("too slow for the interpreter, which cuts bf16 off")
    x, gamma, beta = inputs(case, device_of(path))
    compare(case, path, x, gamma, beta, 37.3)
    if case.m > 5 and case.n > 30:
        x[2] = 0.0
        x[3, 7], x[4, 1], x[5, 2] = INF, NAN, 1e-7
        for scale in (37.3, NAN, INF):
            compare(case, path, x, gamma, beta, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True])
def test_against_fp64(rms: bool, device: str) -> None:
    """Of any input type: the values within half a unit of fp8, and statistics as good as those of two reads."""
    for dtype in (FP32, BF16, FP16):
        case = Case(65, 2048, dtype, rms=rms)
        x, gamma, beta = inputs(case, device)
        scale, amax = torch.tensor([20.0], device=device), torch.zeros(1, device=device)
        row, scale_inv, mean, rstd = norm.norm_cast(x, gamma, beta, EPS, rms, False, scale, E4M3, amax)
        v = x.double()
        centred = v if rms else v - v.mean(1, keepdim=True)
        y = centred * (centred.square().mean(1, keepdim=True) + EPS).rsqrt() * gamma.double()
        y = y if beta is None else y + beta.double()
        error = (row.double() * scale_inv.double() - y.clamp(-448 / 20, 448 / 20)).abs()
        assert (error <= y.abs() * 2.0**-4 * 1.001 + 2.0**-10 / 20 * 1.001).all()
        assert abs(amax.item() - y.abs().max().item()) < 1e-5 * amax.item()
        low = norm.norm_stats_ref(x, gamma, beta, EPS, rms, False, False)
        truth = (centred.square().mean(1) + EPS).rsqrt()
        assert_close_to_oracle("rstd", rstd.cpu(), truth.cpu(), low[1].cpu())
        if not rms:
            assert_close_to_oracle("mean", mean.cpu(), v.mean(1).cpu(), low[0].cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_modules_use_it_where_only_rows_are_wanted(kind, dtype, device, monkeypatch) -> None:
    """Without gradients; y and the amax history are those of two reads. fp32 keeps the two reads."""
    make = {"linear": lambda: te.LayerNormLinear(64, 96, normalization="RMSNorm", params_dtype=dtype, device=device),
            "mlp": lambda: te.LayerNormMLP(64, 128, params_dtype=dtype, device=device)}[kind]  # fmt: skip
    module, x = make(), torch.randn(40, 64, device=device, dtype=dtype)
    answers, plain = [], Delayed.norm_rows

    def seen(self, x: Tensor, *formula):
        answers.append(plain(self, x, *formula))
        return answers[-1]

    def run(grad: bool, norm_rows) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(Delayed, "norm_rows", norm_rows)
        fresh = copy.deepcopy(module)
        with torch.set_grad_enabled(grad), te.autocast(recipe=te.recipe.DelayedScaling()):
            y = fresh(x).detach()
        return y, fresh.get_extra_state()

    two, one = run(False, lambda self, x, *formula: None), run(False, seen)
    assert len(answers) == 1 and (answers[0] is None) == (dtype == FP32)
    for name, got, want in zip(("y", "amax history and scales"), one, two, strict=True):
        assert_bitwise_equal(name, got, want)
    run(True, seen)
    assert len(answers) == 1, "backward wants the columns too"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True])
def test_registration(rms: bool, device: str) -> None:
    x, gamma, beta = inputs(Case(5, 24, rms=rms), device)
    scalars = [torch.ones(1, device=device) for _ in range(3)]
    args = (x, gamma, beta, EPS, rms, False, scalars[0], E4M3, scalars[1], scalars[2])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(norm._forward_op.overload, args, test_utils=checks)


def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


def _summed_in(compiled) -> list[str]:
    """The layouts in which rows of fp32 values are summed."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.M))
    return sorted({layouts[name] for name in re.findall(r"\(tensor<\d+x\d+xf32, (#\w+)>\) ->", text)})


@not_interpreted
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("n", [1024, 4096, 5120, 8192, 12288, 16384, 32768])
def test_on_hopper(n: int, rms: bool, tmp_path) -> None:
    """No spills, and sums over rows that are cut as those of the statistics alone: else they were not the same bits."""
    block_m, block_n, warps, *_ = norm_kernels.forward_launch(n)
    gamma = ("*bf16", "*fp32")[(rms + n // 1024) % 2]  # each with both
    numbers = {"M": "i32", "N": "i32", "stride_x": "i32", "eps": "fp32"}
    tensors = {"x_ptr": "*bf16", "gamma_ptr": gamma, "mean_ptr": "*fp32", "rstd_ptr": "*fp32"}
    tensors |= {} if rms else {"beta_ptr": gamma}
    constants = {"RMS": rms, "ZERO_CENTERED": False, "BLOCK_M": block_m, "BLOCK_N": block_n}
    constants |= {"EVEN": block_n == n, "WANT_AMAX": False}
    outputs = {"y_ptr": "*fp8e4nv", "scale": "*fp32", "scale_inv": "*fp32", "amax_out": "*fp32"}
    one = compile_sm90(norm_kernels.forward_kernel, tensors | outputs | numbers, constants, warps)
    stats = compile_sm90(norm_kernels.stats_kernel, tensors | numbers, constants, norm_kernels.stats_launch(n, rms)[2])
    assert _summed_in(one) == _summed_in(stats) and _summed_in(one)
    ptx = one.asm["ptx"]
    assert "div.rn.f32" in ptx and "cvt.rn.satfinite.e4m3x2.f32" in ptx and not re.search(r"st\.global\S*\.b8", ptx)
    usage = resources(one, tmp_path)
    if usage is not None:
        registers, stack = (int(v) for v in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
        assert stack == 0 and registers * warps * 32 <= 65536, usage
        assert not (TUNED and n == 8192) or registers <= 64, usage
