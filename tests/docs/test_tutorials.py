"""The tutorials run as they stand, and print what they show."""

import math
import re
from pathlib import Path

import pytest

from tests.docs.tutorials import ROOT, blocks, outputs, run_session

HOW_TO = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("exchange-verbs", "transformers")]
PAGES = [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), *HOW_TO]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
MEASURED = re.compile(r".*[.e].*|-?\d{4}")  # "%.4g" prints numbers from 1000 on without a point


def near(a: str, b: str) -> bool:
    """Whether two numbers are equal, or measured and as far from each other as training on two CPUs may bring them."""
    if a == b:
        return True
    measured = MEASURED.fullmatch(a) or MEASURED.fullmatch(b)
    return measured is not None and math.isclose(float(a), float(b), rel_tol=0.5, abs_tol=0.05)


def same(shown: str, printed: str) -> bool:
    """Word by word; measured numbers may differ."""
    if len(shown.split()) != len(printed.split()):
        return False
    for a, b in zip(shown.split(), printed.split(), strict=True):
        if NUMBER.sub("#", a) != NUMBER.sub("#", b):
            return False
        if not all(map(near, NUMBER.findall(a), NUMBER.findall(b))):
            return False
    return True


def test_what_counts_as_the_same() -> None:
    assert same("loss 0.199 ring", "loss  0.21 ring") and same("a 1.5e+08\n", "a 1.6e+08")
    assert same("scale 3186", "scale 3254") and same("amax 138", "amax 138.3") and same("999.5", "1002")
    assert not same("loss 0.199", "loss 0.9") and not same("ring 0.1", "bulk 0.1") and not same("3 steps", "4 steps")
    assert not same("a b", "a") and not same("e4m3", "e5m2") and not same("scale 3186", "scale 9000")


def test_the_program_of_the_readme_runs() -> None:
    page = (ROOT / "README.md").read_text()
    (program,) = (block for block in blocks(page) if block.kind == "session")
    assert "fc2_wgrad" in run_session([program])[0]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_tutorial(path: Path) -> None:
    page = path.read_text()
    if "from transformers" in page:
        pytest.importorskip("transformers")
    assert any(block.output is not None for block in blocks(page))
    for place, printed in outputs(page):
        shown = page[place.start : place.stop]
        assert same(shown, printed), (
            f"{path.name} shows\n{shown}\nand its program prints\n{printed}\n"
            f"If the program is right, run: python tests/docs/tutorials.py {path.relative_to(ROOT)}"
        )
