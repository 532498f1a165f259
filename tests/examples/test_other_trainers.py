"""The examples with other libraries' trainers, and the diffs of their pages: both sides of a diff train alike."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from te_lite.testing.distributed import launch
from tests.compat.test_frameworks import first_gpu
from tests.examples.demo import REPOSITORY, run

EXAMPLES = REPOSITORY / "examples"
# Page -> the module that its example needs.
PAGES = {"accelerate": "accelerate", "lightning": "lightning.pytorch", "trainer": "transformers.trainer"}
STEPS = 12
# Of the first loss: one forward in bf16 and in fp8 (operands rounded by at most 2^-4) of the same weights.
FIRST = 2.0**-4


def diff_of(page: str) -> list[str]:
    (diff,) = re.findall(r"```diff\n(.*?)```", (REPOSITORY / "docs" / "how-to" / f"{page}.md").read_text(), re.DOTALL)
    return diff.splitlines()


def before(example: Path, diff: list[str]) -> str:
    """The example as it was before the diff: every line that the diff adds is in it, in that order."""
    lines = [line.partition("  # ")[0] for line in example.read_text().splitlines()]
    place, removed = 0, []
    for line in diff:
        if line[0] == "-":
            removed.append(line[1:])
            continue
        assert line[1:] in lines[place:], f"{example.name} lacks this line of the diff, or has it elsewhere: {line}"
        place = lines.index(line[1:], place)
        lines[place : place + (line[0] == "+")] = removed
        place, removed = place + len(removed) + (line[0] == " "), []
    lines[place:place] = removed
    return "\n".join(lines)


def losses(printed: str) -> list[float]:
    found = [float(loss) for loss in re.findall(r"^step +\d+ loss (\S+)", printed, re.MULTILINE)]
    assert len(found) == STEPS and found[-1] < 0.85 * found[0], printed
    return found


# The first command in a fork of the process that has imported the library: that takes longer than the training.
IN_TURN = """
import importlib, json, os, runpy, sys
for module in sys.argv[1], "gpt.llama":
    importlib.import_module(module)
for number, command in enumerate(map(json.loads, sys.argv[2:]), 3):
    child = os.fork() if number < len(sys.argv) else 0
    if child:
        assert os.waitpid(child, 0)[1] == 0, command
        continue
    print("begins", flush=True)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    break
"""


def train(library: str, commands: list[list[str]], **env: str) -> list[list[float]]:
    """The losses of each command: a script and its arguments."""
    given = [json.dumps([*command, "--steps", str(STEPS)]) for command in commands]
    path = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}", **env}
    done = run([sys.executable, "-W", "ignore", "-c", IN_TURN, library, *given], path)
    assert done.returncode == 0, done.stderr
    return [losses(printed) for printed in done.stdout.split("begins\n")[1:]]


def compare(page: str, folder: Path, device: str) -> None:
    library = PAGES[page].partition(".")[0]
    if find_spec(library) is None:
        pytest.skip(f"needs {library} (pip install -e '.[test]')")
    example, other = EXAMPLES / f"{page}_llama.py", folder / "before.py"
    other.write_text(before(example, diff_of(page)))
    code = other.read_text().partition('"""\n')[2]
    assert "te_lite" not in code and "fp8" not in code
    commands = [[str(script)] for script in (example, other)]
    if page == "trainer":
        commands = [[*command, "--out", str(folder / str(number))] for number, command in enumerate(commands)]
    if device == "cpu":
        fp8, bf16 = train(PAGES[page], commands, CUDA_VISIBLE_DEVICES="")
    else:  # no forks: the library may have asked for GPUs
        fp8, bf16 = (train(PAGES[page], [command], CUDA_VISIBLE_DEVICES=first_gpu())[0] for command in commands)
    assert abs(fp8[0] / bf16[0] - 1) < FIRST and fp8 != bf16


@pytest.mark.parametrize("page", PAGES)
def test_diff(page: str, tmp_path: Path) -> None:
    compare(page, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES)
def test_diff_on_a_gpu(page: str, tmp_path: Path) -> None:
    compare(page, tmp_path, "cuda")


def test_torchao_diff() -> None:
    """torchao's side is compiled, and te_lite's trains on 2 ranks."""
    example = EXAMPLES / "fsdp_llama.py"
    source = before(example, diff_of("from-torchao"))
    assert "torchao" in source and "te." not in source.partition('"""\n')[2]
    compile(source, "before.py", "exec")
    if find_spec("transformers") is None:
        pytest.skip("needs transformers (pip install -e '.[test]')")
    losses(launch(example, "--steps", str(STEPS), ranks=2, timeout=120, env={"CUDA_VISIBLE_DEVICES": ""}))


@pytest.mark.multigpu
def test_fully_shard_on_two_gpus() -> None:
    losses(launch(EXAMPLES / "fsdp_llama.py", "--steps", str(STEPS), ranks=2, timeout=200))
