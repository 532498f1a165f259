"""The trainers of other libraries, unmodified, over te_lite under Transformer Engine's name."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("accelerate", "lightning", "transformers")


def first_gpu() -> str:
    """CUDA_VISIBLE_DEVICES for one GPU: over several, Trainer would use DataParallel."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def run_tests(framework: str, mark: str, **env: str) -> None:
    """The tests of aliased/ for one framework, in a process of their own: the alias stays in the process it is in."""
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework} (pip install -e '.[test]')")
    options = ("-m", mark, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore")
    command = (sys.executable, "-m", "te_lite.compat", "-m", "pytest", f"tests/compat/aliased/test_{framework}.py")
    kept = {name: value for name, value in os.environ.items() if name not in ("TE_LITE_SPREAD", "PYTEST_ADDOPTS")}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([*command, *options], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_on_the_cpu(framework: str) -> None:
    run_tests(framework, "not gpu", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_on_a_gpu(framework: str) -> None:
    run_tests(framework, "gpu", CUDA_VISIBLE_DEVICES=first_gpu())
