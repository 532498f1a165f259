"""Grouped products one group after the other: fp64's within the bounds of the grouped kernels, and when they are."""

import pytest
import torch
from torch import Tensor

from te_lite.ops import grouped_each
from te_lite.ops import grouped_gemm as G
from tests.ops.grouped import E4M3, E5M2, RAGGED
from tests.ops.paths import DEVICES
from tests.ops.test_grouped_gemm import BF16, FP16, FP32, Case, accumulation, check, moved, rows_problem, wgrad_problem

ODD = "many, odd"
WHOLE = [groups for groups, (_, rest) in RAGGED.items() if not rest] + ["empty, one token, unaligned"]
CASES = [
    *(Case("none", dtype, dtype, groups=groups) for dtype in (BF16, FP16) for groups in WHOLE),
    *(
        Case("group", a, E4M3, groups=groups, fast=fast)
        for a, fast in ((E4M3, True), (E5M2, False))
        for groups in WHOLE
    ),
    *(Case("rows", groups=groups) for groups in WHOLE),
    *(Case("blocks", groups=groups) for groups in WHOLE),
    Case("rows", b_by="group", groups="one group"),
    *(
        Case(scaling, BF16 if scaling == "none" else E4M3, BF16 if scaling == "none" else E4M3, groups=ODD)
        for scaling in ("none", "group", "rows", "blocks")
    ),
]
PRODUCTS = [Case("blocks", groups=groups, k=k, n=n, bias=bias, out=out) for groups in WHOLE
            for k, n, bias, out in ((144, 48, False, BF16), (1024, 512, True, BF16), (272, 144, True, FP32))] + [
    Case(scaling, dtype, dtype, groups=WHOLE[-1], k=144, n=48, bias=True, out=out, inner_first=scaling == "none")
    for scaling, dtype in (("none", BF16), ("group", E4M3), ("rows", E4M3)) for out in (BF16, FP32)
] + [
    # Scales of one block a row are read at any row; the bias, of bf16, is added to fp16's product before rounding.
    *(Case("blocks", groups=ODD, k=k, n=128, bias=bias, out=out) for k in (64, 128)
      for bias, out in ((False, BF16), (True, FP16), (True, FP32))),
    *(Case(scaling, groups=ODD, bias=True, out=FP16) for scaling in ("group", "rows", "blocks")),
]  # fmt: skip


def distances(start: Tensor, device: str) -> dict[str, list[Tensor]]:
    """Copies of start: at equal distances, and at others."""
    groups, size = len(start), start[0].numel()
    room = torch.empty(groups * size + 64 * groups**2, device=device)
    apart = [room[g * size + 64 * g**2 :][:size].view(start[0].shape) for g in range(groups)]
    for part, value in zip(apart, start, strict=True):
        part.copy_(value)
    return {"one buffer": list(start.clone().to(device).unbind()), "apart": apart}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_wgrad(case, device):
    arguments, truth, magnitude = wgrad_problem(Case(**{**vars(case), "inner_first": case.scaling == "none"}))
    a, b, _, a_scale, b_scale, scaling, *_, fast = moved(arguments, device)
    bound, rest = accumulation(case, device, max(case.sizes)), (a, b, a_scale, b_scale, scaling, fast, case.sizes)
    start = torch.randn(truth.shape)
    for name, outs in distances(start, device).items():
        grouped_each.wgrad_each(outs, True, *rest)
        added, size = truth + start.double(), magnitude + start.double().abs()
        check(name, torch.stack(outs), added, size, bound, case.sizes)
        for g, tokens in enumerate(case.sizes):
            assert tokens or torch.equal(outs[g].cpu(), start[g]), "of no tokens nothing is added"
    if device == "cpu" and case.b_by:
        return  # one scale is spread over rows by a kernel
    dw = torch.full(truth.shape, float("nan"), dtype=case.out, device=device)
    grouped_each.wgrad_each(list(dw), False, *rest)
    check("dw", dw, truth, magnitude, bound, case.sizes)
    assert all((dw[g] == 0).all() for g, tokens in enumerate(case.sizes) if not tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES + PRODUCTS, ids=str)
def test_product(case, device):
    if device == "cpu" and case.b_by:
        return  # one scale is spread over rows by a kernel
    arguments, truth, magnitude = rows_problem(case)
    a, b, _, a_scale, b_scale, scaling, bias, _, inner_first, fast = moved(arguments, device)
    for transposed in (False, True):  # as w's scales of blocks lie for dgrad
        scale = b_scale.mT.contiguous().mT if transposed and scaling == "blocks" else b_scale
        out = torch.full(truth.shape, float("nan"), dtype=case.out, device=device)
        out[sum(case.sizes) :] = 0.0
        grouped_each.product_each(out, a, b, a_scale, scale, scaling, bias, inner_first, fast, case.sizes)
        check("product", out, truth, magnitude, accumulation(case, device, case.k), case.sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["none", "group", "rows", "blocks"])
def test_no_temporary_and_no_wait(scaling):
    """cublasLt adds to what is there, of columns that are a slice; the host waits for nothing."""
    dtype = BF16 if scaling == "none" else E4M3
    case = Case(scaling, dtype, dtype, groups="whole tiles", k=2048, n=2048, inner_first=scaling == "none")
    a, b, _, a_scale, b_scale, _, *_, fast = moved(wgrad_problem(case)[0], "cuda")
    outs = list(torch.zeros(len(case.sizes), case.n, case.k, device="cuda"))
    given = (outs, True, a, b, a_scale, b_scale, scaling, fast, case.sizes)
    grouped_each.wgrad_each(*given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_each.wgrad_each(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # A temporary in fp32 would be as large as one out; a workspace of 16-bit products may be.
    assert scaling == "none" or torch.cuda.max_memory_allocated() - before < outs[0].nbytes


@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_of_fp32_is_added_before_rounding(device):
    """Large ones, which bf16 would round by far more than the result is rounded."""
    a, b, sizes = torch.randn(24, 64).to(BF16), torch.randn(2, 48, 64).to(BF16), [8, 16]
    bias = 1000.0 + torch.randn(2, 48)
    a[:, 0], b[:, :, 0] = 1.0, -1000.0  # they cancel but for what is small
    parts = zip(a.double().split(sizes), b.double(), bias.double(), strict=True)
    exact = torch.cat([x @ w.t() + c for x, w, c in parts])
    out = torch.full((24, 48), torch.nan, dtype=BF16, device=device)
    given = (a.to(device), b.to(device), None, None, "none", bias.to(device), False, False, sizes)
    grouped_each.product_each(out, *given)
    bound = 2.0**-8 * exact.abs() + 64 * 2.0**-22 * 2000.0
    assert ((out.cpu().double() - exact).abs() <= bound).all()


def results(given: dict[str, tuple], dtype: torch.dtype) -> list[Tensor]:
    """[y, dw, 2 dw] of the arguments of a product and of a wgrad; what is not written is a nan."""
    a, b, _, a_scale, b_scale, scaling, bias, _, inner_first, fast, sizes = given["rows"]
    y = torch.full((len(a), b.shape[2 if inner_first else 1]), torch.nan, dtype=dtype, device="cuda")
    grouped_each.product_each(y, a, b, a_scale, b_scale, scaling, bias, inner_first, fast, sizes)
    a, b, layout, a_scale, b_scale, scaling, _, inner_first, fast, sizes = given["wgrad"]
    shape = G._wgrad_shape(a, b, layout, inner_first)
    dw = torch.full(shape, torch.nan, device="cuda")
    for add in (False, True):
        grouped_each.wgrad_each(list(dw), add, a, b, a_scale, b_scale, scaling, fast, sizes)
        if not add:
            once = dw.clone()
    return [y, once, dw]


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["none", "group", "rows", "blocks"])
def test_streams_wait_for_each_other(scaling):
    """Operands that are late, results that are read, overwritten and given back at once, and a graph of all that."""
    dtype = BF16 if scaling == "none" else E4M3
    case = Case(scaling, dtype, dtype, groups=ODD, k=1024, n=1024, inner_first=scaling == "none")
    given = {
        "rows": (*moved(rows_problem(case)[0], "cuda"), case.sizes),
        "wgrad": (*moved(wgrad_problem(case)[0], "cuda"), case.sizes),
    }
    wanted = results(given, case.out)
    late = [t for one in given.values() for t in one if isinstance(t, Tensor) and t.element_size() < 4]
    values = [t.clone() for t in late]

    def once() -> list[Tensor]:
        for t in late:
            t.view(torch.uint8).zero_()
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(20_000_000)
        for t, value in zip(late, values, strict=True):
            t.copy_(value)
        found = results(given, case.out)
        for t in late:
            t.view(torch.uint8).zero_()
        return [t.clone() for t in found]

    for _ in range(3):
        for got, right in zip(once(), wanted, strict=True):
            assert torch.equal(got, right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = once()
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right)


@pytest.mark.gpu
def test_an_error_leaves_the_stream_as_it_was():
    """The current stream is the caller's again, and waits for what had been issued."""
    before = torch.cuda.current_stream()

    def one(g: int) -> None:
        assert (torch.cuda.current_stream() == before) == (g % 2 == 0)
        if g == 1:
            raise RuntimeError("no such product")

    with pytest.raises(RuntimeError, match="no such product"):
        grouped_each._in_turn(torch.device("cuda", torch.cuda.current_device()), one, 4)
    assert torch.cuda.current_stream() == before


def test_when(monkeypatch):
    """Sizes that the host knows, work, alignment, types and the GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    low, other, wide = (torch.empty(0, dtype=dtype) for dtype in (E4M3, E5M2, FP32))
    many, n, k = [4096, 0], 4096, 4096
    takes = grouped_each.takes
    for a, scaling in ((low, "group"), (other, "group"), (low, "rows"), (low, "blocks"), (low.to(BF16), "none")):
        assert takes(a, low, scaling, many, n, k)
        assert not takes(a, low, scaling, None, n, k)
        assert not takes(a, low, scaling, [64, 0], 512, 512)
        assert not takes(a, low, scaling, many, n, k + 8)
    for scaling in ("rows", "blocks"):
        assert not takes(other, low, scaling, many, n, k)
    assert not takes(wide, wide, "none", many, n, k)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not takes(low, low, "blocks", many, n, k)


def watched(monkeypatch) -> list[str]:
    """What is called of grouped_each, which takes products of any size."""
    called: list[str] = []
    monkeypatch.setattr(grouped_each, "LEAST", 0)

    def watch(name: str) -> None:
        inner = getattr(grouped_each, name)

        def run(*given) -> None:
            called.append(name)
            inner(*given)

        monkeypatch.setattr(grouped_each, name, run)

    watch("wgrad_each")
    watch("product_each")
    return called


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["none", "group", "rows", "blocks"])
@pytest.mark.parametrize("known", [False, True])
def test_which_way_the_ops_go(scaling, known, monkeypatch):
    """One group after the other where sizes are given, and what is added to is fp32; else all at once: the same."""
    called = watched(monkeypatch)
    dtype = BF16 if scaling == "none" else E4M3
    case = Case(scaling, dtype, dtype, groups="first and last empty", inner_first=scaling == "none")
    sizes = case.sizes if known else None
    arguments, truth, magnitude = wgrad_problem(case)
    given = moved(arguments, "cuda")
    bound = accumulation(case, "cuda", max(case.sizes))
    check("wgrad", G.group_wgrad(*given, sizes), truth, magnitude, bound, case.sizes)
    for out_dtype in (FP32, BF16):
        for add, fill in ((True, 0.0), (False, float("nan"))):
            outs = [torch.full((case.n, case.k), fill, dtype=out_dtype, device="cuda") for _ in case.sizes]
            G.group_wgrad_accumulate_(outs, *given[:6], *given[7:], sizes, add)
            check(f"add={add}", torch.stack(outs), truth, magnitude, bound, case.sizes)
    arguments, truth, magnitude = rows_problem(case)
    y = G.group_product(*moved(arguments, "cuda"), sizes)
    check("product", y, truth, magnitude, accumulation(case, "cuda", case.k), case.sizes)
    assert called == (["wgrad_each"] * 4 + ["product_each"] if known else [])
