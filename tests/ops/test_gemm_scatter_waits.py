"""GEMM + reduce-scatter in one launch: what it waits for, and how a wait ends."""

import pytest
import torch

from te_lite.ops import gemm_scatter as S
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops import fused
from tests.ops.fused import Late
from tests.ops.test_gemm_scatter import (
    ABORT,
    CASES,
    COUNTERS,
    DELTA,
    FREE,
    NARROW,
    PARTIALS,
    READY,
    STAGING,
    Rank,
    assert_stored,
    expected,
)


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", fused.EPOCHS)
@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[7], NARROW[3]], ids=str)
def test_it_waits(case, epoch, columns, monkeypatch):
    """What the others send comes late, by a copy engine, over what an earlier epoch left."""
    monkeypatch.setattr(S, "tile_columns", lambda *shape: columns)
    p = fused.problem(case, "cuda", exact=True)
    one = Rank(case, p, 1, torch.randint(-3, 4, (case.ranks, case.m, case.n)).float())
    _, want = expected(case, p, one)
    args, blocks = one.arguments, S.blocks(case.m)
    sent, scales = args[STAGING].cpu(), None if args[PARTIALS] is None else args[PARTIALS].scales
    sent_scales = None if scales is None else scales.cpu()
    staging, ready = args[STAGING].fill_(float("nan")), args[READY].fill_(fused.as_int32(epoch - 1))
    args[DELTA - 1].zero_()
    args[FREE].fill_(fused.as_int32(epoch - 1))
    S.gemm_scatter(*args[:DELTA], epoch - 1, *args[DELTA + 1 :])  # compiled before anything waits
    torch.cuda.synchronize()
    late, rows = Late(), -(-case.m // S.ROWS) // blocks * S.ROWS
    for source in one.others:
        if scales is not None:
            scales[source] = float("nan")
            late.copy(scales[source], sent_scales[source])
        for block in range(blocks):
            part = slice(block * rows, min((block + 1) * rows, case.m))
            late.copy(staging[source, part], sent[source, part])
            late.copy(ready[source, block : block + 1], fused.as_int32(epoch))
    late.start()
    got = S.gemm_scatter(*args[:DELTA], epoch, *args[DELTA + 1 :])
    early = torch.cuda.Event()
    early.record()
    assert not early.query(), "it ended before the last flag"
    fused.finish(args[ABORT])
    assert_bitwise_equal("own rows", got, want)
    assert (one.told[one.others] == fused.as_int32(epoch)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", fused.EPOCHS)
def test_it_stores_once_there_is_room(epoch):
    case = CASES[7]
    p = fused.problem(case, "cuda", exact=True)
    one = Rank(case, p, 1, torch.randint(-3, 4, (case.ranks, case.m, case.n)).float())
    products, own = expected(case, p, one)
    args = one.arguments
    one.run()  # compiled before anything waits
    args[DELTA - 1].zero_()
    args[READY].fill_(fused.as_int32(epoch))
    args[FREE].fill_(fused.as_int32(epoch - 2))
    one.products.fill_(float("nan"))
    late = Late()
    for peer in one.others:
        late.copy(args[FREE][peer : peer + 1], fused.as_int32(epoch - 1))
    copied, beside = torch.empty_like(one.products, device="cpu").pin_memory(), torch.cuda.Stream()
    torch.cuda.synchronize()
    got = S.gemm_scatter(*args[:DELTA], epoch, *args[DELTA + 1 :])
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.05, ended)
    with torch.cuda.stream(beside):
        copied.copy_(one.products, non_blocking=True)
    beside.synchronize()
    assert copied.isnan().all()
    late.start(0.0)
    fused.finish(args[ABORT])
    assert_bitwise_equal("own rows", got, own)
    assert_stored(one, products)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [READY, FREE])
def test_abort_ends_the_wait(flags):
    one = Rank(CASES[7], fused.problem(CASES[7], "cuda"), 0)
    one.run()
    one.arguments[flags].zero_()
    stop = Late().copy(one.arguments[ABORT], 1)
    S.gemm_scatter(*one.arguments)
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.05, ended)
    stop.start(0.0)
    assert fused.finished_within(fused.PATIENCE_S, ended)
    assert not one.arguments[COUNTERS].any()
