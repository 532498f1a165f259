"""Norms against torch's own autograd in fp64.

Bounds: an error of at most twice that of the same formula in fp32 with one rounding to the output's dtype
(te_lite.testing.numerics). torch's layer_norm and rms_norm stand for it, so no oracle is checked by itself.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from te_lite.ops import norm, norm_kernels
from te_lite.testing.numerics import assert_bitwise_equal, assert_bound_bites, assert_close_to_oracle
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import DEVICES, PATHS, device_of, not_interpreted

EPS = 1e-5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    dtype: torch.dtype = BF16
    rms: bool = False
    zero_centered: bool = False
    gamma_dtype: torch.dtype = FP32
    beta: bool = True

    def __str__(self) -> str:
        names = (str(self.dtype)[6:], str(self.gamma_dtype)[6:], "rms" if self.rms else "layer")
        flags = "-zero_centered" * self.zero_centered + "-nobeta" * (not self.beta)
        return f"{self.m}x{self.n}-{'-'.join(names)}{flags}"


CASES = [
    Case(1, 1, FP32),
    Case(1, 17, BF16, gamma_dtype=BF16),
    Case(7, 33, FP16, rms=True),
    Case(7, 33, FP32, zero_centered=True, beta=False),
    Case(31, 64, BF16, rms=True, zero_centered=True, gamma_dtype=BF16),
    Case(5, 300, BF16),
    Case(3, 1023, FP32, rms=True),
    Case(4092, 48, BF16),
    Case(4092, 40, FP16, rms=True, gamma_dtype=FP16),
    Case(6, 4096, BF16),
    Case(9, 5120, BF16, rms=True),
    Case(6, 8192, BF16, gamma_dtype=BF16),
    Case(3, 8200, FP16),
    Case(3, 12288, BF16, rms=True, zero_centered=True),
    Case(2, 32768, BF16),
    Case(2, 32767, FP32, rms=True),
]
SMALL = 2500  # elements; the interpreter calls Python for each when it folds a pair of sums


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """torch.empty hands out nan: what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def suited(case: Case, path: str) -> Case:
    """The interpreter truncates where the hardware rounds to bf16: fp16 stands in for it there."""
    if path != "interpreted":
        return case
    if case.m * case.n > SMALL:
        pytest.skip("too slow for the interpreter")
    kinds = {name: FP16 for name in ("dtype", "gamma_dtype") if getattr(case, name) == BF16}
    return replace(case, **kinds)


def functions(path: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """norm's functions; for the interpreter with the kernels' launchers underneath and one multiprocessor, so
    that persistent programs walk several rows."""
    if path == "interpreted":
        monkeypatch.setattr(norm, "sm_count", lambda device: 1)
        for name in ("forward", "stats", "backward"):
            monkeypatch.setattr(norm, f"_{name}_op", getattr(norm, f"_{name}_cuda"))
    return SimpleNamespace(forward=norm.norm_forward, stats=norm.norm_stats, backward=norm.norm_backward)


@dataclass
class Inputs:
    x: Tensor
    dy: Tensor
    gamma: Tensor
    beta: Tensor | None


def inputs(case: Case, device: str) -> Inputs:
    """Rows with a mean of their own, half of the spread: a forgotten mean is no detail."""
    x = torch.randn(case.m, case.n) * 2 + torch.randn(case.m, 1)
    gamma = torch.randn(case.n) * 0.3 + (0.0 if case.zero_centered else 1.0)
    beta = torch.randn(case.n).to(case.gamma_dtype).to(device) if case.beta and not case.rms else None
    dy = torch.randn(case.m, case.n) + 0.5
    return Inputs(
        x.to(case.dtype).to(device), dy.to(case.dtype).to(device), gamma.to(case.gamma_dtype).to(device), beta
    )


def by_torch(case: Case, data: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every result by torch's autograd in `dtype`, on the CPU."""
    x, gamma = (t.detach().to("cpu", dtype).requires_grad_() for t in (data.x, data.gamma))
    beta = torch.zeros(case.n, dtype=dtype) if data.beta is None else data.beta.detach().to("cpu", dtype)
    beta.requires_grad_()
    weight = gamma + 1 if case.zero_centered else gamma
    shape = (case.n,)
    y = (F.rms_norm(x, shape, weight, EPS) + beta) if case.rms else F.layer_norm(x, shape, weight, beta, EPS)
    y.backward(data.dy.cpu().to(dtype))
    mean = torch.zeros(case.m, dtype=dtype) if case.rms else x.mean(1)
    rstd = ((x - mean[:, None]).square().mean(1) + EPS).rsqrt()
    results = {"y": y, "mean": mean, "rstd": rstd, "dx": x.grad, "dgamma": gamma.grad, "dbeta": beta.grad}
    return {name: value.detach() for name, value in results.items()}


def references(case: Case, data: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    truth, low = by_torch(case, data, torch.float64), by_torch(case, data, FP32)
    for name in ("y", "dx"):
        low[name] = low[name].to(case.dtype)
    for name in ("dgamma", "dbeta"):
        low[name] = low[name].to(case.gamma_dtype)
    return truth, low


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case: Case, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = suited(case, path)
    ops = functions(path, monkeypatch)
    data = inputs(case, device_of(path))
    truth, low = references(case, data)

    y, mean, rstd = ops.forward(data.x, data.gamma, data.beta, EPS, case.rms, case.zero_centered)
    stats = ops.stats(data.x, data.gamma, data.beta, EPS, case.rms, case.zero_centered, True)
    dx, dgamma, dbeta = ops.backward(data.dy, data.x, mean, rstd, data.gamma, case.zero_centered)

    assert y.dtype == dx.dtype == case.dtype and rstd.dtype == FP32 and dgamma.dtype == case.gamma_dtype
    assert (mean is None) == (stats[0] is None) == (dbeta is None) == case.rms
    got = {"y": y, "rstd": rstd, "dx": dx, "dgamma": dgamma}
    if not case.rms:
        got |= {"mean": mean, "dbeta": dbeta}
        assert_close_to_oracle("stats mean", stats[0], truth["mean"], low["mean"])
    assert_close_to_oracle("stats rstd", stats[1], truth["rstd"], low["rstd"])
    if case.n == 1 and not case.rms:
        # x - mean is 0: what is left of dx and dgamma is the rounding of a fused product of these terms.
        unit = 4 * torch.finfo(FP32).eps * float(data.dy.abs().max() * rstd.max())
        assert got.pop("dx").abs().max() <= unit * float(data.gamma.abs().max())
        assert got.pop("dgamma").abs().max() <= unit * float(data.x.abs().max())
    for name, value in got.items():
        assert_close_to_oracle(name, value, truth[name], low[name])
    assert stats[2].dtype == FP32 and 1 <= stats[2].numel() <= norm.MAX_PARTIALS
    peak = truth["y"].abs().max()
    assert_close_to_oracle("amax", stats[2].max(), peak, by_torch(case, data, FP32)["y"].abs().max())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rms", [False, True])
def test_wide_rows_read_twice(rms: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for rows that do not fit in registers gives the bits of the other, where both fit."""
    ops = functions(path, monkeypatch)
    case = Case(5, 70, FP16, rms=rms)
    data = inputs(case, device_of(path))
    _, mean, rstd = ops.forward(data.x, data.gamma, data.beta, EPS, rms, False)
    held = ops.backward(data.dy, data.x, mean, rstd, data.gamma, False)
    monkeypatch.setattr(norm, "HELD_FEATURES", 64)
    reread = ops.backward(data.dy, data.x, mean, rstd, data.gamma, False)
    for name, got, want in zip(("dx", "dgamma"), reread, held, strict=False):
        assert_bitwise_equal(name, got, want)
    if not rms:
        truth, low = references(case, data)
        assert_close_to_oracle("dbeta", reread[2], truth["dbeta"], low["dbeta"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rms", [False, True])
def test_no_rows(rms: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = functions(path, monkeypatch)
    data = inputs(Case(0, 48, rms=rms), device_of(path))
    y, mean, rstd = ops.forward(data.x, data.gamma, data.beta, EPS, rms, False)
    assert y.shape == (0, 48) and rstd.shape == (0,) and (rms or mean.shape == (0,))
    amax = ops.stats(data.x, data.gamma, data.beta, EPS, rms, False, True)[2]
    assert amax.tolist() == [0.0]
    dx, dgamma, dbeta = ops.backward(data.dy, data.x, mean, rstd, data.gamma, False)
    assert dx.shape == (0, 48) and dgamma.tolist() == [0.0] * 48
    assert dbeta is None if rms else dbeta.tolist() == [0.0] * 48


@pytest.mark.parametrize("path", PATHS)
def test_strided_and_expanded_inputs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = functions(path, monkeypatch)
    case = Case(6, 80, FP32)
    data = inputs(case, device_of(path))
    data.dy = data.dy[:1].expand(6, 80)
    wide = torch.full((6, 99), float("nan"), device=data.x.device)
    wide[:, :80] = data.x
    truth, low = references(case, data)
    for x in (wide[:, :80], data.x.t().contiguous().t(), data.x[:1].expand(6, 80)):
        if x.stride(0) == 0:
            data.x = x
            truth, low = references(case, data)
        y, mean, rstd = ops.forward(x, data.gamma, data.beta, EPS, False, False)
        dx, dgamma, dbeta = ops.backward(data.dy, x, mean, rstd, data.gamma, False)
        for name, value in {"y": y, "dx": dx, "dgamma": dgamma, "dbeta": dbeta}.items():
            assert value.is_contiguous()
            assert_close_to_oracle(name, value, truth[name], low[name])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rms", [False, True])
def test_edge_values(rms: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nan and inf stay in their row and make the amax inf; a zero row gives beta; subnormals give no nan."""
    ops = functions(path, monkeypatch)
    data = inputs(Case(9, 40, FP32, rms=rms), device_of(path))
    data.x[1] = 0.0
    data.x[3] = 1e-40
    clean = data.x.clone()
    data.x[5, 7] = float("nan")
    data.x[6, 0] = float("inf")
    args = (data.gamma, data.beta, EPS, rms, False)
    y, mean, rstd = ops.forward(data.x, *args)
    want = ops.forward(clean, *args)[0]
    rest = [0, 1, 2, 3, 4, 7, 8]
    assert_bitwise_equal("rows without nan", y[rest], want[rest])
    assert_bitwise_equal("zero row", y[1], torch.zeros_like(y[1]) if rms else data.beta)
    assert y[5].isnan().all() and y[6, 0].isnan()
    assert ops.stats(data.x, *args, True)[2].max().item() == float("inf")
    assert ops.stats(clean, *args, True)[2].max().item() == pytest.approx(want.abs().max().item(), rel=1e-6)
    assert ops.stats(clean, *args, False)[2] is None
    dx = ops.backward(data.dy, data.x, mean, rstd, data.gamma, False)[0]
    assert dx[rest].isfinite().all() and dx[5].isnan().all()


@pytest.mark.parametrize("path", PATHS)
def test_bounds_bite(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these slips has been made by somebody; none may hide below the bound."""
    ops = functions(path, monkeypatch)
    case = suited(Case(7, 96, BF16), path)
    data = inputs(case, device_of(path))
    truth, low = references(case, data)
    y, mean, rstd = ops.forward(data.x, data.gamma, data.beta, EPS, False, False)
    dx, dgamma, _ = ops.backward(data.dy, data.x, mean, rstd, data.gamma, False)
    g = data.dy.float() * data.gamma.float()
    no_mean_term = dx.float() + g.mean(1, keepdim=True) * rstd[:, None]
    assert_bound_bites("dx", dx, truth["dx"], low["dx"], lambda _: no_mean_term.to(case.dtype))
    uncentred = (data.dy.float() * data.x.float() * rstd[:, None]).sum(0)
    assert_bound_bites("dgamma", dgamma, truth["dgamma"], low["dgamma"], lambda _: uncentred)
    unbiased = (y.float() - data.beta) * (95 / 96) ** 0.5 + data.beta  # variance over N - 1
    assert_bound_bites("y", y, truth["y"], low["y"], lambda _: unbiased.to(case.dtype))
    assert_bound_bites("mean", mean, truth["mean"], low["mean"], lambda out: out.bfloat16().float())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(4092, 2048), Case(1024, 16384, rms=True)], ids=str)
def test_backward_has_the_same_bits_on_every_run(case: Case) -> None:
    data = inputs(case, "cuda")
    _, mean, rstd = norm.norm_forward(data.x, data.gamma, data.beta, EPS, case.rms, False)
    first = norm.norm_backward(data.dy, data.x, mean, rstd, data.gamma, False)
    again = norm.norm_backward(data.dy, data.x, mean, rstd, data.gamma, False)
    for got, want in zip(again, first, strict=True):
        if want is not None:
            assert_bitwise_equal("gradient", got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True])
def test_registration(rms: bool, device: str) -> None:
    data = inputs(Case(5, 24, rms=rms), device)
    args = (data.x, data.gamma, data.beta, EPS, rms, False)
    _, mean, rstd = norm.norm_forward(*args)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(norm._forward_op.overload, args, test_utils=checks)
    torch.library.opcheck(norm._stats_op.overload, (*args, True), test_utils=checks)
    torch.library.opcheck(norm._stats_op.overload, (*args, False), test_utils=checks)
    torch.library.opcheck(
        norm._backward_op.overload, (data.dy, data.x, mean, rstd, data.gamma, False), test_utils=checks
    )


def test_errors_name_value_rule_and_remedy() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"gamma \(9,\).*must be.*flatten"):
        norm.norm_forward(x, torch.zeros(9), None, EPS, True, False)
    with pytest.raises(ValueError, match=r"32769 features.*32768.*split"):
        norm.norm_forward(torch.zeros(1, 32769), torch.zeros(32769), None, EPS, True, False)


def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


def compile_for_hopper(
    kernel: Any, types: dict[str, str], constants: dict[str, object], num_warps: int
) -> tuple[bytes, Path]:
    """(cubin for sm_90, the program that reads it), on any machine."""
    import triton
    import triton.backends.nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    aligned = [name for name in types if types[name].startswith("*") or name == "N" or "stride" in name]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    return compiled.asm["cubin"], Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@not_interpreted
@pytest.mark.parametrize("n", [8192, 16384])
@pytest.mark.parametrize("rms", [False, True])
def test_backward_does_not_spill_on_hopper(rms: bool, n: int, tmp_path: Path) -> None:
    """Spilled accumulators would cost a second trip through L1 for every element."""
    block_m, block_n, warps, *_ = norm_kernels.backward_launch(n)
    tensors = {name: "*bf16" for name in ("dy_ptr", "x_ptr", "gamma_ptr", "dx_ptr")}
    tensors |= {name: "*fp32" for name in ("mean_ptr", "rstd_ptr", "dgamma_ptr", "dbeta_ptr")}
    numbers = {name: "i32" for name in ("M", "N", "stride_dy", "stride_x")}
    wide = block_n > norm.HELD_FEATURES
    constants = {"RMS": rms, "ZERO_CENTERED": False, "DBETA": not (rms or wide), "REREAD": wide}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "EVEN": True}
    cubin, cuobjdump = compile_for_hopper(norm_kernels.backward_kernel, tensors | numbers, constants, warps)
    if not cuobjdump.exists():
        pytest.skip(f"no {cuobjdump} in this triton")
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    usage = subprocess.run([cuobjdump, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True).stdout
    registers, stack = (int(v) for v in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    assert stack == 0 and registers * warps * 32 <= 65536, usage
