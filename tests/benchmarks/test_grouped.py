"""benchmarks/grouped.py, at a tiny shape on the CPU."""

import json

import pytest

from benchmarks import bench, grouped, grouped_kernels


def test_every_section_writes_rows(tmp_path):
    assert grouped.main(["--device", "cpu", "--rounds", "1", "--splits", "zipf", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "grouped.json").read_text())
    rows = content["rows"]
    assert {row["section"] for row in rows} == set(grouped.SECTIONS) and not any(row["error"] for row in rows)
    assert {row["candidate"] for row in rows if row["section"] == "steps"} == {
        f"te_lite {name}" for name in grouped.RECIPES
    }
    assert all(row["gpu_us"] > 0 for row in rows)


@pytest.mark.parametrize("kind", grouped.SPLITS)
def test_splits(kind):
    sizes = grouped_kernels.split(kind, 8192, 8)
    assert sum(sizes) == 8192 and all(size % 16 == 0 for size in sizes) and list(sizes) == sorted(sizes, reverse=True)
    assert (sizes[0] > 3 * sizes[3]) == (kind == "zipf")


def test_ratios_are_of_neighbours_in_time():
    samples = {name: [bench.Sample(us, 0.0, False) for us in times] for name, times in
               {"a": (10.0, 30.0, 20.0), "b": (10.0, 10.0, 10.0)}.items()}  # fmt: skip
    assert grouped.ratio(samples, "a", "b") == 2.0 and grouped.ratio(samples, "a", "c") is None
