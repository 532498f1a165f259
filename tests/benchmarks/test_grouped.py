"""benchmarks/grouped.py, at a tiny shape on the CPU."""

import json

import pytest
import torch

from benchmarks import bench, gpu_check, grouped, grouped_kernels, report


def test_every_section_writes_rows(tmp_path):
    assert grouped.main(["--device", "cpu", "--rounds", "1", "--splits", "zipf", "--out", str(tmp_path)]) == 0
    contents = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in grouped.FILES}
    for name, content in contents.items():
        rows = content["rows"]
        assert {row["section"] for row in rows} == set(grouped.FILES[name]) and not any(row["error"] for row in rows)
        assert all(row["gpu_us"] > 0 for row in rows)
    content = contents["grouped_modules"]
    rows = content["rows"]
    assert {row["candidate"] for row in rows if row["section"] == "steps"} == {
        f"te_lite {name}" for name in grouped.RECIPES
    }
    # its table, as of a GPU: every row and what failed
    content["device"], rows[-1]["error"] = "a GPU", "RuntimeError"
    (tmp_path / "grouped_modules.json").write_text(json.dumps(content))
    text = report.rendered("<!-- results:grouped_modules -->\n<!-- /results:grouped_modules -->\n", tmp_path)
    assert text.count("| zipf |") == len(rows) - 1 and "because they failed: delayed by te_lite device cached" in text


def test_a_file_whose_sections_are_not_asked_for_stays(tmp_path):
    args = ["--device", "cpu", "--rounds", "1", "--splits", "zipf", "--recipes", "bf16", "--sections", "steps"]
    assert grouped.main([*args, "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["grouped_modules.json"]


def test_a_step_that_adds_to_main_grad_adds():
    data = grouped_kernels.Data(grouped_kernels.Problem("balanced", (16, 16), 32, 48), "cpu")
    one = grouped.Step(lambda x, w_t: torch.stack([x[:16] @ w_t[0], x[16:] @ w_t[1]]).flatten(0, 1), data, True)
    for times in (1, 2):
        one.step()
        assert one.w.grad.any() and torch.equal(one.main_grad, times * one.w.grad.float())
        one.reset()


def test_stage(tmp_path, monkeypatch):
    """gpu_check.py runs it where it is named."""
    commands = []
    monkeypatch.setattr(gpu_check, "run_command", lambda command, *_, **__: commands.append(command) or (0, 1.0, []))
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path), "--tree-hash", "t", "--stages", "grouped"]) == 0
    assert [command[1] for command in commands] == ["benchmarks/grouped.py"] and "--tree-hash" in commands[0]
    assert "grouped" not in gpu_check.parse([]).stages


@pytest.mark.parametrize("kind", grouped.SPLITS)
def test_splits(kind):
    sizes = grouped_kernels.split(kind, 8192, 8)
    assert sum(sizes) == 8192 and list(sizes) == sorted(sizes, reverse=True)
    assert all(size % 2 == 1 if kind == "odd" else size % 16 == 0 for size in sizes)
    assert (sizes[0] > 3 * sizes[3]) == (kind != "balanced")


def test_ratios_are_of_neighbours_in_time():
    samples = {name: [bench.Sample(us, 0.0, False) for us in times] for name, times in
               {"a": (10.0, 30.0, 20.0), "b": (10.0, 10.0, 10.0)}.items()}  # fmt: skip
    assert grouped.ratio(samples, "a", "b") == 2.0 and grouped.ratio(samples, "a", "c") is None
