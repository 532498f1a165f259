"""GEMM + sum of what the others have sent: one rank, with slots and flags as the others would leave them."""

import pytest
import torch

from te_lite.ops import gemm_reduce as R
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
    Case(2, 130, 400, 272, E4M3, scale="row", bias=FP32),
    Case(4, 130, 272, 144, E5M2, E4M3, out=FP32, scale="tensor", pieces=2),
    Case(4, 1000, 512, 512, bias=BF16, pieces=8),
    Case(8, 130, 1040, 272, E4M3, scale="row", pieces=2),
    Case(2, 130, 72, 264, FP16, out=FP16, bias=FP16, pieces=2, wire=FP16, turned=True),
    Case(4, 1100, 136, 1040, pieces=9, turned=True),
    Case(1, 130, 64, 48),
]
STAGING, READY, DELTA, ABORT = 2, 3, 5, 6  # places in what arguments() gives


def own_rows(case: Case, p: fused.Problem, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's rows of a, with their scales."""
    rows = slice(rank * case.m, (rank + 1) * case.m)
    one_a_row = p.a_scale is not None and p.a_scale.numel() == case.ranks * case.m
    return p.a[rows], p.a_scale[rows] if one_a_row else p.a_scale


def arguments(case: Case, p: fused.Problem, rank: int, device: str, sent: torch.Tensor | None = None) -> list:
    """What rank has to call gemm_reduce with when `sent` [R, m, N] has come: epoch 5 of word 3."""
    staging = (torch.randn(case.ranks, case.m, case.n) if sent is None else sent).to(case.wire).to(device)
    staging[rank] = float("nan")
    ready = fused.words(case.ranks, case.pieces, device=device) + 5
    ready[rank] = 0
    a, a_scale = own_rows(case, p, rank)
    return [
        a, p.b, staging, ready, fused.words(1, device=device) + 3, 2, fused.words(1, device=device), rank,
        case.rows_per_piece, a_scale, p.b_scale, p.bias, case.out,
    ]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case, device):
    p = fused.problem(case, device)
    want, magnitude = (t.view(case.ranks, case.m, case.n) for t in fused.truth(case, p))
    bound = accumulation(case, device)
    for rank in {0, case.ranks - 1}:
        args = arguments(case, p, rank, device)
        out = R.gemm_reduce(*args)
        if device == "cuda":
            fused.finish(args[ABORT])
        parts = [args[STAGING][r].cpu().double() for r in range(case.ranks) if r != rank]
        parts += [] if p.bias is None else [p.bias.cpu().double().expand(case.m, -1)]
        total, size = sum(parts, want[rank]), sum((part.abs() for part in parts), magnitude[rank])
        assert out.dtype == case.out and within(out, total, size, bound + case.ranks * 2.0**-24), f"rank {rank}"
        assert not within(out, want[rank] + total, size, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_exact(case):
    """Where no sum is rounded, every bit is the oracle's, with every tile."""
    p = fused.problem(case, "cuda", exact=True)
    args = arguments(case, p, case.ranks - 1, "cuda", torch.randint(-3, 4, (case.ranks, case.m, case.n)).float())
    want = R.gemm_reduce_ref(*args)
    for block_m, block_n, warps, stages, group in fused.CONFIGS:
        config = Config(block_m, block_n, 128 // p.a.element_size(), warps, stages, group)
        got = R.run_reduce(config, *args)
        fused.finish(args[ABORT])
        assert_bitwise_equal(f"gemm_reduce with {config}", got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_same_bits_on_every_run(case):
    args = arguments(case, fused.problem(case, "cuda"), 0, "cuda")
    first = R.gemm_reduce(*args)
    for _ in range(3):
        assert_bitwise_equal("gemm_reduce", R.gemm_reduce(*args), first)


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", fused.EPOCHS)
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[8]], ids=str)
def test_it_waits(case, epoch):
    """What the others send comes late, by a copy engine, over what an earlier epoch left."""
    p, rank = fused.problem(case, "cuda", exact=True), 1
    sent = torch.randint(-3, 4, (case.ranks, case.m, case.n)).to(case.wire)
    args = arguments(case, p, rank, "cuda", sent)
    want = R.gemm_reduce_ref(*args)
    staging, ready = args[STAGING].fill_(float("nan")), args[READY].fill_(fused.as_int32(epoch - 1))
    args[DELTA - 1].zero_()
    R.gemm_reduce(*args[:DELTA], epoch - 1, *args[DELTA + 1 :])  # compiled before anything waits
    torch.cuda.synchronize()
    late = Late()
    for source in (r for r in range(case.ranks) if r != rank):
        for piece in range(case.pieces):
            rows = slice(piece * case.rows_per_piece, min((piece + 1) * case.rows_per_piece, case.m))
            late.copy(staging[source, rows], sent[source, rows])
            late.copy(ready[source, piece : piece + 1], fused.as_int32(epoch))
    late.start()
    got = R.gemm_reduce(*args[:DELTA], epoch, *args[DELTA + 1 :])
    early = torch.cuda.Event()
    early.record()
    assert not early.query(), "it ended before the last flag"
    fused.finish(args[ABORT])
    assert_bitwise_equal("gemm_reduce", got, want)


@pytest.mark.gpu
def test_abort_ends_the_wait():
    case = CASES[2]
    args = arguments(case, fused.problem(case, "cuda"), 0, "cuda")
    R.gemm_reduce(*args)
    torch.cuda.synchronize()
    args[READY].zero_()
    stop = Late().copy(args[ABORT], 1)
    R.gemm_reduce(*args)
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.05, ended)
    stop.start(0.0)
    assert fused.finished_within(fused.PATIENCE_S, ended)


def test_errors_name_value_rule_and_remedy():
    case = CASES[1]
    args = arguments(case, fused.problem(case, "cpu"), 0, "cpu")
    with pytest.raises(ValueError, match="2 pieces of 64 rows.*must cover the 130 rows"):
        R.gemm_reduce(*args[:8], 64, *args[9:])
    with pytest.raises(ValueError, match=r"flags \(1, 2\).*contiguous \[R, m, N\] and \[R, P\]"):
        R.gemm_reduce(*args[:READY], args[READY][:1], *args[READY + 1 :])
    with pytest.raises(ValueError, match="32 ranks: at most 31.*ring"):
        R.gemm_reduce(*args[:STAGING], args[STAGING][:1].expand(32, -1, -1), *args[STAGING + 1 :])
    with pytest.raises(ValueError, match="130 rows.*pass all shards|65 rows"):
        R.gemm_reduce(args[0][:65], *args[1:])


@pytest.mark.parametrize("case", [*CASES[1:4], next(case for case in CASES if case.turned)], ids=str)
def test_registration(case):
    args = arguments(case, fused.problem(case, "cpu"), 1, "cpu")
    args[STAGING].zero_()
    # test_schema multiplies its inputs, which fp8 tensors cannot
    checks = ("test_faketensor",) if case.a in fused.FP8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(R._reduce_op.overload, tuple(args), test_utils=checks)


def test_reduce_in_the_interpreter():
    run_interpreted(__file__)


@only_interpreted
@pytest.mark.parametrize("case", [
    Case(2, 7, 40, 24, FP16, out=FP32, bias=FP16, wire=FP16),
    Case(2, 7, 40, 24, FP16, out=FP32, bias=FP16, wire=FP16, turned=True),
    Case(3, 130, 72, 136, FP16, out=FP16, scale="row", bias=FP32, pieces=2, wire=FP32),
    Case(2, 200, 40, 264, FP16, out=FP32, scale="tensor", pieces=2, wire=FP16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("group", [1, 3])
def test_interpreted_indexing(case, group, monkeypatch):
    monkeypatch.setattr(R, "sm_count", lambda device: 3)
    p = fused.problem(case, "cpu", exact=True)
    for rank in range(case.ranks):
        args = arguments(case, p, rank, "cpu", torch.randint(-3, 4, (case.ranks, case.m, case.n)).float())
        got = R.run_reduce(Config(64, 64, 32, 4, 4, group), *args)
        assert_bitwise_equal("gemm_reduce", got, R.gemm_reduce_ref(*args))
