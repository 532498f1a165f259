"""The trainers of other libraries, unmodified, over te_lite under Transformer Engine's name."""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("accelerate", "lightning", "transformers")
LAUNCHED = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.randn(16, 32)).square().mean())
optimizer.step()
import te_lite as te
assert all(type(layer) is te.Linear for layer in accelerator.unwrap_model(model)), model
assert {row["recipe"] for row in te.overlap_report()} == {"delayed"}, te.overlap_report()
print("all is well")
"""


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


def test_the_launcher_as_the_pages_start_it(tmp_path: Path) -> None:
    """The command of docs/how-to/accelerate.md and trainer.md, word by word, on a script without a handler."""
    if find_spec("accelerate") is None:
        pytest.skip("needs accelerate (pip install -e '.[test]')")
    pages = [(ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in ("accelerate", "trainer")]
    quoted = [line.strip() for page in pages for line in page.splitlines() if "accelerate.commands.launch" in line]
    assert len(quoted) == 2 and len(set(quoted)) == 1, quoted
    words = shlex.split(quoted[0])
    named = words.index("python")  # what stands before it is set for this command alone
    (tmp_path / words[-1]).write_text(LAUNCHED)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"HF_HOME": str(tmp_path)} | dict(word.split("=", 1) for word in words[:named])
    command = [sys.executable, *words[named + 1 :]]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "all is well" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_on_a_gpu(framework: str) -> None:
    run_tests(framework, "gpu", CUDA_VISIBLE_DEVICES=first_gpu())
