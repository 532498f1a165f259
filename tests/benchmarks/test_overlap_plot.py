"""Pictures of measured rows, and those that documents show."""

import json
import re

import pytest

from benchmarks import overlap_plot
from benchmarks.report import ROOT


def test_plots_show_the_committed_rows(tmp_path):
    pytest.importorskip("matplotlib")
    assert overlap_plot.main(["--out", str(tmp_path)]) == 0
    for name in ("overlap_gemms", "overlap_mlp"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    content = json.loads((overlap_plot.RESULTS / "overlap_gemms.json").read_text())
    bars = overlap_plot.of_limit(content)
    assert len(bars) == 16 and all(set(one) == set(overlap_plot.WAYS) for one in bars.values())
    content["rows"] = [row for row in content["rows"] if row["candidate"] != "ring"]
    assert all("ring" not in one for one in overlap_plot.of_limit(content).values())


def test_documents_show_pictures_that_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    shown = [page.parent / path for page in pages for path in re.findall(r"!\[[^\]]*\]\((\S+?)\)", page.read_text())]
    assert len(shown) > 5 and not [path for path in shown if not path.exists()]
