"""GEMM + reduce-scatter in one launch: one rank on one GPU, with slots and flags as the others would leave them."""

from dataclasses import replace

import pytest
import torch

from te_lite.ops import gemm_scatter as S
from te_lite.ops.narrow import narrow_ref, widened_ref
from te_lite.ops.reduce import reduce_slots_ref
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops import fused
from tests.ops.fused import BF16, E4M3, E5M2, FP16, FP32, Case
from tests.ops.test_gemm import within
from tests.ops.test_gemm_gather import accumulation

CASES = [
    Case(2, 7, 64, 32),
    Case(2, 130, 72, 288, FP16, out=FP16, bias=FP16, wire=FP16),
    Case(4, 300, 136, 96, bias=BF16),
    Case(4, 7, 96, 64, E4M3, scale="row", bias=BF16),
    Case(2, 512, 400, 288, E4M3, scale="tensor"),
    Case(2, 130, 400, 288, E4M3, scale="row", bias=FP32),
    Case(4, 770, 272, 160, E5M2, E4M3, out=FP16, scale="tensor", wire=FP16),
    Case(4, 1024, 512, 992, bias=BF16),
    Case(8, 130, 1040, 288, E4M3, scale="row"),
    Case(2, 2560, 136, 1056, bias=FP32),
    Case(3, 512, 64, 1024, E4M3, E5M2, scale="tensor"),
    Case(2, 130, 72, 288, FP16, out=FP16, bias=FP32, wire=FP16, turned=True),
    Case(4, 300, 136, 96, bias=BF16, turned=True),
    Case(4, 1024, 512, 992, turned=True),
    Case(2, 130, 72, 288, FP16, out=FP16, bias=FP16, wire=FP16, residual=True),
    Case(3, 512, 64, 1024, E4M3, E5M2, scale="tensor", residual=True),
    Case(4, 1024, 512, 992, bias=BF16, residual=True),
    Case(8, 130, 1040, 288, E4M3, scale="row", residual=True),
]
NARROW = [  # partials travel as ops/narrow.py makes them
    Case(2, 128, 64, 128, wire=E4M3),
    Case(2, 384, 72, 256, FP16, out=FP16, bias=FP16, wire=E4M3),
    Case(4, 640, 272, 384, E4M3, scale="row", bias=BF16, wire=E4M3),
    Case(4, 1024, 512, 1024, E4M3, scale="tensor", wire=E4M3),
    Case(8, 256, 136, 640, bias=BF16, wire=E4M3, turned=True),
]
# Places in what a Rank calls it with.
TO, STAGING, READY, FREE, COUNTERS, DELTA, ABORT, B_SCALE, FAST = 2, 4, 5, 6, 7, 9, 10, 13, 15
PARTIALS, RESIDUAL = 16, 17


class Rank:
    """What one rank calls gemm_scatter with when `sent` [R, m, N] has come: epoch 5 of word 3.

    products [R, m, N], told [R, P]: where it stores the others' rows and flags; scales [R, N/128, m], where those are
    narrow.
    """

    def __init__(
        self, case: Case, p: fused.Problem, rank: int, sent: torch.Tensor | None = None, count: int = 0
    ) -> None:
        shape, blocks = (case.ranks, case.m, case.n), count or S.blocks(case.m)
        staging = (torch.randn(shape) if sent is None else sent).cuda()
        staging[rank] = float("nan")
        self.scales = narrow = None
        residual = torch.randn(*shape[1:], device="cuda").to(case.out) if case.residual else None
        if case.wire == E4M3:
            staging, slot_scales = (torch.stack(t) for t in zip(*(narrow_ref(part) for part in staging), strict=True))
            self.scales = fused.poisoned(*slot_scales.shape, dtype=FP32, device="cuda")
            narrow = S.Narrow(slot_scales, [t.data_ptr() for t in self.scales], case.out)
        staging = staging.to(case.wire)
        ready = fused.words(case.ranks, blocks + 1, device="cuda") + 5
        ready[rank] = 0
        free = fused.words(case.ranks, device="cuda") + 4
        free[rank] = 0
        self.products = fused.poisoned(*shape, dtype=case.wire, device="cuda")
        self.told = fused.words(case.ranks, blocks, device="cuda")
        counters = fused.words(case.ranks * blocks + 1, device="cuda")
        self.arguments = [
            p.a, p.b, [t.data_ptr() for t in self.products], [t.data_ptr() for t in self.told], staging, ready,
            free, counters, fused.words(1, device="cuda") + 3, 2, fused.words(1, device="cuda"), rank, p.a_scale,
            p.b_scale, p.bias, True, narrow, residual, count,
        ]  # fmt: skip
        self.rank, self.others = rank, [r for r in range(case.ranks) if r != rank]

    def run(self, fast: bool = True) -> torch.Tensor:
        self.products.view(torch.uint8).fill_(0xFF)
        self.told.zero_()
        if self.scales is not None:
            self.scales.fill_(float("nan"))
        out = S.gemm_scatter(*self.arguments[:FAST], fast, *self.arguments[FAST + 1 :])
        fused.finish(self.arguments[ABORT])
        assert not self.arguments[COUNTERS].any()
        assert (self.told[self.others] == 5).all() and not self.told[self.rank].any()
        assert (self.products[self.rank].view(torch.uint8) == 0xFF).all()
        assert self.scales is None or self.scales[self.rank].isnan().all()
        return out

    def stored(self) -> list[torch.Tensor]:
        """What the others find: their rows and, if they are narrow, scales."""
        return [t[self.others].clone() for t in (self.products, self.scales) if t is not None]


@pytest.fixture(params=[128, 256])
def columns(request, monkeypatch):
    """Of a tile, whatever gemm_scatter would choose."""
    monkeypatch.setattr(S, "tile_columns", lambda *shape: request.param)


FAST_OR_NOT = [(case, fast) for case in CASES + NARROW for fast in (True, False) if fast or case.a in fused.FP8]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "fast"), FAST_OR_NOT, ids=str)
def test_against_fp64(case, fast, columns):
    p = fused.problem(case, "cuda")
    want, magnitude = (t.view(case.ranks, case.m, case.n) for t in fused.truth(case, p))
    bound = accumulation(case, "cuda", fast)
    for rank in {0, case.ranks - 1}:
        one = Rank(case, p, rank)
        out = one.run(fast)
        staging = one.arguments[STAGING]
        for other in one.others:
            if case.wire == E4M3:
                got = widened_ref(one.products[other], one.scales[other]).cpu().double()
                assert ((got - want[other]).abs() <= fused.narrow_bound(want[other], bound * magnitude[other])).all()
                continue
            assert within(one.products[other], want[other], magnitude[other], bound), f"rank {rank}, rows of {other}"
        staging = widened_ref(staging, one.arguments[PARTIALS].scales) if case.wire == E4M3 else staging
        parts = [staging[r].cpu().double() for r in one.others]
        parts += [] if p.bias is None else [p.bias.cpu().double().expand(case.m, -1)]
        parts += [] if one.arguments[RESIDUAL] is None else [one.arguments[RESIDUAL].cpu().double()]
        total, size = sum(parts, want[rank]), sum((part.abs() for part in parts), magnitude[rank])
        roundings = case.ranks + case.residual  # of the sum
        assert out.dtype == case.out and within(out, total, size, bound + roundings * 2.0**-24), f"rank {rank}"
        assert not within(out, want[rank] + total, size, bound)


@pytest.mark.parametrize("off", [0.0, 2.0**-12, 2.0**-8])
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_the_bound_of_narrow_products(case, off):
    """It holds for products that are off anywhere within what is allowed, and not for half of their roundings."""
    want, magnitude = (t[: case.m] for t in fused.truth(case, fused.problem(case, "cpu")))
    product = want + off * magnitude * (2 * torch.rand_like(want) - 1)
    error = (widened_ref(*narrow_ref(product.float())).double() - want).abs()
    allowed = fused.narrow_bound(want, (off + 2.0**-24) * magnitude)  # and fp32's rounding
    assert (error <= allowed).all()
    assert off or not (error <= allowed / 2).all()


def expected(case: Case, p: fused.Problem, one: Rank) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(what the others find, this rank's sum), where no sum is rounded."""
    products = fused.scaled_product_ref(p.a, p.b, p.a_scale, p.b_scale).view(case.ranks, case.m, case.n)
    narrow, staging, others = one.arguments[PARTIALS], one.arguments[STAGING], products[one.others]
    staging = staging if narrow is None else widened_ref(staging, narrow.scales)
    own = reduce_slots_ref(staging, products[one.rank], p.bias, one.rank, case.out, one.arguments[RESIDUAL])
    if narrow is None:
        return [others.to(case.wire)], own
    return [torch.stack(t) for t in zip(*(narrow_ref(part) for part in others), strict=True)], own


def assert_stored(one: Rank, want: list[torch.Tensor]) -> None:
    for i, (got, wanted) in enumerate(zip(one.stored(), want, strict=True)):
        assert_bitwise_equal("their scales" if i else "others' rows", got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "fast"), FAST_OR_NOT, ids=str)
def test_the_kernel_is_exact(case, fast, columns):
    """Where no sum is rounded, every bit is the oracle's, and on every run."""
    p = fused.problem(case, "cuda", exact=True)
    one = Rank(case, p, case.ranks - 1, torch.randint(-3, 4, (case.ranks, case.m, case.n)).float())
    products, own = expected(case, p, one)
    for _ in range(3):
        assert_bitwise_equal("own rows", one.run(fast), own)
        assert_stored(one, products)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[1:] + NARROW, ids=str)
def test_same_bits_on_every_run(case, columns):
    one = Rank(case, fused.problem(case, "cuda"), 0)
    first, products = one.run(), one.stored()
    for _ in range(3):
        assert_bitwise_equal("own rows", one.run(), first)
        assert_stored(one, products)


MANY_TILES = [
    Case(4, 1024, 512, 992, bias=BF16),
    Case(5, 2304, 64, 1296, E4M3, scale="tensor"),
    Case(6, 300, 8, 4096, FP16, out=FP16, wire=FP16),
    Case(7, 1100, 128, 528, E4M3, E5M2, scale="row"),
    Case(8, 512, 200, 1024, turned=True),
    Case(4, 1152, 72, 1152, wire=E4M3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_few_clusters_do_all_tiles(case, clusters, columns, monkeypatch):
    """As where others hold the device: each then takes many more tiles than it remembers."""
    monkeypatch.setattr(S, "sm_count", lambda device: 2 * clusters)
    p = fused.problem(case, "cuda", exact=True)
    one = Rank(case, p, 1, torch.randint(-3, 4, (case.ranks, case.m, case.n)).float())
    products, own = expected(case, p, one)
    assert_bitwise_equal("own rows", one.run(), own)
    assert_stored(one, products)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("clusters", [3, 66])
@pytest.mark.parametrize("case", [
    Case(4, 2040, 264, 992, bias=BF16), Case(2, 2048, 272, 640, E4M3, scale="row", wire=E4M3),
    Case(3, 1900, 144, 528, E4M3, scale="tensor", residual=True),
], ids=str)  # fmt: skip
def test_other_numbers_of_blocks(case, count, clusters, columns, monkeypatch):
    """The same bits, a flag for each."""
    monkeypatch.setattr(S, "sm_count", lambda device: 2 * clusters)
    p = fused.problem(case, "cuda", exact=True)
    one = Rank(case, p, 1, torch.randint(-3, 4, (case.ranks, case.m, case.n)).float(), count)
    products, own = expected(case, p, one)
    assert_bitwise_equal("own rows", one.run(), own)
    assert_stored(one, products)


@pytest.mark.gpu
def test_a_scale_a_row_beside_one_for_all():
    case = CASES[5]
    p = fused.problem(case, "cuda")
    one = Rank(case, p, 0)
    one.arguments[B_SCALE] = p.b_scale[:1]
    out, products = one.run(), one.products[1:].clone()
    one.arguments[B_SCALE] = p.b_scale[:1].expand(case.n).contiguous()
    assert_bitwise_equal("own rows", one.run(), out)
    assert_bitwise_equal("others' rows", one.products[1:], products)


def played(case: Case) -> list:
    """Arguments on the CPU, enough to be refused."""
    p, blocks = fused.problem(case, "cpu"), S.blocks(case.m)
    staging, words = torch.zeros(case.ranks, case.m, case.n, dtype=case.wire), fused.words(1, device="cpu")
    ready, counters = fused.words(case.ranks, blocks, device="cpu"), fused.words(case.ranks * blocks + 1, device="cpu")
    free = fused.words(case.ranks, device="cpu")
    return [p.a, p.b, [0] * case.ranks, [0] * case.ranks, staging, ready, free, counters, words, 2, words, 0]


def test_errors_name_value_rule_and_remedy():
    args = played(CASES[1])
    with pytest.raises(ValueError, match=r"\[1, 1, 2, 3\]: must be \[2, 1, 2, 3\].*reserve"):
        S.gemm_scatter(*args[:READY], args[READY][:1], *args[READY + 1 :])
    with pytest.raises(ValueError, match=r"\[2, 1, 1, 3\]: must be \[2, 1, 2, 3\]"):
        S.gemm_scatter(*args[:FREE], args[FREE][:1], *args[FREE + 1 :])
    with pytest.raises(ValueError, match=r"\[2, 1, 2, 2\]: must be \[2, 1, 2, 3\]"):
        S.gemm_scatter(*args[:COUNTERS], args[COUNTERS][:2], *args[COUNTERS + 1 :])
    with pytest.raises(ValueError, match=r"2 blocks of 130 rows: must divide 1, the pairs of tiles; take blocks\(m\)"):
        S.gemm_scatter(*args, count=2)
    with pytest.raises(ValueError, match="float32.*bf16 or fp16, or narrow.*take a ring"):
        S.gemm_scatter(*args[:STAGING], args[STAGING].float(), *args[STAGING + 1 :])
    with pytest.raises(ValueError, match="N a multiple of 8"):
        S.gemm_scatter(*played(replace(CASES[1], n=284)))
    for case in (NARROW[0], replace(NARROW[0], n=192), replace(NARROW[0], m=64), replace(NARROW[0], wire=BF16)):
        narrow = S.Narrow(torch.zeros(case.ranks, case.n // 128, case.m), [0] * case.ranks, case.out)
        with pytest.raises(ValueError, match="narrow E4M3 for such a sum with m and N multiples of 128"):
            S.gemm_scatter(*played(case), narrow=None if case is NARROW[0] else narrow)
    m, n, case = CASES[1].m, CASES[1].n, NARROW[0]
    for wrong in (torch.zeros(m, n), torch.zeros(m, n - 8, dtype=FP16), torch.zeros(n, m, dtype=FP16).t()):
        with pytest.raises(ValueError, match=rf"residual .*must be contiguous \[{m}, {n}\] of torch.float16"):
            S.gemm_scatter(*args, residual=wrong)
    narrow = S.Narrow(torch.zeros(case.ranks, case.n // 128, case.m), [0] * case.ranks, case.out)
    with pytest.raises(ValueError, match=r"residual .*partials not narrow; pass a clone, or add it"):
        S.gemm_scatter(*played(case), narrow=narrow, residual=torch.zeros(case.m, case.n, dtype=BF16))
    with pytest.raises(ValueError, match="R from 2 to 8"):
        S.gemm_scatter(*played(replace(CASES[0], ranks=9)))
    with pytest.raises(ValueError, match="65 rows for 2 ranks with 130"):
        S.gemm_scatter(args[0][:65], *args[1:])


@pytest.mark.parametrize(("m", "blocks"), [(1, 1), (256, 1), (257, 2), (2048, 8), (2049, 3), (2816, 1), (4096, 8)])
def test_blocks_have_equally_many_tiles(m, blocks):
    assert S.blocks(m) == blocks
