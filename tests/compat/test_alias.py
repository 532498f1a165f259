"""`transformer_engine` as a name for te_lite: the import hook, the distribution, `python -m te_lite.compat`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One process for all of it: importing torch takes most of the time.
IN_PROCESS = """
import importlib, importlib.metadata, importlib.util, inspect, os, pickle, sys
import torch
assert importlib.util.find_spec("transformer_engine") is None  # nothing runs in every interpreter
import te_lite as te
import te_lite.compat.transformer_engine
import te_lite.compat.transformer_engine
from te_lite.compat.alias.names import MODULES
assert sum(type(finder).__name__ == "AliasFinder" for finder in sys.meta_path) == 1
version = importlib.metadata.version("transformer-engine")
assert version.startswith("2.")
for name in ("transformer_engine", "Transformer.Engine", "TRANSFORMER-_.engine"):
    assert version == importlib.metadata.version(name)
assert "transformer-engine" in {d.metadata["Name"] for d in importlib.metadata.distributions()}
assert importlib.util.find_spec("transformer_engine.pytorch.fp8") is not None
assert importlib.util.find_spec("transformer_engine.jax") is None
try:
    importlib.metadata.version("transformer-engine-torch")
except importlib.metadata.PackageNotFoundError:
    pass

import transformer_engine
import transformer_engine.pytorch as tep
assert transformer_engine.__version__ == version
for name in MODULES:
    assert importlib.import_module(name).__spec__.origin == "te_lite"
assert tep.Linear is te.Linear and transformer_engine.pytorch.module.base.destroy_ub is te.destroy_ub
ours, theirs = (list(inspect.signature(one.initialize_ub).parameters) for one in (te, tep))
assert ours[:7] == theirs[:7]
try:
    tep.module.base.initialize_ub([16, 16], 2, with_cublasmp=True)
except NotImplementedError as error:
    assert "with_cublasmp" in str(error)
try:
    tep.initialize_ub([16, 16], 2, with_cublasmp=False)
except RuntimeError as error:
    assert "torch.distributed" in str(error)
assert isinstance(tep.Float8CurrentScalingQuantizer(torch.float8_e4m3fn), tep.Quantizer)
x = tep.MXFP8Quantizer(torch.float8_e4m3fn)(torch.ones(32, 32))
import transformer_engine_torch
assert tep.DType is tep.constants.DType is transformer_engine_torch.DType
kinds = tep.QuantizedTensorStorage, tep.tensor.MXFP8TensorStorage, tep.Float8TensorStorage
assert [isinstance(x, kind) for kind in kinds] == [True, True, False]
from transformer_engine.common.recipe import DelayedScaling
assert issubclass(DelayedScaling, te.recipe.DelayedScaling)

# What is not there has its name in the error, and is no attribute.
assert not hasattr(tep, "onnx_export")
try:
    tep.onnx_export
except NotImplementedError as error:
    assert "transformer_engine.pytorch.onnx_export" in str(error)
try:
    from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context
except ImportError as error:
    assert "transformer_engine.pytorch.cpu_offload" in str(error)
try:
    import transformer_engine.pytorch.cpu_offload
except ModuleNotFoundError as error:
    assert "transformer_engine.pytorch.cpu_offload" in str(error)
else:
    raise AssertionError("te_lite has no such module")
from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
assert DotProductAttention is te.DotProductAttention
assert tep.tensor.replace_raw_data is tep.tensor.utils.replace_raw_data
assert tep.TransformerLayer is te.TransformerLayer and MultiheadAttention is te.MultiheadAttention
class Layer(tep.transformer.TransformerLayer):  # as models derive theirs
    def __init__(self, width):
        super().__init__(width, 2 * width, 2, hidden_dropout=0, attention_dropout=0, device="cpu")
assert Layer(32)(torch.randn(4, 2, 32), None, rotary_pos_emb=RotaryPositionEmbedding(16)(4)).shape == (4, 2, 32)
class Mine(tep.ops.Sequential):
    def __init__(self):
        super().__init__()
from transformer_engine.common import recipe
class Own(tep.module.base.TransformerEngineBaseModule):
    def __init__(self):
        super().__init__()
for build, said in (
    (tep.ops.FusibleOperation, "transformer_engine.pytorch.ops.FusibleOperation:"),
    (tep.ops.Sequential, "transformer_engine.pytorch.ops.Sequential:"), (Mine, "transformer_engine.pytorch.ops.Seq"),
    (tep.attention.InferenceParams, "transformer_engine.pytorch.attention.InferenceParams:"),
    (tep.InferenceParams, "transformer_engine.pytorch.InferenceParams:"),
    (tep.attention.inference.InferenceParams, "transformer_engine.pytorch.attention.inference.InferenceParams:"),
    (recipe.NVFP4BlockScaling, "transformer_engine.common.recipe.NVFP4BlockScaling:"), (Own, "Own is built on"),
):
    try:
        build()
    except NotImplementedError as error:
        assert str(error).startswith(said), error
    else:
        raise AssertionError(build)
layer = tep.Linear(16, 16, device="cpu")
assert isinstance(layer, Own.__base__) and issubclass(tep.GroupedLinear, Own.__base__) and not isinstance(layer, Own)
assert not isinstance(layer, tep.TransformerLayer) and layer.__module__ == "transformer_engine.pytorch"
assert type(pickle.loads(pickle.dumps(layer))) is te.Linear  # by that name
assert not isinstance(te.Linear(16, 16, device="cpu"), tep.ops.FusibleOperation)
assert {"recipe", "preserve_high_precision_init_val"} <= set(inspect.signature(tep.fp8_model_init).parameters)

# te_lite's own names are strict as before.
try:
    te.recipe.DelayedScaling(interval=1)
except TypeError:
    print("all is well")
"""

CHILD = """
import sys
assert "torch" not in sys.modules  # the hook waits until the name is wanted
import importlib.metadata, transformer_engine.pytorch as tep
version = importlib.metadata.version("transformer-engine")
print("child", sys.argv[1:], version, tep.Linear.__module__, tep.__spec__.origin)
"""
SCRIPT = f"""
import multiprocessing, subprocess, sys
import helper_beside_the_script, site_was_here
def spawned(queue):
    import transformer_engine
    queue.put(transformer_engine.__version__)
if __name__ == "__main__":
    import transformer_engine
    print("script", sys.argv[1:], transformer_engine.__version__, flush=True)
    subprocess.run([sys.executable, "-c", {CHILD!r}, "y"], check=True)
    queue = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=spawned, args=(queue,))
    process.start()
    print("spawned", queue.get())
    process.join()
"""


def run(*args: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(one) for one in (path, ROOT) if one)
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=120)


def test_names_version_distribution_and_refusals():
    done = run("-c", IN_PROCESS)
    assert done.returncode == 0 and done.stdout == "all is well\n", done.stderr


def test_a_script_and_the_processes_that_it_starts(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper_beside_the_script.py").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys, types; sys.modules['site_was_here'] = types.ModuleType('s')")
    done = run("-m", "te_lite.compat", str(tmp_path / "script.py"), "--lr", "x", path=other)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("script ['--lr', 'x'] 2.") and said[2].startswith("spawned 2.")
    assert said[1].startswith("child ['y'] 2.") and said[1].endswith(" transformer_engine.pytorch te_lite")
    failed = run("-m", "te_lite.compat", "-c", "raise SystemExit(7)")
    assert failed.returncode == 7


def test_children_without_the_alias():
    """Those of the options that docs/how-to/alias.md names, and no others."""
    page = (ROOT / "docs" / "how-to" / "alias.md").read_text()
    named = set(re.findall(r"-\w", page[page.index("Children started with") : page.index("do not have the alias")]))
    has = "import sys; sys.exit('AliasFinder' not in [type(one).__name__ for one in sys.meta_path])"
    code = (
        "import subprocess, sys\n"
        "for option in '-I -E -S -s -B -u'.split():\n"
        f"    print(option, subprocess.run([sys.executable, option, '-c', {has!r}]).returncode)\n"
    )
    done = run("-m", "te_lite.compat", "-c", code)
    assert {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" 1")} == named, done


def test_a_real_transformer_engine_is_not_hidden(tmp_path):
    real = tmp_path / "transformer_engine"
    real.mkdir()
    (real / "__init__.py").write_text("__version__ = 'real'")
    code = "import te_lite.compat.transformer_engine, transformer_engine as te; print(te.__version__)"
    for args in (("-c", code), ("-m", "te_lite.compat", "-c", "import transformer_engine")):
        done = run(*args, path=tmp_path)
        assert done.returncode == 1 and str(real) in done.stderr and "TE_LITE_REPLACE_TE=1" in done.stderr
    done = run("-c", code, path=tmp_path, TE_LITE_REPLACE_TE="1")
    assert done.returncode == 0 and done.stdout.startswith("2."), done.stderr
    # Where a child's environment has one that its parent's had not: the name raises, and nothing else does.
    site = str(ROOT / "te_lite" / "compat" / "alias" / "site")
    done = run("-c", "import json, transformer_engine", path=Path(os.pathsep.join((site, str(tmp_path)))))
    assert done.returncode == 1 and "ImportError: transformer_engine is installed at" in done.stderr


@pytest.mark.parametrize("args", [("-m", "te_lite.compat"), ("-m", "te_lite.compat", "--help")])
def test_usage(args):
    done = run(*args)
    assert done.returncode == (2 if len(args) == 2 else 0) and "train.py" in done.stdout + done.stderr
