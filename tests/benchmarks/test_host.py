"""benchmarks/host.py, at a tiny shape on the CPU."""

import json

import pytest

from benchmarks import host, report


def test_parts_add_up_to_a_step(tmp_path):
    options = ["--modules", "Linear", "--recipes", "bf16", "current", "--rounds", "1", "--steps", "3"]
    assert host.main(["--device", "cpu", *options, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "host.json").read_text())
    assert [row["recipe"] for row in content["rows"]] == ["bf16", "current"]
    for row in content["rows"]:
        assert row["step_us"] > 0 and row["torch_us"] > 0 and row["allocations"] is row["torch_allocations"] is None
        assert all(row[f"{part}_us"] >= 0 for part in host.PARTS if part != "rest")
        row |= {"allocations": 12, "torch_allocations": 7}  # as of a GPU
    content["device"] = "a GPU"
    (tmp_path / "host.json").write_text(json.dumps(content))
    text = report.rendered("<!-- results:host -->\n<!-- /results:host -->\n", tmp_path)
    assert "| allocations | torch's |" in text and text.count("| 12 | 7 |") == 2


@pytest.mark.gpu
def test_allocations_are_counted(tmp_path):
    options = ["--modules", "Linear", "--recipes", "bf16", "--rounds", "1", "--steps", "3"]
    assert host.main([*options, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert min(row["allocations"], row["torch_allocations"]) > 2  # y, dx and dw at least
