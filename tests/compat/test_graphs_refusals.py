"""te.make_graphed_callables: when modules run their own forward again, and what is refused."""

import copy
import pickle

import pytest
import torch

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.graphing import DELAYED, DEVICES, K, M, agree, draw, graphed, make, step
from tests.harness import under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def test_modes_copies_hooks_and_reset(device):
    plain = make(LN_LINEAR, device)
    calls = []
    plain.register_forward_hook(lambda *_: calls.append("forward"))
    plain.register_full_backward_hook(lambda *_: calls.append("backward"))
    twin = copy.deepcopy(plain)
    graphed(plain, "current", device)
    assert not calls
    agree("hooks", step([plain], "current", 1, device), step([twin], "current", 1, device))
    assert sorted(calls) == ["backward"] * 2 + ["forward"] * 2
    odd = draw(0, device, rows=16)
    with torch.no_grad(), under("current"):
        plain.eval()
        assert_bitwise_equal("eval is eager", plain(odd), twin(odd))
        plain.train()
        assert_bitwise_equal("a copy is eager", copy.deepcopy(plain)(odd), twin(odd))
    other = graphed(make(LN_LINEAR, device), "current", device)
    for copied in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        agree("a copy steps eagerly", *(step([one], "current", 1, device) for one in (copied, other)))
        copied(odd)
    plain.forward.reset()
    assert "forward" not in vars(plain)
    agree("reset", step([plain], "current", 2, device), step([twin], "current", 2, device))


def test_evaluation_in_graphs(device):
    plain = make(LN_MLP, device).eval()
    twin = copy.deepcopy(plain)
    graphed(plain, "current", device, (draw(0, device),))
    with torch.no_grad(), under("current"):
        for seed in range(2):
            assert_bitwise_equal("evaluation", plain(draw(seed, device)), twin(draw(seed, device)))
    with pytest.raises(RuntimeError, match=r"captured in eval\(\) and have no backward"):
        plain(draw(1, device))


def test_calls_that_graphs_cannot_serve(device):
    plain = make(LINEAR, device)
    graphed(plain, "current", device)
    x = draw(0, device)
    with pytest.raises(ValueError, match=r"take \[48, 128\] torch.bfloat16 .* as input 0, got \[32, 128\] .*; pad or"):
        plain(draw(0, device, rows=32))
    with pytest.raises(ValueError, match="got .* torch.float32"):
        plain(x.float())
    with pytest.raises(ValueError, match="take 1 tensors, got 2"):
        plain(x, x)
    with pytest.raises(RuntimeError, match="the te.autocast around the call says"):
        with under("delayed"):
            plain(x)
    with pytest.raises(NotImplementedError, match="cuda_graph_stream"):
        plain(x, cuda_graph_stream=1)
    y = plain(x)
    plain(x)
    with pytest.raises(RuntimeError, match="have lost what this backward needs"):
        y.backward(x)
    plain.weight.data = plain.weight.data.clone()
    with pytest.raises(RuntimeError, match="its parameter 'weight', which was replaced since: make the graphs again"):
        plain(x)
    del y
    graphed(plain, "current", device)
    plain.weight = torch.nn.Parameter(plain.weight.detach().clone())
    with pytest.raises(RuntimeError, match="its parameter 'weight', which was replaced"):
        plain(x)


def test_backwards_out_of_the_order_of_capture(device):
    """The second module's backward was captured first, so that the first one's may lie in the memory it needs."""
    layers = make(LINEAR, device), make(LINEAR, device)
    graphed(layers, "bf16", device)
    x, dy = draw(0, device, grad=True), draw(1, device)
    for _ in range(2):
        a, b = (layer(x) for layer in layers)
        b.backward(dy)
        a.backward(dy)
        for layer in layers:  # one after the other
            layer(x).backward(dy)
    a, b = (layer(x) for layer in layers)
    a.backward(dy)
    with pytest.raises(RuntimeError, match="run forwards and backwards in the order of capture"):
        b.backward(dy)


def test_delayed_scaling_is_not_recomputed(device):
    plain = make(LINEAR, device)
    graphed(plain, DELAYED, device)
    with under(DELAYED), pytest.raises(RuntimeError, match="no checkpoint may compute them again"):
        te.checkpoint(plain, draw(0, device), use_reentrant=False)
    torch.utils.checkpoint.checkpoint(graphed(make(LINEAR, device), "current", device), draw(0, device, grad=True),
                                      use_reentrant=False).backward(draw(1, device))  # fmt: skip


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (TypeError, "got function: must be an nn.Module", {"modules": lambda x: x}),
        (ValueError, "got both recipe and fp8_recipe", {"recipe": "current", "fp8_recipe": "current"}),
        (ValueError, "num_warmup_iters=0", {"num_warmup_iters": 0}),
        (TypeError, "got a int in its samples", {"sample_args": (1,)}),
        (NotImplementedError, "capture_time_hooks", {"capture_time_hooks": [None]}),
        (NotImplementedError, "_reuse_graph_input_output_buffers", {"_reuse_graph_input_output_buffers": True}),
        (NotImplementedError, "fractions", {"_order": [1, -1, -1.5]}),
        (ValueError, "must name each chunk", {"_order": [1, -1, 1]}),
        (ValueError, "a backward of chunk 1 comes before its forward", {"_order": [-1, 1]}),
        (ValueError, "1 modules for 1 chunks of", {"_order": [1, -1], "_num_layers_per_chunk": [2]}),
        (ValueError, "must be 2, one a module", {"_order": [1, 1, -1, -1]}),
        (ValueError, "must be a bool, or a tuple", {"enabled": (True, False)}),
        (TypeError, "has no argument 'num_warmup_iter'; nearest: num_warmup_iters", {"num_warmup_iter": 3}),
    ],
)
def test_arguments(error, match, change, device):
    given = {"modules": te.Linear(K, K, device=device), "sample_args": (torch.zeros(M, K),), **change}
    with pytest.raises(error, match=match):
        te.make_graphed_callables(**given)


@pytest.mark.parametrize("device", ["cpu"])
def test_modules_that_no_graph_holds(device):
    late = te.Linear(K, K, device=device, delay_wgrad_compute=True)
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute"):
        te.make_graphed_callables(late, (torch.zeros(M, K),))
    hooked = torch.nn.Sequential(te.Linear(K, K, device=device))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="a Linear with hooks"):
        te.make_graphed_callables(hooked, (torch.zeros(M, K),))


def test_without_a_gpu():
    with pytest.raises(ValueError, match="got a tensor on cpu: CUDA graphs hold work on CUDA tensors"):
        te.make_graphed_callables(te.Linear(K, K, device="cpu"), (torch.zeros(M, K),))
