"""csrc/gemm_grouped.cu: read from the compiler on any machine that has one, and against fp64 on a GPU."""

import re

import pytest
import torch
from torch import Tensor

from te_lite import _C
from te_lite.ops import gemm_grouped as own
from te_lite.ops import grouped_gemm
from te_lite.ops.gemm_grouped import Kind
from te_lite.ops.grouped_layout import group_layout
from te_lite.ops.nvrtc import SOURCES
from tests.ops.grouped import E4M3, E5M2, MANY, offs_of
from tests.ops.nvcc import spilled
from tests.ops.test_grouped_gemm import BF16, FP16, FP32, Case, accumulation, check, moved, rows_problem, wgrad_problem

TYPES = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
KINDS = [
    *(Kind(True, *TYPES[i % 3], (BF16, FP16)[i % 2], False, scaling, fast)
      for i, (scaling, fast) in enumerate((s, f) for s in ("group", "rows") for f in (False, True))),
    *(Kind(False, *TYPES[i % 3], out, add, scaling, fast) for i, (scaling, fast) in enumerate(
        (("group", False), ("group", True), ("rows", False), ("rows", True), ("blocks", False)))
      for out, add in ((FP32, True), (FP32, False), (BF16, False))),
    *(Kind(False, dtype, dtype, out, add, "none", False) for dtype in (BF16, FP16)
      for out, add in ((FP32, True), (dtype, False))),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_compiles(kind, tmp_path):
    """No wgmma waits for the one before, and hardly a register is spilled."""
    count, said = spilled("gemm_grouped.cu", kind.macros, tmp_path)
    assert count <= 32, said  # two sums; not in the loop over K


def test_the_arguments_are_those_of_the_header():
    text = re.sub(r"//.*", "", (SOURCES / "gemm_grouped.h").read_text())
    fields = text.split("struct GroupedArguments {")[1].split("}")[0]
    pointers = fields.count("*")
    numbers = [name for line in re.findall(r"int ([^;*]+);", fields) for name in line.split(",")]
    assert (pointers, len(numbers)) == (4, 6) and own._ARGUMENTS.format == "=3Q6i"  # outs come first
    assert "kMostOuts]" in fields and f"kMostOuts = {_C.MOST_GROUPED_OUTS};" in text


def test_what_it_takes(monkeypatch):
    monkeypatch.setattr(own, "unavailable", lambda device: "")
    a, b = torch.empty(64, 32).to(E4M3), torch.empty(2, 48, 32).to(E4M3)
    by_group, by_row = (torch.empty(2), torch.empty(2)), (torch.empty(64), torch.empty(2, 48))
    assert own.takes_product(a, b, *by_group, "group", None, BF16)
    assert own.takes_product(a, b, *by_row, "rows", None, FP16)
    assert not own.takes_product(a, b, by_row[0], by_group[1], "rows", None, BF16)
    assert not own.takes_product(a, b, *by_group, "group", torch.empty(2, 48), BF16)
    assert not own.takes_product(a, b, *by_group, "group", None, FP32)
    assert not own.takes_product(a[:, :24], b[:, :, :24], *by_group, "group", None, BF16)  # features
    assert not own.takes_product(a, b[:, :0], *by_group, "group", None, BF16)
    assert not own.takes_product(a.to(E5M2), b.to(E5M2), *by_group, "group", None, BF16)
    assert not own.takes_product(a.to(BF16), b.to(BF16), None, None, "none", None, BF16)
    outs = torch.empty(2, 48, 32).unbind()
    high = torch.empty(7, 48, dtype=BF16), torch.empty(7, 32, dtype=BF16)
    assert own.takes_wgrad(outs, *high, None, None, "none")
    assert not own.takes_wgrad([out.t().contiguous().t() for out in outs], *high, None, None, "none")
    assert not own.takes_wgrad(outs, *(t.float() for t in high), None, None, "none")
    assert not own.takes_wgrad([*outs, outs[0].bfloat16()], *high, None, None, "none")
    assert not own.takes_wgrad([outs[0]] * (_C.MOST_GROUPED_OUTS + 1), *high, None, None, "none")
    monkeypatch.setattr(own, "unavailable", lambda device: "no compiler")
    assert not own.takes_product(a, b, *by_group, "group", None, BF16)


GROUPS = ["many, odd", "empty, one token, unaligned", "no tokens"]
# Neither is a multiple of a tile; more steps than stages, and more rows of tiles than are in work at once.
WIDE = {"n": 528, "k": 400}
DEEP, HIGH = {"n": 528, "k": 1296}, {"n": 2320, "k": 400}


@pytest.fixture(params=[None, 4], ids=["all", "few"])
def processors(request, monkeypatch):
    """Few: each cluster goes through many tiles."""
    if request.param:
        monkeypatch.setattr(own, "sm_count", lambda device: request.param)


@pytest.mark.gpu
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("sizes", [WIDE, DEEP], ids=["wide", "deep"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("scaling", ["group", "rows"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_product(types, fast, scaling, groups, sizes):
    case = Case(scaling, *types, fast=fast, groups=groups, **sizes)
    arguments, truth, magnitude = rows_problem(case)
    a, b, layout, a_scale, b_scale, *_ = moved(arguments, "cuda")
    out = torch.full(truth.shape, float("nan"), device="cuda", dtype=BF16)
    assert own.takes_product(a, b, a_scale, b_scale, scaling, None, BF16) == bool(a.numel())
    if not a.numel():
        return
    own.product(out, a, b, layout, a_scale, b_scale, scaling, fast)
    tokens, bound = sum(case.sizes), accumulation(case, "cuda", case.k)
    check("product", out[:tokens], truth[:tokens], magnitude[:tokens], bound, case.sizes)
    assert out[tokens:].isnan().all()  # of no group: not written


@pytest.mark.gpu
@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("sizes", [WIDE, HIGH], ids=["wide", "high"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.rows], ids=str)
def test_wgrad(kind, groups, sizes):
    """Each once, to outs with something between them that stays, in an order of their own."""
    first = kind.scaling == "none"
    case = Case(kind.scaling, kind.a, kind.b, kind.out, fast=kind.fast, groups=groups, inner_first=first, **sizes)
    arguments, truth, magnitude = wgrad_problem(case)
    a, b, layout, a_scale, b_scale, *_ = moved(arguments, "cuda")
    count, start = len(case.sizes), torch.randn(truth.shape).to(kind.out)
    block = torch.full((2 * count, *truth.shape[1:]), float("nan"), device="cuda", dtype=kind.out)
    outs = [block[2 * (count - 1 - g)] for g in range(count)]
    for out, value in zip(outs, start, strict=True):
        out.copy_(value if kind.add else torch.full_like(value, float("nan")))
    assert own.takes_wgrad(outs, a, b, a_scale, b_scale, kind.scaling) == bool(a.numel())
    if not a.numel():
        return
    own.wgrad(outs, kind.add, a, b, layout, a_scale, b_scale, kind.scaling, kind.fast)
    if kind.add:
        truth, magnitude = truth + start.double(), magnitude + start.double().abs()
    bound = accumulation(case, "cuda", max(1, *case.sizes))
    check("wgrad", torch.stack(outs), truth, magnitude, bound, case.sizes)
    assert block[1::2].isnan().all()


@pytest.mark.multigpu
def test_tensors_on_another_device():
    case = Case("rows", E4M3, E4M3, groups="whole tiles", **WIDE)
    arguments, truth, magnitude = rows_problem(case)
    assert torch.cuda.current_device() == 0
    y = grouped_gemm.group_product(*moved(arguments, "cuda:1"))
    assert torch.cuda.current_device() == 0
    check("product", y, truth, magnitude, accumulation(case, "cuda", case.k), case.sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_another_group_s_nan_stays_there(dtype):
    """Steps over tokens as they lie end in the next group's."""
    sizes = (70, 3, 0, 129)
    a, b = (torch.randn(sum(sizes), width, device="cuda").to(dtype) for width in (64, 96))
    a[70:73], b[75] = float("nan"), float("inf")
    out = torch.empty(4, 64, 96, device="cuda", dtype=dtype)
    own.wgrad(out.unbind(), False, a, b, group_layout(offs_of(sizes, "cuda"), sum(sizes)), None, None, "none", False)
    assert out[0].isfinite().all() and (out[2] == 0).all()
    assert out[1].isnan().all() and not out[3].isfinite().all()


@pytest.mark.gpu
def test_an_empty_group_s_scale_is_not_used():
    layout = group_layout(offs_of((0, 128), "cuda"), 128)
    a, b = (torch.zeros(width, 256, device="cuda").to(E4M3) for width in (64, 96))
    scale = torch.tensor([float("inf"), 1.0], device="cuda")
    out = torch.empty(2, 64, 96, device="cuda", dtype=BF16)
    own.wgrad(out.unbind(), False, a, b, layout, scale, scale, "group", False)
    assert (out == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["none", "group", "rows", "blocks"])
def test_a_graph_reads_the_sizes_again(scaling, monkeypatch):
    """Of the same number of tokens, in other groups."""
    monkeypatch.setitem(MANY, "one", ((64, 200, 0), 8))
    monkeypatch.setitem(MANY, "two", ((0, 17, 255), 0))
    dtype = BF16 if scaling == "none" else E4M3
    cases = [Case(scaling, dtype, dtype, groups=g, inner_first=scaling == "none", **WIDE) for g in ("one", "two")]
    problems = [moved(wgrad_problem(case)[0], "cuda") for case in cases]
    held = [t.clone() if isinstance(t, Tensor) else t for t in problems[0]]
    grouped_gemm.group_wgrad(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_gemm.group_wgrad(*held)
    for problem in problems[::-1]:
        for to, t in zip(held, problem, strict=True):
            if isinstance(to, Tensor):
                to.view(torch.uint8).copy_(t.view(torch.uint8))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, grouped_gemm.group_wgrad(*problem))
