"""benchmarks/llama.py on a small stack of layers like Llama's, with a stand-in for Transformer Engine."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_lite
from benchmarks import llama, report
from benchmarks.modules import BF16
from tests.benchmarks import fake_engine
from tests.compat.layers import Layer


class Small(nn.Module):
    """Takes and returns what LlamaForCausalLM does."""

    def __init__(self, stack):
        super().__init__()
        self.embed = nn.Embedding(stack.vocabulary, stack.hidden)
        self.layers = nn.ModuleList(Layer(bias=False) for _ in range(stack.layers))
        self.lm_head = nn.Linear(stack.hidden, stack.vocabulary, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x).float()
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@pytest.fixture(autouse=True)
def _small_model(monkeypatch):
    monkeypatch.setattr(llama, "build_model", lambda stack, device: Small(stack).to(BF16))


def run(folder, *options):
    """(exit status, content of the results file); nothing is compiled on a CPU."""
    status = llama.main(["--device", "cpu", "--rounds", "2", "--warmup", "1", "--out", str(folder), *options])
    return status, json.loads((folder / "llama_eager.json").read_text())


def test_every_way_trains_the_same_weights(monkeypatch):
    fake_engine.install(monkeypatch)
    args = llama.parse(["--device", "cpu", "--rounds", "2", "--warmup", "1"])
    found = llama.measure(args, {"transformer_engine": "0.0.fake"}, llama.SMOKE)
    assert not any(row["error"] for row in found), [row["error"] for row in found]
    rows = {(row["library"], row["recipe"]): row for row in found if not row["fused"]}
    fused = {(row["library"], row["recipe"]): row for row in found if row["fused"]}
    assert list(fused) == [(name, recipe) for name in ("te_lite", "te") for recipe in llama.FUSED]
    for recipe in llama.FUSED:  # the same modules: so are the order of gate and up, and which is q
        assert fused["te", recipe]["loss"] == fused["te_lite", recipe]["loss"]
        assert recipe == "bf16" or fused["te", recipe]["loss"] != fused["te", "bf16"]["loss"]
    ours = [("te_lite", name) for name in ("delayed", "current", "rowwise", "blockwise", "mxfp8")]
    theirs = [("te", name) for name in ("bf16", "delayed", "current", "blockwise")]
    assert list(rows) == [("torch", "bf16"), *ours, *theirs]
    assert all(row["tokens_s"] > 0 and row["samples"] == 2 and not row["compiled"] for row in rows.values())
    plain = rows["torch", "bf16"]
    assert plain["of_bf16"] == 1 and rows["te", "bf16"]["loss"] == plain["loss"]
    # Quantized, or they would have measured bf16.
    assert all(rows[name]["loss"] != plain["loss"] for name in (*ours, *theirs[1:]))
    assert rows["te", "current"]["loss"] == rows["te_lite", "current"]["loss"]


def test_all_but_the_head_is_converted(monkeypatch):
    fake_engine.install(monkeypatch)
    base = Small(llama.SMOKE).to(BF16)
    for name in ("te", "te_lite"):
        for fused in (False, True):
            model, _, new = llama.converted(llama.Way(name, "current", fused=fused), base, True)
            assert all(type(part) is not nn.Linear for part in model.layers.modules())
            assert type(model.lm_head) is nn.Linear
            others = {id(p) for p in model.parameters()} - {id(p) for p in base.parameters()}
            assert others == {id(p) for p in new} and len(new) == (2 if (name, fused) == ("te", True) else 0)
    assert sum(type(part) is nn.Linear for part in base.layers.modules()) == 2 * 7


def test_another_loss_fails(tmp_path, monkeypatch):
    class Loud(te_lite.Linear):
        def forward(self, inp):
            return 9 * super().forward(inp)

    fake_engine.install(monkeypatch, Linear=Loud)
    status, content = run(tmp_path, "--libraries", "torch", "te", "--recipes", "bf16")
    assert status == 1 and [bool(row["error"]) for row in content["rows"]] == [False, True, True]
    assert "at most 0.02 apart" in content["rows"][1]["error"]


def test_a_sample_ends_when_the_device_is_done(monkeypatch):
    order = []
    clock = llama.StepClock("cpu")
    monkeypatch.setattr(clock, "synchronize", lambda: order.append("idle"))
    assert clock.sample(lambda: order.append("step"), 0.0).gpu_us > 0
    assert order == ["idle", "step", "idle"]


def test_report_has_a_table_of_them(tmp_path):
    _, content = run(tmp_path, "--libraries", "torch", "te_lite", "--recipes", "bf16", "current")
    content |= {"device": "NVIDIA H200"}
    for row, rate in zip(content["rows"], (70_000.0, 91_000.0, 70_000.0, 98_000.0), strict=True):
        row |= {"tokens_s": rate, "of_bf16": rate / 70_000, "peak_gib": 15.5}
    (tmp_path / "llama.json").write_text(json.dumps(content))
    text = report.rendered("<!-- results:llama -->\n<!-- /results:llama -->\n", tmp_path)
    assert "| te_lite | current |  |  | 91000 | 1.30 | 15.5 |" in text
    assert "| te_lite | current | yes |  | 98000 | 1.40 | 15.5 |" in text and "2 layers, 64 tokens a step." in text


def test_transformers_model_has_the_shape(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.undo()
    model = llama.build_model(llama.SMOKE, "cpu")
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert model(input_ids=ids, labels=ids).loss.isfinite()
    assert sum(llama.to_convert(module, name) for name, module in model.named_modules()) == 7 * llama.SMOKE.layers
