"""Converted siblings that read the same x: it is quantized once, with the bits of each for itself."""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_lite as te
from te_lite.functional import recordings
from te_lite.functional.shared_input import SharedInput
from te_lite.testing.distributed import device_params
from te_lite.testing.memory import bytes_kept
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.test_convert import STATELESS, convert_all

BF16, K, TOKENS = torch.bfloat16, 64, 48
RECIPES = (*STATELESS, "delayed")
SHARED = [name for name in RECIPES if name != "rowwise_with_gw_hp"]  # its wgrad reads x unquantized


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
    convert_all(module, "current" if recipe == "delayed" else recipe)  # delayed scaling needs an autocast
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


def step(module, x, call=None, recipe=""):
    x.grad = None
    module.zero_grad(set_to_none=True)
    with te.autocast(recipe="delayed") if recipe == "delayed" else contextlib.nullcontext():
        y = module(x) if call is None else call(module, x)
    y.square().sum().backward()
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assert_same_states(module, other):
    for (name, part), one in zip(module.named_modules(), other.modules(), strict=True):
        if isinstance(part, te.Linear):
            assert_bitwise_equal(f"state of {name}", part._scales.dump(), one._scales.dump())


def known(module):
    return module.q_proj._shared[0]._known


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_each_for_itself(recipe, device, counted):
    module, alone = made(recipe, device=device), made(recipe, False, device)
    for seed in range(3):
        counted.clear()
        want = step(alone, tokens(device, seed), recipe=recipe)
        assert not counted
        got = step(module, tokens(device, seed), recipe=recipe)
        for name, value in want.items():
            assert_bitwise_equal(name, got[name], value)
        assert_same_states(module, alone)
        if device == "cpu":  # on a GPU launches this small are recorded, each linear's for itself
            assert counted == ([(True, True), (), ()] if recipe in SHARED else [])
            assert recipe not in SHARED or known(module) is None, "let go after the last"


def test_less_is_kept():
    kept = [bytes_kept(made(shares=shares)(tokens())) for shares in (True, False)]
    # Two of three columns, a byte an element, with their scales; and three weights, which an x of its own pays for.
    assert kept[1] - kept[0] == 2 * (2 * TOKENS * K + 4) + 3 * K * K


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_x_pays_for_all_weights_or_none(recipe):
    """As many tokens as all three have features save as many bytes, 224 with scales; one's 64 would not do."""
    module, kept = made(recipe), []
    for tokens in (160, 224):
        x = torch.randn(tokens, K).to(BF16).requires_grad_()
        kept.append([bytes_kept(part(x)) for part in (module.q_proj, module.k_proj, module.v_proj)])
        del x
    # A byte for each value of x more, whose scales are as many: 160 and 224 rows are two blocks of 128. And the weight.
    assert [more - less for less, more in zip(*kept, strict=True)] == [pytest.approx(64 * K + K * K, abs=16)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_siblings_are_recorded_together(recipe, counted, monkeypatch):
    """Those of few features would be recorded long before the others, and quantize for themselves."""
    monkeypatch.setattr(recordings, "MOST_FLOPS", 2 * 2 * TOKENS * K * K - 1)
    module = Attention().to("cuda")
    module.k_proj = nn.Linear(K, K // 2, bias=False, dtype=BF16, device="cuda")
    convert_all(module, "current")
    for _ in range(5):
        counted.clear()
        x = tokens("cuda")
        with te.autocast(recipe="delayed") if recipe == "delayed" else contextlib.nullcontext():
            ys = [part(x).sum() for part in (module.q_proj, module.k_proj, module.v_proj)]
        sum(ys).backward()
        assert counted == [(True, True), (), ()]


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


def test_delayed_scaling_of_other_tensors(counted):
    """k and v read another tensor in some steps. What they note is what they would note alone; where their scale is
    another one, q's serves."""
    module, alone = made("delayed"), made("delayed", False)

    def call(module, x, memory):
        q, k, v = module.q_proj(x), module.k_proj(memory), module.v_proj(memory)
        return module.o_proj(q + k.tanh() * v)

    for seed, crosses in enumerate((True, False, True, False)):
        counted.clear()
        for one in (module, alone):
            x, memory = tokens(seed=seed), 8 * tokens(seed=10 + seed).detach()
            step(one, x, lambda part, x, memory=memory, crosses=crosses: call(part, x, memory if crosses else x),
                 "delayed")  # fmt: skip
        assert counted == [(True, True), *((True, True),) * crosses, *((),) * (2 - crosses)]
        for name in ("q_proj", "k_proj", "v_proj"):
            amaxes = [one.get_submodule(name)._scales._live["forward"].history[:, 0] for one in (module, alone)]
            assert_bitwise_equal(f"amaxes of x of {name}", *amaxes)


def test_an_amax_is_noted_of_what_a_layer_has_read_alone(counted):
    """q has read a larger tensor before, and evaluated one, in the same step. k and v have not."""
    module, alone = made("delayed"), made("delayed", False)
    for one in (module, alone):
        with torch.no_grad(), te.autocast(recipe="delayed"):
            one.q_proj(512 * tokens(seed=1))
        with te.autocast(recipe="delayed"):
            one.q_proj(64 * tokens(seed=2).detach())
            one(tokens())
    assert_same_states(module, alone)
    assert () in counted


def test_other_memory_behind_the_same_tensor():
    module, x = made(), tokens().detach()
    module.q_proj(x)
    x.data = tokens(seed=1).detach()[:1]
    assert_bitwise_equal("k", module.k_proj(x), made(shares=False).k_proj(x))


def test_delayed_scaling_after_a_step(counted):
    """Between q's call and k's the scales have taken a step: k quantizes by its new one."""
    module, alone = made("delayed"), made("delayed", False)
    for _ in range(3):
        for one in (module, alone):
            x, outs = tokens(), []
            for part in (one.q_proj, one.k_proj):
                with te.autocast(recipe="delayed"):
                    outs.append(part(x))
            (outs[0] + outs[1]).sum().backward()
        assert_same_states(module, alone)
    assert counted == [(True, True)] * 6


def test_delayed_scaling_in_checkpoints(counted):
    """Each notes its own scales, which the second run takes again."""
    module, alone = made("delayed"), made("delayed", False)
    for seed in range(3):
        want, got = (step(one, tokens(seed=seed), te.checkpoint, "delayed") for one in (alone, module))
        for name, value in want.items():
            assert_bitwise_equal(name, got[name], value)
        assert_same_states(module, alone)
    assert () not in counted


def test_what_a_checkpoint_has_computed_again_is_not_adopted(counted):
    """It noted no amax a second time. The same tensor is read by k while it lives, after the checkpoint."""
    module, alone = made("delayed"), made("delayed", False)
    for one in (module, alone):
        x, seen = tokens(), []

        def q(x, one=one, seen=seen):
            seen.append(x + 0)
            return one.q_proj(seen[-1])

        with te.autocast(recipe="delayed"):
            te.checkpoint(q, x).sum().backward()
            one.k_proj(seen[-1])
    assert_same_states(module, alone)
    assert () not in counted


def test_other_recipes_and_types_are_not_shared(counted):
    module, x = made(), tokens().detach()
    with te.autocast(recipe="bf16"):
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
