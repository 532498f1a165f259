"""te.scaled_grouped_mm: every group as a te.Linear of its own, on the CPU and on a GPU, under every recipe."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor

import te_lite as te
from te_lite.quantize.grouped import Rule, rule_of
from te_lite.quantize.quantizer import Site, operands_for
from te_lite.testing.numerics import assert_bound_bites, assert_close_to_oracle
from tests.ops.grouped import RAGGED, offs_of
from tests.ops.paths import DEVICES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = [name for name in te.recipe.available() if name not in ("delayed", "tensorwise")]
K, N = 144, 48
NAMES = ("y", "dx", "dw", "dbias")


def problem(sizes, rest=0, k=K, n=N, dtype=BF16, seed=0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias, dy; experts and tokens of unlike size. Rows in no group are nan."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        size = torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator))
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    tokens, groups = sum(sizes) + rest, len(sizes)
    x, w, bias = made(tokens, k), made(groups, n, k) * 0.1, made(groups, n)
    dy = made(tokens, n) * 0.1  # fp16 holds sums of such
    x[sum(sizes) :] = dy[sum(sizes) :] = float("nan")
    return x, w, bias, dy


def grouped(x, w, bias, dy, offs, recipe, device="cpu") -> tuple[Tensor, ...]:
    x, w, bias = (None if t is None else t.detach().clone().to(device).requires_grad_() for t in (x, w, bias))
    y = te.scaled_grouped_mm(x, w.mT, offs.to(device), recipe=recipe, bias=bias)
    y.backward(dy.to(device))
    return tuple(t.detach().cpu() for t in (y, x.grad, w.grad, *(() if bias is None else (bias.grad,))))


def exact(x, w, bias, dy, sizes) -> tuple[Tensor, ...]:
    """The same in fp64, unquantized."""
    x, w, dy = x.double(), w.double(), dy.double()
    y, dx, dw, db = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w), torch.zeros(w.shape[:2]).double()
    first = 0
    for g, size in enumerate(sizes):
        rows = slice(first, first + size)
        y[rows], dx[rows], dw[g] = x[rows] @ w[g].t(), dy[rows] @ w[g], dy[rows].t() @ x[rows]
        db[g], first = dy[rows].sum(0), first + size
        if bias is not None:
            y[rows] += bias[g].double()
    return (y, dx, dw) if bias is None else (y, dx, dw, db)


def linears(x, w, bias, dy, sizes, recipe) -> tuple[Tensor, ...]:
    """By a te.Linear a group, on the CPU."""
    y, dx, dw, db = (
        torch.zeros_like(dy),
        torch.zeros_like(x),
        torch.zeros_like(w),
        torch.zeros(w.shape[:2], dtype=w.dtype),
    )
    first = 0
    for g, size in enumerate(sizes):
        rows = slice(first, first + size)
        linear = te.Linear(w.shape[2], w.shape[1], bias=bias is not None, params_dtype=w.dtype, device="cpu")
        with torch.no_grad():
            linear.weight.copy_(w[g])
            if bias is not None:
                linear.bias.copy_(bias[g])
        part = x[rows].clone().requires_grad_()
        with te.autocast(recipe=recipe):
            out = linear(part)
        out.backward(dy[rows])
        y[rows], dx[rows], dw[g], first = out.detach(), part.grad, linear.weight.grad, first + size
        if bias is not None:
            db[g] = linear.bias.grad
    return (y, dx, dw) if bias is None else (y, dx, dw, db)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", RAGGED)
def test_a_linear_for_each_group(case, recipe, device):
    sizes, rest = RAGGED[case]
    x, w, bias, dy = problem(sizes, rest)
    got = grouped(x, w, bias, dy, offs_of(sizes), recipe, device)
    low, truth = linears(x, w, bias, dy, sizes, recipe), exact(x, w, bias, dy, sizes)
    for name, out, want, honest in zip(NAMES, got, truth, low, strict=True):
        assert_close_to_oracle(f"{name} {case}", out, want, honest)
    assert (got[0][sum(sizes) :] == 0).all() and (got[1][sum(sizes) :] == 0).all(), "in no group: zero"
    for g, size in enumerate(sizes):
        assert size or not got[2][g].any(), "of no tokens: zero"


@pytest.mark.parametrize("device", DEVICES)
def test_odd_widths(device):
    """torch pads rows of 546 bytes to 16: tokens of no group must be filled where they lie."""
    sizes, rest = (15, 117, 0, 129), 5
    x, w, _, dy = problem(sizes, rest, 136, 273)
    got = grouped(x, w, None, dy, offs_of(sizes), "bf16", device)
    low, truth = linears(x, w, None, dy, sizes, "bf16"), exact(x, w, None, dy, sizes)
    for name, out, want, honest in zip(NAMES, got, truth, low, strict=False):
        assert_close_to_oracle(name, out, want, honest)
    assert (got[0][sum(sizes) :] == 0).all() and got[0].is_contiguous()


def test_the_bound_bites():
    """One group's rows, or one expert's gradient, taken for another's."""
    sizes, rest = RAGGED["whole tiles"]
    given = problem(sizes, rest)
    got = grouped(*given, offs_of(sizes), "rowwise")
    low, truth = linears(*given, sizes, "rowwise"), exact(*given, sizes)
    for i, name in enumerate(NAMES):
        assert_bound_bites(name, got[i], truth[i], low[i], lambda t: t.roll(1, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_second_form_is_the_weight_gradient(recipe, device):
    sizes, rest = RAGGED["empty, one token, unaligned"]
    x, w, _, dy = problem(sizes, rest)
    dw = grouped(x, w, None, dy, offs_of(sizes), recipe, device)[2]
    with torch.no_grad():
        got = te.scaled_grouped_mm(dy.mT.to(device), x.to(device), offs_of(sizes, device), recipe=recipe)
    assert torch.equal(got.cpu(), dw)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        te.scaled_grouped_mm(dy.mT, x.requires_grad_(), offs_of(sizes), recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rule_says_what_the_quantizers_of_a_linear_do(recipe):
    """The same scales, types and ways to accumulate: of the recipe's defaults, and of others where it has any."""
    made = te.recipe.from_name(recipe)
    params = te.recipe.QParams(power_2_scale=True, amax_epsilon=0.5)
    others = {"current": {"fp8_quant_bwd_grad": params, "fp8_format": te.recipe.Format.E4M3,
                          "fp8_gemm_dgrad": te.recipe.MMParams(False)},
              "blockwise": {"fp8_quant_fwd_weight": params, "use_f32_scales": True},
              "rowwise": {"use_power_2_scales": False}}  # fmt: skip
    for one in (made, type(made)(**others.get(recipe, {})) if recipe in others else made):
        rule = rule_of(one)
        operands = operands_for(one, Site(0, BF16, te.parallel.TensorParallel(), lambda way: None, None))
        gemms = operands.fprop, operands.dgrad, operands.wgrad
        assert rule.fast == tuple(gemm.fast_accum for gemm in gemms)
        quantizers = {"x": operands.fprop.a, "w": operands.fprop.b, "dy": operands.dgrad.a}
        for name, quantizer in quantizers.items():
            scaling = getattr(rule, name)
            if rule.kind in ("group", "rows", "blocks"):
                assert scaling.pow2 == quantizer.pow2 and scaling.eps == getattr(quantizer, "eps", 0.0), name
            if rule.kind == "group":
                assert quantizer.format.dtype == (rule.backward if name == "dy" else rule.forward)
        assert rule.hp_wgrad == (not operands.wgrad.a.format.label and rule != Rule())


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_other_types(device, dtype):
    sizes, rest = RAGGED["empty, one token, unaligned"]
    for recipe in ("bf16", "rowwise", "mxfp8"):
        given = problem(sizes, rest, dtype=dtype)
        got, low = grouped(*given, offs_of(sizes), recipe, device), linears(*given, sizes, recipe)
        for name, out, want, honest in zip(NAMES, got, exact(*given, sizes), low, strict=True):
            assert out.dtype == dtype
            assert_close_to_oracle(f"{name} {recipe}", out, want, honest)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_random_cases(part):
    """250 of 2,000 random problems: a GPU against fp64, with the CPU's oracle as the honest low-precision result."""
    for number in range(part * 250, (part + 1) * 250):
        chance = random.Random(number)
        groups = chance.choice([1, 2, 3, 8, 17])
        sizes = tuple(chance.choice([0, 1, 15, 16, 127, 128, 129, chance.randrange(300)]) for _ in range(groups))
        recipe, dtype = chance.choice(RECIPES), chance.choice([BF16, BF16, FP16, FP32])
        step = 1 if recipe == "bf16" else 16
        k, n = (max(step, chance.randrange(400) // step * step) for _ in range(2))
        rest, has_bias = chance.choice([0, 0, 5, 200]), chance.random() < 0.3
        print(f"seed {number}: {sizes} + {rest}, {recipe}, {dtype}, K {k}, N {n}, bias {has_bias}")
        x, w, bias, dy = problem(sizes, rest, k, n, dtype, number)
        given = x, w, bias if has_bias else None, dy
        got, low = (grouped(*given, offs_of(sizes), recipe, device) for device in ("cuda", "cpu"))
        for name, out, want, honest in zip(NAMES, got, exact(*given, sizes), low, strict=False):
            assert_close_to_oracle(f"seed {number}: {name}", out, want, honest)


def run(function, x, w, bias, dy, offs) -> list[Tensor]:
    for t in (x, w, bias):
        t.grad = None
    y = function(x * 1.0, offs)
    y.backward(dy)
    return [y.detach(), x.grad, w.grad, bias.grad]


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_traced_whole(device):
    """Other offsets and other sizes need no other trace, another autocast does; the numbers stay the same."""
    sizes, rest = RAGGED["empty, one token, unaligned"]
    x, w, bias, dy = (t.to(device) for t in problem(sizes, rest))
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    torch._dynamo.reset()

    def function(x, offs):
        return te.scaled_grouped_mm(x, w.mT, offs, bias=bias)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for recipe in ("bf16", "rowwise", "current", "mxfp8", "blockwise", "rowwise_with_gw_hp", "rowwise"):
        with te.autocast(recipe=recipe):
            for one in (sizes, (100, 30, 3, 3)):
                offs = offs_of(one, device)
                want, got = (run(f, *leaves, dy, offs) for f in (function, compiled))
                for a, b in zip(want, got, strict=True):
                    assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    torch._dynamo.reset()


def test_traced_under_torchs_autocast():
    """As in eager mode: x may come from a linear in 16 bits, beside weights in fp32."""
    w, offs = torch.randn(2, 48, 32, requires_grad=True), torch.tensor([3, 8], dtype=torch.int32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: te.scaled_grouped_mm(x, w.mT, offs, recipe="rowwise"), backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want, got = te.scaled_grouped_mm(x, w.mT, offs, recipe="rowwise"), compiled(x)
        assert got.dtype == torch.bfloat16 and torch.equal(got, want)
        grads = [torch.autograd.grad(y.float().square().sum(), (x, w)) for y in (want, got)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    torch._dynamo.reset()


def test_statistics_say_that_groups_are_left_out():
    x, w, offs = torch.randn(5, 16), torch.randn(2, 16, 16), torch.tensor([2, 5], dtype=torch.int32)
    module = te.GroupedLinear(2, 16, 16, device="cpu")
    for name, call in (
        ("te.scaled_grouped_mm", lambda: te.scaled_grouped_mm(x, w, offs)),
        ("GroupedLinear", lambda: module(x, [2, 3])),
    ):
        with te.collect_statistics(), te.autocast(recipe="current"):
            with pytest.warns(UserWarning, match=rf"collect_statistics leaves out {name}"):
                call()


def test_a_bias_of_another_kind_is_refused():
    x, w, offs = torch.randn(5, 16), torch.randn(2, 16, 16), torch.tensor([2, 5], dtype=torch.int32)
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(TypeError, match="must be bfloat16, float16 or float32"):
            te.scaled_grouped_mm(x, w, offs, bias=torch.ones(2, 16, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_replays_with_other_offsets(recipe):
    """And the host waits for nothing."""
    sizes, rest = (40, 0, 90, 6), 4
    x, w, bias, dy = (t.cuda() for t in problem(sizes, rest))
    x[136:] = 1.0
    leaves, offs = [t.requires_grad_() for t in (x, w, bias)], offs_of(sizes, "cuda")

    def step():
        y = te.scaled_grouped_mm(x, w.mT, offs, recipe=recipe, bias=bias)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for other in ((40, 0, 90, 6), (0, 136, 0, 0), (1, 1, 1, 1)):
        offs.copy_(offs_of(other, "cuda"))
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        replayed = [t.clone() for t in results]
        for a, b in zip(step(), replayed, strict=True):
            assert torch.equal(torch.nan_to_num(a, nan=3e4), torch.nan_to_num(b, nan=3e4)), other


@pytest.mark.gpu
def test_invalid_ends_give_nan_on_a_gpu():
    x, w, bias, dy = problem((8, 8))
    y, dx, *_ = grouped(x, w, bias, dy, torch.tensor([12, 4], dtype=torch.int32), "rowwise", "cuda")
    assert y.isnan().all() and dx.isnan().all()


def test_what_is_refused():
    x, w, bias, _ = problem((8, 8))
    offs = offs_of((8, 8))
    cases = [
        ((x, w, offs), {}, ValueError, "pass weights.mT"),
        ((x, w.mT.float(), offs), {}, TypeError, "cast or move one"),
        ((x[0], w.mT, offs), {}, TypeError, "must be tensors"),
        ((x, w.mT, offs.long()), {}, ValueError, r"must be int32 \[2\]"),
        ((x, w.mT, offs[:1]), {}, ValueError, r"must be int32 \[2\]"),
        ((x, w.mT, torch.tensor([9, 8], dtype=torch.int32)), {}, ValueError, "none below the one before"),
        ((x, w.mT, torch.tensor([8, 17], dtype=torch.int32)), {}, ValueError, "none beyond the rows"),
        ((x, w.mT, offs), {"bias": bias[0]}, ValueError, r"\[G, N\]"),
        ((x, w.mT, offs), {"recipe": "delayed"}, ValueError, "te.GroupedLinear"),
        ((x, w.mT, offs), {"recipe": te.recipe.CustomRecipe(qfactory=print)}, NotImplementedError, "know no groups"),
    ]
    for arguments, more, error, text in cases:
        with pytest.raises(error, match=text):
            te.scaled_grouped_mm(*arguments, **more)
    with pytest.warns(UserWarning, match="features are not multiples of 16"):
        x, w, bias, dy = problem((8, 8), k=40)
        got = grouped(x, w, bias, dy, offs, "rowwise")
    assert all(torch.equal(a, b) for a, b in zip(got, grouped(x, w, bias, dy, offs, "bf16"), strict=True))


def test_checkpoints_and_amp():
    """A recomputed call follows the recipe of its first run, whoever recomputes it; torch.amp casts."""
    from torch.utils.checkpoint import checkpoint

    sizes = (5, 0, 11)
    x, w, bias, dy = problem(sizes)
    want = grouped(x, w, bias, dy, offs_of(sizes), "rowwise")
    for through in (te.checkpoint, partial(checkpoint, use_reentrant=False)):
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]

        def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
            return te.scaled_grouped_mm(x, w.mT, offs_of(sizes), bias=bias)

        with te.autocast(recipe="rowwise"):
            y = through(function, *leaves)
        y.backward(dy)
        for a, b in zip(want, (y.detach(), *(t.grad for t in leaves)), strict=True):
            assert torch.equal(a, b)
    with torch.amp.autocast("cpu", dtype=BF16):
        y = te.scaled_grouped_mm(x.float(), w.float().mT, offs_of(sizes), recipe="rowwise", bias=bias)
    assert torch.equal(y, want[0])
