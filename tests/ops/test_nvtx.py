"""Ranges cost nothing when off and reach a profiler when on."""

import json
import os
import subprocess
import sys

import pytest
import torch

from te_lite.ops import nvtx

STEP = """
import json, torch, te_lite as te
torch.cuda.is_available = lambda: False  # ranges go to torch's profiler then
module = te.LayerNormMLP(32, 64, device="cpu", params_dtype=torch.bfloat16)
x = torch.randn(16, 32, dtype=torch.bfloat16)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    with te.fp8_autocast(fp8_recipe=te.recipe.Float8CurrentScaling()):
        module(x).sum().backward()
print(json.dumps({event.key: event.count for event in profile.key_averages()}))
"""


def test_off_is_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "ENABLED", False)
    assert nvtx.ranged("a")(torch.add) is torch.add


def test_on_is_seen_by_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "ENABLED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert nvtx.ranged("Linear.fprop")(torch.ones)(2).tolist() == [1.0, 1.0]
    assert any(event.key == "Linear.fprop" for event in profile.key_averages())


@pytest.mark.gpu
def test_on_with_cuda() -> None:
    with nvtx.nvtx_range("Linear.fprop"):
        torch.ones(2, device="cuda").add_(1)


def test_a_step_names_its_gemms_quantizations_and_norms() -> None:
    """With the ranges on, the profiler sees each of them in a step of the fused MLP."""
    said = subprocess.run(
        [sys.executable, "-c", STEP], check=True, capture_output=True, text=True, env=os.environ | {"TE_LITE_NVTX": "1"}
    )
    counts = json.loads(said.stdout.splitlines()[-1])
    assert [counts.get(f"te_lite.{gemm}") for gemm in ("fprop", "dgrad", "wgrad")] == [2, 2, 2]
    # Of each linear: x and w in one range in forward; dy, and w for dgrad, in one each in backward.
    assert counts["te_lite.quantize"] == 6 and counts["te_lite.norm"] == counts["te_lite.norm_backward"] == 1
