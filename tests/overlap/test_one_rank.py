"""A GEMM with its epilogue in one launch on one rank: where it is chosen, and that nothing but its time changes."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_lite as te
from te_lite.functional.recordings import MOST_FLOPS
from te_lite.modules.weights import join
from te_lite.ops import gemm_fused
from te_lite.ops.recorder import Recorder
from te_lite.overlap import one_rank
from te_lite.overlap.one_rank import ANYWHERE, FusedProduct, Span
from te_lite.quantize.identity import Identity
from te_lite.quantize.per_tensor import FORMATS, Current
from te_lite.quantize.quantizer import GemmQuantizers
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import RECIPES, build, delayed_state, leaf, step, under
from tests.overlap.one_rank import Launches, force
from tests.reference import LN_MLP, Spec

K, FFN = 64, 128
PLAIN = Spec(LN_MLP, "RMSNorm", activation="swiglu", bias=False)
WANTS = {"bf16": "high precision", "current": "amax", "delayed": "fp8"}
BOTH = {recipe: [(want, False), (want, True)] for recipe, want in WANTS.items()}


def parameters(spec=PLAIN, k=K, ffn=FFN, dtype=torch.bfloat16):
    return reference.make_parameters(spec, k, 0, ffn, dtype=dtype)


def tokens(m, k=K, seed=1, dtype=torch.bfloat16):
    return reference.make_tokens(m, k, seed=seed, dtype=dtype)


def results(monkeypatch, word, recipe, m, spec=PLAIN, steps=3, **options):
    """(what each step gives, what the kernel was asked for in the last one) of a module, on a CPU."""
    with monkeypatch.context() as patch:
        force(patch, word)
        launches = Launches(patch)
        module = build(spec, K, ffn=FFN, parameters=parameters(spec), **options)
        found = []
        for i in range(steps):
            launches.wants.clear()
            found.append(step(module, tokens(m, seed=i), tokens(m, seed=i + 9), recipe) | delayed_state(module))
        return found, launches.wants, module


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_are_those_of_a_product_and_a_pass(recipe, recompute, monkeypatch):
    """Of outputs, gradients, scales and histories, whatever is kept for backward."""
    want, none, _ = results(monkeypatch, "0", recipe, 48, recompute_activation=recompute)
    got, asked, module = results(monkeypatch, "1", recipe, 48, recompute_activation=recompute)
    assert none == [] and asked == BOTH.get(recipe, [])
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            assert_bitwise_equal(name, a[name], b[name])


CASES = {  # options of a module, and what the kernel is asked for then, by recipe
    "a bias": ({"spec": Spec(LN_MLP, activation="swiglu")}, {r: BOTH[r][:1] for r in WANTS}),
    "another glu": ({"spec": Spec(LN_MLP, activation="glu", bias=False)}, BOTH),
    "no activation of the kernel's": ({"spec": Spec(LN_MLP, activation="geglu", bias=False)}, {}),
    "late wgrad": ({"delay_wgrad_compute": True}, BOTH),
    "other tokens": ({"m": 40}, BOTH | {"delayed": []}),  # no multiple of 16
    "no tokens": ({"m": 0}, {}),
    "fp32": ({"dtype": torch.float32}, {}),
}


@pytest.mark.parametrize("recipe", WANTS)
@pytest.mark.parametrize("case", CASES)
def test_what_the_kernel_is_asked_for(case, recipe, monkeypatch):
    options, asked = CASES[case]
    given = {"spec": PLAIN, "m": 32, "dtype": torch.bfloat16} | options
    spec, m, dtype = (given.pop(name) for name in ("spec", "m", "dtype"))
    force(monkeypatch)
    launches = Launches(monkeypatch)
    module = build(spec, K, ffn=FFN, parameters=parameters(spec, dtype=dtype), dtype=dtype, **given)
    step(module, tokens(m, dtype=dtype), tokens(m, seed=3, dtype=dtype), recipe)
    assert launches.wants == asked.get(recipe, [])


FROZEN = {  # parameters without a gradient, and what the kernel is asked for then
    "fc2_weight": BOTH,
    "fc1_weight": BOTH | {"delayed": [("fp8", False)]},  # of h's gradient only rows
}


@pytest.mark.parametrize("recipe", WANTS)
@pytest.mark.parametrize("name", FROZEN)
def test_layouts_that_nobody_reads_are_not_asked_for(name, recipe, monkeypatch):
    force(monkeypatch)
    launches = Launches(monkeypatch)
    module = build(PLAIN, K, ffn=FFN, parameters=parameters())
    getattr(module, name).requires_grad_(False)
    step(module, tokens(32), tokens(32, seed=3), recipe)
    assert launches.wants == FROZEN[name][recipe]


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("recipe", WANTS)
@pytest.mark.parametrize("name", FROZEN)
def test_backward_decides_as_forward_did_where_one_weight_alone_is_asked_for(name, recipe, recompute, monkeypatch):
    """What forward kept is what backward reads: it knew of no weight that nobody would ask for."""
    force(monkeypatch)
    Launches(monkeypatch)
    options = {"fuse_wgrad_accumulation": True, "recompute_activation": recompute}
    module = build(PLAIN, K, ffn=FFN, parameters=parameters(), **options)
    weights = {each: getattr(module, each) for each in FROZEN}
    for weight in weights.values():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False

    def sums():
        found = {each: weight.main_grad.clone() for each, weight in weights.items()}
        for weight in weights.values():
            weight.main_grad.zero_()
        return found

    with under(recipe):
        out = module(leaf(tokens(32)))
        out.backward(tokens(32, seed=3))
        want = sums()
    module.set_extra_state(None)  # the scales of a first step
    with under(recipe):
        out = module(leaf(tokens(32)))
        torch.autograd.grad(out, weights[name], tokens(32, seed=3))
    for each, got in sums().items():
        assert_bitwise_equal(each, got, want[each] if each == name else torch.zeros_like(got))


def keeps_activation(module, k, recipe):
    """Whether forward keeps activation(h) for backward, of 32 tokens."""
    with under(recipe):
        out = module(leaf(tokens(32, k)))
    return any(t.shape in ((32, FFN), (FFN, 32)) for t in out.grad_fn.saved_tensors)


@pytest.mark.parametrize("recipe", WANTS)
@pytest.mark.parametrize("k, cheap", [(64, False), (8192, True)])
def test_what_is_kept_for_backward(k, cheap, recipe, monkeypatch):
    """Where the kernel makes h's gradient no read of h is left that would give activation(h) too, so it is kept. In
    bf16 not where a read of its own costs little. Under current scaling the kernel leaves that read."""
    force(monkeypatch)
    for word in ("0", "1"):
        again = cheap if recipe == "bf16" else not (recipe == "delayed" and word == "1")
        monkeypatch.setenv("TE_LITE_EPILOGUES", word)
        module = te.LayerNormMLP(k, FFN, activation="swiglu", bias=False, params_dtype=torch.bfloat16, device="cpu")
        assert keeps_activation(module, k, recipe) == (not again)


class Joined(te.LayerNormMLP):
    """fc1_weight is a copy of parameters, as te.fuse has it where they do not lie together."""

    fc1_weight = property(lambda self: join((self.gate, self.up)))

    def _begin(self, *given):
        return super()._begin(*given, (self.gate, self.up))


def test_backward_decides_as_forward_did_of_a_joined_weight(monkeypatch):
    """Of which it has the parts alone: half the columns, for which the kernel would not be asked."""
    m = 48
    want, *_ = results(monkeypatch, "0", "delayed", m)
    monkeypatch.setitem(one_rank._BY_WORD, "1", {("fp8", False): Span(least=m * 2 * FFN * K)})
    force(monkeypatch)
    launches = Launches(monkeypatch)
    module = build(PLAIN, K, ffn=FFN, parameters=parameters())
    gate, up = module._parameters.pop("fc1_weight").detach().chunk(2)
    module.gate, module.up = torch.nn.Parameter(gate.clone()), torch.nn.Parameter(up.clone())
    module.__class__ = Joined
    for i, expected in enumerate(want):
        got = step(module, tokens(m, seed=i), tokens(m, seed=i + 9), "delayed")
        got["fc1_weight"] = torch.cat((got.pop("gate"), got.pop("up")))
        for name in got:
            assert_bitwise_equal(name, got[name], expected[name])
    assert launches.wants == [("fp8", False)] * len(want)


def test_by_default_small_layers_run_as_on_a_cpu(monkeypatch):
    """The table begins with products that no recording holds."""
    assert all(2 * span.least > MOST_FLOPS for span in one_rank.FASTER.values())
    force(monkeypatch, "")
    launches = Launches(monkeypatch)
    step(build(PLAIN, K, ffn=FFN, parameters=parameters()), tokens(32), tokens(32, seed=3), "delayed")
    assert launches.wants == []


def test_other_words_are_refused(monkeypatch):
    monkeypatch.setenv("TE_LITE_EPILOGUES", "always")
    with pytest.raises(ValueError, match="TE_LITE_EPILOGUES='always'.*0 or 1; leave it out"):
        step(build(PLAIN, K, ffn=FFN), tokens(32), None)


def test_where_it_measured_faster():
    """By work and depth, of just that kind of product, in formats that the kernel multiplies."""
    plain, fp8 = Identity(), Current(FORMATS[torch.float8_e4m3fn])
    spans = {("amax", True): Span(1 << 20, 256)}
    grad = FusedProduct(spans, GemmQuantizers(fp8, fp8), True)
    assert grad("amax", 64, 64, 256) == "amax"
    assert grad("amax", 63, 64, 256) == grad("amax", 64, 64, 257) == grad("fp8", 64, 64, 256) == ""
    assert grad("amax", 64, 96, 256) == ""  # columns that the kernel refuses
    assert FusedProduct(spans, GemmQuantizers(fp8, fp8), False)("amax", 64, 64, 256) == ""
    assert FusedProduct(spans, GemmQuantizers(fp8, plain), True)("amax", 64, 64, 256) == ""
    split, fast = (FusedProduct(ANYWHERE, GemmQuantizers(fp8, fp8, fast), False) for fast in (False, True))
    assert split("amax", 64, 64, 64) == "" and fast("amax", 64, 64, 64) == "amax"


WORK = 32 * K * FFN  # M * N * K of fc2's dgrad of 32 tokens; fc1's fprop has twice as much


@pytest.mark.parametrize("least, deepest, asked", [
    (WORK, K, [False, True]), (WORK + 1, K, [False]), (2 * WORK + 1, K, []), (1, K - 1, []),
])  # fmt: skip
def test_a_module_asks_by_its_products(least, deepest, asked, monkeypatch):
    force(monkeypatch, "")
    monkeypatch.setitem(one_rank._BY_WORD, "", {("amax", grad): Span(least, deepest) for grad in (False, True)})
    launches = Launches(monkeypatch)
    step(build(PLAIN, K, ffn=FFN, parameters=parameters()), tokens(32), tokens(32, seed=3), "current")
    assert launches.wants == [("amax", grad) for grad in asked]


def test_it_is_off_under_torch_compile(monkeypatch):
    force(monkeypatch)
    launches = Launches(monkeypatch)
    module = build(PLAIN, K, ffn=FFN, parameters=parameters())
    torch.compile(module, backend="aot_eager")(tokens(32)).sum().backward()
    assert launches.wants == []
    module(tokens(32))
    assert launches.wants == [("high precision", False)]


def test_tensors_without_data_reach_no_kernel(monkeypatch):
    """Fake ones say that they lie on a GPU."""
    force(monkeypatch)
    launches = Launches(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode(), torch.no_grad():
        made = te.LayerNormMLP(K, FFN, activation="swiglu", bias=False, params_dtype=torch.bfloat16, device="cuda:0")
        assert made(torch.empty(32, K, dtype=torch.bfloat16, device="cuda:0")).shape == (32, K)
    assert launches.wants == []


def test_a_launch_is_not_recorded(monkeypatch):
    """A body that makes one runs as it is."""
    launched = SimpleNamespace(launch=lambda *_: None)
    monkeypatch.setattr(gemm_fused, "_loaded", lambda index, kind: launched)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    kind = gemm_fused.Kind(True, torch.bfloat16, torch.bfloat16, "none", torch.bfloat16, 1, False, 256)
    a, words = torch.randn(8, 8), torch.zeros(2, dtype=torch.int32)
    numbers = dict.fromkeys(("delta", "m", "n", "k", "rank", "flags", "pairs", "columns", "scales"), 1)
    given = gemm_fused.Arguments(
        ready=words, counters=words, word=words, abort=words, a_scale=None, b_scale=None, bias=None, **numbers
    )
    recorder = Recorder([a])
    recorder.run(lambda: gemm_fused.launch(kind, 1, given, a=a, b=a, other=a, to=[0]))
    assert "took no turn" in recorder.why_not and recorder.finish([a]) is None
