"""te.checkpoint(distribute_saved_activations=True): each rank keeps a part of the input."""

from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import launch, rank_device_params

SCRIPT = Path(__file__).with_name("ranks_checkpoint.py")


@pytest.mark.parametrize("device", rank_device_params(2))
def test_two_ranks(device: str) -> None:
    """The bits of a checkpoint that keeps it whole, and the input's memory is free after forward."""
    assert "VERDICT: parts are gathered" in launch(SCRIPT, "--device", device, ranks=2, timeout=240)


def test_what_it_needs_is_named() -> None:
    linear, x = te.Linear(32, 32, device="cpu"), torch.randn(4, 32, requires_grad=True)
    with pytest.raises(ValueError, match="tp_group=None: pass the ranks"):
        te.checkpoint(linear, x, distribute_saved_activations=True)
    for args in ((), ("text", x)):
        with pytest.raises(TypeError, match="first input is a .* must be a plain tensor"):
            te.checkpoint(linear, *args, distribute_saved_activations=True)
    with pytest.raises(Exception, match="gathers its input in backward"):
        torch.compile(
            lambda x: te.checkpoint(linear, x, distribute_saved_activations=True), fullgraph=True, backend="eager"
        )(x)
