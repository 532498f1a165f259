"""compare_recipes.py: which runs, where they run, what it says of their losses, and the committed comparison."""

import json
import subprocess
import threading
import time

import pytest

import te_lite as te
from examples import compare_recipes
from examples.compare_recipes import BASELINE, BOUND, CUT_RECIPES, RECIPES, Key
from tests.examples.demo import REPOSITORY, TINY

NAMES = ("bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")


def log(train: float, held_out: float) -> dict:
    summary = {"train_loss": train, "held_out_loss": held_out, "tokens_per_second": 1.0, "unigram_entropy": 3.0}
    summary |= {"data": "a text", "data_sha256": "abc", "device": "cpu", "steps": 200}
    return {"summary": summary, "options": {}, "losses": [3.0 - 0.01 * i for i in range(20)]}


def test_every_recipe_runs() -> None:
    assert RECIPES == NAMES
    assert set(te.recipe.available()) - {"tensorwise"} == set(NAMES)  # tensorwise is current
    for gpus in (0, 2, 4):
        keys = compare_recipes.runs(RECIPES, gpus)
        assert sorted(keys) == sorted([(name, 1) for name in NAMES] + [(name, 2) for name in CUT_RECIPES])
    assert sorted(compare_recipes.runs(RECIPES, 1)) == sorted((name, 1) for name in NAMES)
    assert compare_recipes.runs(["mxfp8"], 0) == [("mxfp8", 2), BASELINE, ("mxfp8", 1)]
    assert compare_recipes.runs(["mxfp8"], 3, (2, 4)) == [("mxfp8", 2), BASELINE, ("mxfp8", 1)]
    assert [ranks for _, ranks in compare_recipes.runs(["bf16"], 4, (2, 4))] == [2, 4, 1]


def test_experts_are_cut_by_ep_and_the_rest_by_tp() -> None:
    for cut, script, more in (("tp", "train_gpt.py", True), ("ep", "train_moe.py", False)):
        line = compare_recipes.command("rowwise", 2, REPOSITORY / "log.json", ["--steps", "3"], cut)
        at = line.index(f"--{cut}")
        assert line[at + 1] == "2" and any(part.endswith(script) for part in line) and line[-2:] == ["--steps", "3"]
        assert ("--sequence-parallel" in line) == more and "--nproc-per-node" in line


def test_runs_spread_over_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_recipes.os, "cpu_count", lambda: 16)
    keys: list[Key] = [("bf16", 2), ("mxfp8", 2), ("bf16", 1), ("mxfp8", 1)]
    places = compare_recipes.places(keys, ["4", "5", "7"], parallel=2)
    assert [places[key]["CUDA_VISIBLE_DEVICES"] for key in keys] == ["4,5", "7,4", "5", "7"]
    assert {place["OMP_NUM_THREADS"] for place in places.values()} == {"4"}
    crowded = compare_recipes.places(keys, [], parallel=16)  # no more at once than there are
    assert set(crowded) == set(keys) and all(place == {"OMP_NUM_THREADS": "2"} for place in crowded.values())


# (train and held-out losses of mxfp8 against 2.0 and 1.8 of bf16, the distance, within the bound)
DISTANCES = [
    (2.0, 1.8, 0.0, True),
    (1.98, 1.8, 0.01, True),
    (2.0, 1.8 * 1.029, 0.029, True),
    (2.0, 1.8 * 1.031, 0.031, False),
    (2.0 * 0.969, 1.8, 0.031, False),
    (2.0, float("nan"), float("nan"), False),
]


@pytest.mark.parametrize(("train", "held_out", "worst", "within"), DISTANCES)
def test_the_farthest_run_decides(train, held_out, worst, within, tmp_path, monkeypatch, capsys) -> None:
    logs = {BASELINE: log(2.0, 1.8), ("mxfp8", 1): log(train, held_out), ("rowwise", 1): log(2.0, 1.8)}
    monkeypatch.setattr(compare_recipes, "train_all", lambda *args: logs)
    status = compare_recipes.main(["--plot", str(tmp_path / "recipes.png"), "--runs", str(tmp_path)])
    result = json.loads((tmp_path / "recipes.json").read_text())
    assert status == int(not within) and ("NOT within" in capsys.readouterr().out) == (not within)
    assert result["worst"] == pytest.approx(worst, abs=1e-9, nan_ok=True) and result["bound"] == BOUND == 0.03
    assert [row["recipe"] for row in result["runs"]] == ["bf16", "mxfp8", "rowwise"]
    assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG")


def test_runs_at_once(tmp_path, monkeypatch) -> None:
    together = threading.Barrier(2, timeout=20)  # breaks unless two runs are under way
    monkeypatch.setattr(compare_recipes, "train", lambda *args: {"arrived": together.wait()})
    keys: list[Key] = [("bf16", 1), ("delayed", 1)]
    logs = compare_recipes.train_all(keys, [], 2, tmp_path, [])
    assert {log["arrived"] for log in logs.values()} == {0, 1}


def test_nothing_is_started_after_a_failure(tmp_path, monkeypatch) -> None:
    started = []

    def train(key, folder, extra, place, cut):
        started.append(key)
        if key[0] == "bf16":
            raise RuntimeError("bf16 ended with status 1")
        time.sleep(0.5)

    monkeypatch.setattr(compare_recipes, "train", train)
    with pytest.raises(RuntimeError, match="bf16"):
        compare_recipes.train_all([(name, 1) for name in NAMES], [], 1, tmp_path, [])
    assert len(started) <= 2  # one may have begun before the failure was seen


def test_a_run_is_repeated_only_when_its_options_change(tmp_path, monkeypatch) -> None:
    """The real runs, at tp 1; then a failing one, whose output is shown."""
    monkeypatch.setattr(compare_recipes, "CUT_RECIPES", ())
    outputs = ["--plot", str(tmp_path / "recipes.png"), "--runs", str(tmp_path / "runs")]
    small = [*TINY, *outputs, "--recipes", "rowwise", "--parallel", "2"]
    assert compare_recipes.main([*small, "--steps", "3"]) == 0
    result = json.loads((tmp_path / "recipes.json").read_text())
    assert result["steps"] == 3 and [row["recipe"] for row in result["runs"]] == ["bf16", "rowwise"]

    def refuse(*args, **kwargs):
        raise AssertionError(f"started {args}")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", refuse)
        assert compare_recipes.main([*small, "--steps", "3"]) == 0
        with pytest.raises(AssertionError, match="started"):
            compare_recipes.main([*small, "--steps", "4"])
    with pytest.raises(RuntimeError, match="(?s)ended with status 2.*--lr 0.0"):
        compare_recipes.main([*small, "--steps", "3", "--lr", "0"])


# (the comparison, what cuts its model, the page with its rows)
COMMITTED = [("recipes.json", "tp", "run-the-demo.md"), ("moe.json", "ep", "mixture-of-experts.md")]


@pytest.mark.parametrize(("name", "cut", "page"), COMMITTED)
def test_the_committed_comparison_is_of_every_recipe_and_within_the_bound(name: str, cut: str, page: str) -> None:
    result = json.loads((REPOSITORY / "docs" / "img" / name).read_text())
    assert result["steps"] == 200 and result["bound"] == BOUND
    assert [(row["recipe"], row[cut]) for row in result["runs"] if row[cut] == 1] == [(name, 1) for name in NAMES]
    for row in result["runs"]:
        assert abs(row["train_ratio"] - 1) <= result["worst"] <= BOUND
        assert abs(row["held_out_ratio"] - 1) <= result["worst"]
        assert row["held_out_loss"] < result["unigram_entropy"]


@pytest.mark.parametrize(("name", "cut", "page"), COMMITTED)
def test_the_page_says_what_the_comparison_says(name: str, cut: str, page: str) -> None:
    result = json.loads((REPOSITORY / "docs" / "img" / name).read_text())
    text = (REPOSITORY / "docs" / "how-to" / page).read_text()
    for row in result["runs"]:
        numbers = (row[key] for key in ("train_loss", "held_out_loss", "train_ratio", "held_out_ratio"))
        line = f"| {row['recipe']} | {row[cut]} | " + " | ".join(f"{number:.4f}" for number in numbers) + " |"
        assert line in text, f"{page} lacks {line}"
    flat = " ".join(text.split())
    assert f"{100 * result['worst']:.1f}%, the bound {100 * BOUND:.0f}%" in flat
    assert f"held-out text is {result['unigram_entropy']:.4f}" in flat
