"""FusedSGD under Transformer Engine's name, and what both optimizers do with gradients."""

import copy
import warnings
from typing import Any

import pytest
import torch

from te_lite.compat.alias.optimizers import FusedAdam, FusedSGD
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import UNIT_ROUNDOFF, assert_bitwise_equal


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_sgd_is_torchs(dtype: torch.dtype, device: str) -> None:
    """torch's own fused kernel gives wrong numbers on the CPU in 16 bits, from 16 elements on."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    mine = torch.nn.Parameter(torch.randn(1000, device=device, dtype=dtype))
    wide = torch.nn.Parameter(mine.detach().double())
    ours, theirs = FusedSGD([mine], **options), torch.optim.SGD([wide], **options, foreach=False)
    for step in range(5):
        mine.grad = torch.randn_like(mine)
        wide.grad = mine.grad.double()
        ours.step()
        theirs.step()
        if step == 2:
            state = copy.deepcopy(ours.state_dict())
            ours = FusedSGD([mine], **options)
            ours.load_state_dict(state)
    assert ours.param_groups[0]["fused"] is (device != "cpu")
    # Each of five steps rounds the momentum and the parameter, which stay below 8, to `dtype`, four times at most.
    error = (mine.detach().double() - wide.detach()).abs().max().item()
    assert error <= 5 * 4 * 8 * UNIT_ROUNDOFF[dtype], error


def test_fused_sgd_gets_scaled_gradients_right() -> None:
    """GradScaler leaves gradients to step() where all groups are fused; here it divides them itself."""
    params = [torch.nn.Parameter(torch.ones(32, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = FusedSGD(params[:1], lr=0.5)
    optimizer.add_param_group({"params": params[1:]})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sum(param.sum() for param in params)).backward()
    scaler.step(optimizer)
    for param in params:
        assert_bitwise_equal("parameter", param.detach(), torch.full((32,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_gradients_are_dropped_or_filled_with_zeros(kind: Any) -> None:
    def grad_after(asked: bool | None, *given: bool) -> torch.Tensor | None:
        param = torch.nn.Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        kind([param], lr=0.1, set_grad_none=asked).zero_grad(*given)
        return param.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for asked, given in ((None, ()), (None, (True,)), (True, ()), (True, (True,))):
            assert grad_after(asked, *given) is None
        for asked, given in ((None, (False,)), (False, ()), (False, (False,))):
            grad = grad_after(asked, *given)
            assert grad is not None and not grad.any()
        with pytest.raises(ValueError, match="leave out one"):
            grad_after(False, True)
