"""benchmarks/two_trees.py: what it makes of the rows of several processes."""

import argparse
import json
import subprocess
import time

import pytest

from benchmarks import two_trees

MINE, GEMMS, TORCH = (
    ("small", "Linear", *who) for who in (("te_lite", "current"), ("gemms", "fp8"), ("torch", "bf16"))
)
GEMMS_BF16 = ("small", "Linear", "gemms", "bf16")


def process(gpu, wall, rate):
    """One process on a GPU of that rate."""
    times = {MINE: (gpu, wall), GEMMS: (50, 90), TORCH: (80, 100), GEMMS_BF16: (70, 90)}
    return {key: {"gpu_us": g / rate, "wall_us": w / rate, "host_us": w / rate} for key, (g, w) in times.items()}


def rows_of(old, new, stage="modules"):
    return two_trees.compared(stage, old, new)


def test_a_slower_gpu_is_no_difference():
    old, new = [process(100, 200, rate) for rate in (1, 1.1, 0.9)], [process(100, 200, rate) for rate in (0.5, 0.6)]
    mine, control = sorted(rows_of(old, new), key=lambda row: row["control"])
    assert mine["gpu_ratio"] == pytest.approx(1) and mine["wall_ratio"] == pytest.approx(1)
    assert control["gpu_ratio"] == pytest.approx(1) and mine["processes"] == 2
    assert all(two_trees.verdict([mine, control], 5, 5).values())
    assert not all(two_trees.verdict([mine, control], 4, 5).values())


@pytest.mark.parametrize(
    ("gpu", "wall", "fails"), [(102, 200, "modules gpu"), (100, 208, "modules wall"), (90, 206, None), (101, 150, None)]
)
def test_a_slower_tree_is(gpu, wall, fails):
    held = two_trees.verdict(rows_of([process(100, 200, 1)] * 5, [process(gpu, wall, 0.7)] * 5), 5, 5)
    assert [name.split(" <=")[0] for name, good in held.items() if not good] == ([fails] if fails else [])


def test_kernels_are_divided_by_the_copy():
    def one(cast, rate):
        return {(8, 16, name): {"gpu_us": us / rate} for name, us in (("copy bf16", 10), ("cast", cast))}

    (row,) = rows_of([one(20, 1)], [one(21, 0.5)], "kernels")
    assert row["gpu_ratio"] == pytest.approx(1.05) and row["wall_ratio"] is None
    held = two_trees.verdict([row], 5, 5)
    assert [name for name, good in held.items() if not good] == ["kernels gpu <= 1.01"]


def test_an_exchange_is_held_against_its_limit():
    def one(share, rate):
        return {("AG", "8b", "bf16", "ring"): {"gpu_us": 100 / rate, "of_limit": share}}

    found = []
    for share in (0.895, 0.885):
        (row,) = rows_of([one(0.9, 1)], [one(share, 0.5)], two_trees.EXCHANGES)
        assert row["share_lost"] == pytest.approx(0.9 - share)
        found.append([name for name, good in two_trees.verdict([row], 5, 5).items() if not good])
    assert found == [[], ["no share of the limit lower by more than 0.01"]]


def test_a_row_of_one_tree_only_fails():
    new = process(100, 200, 1)
    new[MINE] = {"error": "RuntimeError: no"}
    held = two_trees.verdict(rows_of([process(100, 200, 1)], [new]), 5, 5)
    assert not held["every row was timed in both trees"]
    assert not two_trees.verdict([], 5, 5)["something was compared"]


def test_trees_take_turns_until_the_time_is_used_up(tmp_path):
    args = argparse.Namespace(stages=["modules"], pairs=3, end=time.monotonic() + 60)
    order = []

    def run(stage, folder, args, out, left):
        order.append(folder)
        if len(order) == 6:
            raise subprocess.TimeoutExpired("", left)
        return {}

    taken, pairs = two_trees.alternate(args, ("old", "new"), tmp_path, run)
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert pairs == 2 and [len(runs) for runs in taken["modules"]] == [2, 2]  # half a pair does not count


def test_smoke_of_exchanges(tmp_path):
    options = ["--old", str(two_trees.ROOT), "--device", "cpu", "--pairs", "1", "--rounds", "2", "--ranks", "2"]
    two_trees.main([*options, "--out", str(tmp_path)])
    content = json.loads((tmp_path / "two_trees_tp2.json").read_text())
    assert {row["row"].split()[-1] for row in content["rows"]} == {"collective", "ring"}
    assert content["criteria"]["every row was timed in both trees"]


def test_smoke(tmp_path):
    options = ["--old", str(two_trees.ROOT), "--device", "cpu", "--pairs", "1", "--rounds", "1", "--wall-rounds", "1"]
    two_trees.main([*options, "--modules", "Linear", "--families", "delayed", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "two_trees.json").read_text())
    assert content["tree"] == content["old_tree"] and content["pairs"] == 1
    assert {row["stage"] for row in content["rows"]} == {"modules", "kernels"}
    assert content["criteria"]["every row was timed in both trees"]
