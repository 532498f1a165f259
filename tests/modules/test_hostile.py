"""Uses that once went wrong in silence or failed obscurely."""

import copy
import pickle

import pytest
import torch

import te_lite as te
from te_lite.modules.weights import join
from te_lite.ops import scalars
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import FP8, RECIPES, under

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP")


def layer(kind="Linear", **options):
    torch.manual_seed(0)
    return getattr(te, kind)(32, 64, params_dtype=torch.bfloat16, device="cpu", **options)


def tokens(*shape):
    torch.manual_seed(1)
    return torch.randn(*(shape or (16, 32)), dtype=torch.bfloat16, requires_grad=True)


def test_neighbours_in_memory_are_not_one_storage():
    """Two tensors whose addresses follow each other but whose storages are their own are concatenated, not overrun."""
    block = torch.arange(16.0).numpy()
    first, second = (torch.nn.Parameter(torch.from_numpy(block[i : i + 8]).view(2, 4)) for i in (0, 8))
    assert first.data_ptr() + 32 == second.data_ptr()
    assert_bitwise_equal("joined", join([first, second]).detach(), torch.arange(16.0).view(4, 4))


def test_a_split_weight_changed_before_backward_is_noticed():
    module = layer(parameters_split=("q", "k"), bias=False)
    y = module(tokens())
    with torch.no_grad():
        module.k_weight.mul_(2)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["te.checkpoint", "reentrant", "module", "hooks"])
@pytest.mark.parametrize("sink", ["main_grad", "delayed"])
def test_weight_gradients_find_their_parameter_under_hooks(sink, how, recipe):
    """Saved-tensor hooks hand backward another tensor than the parameter; its gradient goes to the parameter."""

    def run(wrapped: bool) -> list[torch.Tensor]:
        options = {"fuse_wgrad_accumulation": True} if sink == "main_grad" else {"delay_wgrad_compute": True}
        module = layer("LayerNormMLP", checkpoint=wrapped and how == "module", **options)
        weights = (module.fc1_weight, module.fc2_weight)
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)
        x = tokens()
        with under(recipe):
            if wrapped and how in ("te.checkpoint", "reentrant"):
                y = te.checkpoint(module, x, use_reentrant=how == "reentrant")
            elif wrapped and how == "hooks":
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                    y = module(x)
            else:
                y = module(x)
        y.backward(tokens(16, 32).detach())
        if sink == "delayed":
            module.backward_dw()
        return [weight.main_grad if sink == "main_grad" else weight.grad for weight in weights]

    for got, want in zip(run(True), run(False), strict=True):
        assert want.any()
        assert_bitwise_equal("weight gradient", got, want)


def test_writing_to_a_quantized_tensor_is_refused():
    with under("current"):
        y = layer()(tokens().detach(), fp8_output=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dequantize"):
        y.add_(1)


def test_reading_a_quantized_tensor_into_a_plain_one_works():
    with under("current"), torch.no_grad():
        y = layer()(tokens().detach(), fp8_output=True)
    plain = y.dequantize()
    assert_bitwise_equal("copied", torch.empty_like(plain).copy_(y), plain)
    assert_bitwise_equal("added", torch.ones_like(plain).add_(y), plain + 1)
    assert_bitwise_equal("out=", torch.add(y, y, out=torch.empty_like(plain)), plain + plain)


def test_writing_to_the_returned_norm_is_noticed():
    """The linear keeps the norm's output that the caller holds; changing it is an error, not a wrong gradient."""
    module = layer("LayerNormLinear", return_layernorm_output=True)
    y, ln = module(tokens(4, 4, 32))
    assert ln._base is None
    with torch.no_grad():
        ln.mul_(0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


@pytest.mark.parametrize("kind", [*KINDS, "LayerNorm"])
def test_a_second_derivative_is_refused(kind):
    """Also where the incoming gradient is a constant: a penalty on the gradient would be silently without effect."""
    module = te.LayerNorm(32, device="cpu", params_dtype=torch.bfloat16) if kind == "LayerNorm" else layer(kind)
    for loss in (lambda y: y.float().square().sum(), lambda y: y.sum()):
        x = tokens()
        with te.autocast(recipe="current"):  # a Linear in bf16 is torch's own
            y = module(x)
        with pytest.raises(RuntimeError, match="no second derivatives.*once_differentiable.*create_graph"):
            torch.autograd.grad(loss(y), x, create_graph=True)
        assert x.grad is None


def test_a_bf16_mlp_computes_its_activation_once():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        layer("LayerNormMLP")(tokens())
    assert seen.count(torch.ops.te_lite.transform.default) == 1


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", FP8)
def test_training_after_an_evaluation_in_inference_mode(recipe, device, monkeypatch):
    monkeypatch.setattr(scalars, "_blocks", {})  # of scales, which the evaluation then makes
    module, x = layer().to(device), tokens().detach().to(device)
    with torch.inference_mode(), under(recipe):
        module(x, is_first_microbatch=True)
    for _ in range(3):
        with under(recipe):
            y = module(x.requires_grad_(), is_first_microbatch=False)
        y.sum().backward()
    assert module.weight.grad.isfinite().all()


def test_a_checkpointed_call_keeps_the_cached_weight_it_used():
    """The cache is dropped between forward and backward; recomputing takes the quantized weight of the first run."""

    def run(wrapped: bool, drop: bool) -> torch.Tensor:
        module, x = layer(bias=False), tokens()
        with under("delayed"):
            module(x.detach(), True)
            y = te.checkpoint(module, x, False, use_reentrant=False) if wrapped else module(x, False)
        if drop:
            with torch.no_grad():
                module(x.detach())
        y.backward(torch.ones_like(y))
        return module.weight.grad

    want = run(False, False)
    assert_bitwise_equal("weight gradient", run(True, True), want)


def test_delayed_weight_gradients_are_added_in_place():
    module = layer(delay_wgrad_compute=True)
    flat = torch.ones_like(module.weight)
    module.weight.grad = flat
    module(tokens()).sum().backward()
    module.backward_dw()
    assert module.weight.grad is flat and not torch.equal(flat, torch.ones_like(flat))


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_survive_copies_and_meta(kind):
    made = layer(kind, delay_wgrad_compute=True)
    copied = copy.deepcopy(made)
    fresh = getattr(te, kind)(32, 64, device="meta", delay_wgrad_compute=True, bias=False)
    fresh.reset_parameters()
    names = [name for name, p in made.named_parameters() if hasattr(p, "skip_backward_post_hook")]
    assert names and all(name.endswith("weight") and "norm" not in name for name in names)
    for other in (copied, fresh):
        assert [n for n, p in other.named_parameters() if hasattr(p, "skip_backward_post_hook")] == names
        assert all(hasattr(p, "partition_dim") for p in other.parameters())
    assert all(buffer.device.type != "meta" for buffer in fresh.buffers())


@pytest.mark.parametrize("recipe", FP8)
def test_a_trained_module_can_be_pickled(recipe):
    module = layer()
    with under(recipe):
        module(tokens()).sum().backward()
    loaded = pickle.loads(pickle.dumps(module))
    with under(recipe):
        assert_bitwise_equal("out", loaded(tokens()).detach(), module(tokens()).detach())


def test_gradients_in_main_grad_are_reduced_and_counted():
    """Without a gradient nothing is counted; a gradient that a hook moved to main_grad is found."""
    module = torch.nn.Linear(2, 2)
    module.weight.sequence_parallel = True
    assert te.reduce_sequence_parallel_grads(module) == 0
    module.weight.main_grad = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="tp_group"):
        te.reduce_sequence_parallel_grads(module)


def test_two_threads_do_not_share_an_autocast():
    from concurrent.futures import ThreadPoolExecutor

    with under("current"), ThreadPoolExecutor(1) as pool:
        assert te.FP8GlobalStateManager.is_fp8_enabled()
        assert not pool.submit(te.FP8GlobalStateManager.is_fp8_enabled).result()
