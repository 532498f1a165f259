"""te.GroupedLinear: a te.Linear for each group, in its numbers, its state and its contracts."""

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

import te_lite as te
from te_lite.tables import warn_once
from te_lite.testing.numerics import assert_close_to_oracle
from tests.modules.test_grouped_mm import exact, problem
from tests.ops.paths import DEVICES

BF16 = torch.bfloat16
SIZES, K, N = (5, 0, 130, 1), 144, 48
GROUPS, TOKENS = len(SIZES), sum(SIZES)
RECIPES = [name for name in te.recipe.available() if name != "tensorwise"]
DELAYED = te.recipe.DelayedScaling(amax_history_len=3)


def made(device="cpu", **options) -> te.GroupedLinear:
    torch.manual_seed(3)
    return te.GroupedLinear(GROUPS, K, N, params_dtype=BF16, device=device, **options)


def weights_of(module: te.GroupedLinear) -> list[Tensor]:
    params = [getattr(module, name) for name in module.weight_names]
    return list(params[0].unbind()) if len(params) == 1 else params


class Linears(torch.nn.Module):
    """A te.Linear for each group, with the parameters of `module`, run on its CPU copy."""

    def __init__(self, module: te.GroupedLinear, **options) -> None:
        super().__init__()
        self.each = torch.nn.ModuleList()
        for i, weight in enumerate(weights_of(module)):
            linear = te.Linear(K, N, bias=module.use_bias, params_dtype=BF16, device="cpu", **options)
            with torch.no_grad():
                linear.weight.copy_(weight)
                if module.use_bias:
                    linear.bias.copy_(getattr(module, f"bias{i}"))
            self.each.append(linear)

    def forward(self, x: Tensor, splits) -> Tensor:
        parts = x.split(list(splits))
        return torch.cat([linear(part) for linear, part in zip(self.each, parts, strict=True)])


def step(module, x: Tensor, dy: Tensor, splits=SIZES, recipe=None, **options) -> list[Tensor]:
    """[y, dx, gradients of the weights, of the biases] on the CPU."""
    device = next(module.parameters()).device
    x = x.detach().clone().to(device).requires_grad_()
    module.zero_grad(set_to_none=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe or "bf16"):
        y = module(x, splits, **options)
    y.backward(dy.to(device))
    return [t.detach().cpu() for t in (y, x.grad, *grads_of(module))]


def grads_of(module) -> list[Tensor]:
    """Of the weights, then of the biases."""
    params = sorted(module.named_parameters(), key=lambda named: "bias" in named[0])  # stable
    return [param.grad for _, param in params if param.grad is not None]


def data(seed=0) -> tuple[Tensor, Tensor]:
    x, _, _, dy = problem(SIZES, 0, K, N, BF16, seed)
    return x, dy


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", ["list", "tensor", "on the device"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_of_a_linear_for_each_group(recipe, splits, device):
    """Three, so that delayed scaling uses scales of its own."""
    module = made(device)
    linears = Linears(module)
    given = {"list": SIZES, "tensor": torch.tensor(SIZES), "on the device": torch.tensor(SIZES, device=device)}[splits]
    used = DELAYED if recipe == "delayed" else recipe
    for seed in range(3):
        x, dy = data(seed)
        got, low = step(module, x, dy, given, used), step(linears, x, dy, SIZES, used)
        w = torch.stack([weight.detach().cpu() for weight in weights_of(module)])
        bias = torch.stack([getattr(module, f"bias{g}").detach().cpu() for g in range(GROUPS)])
        truth = exact(x, w, bias, dy, SIZES)
        got, low = ([*of[:2], torch.stack(of[2 : 2 + GROUPS]), torch.stack(of[2 + GROUPS :])] for of in (got, low))
        for name, a, b, c in zip(("y", "dx", "dw", "dbias"), got, truth, low, strict=True):
            assert_close_to_oracle(f"{name} in step {seed}", a, b, c)
    if recipe == "delayed":  # TE's layout: input, weight, output of one gemm after the other's
        state = module.get_extra_state().cpu()
        history = [linear.get_extra_state()[6:].cpu() for linear in linears.each]
        ours = state[6 : 6 + 3 * 3 * GROUPS].view(3, GROUPS, 3)
        for g in range(GROUPS):
            assert torch.equal(ours[:, g], history[g][:9].view(3, 3)), "amaxes"


@pytest.mark.parametrize("options", [
    {"bias": False}, {"single_grouped_weight": True}, {"single_grouped_weight": True, "single_grouped_bias": True},
    {"save_original_input": True},
], ids=str)  # fmt: skip
def test_forms_have_the_same_numbers(options):
    x, dy = data()
    plain, other = made(), made(**options)
    for recipe in ("bf16", "rowwise", "current", "mxfp8"):
        want, got = step(plain, x, dy, recipe=recipe), step(other, x, dy, recipe=recipe)
        equal(got[:2], want[:2])
        dw = got[2] if "single_grouped_weight" in options else torch.stack(got[2 : 2 + GROUPS])
        equal([dw], [torch.stack(want[2 : 2 + GROUPS])])
    state = list(other.state_dict())
    if options.get("single_grouped_weight"):
        assert state[0] == "weight" and other.weight.shape == (GROUPS, N, K)
    else:  # Transformer Engine's order, by which optimizers number their states
        kinds = ("weight", "bias") if other.use_bias else ("weight",)
        names = [f"{kind}{g}" for g in range(GROUPS) for kind in kinds]
        assert [name for name, _ in other.named_parameters()] == state[: len(names)] == names
    assert state[-1] == "_extra_state"


def test_return_bias_and_leading_dimensions():
    x, dy = data()
    module, plain = made(return_bias=True), made(bias=False)
    y, biases = module(x.view(2, TOKENS // 2, K), SIZES)
    assert [bias is getattr(module, f"bias{g}") for g, bias in enumerate(biases)] == [True] * GROUPS
    equal([y.view(TOKENS, N)], [plain(x, SIZES)])


def test_a_bias_that_is_returned_from_a_reentrant_checkpoint():
    """torch makes what it returns its own: a parameter would no longer be one, and backward would not end."""
    module = te.GroupedLinear(3, 32, 48, device="cpu", return_bias=True)

    def function(x):
        y, biases = module(x, [3, 0, 7])
        return y, biases[0]

    y, bias = torch.utils.checkpoint.checkpoint(function, torch.randn(10, 32, requires_grad=True), use_reentrant=True)
    assert module.bias0.is_leaf
    (y.sum() + bias.sum()).backward()
    assert module.bias0.grad is not None


def test_modules_of_inference_mode_and_sizes_of_any_kind():
    x = torch.randn(10, 32)
    with torch.inference_mode():
        made = te.GroupedLinear(3, 32, 48, device="cpu"), te.Linear(32, 48, device="cpu", parameters_split=("a", "b"))
    for module in made:
        module.requires_grad_(False)
    assert made[1](x).shape == (10, 48)
    want = made[0](x, [3, 0, 7])
    padded, sizes = te.Fp8Padding(3)(x, torch.tensor([3, 0, 7]))
    assert sizes == [16, 0, 16] and all(type(size) is int for size in sizes)
    assert made[0](padded, sizes).shape == (32, 48)
    for splits in (torch.tensor([3, 0, 7]), list(np.array([3, 0, 7])), np.array([3, 0, 7])):
        assert torch.equal(made[0](x, splits), want)
    with pytest.raises(ValueError, match="m_splits"):
        made[0](x, [3.0, 0, 7])


def test_outputs_are_no_views():
    """Pipelines free their outputs, and refuse views."""
    y = te.GroupedLinear(2, 64, 48, device="cpu")(torch.randn(4, 8, 64), [16, 16])
    assert y.shape == (4, 8, 48) and not y._is_view()
    assert not te.LayerNorm((4, 8), device="cpu")(torch.randn(2, 3, 4, 8, requires_grad=True))._is_view()


def test_weights_lie_together_and_are_read_where_they_lie():
    module = made()
    first = module.weight0
    for g, weight in enumerate(weights_of(module)):
        assert weight.data_ptr() == first.data_ptr() + g * weight.numel() * weight.element_size()
        assert weight.partition_dim == -1 and not weight.tensor_model_parallel
    x, dy = data()
    want = step(module, x, dy, recipe="rowwise")
    module.weight1 = torch.nn.Parameter(module.weight1.detach().clone())  # as load_state_dict(assign=True) does
    equal(step(module, x, dy, recipe="rowwise"), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "delayed"])
def test_weights_are_quantized_once(recipe, device):
    x, dy = data()
    module = made(device)
    want = step(module, x, dy, recipe=recipe)
    equal(step(module, x, dy, recipe=recipe, is_first_microbatch=True), want)
    for weight in weights_of(module):
        weight.data.zero_()  # leaves no trace
    again = step(module, x, dy, recipe=recipe, is_first_microbatch=False)
    if recipe == "bf16":
        assert not again[1].any()
    else:
        equal(again, want)
    with torch.no_grad():
        module.weight0.add_(0.0)  # this does
    assert not step(module, x, dy, recipe=recipe, is_first_microbatch=False)[1].any()


@pytest.mark.parametrize("recipe", [te.recipe.MXFP8BlockScaling, te.recipe.Float8BlockScaling])
def test_gradients_in_blocks_stay_e4m3_and_it_says_so(recipe):
    module, (x, _, _, dy) = made(), problem(SIZES, k=K, n=N)
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="in grouped linears dy is E4M3"):
        got = step(module, x, dy, recipe=recipe(fp8_format=te.recipe.Format.HYBRID))
    equal(got, step(module, x, dy, recipe=recipe()))


@pytest.mark.parametrize("mode, shape, dims", [("column", (N // 2, K), (0, 0)), ("row", (N, K // 2), (1, None))])
def test_shards(mode, shape, dims):
    module = made(parallel_mode=mode, tp_size=2, sequence_parallel=True)
    assert all(weight.shape == shape and weight.partition_dim == dims[0] for weight in weights_of(module))
    assert getattr(module.bias0, "sequence_parallel", False) == (mode == "row")
    y = module(torch.randn(TOKENS, shape[1], dtype=BF16), SIZES)  # as in Transformer Engine no rank talks to another
    assert y.shape == (TOKENS, shape[0])
    one = made(parallel_mode=mode, tp_size=2, single_grouped_weight=True)
    assert one.weight.shape == (GROUPS, *shape) and one.weight.partition_dim == dims[0] + 1


def test_signature():
    """Transformer Engine's arguments in its order with its defaults (2.20.2)."""
    wanted = (
        "num_gemms in_features out_features sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None "
        "tp_size=1 get_rng_state_tracker=None rng_tracker_name=None init_method=None bias=True return_bias=False "
        "params_dtype=None parallel_mode=None device='cuda' ub_overlap_rs=False ub_overlap_ag=False ub_name=None "
        "delay_wgrad_compute=False save_original_input=False single_grouped_weight=False single_grouped_bias=False "
        "name=None"
    )
    for function, text in ((te.GroupedLinear.__init__, wanted), (te.GroupedLinear.forward,
                           "inp m_splits is_first_microbatch=None")):  # fmt: skip
        parameters = list(inspect.signature(function).parameters.values())[1:]
        spelled = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
        assert " ".join(spelled) == text


def test_what_is_refused():
    x, _ = data()
    module = made()
    for splits, text in (
        ((5, 0, 130), "of each of 4 groups"),
        ((5, 0, 130, 2), "add up"),
        ((5, -1, 131, 1), "integers"),
    ):
        with pytest.raises(ValueError, match=text):
            module(x, splits)
    with pytest.raises(ValueError, match="in_features=144"):
        module(x[:, :16], SIZES)
    with pytest.raises(NotImplementedError, match="ub_overlap_ag"):
        made(ub_overlap_ag=True)
    with pytest.raises(ValueError, match="num_gemms=0"):
        te.GroupedLinear(0, K, N)
    with pytest.raises(ValueError, match="not divisible by tp_size=5"):
        made(parallel_mode="column", tp_size=5)
    module.weight1.requires_grad_(False)
    with pytest.raises(NotImplementedError, match="some of its weights frozen"):
        module(x, SIZES)
    module.weight1.requires_grad_(True)
    leaf = x.clone().requires_grad_()
    with te.autocast(recipe="rowwise"):
        y = module(leaf, SIZES)
    with torch.no_grad():
        module.weight2.add_(1.0)
    with pytest.raises(RuntimeError, match="written to between forward and backward"):
        y.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_waits_for_nothing_and_replays(recipe):
    """Sizes on the device: neither the host's list nor the device's tensor makes it wait; graphs take other sizes."""
    module, used = made("cuda"), DELAYED if recipe == "delayed" else recipe
    x, dy = (t.cuda() for t in data())
    leaf, splits = x.requires_grad_(), torch.tensor(SIZES, device="cuda")
    params = list(module.parameters())

    def run(sizes):
        with te.autocast(recipe=used):
            y = module(leaf, sizes)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *params], dy)]

    for _ in range(2):
        run(splits)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(splits)
        run(list(SIZES))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(splits)
    if recipe == "delayed":
        return  # each replay takes a step of the scales; tests/modules/test_graphs.py has that of the modules
    for sizes in ((5, 0, 130, 1), (136, 0, 0, 0), (34, 34, 34, 34)):
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        replayed = [t.clone() for t in results]
        for a, b in zip(run(list(sizes)), replayed, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_list_is_refused_in_a_capture():
    module, (x, _) = made("cuda"), data()
    x = x.cuda()
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="pass a CUDA tensor"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        module(x, SIZES)
