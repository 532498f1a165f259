"""benchmarks/megatron_gpt.py on a tiny model on the CPU, where te_lite's alias stands for Transformer Engine."""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import te_lite.compat
from benchmarks import megatron_gpt, megatron_steps, report

SITE = Path(te_lite.compat.__file__).parent / "alias" / "site"


def rows(ours, theirs, recipe="bf16"):
    found = []
    for candidate, losses in (("te_lite", ours), ("te", theirs)):
        found.append({"candidate": candidate, "recipe": recipe, "error": None, "losses": losses})
        found[-1] |= {"tokens_s": 110.0 if candidate == "te_lite" else 100.0, "wall_tokens_s": 90.0}
    return found


def test_losses_are_compared_step_by_step():
    theirs = [[5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.8], [5.0, 4.1, 3.0, 2.0, 1.0, 0.9, 0.82]]
    found = rows([[5.0, 4.0, 3.15, 2.0, 1.0, 0.9, 0.8], theirs[1]], theirs)
    megatron_gpt.compare(found)
    # Around step 2 the seeds are 0.1 apart, though not at it; at the end they are closer.
    assert found[0]["loss_ratio"] == pytest.approx(1.5) and found[0]["worst_step"] == 2 and not found[0]["error"]
    assert (found[0]["over_te"], found[0]["wall_over_te"]) == (1.1, 1.0)
    assert megatron_gpt.bars(found) == {"bf16: loss_ratio <= 2": True, "bf16: over_te >= 1": True}
    found = rows([[5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.85], theirs[1]], theirs)
    megatron_gpt.compare(found)
    assert found[0]["worst_step"] == 6 and "2.50 times as far" in found[0]["error"]
    assert not megatron_gpt.bars(found)["bf16: loss_ratio <= 2"]
    same = rows(theirs, [theirs[0]] * 2)
    megatron_gpt.compare(same)
    assert same[0]["loss_ratio"] == math.inf, "seeds that are one and the same are no measure"


def test_turns():
    found = list(megatron_gpt.jobs(("bf16", "delayed"), True))
    assert found == [("te", "bf16"), ("te_lite", "bf16"), ("te_lite", "delayed"), ("te", "delayed"), ("local", "bf16")]
    assert list(megatron_gpt.jobs(("current",), False)) == [("te_lite", "current")]


def test_seeds_round_the_same_weights():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).bfloat16()
    drawn = []
    for seed, seed_is in ((0, "rounding"), (1, "rounding"), (0, "rounding"), (1, "weights")):
        megatron_steps.fill(model, seed, seed_is)
        drawn.append(model[0].weight.detach().float().clone())
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    step = (drawn[0] - drawn[1]).abs() / drawn[0].abs()
    assert bool((step <= 2.0**-7).all()), "neighbours in bf16"
    assert (drawn[0] - drawn[3]).std() > megatron_steps.DEVIATION
    values = torch.full((40_000,), 1.0 + 2.0**-9)  # a quarter of the way to the next one
    mean = megatron_steps.rounded(values, torch.Generator().manual_seed(0)).double().mean()
    assert abs(float(mean) - float(values[0])) < 5 * 2.0**-7 * 0.44 / 200, "5 standard errors"


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (pip install -e '.[test]')")
def test_a_run_on_the_cpu(tmp_path):
    options = ["--device", "cpu", "--recipes", "bf16", "--steps", "3", "--out", str(tmp_path)]
    assert megatron_gpt.main([*options, "--te-pythonpath", str(SITE), "--allow-alias"]) == 0
    content = json.loads((tmp_path / "megatron.json").read_text())
    found = {row["candidate"]: row for row in content["rows"]}
    assert list(found) == ["te", "te_lite", "local"] and not content["left_out"]
    assert "rounds each weight" in content["seed"] and content["layers"] == 2
    assert found["te_lite"]["losses"] == found["te"]["losses"] and found["te_lite"]["loss_ratio"] == 0
    assert found["te"]["losses"][0] != found["te"]["losses"][1]
    assert 0 < max(found["local"]["off"]) < 0.01, "other kernels, the same weights and data"
    (tmp_path / "megatron.json").write_text(json.dumps(content | {"device": "NVIDIA H200"}))
    text = report.rendered("<!-- results:megatron -->\n<!-- /results:megatron -->\n", tmp_path)
    assert "| te_lite | bf16 |" in text and "2 layers, 64 tokens a step, 3 steps." in text


def test_what_is_left_out_is_said(tmp_path, capsys):
    """The alias is no Transformer Engine to compare with; a process that gets no time is named."""
    options = ["--device", "cpu", "--recipes", "bf16", "--out", str(tmp_path), "--te-pythonpath", str(SITE)]
    assert megatron_gpt.main([*options, "--total-limit", "0"]) == 1
    said = json.loads((tmp_path / "megatron.json").read_text())["left_out"]
    assert "te_lite's alias" in said[0] and said[1].startswith("te_lite bf16 is left out: 0 s")
