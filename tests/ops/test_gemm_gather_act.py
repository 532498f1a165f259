"""What all-gather + GEMM makes of its product: swiglu of h, or the gradient of h."""

import pytest
import torch

from te_lite.ops import gemm_gather as G
from te_lite.ops.activation import ACTIVATIONS, Activation
from te_lite.ops.cast import amax, transform
from te_lite.ops.source import act, dact
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops import fused
from tests.ops.fused import BF16, E4M3, E5M2, FP16, FP32, Case
from tests.ops.test_gemm_gather import arguments, run, run_with

GATED = [
    Case(4, 300, 136, 544, bias=BF16, pieces=2),
    Case(2, 7, 64, 32, FP16, out=FP16),
    Case(2, 1104, 400, 1056, E4M3, scale="tensor"),
    Case(3, 512, 1040, 2080, E4M3, scale="row", bias=FP32),
    Case(4, 640, 64, 4096, turned=True),
]


SWIGLU = Activation.of("swiglu")
FUSED = [one for one in map(Activation.of, ACTIVATIONS) if one.fused]
FUSED.append(Activation.of("clamped_swiglu", {"limit": 1.1, "alpha": 0.7, "glu_linear_offset": -0.3}))


def pairs(cases: list[Case]) -> list[tuple[Case, Activation]]:
    """One activation with each case, the others with one of each type: each pair is compiled anew."""
    return [(case, one) for one in FUSED for case in (cases if one == SWIGLU else cases[:3])]


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [3, 66])
@pytest.mark.parametrize(("case", "one"), pairs(GATED), ids=str)
def test_activation_of_the_output(case, one, clusters, monkeypatch):
    """All bits are those of the kernels that read h, whoever does the tiles; h is the same with and without."""
    monkeypatch.setattr(G, "sm_count", lambda device: 2 * clusters)
    args = arguments(case, fused.problem(case, "cuda"), case.ranks - 1, "cuda")
    h = run(args)
    source = act(h, one)
    out, made = run_with(args, G.Wanted("high precision", activation=one))
    assert_bitwise_equal("h beside its activation", out, h)
    assert_bitwise_equal("activation", made.data, transform(source, hp_dtype=h.dtype).hp)
    out, made = run_with(args, G.Wanted("amax", activation=one))
    assert_bitwise_equal("h beside the amax", out, h)
    assert_bitwise_equal("amax", made.amax.amax(), amax(source).amax())
    if case.m % 16:
        with pytest.raises(ValueError, match="multiples of 16, for fp8.*apart"):
            run_with(args, G.Wanted("fp8", scale=torch.ones(1, device="cuda")))
        return
    scale, seen = torch.rand(1, device="cuda") * 20, torch.zeros(1, device="cuda")
    want = transform(source, fp8_dtype=E4M3, row=True, col=True, scale=scale, amax_out=seen)
    for start in (0.0, 1e9):
        largest = torch.full((1,), start, device="cuda")
        out, made = run_with(args, G.Wanted("fp8", None, scale, largest, activation=one))
        assert_bitwise_equal("h beside fp8", out, h)
        assert_bitwise_equal("rows", made.data, want.row)
        assert_bitwise_equal("columns", made.data_t, want.col)
        assert_bitwise_equal("inverse scale", made.scale_inv, want.scale_inv)
        assert largest.item() == max(start, seen.item())
        out, made = run_with(args, G.Wanted("fp8", None, scale, largest, activation=one, col=False))
        assert_bitwise_equal("h beside rows of fp8", out, h)
        assert_bitwise_equal("rows alone", made.data, want.row)
        assert made.data_t is None and largest.item() == max(start, seen.item())


GRADS = [
    Case(4, 300, 136, 576, pieces=2, turned=True),
    Case(2, 7, 64, 64, FP16, out=FP16),
    Case(2, 1104, 400, 1088, E5M2, E4M3, scale="tensor"),
    Case(3, 512, 1040, 2112, E4M3, E5M2, scale="row"),
    Case(4, 640, 640, 4096, E4M3, scale="shard"),
    Case(4, 640, 128, 4096, E4M3, scale="tensor", out=FP16),  # one step a tile
    Case(2, 640, 64, 1024, turned=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [1, 66])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("case", "one"), pairs(GRADS), ids=str)
def test_gradient_of_an_activation(case, one, fast, clusters, monkeypatch):
    """All bits are those of the kernels that read the product and h, whoever does the tiles."""
    monkeypatch.setattr(G, "sm_count", lambda device: 2 * clusters)
    args = arguments(case, fused.problem(case, "cuda"), case.ranks - 1, "cuda")
    da = run(args, fast)
    h = (torch.randn(case.ranks * case.m, 2 * case.n, device="cuda") * 3).to(case.out)
    h[0, :4] = torch.tensor([200.0, -200.0, 90.0, -90.0])  # beyond where the derivative is clamped, and before
    for edge in one.parameters[:1]:  # at a limit of both halves, of both signs, and just beyond
        h[1, :4] = h[1, case.n : case.n + 4] = torch.tensor([edge, -edge, 1.01 * edge, -1.01 * edge])
    source = dact(da, h, one)
    out, made = run_with(args, G.Wanted("high precision", h, activation=one), fast)
    assert out is None
    assert_bitwise_equal("gradient", made.data, transform(source, hp_dtype=h.dtype).hp)
    out, made = run_with(args, G.Wanted("amax", h, activation=one), fast)
    assert_bitwise_equal("the product beside the amax", out, da)
    assert_bitwise_equal("amax", made.amax.amax(), amax(source).amax())
    if case.m % 16:
        with pytest.raises(ValueError, match="multiples of 16, for fp8, and 64.*apart"):
            run_with(args, G.Wanted("fp8", h, torch.ones(1, device="cuda")))
        return
    scale, seen = torch.rand(1, device="cuda") * 20, torch.zeros(1, device="cuda")
    for fp8 in (E4M3, E5M2):
        want = transform(source, fp8_dtype=fp8, row=True, col=True, scale=scale, amax_out=seen)
        for start in (0.0, 2.0**100):
            largest = torch.full((1,), start, device="cuda")
            out, made = run_with(args, G.Wanted("fp8", h, scale, largest, fp8, one), fast)
            assert out is None
            assert_bitwise_equal("rows", made.data, want.row)
            assert_bitwise_equal("columns", made.data_t, want.col)
            assert_bitwise_equal("inverse scale", made.scale_inv, want.scale_inv)
            assert largest.item() == max(start, seen.item())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [
    Case(1, 1104, 400, 1056, E4M3, scale="tensor"), Case(1, 1003, 264, 1056, bias=BF16), Case(1, 7, 64, 32),
    Case(1, 512, 1040, 2080, E4M3, scale="row", bias=FP32),
], ids=str)  # fmt: skip
def test_activation_on_one_rank(case, monkeypatch):
    """As overlap/one_rank.py takes the kernel: nothing arrives, and no flag is there to be waited for."""
    test_activation_of_the_output(case, SWIGLU, 66, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "fast"), [
    (Case(1, 1104, 400, 1088, E5M2, E4M3, scale="tensor"), False), (Case(1, 1003, 264, 1088, turned=True), True),
    (Case(1, 640, 64, 1024, turned=True), True),
], ids=str)  # fmt: skip
def test_gradient_on_one_rank(case, fast, monkeypatch):
    test_gradient_of_an_activation(case, SWIGLU, fast, 66, monkeypatch)


@pytest.mark.gpu
def test_swiglu_of_what_is_not_a_number():
    args = arguments(GATED[0], fused.problem(GATED[0], "cuda"), 0, "cuda")
    args[0][3, 5] = float("nan")
    h, made = run_with(args, G.Wanted("amax"))
    assert h.isnan().any() and made.amax.amax().isinf() and not made.amax.isnan().any()
    args = arguments(GRADS[0], fused.problem(GRADS[0], "cuda"), 0, "cuda")
    args[0][3, 5] = float("nan")
    da, made = run_with(args, G.Wanted("amax", torch.randn(1200, 1152, device="cuda").bfloat16()))
    assert da.isnan().any() and made.amax.amax().isinf() and not made.amax.isnan().any()
    args, largest = arguments(GRADS[4], fused.problem(GRADS[4], "cuda"), 0, "cuda"), torch.zeros(1, device="cuda")
    h = torch.full((2560, 8192), float("nan"), device="cuda").bfloat16()
    _, made = run_with(args, G.Wanted("fp8", h, torch.ones(1, device="cuda"), largest))
    assert made.data.float().isnan().all() and made.data_t.float().isnan().all() and largest.isinf()


def test_what_is_wanted_of_the_product_is_checked():
    args = arguments(GRADS[0], fused.problem(GRADS[0], "cpu"), 0, "cpu")
    h = torch.zeros(1200, 1152, dtype=BF16)
    with pytest.raises(ValueError, match=r"h \[1200, 576\].*contiguous \[1200, 1152\].*pass"):
        run_with(args, G.Wanted("amax", h[:, :576].contiguous()))
    with pytest.raises(ValueError, match="h .*float32.*bfloat16 that.*pass"):
        run_with(args, G.Wanted("amax", h.float()))
    with pytest.raises(ValueError, match="scale for act 'fp8'.*one fp32"):
        run_with(arguments(GRADS[4], fused.problem(GRADS[4], "cpu"), 0, "cpu"), G.Wanted("fp8"))
    split = arguments(GATED[2], fused.problem(GATED[2], "cpu"), 0, "cpu")
    with pytest.raises(ValueError, match="split accumulation.*both halves of h; compute it apart"):
        run_with(split, G.Wanted("amax"), fast=False)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("act", ["", "high precision", "amax", "fp8"])
@pytest.mark.parametrize("case", [GRADS[2], GRADS[6]], ids=str)
def test_what_is_asked_of_the_kernel_is_what_it_offers(case, act, grad, fast, monkeypatch):
    """The rules of its static_asserts, for all that is not refused."""
    asked, split = [], case.a in fused.FP8 and not fast
    monkeypatch.setattr(G.fused, "launch", lambda kind, *_, **__: asked.append(kind))
    h = torch.zeros(case.ranks * case.m, 2 * case.n, dtype=case.out) if act and grad else None
    wanted = G.Wanted(act, h, torch.ones(1) if act == "fp8" else None)
    try:
        G.gemm_gather(*arguments(case, fused.problem(case, "cpu"), 0, "cpu"), fast, wanted)
    except ValueError as refusal:
        assert act and split and not grad and "split" in str(refusal)
        return
    (kind,) = asked
    assert kind.split == split and kind.grad == (h is not None) and kind.act == act
    assert not kind.act or kind.columns == (128 if kind.grad else 256)
    assert not kind.split or kind.columns == 128
