"""The scripts by which a user checks a machine: they run, they say what was compared, and they can fail."""

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from te_lite.testing.distributed import launch, rank_device_params
from tests.distributed import overlap_harness, run_gemm_with_overlap, run_layer_with_overlap
from tests.distributed.overlap_harness import RefusedError
from tests.examples.demo import run as run_command

HERE = Path(__file__).parent
LAYER, GEMM = HERE / "run_layer_with_overlap.py", HERE / "run_gemm_with_overlap.py"
SMALL = ("--seq-length", "64", "--num-heads", "4", "--head-dim", "32", "--iterations", "1")
SMALL_GEMM = ("-M", "64", "-K", "128", "-N", "192", "--iterations", "1")

# (arguments, a line or a part of one that must be printed)
LAYER_CASES = [
    (
        ("--fp8", "--num-layers", "2", "--num-layers-at-start-in-bf16", "1", "--strict"),
        ("layer 1 fc2_fprop: auto asked for, {way} taken", "fc2_bias against collective, bit for bit"),
    ),
    (
        ("--layer-type", "linear", "--linear-parallel-mode", "column", "--quantization", "mxfp8"),
        ("qkv_dgrad: bulk asked for, bulk taken", "layer 0 weight against collective, bit for bit"),
    ),
    (
        ("-l", "Linear", "--linear-parallel-mode", "row", "--quantization", "rowwise", "--method", "fused"),
        ("proj_wgrad: external asked for, external taken", "layer 0 dx against the oracle"),
    ),
    (
        ("-l", "LayerNormLinear", "--quantization", "current", "--overlap-rs-dgrad", "--method", "ring_exchange"),
        ("qkv_dgrad: ring_exchange asked for, ring taken", "layer 0 layer_norm_weight against collective: "),
    ),
]


def lines_of(printed: str) -> list[str]:
    return printed.strip().splitlines()


@pytest.mark.parametrize("device", rank_device_params(2))
@pytest.mark.parametrize(("args", "wanted"), LAYER_CASES)
def test_layers(args: tuple[str, ...], wanted: tuple[str, ...], device: str) -> None:
    with mock.patch.dict(os.environ, TE_LITE_AUTO="rule"):
        printed = launch(LAYER, *SMALL, "--device", device, *args, ranks=2)
    assert lines_of(printed)[-1] == f"VERDICT: all well on 2 {device} ranks started by torchrun, tp 2"
    way = "ring" if device == "cpu" else "fused"
    assert all(part.format(way=way) in printed for part in wanted), printed


@pytest.mark.parametrize("device", rank_device_params(2))
def test_gemms_and_their_timing(device: str) -> None:
    args = ("--quantization", "rowwise", "--benchmark", "--benchmark-iter", "3")
    printed = launch(GEMM, *SMALL_GEMM, "--device", device, *args, ranks=2)
    assert lines_of(printed)[-1].startswith("VERDICT: all well")
    for part in ("bulk, gathered scales, bit for bit", "reduce-scatter, ring, again, bit for bit", "the GEMM alone: "):
        assert part in printed, printed


@pytest.mark.parametrize("device", rank_device_params(2)[1:])
def test_graphs(device: str) -> None:
    printed = launch(LAYER, *SMALL, "--device", device, "--use-cuda-graphs", "--iterations", "3", ranks=2)
    assert lines_of(printed)[-1].startswith("VERDICT: all well")


def test_benchmark_of_layers_in_groups_smaller_than_the_world() -> None:
    args = ("--device", "cpu", "--tp", "2", "--skip-verify", "--benchmark", "--benchmark-iter", "2")
    printed = launch(LAYER, *SMALL, *args, ranks=4)
    assert "nothing was compared" in printed and "overlap: " in printed
    assert lines_of(printed)[-1] == "VERDICT: all well on 4 cpu ranks started by torchrun, tp 2"


# (script, arguments, what the failure says)
FAILURES = [
    (LAYER, ("--corrupt", "dx"), "layer 0 dx against the oracle: .* FAIL"),
    (LAYER, ("-l", "linear", "--corrupt", "weight"), "layer 0 weight against collective, bit for bit: .* FAIL"),
    (LAYER, ("--capacity", "10"), "auto asked for, collective taken.* FAIL"),
    (LAYER, ("--method", "fused", "--strict"), "fc1_fprop: fused asked for, ring taken.* FAIL"),
    (GEMM, ("--op", "bulk", "--corrupt", "bulk"), "bulk, gathered data, bit for bit: .* FAIL"),
]


@pytest.mark.parametrize(("script", "args", "says"), FAILURES)
def test_what_is_wrong_fails(script: Path, args: tuple[str, ...], says: str) -> None:
    small = SMALL if script == LAYER else SMALL_GEMM
    with pytest.raises(AssertionError, match=r"exit status 1") as caught:
        launch(script, *small, "--device", "cpu", *args, ranks=2)
    caught.match(says)
    caught.match("VERDICT: FAILED, see the lines with FAIL")


def test_strict_is_an_error_of_the_library() -> None:
    with pytest.raises(AssertionError, match="overlap by 'auto' was asked for and does not happen"):
        launch(LAYER, *SMALL, "--device", "cpu", "--capacity", "10", "--strict", ranks=2)


def test_under_mpirun() -> None:
    mpirun = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if mpirun is None:
        pytest.skip("no mpirun")
    pytest.importorskip("mpi4py")
    start = [mpirun, "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, str(LAYER)]
    done = run_command([*start, *SMALL, "--device", "cpu", "--bootstrap-backend", "mpi"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines_of(done.stdout)[-1] == "VERDICT: all well on 2 cpu ranks started by mpirun, tp 2"
    damaged = run_command([*start, *SMALL, "--device", "cpu", "--corrupt", "out"])
    assert damaged.returncode == 1 and "VERDICT: FAILED" in damaged.stdout


def test_one_process_says_how_to_start() -> None:
    done = run_command([sys.executable, str(LAYER), "--device", "cpu"])
    assert done.returncode == 2 and "torchrun --nproc-per-node 2" in done.stderr and not done.stdout


# (module, arguments, what the refusal says)
REFUSALS = [
    (run_layer_with_overlap, ("--use-cuda-graphs", "--device", "cpu"), "needs --device cuda"),
    (run_layer_with_overlap, ("--use-cuda-graphs", "--device", "cuda", "--fp8"), "delayed scaling"),
    (run_layer_with_overlap, ("-l", "layernormlinear", "--linear-parallel-mode", "row"), "column-parallel only"),
    (run_layer_with_overlap, ("--method", "bulk", "--overlap-rs-dgrad"), "in place of both bulks"),
    (run_layer_with_overlap, ("--num-layers", "1", "--num-layers-at-end-in-bf16", "2"), "enough for both"),
    (run_layer_with_overlap, ("--bootstrap-backend", "nccl", "--device", "cpu"), "needs GPUs"),
    (run_gemm_with_overlap, ("--fp8",), "fp8_current_scaling"),
    (run_gemm_with_overlap, ("--iterations", "0"), "at least 1"),
]


@pytest.mark.parametrize(("module", "args", "says"), REFUSALS)
def test_refusals(module, args: tuple[str, ...], says: str) -> None:
    parsed = module.build_parser().parse_args(args)
    with pytest.raises(RefusedError, match=says):
        overlap_harness.settle(parsed)
        module.check(parsed)


@pytest.mark.parametrize("name", ["MultiheadAttention", "TransformerLayer", "linaer"])
def test_layers_that_do_not_exist(name: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_layer_with_overlap.build_parser().parse_args(["--layer-type", name])
    assert "linear, layernormlinear, layernormmlp" in capsys.readouterr().err


def test_transformer_engine_spellings() -> None:
    parse = run_layer_with_overlap.build_parser().parse_args
    for args, recipe in ((["--fp8"], "delayed"), (["--fp8", "--quantization", "mxfp8"], "mxfp8"), ([], "bf16")):
        parsed = parse([*args, "--layer-type", "LayerNormLinear"])
        overlap_harness.settle(parsed)
        assert (parsed.recipe, parsed.layer_type) == (recipe, "LayerNormLinear")
