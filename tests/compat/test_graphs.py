"""te.make_graphed_callables against the same modules run eagerly, bit for bit."""

import copy
from unittest import mock

import pytest
import torch

import te_lite as te
from te_lite.quantize.delayed import Pool
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.graphing import BF16, DELAYED, DEVICES, K, agree, draw, graphed, make, scales, step
from tests.harness import RECIPES, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP

KINDS = (LINEAR, LN_LINEAR, LN_MLP)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_of_every_module_and_recipe(kind, recipe, device):
    plain = make(kind, device)
    twin = copy.deepcopy(plain)
    assert graphed(plain, recipe, device) is plain
    for seed in range(5):
        agree(f"step {seed}", step([plain], recipe, seed, device), step([twin], recipe, seed, device))
    assert bool(scales(plain)[0][1]) == (recipe == "delayed")


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_quantized_parameters_that_are_written_to(recipe, device):
    with te.quantized_model_init(True, recipe):
        plain = make(LN_MLP, device)
    twin = copy.deepcopy(plain)
    graphed(plain, recipe, device)
    for seed in range(3):
        agree(f"step {seed}", step([plain], recipe, seed, device), step([twin], recipe, seed, device))
        with torch.no_grad():
            for p, q in zip(plain.parameters(), twin.parameters(), strict=True):
                value = torch.randn(p.shape)
                p.copy_(value)
                q.copy_(value)


def test_a_checkpoint_inside(device):
    plain = make(LN_MLP, device, checkpoint=True)
    twin = copy.deepcopy(plain)
    graphed(plain, DELAYED, device)
    for seed in range(3):
        agree(f"step {seed}", step([plain], DELAYED, seed, device), step([twin], DELAYED, seed, device))


@pytest.mark.parametrize("trained", [False, True])
def test_several_modules_in_one_autocast_take_one_step(trained, device):
    """Two of three are graphed. Among them those that never ran, or had taken steps."""
    layers = [make(kind, device) for kind in (LN_LINEAR, LN_MLP, LINEAR)]
    if trained:
        for seed in range(2):
            step(layers, DELAYED, seed + 30, device)
    else:
        with torch.no_grad(), under(DELAYED):
            layers[2](draw(30, device))
    twins = copy.deepcopy(layers)
    graphed((layers[0], layers[2]), DELAYED, device)
    assert layers[2]._scales._live["forward"].pool.touched != trained, "an evaluation's amaxes wait for their step"
    if trained:
        agree(
            "no step was taken", [s for one in layers for s in scales(one)], [s for one in twins for s in scales(one)]
        )
    for seed in range(6):
        agree(f"step {seed}", step(layers, DELAYED, seed, device), step(twins, DELAYED, seed, device))
    if not trained:
        states = [layer._scales._live["forward"] for layer in layers]
        assert states[0].pool is states[2].pool is not states[1].pool, "one step is one kernel for all that is graphed"
    with mock.patch.object(Pool, "update", autospec=True, side_effect=Pool.update) as update:
        step(layers, DELAYED, 6, device)
    stepped = [call.args[0] for call in update.call_args_list]
    assert len(stepped) == len(set(stepped)) == (2 if trained else 4), "each pool once, as on the other ranks"


def test_one_sample_for_two_modules(device):
    """Each keeps its input for backward in memory of its own."""
    layers = make(LINEAR, device), make(LINEAR, device)
    twins = copy.deepcopy(layers)
    sample = draw(9, device, grad=True)
    graphed(layers, "bf16", device, ((sample,), (sample,)))
    for both in (layers, twins):
        ys = [layer(draw(i, device)) for i, layer in enumerate(both)]
        (ys[0] + ys[1]).backward(draw(2, device))
    agree("weights", [one.weight.grad for one in layers], [one.weight.grad for one in twins])


def test_a_module_called_without_autocast_takes_its_own_steps(device):
    plain = make(LN_MLP, device)
    twin = copy.deepcopy(plain)
    graphed(plain, DELAYED, device)
    for seed in range(4):
        got = step([plain], "bf16", seed, device)  # no autocast
        agree(f"step {seed}", got, step([twin], DELAYED, seed, device))
    with torch.no_grad(), under(DELAYED):
        agree("no step", [plain(draw(3, device)), *scales(plain)], [twin(draw(3, device)), *scales(twin)])


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_cached_weights_over_micro_batches(recipe, device):
    """A later micro-batch multiplies by the weights as they were quantized last, whatever they have become."""

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(make(LN_LINEAR, device), make(LN_MLP, device))

        def forward(self, x, is_first_microbatch=None):
            for layer in self.inner:
                x = layer(x, is_first_microbatch=is_first_microbatch)
            return x

    plain = Wrapped()
    twin = copy.deepcopy(plain)
    graphed(plain, recipe, device, cache_quantized_params=True)
    for seed in range(6):
        first = seed % 3 == 0
        got = step([plain], recipe, seed, device, is_first_microbatch=first)
        agree(f"micro-batch {seed}", got, step([twin], recipe, seed, device, is_first_microbatch=first))
        with torch.no_grad():
            for p, q in zip(plain.parameters(), twin.parameters(), strict=True):
                p.data.mul_(1.5)  # which leaves no trace
                q.data.mul_(1.5)
    with pytest.raises(ValueError, match="is_first_microbatch=None: .* need True"):
        plain(draw(0, device))


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_cached_weights_of_several_modules(recipe, device):
    """In a later micro-batch the first module's graph runs again, which was captured before the second one's weights
    were quantized: they must not lie where it has its temporaries."""
    layers = make(LN_MLP, device), make(LN_LINEAR, device), make(LN_MLP, device)
    twins = copy.deepcopy(layers)
    graphed(layers, recipe, device, cache_quantized_params=True)
    for seed in range(6):
        first = seed % 3 == 0
        got = step(layers, recipe, seed, device, is_first_microbatch=first)
        agree(f"micro-batch {seed}", got, step(twins, recipe, seed, device, is_first_microbatch=first))


def test_weights_are_quantized_without_touching_those_of_other_modules(device):
    """The first one's weight is joined by a copy, which is a temporary of the graph that quantizes it."""
    split = {"parameters_split": ("q", "k"), "bias": False, "device": device, "params_dtype": BF16}
    layers = tuple(te.Linear(K, K, **split) for _ in range(2))
    for layer in layers:
        layer.k_weight.data = layer.k_weight.data.clone()
    twins = copy.deepcopy(layers)
    graphed(layers, "current", device, cache_quantized_params=True)
    for seed, (which, first) in enumerate([(1, True), (0, True), (1, False), (0, False)]):
        with under("current"):
            got, want = (group[which](draw(seed, device), is_first_microbatch=first) for group in (layers, twins))
        assert_bitwise_equal(f"call {seed}", got, want)


ORDER = [1, 1, 2, 2, -2, -2, -1, -1]
INTERLEAVED = [1, 2, 1, -2, 2, -1, -2, -1]


@pytest.mark.parametrize("order", [ORDER, INTERLEAVED])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_pipeline_of_two_chunks_and_two_micro_batches(order, recipe, device):
    """Chunk 1 has two layers, chunk 2 one. Each micro-batch of each has memory of its own."""
    layers = [make(kind, device) for kind in (LN_LINEAR, LINEAR, LN_MLP)]
    twins = copy.deepcopy(layers)
    samples = tuple((draw(80 + i, device, grad=True),) for i in range(6))
    made = graphed(tuple(layers), recipe, device, samples, _order=order, _num_layers_per_chunk=[2, 1])
    of = {(0, mb): made[2 * mb : 2 * mb + 2] for mb in range(2)} | {(1, mb): made[4 + mb : 5 + mb] for mb in range(2)}
    eager = {(chunk, mb): (twins[:2], twins[2:])[chunk] for chunk in range(2) for mb in range(2)}

    def run(functions, modules, seed):
        done, kept, results = dict.fromkeys((1, 2, -1, -2), 0), {}, []
        for module in modules:
            module.zero_grad(set_to_none=True)
        for entry in order:
            chunk, mb = abs(entry) - 1, done[entry]
            done[entry] += 1
            if entry > 0:
                y = x = draw(seed + 10 * chunk + mb, device, grad=True)
                with under(recipe):
                    for function in functions[chunk, mb]:
                        y = function(y)
                kept[chunk, mb] = x, y
                results.append(y.detach().clone())
            else:
                x, y = kept.pop((chunk, mb))
                y.backward(draw(seed + 33 + 10 * chunk + mb, device))
                results.append(x.grad.clone())
        results += [p.grad.clone() for module in modules for p in module.parameters()]
        return results + [s for module in modules for s in scales(module)]

    for seed in range(0, 15, 5):
        agree(f"step {seed}", run(of, layers, seed), run(eager, twins, seed))
    assert not any("forward" in vars(layer) for layer in layers), "the modules are as they were"


def test_keyword_inputs_nests_and_what_is_no_tensor(device):
    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = make(LINEAR, device)

        def forward(self, pair, *, scale, unused):
            y = self.linear(pair["a"] * scale, residual=pair["b"])
            return {"y": y, "none": None, "twice": (y.detach() * 2,), "z": y * 3}

    plain = Many()
    twin = copy.deepcopy(plain)
    a, b, scale, unused = (draw(i, device, grad=True) for i in range(4))
    args, kwargs = ({"a": a, "b": b},), {"scale": scale, "unused": unused}
    with pytest.raises(ValueError, match="no gradient of input 3, .* allow_unused_input=True"):
        graphed(plain, "bf16", device, args, sample_kwargs=kwargs)
    graphed(plain, "bf16", device, args, sample_kwargs=kwargs, allow_unused_input=True)
    for seed in range(2):
        results = []
        for module in (plain, twin):
            ins = [draw(seed * 4 + i, device, grad=True) for i in range(4)]
            out = module({"a": ins[0], "b": ins[1]}, unused=ins[3], scale=ins[2])
            assert out["none"] is None and not out["twice"][0].requires_grad
            wanted = [out["y"], out["z"]][: 2 - seed]  # the second call leaves z without a gradient
            torch.autograd.backward(wanted, [draw(60, device), draw(61, device)][: 2 - seed])
            assert ins[3].grad is None
            results.append([out["y"].detach().clone(), out["twice"][0].clone(), *(t.grad.clone() for t in ins[:3])])
        agree(f"call {seed}", *results)
    with pytest.raises(TypeError, match=r"keyword arguments \['scale', 'unused'\], got \['scale'\]"):
        plain({"a": a, "b": b}, scale=scale)
    with pytest.raises(ValueError, match="nested as"):
        plain([a, b], scale=scale, unused=unused)


def test_warm_up_leaves_no_trace(device):
    """Under delayed scaling, with amaxes of an evaluation that wait for a step, and a cached weight."""
    plain = make(LN_MLP, device, fuse_wgrad_accumulation=True)
    norm = torch.nn.BatchNorm1d(K, device=device, dtype=BF16)
    for p in plain.parameters():
        p.main_grad = torch.rand(p.shape, device=device)
    for seed in range(2):
        step([plain], DELAYED, seed, device)
    beside = make(LINEAR, device)
    step([beside], DELAYED, 3, device)
    with torch.no_grad(), under(DELAYED):
        plain(draw(5, device), is_first_microbatch=True)
    for p in plain.parameters():
        p.grad = torch.rand_like(p)
    both = torch.nn.Sequential(plain, norm, torch.nn.Dropout(0.5))
    torch.manual_seed(7)

    def trace():
        found = [*scales(both), *scales(beside), torch.get_rng_state(), *(b.clone() for b in both.buffers())]
        found += [
            t.detach().clone()  # no graph: it would hold nodes of the default stream
            for p in both.parameters()
            for t in (p, p.grad, getattr(p, "main_grad", None))
            if t is not None
        ]
        if device == "cuda":
            found.append(torch.cuda.get_rng_state())
        return found, [cache._kept for cache in plain._caches], [p.main_grad for p in plain.parameters()]

    before = trace()
    calls = []
    graphed(both, DELAYED, device, pre_warmup_hook=lambda: calls.append(1), post_warmup_hook=lambda: calls.append(2))
    after = trace()
    agree("warm-up", after[0], before[0])
    assert calls == [1, 2]
    for a, b in zip(before[1] + before[2], after[1] + after[2], strict=True):
        assert a is b
    pending = plain._scales._live["forward"].pool
    assert pending.touched, "an evaluation's amaxes still wait for their step"


def test_gradients_accumulate_over_backwards_of_one_graph(device):
    """What .grad took over is not overwritten when it accumulates; with clone_param_grads_on_return nothing is."""
    plain = make(LINEAR, device)
    twin = copy.deepcopy(plain)
    graphed(plain, "bf16", device)
    x, z = draw(1, device, grad=True), draw(1, device, grad=True)
    for seed in range(3):
        for module, inp in ((plain, x), (twin, z)):
            module(inp).backward(draw(seed, device))
        agree(f"backward {seed}", [x.grad, *(p.grad for p in plain.parameters())],
              [z.grad, *(p.grad for p in twin.parameters())])  # fmt: skip
    graphed(plain, "bf16", device, clone_param_grads_on_return=True)
    plain.zero_grad(set_to_none=True)
    plain(x).backward(draw(5, device))
    kept = plain.weight.grad
    was = kept.clone()
    plain.zero_grad(set_to_none=True)
    plain(x).backward(draw(6, device))
    assert_bitwise_equal("kept", kept, was)
