"""benchmarks/megatron_gpt.py on a tiny model on the CPU, where te_lite's alias stands for Transformer Engine."""

import json
import math
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import te_lite.compat
from benchmarks import megatron_data, megatron_gpt, megatron_losses, report

SITE = Path(te_lite.compat.__file__).parent / "alias" / "site"


def rows(ours, theirs, recipe="bf16", overlap="off"):
    found = []
    for candidate, losses in (("te_lite", ours), ("te", theirs)):
        found.append({"candidate": candidate, "recipe": recipe, "overlap": overlap, "error": None, "losses": losses})
        found[-1] |= {"tokens_s": 110.0 if candidate == "te_lite" else 100.0, "wall_tokens_s": 90.0}
    return found


def test_losses_are_compared_step_by_step():
    theirs = [[5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.8], [5.0, 4.1, 3.0, 2.0, 1.0, 0.9, 0.82]]
    found = rows([[5.0, 4.0, 3.15, 2.0, 1.0, 0.9, 0.8], theirs[1]], theirs)
    megatron_losses.compare(found)
    # Around step 2 the seeds are 0.1 apart, though not at it; at the end they are closer.
    assert found[0]["loss_ratio"] == pytest.approx(1.5) and found[0]["worst_step"] == 2 and not found[0]["error"]
    assert (found[0]["over_te"], found[0]["wall_over_te"]) == (1.1, 1.0)
    assert megatron_losses.bars(found) == {"bf16: loss_ratio <= 2": True, "bf16: over_te >= 1": True}
    found = rows([[5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.85], theirs[1]], theirs)
    megatron_losses.compare(found)
    assert found[0]["worst_step"] == 6 and "2.50 times as far" in found[0]["error"]
    assert not megatron_losses.bars(found)["bf16: loss_ratio <= 2"]
    third = [theirs[0], theirs[1], [loss - 0.1 for loss in theirs[0]]]
    found = rows([[5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.85], *third[1:]], third)
    megatron_losses.compare(found)
    assert found[0]["loss_ratio"] == pytest.approx(0.05 / 0.12), "of three seeds the pair that is farthest apart"
    same = rows(theirs, [theirs[0]] * 2)
    megatron_losses.compare(same)
    assert same[0]["loss_ratio"] == math.inf, "seeds that are one and the same are no measure"


def test_rows_of_one_overlap_are_compared():
    """With one seed there is no noise to compare with."""
    found = [*rows([[5.0, 4.0]], [[5.0, 4.25]]), *rows([[5.0, 4.0]], [[5.5, 4.0]], overlap="on")]
    for row in found[2:]:
        row["tokens_s"] *= 1.5 if row["candidate"] == "te_lite" else 1.2
    megatron_losses.compare(found)
    assert [row.get("off") for row in found] == [[0.0, 0.25], None, [0.5, 0.0], None]
    assert "0.5000" in megatron_gpt.summary(found) and not any("loss_ratio" in row or row["error"] for row in found)
    assert [row.get("speedup") for row in found] == pytest.approx([None, None, 1.5, 1.2])
    assert found[2]["over_te"] == pytest.approx(1.1 * 1.5 / 1.2) and found[2]["wall_speedup"] == 1
    assert megatron_losses.bars(found) == {"bf16: over_te >= 1": True, "bf16, overlap: over_te >= 1": True}
    found = rows([[5.0, 4.0]], [[5.0, 4.0]], overlap="on")
    megatron_losses.compare(found)
    assert "speedup" not in found[0], "no row without overlap"


def test_turns():
    found = list(megatron_gpt.jobs(("bf16", "delayed"), True))
    assert found == [(who, recipe, "off") for who, recipe in zip(
        ("te", "te_lite", "te_lite", "te"), ("bf16", "bf16", "delayed", "delayed"), strict=True)]  # fmt: skip
    assert list(megatron_gpt.jobs(("current",), False)) == [("te_lite", "current", "off")]
    found = [(who, overlap) for who, _, overlap in megatron_gpt.jobs(("bf16",), True, ("off", "on"))]
    assert found == [("te", "off"), ("te_lite", "off"), ("te_lite", "on"), ("te", "on")]
    refused = list(megatron_gpt.jobs(("blockwise",), True, ("on",)))
    assert refused == [("te_lite", "blockwise", "on")], "Transformer Engine's userbuffers take no blocks"


@pytest.mark.parametrize("options, file", [
    ("", "megatron.json"), ("--tp 2", "megatron_tp2_pp1.json"),
    ("--tp 2 --ranks 4 --overlap off on", "megatron_tp2_pp1_dp2.json"), ("--pp 2", "megatron_tp1_pp2.json"),
])  # fmt: skip
def test_layouts(options, file):
    args = megatron_gpt.parse(["--device", "cpu", *options.split()])
    assert args.layout.file == file and args.layout.micro_batches == (4 if "pp" in options else 1)


@pytest.mark.parametrize("options, why", [
    ("--tp 2 --ranks 3", "multiple of --tp 2 times --pp 1"), ("--tp 4", "--groups 2: must be a multiple of --tp 4"),
    ("--pp 3", "--layers 2: must be a multiple of --pp 3"), ("--overlap on", "needs --tp 2"), ("--tp 0", "at least 1"),
])  # fmt: skip
def test_layouts_that_cannot_be(options, why, capsys):
    with pytest.raises(SystemExit):
        megatron_gpt.parse(["--device", "cpu", *options.split()])
    assert why in capsys.readouterr().err


def test_recipes_on_gpus_of_their_own(monkeypatch):
    """Not those of several ranks, which take all GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one, two = megatron_gpt.Layout(), megatron_gpt.Layout(tp=2)
    three = ["bf16", "delayed", "current"]
    found = [Namespace(layout=layout, device=device, recipes=three) for layout, device in (
        (one, "cuda"), (two, "cuda"), (one, "cpu"))]  # fmt: skip
    assert [megatron_gpt.own_gpus(args) for args in found] == [["0", "1", "2"], [""], [""]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert megatron_gpt.own_gpus(found[0]) == ["3", "1"]


def test_why_a_rank_failed():
    lines = [
        "start",
        "[rank1]: Traceback",
        "[rank1]: ValueError: no",
        "[rank0]: DistBackendError: gone",
        "=====",
        "===",
    ]
    assert megatron_gpt.last_words(lines) == "[rank1]: ValueError: no"
    crash = ["===", "  exitcode  : -11 (pid: 7)", "  traceback : Signal 11 (SIGSEGV) received by PID 7", "==="]
    assert "SIGSEGV" in megatron_gpt.last_words(crash)
    assert [megatron_gpt.last_words(said) for said in (["a", "b"], [])] == ["b", "it said nothing"]


class Layer(torch.nn.Module):
    """Of the names that Megatron gives; on a rank of `tp` it has a part."""

    def __init__(self, tp=1):
        super().__init__()
        self.linear_qkv, self.linear_proj = torch.nn.Linear(8, 24 // tp), torch.nn.Linear(8 // tp, 8)
        self.linear_fc1, self.linear_fc2 = torch.nn.Linear(8, 32 // tp), torch.nn.Linear(16 // tp, 8)


def test_ranks_hold_parts_of_one_model():
    """Of the second stage of two: its first layer is the whole model's second one."""

    def drawn(layers, shard):
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)}).bfloat16()
        megatron_data.fill(model, 1, "rounding", shard)
        return model["layers"][-1]

    whole = drawn([Layer(), Layer()], megatron_data.Shard())
    parts = [drawn([Layer(2)], megatron_data.Shard(rank, 2, 1)) for rank in range(2)]
    for name, dim in (("linear_qkv", 0), ("linear_proj", 1), ("linear_fc2", 1)):
        weights = [getattr(part, name).weight for part in parts]
        assert torch.equal(torch.cat(weights, dim), getattr(whole, name).weight), name
    gate, up = whole.linear_fc1.weight.chunk(2)
    for rank, part in enumerate(parts):
        assert torch.equal(part.linear_fc1.weight, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))
    first = drawn([Layer(2)], megatron_data.Shard(0, 2, 0))
    assert not torch.equal(first.linear_qkv.weight, parts[0].linear_qkv.weight), "another layer"


def test_batches_of_ranks_differ():
    args = Namespace(micro_batch=2, sequence=64, vocabulary=50)
    found = [megatron_data.tokens_of(3, args, batch) for batch in range(3)]
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    follows = (found[0][:, 1:] == (found[0][:, :-1] + 1) % 50).float().mean()
    assert 0.4 < float(follows) < 0.65 and int(found[0].max()) < 50


def test_seeds_round_the_same_weights():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).bfloat16()
    drawn = []
    for seed, seed_is in ((0, "rounding"), (1, "rounding"), (0, "rounding"), (1, "weights")):
        megatron_data.fill(model, seed, seed_is)
        drawn.append(model[0].weight.detach().float().clone())
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    step = (drawn[0] - drawn[1]).abs() / drawn[0].abs()
    assert bool((step <= 2.0**-7).all()), "neighbours in bf16"
    assert (drawn[0] - drawn[3]).std() > megatron_data.DEVIATION
    values = torch.full((40_000,), 1.0 + 2.0**-9)  # a quarter of the way to the next one
    mean = megatron_data.rounded(values, torch.Generator().manual_seed(0)).double().mean()
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


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core (pip install -e '.[test]')")
def test_a_run_of_two_ranks(tmp_path):
    """With userbuffers on the CPU."""
    options = ["--device", "cpu", "--recipes", "bf16", "--steps", "3", "--out", str(tmp_path), "--seeds", "1"]
    options += ["--tp", "2", "--overlap", "on", "--te-pythonpath", str(SITE), "--allow-alias"]
    assert megatron_gpt.main(options) == 0
    content = json.loads((tmp_path / "megatron_tp2_pp1.json").read_text())
    found = {row["candidate"]: row for row in content["rows"]}
    assert list(found) == ["te", "te_lite"] and content["ranks"] == 2 and not content["left_out"]
    assert found["te_lite"]["losses"] == found["te"]["losses"] and found["te_lite"]["off"] == [0.0] * 3
    assert len(found["te"]["losses"]) == 1 and {"ring", "bulk"} <= set(found["te_lite"]["schedules"])


def test_what_is_left_out_is_said(tmp_path, capsys):
    """The alias is no Transformer Engine to compare with; a process that gets no time is named."""
    options = ["--device", "cpu", "--recipes", "bf16", "--out", str(tmp_path), "--te-pythonpath", str(SITE)]
    assert megatron_gpt.main([*options, "--total-limit", "0"]) == 1
    said = json.loads((tmp_path / "megatron.json").read_text())["left_out"]
    assert "te_lite's alias" in said[0] and said[1].startswith("te_lite bf16 is left out: 0 s")
