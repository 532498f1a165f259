"""bench.captured: a step as a CUDA graph."""

import pytest
import torch

from benchmarks import bench


@pytest.mark.gpu
def test_captured_replays_a_step_that_ran_twice_before():
    x = torch.randint(-8, 9, (1000,), device="cuda").float()  # sums are exact
    total, calls = torch.zeros_like(x), []

    def step():
        calls.append(torch.cuda.is_current_stream_capturing())
        total.add_(x)

    replay = bench.captured(step)
    assert not calls
    for replays in (1, 2, 3):
        replay()
        assert calls == [False, False, True]
        assert torch.equal(total, (2 + replays) * x)
