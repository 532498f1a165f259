"""States of FusedAdam: masters and their remainders, narrow states, state dicts."""

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_lite.compat.alias.adam_states import RANGE, STORED, join_master, split_master_
from te_lite.compat.alias.optimizers import FusedAdam
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.adams import KEPT, OPTIONS, REMAINDERS, STATES, STEPS, some_params, torchs, train

# Half a spacing between neighbours, relative for normal numbers, absolute for subnormal ones before their scale.
UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.uint8: 2.0**-4}
SUBNORMAL = {torch.float16: 2.0**-25, torch.uint8: 2.0**-10}


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """(bits << 16) + remainder, in 64 bits, so that nothing wraps."""
    bits = (param.detach().view(torch.int16).long() << 16) + remainder.long()
    return bits.to(torch.int32).view(torch.float32)


def test_remainders_are_the_masters_lower_half() -> None:
    params = some_params()
    wide, theirs = torchs(params)
    ours = FusedAdam(params, use_decoupled_grad=True, **REMAINDERS, **OPTIONS)
    carried = 0
    for step in range(20):
        train(ours, params, range(step, step + 1), "decoupled_grad", torch.float32)
        train(theirs, wide, range(step, step + 1))
        for param, truth in zip(params, wide, strict=True):
            remainder = ours.state[param]["master_param"]
            assert remainder.dtype == torch.int16 and ours.get_unscaled_state(param, "master_param") is remainder
            assert_bitwise_equal("master", joined(param, remainder), truth.detach())
            error = (param.double() - truth.double()).abs()
            assert bool((error <= UNIT[torch.bfloat16] * truth.abs()).all())
            carried += int((remainder < 0).sum())
    assert carried > 100, "no rounding has gone up"


@pytest.mark.parametrize(
    ("master", "param", "remainder"),
    [
        (0x3F800000, 0x3F80, 0),
        (0x3F800001, 0x3F80, 1),
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x3F808000, 0x3F81, -0x8000),  # a tie: away from zero, where nearest even is 0x3F80
        (0xBF808000, 0xBF81, -0x8000),
        (0x3FFFFFFF, 0x4000, -1),  # the carry goes into the exponent
        (0x007FFFFF, 0x0080, -1),  # from subnormal to normal
        (0x80000001, 0x8000, 1),
        (0x7F7FFFFF, 0x7F80, -1),  # the parameter is infinite, the master is not
        (0xFF800000, 0xFF80, 0),
        (0x7FFFFFFF, 0x7FC0, 0),  # NVIDIA's NaN: rounding it up would give -0
    ],
)
def test_remainders_where_rounding_carries(master: int, param: int, remainder: int) -> None:
    for shape in ((), (1,), (2, 3)):
        wide = torch.full(shape, master, dtype=torch.int64).to(torch.int32).view(torch.float32)
        upper, lower = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.int16)
        split_master_(upper, lower, wide)
        assert bool((upper.view(torch.int16).int() & 0xFFFF).eq(param).all()) and bool(lower.eq(remainder).all())
        again = join_master(upper, lower)
        assert again.shape == wide.shape
        assert torch.equal(again.view(torch.int32), wide.view(torch.int32)) or bool(
            (wide.isnan() & again.isnan()).all()
        )


def rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """What a state of `dtype` holds for fp32 numbers: one rounding under a scale that is a power of two."""
    if dtype not in (torch.float16, torch.uint8) or not wide.numel():
        return wide.to(STORED[dtype]).float()
    largest = float(wide.abs().max())
    if largest == 0:
        return wide
    scale = 2.0 ** math.ceil(math.log2(largest / RANGE[STORED[dtype]]))
    return (wide.double() / scale).float().to(STORED[dtype]).float() * scale


@pytest.mark.parametrize("square", STATES)
@pytest.mark.parametrize("average", STATES)
def test_states_are_rounded_once_in_each_step(average: torch.dtype, square: torch.dtype) -> None:
    """As torch's optimizer with its states rounded after each step, bit for bit."""
    params = some_params()
    wide, theirs = torchs(params)
    ours = FusedAdam(params, master_weights=True, exp_avg_dtype=average, exp_avg_sq_dtype=square, **OPTIONS)
    for step in range(STEPS):
        train(ours, params, range(step, step + 1))
        train(theirs, wide, range(step, step + 1))
        for param, truth in zip(params, wide, strict=True):
            assert_bitwise_equal("master", ours.state[param]["master_param"], truth.detach())
            for name, dtype in (("exp_avg", average), ("exp_avg_sq", square)):
                exact = theirs.state[truth][name]
                kept = rounded(exact, dtype)
                assert ours.state[param][name].dtype == STORED[dtype]
                assert_bitwise_equal(name, ours.get_unscaled_state(param, name), kept)
                exact.copy_(kept)


@pytest.mark.parametrize("dtype", STATES)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 0.0])
def test_states_are_within_their_rounding(dtype: torch.dtype, size: float) -> None:
    (param,) = params = [torch.nn.Parameter(torch.randn(1000))]
    ours = FusedAdam(params, exp_avg_dtype=dtype)
    state = torch.randn(1000) * size
    given = state.clone()
    ours.set_scaled_state(param, "exp_avg", state)
    assert torch.equal(state, given), "the caller's tensor was written to"
    error = (ours.get_unscaled_state(param, "exp_avg").double() - state.double()).abs()
    scale = 2 * float(state.abs().max()) / RANGE.get(STORED[dtype], 1.0)
    bound = UNIT[dtype] * state.double().abs() + SUBNORMAL.get(dtype, 0.0) * scale
    assert bool((error <= bound).all()), float((error - bound).max())
    if size and dtype != torch.float32:
        assert not bool((error <= bound / 4).all()), "the bound does not bite"
    for bad in (torch.inf, torch.nan):  # nothing hides it
        state[3] = bad
        ours.set_scaled_state(param, "exp_avg", state)
        kept = ours.get_unscaled_state(param, "exp_avg")
        assert not kept[3].isfinite() and (STORED[dtype] not in RANGE or kept.isnan().all())


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_state_dict_goes_round(kept: dict[str, Any]) -> None:
    """All in fp32, and a fresh optimizer, or the same, goes on with the same bits."""
    params = [*some_params(), *some_params(torch.float32, 2)]
    ours = FusedAdam(params, **kept, **OPTIONS)
    train(ours, params, range(STEPS))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    allowed = {torch.float32, torch.int16} if "store_param_remainders" in kept else {torch.float32}
    assert {value.dtype for held in saved["state"].values() for value in held.values()} == allowed
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    fresh = FusedAdam(others, **kept)
    fresh.load_state_dict(saved)
    train(ours, params, range(STEPS, 2 * STEPS))
    train(fresh, others, range(STEPS, 2 * STEPS))
    for one, other in zip(params, others, strict=True):
        assert_bitwise_equal("parameter", other.detach(), one.detach())
        assert set(ours.state[one]) == set(fresh.state[other])
        for name in ours.state[one]:
            new, old = (which.get_unscaled_state(param, name) for which, param in ((fresh, other), (ours, one)))
            assert_bitwise_equal(name, new, old)
    tensors = [id(value) for held in ours.state.values() for value in held.values()]
    ours.load_state_dict(saved)
    assert tensors == [id(value) for held in ours.state.values() for value in held.values()], "graphs read these"
    assert ours.param_groups[0]["step"] == STEPS and ours.param_groups[0]["lr"] == OPTIONS["lr"]
    empty = FusedAdam(some_params(), **kept)
    empty.load_state_dict(empty.state_dict())
    assert not empty.state


def test_masters_of_fp16_are_scaled() -> None:
    """The parameter is rounded from the fp32 master of the step; what is kept of it is rounded to 11 bits."""
    params = some_params()
    wide, theirs = torchs(params)
    ours = FusedAdam(params, master_weights=True, master_weight_dtype=torch.float16, **OPTIONS)
    train(ours, params, range(1))
    train(theirs, wide, range(1))
    for param, truth in zip(params, wide, strict=True):
        assert ours.state[param]["master_param"].dtype == torch.float16
        kept = ours.get_unscaled_state(param, "master_param")
        assert_bitwise_equal("master", kept, rounded(truth.detach(), torch.float16))
        assert_bitwise_equal("parameter", param.detach(), truth.detach().bfloat16())


def test_states_are_made_by_name() -> None:
    """initialize_state and set_scaled_state, as Megatron-core's distributed optimizer calls them."""
    narrow, wide = some_params()[0], some_params(torch.float32)[1]
    ours = FusedAdam([narrow, wide], **REMAINDERS)
    ours.initialize_state(narrow)
    assert ours.state[narrow]["master_param"].eq(0).all() and ours.state[narrow]["exp_avg"].eq(0).all()
    ours.set_scaled_state(wide, "master_param", torch.ones(7))
    assert wide.ne(1).all() and ours.get_unscaled_state(wide, "master_param").eq(1).all()
    with pytest.raises(TypeError, match="is torch.float32: must be torch.int16"):
        ours.set_scaled_state(narrow, "master_param", torch.full((8, 12), 0.5))
    ours.set_scaled_state(narrow, "master_param", torch.full((8, 12), -3.0))  # gathered in fp32 by Megatron-core
    assert ours.state[narrow]["master_param"].eq(-3).all()
    ours.set_scaled_state(narrow, "padding", False)
    with pytest.raises(TypeError, match="is torch.bfloat16: must be torch.float32"):
        ours.set_scaled_state(narrow, "exp_avg", torch.ones(8, 12).bfloat16())
    with pytest.raises(ValueError, match=r"is \(96,\): must be \(8, 12\)"):
        ours.set_scaled_state(narrow, "exp_avg", torch.ones(96))
    with pytest.raises(ValueError, match="no state 'step'"):
        ours.set_scaled_state(narrow, "step", torch.ones(8, 12))
    with pytest.raises(ValueError, match="leave it out"):
        ours.initialize_state(narrow, False)
    # What Megatron-core allocates before it loads: int16 for every master.
    ours.load_state_dict({**ours.state_dict(), "state": {1: {"master_param": torch.ones(7, dtype=torch.int16)}}})
    assert torch.equal(ours.state[wide]["master_param"], wide)
    ours.step()
    masters = FusedAdam([narrow], master_weights=True)
    held = {0: {"master_param": torch.ones(8, 12, dtype=torch.int16)}}
    with pytest.raises(TypeError, match="store_param_remainders=True"):
        masters.load_state_dict({**masters.state_dict(), "state": held})
    plain = FusedAdam([narrow])
    with pytest.raises(ValueError, match="master_weights=True"):
        plain.load_state_dict({**plain.state_dict(), "state": held})
