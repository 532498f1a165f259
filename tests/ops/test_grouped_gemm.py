"""Grouped GEMMs against fp64, group by group; bounds from the order of operations alone, as in test_gemm.py."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from te_lite.ops import grouped_gemm as G
from te_lite.ops.grouped_gemm_kernels import GemmConfig
from te_lite.ops.grouped_layout import capacity
from tests.ops.grouped import E4M3, E5M2, MANY, RAGGED, layout_of, spans_of
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import DEVICES, PATHS, device_of
from tests.ops.test_gemm import fp8_accumulation, within

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# What a Triton tile of the real sizes would only pad.
SMALL = GemmConfig(64, 32, 128, 4, 2, group_m=2, persistent=1)


def test_kernels_in_the_interpreter():
    run_interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Operands a (of dtype `a`) and b of one product. scaling: of a; b_by: "rows" or "group", where that differs."""

    scaling: str
    a: torch.dtype = E4M3
    b: torch.dtype = E4M3
    out: torch.dtype = BF16
    bias: bool = False
    fast: bool = False
    b_by: str = ""
    inner_first: bool = False
    groups: str = "empty, one token, unaligned"
    k: int = 144
    n: int = 48

    @property
    def sizes(self) -> tuple[int, ...]:
        return (RAGGED | MANY)[self.groups][0]

    @property
    def rest(self) -> int:
        return (RAGGED | MANY)[self.groups][1]


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def poison(t: Tensor) -> Tensor:
    """In place: nan in every element."""
    if t.element_size() == 1:
        t.view(torch.uint8).fill_(0x7F)
    else:
        t.fill_(float("nan"))
    return t


def blocks_along(scale: Tensor, dim: int, length: int) -> Tensor:
    return scale.repeat_interleave(128, dim).narrow(dim, 0, length)


def rows_problem(case: Case) -> tuple[tuple, Tensor, Tensor]:
    """(arguments of group_product, truth in fp64, sum_k |a_k b_k| and |bias|), on the CPU."""
    tokens, groups, k, n = sum(case.sizes) + case.rest, len(case.sizes), case.k, case.n
    a, b = values(case.a, tokens, k), values(case.b, groups, *((k, n) if case.inner_first else (n, k)))
    poison(a[sum(case.sizes) :])
    a_scale = b_scale = None
    left, right = a.double(), (b.mT if case.inner_first else b).double()
    if case.scaling == "blocks":
        a_scale, b_scale = scales(-(-k // 128), tokens).t(), scales(groups, -(-n // 128), -(-k // 128))
        left = left * blocks_along(a_scale, 1, k)
        right = right * blocks_along(blocks_along(b_scale, 1, n), 2, k)
    elif case.scaling != "none":
        a_scale = scales(groups if case.scaling == "group" else tokens)
        b_scale = scales(groups, n) if (case.b_by or case.scaling) == "rows" else scales(groups)
        right = right * (b_scale[..., None] if b_scale.dim() == 2 else b_scale[:, None, None])
        if case.scaling == "rows":
            left = left * a_scale[:, None]
    bias = values(BF16, groups, n) if case.bias else None
    truth, magnitude = torch.zeros(tokens, n, dtype=torch.float64), torch.zeros(tokens, n, dtype=torch.float64)
    for g, (first, end, *_) in enumerate(spans_of(case.sizes)):
        rows = left[first:end] * (a_scale[g] if case.scaling == "group" else 1.0)
        truth[first:end], magnitude[first:end] = rows @ right[g].t(), rows.abs() @ right[g].abs().t()
        if bias is not None:
            truth[first:end] += bias[g].double()
            magnitude[first:end] += bias[g].double().abs()
    layout = layout_of(case.sizes, case.rest)
    return (a, b, layout, a_scale, b_scale, case.scaling, bias, case.out, case.inner_first, case.fast), truth, magnitude


def wgrad_problem(case: Case) -> tuple[tuple, Tensor, Tensor]:
    """The same of group_wgrad: a [n, P] and b [k, P], or inner_first a [M, n], b [M, k]."""
    tokens, groups, k, n = sum(case.sizes) + case.rest, len(case.sizes), case.k, case.n
    width = tokens if case.inner_first else capacity(tokens, groups)
    a, b = poison(torch.empty(n, width, dtype=case.a)), poison(torch.empty(k, width, dtype=case.b))
    if case.scaling == "blocks":
        a_scale, b_scale = scales(width // 128, n), scales(width // 128, k)
    else:
        by = case.b_by or case.scaling
        a_scale = None if case.scaling == "none" else scales(groups, n) if case.scaling == "rows" else scales(groups)
        b_scale = None if case.scaling == "none" else scales(groups, k) if by == "rows" else scales(groups)
    truth, magnitude = torch.zeros(groups, n, k, dtype=torch.float64), torch.zeros(groups, n, k, dtype=torch.float64)
    for g, (first, end, padded, padded_end) in enumerate(spans_of(case.sizes)):
        sides, start = [], first if case.inner_first else padded
        for t, scale in ((a, a_scale), (b, b_scale)):
            if not case.inner_first:
                t[:, padded:padded_end] = 0.0
            t[:, start : start + end - first] = values(t.dtype, t.shape[0], end - first)
            side = t[:, start : start + end - first].double()
            if case.scaling == "blocks":
                side = side * blocks_along(scale[padded // 128 : padded_end // 128], 0, end - first).t()
            elif scale is not None:
                side = side * (scale[g] if scale.dim() == 1 else scale[g][:, None])
            sides.append(side)
        truth[g], magnitude[g] = sides[0] @ sides[1].t(), sides[0].abs() @ sides[1].abs().t()
    a, b = (a.t().contiguous(), b.t().contiguous()) if case.inner_first else (a, b)
    layout = layout_of(case.sizes, case.rest)
    return (a, b, layout, a_scale, b_scale, case.scaling, case.out, case.inner_first, case.fast), truth, magnitude


def moved(arguments: tuple, device: str) -> tuple:
    return tuple(t.to(device) if isinstance(t, Tensor) else t for t in arguments)


def accumulation(case: Case, path: str, inner: int) -> float:
    """As of a whole matrix; of blocks each is summed fast, in 4 instructions, and added in fp32."""
    if case.scaling == "none":
        return (inner + 4) * 2.0**-23
    return fp8_accumulation(device_of(path), inner, case.fast)


FP8_CASES = [
    *(Case(scaling, a, b, fast=fast) for scaling in ("group", "rows", "blocks")
      for a, b in ((E4M3, E4M3), (E5M2, E4M3)) for fast in (False, True) if not (fast and scaling == "blocks")),
    Case("rows", b_by="group"),
    Case("rows", bias=True),
    Case("group", out=FP32, k=272),
    Case("rows", out=FP16, k=16, n=16),
    Case("blocks", bias=True, k=272, n=144),
    *(Case(scaling, groups=groups) for scaling in ("group", "rows", "blocks") for groups in list(RAGGED)[1:]),
]  # fmt: skip
HIGH = [
    *(Case("none", dtype, dtype, dtype, inner_first=first, k=k) for dtype in (BF16, FP16, FP32)
      for first in (False, True) for k in (144, 37)),
    Case("none", BF16, BF16, BF16, bias=True),
    *(Case("none", BF16, BF16, BF16, groups=groups) for groups in list(RAGGED)[1:]),
]  # fmt: skip
INTERPRETED = [*FP8_CASES[:4:3], *FP8_CASES[9:12], Case("blocks", E5M2), Case("none", FP16, FP16, FP32)]


def check(name: str, out: Tensor, truth: Tensor, magnitude: Tensor, bound: float, sizes) -> None:
    assert within(out, truth, magnitude, bound), f"{name}: {(out.cpu().double() - truth).abs().max():.3e} off"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*FP8_CASES, *HIGH], ids=str)
def test_product(case, device):
    arguments, truth, magnitude = rows_problem(case)
    bound = accumulation(case, device, case.k)
    check("product", G.group_product(*moved(arguments, device)), truth, magnitude, bound, case.sizes)
    if device == "cuda":  # what torch takes here goes through the Triton kernel too
        check("Triton", G.triton_product(*moved(arguments, device)), truth, magnitude, bound, case.sizes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [case for case in (*FP8_CASES, *HIGH) if not case.bias], ids=str)
def test_wgrad(case, device):
    case = Case(**{**vars(case), "inner_first": case.scaling == "none"})
    arguments, truth, magnitude = wgrad_problem(case)
    bound = accumulation(case, device, max(case.sizes))
    given = moved(arguments, device)
    dw = G.group_wgrad(*given)
    check("wgrad", dw, truth, magnitude, bound, case.sizes)
    assert all((dw[g] == 0).all() for g, size in enumerate(case.sizes) if not size), "of no tokens it is zero"
    operands = (*given[:6], *given[7:])
    start = torch.randn(truth.shape)
    block = torch.full((2, *truth.shape), float("nan"))
    outs = {
        "one after the other": list(start.clone().to(device).unbind()),
        "last first": list(block[0].to(device).unbind())[::-1],
        "apart": [part.clone().to(device) for part in start],
    }
    for name, parts in outs.items():
        for part, value in zip(parts, start, strict=True):
            part.copy_(value)
        G.group_wgrad_accumulate_(parts, *operands)
        added, size = truth + start.double(), magnitude + start.double().abs()
        check(name, torch.stack(parts), added, size, bound, case.sizes)
        for part in parts:
            part.fill_(float("nan"))
        G.group_wgrad_accumulate_(parts, *operands, None, False)  # no sizes, not added
        check(f"{name}, replaced", torch.stack(parts), truth, magnitude, bound, case.sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in FP8_CASES if not case.bias], ids=str)
def test_wgrad_by_triton(case):
    """Also of what torch takes."""
    arguments, truth, magnitude = wgrad_problem(case)
    *operands, dtype, inner_first, fast = moved(arguments, "cuda")
    out = torch.full(truth.shape, float("nan"), device="cuda", dtype=dtype)
    G.triton_wgrad([out[0]], out.stride(0), False, *operands, inner_first, fast)
    check("Triton", out, truth, magnitude, accumulation(case, "cuda", max(case.sizes)), case.sizes)


@pytest.mark.parametrize("path", PATHS[2:])
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_kernels(case, path, monkeypatch):
    """Tiles of both kernels, by descriptors and by pointers, several programs with several tiles each."""
    monkeypatch.setattr(G, "sm_count", lambda device: 3)
    monkeypatch.setattr(G, "fill_rest_", G.fill_rest_.cuda)
    case = Case(**{**vars(case), "out": FP32, "k": 37 if case.scaling == "none" else 144})
    arguments, truth, magnitude = rows_problem(case)
    bound = (case.k + 4) * 2.0**-23
    check("product", G.triton_product(*arguments, config=SMALL), truth, magnitude, bound, case.sizes)
    first = case.scaling == "none"
    if first:
        arguments, truth, magnitude = rows_problem(Case(**{**vars(case), "inner_first": True}))
        check("dgrad", G.triton_product(*arguments, config=SMALL), truth, magnitude, bound, case.sizes)
    arguments, truth, magnitude = wgrad_problem(Case(**{**vars(case), "inner_first": first}))
    *operands, _, inner_first, fast = arguments
    block = torch.zeros(truth.shape)
    outs = list(block.unbind())[::-1]
    G.triton_wgrad(outs, G.distance(outs), True, *operands, inner_first, fast, config=SMALL)
    check("wgrad", torch.stack(outs), truth, magnitude, bound, case.sizes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", ["none", "group", "rows", "blocks"])
def test_the_bound_bites(scaling, device):
    """A group's product with its neighbour's weight, and the scale of the block before."""
    kind = BF16 if scaling == "none" else E4M3
    case = Case(scaling, kind, kind, groups="whole tiles")
    (a, b, *rest), truth, magnitude = rows_problem(case)
    out = G.group_product(*moved((a, b.roll(1, 0), *rest), device))
    assert not within(out, truth, magnitude, accumulation(case, device, case.k))
    if scaling != "none":
        layout, a_scale, *others = rest
        out = G.group_product(*moved((a, b, layout, a_scale.roll(1, -1), *others), device))
        assert not within(out, truth, magnitude, accumulation(case, device, case.k))


def test_distances():
    block = torch.zeros(4, 8, 8)
    parts = list(block.unbind())
    assert G.distance(parts) == 64 and G.distance(parts[::-1]) == -64 and G.distance(parts[::2]) == 128
    assert G.distance(parts[:1]) == 0
    assert G.distance([parts[0], parts[1], parts[3]]) is None
    assert G.distance([part.t() for part in parts]) is None
    assert G.distance([parts[0], parts[1].bfloat16()]) is None


def test_products_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    case = Case("rows")
    tokens = sum(case.sizes) + case.rest
    arguments, *_ = rows_problem(case)
    with FlopCounterMode(display=False) as counter:
        G.group_product(*arguments)
    assert counter.get_total_flops() == 2 * tokens * case.k * case.n
    arguments, *_ = wgrad_problem(Case("none", BF16, BF16, inner_first=True))
    with FlopCounterMode(display=False) as counter:
        G.group_wgrad(*arguments)
    assert counter.get_total_flops() == 2 * tokens * case.k * case.n
