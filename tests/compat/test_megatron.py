"""Megatron-core's GPT, its files unmodified, over te_lite under Transformer Engine's name."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from te_lite.testing.distributed import launch

SCRIPT = Path(__file__).parent / "ranks_megatron.py"
EXPERTS = Path(__file__).parent / "ranks_megatron_moe.py"
OPTIMIZER = Path(__file__).parent / "ranks_megatron_optimizer.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt.py"
RANKS = {"one": 1, "tp": 2, "pp": 2, "dp": 2}
pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (pip install -e '.[test]')")


def losses(out: str) -> list[float]:
    return [float(line.split()[3]) for line in out.splitlines() if line.startswith("step")]


def assert_applied(out: str, recipe: str, overlap: bool = False) -> None:
    """By the report that rank 0 prints: all GEMMs ran in fp8, or none, and something was overlapped, or nothing."""
    rows = out[out.index("module ") :]
    assert ("bf16 x bf16" in rows) is (recipe == "bf16"), out
    assert any(f" {how} " in rows for how in ("ring", "fused", "bulk", "pipeline")) is overlap, out


@pytest.mark.parametrize("world", RANKS)
def test_gpt(world: str) -> None:
    """The cases of ranks_megatron.py: recipes, recomputation, overlap, fp8 parameters, optimizers, on CPU ranks."""
    out = launch(SCRIPT, world, ranks=RANKS[world], timeout=300, env={"CUDA_VISIBLE_DEVICES": ""})
    assert out.count("ok Case(") >= 5, out


@pytest.mark.parametrize("world", ["one", "ep", "tp"])
def test_experts(world: str) -> None:
    """The cases of ranks_megatron_moe.py: grouped experts, dispatchers, permutation, main_grad, checkpoints."""
    out = launch(EXPERTS, world, ranks=1 if world == "one" else 2, timeout=300, env={"CUDA_VISIBLE_DEVICES": ""})
    assert out.count("ok MoeCase(") >= 3, out


def test_precision_aware_optimizer() -> None:
    """The cases of ranks_megatron_optimizer.py: masters, remainders, narrow states, sharded checkpoints."""
    out = launch(OPTIMIZER, ranks=2, timeout=300, env={"CUDA_VISIBLE_DEVICES": ""})
    assert out.count("ok Case(") == 5, out


@pytest.mark.parametrize("more", [(), ("--experts", "4")], ids=" ".join)
def test_example_learns(more: tuple[str, ...]) -> None:
    args = "--recipe", "delayed", "--steps", "12", "--lr", "0.01", *more
    out = launch(EXAMPLE, *args, ranks=1, timeout=200, env={"CUDA_VISIBLE_DEVICES": ""})
    found = losses(out)
    assert len(found) == 12 and found[-1] < 0.95 * found[0], found
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "megatron.md").read_text()
    assert "With `--experts` that is attention's alone" in page  # two linears, without the two of the MLP
    assert out.count(" wgrad ") == (2 if more else 4), out


def test_example_logs_the_losses_of_a_pipeline(tmp_path: Path) -> None:
    """The last stage has them, the first prints the report."""
    log = tmp_path / "log.json"
    args = "--recipe", "delayed", "--pp", "2", "--steps", "3", "--log-json", str(log)
    out = launch(EXAMPLE, *args, ranks=2, timeout=200, env={"CUDA_VISIBLE_DEVICES": ""})
    assert len(json.loads(log.read_text())["losses"]) == 3
    assert_applied(out, "delayed")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "tensorwise", "mxfp8", "blockwise"])
@pytest.mark.parametrize("more", [(), ("--experts", "4")], ids=" ".join)
def test_example_on_a_gpu(more: tuple[str, ...], recipe: str) -> None:
    """Its losses are those of Megatron's own layers, within the roundings of fp8 in the first step."""
    args = "--hidden", "256", "--ffn", "512", "--steps", "12", "--lr", "0.01", *more
    found = losses(launch(EXAMPLE, "--recipe", recipe, *args, ranks=1, timeout=300))
    local = losses(launch(EXAMPLE, "--spec", "local", *args, ranks=1, timeout=300))
    assert abs(found[0] / local[0] - 1) < 2.0**-4 and found[-1] < 0.95 * found[0], (found, local)


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "tensorwise", "mxfp8", "blockwise"])
@pytest.mark.parametrize("more", [("--tp", "2", "--overlap"), ("--pp", "2", "--recompute", "full"),
                                  ("--experts", "4", "--ep", "2"),
                                  ("--fp8-param", "--distributed-optimizer")], ids=" ".join)  # fmt: skip
def test_example_on_two_gpus(recipe: str, more: tuple[str, ...], tmp_path: Path) -> None:
    if recipe == "bf16" and "--fp8-param" in more:
        pytest.skip("no fp8 parameters in bf16")
    log = tmp_path / "log.json"  # of the last stage's rank, where there is a pipeline
    args = "--hidden", "256", "--ffn", "512", "--steps", "12", "--lr", "0.01", "--recipe", recipe, *more
    rule = {"TE_LITE_AUTO": "rule"}  # for a small model measuring may choose no overlap
    out = launch(EXAMPLE, *args, "--log-json", str(log), ranks=2, timeout=300, env=rule)
    assert_applied(out, recipe, "--overlap" in more)
    found = json.loads(log.read_text())["losses"]
    assert len(found) == 12 and found[-1] < 0.95 * found[0], found
