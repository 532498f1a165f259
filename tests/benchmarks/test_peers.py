"""benchmarks/peers.py, with a stand-in for Transformer Engine."""

import json

import pytest
import torch

import te_lite
from benchmarks import bench, peer_steps, peers, report
from benchmarks.modules import MODULES, SMOKE_SHAPES
from tests.benchmarks import fake_engine

QUICK = ["--device", "cpu", "--rounds", "2", "--wall-rounds", "1"]


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    monkeypatch.setattr(bench, "WARM_STEPS", 1)
    monkeypatch.setattr(peers, "WALL_BLOCK_US", 1.0)


def run(folder, *options):
    """(exit status, content of peers.json)."""
    status = peers.main([*QUICK, "--out", str(folder), *options])
    return status, json.loads((folder / "peers.json").read_text())


def keyed(content):
    return {(row["module"], row["recipe"], row["call"], row["candidate"]): row for row in content["rows"]}


def test_every_case_has_a_row_of_both_libraries(tmp_path, monkeypatch, capsys):
    fake_engine.install(monkeypatch)
    status, content = run(tmp_path)
    assert status == 0, [row["error"] for row in content["rows"] if row["error"]]
    assert content["peers"] == {"transformer_engine": "0.0.fake"} and not content["left_out"]
    rows = keyed(content)
    for module in MODULES:
        for recipe in peer_steps.RECIPES:
            for call in peer_steps.CALLS:
                ours, theirs = (rows[module, recipe, call, name] for name in ("te_lite", "te"))
                assert all(row["gpu_us"] > 0 and row["wall_us"] > 0 for row in (ours, theirs))
                assert 0.05 < ours["over_te"] < 20 and 0.05 < ours["wall_over_te"] < 20
                # One rounding of a result to bf16 is off by 2^-9 of it, one to E5M2 by 2^-3, at most.
                assert 0.1 < ours["error_pct"] == theirs["error_pct"] < (1 if recipe == "bf16" else 15)
                assert ((module, recipe, call, "torch") in rows) == ((recipe, call) == ("bf16", "autograd"))
                gemms = module == "LayerNormMLP" and recipe != "blockwise"  # torch has no blocks of scales on a CPU
                assert ((module, recipe, call, "gemms") in rows) == gemms == (ours["over_gemms"] is not None)
    assert "smoke LayerNormMLP blockwise cached te " in " ".join(capsys.readouterr().out.split())


def test_without_transformer_engine_the_file_says_so(tmp_path):
    if "transformer_engine" in peer_steps.installed()[0]:
        pytest.skip("it is installed")
    status, content = run(tmp_path, "--modules", "Linear", "--recipes", "bf16", "--calls", "autograd")
    assert status == 0 and content["peers"] == {}
    assert content["left_out"] == ["transformer_engine is left out: it is not installed."]
    assert [row["candidate"] for row in content["rows"]] == ["te_lite", "torch"]


class Twice(te_lite.Linear):
    def forward(self, inp, is_first_microbatch=None):
        return 2 * super().forward(inp, is_first_microbatch)


class Broken(te_lite.Linear):
    def forward(self, inp, is_first_microbatch=None):
        raise RuntimeError("no kernel image")


@pytest.mark.parametrize(("linear", "says"), [(Twice, "wrong results: error"), (Broken, "no kernel image")])
def test_a_peer_that_errs_fails_its_own_rows(tmp_path, monkeypatch, linear, says):
    fake_engine.install(monkeypatch, Linear=linear)
    status, content = run(tmp_path, "--modules", "Linear", "--recipes", "bf16", "current", "--calls", "main_grad")
    assert status == 1
    ours, theirs = ([row for row in content["rows"] if row["candidate"] == name] for name in ("te_lite", "te"))
    assert len(ours) == len(theirs) == 2
    assert all(row["error"] is None and row["gpu_us"] > 0 for row in ours)
    assert all(says in row["error"] for row in theirs)


def test_main_grad_takes_the_gradient_and_cached_weights_are_kept():
    case = peer_steps.Case(SMOKE_SHAPES[0], "LayerNormMLP", "current", "cached")
    work = peer_steps.peer_step("te_lite", case, *peer_steps.operands(case, "cpu"))
    weights = [p for p in work.module.parameters() if p.dim() == 2]
    assert work.first is False and len(weights) == 2
    work.reset()
    assert not any(weight.grad_added_to_main_grad for weight in weights)
    before = [weight.main_grad.clone() for weight in weights]
    work.step()
    for weight, old in zip(weights, before, strict=True):
        assert weight.grad_added_to_main_grad
        # The same gradient as the step before it added.
        torch.testing.assert_close(weight.main_grad, 2 * old, rtol=1e-2, atol=1e-3)


def test_a_run_out_of_time_says_what_is_missing(tmp_path):
    status, content = run(tmp_path, "--total-limit", "0")
    assert status == 1 and not content["rows"]
    assert content["left_out"][-1] == "The time was up 36 cases before the end, at smoke Linear bf16 autograd."


def test_the_ratio_is_of_neighbours_in_time():
    def samples(*times):
        return [bench.Sample(us, us, False) for us in times]

    found = {"te_lite": samples(10.0, 20.0, 30.0), "te": samples(10.0, 10.0, 60.0)}
    assert peers.times_over(found, "te_lite", "te") == 1.0  # of 1, 2 and 0.5
    assert peers.times_over(found, "te_lite", "gemms") is None


def test_report_has_a_table_of_them(tmp_path, monkeypatch):
    fake_engine.install(monkeypatch)
    _, content = run(tmp_path, "--modules", "LayerNormMLP", "--recipes", "current", "--calls", "main_grad")
    content |= {"device": "NVIDIA H200", "left_out": ["torchao is left out: it is not installed."]}
    for row, us in zip(content["rows"], (90.0, 100.0, 60.0), strict=True):
        row |= {"gpu_us": us, "wall_us": 3 * us, "kept_mib": us / 10, "error_pct": 5.0}
    content["rows"][0] |= {"over_te": 0.91, "over_gemms": 1.49}
    (tmp_path / "peers.json").write_text(json.dumps(content))
    text = report.rendered("<!-- results:peers -->\n<!-- /results:peers -->\n", tmp_path)
    numbers = "90 | 100 | 0.91 |  | 60 | 1.49 | 270 | 300 | 9 | 10 | 5.00 | 5.00"
    assert f"| smoke | LayerNormMLP | current | main_grad | {numbers} |" in text
    assert "Transformer Engine 0.0.fake. torchao is left out" in text
