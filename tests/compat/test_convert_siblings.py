"""Converted siblings that read the same x: it is quantized once, with the bits of each for itself."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_lite as te
from te_lite.functional.shared_input import SharedInput
from te_lite.testing.distributed import device_params
from te_lite.testing.memory import bytes_kept
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.test_convert import STATELESS, convert_all

BF16, K, TOKENS = torch.bfloat16, 64, 48
SHARED = [name for name in STATELESS if name != "rowwise_with_gw_hp"]  # its wgrad reads x unquantized


class Attention(nn.Module):
    """q, k, v of one x, and o of their sum."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(K, K, bias=False, dtype=BF16))

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + self.k_proj(x).tanh() * self.v_proj(x))


def made(recipe="current", shares=True, device="cpu", model=Attention):
    torch.manual_seed(0)
    module = model().to(device)
    convert_all(module, recipe)
    if not shares:
        for part in module.modules():
            vars(part).pop("_shared", None)
    return module


def tokens(device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, TOKENS, K, generator=generator)
    return x.to(device, BF16).requires_grad_()


@pytest.fixture
def counted(monkeypatch) -> list[tuple]:
    """(row, col) of each input that is quantized by a linear that shares, or by one that took another's: ()."""
    calls: list[tuple] = []
    inner = SharedInput.quantize

    def quantize(self, reader, x, source, quantizer, col):
        before = self._known
        q = inner(self, reader, x, source, quantizer, col)
        calls.append(() if before is not None and q is before.q else (True, col))
        return q

    monkeypatch.setattr(SharedInput, "quantize", quantize)
    return calls


def step(module, x, call=None):
    x.grad = None
    module.zero_grad(set_to_none=True)
    y = module(x) if call is None else call(module, x)
    y.square().sum().backward()
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def known(module):
    return module.q_proj._shared[0]._known


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", STATELESS)
def test_bits_are_those_of_each_for_itself(recipe, device, counted):
    module, alone = made(recipe, device=device), made(recipe, False, device)
    for seed in range(3):
        counted.clear()
        want = step(alone, tokens(device, seed))
        assert not counted
        got = step(module, tokens(device, seed))
        for name, value in want.items():
            assert_bitwise_equal(name, got[name], value)
        if device == "cpu":  # on a GPU launches this small are recorded, each linear's for itself
            assert counted == ([(True, True), (), ()] if recipe in SHARED else [])
            assert recipe not in SHARED or known(module) is None, "let go after the last"


def test_less_is_kept():
    kept = [bytes_kept(made(shares=shares)(tokens())) for shares in (True, False)]
    # Two of three columns, a byte an element, with their scales; and three weights, which an x of its own pays for.
    assert kept[1] - kept[0] == 2 * (2 * TOKENS * K + 4) + 3 * K * K


def test_written_to_between_siblings(counted):
    module, x = made(), tokens().detach()
    q = module.q_proj(x)
    x.add_(1.0)
    assert_bitwise_equal("k", module.k_proj(x), made(shares=False).k_proj(x))
    assert_bitwise_equal("q again", module.q_proj(x), made(shares=False).q_proj(x))
    assert counted == [(True, True), (True, True), ()] and not torch.equal(q, module.q_proj(x))


def test_the_same_linear_twice_quantizes_twice(counted):
    module, x = made(), tokens().detach()
    for _ in range(3):
        module.q_proj(x)
    assert counted == [(True, True)] * 3


def test_columns_are_made_for_who_needs_them(counted):
    module, x = made(), tokens()
    module.q_proj.weight.requires_grad_(False)
    want = step(made(shares=False), tokens())
    got = step(module, x)
    assert counted == [(True, False), (True, True), ()]
    assert_bitwise_equal("k", got["k_proj.weight"], want["k_proj.weight"])


def test_evaluation_then_training(counted):
    module, x = made(), tokens()
    with torch.no_grad():
        module(x)
    step(module, x)
    with torch.inference_mode():
        module(x.detach().clone())
    assert counted == [(True, False), (), (), (True, True), (), ()] + [(True, False)] * 3


def test_what_is_gone_is_let_go():
    module, x = made(), tokens().detach()
    module.q_proj(x)
    assert known(module) is not None
    del x
    gc.collect()
    assert known(module) is None


def test_other_recipes_and_types_are_not_shared(counted):
    module, x = made(), tokens().detach()
    for recipe in ("delayed", "bf16"):
        with te.autocast(recipe=recipe):
            module(x)
    assert not counted and known(module) is None
    module.q_proj(x)
    with te.autocast(recipe="blockwise"):
        module.k_proj(x)
    with torch.amp.autocast("cpu", dtype=torch.float16):
        module.v_proj(x)
    assert () not in counted and len(counted) == 3


def test_checkpoints_and_copies(counted):
    module, want = made(), step(made(shares=False), tokens())
    got = step(module, tokens(), lambda module, x: checkpoint(module, x, use_reentrant=False))
    for name, value in want.items():
        assert_bitwise_equal(name, got[name], value)
    assert counted == [(True, True), (), ()] * 2
    other = copy.deepcopy(module)
    shared = {part._shared[0] for part in (other.q_proj, other.k_proj, other.v_proj)}
    assert len(shared) == 1 and shared != {module.q_proj._shared[0]}
    x = tokens().detach()
    counted.clear()
    module.q_proj(x), other.k_proj(x)
    assert counted == [(True, True)] * 2


@pytest.mark.gpu
def test_streams_do_not_share(counted):
    """What one has issued another does not wait for."""
    module, x = made(device="cuda"), tokens("cuda").detach()
    torch.cuda.synchronize()
    module.q_proj(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        module.k_proj(x)
    torch.cuda.synchronize()
    assert counted == [(True, True)] * 2


class Mlp(nn.Module):
    """Layers with names of siblings that do not share, but two."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(K, K, dtype=BF16) for _ in range(2))
        self.gate_proj, self.up_proj = nn.Linear(K, K, dtype=BF16), nn.Linear(2 * K, K, dtype=BF16)
        self.query = self.key = nn.Linear(K, K, dtype=BF16)


def test_who_shares():
    module = made(model=Mlp)
    assert {name for name, part in module.named_modules() if vars(part).get("_shared")} == {"w1", "w3"}
