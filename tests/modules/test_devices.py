"""Where modules are made and when they come to life: device contexts, the meta device, deferred creation."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import step
from tests.modules.kinds import BF16, FEATURES, MAKE, NORMS, devices, make, run, same, tokens


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("given", ["default", None, "cuda"])
@pytest.mark.parametrize("opened", [torch.device, default_device])
@pytest.mark.parametrize("kind", MAKE)
def test_an_open_device_context_wins_over_the_default(kind, opened, given):
    options = {} if given == "default" else {"device": given}
    for device in ("meta", "cpu"):
        with opened(device):
            module = make(kind, **options)
        assert devices(module) == {device}
    with torch.device("meta"), torch.device("cpu"):
        assert devices(make(kind, **options)) == {"cpu"}
    assert devices(make(kind, **options)) == {"cuda" if torch.cuda.is_available() else "cpu"}


@pytest.mark.parametrize("kind", MAKE)
def test_a_device_that_is_given_wins_over_the_context(kind):
    with torch.device("meta"):
        assert devices(make(kind, device="cpu")) == {"cpu"}
    with torch.device("cpu"):
        assert devices(make(kind, device=torch.device("meta"))) == {"meta"}


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", MAKE)
def test_a_second_gpu_as_default_device(kind):
    with default_device("cuda:1"):
        module = make(kind)
        run(kind, module, recipe="bf16" if kind in NORMS else "current")
    assert all(param.device == torch.device("cuda:1") for param in module.parameters())


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "mxfp8"])
@pytest.mark.parametrize("kind", MAKE)
def test_an_open_device_context_changes_no_number(kind, recipe, device):
    """Whatever the modules make inside lies on the device of the parameters; state dicts too."""
    recipe = "bf16" if kind in NORMS else recipe
    module, other = make(kind, device=device), make(kind, device=device)
    x, dy = tokens(device), tokens(device, FEATURES.get(kind, 96), 2)
    for i in range(2):
        want = step(module, x, dy, recipe)
        with torch.device("meta"):
            got = step(other, x, dy, recipe)
            state = other.state_dict()
            fresh = make(kind, device=device)
            fresh.load_state_dict(state)
        for name in want:
            assert_bitwise_equal(f"step {i} {name}", got[name], want[name])
        assert_bitwise_equal("state", fresh.get_extra_state().cpu(), module.get_extra_state().cpu())
    assert not any(value.is_meta for value in state.values())


# ---------------------------------------------------------------------------------------- coming to life


def marks(module):
    return {name: vars(param) for name, param in module.named_parameters()}


def reset(module):
    torch.manual_seed(0)
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    return module


def from_context(kind):
    with torch.device("meta"):
        module = make(kind)
    return reset(module.to(dtype=BF16))


def from_copy(kind):
    with torch.device("meta"):
        module = copy.deepcopy(make(kind))
    return reset(copy.deepcopy(module))


def from_to_empty(kind):
    return reset(make(kind, device="meta").to_empty(device="cpu"))


def from_assign(kind):
    module, source = make(kind, device="meta"), make(kind, device="cpu")
    module.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)
    return module


def from_meta_again(kind):
    return reset(make(kind, device="cpu").to("meta"))


@contextlib.contextmanager
def registering_on_meta():
    """Parameters go to the meta device as modules register them, with their attributes as arguments: accelerate's
    init_empty_weights does so."""
    register = nn.Module.register_parameter

    def on_meta(module, name, param):
        register(module, name, param)
        if param is not None:
            arguments = vars(module._parameters[name]) | {"requires_grad": param.requires_grad}
            module._parameters[name] = type(param)(param.to("meta"), **arguments)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def from_registering(kind):
    with registering_on_meta():
        module = make(kind, device="cpu")
    assert all(param.is_meta for param in module.parameters())
    return reset(module)


def from_accelerate(kind):
    with pytest.importorskip("accelerate").init_empty_weights():
        module = make(kind, device="cpu")
    return reset(module)


LIVES = (
    from_context, from_copy, from_to_empty, from_assign, from_meta_again, from_registering, from_accelerate,
)  # fmt: skip


@pytest.mark.parametrize("live", LIVES)
@pytest.mark.parametrize("kind", MAKE)
def test_a_module_from_meta_is_the_module(kind, live):
    """Numbers, marks of the parameters, devices; it can be moved and stepped."""
    module = live(kind)
    (device,) = devices(module)  # a GPU, where there is one, draws other numbers
    module, want = module.to("cpu"), make(kind, device=device).to("cpu")
    assert devices(module) == {"cpu"}
    assert marks(module) == marks(want)
    same(kind, module, want, "bf16" if kind in NORMS else "delayed")


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_skip_init(kind):
    """The class as torch.nn.utils.skip_init takes it; the parameters are uninitialised and marked."""
    module = nn.utils.skip_init(getattr(te, kind), 64, 96, params_dtype=BF16)
    want = getattr(te, kind)(64, 96, params_dtype=BF16, device="cpu")
    assert devices(module) == {"cpu"} and marks(module) == marks(want)
    module.load_state_dict(want.state_dict())
    same("LayerNormMLP" if kind == "LayerNormMLP" else kind, module, want, "current")


@pytest.mark.parametrize("how", ["deepcopy", "to_empty", "assign"])
@pytest.mark.parametrize("kind", MAKE)
def test_new_parameters_keep_their_marks(kind, how):
    """Without them reduce_sequence_parallel_grads and Megatron would pass the parameters by."""
    module = make(kind, device="cpu")
    want = marks(module)
    if how == "deepcopy":
        module = copy.deepcopy(module)
    elif how == "to_empty":
        module = module.to("meta").to_empty(device="cpu")
    else:
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    assert marks(module) == want and all(want.values())
