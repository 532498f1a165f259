"""FusedAdam under Transformer Engine's name: its steps, gradients, graphs, quantized parameters, refusals."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import te_lite as te
from te_lite.compat.alias import fused_adam
from te_lite.compat.alias.optimizers import FusedAdam
from te_lite.testing.numerics import UNIT_ROUNDOFF, assert_bitwise_equal
from tests.compat.adams import KEPT, OPTIONS, REMAINDERS, STEPS, set_grads, some_params, torchs, train


@pytest.mark.parametrize("adam_w", [False, True])
def test_fused_adam_is_torchs(adam_w):
    mine = torch.nn.Linear(8, 8)
    theirs = copy.deepcopy(mine)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)}
    ours = FusedAdam(mine.parameters(), adam_w_mode=adam_w, **options)
    torchs = torch.optim.Adam(theirs.parameters(), fused=True, decoupled_weight_decay=adam_w, **options)
    for step in range(4):
        x = torch.randn(4, 8)
        for model, optimizer in ((mine, ours), (theirs, torchs)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        if step == 1:  # the state goes through a state dict, the step in the group
            state = copy.deepcopy(ours.state_dict())
            ours = FusedAdam(mine.parameters(), adam_w_mode=adam_w, **options)
            ours.load_state_dict(state)
    assert torch.equal(mine.weight, theirs.weight) and ours.param_groups[0]["step"] == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_adam_keeps_fp32_states_of_narrow_parameters(dtype):
    """Its numbers are those of fp32 parameters that are rounded after each step; also after a state was loaded."""
    mine = torch.nn.Parameter(torch.randn(64).to(dtype))
    wide = torch.nn.Parameter(mine.detach().float())
    ours = FusedAdam([mine], 1e-2, (0.8, 0.999), 1e-6, 0.1)
    torchs = torch.optim.AdamW([wide], 1e-2, (0.8, 0.999), 1e-6, 0.1, fused=True)
    for step in range(40):
        mine.grad = torch.randn(64).to(dtype)
        wide.grad = mine.grad.float()
        ours.step()
        torchs.step()
        wide.data.copy_(wide.data.to(dtype))
        if step == 20:
            state = copy.deepcopy(ours.state_dict())
            ours = FusedAdam([mine], 1e-2, (0.8, 0.999), 1e-6, 0.1)
            ours.load_state_dict(state)
    assert torch.equal(mine.float(), wide)
    for name in ("exp_avg", "exp_avg_sq"):
        assert ours.state[mine][name].dtype == torch.float32
        assert torch.equal(ours.state[mine][name], torchs.state[wide][name])


@pytest.mark.parametrize("adam_w", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_are_torchs_fp32_parameters(dtype: torch.dtype, adam_w: bool) -> None:
    """Bit for bit, from decoupled gradients in fp32; the parameter is the master, rounded. An fp32 one is its own."""
    params = some_params(dtype)
    wide, theirs = torchs(params, adam_w)
    ours = FusedAdam(params, master_weights=True, use_decoupled_grad=True, adam_w_mode=adam_w, **OPTIONS)
    train(ours, params, range(STEPS), "decoupled_grad", torch.float32)
    train(theirs, wide, range(STEPS))
    for param, truth in zip(params, wide, strict=True):
        assert_bitwise_equal("master", ours.get_unscaled_state(param, "master_param"), truth.detach())
        assert_bitwise_equal("parameter", param.detach(), truth.detach().to(dtype))
        assert param.grad is None
    if dtype != torch.float32:
        assert not torch.equal(wide[0], params[0].float()), "the masters hold no more than the parameters"


def test_gradients_are_read_where_they_were_asked_for() -> None:
    params = some_params()
    before = [param.detach().clone() for param in params]
    ours = FusedAdam(params, use_decoupled_grad=True, **OPTIONS)
    set_grads(params, 1)  # .grad, which it does not read
    ours.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True)) and ours.param_groups[0]["step"] == 1
    assert ours.state[params[0]]["exp_avg"].eq(0).all()
    set_grads(params, 1, "decoupled_grad", torch.float32)
    ours.zero_grad(set_to_none=False)
    assert params[0].decoupled_grad.eq(0).all() and params[0].grad.ne(0).any()
    ours.zero_grad()
    ours.zero_grad(set_to_none=False)
    assert params[0].decoupled_grad is None
    with pytest.warns(DeprecationWarning, match="set_to_none"):
        ours = FusedAdam(params, set_grad_none=False)
    ours.zero_grad()
    assert params[0].grad.eq(0).all()
    with pytest.raises(ValueError, match="set_grad_none"):
        ours.zero_grad(set_to_none=True)


@pytest.mark.parametrize("adam_w", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_formula_in_fp64(adam_w: bool, corrected: bool) -> None:
    """Against the formula in fp64. Each of the steps moves a number by at most 4 lr, itself good to 16 roundings."""
    (param,) = params = [torch.nn.Parameter(torch.randn(64))]
    value, average, square = (param.detach().double().clone() if i == 0 else torch.zeros(64).double() for i in range(3))
    start = value.clone()
    ours = FusedAdam(params, bias_correction=corrected, adam_w_mode=adam_w, **OPTIONS)
    (first, second), lr, decay = OPTIONS["betas"], OPTIONS["lr"], OPTIONS["weight_decay"]
    for step in range(1, STEPS + 1):
        set_grads(params, step)
        ours.step()
        set_grads(params, step)
        grad = param.grad.double()
        if adam_w:
            value = value * (1 - lr * decay)
        else:
            grad = grad + decay * value
        average = first * average + (1 - first) * grad
        square = second * square + (1 - second) * grad**2
        one, two = (1 - first**step, 1 - second**step) if corrected else (1.0, 1.0)
        value = value - lr * (average / one) / ((square / two).sqrt() + OPTIONS["eps"])
    unit = UNIT_ROUNDOFF[torch.float32]
    moved = lr * 10  # without correction (1 - 0.8) / sqrt(1 - 0.999) is 6.3
    bound = STEPS * unit * (2 * start.abs() + 2 * STEPS * moved + 16 * moved)
    assert bool(((param.double() - value).abs() <= bound).all()), float(((param.double() - value).abs() / bound).max())
    assert bool(((value - start).abs() > 1000 * bound).any()), "the bound does not bite"


@pytest.mark.parametrize("kept", [{}, KEPT[1], KEPT[3]], ids=str)
def test_capturable_gives_the_same_bits(kept: dict[str, Any]) -> None:
    found = []
    for capturable in (False, True):
        params = [*some_params(), *some_params(torch.float32, 2)]
        ours = FusedAdam([{"params": params[:4]}, {"params": params[4:], "lr": 0.125}], capturable=capturable,
                         **kept, **OPTIONS)  # fmt: skip
        train(ours, params, range(STEPS))
        group = ours.param_groups[1]
        if capturable:
            assert group["step"].dtype == torch.int32 and group["lr"].dtype == torch.float32
            group["lr"].fill_(0.5)
        else:
            group["lr"] = 0.5
        train(ours, params, range(STEPS, 2 * STEPS))
        found.append((params, ours))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert_bitwise_equal("parameter", other.detach(), one.detach())
    (params, plain), (_, capturable_one) = found
    plain.load_state_dict(capturable_one.state_dict())
    assert plain.param_groups[0]["step"] == 2 * STEPS and isinstance(plain.param_groups[0]["step"], int)
    step = capturable_one.param_groups[0]["step"]
    capturable_one.load_state_dict(
        FusedAdam(params, **kept).state_dict() | {"param_groups": plain.state_dict()["param_groups"]}
    )
    assert capturable_one.param_groups[0]["step"] is step and int(step) == 2 * STEPS
    capturable_one.param_groups[0]["lr"] = 0.1
    set_grads(found[1][0], 1)
    with pytest.raises(TypeError, match="lr is 0.1"):
        capturable_one.step()


def test_capturable_takes_torchs_scaler() -> None:
    """A gradient that is not finite leaves parameters, states and the step as they are; others are divided."""
    (param,) = params = [torch.nn.Parameter(torch.randn(8))]
    wide, theirs = torchs(params)
    ours = FusedAdam(params, capturable=True, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    called: list[Any] = []
    ours.register_step_post_hook(lambda *given: called.append(given))
    for step, bad in enumerate((False, True, False)):
        set_grads(wide, step)
        scaler.scale((param * wide[0].grad).sum()).backward()
        if bad:
            param.grad[3] = torch.inf
        else:
            theirs.step()
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
    assert_bitwise_equal("parameter", param.detach(), wide[0].detach())
    assert int(ours.param_groups[0]["step"]) == 2 and len(called) == 3, "the scaler has asked the host"


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "blockwise"])
def test_quantized_parameters(recipe: str, masters: bool) -> None:
    """The new numbers are quantized into them. Without masters each step starts from what they hold."""
    with te.quantized_model_init(recipe=recipe):
        weight = te.Linear(32, 64, bias=False, params_dtype=torch.bfloat16, device="cpu").weight
    expected = copy.deepcopy(weight)
    wide, theirs = torchs([weight.dequantize(torch.float32)])
    ours = FusedAdam([weight], use_decoupled_grad=True, master_weights=masters, store_param_remainders=True, **OPTIONS)
    for step in range(STEPS):
        train(ours, [weight], range(step, step + 1), "decoupled_grad", torch.float32)
        train(theirs, wide, range(step, step + 1))
        with torch.no_grad():
            expected.quantize_(wide[0].detach())
            if not masters:
                wide[0].copy_(expected.dequantize(torch.float32))
        if masters:
            assert_bitwise_equal("master", ours.state[weight]["master_param"], wide[0].detach())
        assert_bitwise_equal("weight", weight.dequantize(), expected.dequantize())
    if masters:  # as Megatron-core's distributed optimizer would do it: a flat part is a copy
        ours = FusedAdam([weight], master_weights=True)
        ours.param_groups[0]["params"] = [weight.detach().view(-1)[:64]]
        with pytest.raises(NotImplementedError, match="parts of quantized parameters"):
            ours.load_state_dict(ours.state_dict())
    with pytest.raises(NotImplementedError, match="capturable"):
        FusedAdam([weight], capturable=True)


def test_parts_hold_so_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adam, "_PART", 50)
    pairs = [(torch.empty(size),) * 2 for size in (20, 30, 20, 40, 70, 0, 0, 50, 10)]
    parts = list(fused_adam._parts(pairs))
    assert [pair for part in parts for pair in part] == pairs
    assert [sum(pair[0].numel() for pair in part) for part in parts] == [50, 20, 40, 70, 50, 10]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("kept", [{}, {"master_weights": True, "exp_avg_dtype": torch.bfloat16}], ids=str)
def test_dtensors(mesh: DeviceMesh, kept: dict[str, Any]) -> None:
    """As plain ones, with DTensors as states."""
    (usual,) = some_params()[:1]
    sharded = torch.nn.Parameter(distribute_tensor(usual.detach().clone(), mesh, [Shard(0)]))
    ours, other = (FusedAdam([param], **kept, **OPTIONS) for param in (usual, sharded))
    for step in range(STEPS):
        set_grads([usual], step)
        sharded.grad = distribute_tensor(usual.grad.clone(), mesh, [Shard(0)])
        ours.step()
        other.step()
    other.load_state_dict(other.state_dict())
    assert_bitwise_equal("parameter", sharded.detach().full_tensor(), usual.detach())
    for name in ours.state[usual]:
        assert_bitwise_equal(name, other.state[sharded][name].full_tensor(), ours.state[usual][name])
    for refused in ({"exp_avg_sq_dtype": torch.float16}, REMAINDERS):
        with pytest.raises(NotImplementedError, match="of a DTensor; use states of fp32 or bf16"):
            FusedAdam([sharded], **refused).step()


def test_layouts_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed parameters and gradients, and a step in several parts, give the same numbers."""
    monkeypatch.setattr(fused_adam, "_PART", 50)
    for dtype, kept in ((torch.float32, {}), (torch.bfloat16, REMAINDERS), (torch.bfloat16, KEPT[1])):
        values = torch.randn(12, 8).to(dtype)
        usual = [torch.nn.Parameter(values.clone()), *some_params(dtype)]
        other = [torch.nn.Parameter(values.t().contiguous().t()), *some_params(dtype)]
        assert not other[0].is_contiguous()
        for params in (usual, other):
            ours = FusedAdam(params, **kept, **OPTIONS)
            for step in range(STEPS):
                set_grads(params, step)
                if (params is other) == bool(step % 2):
                    params[0].grad = params[0].grad.t().contiguous().t()
                ours.step()
        for one, two in zip(usual, other, strict=True):
            assert_bitwise_equal("parameter", two.detach(), one.detach())


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"amsgrad": True}, NotImplementedError, "amsgrad"),
        ({"master_weights": True, "master_weight_dtype": torch.bfloat16}, ValueError, "master_weight_dtype=torch.bf"),
        ({"exp_avg_dtype": torch.float64}, ValueError, "exp_avg_dtype=torch.float64"),
        ({"exp_avg_sq_dtype": torch.int8}, ValueError, "exp_avg_sq_dtype=torch.int8"),
    ],
    ids=str,
)
def test_refused(given: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        FusedAdam(some_params(), **given)


def test_gradients_and_parameters_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch.float64: must be of torch.float32"):
        FusedAdam(some_params(torch.float64))
    (param,) = params = some_params()[:1]
    ours = FusedAdam(params, use_decoupled_grad=True)
    param.decoupled_grad = torch.ones(96)
    with pytest.raises(ValueError, match=r"decoupled_grad is \(96,\) on cpu"):
        ours.step()
    param.decoupled_grad = torch.ones(8, 12).to_sparse()
    with pytest.raises(NotImplementedError, match="sparse"):
        ours.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unscaled_gradients_stand_in_grad(dtype: torch.dtype) -> None:
    """After the step of a capturable FusedAdam under a GradScaler, as of Transformer Engine's."""
    param = torch.nn.Parameter(torch.randn(6, 4).to(dtype))
    optimizer = FusedAdam([param], lr=0.1, capturable=True, master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    want = 2 * param.detach()
    scaler.scale((param * param).sum()).backward()
    assert param.grad is not None
    param.grad = param.grad.t().contiguous().t()  # of other strides than the kernel takes
    scaler.step(optimizer)
    assert_bitwise_equal("grad", param.grad, want)
