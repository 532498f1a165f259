"""convert_to_float8_training: which layers it changes, the rule about sizes, arguments."""

import enum
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import te_lite as te
from benchmarks import layer_gain
from te_lite.compat import convert

BF16 = torch.bfloat16


def convert_all(module, recipe="current", *args, **kwargs):
    """Conversion without the rule about sizes: the layers here are tiny."""
    return te.convert_to_float8_training(module, recipe, *args, tokens=None, **kwargs)


def net():
    return nn.Sequential(nn.Linear(64, 96, dtype=BF16), nn.GELU(), nn.Linear(96, 64, bias=False, dtype=BF16))


# ---- what is left alone ----


def _weight_norm():
    return torch.nn.utils.weight_norm(nn.Linear(64, 64, dtype=BF16))


def _pruned():
    return prune.l1_unstructured(nn.Linear(64, 64, dtype=BF16), "weight", 0.5)


def _own_forward():
    linear = nn.Linear(64, 64, dtype=BF16)
    linear.forward = lambda x: F.linear(x, linear.weight)
    return linear


def _resized():
    linear = nn.Linear(64, 64, dtype=BF16)
    linear.weight = nn.Parameter(torch.randn(32, 64, dtype=BF16))
    return linear


def _converted():
    linear = nn.Linear(64, 64, dtype=BF16)
    convert_all(linear)
    return linear


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.MultiheadAttention(64, 4, dtype=BF16).out_proj, "NonDynamicallyQuantizableLinear is a subclass"),
        (lambda: nn.LazyLinear(64), "LazyLinear is a subclass"),
        (lambda: parametrizations.weight_norm(nn.Linear(64, 64)), "ParametrizedLinear is a subclass"),
        (_weight_norm, "not a plain parameter"),
        (_pruned, "not a plain parameter"),
        (_resized, "not a plain parameter"),
        (_own_forward, "forward was replaced"),
        (lambda: nn.Linear(64, 64, dtype=torch.float64), "torch.float64"),
        (lambda: nn.Linear(64, 40), "multiples of 16"),
        (lambda: nn.Linear(40, 64), "multiples of 16"),
        (lambda: nn.Linear(0, 64), "multiples of 16"),
        (_converted, "converted before"),
    ],
)
def test_left_alone_with_its_reason(make, reason):
    linear = make()
    model, cls, numbers = nn.ModuleDict({"inner": linear}), type(linear), dict(vars(linear))
    report = convert_all(model)
    assert not report.converted and reason in report.skipped[0].reason
    assert type(linear) is cls and vars(linear) == numbers
    assert "inner" in str(report) and reason in str(report)


def test_attention_and_parametrized_models_still_run():
    encoder = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, dropout=0.0, dtype=BF16)
    parametrize.register_parametrization(encoder.linear2, "weight", nn.Identity())
    x = torch.randn(2, 12, 64, dtype=BF16)
    plain = encoder(x)
    report = convert_all(encoder)
    assert [layer.name for layer in report.converted] == ["linear1"]
    assert {layer.name for layer in report.skipped} == {"self_attn.out_proj", "linear2"}
    out = encoder(x)
    out.sum().backward()
    # fp8's own error on one layer of three: well below 10% of y, and not nothing.
    assert 0 < float((out - plain).detach().norm() / plain.detach().norm()) < 0.1
    assert encoder.eval()(x).isfinite().all()


@pytest.mark.parametrize("padded", [False, True])
def test_transformer_layers_run_quantized_in_evaluation(padded, monkeypatch):
    """torch's own have a fast path there past their linears' forwards, by nested tensors where tokens are padding."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0, dtype=BF16)
    encoder, ran, forward = nn.TransformerEncoder(layer, 2).eval(), [], convert.ConvertedLinear.forward
    x, options = torch.randn(2, 16, 64, dtype=BF16), {}
    if padded:
        options["src_key_padding_mask"] = torch.arange(16)[None] >= torch.tensor([[16], [12]])
    monkeypatch.setattr(convert.ConvertedLinear, "forward", lambda self, x: ran.append(self) or forward(self, x))
    converted = [layer.name for layer in convert_all(encoder).converted]
    assert converted == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    with torch.no_grad():
        y = encoder(x, **options)
    assert [id(one) for one in ran] == [id(encoder.get_submodule(name)) for name in converted]
    assert y.isfinite().all() and all(one._planned[1][0].operands.fprop.a.format.label for one in ran)  # in fp8


def test_the_filter_sees_names_and_decides():
    model, seen = nn.ModuleDict({"a": net(), "head": nn.Linear(64, 64, dtype=BF16)}), []

    def keep(module, name):
        seen.append((module, name))
        return name != "head"

    report = convert_all(model, module_filter_fn=keep)
    assert seen == [(model["a"][0], "a.0"), (model["a"][2], "a.2"), (model["head"], "head")]
    assert [(layer.name, layer.reason) for layer in report.skipped] == [("head", "module_filter_fn")]
    assert type(model["head"]) is nn.Linear


def test_a_filter_that_raises_leaves_the_model_as_it_was():
    model = net()
    with pytest.raises(KeyError):
        convert_all(model, module_filter_fn=lambda _, name: {"0": True}[name])
    assert type(model[0]) is nn.Linear and "_plans" not in vars(model[0])


# ---- the rule about sizes ----


@pytest.mark.filterwarnings("ignore:convert_to_float8_training")  # one layer that stays is all of them
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (63, "no layer is known to gain"),
        (64, "no layer is known to gain"),
        (256, "in * out = 6144, and at 256 tokens layers gain from in * out = 6145 on"),
        (1023, "in * out = 6144, and at 1023 tokens layers gain from in * out = 6145 on"),
        (1024, ""),
        (10**9, ""),
        (None, ""),
    ],
)
def test_sizes_are_judged_by_the_table(monkeypatch, given, reason):
    table = {64: math.inf, 256: 64 * 96 + 1, 1024: 64 * 96}
    monkeypatch.setattr(convert, "MINIMUM", {"current": table})
    report = te.convert_to_float8_training(nn.Linear(64, 96), tokens=given)
    (layer,) = report.skipped if reason else report.converted
    assert reason in layer.reason and (reason or "(root)  64  96   converted") in str(report)
    other = te.convert_to_float8_training(nn.Linear(64, 96), "tensorwise", tokens=given)
    assert bool(other.converted) == bool(report.converted)
    for absent in ("mxfp8", "rowwise"):  # no row: nothing is too small
        assert te.convert_to_float8_training(nn.Linear(64, 96), absent, tokens=given).converted


def test_the_table_comes_from_the_rows():
    def row(tokens, k, n, gpu, wall, recipe="current"):
        gains = {"gain_gpu": gpu, "gain_wall": wall}
        return {"tokens": tokens, "in_features": k, "out_features": n, "recipe": recipe, **gains}

    rows = [
        row(512, 16, 16, 2.0, 2.0),  # smaller than one that loses
        row(512, 16, 32, 1.5, 0.9),
        row(512, 32, 16, 1.5, 1.1),  # as large as one that loses
        row(512, 32, 32, 1.1, 1.1),
        row(2048, 32, 32, 0.9, 1.5),
        row(512, 32, 32, 0.8, 0.9, "mxfp8"),
        {"tokens": 512, "in_features": 64, "out_features": 64, "recipe": "mxfp8", "error": "out of memory"},
    ]
    for order in (rows, rows[::-1]):
        assert layer_gain.minimum(order) == {"current": {512: 32 * 32, 2048: math.inf}}


@pytest.mark.skipif(not (layer_gain.RESULTS / "layer_gain.json").exists(), reason="no measured rows")
def test_the_table_is_what_was_measured():
    content = json.loads((layer_gain.RESULTS / "layer_gain.json").read_text())
    assert content["device"] != "cpu" and not [row["error"] for row in content["rows"] if row["error"]]
    assert layer_gain.minimum(content["rows"]) == convert.MINIMUM


def test_layer_gain_smoke(tmp_path, capsys):
    options = ["--device", "cpu", "--recipes", "current", "--rounds", "1", "--wall-rounds", "1"]
    assert layer_gain.main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "layer_gain.json").read_text())["rows"]
    assert len(rows) == 4 and all(row["gain_gpu"] > 0 and row["gain_wall"] > 0 for row in rows)
    assert "MINIMUM = {" in capsys.readouterr().out


# ---- arguments ----


def test_torchaos_names():
    class Name(enum.StrEnum):  # as torchao's Float8LinearRecipeName
        TENSORWISE = "tensorwise"

    model = net()
    report = te.convert_to_float8_training(model, config=Name.TENSORWISE, module_filter_fn=None, tokens=None)
    assert report.recipe == te.recipe.Float8CurrentScaling() and len(report.converted) == 2


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"recipe": "delayed"}, ValueError, "without state"),
        ({"recipe": te.recipe.DelayedScaling()}, ValueError, "without state"),
        ({"recipe": "bf16"}, ValueError, "must quantize"),
        ({"recipe": "curent"}, ValueError, "current"),
        ({"recipe": 8}, TypeError, "te.recipe object"),
        ({"config": object()}, TypeError, "te.recipe object"),
        ({"tokens": 0}, ValueError, "tokens=0"),
        ({"tokens": 2.0}, ValueError, "tokens=2.0"),
        ({"minimum_size": -1}, ValueError, "minimum_size=-1"),
        ({"minimum_size": 1e6}, ValueError, "minimum_size=1000000.0"),
        ({"minimum_size": True}, ValueError, "minimum_size=True"),
        ({"minimum_size": "large"}, ValueError, "minimum_size='large'"),
    ],
)
def test_bad_arguments_change_nothing(kwargs, error, says):
    model = net()
    with pytest.raises(error, match=says):
        te.convert_to_float8_training(model, **kwargs)
    assert type(model[0]) is nn.Linear
    with pytest.raises(TypeError, match="nn.Module"):
        te.convert_to_float8_training("model")
