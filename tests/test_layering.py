"""The strata of te_lite/ and its size limits, and that each of these checks can fail."""

from pathlib import Path

import pytest

import tests.layering as layering

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "te_lite"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCE_FOLDERS = ("te_lite", "tests", "examples", "benchmarks")
SOURCE_SUFFIXES = (".py", ".pyi", ".cpp", ".h", ".cu")


def source_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.suffix in SOURCE_SUFFIXES]


def test_imports_point_down() -> None:
    found = []
    for path in MODULES:
        module = layering.module_name(path, PACKAGE)
        found += layering.import_violations(module, path.read_text(), path.name == "__init__.py")
    assert not found, "\n".join(found)


def test_quantizers_are_asked_for_capabilities() -> None:
    found, classes = [], layering.quantizers(path.read_text() for path in MODULES)
    assert {"Quantizer", "Blocks", "Delayed", "Watched"} <= classes
    for path in MODULES:
        found += layering.quantizer_check_violations(layering.module_name(path, PACKAGE), path.read_text(), classes)
    assert not found, "\n".join(found)


def test_files_are_short() -> None:
    files = [path for folder in SOURCE_FOLDERS for path in source_files(ROOT / folder)]
    assert files
    found = []
    for path in files:
        found += layering.length_violations(str(path.relative_to(ROOT)), path.read_text())
    assert not found, "\n".join(found)


def test_core_is_small() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in source_files(PACKAGE)}
    lines, most = layering.core_lines(sources), layering.MAX_CORE_LINES
    assert 0 < lines < most, (
        f"the core has {lines} lines of code, the ceiling is {most}: take out what your change makes superfluous, "
        f"then raise MAX_CORE_LINES in tests/layering.py and say why"
    )


# (module, source, what the one violation says; None: no violation)
IMPORT_CASES = [
    ("te_lite.ops.cast", "import te_lite.modules.linear", "higher level"),
    ("te_lite.ops.cast", "from te_lite.quantize import qtensor", "higher level"),
    ("te_lite.ops.cast", "from te_lite import quantize", "higher level"),
    ("te_lite.ops.cast", "from te_lite import Linear", "higher level"),
    ("te_lite.ops.cast", "import te_lite as te", "higher level"),
    ("te_lite.ops.cast", "from ..quantize import qtensor", "higher level"),
    ("te_lite.ops.cast", "from .. import modules", "higher level"),
    ("te_lite.ops.cast", "def f():\n    from te_lite.functional.plan import LinearPlan", "higher level"),
    ("te_lite.ops.cast", "if TYPE_CHECKING:\n    from te_lite.overlap import schedule", "higher level"),
    ("te_lite.ops.cast", "importlib.import_module('te_lite.modules')", "higher level"),
    ("te_lite.quantize.qtensor", "from te_lite.overlap import report", "higher level"),
    ("te_lite.overlap.ring", "from te_lite.functional import plan", "higher level"),
    ("te_lite.functional.plan", "from te_lite.modules import norm", "higher level"),
    ("te_lite.functional.plan", "from te_lite import autocast", "higher level"),
    ("te_lite.recipe", "from te_lite.quantize import quantizer", "higher level"),
    ("te_lite.parallel", "from te_lite import _C", "higher level"),
    ("te_lite.modules.linear", "from te_lite.testing import numerics", "nothing may import testing/"),
    ("te_lite", "from te_lite import testing", "nothing may import testing/"),
    ("te_lite", "from te_lite.compat.convert import ConversionReport", None),
    ("te_lite.autocast", "from te_lite.compat import convert", "higher level"),
    ("te_lite.modules.linear", "from te_lite.helpers import pad", "on no level"),
    ("te_lite.helpers", "import math", "on no level"),
    ("te_lite.ops.cast", "from te_lite import _C, parallel, recipe\nfrom . import source", None),
    ("te_lite.modules.linear", "from te_lite import autocast\nfrom te_lite.functional import linear", None),
    ("te_lite.autocast", "from te_lite.modules import weights\nfrom te_lite.checkpoint import checkpoint", None),
    ("te_lite", "from te_lite.modules.linear import Linear\nfrom . import recipe", None),
    ("te_lite.testing.memory", "import te_lite as te\nfrom te_lite.compat import alias", None),
]


@pytest.mark.parametrize(("module", "source", "says"), IMPORT_CASES)
def test_import_check_can_fail(module: str, source: str, says: str | None) -> None:
    found = layering.import_violations(module, source, is_package=module == "te_lite")
    if says is None:
        assert found == []
    else:
        assert len(found) == 1 and says in found[0], found


def test_relative_imports_in_a_package() -> None:
    assert layering.import_violations("te_lite.ops", "from .cast import transform", is_package=True) == []
    assert len(layering.import_violations("te_lite.ops", "from ..modules import norm", is_package=True)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(q, Delayed)",
        "isinstance(q, (Tensor, per_tensor.Delayed))",
        "isinstance(q, A | Delayed)",
        "issubclass(kind, Delayed)",
        "type(q) is Delayed",
        "match q:\n    case Delayed():\n        pass",
    ],
)
def test_quantizer_check_can_fail(source: str) -> None:
    classes = layering.quantizers(
        ["class Quantizer: ...", "class Scaled(base.Quantizer): ...", "class Delayed(Scaled): ..."]
    )
    assert len(layering.quantizer_check_violations("te_lite.overlap.ring", source, classes)) == 1
    assert layering.quantizer_check_violations("te_lite.quantize.per_tensor", source, classes) == []


def test_quantizer_check_leaves_other_uses_alone() -> None:
    source = "q = Delayed()\nisinstance(x, Tensor)\nq.col_from_row"
    assert layering.quantizer_check_violations("te_lite.functional.plan", source, {"Delayed"}) == []


def test_length_check_can_fail() -> None:
    assert layering.length_violations("a.py", "x\n" * layering.MAX_FILE_LINES) == []
    assert len(layering.length_violations("a.py", "x\n" * (layering.MAX_FILE_LINES + 1))) == 1


def test_core_count_leaves_out_what_is_not_core() -> None:
    sources = {
        "ops/cast.py": '"""Not code."""\n\na\nb  # code\n# not code\n',
        "csrc/driver.h": "// not code\n\na\n",
        "compat/te.py": "a\n",
        "testing/memory.py": "a\n",
        "tune.py": "a\n",
    }
    assert layering.core_lines(sources) == 3
