"""The rules of docs/background/architecture.md about who may import whom, as functions over source text.

They take text, not files, so that tests/test_layering.py can show that each of them finds what it is for.
"""

import ast
import io
import tokenize
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

MAX_FILE_LINES = 350
# Of code: docstrings, comments and blank lines are not counted; compat/, diagnostics/, testing/, doctor.py and tune.py
# stand apart. The goal is 10,000; docs/notebook/design-decisions.md says what the rest is.
MAX_CORE_LINES = 16_839

# A module may import what stands on its own level or below. The first part of the name after te_lite decides.
LEVELS = {
    "recipe": 0,  # plain values, for everyone
    "recipe_base": 0,
    "parallel": 0,
    "tables": 0,
    "kept": 0,
    "arguments": 0,
    "epoch": 0,
    "_C": 1,
    "_requirements": 1,
    "ops": 2,
    "watch": 2,
    "quantize": 3,
    "overlap": 4,
    "functional": 5,
    "modules": 6,
    "autocast": 6,
    "checkpoint": 6,
    "compat": 7,  # these two stand above the core, of which nothing imports them
    "diagnostics": 7,
    "": 8,  # te_lite/__init__.py: public names
    "testing": 9,  # these import everything and nothing imports them
    "doctor": 9,
    "tune": 9,
}
TOP = LEVELS["testing"]
NOT_CORE = ("compat", "diagnostics", "testing", "doctor.py", "tune.py")


def module_name(path: Path, package: Path) -> str:
    """te_lite/ops/cast.py -> "te_lite.ops.cast"; an __init__.py is its folder."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def stratum(module: str) -> str:
    """te_lite.ops.cast -> "ops"; te_lite -> ""."""
    return module.split(".")[1] if "." in module else ""


def imports(module: str, source: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, te_lite module) for every import in the source, wherever it stands, also in functions and under
    TYPE_CHECKING, and for import_module("te_lite...") with a literal name.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _imported_from(node, package)
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            constants = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            names = [value for value in constants if isinstance(value, str)]
        for name in names:
            if name == "te_lite" or name.startswith("te_lite."):
                yield node.lineno, name


def _imported_from(node: ast.ImportFrom, package: str) -> list[str]:
    base = node.module or ""
    if node.level:
        above = package.split(".")
        above = above[: len(above) - (node.level - 1)]
        base = ".".join([*above, base] if base else above)
    # `from te_lite import x` imports te_lite.x where x is a stratum, else asks te_lite/__init__ for a name.
    if base == "te_lite":
        return [f"te_lite.{a.name}" if a.name in LEVELS else "te_lite" for a in node.names]
    return [base]


def _called_name(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def import_violations(module: str, source: str, is_package: bool = False) -> list[str]:
    here = stratum(module)
    if here not in LEVELS:
        return [f"{module}: te_lite/{here} is on no level; add it to tests/layering.py, docs/reference/source-files.md"]
    found = []
    for line, target in imports(module, source, is_package):
        there = stratum(target)
        if there not in LEVELS:
            found.append(f"{module}:{line}: {target} is on no level")
        elif LEVELS[there] == TOP and there != here and LEVELS[here] != TOP:
            found.append(f"{module}:{line}: {target} is imported, but nothing may import {there}/")
        elif LEVELS[there] > LEVELS[here]:
            found.append(f"{module}:{line}: {here} imports {target} from a higher level; imports point down")
    return found


def quantizers(sources: Iterable[str]) -> set[str]:
    """The classes that inherit from Quantizer, by name, and Quantizer."""
    bases = {
        node.name: {getattr(leaf, "id", getattr(leaf, "attr", "")) for base in node.bases for leaf in ast.walk(base)}
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    found = {"Quantizer"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def quantizer_check_violations(module: str, source: str, classes: Container[str]) -> list[str]:
    """Where code asks a quantizer for its class, one of `classes`. Capabilities (col_from_row ...) are asked instead.
    compat/callers.py may: it gives each class its name of Transformer Engine."""
    if stratum(module) == "quantize" or module == "te_lite.compat.callers":
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and _called_name(node) in ("isinstance", "issubclass"):
            asked = list(node.args[1:])
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Compare) and _is_type_call(node.left):
            asked = list(node.comparators)
        for part in (leaf for root in asked for leaf in ast.walk(root)):
            name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
            if name in classes:
                found.append(f"{module}:{node.lineno}: asks for {name}; ask for a capability")
    return found


def _is_type_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _called_name(node) == "type"


def length_violations(name: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{name}: {lines} lines, the limit is {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def code_lines(source: str) -> int:
    """Lines that hold code: no blank line, no comment, no docstring."""
    lines: set[int] = set()
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def core_lines(sources: dict[str, str]) -> int:
    """Lines of code of te_lite/ (keys are paths below it) without what stands above it: NOT_CORE."""

    def count(path: str, source: str) -> int:
        if path.endswith((".py", ".pyi")):
            return code_lines(source)
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in source.splitlines())

    return sum(count(path, source) for path, source in sources.items() if Path(path).parts[0] not in NOT_CORE)
