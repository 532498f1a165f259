"""Ranges cost nothing when off and reach a profiler when on."""

import pytest
import torch

from te_lite.ops import nvtx


def test_off_is_one_shared_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "_ENABLED", False)
    assert nvtx.nvtx_range("a") is nvtx.nvtx_range("b")
    with nvtx.nvtx_range("a"), nvtx.nvtx_range("b"):
        pass


def test_on_is_seen_by_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "_ENABLED", False)
    nvtx.enable_nvtx()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with nvtx.nvtx_range("Linear.fprop"):
            torch.ones(2).add_(1)
    assert any(event.key == "Linear.fprop" for event in profile.key_averages())


@pytest.mark.gpu
def test_on_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "_ENABLED", True)
    with nvtx.nvtx_range("Linear.fprop"):
        torch.ones(2, device="cuda").add_(1)
