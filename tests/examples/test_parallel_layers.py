"""The vocabulary-parallel embedding, head and cross-entropy against torch's own, in fp64."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.gpt.parallel_layers import vocab_parallel_cross_entropy, vocabulary_range
from te_lite.testing.distributed import launch
from tests.examples.demo import TIMEOUT

RANKS_SCRIPT = Path(__file__).with_name("ranks_parallel_layers.py")


@pytest.mark.parametrize("tp", [2, 4])
def test_against_unsharded(tp: int) -> None:
    result = json.loads(launch(RANKS_SCRIPT, str(tp), ranks=tp, timeout=TIMEOUT))
    assert result["checked"] == 14
    assert not result["failures"], "\n".join(result["failures"])


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["small", "large"])
def test_cross_entropy_of_one_rank(scale: float) -> None:
    """The same function without a group; gradients of a loss whose rows have different weights."""
    logits = (torch.randn(5, 3, 17, dtype=torch.float64) * scale).requires_grad_()
    targets, weights = torch.randint(17, (5, 3)), torch.randn(5, 3, dtype=torch.float64)
    loss = vocab_parallel_cross_entropy(logits, targets, None)
    (loss * weights).sum().backward()
    ours, logits.grad = logits.grad, None
    truth = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(5, 3)
    (truth * weights).sum().backward()
    torch.testing.assert_close(loss, truth, rtol=1e-14, atol=1e-14 * scale)
    torch.testing.assert_close(ours, logits.grad, rtol=0, atol=1e-14)


def test_bf16_logits_are_summed_in_fp32() -> None:
    """4096 equal logits: loss ln 4096. A bf16 sum of exponentials would stall at 256, loss ln 256."""
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([7]), None)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(8.317766, abs=1e-5)
    loss.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_bad_targets_and_vocabulary_are_named() -> None:
    with pytest.raises(ValueError, match=r"targets \(2,\) do not fit logits \(3, 8\).*one target"):
        vocab_parallel_cross_entropy(torch.zeros(3, 8), torch.zeros(2, dtype=torch.int64), None)
    assert vocabulary_range(256, None) == (0, 256)
