"""Megatron-core's GPT over te_lite on one GPU: tp 1, pp 1. Each case is a process, which a failed capture may take
down."""

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from te_lite.testing.distributed import launch
from te_lite.testing.numerics import UNIT_ROUNDOFF

SCRIPT = Path(__file__).parent / "run_megatron_gpu.py"
pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (pip install -e '.[test]')")
NEAR = UNIT_ROUNDOFF[torch.bfloat16]  # a weight may round to its neighbour
QUANTIZED = 2.0**-4  # of the first loss, by the roundings of fp8


@dataclass(frozen=True)
class Case:
    """Of run_megatron_gpu.check: what examples/megatron_gpt.py gets, and what is compared with what."""

    options: str
    beside: str
    bound: float = 0.0
    steps: int = 6
    cached: bool = True


GRAPHS = {
    f"{impl} {recipe}": Case(
        f"--recipe {recipe} --cuda-graphs {impl}", f"--recipe {recipe}",
        cached=(impl, recipe) != ("local", "delayed"),  # its graphs quantize weights in each micro-batch
    )
    for impl in ("local", "transformer_engine") for recipe in ("bf16", "delayed", "tensorwise", "blockwise")
}  # fmt: skip
SHARDED = "--recipe tensorwise --fp8-param --distributed-optimizer"
QUANTIZED_WEIGHTS = {
    f"{how} {recipe}": Case(f"--recipe {recipe} --fp8-param {more}", f"--recipe {recipe}", QUANTIZED, 4)
    for how, more, recipes in (
        ("fp8 parameters,", "", ("delayed", "tensorwise", "mxfp8", "blockwise")),
        ("sharded fp8 parameters,", "--distributed-optimizer", ("mxfp8", "blockwise")),
    )
    for recipe in recipes
}
CASES = {
    **GRAPHS,
    "local fp8 parameters": Case(f"{SHARDED} --cuda-graphs local", SHARDED),
    "te spec": Case("--recipe bf16", "--recipe bf16 --spec local", NEAR, 2),
    "delayed": Case("--recipe delayed", "--recipe bf16", QUANTIZED, 4),
    "tensorwise": Case("--recipe tensorwise", "--recipe bf16", QUANTIZED, 4),
    **QUANTIZED_WEIGHTS,
    "distributed optimizer": Case("--recipe delayed --distributed-optimizer", "--recipe delayed", NEAR),
    "recompute": Case("--recipe delayed --recompute full", "--recipe delayed"),
    "selective recompute": Case("--recipe tensorwise --recompute selective", "--recipe tensorwise"),
    # dw is added in fp32 and not in bf16 first.
    "gradient accumulation fusion": Case("--recipe delayed --fuse-wgrad", "--recipe delayed", NEAR, 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_losses(name: str) -> None:
    """Those of the same training without graphs, in bf16, without recomputation, ..."""
    assert "all is well" in launch(SCRIPT, json.dumps(asdict(CASES[name])), ranks=1, timeout=240)


@pytest.mark.parametrize("name", ["selective recompute", "fp8 parameters, mxfp8", "fp8 parameters, blockwise"])
def test_the_script_runs_on_a_cpu(name: str) -> None:
    case = json.dumps(asdict(CASES[name]))
    assert "all is well" in launch(SCRIPT, case, ranks=1, timeout=240, env={"CUDA_VISIBLE_DEVICES": ""})
