"""Fused epilogues on one GPU: modules against the oracle, streams, graphs."""

import copy

import pytest
import torch

import te_lite as te
from te_lite.overlap import one_rank
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import build, check, step, under
from tests.overlap.one_rank import Launches
from tests.overlap.test_one_rank import BOTH, PLAIN, WANTS
from tests.reference import LN_MLP, Spec

pytestmark = pytest.mark.gpu
K, FFN = 256, 704  # tiles that end beyond h


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setenv("TE_LITE_EPILOGUES", "1")
    return Launches(monkeypatch, cuda=True)


@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize("m", [16, 300, 1003, 1104])
@pytest.mark.parametrize("recipe", WANTS)
def test_matches_oracle(recipe, m, recompute, launches):
    check(PLAIN, recipe, device="cuda", m=m, k=K, ffn=FFN, recompute_activation=recompute)
    ragged = recipe == "delayed" and m % 16
    assert launches.wants == ([] if ragged else BOTH[recipe] * (2 if recipe == "delayed" else 1))


@pytest.mark.parametrize("recipe", WANTS)
@pytest.mark.parametrize("options", [{"bias": True}, {"activation": "glu"}, {"activation": "clamped_swiglu"}], ids=str)
def test_other_modules_match_oracle(options, recipe, launches):
    spec = Spec(LN_MLP, **{"activation": "swiglu", "bias": False} | options)
    check(spec, recipe, device="cuda", m=304, k=K, ffn=FFN)
    assert launches.wants[0] == (WANTS[recipe], False)


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_fp16_matches_oracle(recipe, launches):
    check(PLAIN, recipe, dtype=torch.float16, device="cuda", m=304, k=K, ffn=FFN)
    assert launches.wants == BOTH[recipe]


@torch.enable_grad()
def modules(n, recipe):
    """n modules with weights of their own, that have run."""
    made = []
    for i in range(n):
        p = reference.make_parameters(PLAIN, K, 0, FFN, seed=i, dtype=torch.bfloat16)
        made.append(build(PLAIN, K, ffn=FFN, device="cuda", parameters=p))
        step(made[-1], tokens(0), tokens(1), recipe)
    return made


def tokens(seed):
    return reference.make_tokens(1104, K, seed=seed, dtype=torch.bfloat16).cuda()


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_streams_have_counters_of_their_own(recipe, launches):
    made, x = modules(4, recipe), tokens(2)
    want = [run(module, x, recipe) for module in made]
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for module, stream in zip(made, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run(module, x, recipe))
    torch.cuda.synchronize()
    for i, out in enumerate(got):
        assert_bitwise_equal(f"call {i}", out, want[i % len(made)])
    keys = {(0, stream.cuda_stream) for stream in streams}
    assert keys <= one_rank._WORDS.keys() and not any(words.any() for words in one_rank._WORDS.values())


def run(module, x, recipe):
    with under(recipe):
        return module(x)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_graphs_replay_beside_each_other(recipe, launches):
    """Captured on one stream, replayed on two at once, beside calls on a third."""
    made, x = modules(3, recipe), tokens(2)
    want = [run(module, x, recipe) for module in made]
    graphs, outs, launches.wants[:] = [torch.cuda.CUDAGraph() for _ in made[1:]], [], []
    for graph, module in zip(graphs, made[1:], strict=True):
        with torch.cuda.graph(graph):
            outs.append(run(module, x, recipe))
    assert launches.wants == 2 * BOTH[recipe][:1]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        mine = run(made[0], x, recipe)
        torch.cuda.synchronize()
        for i, out in enumerate([mine, *outs]):
            assert_bitwise_equal(f"module {i}", out, want[i])


@pytest.mark.parametrize("recipe", WANTS)
def test_steps_in_graphs(recipe, launches):
    """te.make_graphed_callables: forward and backward, replayed, with the bits of steps without."""
    (plain,), x, dy = modules(1, recipe), tokens(2), tokens(3)
    twin, value = copy.deepcopy(plain), None if recipe == "bf16" else te.recipe.from_name(recipe)
    graphed = te.make_graphed_callables(plain, (x.clone().requires_grad_(),), recipe=value)
    for i in range(4):
        got, want = (step(module, x * 2.0**i, dy, recipe) for module in (graphed, twin))
        for name in want:
            assert_bitwise_equal(f"step {i} {name}", got[name], want[name])


@pytest.mark.parametrize("recipe", WANTS)
def test_small_layers_run_without_recordings(recipe, launches):
    (module,) = modules(1, recipe)
    for i in range(5):
        step(module, tokens(i), tokens(i + 1), recipe)
    known = module._planned[1][0].recordings._known.values()
    assert known and all(isinstance(one, int) for one in known) and len(launches.wants) == 12
