"""All-gather + GEMM: one rank at a time, with the other ranks' shards and flags in ordinary tensors."""

import pytest
import torch

from te_lite.ops import flags
from te_lite.ops import gemm_gather as G
from te_lite.ops.gemm_tiles import Config
from te_lite.overlap.buffers import following
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops import fused
from tests.ops.fused import BF16, E4M3, E5M2, FP16, FP32, Case, Late
from tests.ops.interpreted import only_interpreted, run_interpreted
from tests.ops.paths import DEVICES
from tests.ops.test_gemm import fp8_accumulation, within

CASES = [
    Case(2, 7, 64, 48),
    Case(2, 130, 72, 264, FP16, out=FP16, bias=FP16, pieces=2),
    Case(4, 130, 136, 80, out=FP32, bias=BF16, pieces=2),
    Case(4, 7, 96, 64, E4M3, scale="row", bias=BF16),
    Case(2, 130, 400, 272, E4M3, scale="tensor", pieces=2),
    Case(2, 130, 400, 272, E4M3, scale="row", bias=FP32),
    Case(4, 130, 272, 144, E5M2, E4M3, out=FP32, scale="shard", pieces=2),
    Case(4, 130, 272, 144, E4M3, E5M2, out=FP16, scale="none"),
    Case(4, 1000, 512, 512, bias=BF16, pieces=2),
    Case(2, 1000, 1040, 1296, E4M3, scale="row", pieces=2),
    Case(2, 130, 72, 264, FP16, out=FP16, bias=FP16, turned=True),
    Case(4, 1100, 136, 1040, bias=BF16, turned=True),
    Case(1, 130, 64, 48),
    # The last tiles of these are halved on a GPU of 132 multiprocessors.
    Case(4, 1100, 128, 1040, bias=BF16),
    Case(3, 1400, 256, 1040, E4M3, scale="row", bias=BF16),
]


def arguments(case: Case, p: fused.Problem, rank: int, device: str) -> list:
    """What rank has to call gemm_gather with when all shards but its own have arrived, for epoch 5 of word 3."""
    mine = slice(rank * case.m, (rank + 1) * case.m)
    gathered = p.a.clone()
    gathered[mine] = torch.full_like(gathered[mine], float("nan"), dtype=FP32).to(case.a)
    ready = fused.words(case.ranks, case.pieces, device=device)  # the first of a source's flags is the one that counts
    ready[:, 0] = 5
    ready[rank] = 0
    word = fused.words(1, device=device) + 3
    own_scale, scale = p.a_scale, p.a_scale
    if case.scale in ("shard", "row"):
        own_scale = p.a_scale.view(case.ranks, -1)[rank].clone()
        scale = p.a_scale.clone()
        scale.view(case.ranks, -1)[rank] = float("nan")
    return [
        p.a[mine].clone(), gathered, p.b, ready, word, 2, fused.words(1, device=device), rank, own_scale, scale,
        p.b_scale, p.bias, case.out,
    ]  # fmt: skip


def accumulation(case: Case, device: str) -> float:
    if case.a in fused.FP8:
        return fp8_accumulation(device, case.k, True)
    return (case.k + 4) * 2.0**-23


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case, device):
    p = fused.problem(case, device)
    want, magnitude = fused.truth(case, p)
    if p.bias is not None:
        want, magnitude = want + p.bias.cpu().double(), magnitude + p.bias.cpu().double().abs()
    for rank in {0, case.ranks - 1}:
        args = arguments(case, p, rank, device)
        out = G.gemm_gather(*args)
        if device == "cuda":
            fused.finish(args[6])
        assert out.dtype == case.out and out.shape == want.shape
        assert within(out, want, magnitude, accumulation(case, device)), f"rank {rank}"
        # A shard of another rank would be noticed.
        assert case.ranks == 1 or not within(out.roll(case.m, 0), want, magnitude, accumulation(case, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_exact(case):
    """Where no sum is rounded, every bit is the oracle's, with every tile."""
    p = fused.problem(case, "cuda", exact=True)
    args = arguments(case, p, case.ranks - 1, "cuda")
    want = G.gemm_gather_ref(*args)
    block_k = 128 // p.a.element_size()
    for config in fused.CONFIGS:
        block_m, block_n, warps, stages, group = config
        got = G.run_gather(Config(block_m, block_n, block_k, warps, stages, group), *args)
        fused.finish(args[6])
        assert_bitwise_equal(f"gemm_gather with {config}", got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", fused.EPOCHS)
@pytest.mark.parametrize("case", [CASES[2], CASES[9], Case(2, 256, 512, 256, E4M3, scale="shard")], ids=str)
def test_it_waits(case, epoch):
    """Shards, scales and flags come late and out of order, by a copy engine, over what an earlier epoch left."""
    p = fused.problem(case, "cuda", exact=True)
    rank = case.ranks - 1
    args = arguments(case, p, rank, "cuda")
    want = G.gemm_gather_ref(*args)
    gathered, ready, scale = p.a, args[3], args[9]
    shards, scales = gathered.cpu().view(case.ranks, case.m, -1), None if scale is None else scale.cpu()
    args[1] = fused.poisoned(*gathered.shape, dtype=FP32, device="cuda").to(case.a)
    args[4].zero_()
    args[5] = epoch
    ready.fill_(fused.as_int32(epoch - 1))
    if scale is not None:
        scale.fill_(float("nan"))
    G.run_gather(G.gather_config(args[0], p.b, case.ranks), *_past(args, epoch))  # compiled before anything waits
    torch.cuda.synchronize()
    late = Late()
    for source in reversed(following(rank, case.ranks)):
        if scale is not None and case.scale != "tensor":
            late.copy(scale.view(case.ranks, -1)[source], scales.view(case.ranks, -1)[source])
        late.copy(args[1].view(case.ranks, case.m, -1)[source], shards[source])
        late.copy(ready[source, :1], fused.as_int32(epoch))
    late.start()
    got = G.gemm_gather(*args)
    early = torch.cuda.Event()
    early.record()
    assert not early.query(), "it ended before the last flag"
    fused.finish(args[6])
    assert_bitwise_equal("gemm_gather", got, want)


def _past(args: list, epoch: int) -> list:
    """The same call for an epoch that the flags have reached."""
    return [*args[:5], epoch - 1, *args[6:]]


@pytest.mark.gpu
def test_abort_ends_the_wait():
    case = CASES[2]
    args = arguments(case, fused.problem(case, "cuda"), 0, "cuda")
    args[3].zero_()
    G.gemm_gather(*[*args[:5], -3, *args[6:]])
    torch.cuda.synchronize()
    stop = Late().copy(args[6], 1)
    G.gemm_gather(*args)
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.05, ended)
    stop.start(0.0)
    assert fused.finished_within(fused.PATIENCE_S, ended)


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", fused.EPOCHS)
def test_wait_kernel(epoch):
    """Not one before the epoch, in cyclic order; the epoch itself or one past it; the raw launcher too."""
    flag, word, abort = (fused.words(1, device="cuda") for _ in range(3))
    word.fill_(fused.as_int32(epoch - 3))
    flag.fill_(fused.as_int32(epoch))
    for delta in (3, 2):
        flags.wait_kernel[(1,)](flag, word, 0, 1, delta, abort, num_warps=1)
    fused.finish(abort)
    flag.fill_(fused.as_int32(epoch - 1))
    launcher = flags.compiled_wait(flag.device)
    stream, late = torch.cuda.current_stream().cuda_stream, Late().copy(flag, fused.as_int32(epoch))
    launcher.launch(1, stream, (flag.data_ptr(), word.data_ptr(), 0, 1, 3, abort.data_ptr()))
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.02, ended)
    late.start(0.0)
    fused.finish(abort)


def test_errors_name_value_rule_and_remedy():
    case = CASES[1]
    args = arguments(case, fused.problem(case, "cpu"), 0, "cpu")
    with pytest.raises(ValueError, match="260 rows for 2 ranks with 129 each.*pass"):
        G.gemm_gather(args[0][:129], *args[1:])
    with pytest.raises(TypeError, match="float16 and torch.bfloat16.*cast"):
        G.gemm_gather(*args[:2], args[2].bfloat16(), *args[3:])
    with pytest.raises(ValueError, match="N=263.*multiple of 16 bytes"):
        G.gemm_gather(*args[:2], args[2][:263], *args[3:])
    with pytest.raises(ValueError, match=r"\[260, 68\].*row a multiple of 16 bytes"):
        G.gemm_gather(args[0], args[1][:, :68].contiguous(), args[2][:, :68].contiguous(), *args[3:])
    turned = args[2][:260].t().contiguous().t()
    with pytest.raises(ValueError, match=r"b \[260, 72\] has strides \(1, 260\).*multiple of 16 bytes"):
        G.tiles.check("a gather", args[1], turned, 130, 2)
    fp8 = fused.problem(Case(2, 128, 64, 64, E4M3, scale="tensor", turned=True), "cpu")
    with pytest.raises(ValueError, match=r"contiguous"):
        G.tiles.check("a gather", fp8.a, fp8.b, 128, 2)
    with pytest.raises(ValueError, match="scales of a.*so many elements"):
        G.tiles.scale_kinds(torch.ones(3), torch.ones(1), 260, 264, 2)
    with pytest.raises(ValueError, match="scales of b: None.*both or none"):
        G.tiles.scale_kinds(torch.ones(1), None, 260, 264, 2)


@pytest.mark.parametrize("case", [*CASES[1:4], next(case for case in CASES if case.turned)], ids=str)
def test_registration(case):
    args = arguments(case, fused.problem(case, "cpu"), 1, "cpu")
    # test_schema multiplies its inputs, which fp8 tensors cannot
    checks = ("test_faketensor",) if case.a in fused.FP8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(G._gather_op.overload, tuple(args), test_utils=checks)


def test_gather_in_the_interpreter():
    run_interpreted(__file__)


@only_interpreted
@pytest.mark.parametrize("case", [
    Case(2, 7, 40, 24, FP16, out=FP32, bias=FP16),
    Case(2, 7, 40, 24, FP16, out=FP32, bias=FP16, turned=True),
    Case(3, 130, 72, 136, FP16, out=FP16, scale="row", bias=FP32, pieces=2),
    Case(2, 200, 40, 264, FP16, out=FP32, scale="shard", pieces=2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("group, columns, programs", [(1, 64, 3), (3, 64, 3), (2, 256, 7)])
def test_interpreted_indexing(case, group, columns, programs, monkeypatch):
    """Tiles of 256 columns: of 9 or 16 on 7 programs two are halved."""
    monkeypatch.setattr(G, "sm_count", lambda device: programs)
    p = fused.problem(case, "cpu", exact=True)
    for rank in range(case.ranks):
        args = arguments(case, p, rank, "cpu")
        got = G.run_gather(Config(64, columns, 32, 4, 4, group), *args)
        assert_bitwise_equal("gemm_gather", got, G.gemm_gather_ref(*args))
