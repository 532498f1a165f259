"""Cases of the property tests: every quantizer of every recipe beside the oracle's formats, and matrices to try."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import te_lite as te
from te_lite.ops.source import Source
from te_lite.parallel import TensorParallel
from te_lite.quantize.delayed import PoolKey, Pools, ScaleState
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Quantizer, Site, operands_for
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize import formats
from tests.quantize.formats import E4M3, E5M2, MX_COL, MX_ROW, Format, Quantized

DEVICES = pytest.mark.parametrize("device", device_params())
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Views:
    """The oracle's formats of one quantizer, by row and by column; `transposed` says how the col layout is stored."""

    row: Format
    col: Format
    transposed: bool = True
    delayed: bool = False


@dataclass(frozen=True)
class Case:
    """x, w, dy: of the GEMM that reads the tensor by row; dgrad_w, wgrad_x: those of the other GEMM where that has a
    quantizer of its own (None: unquantized)."""

    label: str
    recipe: Callable[[], te.recipe.Recipe]
    x: Views | None
    w: Views | None
    dy: Views | None
    dgrad_w: Views | None = None
    wgrad: bool = True


def named(name: str) -> Callable[[], te.recipe.Recipe]:
    return lambda: te.recipe.from_name(name)


def whole(fp8: torch.dtype = E4M3, delayed: bool = False, **scale) -> Views:
    one = Format(fp8=fp8, **scale)
    return Views(one, one, delayed=delayed)


def one_by_128(**scale) -> Views:
    return Views(formats.blockwise(1, 128, **scale), formats.blockwise(128, 1, **scale))


def square(**scale) -> Views:
    return Views(formats.blockwise(128, 128, **scale), formats.blockwise(128, 128, **scale))


def rows(pow2: bool = True) -> Views:
    return Views(formats.rowwise(pow2), formats.columnwise(pow2))


MX = Views(MX_ROW, MX_COL, transposed=False)


def in_e5m2(views: Views) -> Views:
    """Blocks of E5M2, which are not transposed: no GEMM reads them."""
    return Views(replace(views.row, fp8=E5M2), replace(views.col, fp8=E5M2), transposed=False)


R = te.recipe
CASES = [
    Case("bf16", named("bf16"), None, None, None),
    Case("delayed", named("delayed"), *(whole(fp8, delayed=True) for fp8 in (E4M3, E4M3, E5M2))),
    Case("current", named("current"), whole(), whole(), whole(E5M2)),
    Case("tensorwise", named("tensorwise"), whole(), whole(), whole(E5M2)),
    Case("mxfp8", named("mxfp8"), MX, MX, MX),
    Case("blockwise", named("blockwise"), one_by_128(), square(), one_by_128()),
    Case("rowwise", named("rowwise"), rows(), rows(), rows()),
    Case("rowwise_with_gw_hp", named("rowwise_with_gw_hp"), rows(), rows(), rows(), whole(pow2=True), wgrad=False),
    Case(
        "current, powers of two, E4M3",
        lambda: R.Float8CurrentScaling(use_power_2_scales=True, fp8_format=R.Format.E4M3),
        *[whole(pow2=True)] * 3,
    ),
    Case(
        "current, epsilon",
        lambda: R.Float8CurrentScaling(fp8_quant_fwd_inp=R.QParams(amax_epsilon=4.0)),
        *(whole(eps=4.0), whole(), whole(E5M2)),
    ),
    Case(
        "blockwise, fp32 scales",
        lambda: R.Float8BlockScaling(use_f32_scales=True),
        *(one_by_128(pow2=False), square(pow2=False), one_by_128(pow2=False)),
    ),
    Case(
        "blockwise, epsilon",
        lambda: R.Float8BlockScaling(
            fp8_quant_fwd_inp=R.QParams(True, 4.0), fp8_quant_fwd_weight=R.QParams(False, 0.25)
        ),
        *(one_by_128(eps=4.0), square(pow2=False, eps=0.25), one_by_128()),
    ),
    Case("mxfp8, HYBRID", lambda: R.MXFP8BlockScaling(fp8_format=R.Format.HYBRID), MX, MX, in_e5m2(MX)),
    Case(
        "blockwise, HYBRID",
        lambda: R.Float8BlockScaling(fp8_format=R.Format.HYBRID),
        *(one_by_128(), square(), in_e5m2(one_by_128())),
    ),
    Case(
        "rowwise, fp32 scales",
        lambda: R.RowwiseScaling(use_power_2_scales=False),
        *[rows(pow2=False)] * 3,
    ),
]  # fmt: skip
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
QUANTIZED = pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.label)


# ---- quantizers and what the oracle says of them ----


def make_operands(case: Case, dtype: torch.dtype, device: str):
    """The recipe's quantizers of a linear on one rank; delayed scales are powers of two and others."""

    def state(direction: str) -> ScaleState:
        n, largest = (3, 448.0) if direction == "forward" else (2, 57344.0)
        made = ScaleState(PoolKey(direction, 16, largest, "max", None, torch.device(device), Pools()), n)
        made.load(torch.zeros(16, n), torch.tensor([3.7, 16.0, 1.0][:n]), largest)
        return made

    site = Site(gemm=0, dtype=dtype, tp=TensorParallel(), state=state, amax_group=None)
    return operands_for(case.recipe(), site)


def quantizers(case: Case, dtype: torch.dtype, device: str) -> list[tuple[str, Quantizer, Views]]:
    """Every quantizer of the recipe that makes fp8."""
    ops = make_operands(case, dtype, device)
    found = [("x", ops.fprop.a, case.x), ("w", ops.fprop.b, case.w), ("dy", ops.dgrad.a, case.dy)]
    return [*found, ("w of dgrad", ops.dgrad.b, case.dgrad_w)] if case.dgrad_w is not None else found


def given_scale(quantizer: Quantizer) -> Tensor:
    state = quantizer.state
    return state.scale_at(quantizer.slot).detach().cpu()


def oracle(views: Views, quantizer: Quantizer, v: Tensor) -> tuple[Quantized, Quantized]:
    """(by row, by column) of v on the CPU."""
    scale = given_scale(quantizer) if views.delayed else None
    v = v.cpu()
    return views.row.quantize(v, scale), views.col.quantize(v, scale)


def stored_scale(q: Quantized, format: Format, transposed: bool) -> Tensor:
    """The scale as a QTensor holds it: one value, one a row or column, or a matrix of blocks that lies as the data."""
    scale = q.scale_inv if q.e8m0 is None else q.e8m0
    if None in format.block:
        return scale.reshape(-1)
    return scale.t() if transposed else scale


def stored_col(data: Tensor, transposed: bool) -> Tensor:
    """[M, K] -> the col layout: itself, or [K, Mp] with M padded to 16 by zero bytes."""
    if not transposed:
        return data
    return torch.nn.functional.pad(data.t(), (0, -len(data) % 16))


def check_row(label: str, q: QTensor, want: Quantized, views: Views) -> None:
    assert_bitwise_equal(f"{label} row", q.row.cpu().view(torch.uint8), want.data)
    assert_bitwise_equal(f"{label} row scale", q.row_scale.cpu(), stored_scale(want, views.row, False))


def check_col(label: str, q: QTensor, want: Quantized, views: Views) -> None:
    assert_bitwise_equal(f"{label} col", q.col.cpu().view(torch.uint8), stored_col(want.data, views.transposed))
    assert_bitwise_equal(f"{label} col scale", q.col_scale.cpu(), stored_scale(want, views.col, views.transposed))


def check_layouts(label: str, quantizer: Quantizer, source: Source, v: Tensor, views: Views) -> None:
    """Row alone, column alone, both, and the column made again later: the oracle's bytes and scales each time."""
    row, col = oracle(views, quantizer, v)
    only_row = quantizer.quantize(source, row=True, col=False)[0]
    assert only_row.col is None and only_row.shape == tuple(v.shape) and only_row.dtype == v.dtype
    check_row(f"{label} alone", only_row, row, views)
    only_col = quantizer.quantize(source, row=False, col=True)[0]
    assert only_col.row is None
    check_col(f"{label} alone", only_col, col, views)
    both = quantizer.quantize(source, row=True, col=True)[0]
    check_row(f"{label} both", both, row, views)
    check_col(f"{label} both", both, col, views)
    check_col(f"{label} again", quantizer.again(source, only_row.seed_only()), col, views)


def check_dequantized(label: str, q: QTensor, row: Quantized, col: Quantized, views: Views) -> None:
    """v[M, K] of each layout, from its own data."""
    got = q.dequantize("row"), q.dequantize("col")
    want = views.row.dequantize(row, q.dtype), views.col.dequantize(col, q.dtype)
    for layout, a, b in zip(("row", "col"), got, want, strict=True):
        assert a.dtype == q.dtype and a.shape == b.shape
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True, msg=f"{label} {layout} dequantized")


# ---- matrices ----

SHAPES = [(0, 48), (1, 1), (1, 256), (7, 33), (16, 16), (33, 127), (64, 129), (130, 250), (150, 17), (4092, 5)]
GPU_SHAPES = [(0, 48), (1, 256), (7, 127), (150, 272), (4092, 272)]  # few: each new alignment compiles kernels
NORMAL = ("normal", "binades", "zero row", "rows apart")
FINITE = (*NORMAL, "zero", "subnormal", "tiny")
KINDS = (*FINITE, "inf", "nan", "all non-finite")


@dataclass(frozen=True)
class Matrix:
    shape: tuple[int, int]
    dtype: torch.dtype
    kind: str
    seed: int

    def make(self, device: str = "cpu") -> Tensor:
        return fill(self.shape, self.kind, self.seed, self.dtype).to(device)


def fill(shape: tuple[int, int], kind: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[M, K]. "rows apart": rows and columns so far apart in size that a scale of the wrong block shows. "tiny": so
    small that 448 / amax overflows in some rows and not in others."""
    return _fill(shape, kind, torch.Generator().manual_seed(seed), torch.finfo(dtype).smallest_normal).to(dtype)


def _fill(shape: tuple[int, int], kind: str, gen: torch.Generator, smallest: float) -> Tensor:
    m, k = shape
    v = torch.randn(shape, generator=gen)
    if kind == "binades":
        return v * torch.exp2(torch.randint(-24, 8, shape, generator=gen).float())
    if kind == "rows apart":
        return v * torch.exp2(torch.randint(-6, 7, (m, 1), generator=gen) + torch.randint(-6, 7, (1, k), generator=gen))
    if kind == "subnormal":
        return v * smallest / 4
    if kind == "tiny":
        return v * torch.exp2(torch.randint(-124, -114, (m, 1), generator=gen).float())
    if kind == "zero":
        return torch.zeros(shape) * v.sign()
    if kind == "all non-finite":
        return torch.full(shape, INF) * v.sign()
    if m and kind == "zero row":
        v[int(torch.randint(m, (), generator=gen))] = 0
    if m and kind in ("inf", "nan"):
        at = torch.randint(m * k, (3,), generator=gen)
        v.view(-1)[at] = torch.tensor([INF, -INF, INF] if kind == "inf" else [NAN, INF, NAN])
    return v


def matrices(device: str, kinds=KINDS, dtypes=(torch.bfloat16, torch.float16, torch.float32)):
    shapes = SHAPES if device == "cpu" else GPU_SHAPES
    fields = st.sampled_from(shapes), st.sampled_from(dtypes), st.sampled_from(kinds), st.integers(0, 2**31)
    return st.builds(Matrix, *fields)


FEW = settings(max_examples=25, deadline=None, derandomize=True)
