"""Pages link to what exists, and the site's navigation names every page. `make docs` checks anchors too."""

import pkgutil
import re
from pathlib import Path

import pytest

import te_lite
from tests.docs.tutorials import ROOT

DOCS = ROOT / "docs"
PAGES = sorted((*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")))
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#[^)\s]*)?\)")
NAMED = re.compile(r"\b(?:docs|tests|benchmarks|examples|te_lite)/[\w/.-]+\.(?:md|py|json|png|svg|cu|cpp|h)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in LINK.findall(CODE.sub("", text)) if link and "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    if page.parent == DOCS or DOCS in page.parents:
        missing += [link for link in links if DOCS not in (page.parent / link).resolve().parents]  # not on the site
    missing += [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    assert not missing, f"{page.relative_to(ROOT)} names {missing}"


def test_the_navigation_has_every_page() -> None:
    """And only pages that are there: what is to come is a comment."""
    lines = [line for line in (ROOT / "mkdocs.yml").read_text().splitlines() if not line.lstrip().startswith("#")]
    named = re.findall(r"\S+\.md$", "\n".join(lines), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_sources_name_documents_that_exist() -> None:
    sources = [path for folder in ("te_lite", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*")]
    sources = [path for path in (*sources, ROOT / "Makefile") if path.suffix in (".py", ".cpp", ".h", ".cu", "")]
    texts = {path: path.read_text() for path in sources if path.is_file()}
    named = {(path, name) for path, text in texts.items() for name in re.findall(r"\bdocs/[\w/-]+\.md\b", text)}
    missing = [f"{path.relative_to(ROOT)}: {name}" for path, name in named if not (ROOT / name).exists()]
    assert len(named) > 10 and not missing, missing


def test_the_reference_names_what_exists() -> None:
    names = [name for page in DOCS.rglob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    public = {f"te_lite.{name}" for name in te_lite.__all__ if name != "recipe"}
    assert len(names) > 40 and all(pkgutil.resolve_name(name) is not None for name in names)
    assert public <= set(names), f"no page of docs/reference/api has {sorted(public - set(names))}"
