"""Several threads at once: each has the numbers that it would have alone, and nothing of an ended one stays."""

import copy
import functools
import gc
import sys
import threading

import pytest
import torch

import te_lite as te
from te_lite.diagnostics.statistics import Sums
from te_lite.ops import scalars
from te_lite.quantize import delayed
from te_lite.quantize.per_tensor import FORMATS
from te_lite.quantize.qtensor import QTensor
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.cpu_graph import CpuGraph
from tests.harness import build, delayed_state, leaf
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec, make_tokens

M, K = 16, 32
DELAYED = te.recipe.DelayedScaling(amax_history_len=4)
DEVICES = device_params()


@pytest.fixture(autouse=True)
def switching():
    """Threads take turns as often as Python lets them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def together(*functions):
    """The results of the functions, each run in a thread of its own; what one raises is raised here."""
    results, errors = [None] * len(functions), []

    def run(i):
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def model(device="cpu", kinds=(LINEAR, LN_MLP)):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(build(Spec(kind), K, K, 48, device=device) for kind in kinds))


def tokens(seed, device="cpu"):
    return make_tokens(M, K, seed=seed, dtype=torch.bfloat16, scale=2.0 ** (seed % 5)).to(device)


def drawn(seed, device="cpu"):
    """x and the gradient of y."""
    return leaf(tokens(seed), device), tokens(seed + 50, device) * 2.0**-10


def step(net, seed, device="cpu", recipe=DELAYED, forward=None, data=None):
    net.zero_grad()
    x, dy = data or drawn(seed, device)
    with te.autocast(recipe=recipe):
        y = (forward or net)(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


def state_of(net):
    return [value for module in net for value in delayed_state(module).values()]


def train(net, first_seed, device, steps=30):
    return [t for i in range(steps) for t in step(net, first_seed + i, device)] + state_of(net)


def agree(label, got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(f"{label}: {i}", a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_two_threads_train_two_models(device):
    """The bits of two runs one after the other, scales included; pools of one key, that would have been one."""
    runs = [functools.partial(train, model(device), seed, device) for seed in (0, 1000)]
    alone = [train(model(device), seed, device) for seed in (0, 1000)]
    for label, got, want in zip(("first", "second"), together(*runs), alone, strict=True):
        agree(label, got, want)


RECIPES = [(DELAYED, "current"), (DELAYED, te.recipe.DelayedScaling(amax_history_len=6)), ("current", "mxfp8")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipes", RECIPES, ids=["delayed current", "two lengths", "current mxfp8"])
def test_one_module_under_two_recipes(recipes, device):
    net, x = model(device), tokens(3, device)
    for seed in range(3):
        step(net, seed, device)

    def evaluate(recipe):
        with torch.no_grad(), te.autocast(recipe=recipe):
            return net(x)

    wanted = [evaluate(recipe) for recipe in recipes]
    assert not torch.equal(*wanted) or recipes[1] not in ("current", "mxfp8")

    def often(recipe, want):
        for i in range(200):
            assert_bitwise_equal(f"call {i} under {recipe}", evaluate(recipe), want)

    together(*(functools.partial(often, *of) for of in zip(recipes, wanted, strict=True)))


def in_a_thread(function):
    """function, called in a new thread each time."""
    return lambda *args: together(functools.partial(function, *args))[0]


def through(how, net):
    """net's forward with the autocast opened inside of a checkpointed call."""

    def inside(x):
        with te.autocast(recipe=DELAYED):
            return net(x)

    return lambda x: te.checkpoint(inside, x, use_reentrant=how == "reentrant") if how else inside(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
def test_forwards_in_worker_threads(how, device):
    """A new thread for each forward, backward in another one, as parallel_apply does: the numbers are one thread's."""
    net, alone = model(device), model(device)
    for seed in range(5):
        with_threads = step(net, seed, device, "bf16", in_a_thread(through(how, net)))
        agree(f"step {seed}", with_threads + state_of(net), step(alone, seed, device) + state_of(alone))
    assert any(float(value[0]) != 1 for value in state_of(net) if value.dim() == 1)


def test_one_backward_of_two_threads_passes():
    """It steps the scales of both, also where neither pass' first module is in it."""
    nets = [model(kinds=(LINEAR, LN_LINEAR)) for _ in range(2)]

    def forward(net):
        with te.autocast(recipe=DELAYED):
            net[0](tokens(1))
            return net[1](tokens(1))

    sum(together(*(functools.partial(forward, net) for net in nets))).backward(tokens(2))
    for net in nets:
        assert float(delayed_state(net[1])["scale_bwd"][0]) != 1


def live_pools():
    gc.collect()
    return sum(type(thing) is delayed.Pool for thing in gc.get_objects())


def test_ended_threads_leave_no_pool():
    shared = model()
    step(shared, 0)
    counts = []
    for seed in range(50):
        together(lambda seed=seed: step(shared, seed), lambda seed=seed: step(model(), seed))
        if seed % 10 == 4:
            counts.append(live_pools())
    assert counts == counts[:1] * len(counts)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scales_of_a_graph_stay_with_their_thread(device):
    net = model(device)
    step(net, 0, device)
    graph, data = torch.cuda.CUDAGraph() if device == "cuda" else CpuGraph(), drawn(1, device)
    with torch.cuda.graph(graph) if device == "cuda" else graph.capture():
        step(net, 1, device, data=data)
    with pytest.raises(RuntimeError, match=r"another thread, .* call copy.deepcopy\(module\), whose scales"):
        together(lambda: step(net, 2, device))
    step(net, 2, device)
    together(lambda: step(copy.deepcopy(net), 2, device))


# ---- what else the process shares ----


class FakeCuda:
    """A tensor that says it is on a GPU, for new_scalar."""

    is_cuda, device = True, torch.device("cuda", 0)

    def new_empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("device", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_scalar_is_handed_out_twice(device, monkeypatch):
    if device == "fake":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(scalars, "_PER_BLOCK", 3)
    monkeypatch.setattr(scalars, "_blocks", {})
    like = FakeCuda() if device == "fake" else torch.empty(1, device=device)
    sys.setswitchinterval(1e-6)
    taken = together(*[lambda: [scalars.new_scalar(like) for _ in range(3000)]] * 4)
    addresses = [t.data_ptr() for some in taken for t in some]
    assert len(set(addresses)) == len(addresses) == 12000


@pytest.mark.parametrize("device", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scalars_of_an_evaluation_serve_the_training_after_it(device, monkeypatch):
    """A block that is made in inference mode is no block of inference tensors, which nothing may keep for backward."""
    if device == "fake":
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(scalars, "_blocks", {})
    like = FakeCuda() if device == "fake" else torch.empty(1, device=device)
    with torch.inference_mode():
        taken = [scalars.new_scalar(like)]
    taken.append(scalars.new_scalar(like))
    assert not any(t.is_inference() for t in taken) and len({t._version for t in taken}) == 1
    taken[0].add_(1)
    assert taken[1]._version == 0


def test_reports_while_plans_are_built():
    done = threading.Event()

    def build_many():
        for seed in range(150):
            with torch.no_grad():
                model(kinds=(LINEAR,))(tokens(seed))
        done.set()

    def report():
        while not done.is_set():
            assert all(row["schedule"] for row in te.overlap_report())

    together(build_many, report)


def test_statistics_lose_no_call():
    """Three threads add to one operand, of which one element in 16 becomes zero."""
    v = torch.randn(1, 16)
    v[0, 3] = 1e-9
    q = QTensor(FORMATS[torch.float8_e4m3fn], (1, 16), v.dtype, v.to(torch.float8_e4m3fn), torch.ones(1))
    sums = Sums()
    together(*[lambda: [sums.add(v, q, "row") for _ in range(500)]] * 3)
    assert (sums.calls, sums.elements) == (1500, 24000)
    assert sums.read()["underflow"] == 1 / 16


@pytest.mark.parametrize("device", DEVICES)
def test_one_cached_weight_under_two_recipes(device):
    """is_first_microbatch=False in two threads whose recipes take the cache from each other."""
    (linear,), x = model(device, (LINEAR,)), tokens(3, device)

    def evaluate(recipe):
        with torch.no_grad(), te.autocast(recipe=recipe):
            return linear(x, is_first_microbatch=False)

    recipes = "current", "mxfp8"
    wanted = [evaluate(recipe) for recipe in recipes]

    def often(recipe, want):
        for i in range(100):
            assert_bitwise_equal(f"call {i} under {recipe}", evaluate(recipe), want)

    together(*(functools.partial(often, *of) for of in zip(recipes, wanted, strict=True)))
