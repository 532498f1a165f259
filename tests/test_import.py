"""What `import te_lite` costs and what it says when something is missing."""

import json
import os
import re
import statistics
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from te_lite import _requirements

ROOT = Path(__file__).parent.parent

MAX_SHARE = 0.6  # of the time that torch's import takes (a CPU build on a quiet core 1.3 s); 0.15 to 0.31 measured

MEASURE = """
import json, time
start = time.process_time()
import torch
after_torch = time.process_time()
import te_lite
end = time.process_time()
print(json.dumps({"torch": after_torch - start, "own": end - after_torch, "cuda": torch.cuda.is_initialized()}))
"""

WITHOUT_TRITON = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import te_lite
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a fresh process that sees no GPU unless env says otherwise."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def imported() -> list[dict]:
    runs = [run(MEASURE) for _ in range(3)]
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    return [json.loads(done.stdout) for done in runs]


def test_import_is_fast(imported: list[dict]) -> None:
    # Processor time, not wall time: an import runs on one thread, and wall time here would measure the tests
    # that run beside this one. Under load that grows too, threefold, but torch's as much.
    assert statistics.median(result["own"] / result["torch"] for result in imported) < MAX_SHARE, imported


@pytest.mark.gpu
def test_import_initialises_no_cuda() -> None:
    done = run(MEASURE, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cuda"] is False


def test_import_is_silent() -> None:
    done = run("import te_lite")
    assert (done.stdout, done.stderr) == ("", "")


def test_missing_triton_is_one_clear_message() -> None:
    done = run(WITHOUT_TRITON)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: triton was not found; te_lite needs triton >= 3.6, also on machines without a GPU: "
        "pip install 'triton>=3.6'"
    )


@pytest.mark.parametrize("found", ["2.10.1", "1.13.0+cu117", "unknown"])
def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("torch.__version__", found)
    with pytest.raises(ImportError) as caught:
        _requirements.check()
    assert str(caught.value).startswith(f"torch is {found}; te_lite needs torch >= 2.11: pip install")


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", "3.0.0a0+git1234"])
def test_new_torch_is_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("torch.__version__", found)
    _requirements.check()


def test_missing_torch_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"^torch was not found; te_lite needs torch >= 2\.11: pip install"):
        _requirements.check()


def test_unbuilt_extension_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "te_lite._C", None)
    with pytest.raises(ImportError, match=r"^te_lite\._C cannot be loaded .*pip install -e") as caught:
        _requirements.check()
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_star_import_brings_the_public_names_alone() -> None:
    names: dict[str, object] = {}
    exec("from te_lite import *", names)
    assert {"Linear", "fp8_autocast", "recipe"} <= set(names)
    assert not {"functional", "modules", "ops", "overlap", "quantize", "convert", "ModuleType"} & set(names)


def test_sources_that_are_compiled_at_run_time_are_installed():
    """Those that ops/gemm_fused.py and ops/gemm_grouped.py name, which are all that include each other."""
    from te_lite.ops import gemm_fused, gemm_grouped

    named: set[str] = set()
    for names in (gemm_fused._NAMES, gemm_grouped._NAMES):
        texts = [(ROOT / "te_lite/csrc" / name).read_text() for name in names]
        assert {name for text in texts for name in re.findall(r'#include "(.+)"', text)} == set(names[1:])
        named |= set(names)
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["te_lite"]
    missing = [name for name in named if not any(fnmatch(f"csrc/{name}", pattern) for pattern in installed)]
    assert not missing, missing


def test_a_group_is_free_when_it_is_destroyed():
    """torch.distributed.nn keeps the group that is there when it is imported, which an optimizer's first step does."""
    code = """
import weakref
import torch
import torch.distributed as dist
import te_lite
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.AdamW([weight]).step()
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None, "it is held"
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    kept = run(code.replace("import te_lite\n", ""))
    assert kept.returncode != 0 and "it is held" in kept.stderr, "torch keeps it no longer: te_lite need not care"
