"""GEMM + reduce-scatter: one rank with what the others would have sent, and all ranks at once on one device."""

import pytest
import torch

from te_lite.ops import gemm_scatter as S
from te_lite.ops.gemm_tiles import Config
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops import fused
from tests.ops.fused import BF16, E4M3, E5M2, FP16, FP32, Case, Late
from tests.ops.interpreted import only_interpreted, run_interpreted
from tests.ops.paths import DEVICES
from tests.ops.test_gemm import within
from tests.ops.test_gemm_gather import accumulation

CASES = [
    Case(2, 7, 64, 48),
    Case(2, 130, 72, 264, FP16, out=FP16, bias=FP16, pieces=2, wire=FP16),
    Case(4, 130, 136, 80, out=FP32, bias=BF16, pieces=2, wire=FP32),
    Case(4, 7, 96, 64, E4M3, scale="row", bias=BF16),
    Case(2, 130, 400, 272, E4M3, scale="tensor", pieces=2),
    Case(2, 130, 400, 272, E4M3, scale="row", fast=True, bias=FP32),
    Case(4, 130, 272, 144, E5M2, E4M3, out=FP32, scale="tensor", fast=True, pieces=2),
    Case(4, 1000, 512, 512, bias=BF16, pieces=8),
    Case(8, 130, 1040, 272, E4M3, scale="row", pieces=2),
    Case(1, 130, 64, 48),
]


def arguments(case: Case, p: fused.Problem, rank: int, device: str, sent: torch.Tensor | None = None) -> list:
    """What rank has to call gemm_scatter with, copy engines pushing, when `sent` [R, m, N] has come: epoch 5 of 3."""
    size = (case.ranks, case.m, case.n)
    staging = (torch.randn(size) if sent is None else sent).to(case.wire).to(device)
    staging[rank] = float("nan")
    ready = fused.words(case.ranks, case.pieces, device=device) + 5
    ready[rank] = 0
    signals, counters = (fused.words(case.ranks, case.pieces, device=device) for _ in range(2))
    word = fused.words(1, device=device) + 3
    return [
        p.a, p.b, fused.poisoned(*size, dtype=case.wire, device=device), signals, counters, staging, ready, word, 2,
        fused.words(1, device=device), rank, case.rows_per_piece, p.a_scale, p.b_scale, p.bias, case.out, case.fast,
    ]  # fmt: skip


def check_handed_over(args: list, rank: int, epoch: int) -> None:
    """Every piece of every other rank is signalled, nothing else; the counters are left at zero."""
    slots, signals, counters = args[2:5]
    others = [r for r in range(len(slots)) if r != rank]
    assert (signals[others] == fused.as_int32(epoch)).all() and signals[rank].eq(0).all()
    assert counters.eq(0).all() and slots[rank].isnan().all() and not slots[others].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case, device):
    p = fused.problem(case, device)
    want, magnitude = (t.view(case.ranks, case.m, case.n) for t in fused.truth(case, p))
    bound = accumulation(case, device)
    for rank in {0, case.ranks - 1}:
        args = arguments(case, p, rank, device)
        out = S.gemm_scatter(*args)
        if device == "cuda":
            fused.finish(args[9])
        check_handed_over(args, rank, 5)
        for to in S.destination_order(rank, case.ranks)[:-1]:
            assert within(args[2][to], want[to], magnitude[to], bound), f"rank {rank} for {to}"
        parts = [args[5][r].cpu().double() for r in range(case.ranks) if r != rank]
        parts += [] if p.bias is None else [p.bias.cpu().double().expand(case.m, -1)]
        total, size = sum(parts, want[rank]), sum((part.abs() for part in parts), magnitude[rank])
        assert out.dtype == case.out and within(out, total, size, bound + case.ranks * 2.0**-24), f"rank {rank}"
        assert not within(out, want[rank] + total, size, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_exact(case):
    """Where no sum is rounded, every bit is the oracle's, with every tile; run twice, since counters must be left."""
    p = fused.problem(case, "cuda", exact=True)
    rank = case.ranks - 1
    sent = torch.randint(-3, 4, (case.ranks, case.m, case.n)).float()
    block_k = 128 // p.a.element_size()
    args = arguments(case, p, rank, "cuda", sent)
    want = S.gemm_scatter_ref(*args)
    slots = args[2].clone()
    for config in [*fused.CONFIGS, fused.CONFIGS[0]]:
        args = [*args[:2], args[2].fill_(float("nan")), args[3].zero_(), *args[4:]]
        block_m, block_n, warps, stages, group = config
        got = S.run_scatter(Config(block_m, block_n, block_k, warps, stages, group), *args)
        fused.finish(args[9])
        check_handed_over(args, rank, 5)
        assert_bitwise_equal(f"gemm_scatter with {config}", got, want)
        for to in range(case.ranks - 1):
            assert_bitwise_equal(f"slot {to} with {config}", args[2][to], slots[to])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_same_bits_on_every_run(case):
    args = arguments(case, fused.problem(case, "cuda"), 0, "cuda")
    first = S.gemm_scatter(*args)
    for _ in range(3):
        assert_bitwise_equal("gemm_scatter", S.gemm_scatter(*args), first)


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", fused.EPOCHS)
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[8]], ids=str)
def test_it_waits(case, epoch):
    """What the others send comes late, by a copy engine, over what an earlier epoch left."""
    p = fused.problem(case, "cuda", exact=True)
    rank = 1
    sent = torch.randint(-3, 4, (case.ranks, case.m, case.n)).to(case.wire)
    args = arguments(case, p, rank, "cuda", sent)
    want = S.gemm_scatter_ref(*args)
    args[3].zero_()
    args[5].fill_(float("nan"))
    args[6].fill_(fused.as_int32(epoch - 1))
    args[7].zero_()
    S.gemm_scatter(*args[:8], epoch - 1, *args[9:])  # compiled before anything waits
    torch.cuda.synchronize()
    late = Late()
    for source in S.destination_order(rank, case.ranks)[:-1]:
        for piece in range(case.pieces):
            rows = slice(piece * case.rows_per_piece, min((piece + 1) * case.rows_per_piece, case.m))
            late.copy(args[5][source, rows], sent[source, rows])
            late.copy(args[6][source, piece : piece + 1], fused.as_int32(epoch))
    late.start()
    got = S.gemm_scatter(*args[:8], epoch, *args[9:])
    early = torch.cuda.Event()
    early.record()
    assert not early.query(), "it ended before the last flag"
    fused.finish(args[9])
    assert_bitwise_equal("gemm_scatter", got, want)
    check_handed_over(args, rank, epoch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[1], CASES[2], Case(4, 130, 256, 64, E4M3, scale="row", pieces=2)], ids=str)
def test_ranks_store_into_each_other(case):
    """All ranks at once, a stream each, with few enough programs to be resident together; several epochs."""
    problems = [fused.problem(case, "cuda", exact=True) for _ in range(case.ranks)]
    for p in problems[1:]:
        p.bias = problems[0].bias
    ranks = [arguments(case, p, rank, "cuda") for rank, p in enumerate(problems)]
    streams = [torch.cuda.Stream() for _ in ranks]
    abort = ranks[0][9]
    config = Config(128, 128, 128 // ranks[0][0].element_size(), 8, 3)  # 32 programs at most

    def table(index: int, rank: int) -> torch.Tensor:
        return torch.tensor([other[index][rank].data_ptr() for other in ranks], dtype=torch.int64, device="cuda")

    for args in ranks:
        args[9] = abort
    direct = [[*args[:2], table(5, r), table(6, r), *args[4:]] for r, args in enumerate(ranks)]
    wants = []
    for rank, args in enumerate(ranks):
        parts = [S.tiles.scaled_product_ref(*(p.a, p.b, p.a_scale, p.b_scale)) for p in problems]
        mine = [part.view(case.ranks, case.m, case.n)[rank] for part in parts]
        wants.append(S.reduce_slots_ref(torch.stack(mine).to(case.wire), mine[rank], args[14], rank, case.out))
    for stream in streams:  # memory for the results, so that nothing is allocated while a kernel waits
        with torch.cuda.stream(stream):
            torch.empty(case.m, case.n, dtype=case.out, device="cuda")
    for epoch in (0, 1, 2**31):
        for args in ranks:
            args[5].fill_(float("nan"))
            args[6].fill_(fused.as_int32(epoch - 1))
            args[7].zero_()
        torch.cuda.synchronize()
        outs = []
        for stream, args in zip(streams, direct, strict=True):
            with torch.cuda.stream(stream):
                outs.append(S.run_scatter(config, *args[:8], epoch, *args[9:]))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        fused.finish(abort)
        for rank, (got, want) in enumerate(zip(outs, wants, strict=True)):
            assert_bitwise_equal(f"rank {rank}, epoch {epoch}", got, want)
            assert ranks[rank][4].eq(0).all()


@pytest.mark.gpu
def test_abort_ends_the_wait():
    case = CASES[2]
    args = arguments(case, fused.problem(case, "cuda"), 0, "cuda")
    S.gemm_scatter(*args)
    torch.cuda.synchronize()
    args[6].zero_()
    stop = Late().copy(args[9], 1)
    S.gemm_scatter(*args)
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.05, ended)
    stop.start(0.0)
    assert fused.finished_within(fused.PATIENCE_S, ended)
    assert args[4].eq(0).all()


def test_order_of_destinations():
    assert S.destination_order(2, 4) == [3, 0, 1, 2] and S.destination_order(0, 1) == [0]


def test_errors_name_value_rule_and_remedy():
    case = CASES[1]
    args = arguments(case, fused.problem(case, "cpu"), 0, "cpu")
    with pytest.raises(ValueError, match="2 pieces of 100 rows.*multiple of 128"):
        S.gemm_scatter(*args[:11], 100, *args[12:])
    with pytest.raises(ValueError, match="3 counters.*R \\* P = 4"):
        S.gemm_scatter(*args[:4], args[4].flatten()[:3], *args[5:])
    with pytest.raises(ValueError, match="table of addresses.*local tensor"):
        S.gemm_scatter(*args[:2], torch.zeros(2, dtype=torch.int64), *args[3:])


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_registration(case):
    args = arguments(case, fused.problem(case, "cpu"), 1, "cpu")
    args[2].zero_()
    args[5].zero_()
    # test_schema multiplies its inputs, which fp8 tensors cannot
    checks = ("test_faketensor",) if case.a in fused.FP8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(S._scatter_op.overload, tuple(args), test_utils=checks)


def test_scatter_in_the_interpreter():
    run_interpreted(__file__)


@only_interpreted
@pytest.mark.parametrize("case", [
    Case(2, 7, 40, 24, FP16, out=FP32, bias=FP16, wire=FP16),
    Case(3, 130, 72, 136, FP16, out=FP16, scale="row", bias=FP32, pieces=2, wire=FP32),
    Case(2, 200, 40, 264, FP16, out=FP32, scale="tensor", pieces=2, wire=FP16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("group", [1, 3])
def test_interpreted_indexing(case, group, monkeypatch):
    monkeypatch.setattr(S, "sm_count", lambda device: 3)
    p = fused.problem(case, "cpu", exact=True)
    for rank in range(case.ranks):
        args = arguments(case, p, rank, "cpu", torch.randint(-3, 4, (case.ranks, case.m, case.n)).float())
        want = S.gemm_scatter_ref(*args)
        slots = args[2].clone()
        got = S.run_scatter(Config(64, 64, 32, 4, 4, group), *args[:2], args[2].fill_(float("nan")), args[3].zero_(),
                            *args[4:])  # fmt: skip
        assert_bitwise_equal("gemm_scatter", got, want)
        assert_bitwise_equal("slots", args[2].nan_to_num(), slots.nan_to_num())
        check_handed_over(args, rank, 5)
