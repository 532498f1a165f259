"""All-gather + GEMM: one rank at a time, with the other ranks' shards and flags in ordinary tensors."""

import pytest
import torch

from te_lite.ops import flags
from te_lite.ops import gemm_gather as G
from te_lite.ops.activation import Activation
from te_lite.ops.cast import amax
from te_lite.ops.source import dact
from te_lite.overlap.programs import following
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops import fused
from tests.ops.fused import BF16, E4M3, E5M2, FP16, FP32, Case, Late
from tests.ops.test_gemm import fp8_accumulation, within

CASES = [
    Case(2, 7, 64, 48),
    Case(2, 130, 72, 264, FP16, out=FP16, bias=FP16, pieces=2),
    Case(4, 300, 136, 80, bias=BF16, pieces=2),
    Case(4, 7, 96, 64, E4M3, scale="row", bias=BF16),
    Case(2, 130, 400, 272, E4M3, scale="tensor", pieces=2),
    Case(2, 130, 400, 272, E4M3, scale="row", bias=FP32),
    Case(4, 130, 272, 144, E5M2, E4M3, out=FP16, scale="shard", pieces=2),
    Case(4, 130, 272, 144, E4M3, E5M2, out=FP16, scale="none"),
    Case(4, 1000, 512, 512, bias=BF16, pieces=2),
    Case(2, 1000, 1040, 1296, E4M3, scale="row", pieces=2),
    Case(2, 130, 72, 264, FP16, out=FP16, bias=FP16, turned=True),
    Case(4, 1100, 136, 1040, bias=BF16, turned=True),
    Case(8, 300, 64, 528, E4M3, scale="shard", bias=FP32),
    Case(3, 2570, 256, 1040, E4M3, scale="row", bias=BF16),  # eleven pairs of tiles a shard: two groups
    Case(4, 1, 96, 64, E4M3, scale="row"),  # as many scales as ranks
    Case(1, 1100, 400, 1040, E4M3, E5M2, scale="tensor", bias=BF16),  # overlap/one_rank.py
]
READY, COUNTERS, WORD, DELTA, ABORT, SCALE = 3, 4, 5, 6, 7, 10  # places in what arguments() gives


@pytest.fixture(params=[128, 192, 224, 256])
def columns(request, monkeypatch):
    """Of a tile, whatever gemm_gather would choose."""
    monkeypatch.setattr(
        G,
        "tile_columns",
        lambda m, n, ranks, b_t, clusters: request.param if not b_t or request.param % 64 == 0 else 192,
    )


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
        p.a[mine].clone(), gathered, p.b, ready, fused.words(1, device=device), word, 2, fused.words(1, device=device),
        rank, own_scale, scale, p.b_scale, p.bias, case.out,
    ]  # fmt: skip


def run_with(args: list, wanted: G.Wanted, fast: bool = True):
    out, made = G.gemm_gather(*args, fast, wanted)
    fused.finish(args[ABORT])
    assert not args[COUNTERS].any()
    return out, made


def oracle(args: list) -> torch.Tensor:
    """fp32 throughout, one rounding."""
    own, gathered, b, *_ = args
    rank, own_scale, gathered_scale, b_scale, bias, out_dtype = args[ABORT + 1 :]
    ranks, a, a_scale = gathered.shape[0] // own.shape[0], gathered.clone(), own_scale
    a.view(ranks, *own.shape)[rank] = own
    if own_scale is not None and gathered_scale.numel() == ranks * own_scale.numel():
        a_scale = gathered_scale.clone()
        a_scale.view(ranks, -1)[rank] = own_scale
    out = fused.scaled_product_ref(a, b, a_scale, b_scale)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def run(args: list, fast: bool = True) -> torch.Tensor:
    out, made = run_with(args, G.Wanted(), fast)
    assert made == (None,) * 4
    return out


def accumulation(case: Case, device: str, fast: bool = True) -> float:
    in_fp32 = (case.k + 4) * 2.0**-23
    if case.a not in fused.FP8:
        return in_fp32
    return fp8_accumulation(device, case.k, True) if fast else in_fp32 + min(16, -(-case.k // 32)) * 2.0**-13


FAST_OR_NOT = [(case, fast) for case in CASES for fast in (True, False) if fast or case.a in fused.FP8]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "fast"), FAST_OR_NOT, ids=str)
def test_against_fp64(case, fast, columns):
    p = fused.problem(case, "cuda")
    want, magnitude = fused.truth(case, p)
    if p.bias is not None:
        want, magnitude = want + p.bias.cpu().double(), magnitude + p.bias.cpu().double().abs()
    for rank in {0, case.ranks - 1}:
        out = run(arguments(case, p, rank, "cuda"), fast)
        assert out.dtype == case.out and out.shape == want.shape
        assert within(out, want, magnitude, accumulation(case, "cuda", fast)), f"rank {rank}"
        # A shard of another rank would be noticed; of one rank, another row.
        moved = case.m if case.ranks > 1 else 1
        assert not within(out.roll(moved, 0), want, magnitude, accumulation(case, "cuda", fast))


@pytest.mark.gpu
def test_sums_that_are_not_split_lose_digits():
    """Tensor cores cut what they add to a large sum; of positive numbers that shows."""
    case = Case(2, 256, 16384, 128, E4M3, scale="tensor")
    p = fused.problem(case, "cuda")
    p.a, p.b = ((t.float().abs() + 0.5).to(E4M3) for t in (p.a, p.b))
    want, magnitude = fused.truth(case, p)
    bound = accumulation(case, "cuda", fast=False)
    assert within(run(arguments(case, p, 0, "cuda"), fast=False), want, magnitude, bound)
    assert not within(run(arguments(case, p, 0, "cuda"), fast=True), want, magnitude, bound)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "fast"), FAST_OR_NOT, ids=str)
def test_the_kernel_is_exact(case, fast, columns):
    """Where no sum is rounded, every bit is the oracle's, and on every run."""
    p = fused.problem(case, "cuda", exact=True)
    args = arguments(case, p, case.ranks - 1, "cuda")
    want = oracle(args)
    for _ in range(3):
        assert_bitwise_equal("gemm_gather", run(args, fast), want)


@pytest.mark.gpu
@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", [CASES[8], CASES[11], CASES[13]], ids=str)
def test_few_clusters_do_all_tiles(case, fast, clusters, columns, monkeypatch):
    """As where others hold the device: each then takes many more tiles than it remembers."""
    monkeypatch.setattr(G, "sm_count", lambda device: 2 * clusters)
    args = arguments(case, fused.problem(case, "cuda", exact=True), 1, "cuda")
    assert_bitwise_equal("gemm_gather", run(args, fast), oracle(args))


@pytest.mark.gpu
def test_a_scale_a_row_beside_one_for_all():
    args = arguments(CASES[5], fused.problem(CASES[5], "cuda"), 0, "cuda")
    args[SCALE + 1] = args[SCALE + 1][:1]
    out = run(args)
    args[SCALE + 1] = args[SCALE + 1].expand(CASES[5].n).contiguous()
    assert_bitwise_equal("b's", out, run(args))
    args[SCALE - 1] = args[SCALE] = args[SCALE][-1:]
    out = run(args)
    args[SCALE - 1], args[SCALE] = (args[SCALE].expand(n).contiguous() for n in (CASES[5].m, 2 * CASES[5].m))
    assert_bitwise_equal("a's", out, run(args))


@pytest.mark.gpu
@pytest.mark.parametrize("epoch", fused.EPOCHS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", [CASES[2], CASES[9], Case(2, 256, 512, 256, E4M3, scale="shard")], ids=str)
def test_it_waits(case, grad, epoch, columns):
    """Shards, scales and flags come late and out of order, by a copy engine, over what an earlier epoch left."""
    if grad and case.n % 64:
        pytest.skip("refused")
    h = torch.randn(case.ranks * case.m, 2 * case.n, device="cuda").to(case.out) if grad else None
    wanted = G.Wanted("amax", h) if grad else G.NOTHING
    p = fused.problem(case, "cuda", exact=True)
    rank = case.ranks - 1
    args = arguments(case, p, rank, "cuda")
    want = oracle(args)
    gathered, ready, scale = p.a, args[READY], args[SCALE]
    shards, scales = gathered.cpu().view(case.ranks, case.m, -1), None if scale is None else scale.cpu()
    args[1] = fused.poisoned(*gathered.shape, dtype=FP32, device="cuda").to(case.a)
    args[WORD].zero_()
    ready.fill_(fused.as_int32(epoch - 1))
    if scale is not None:
        scale.fill_(float("nan"))
    G.gemm_gather(*args[:DELTA], epoch - 1, *args[DELTA + 1 :], True, wanted)  # compiled before anything waits
    torch.cuda.synchronize()
    late = Late()
    for source in reversed(following(rank, case.ranks)):
        if scale is not None and case.scale != "tensor":
            late.copy(scale.view(case.ranks, -1)[source], scales.view(case.ranks, -1)[source])
        late.copy(args[1].view(case.ranks, case.m, -1)[source], shards[source])
        late.copy(ready[source, :1], fused.as_int32(epoch))
    late.start()
    got, made = G.gemm_gather(*args[:DELTA], epoch, *args[DELTA + 1 :], True, wanted)
    early = torch.cuda.Event()
    early.record()
    assert not early.query(), "it ended before the last flag"
    fused.finish(args[ABORT])
    assert_bitwise_equal("gemm_gather", got, want)
    assert not grad or made.amax.amax() == amax(dact(want, h, Activation.of("swiglu"))).amax()


@pytest.mark.gpu
def test_abort_ends_the_wait():
    args = arguments(CASES[2], fused.problem(CASES[2], "cuda"), 0, "cuda")
    run(args)
    args[READY].zero_()
    stop = Late().copy(args[ABORT], 1)
    G.gemm_gather(*args)
    ended = torch.cuda.Event()
    ended.record()
    assert not fused.finished_within(0.05, ended)
    stop.start(0.0)
    assert fused.finished_within(fused.PATIENCE_S, ended)
    assert not args[COUNTERS].any()


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
    with pytest.raises(ValueError, match="N=263.*multiple of 8"):
        G.gemm_gather(*args[:2], args[2][:263], *args[3:])
    with pytest.raises(ValueError, match="float32.*bf16 or fp16; take a ring"):
        G.gemm_gather(*args[:-1], FP32)
    with pytest.raises(ValueError, match=r"\[260, 68\].*row a multiple of 16 bytes"):
        G.gemm_gather(args[0], args[1][:, :68].contiguous(), args[2][:, :68].contiguous(), *args[3:])
    nine = arguments(Case(9, 7, 64, 48), fused.problem(Case(9, 7, 64, 48), "cpu"), 0, "cpu")
    with pytest.raises(ValueError, match="9 ranks.*at most 8"):
        G.gemm_gather(*nine)
    shards = arguments(CASES[12], fused.problem(CASES[12], "cpu"), 0, "cpu")
    shards[SCALE + 1] = torch.ones(CASES[12].n)
    with pytest.raises(ValueError, match="a scale a shard.*ring"):
        G.gemm_gather(*shards)


def test_operands_that_the_kernels_refuse():
    p = fused.problem(CASES[1], "cpu")
    turned = p.b[:260].t().contiguous().t()
    with pytest.raises(ValueError, match=r"b \[260, 72\] has strides \(1, 260\).*multiple of 16 bytes"):
        G.fused.check("a gather", p.a, turned, 130, 2)
    fp8 = fused.problem(Case(2, 128, 64, 64, E4M3, scale="tensor", turned=True), "cpu")
    with pytest.raises(ValueError, match=r"contiguous"):
        G.fused.check("a gather", fp8.a, fp8.b, 128, 2)
    with pytest.raises(ValueError, match="scales of a.*so many elements"):
        G.fused.scale_kinds(torch.ones(3), torch.ones(1), 260, 264, 2)
    with pytest.raises(ValueError, match="scales of b: None.*both or none"):
        G.fused.scale_kinds(torch.ones(1), None, 260, 264, 2)
