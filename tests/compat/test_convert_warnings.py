"""convert_to_float8_training says what it did: the rule about sizes in the report, one warning, the first example."""

import io
import math
import re
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_lite as te
from te_lite.compat import convert

BF16 = torch.bfloat16
DOCS = Path(__file__).parents[2] / "docs"


def gpt2_block():
    """The linears of a block of GPT-2 small: all below what gains."""
    return nn.ModuleDict({"qkv": nn.Linear(768, 2304), "fc1": nn.Linear(768, 3072), "fc2": nn.Linear(3072, 768)})


def mixed(fit, narrow=0, double=0):
    """`fit` linears that can be converted, `narrow` and `double` that cannot."""
    parts = [nn.Linear(64, 32) for _ in range(fit)] + [nn.Linear(64, 40) for _ in range(narrow)]
    return nn.ModuleList(parts + [nn.Linear(64, 32, dtype=torch.float64) for _ in range(double)])


def converted(model, *args, **kwargs):
    """(report, texts of the warnings), each of which points here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = te.convert_to_float8_training(model, *args, **kwargs)
    assert all(Path(warning.filename) == Path(__file__) for warning in caught)
    return report, [str(warning.message) for warning in caught]


# ---- minimum_size ----


@pytest.mark.parametrize(
    ("kwargs", "size", "tokens", "rule"),
    [
        ({}, 2048, 8192, "at 8192 tokens layers gain from in * out = 2048 on (measured"),
        ({"tokens": 300}, math.inf, 300, "at 300 tokens no layer is known to gain (measured"),
        ({"tokens": 300, "minimum_size": 2000}, 2000, None, "layers from in * out = 2000 on"),
        ({"minimum_size": 2049}, 2049, None, "layers from in * out = 2049 on"),
        ({"minimum_size": 0}, 0, None, "layers of any size"),
        ({"minimum_size": None}, 0, None, "layers of any size"),
        ({"tokens": None}, 0, None, "layers of any size"),
        ({"recipe": "mxfp8"}, 0, None, "layers of any size"),
        ({"recipe": "mxfp8", "minimum_size": 5000}, 5000, None, "layers from in * out = 5000 on"),
    ],
    ids=str,
)
def test_one_argument_decides_and_the_report_shows_it(monkeypatch, kwargs, size, tokens, rule):
    monkeypatch.setattr(convert, "MINIMUM", {"current": {64: math.inf, 4096: 64 * 32}})
    report, _ = converted(nn.Linear(64, 32), **kwargs)
    assert (report.minimum_size, report.tokens) == (size, tokens)
    assert bool(report.converted) == (64 * 32 >= size)
    assert str(report).splitlines()[1].startswith(rule) and rule in repr(report)
    assert len(repr(report)) < 250 and ("minimum_size=0" in repr(report)) == (tokens is not None)
    assert report.converted or rule.partition(" (")[0] in report.skipped[0].reason


# ---- the warning ----


def test_a_small_model_that_stays_as_it_is_says_so():
    report, (text,) = converted(gpt2_block())
    assert not report.converted and "ModuleDict" in text and "converted 0 of 3 linears to current" in text
    assert "3 x too small, at 8192 tokens layers gain from in * out = 11534336 on" in text and "minimum_size=0" in text
    report, texts = converted(gpt2_block(), minimum_size=0)
    assert len(report.converted) == 3 and not texts


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"fit": 2, "narrow": 2}, None),
        ({"fit": 2, "narrow": 3}, "2 of 5 linears to current: 3 x features must be multiples of 16 (pad them)"),
        ({"fit": 2, "narrow": 2, "double": 1}, "2 of 5 linears to current: 2 x features must"),
        ({"fit": 0, "double": 1}, "0 of 1 linears to current: 1 x torch.float64"),
    ],
    ids=str,
)
def test_fewer_than_half_is_most(parts, says):
    report, texts = converted(mixed(**parts), minimum_size=0)
    assert len(report.converted) == parts["fit"] and len(texts) == (says is not None)
    assert says is None or says in texts[0]
    assert says is None or "double" not in parts or "1 x torch.float64 is not" in texts[0]


def test_what_the_filter_left_out_is_no_reason():
    model = mixed(fit=1, narrow=8)
    report, texts = converted(model, minimum_size=0, module_filter_fn=lambda layer, name: name == "0")
    assert len(report.converted) == 1 and not texts
    assert {layer.reason for layer in report.skipped} == {"module_filter_fn"}
    report, texts = converted(mixed(fit=3), minimum_size=0, module_filter_fn=lambda *_: False)
    assert not report.converted and not texts
    report, (text,) = converted(mixed(fit=3, narrow=1), minimum_size=0, module_filter_fn=lambda _, name: name == "3")
    assert "0 of 1 linears" in text and "1 x features" in text


def test_a_second_call_warns_where_another_recipe_was_asked_for():
    model = mixed(fit=3)
    assert not converted(model, minimum_size=0)[1] and not converted(model, minimum_size=0)[1]
    report, (text,) = converted(model, "rowwise", minimum_size=0)
    assert "0 of 3" in text and "3 x converted before, to current" in text and "te.autocast" in text
    model.append(nn.Linear(64, 64))  # the rest to another recipe: that is how one mixes them
    report, texts = converted(model, "rowwise", minimum_size=0)
    assert [layer.name for layer in report.converted] == ["3"] and not texts


def test_a_model_without_linears_says_so():
    report, (text,) = converted(nn.Sequential(nn.Embedding(8, 16), nn.Conv1d(16, 16, 3)))
    assert "Sequential" in text and "no nn.Linear" in text and str(report).startswith("0 of 0 linears")


@pytest.mark.parametrize("each", [False, True], ids=["the model", "each linear"])
def test_sharded_linears_say_convert_first(each):
    """fully_shard makes DTensors, and of a linear that is sharded by itself another class."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), init_device_mesh("cpu", (1,))
        for part in model if each else ():
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        report, (text,) = converted(model, minimum_size=0)
        assert not report.converted and "0 of 2 linears" in text and "convert before fully_shard" in text
        assert all("convert before fully_shard" in layer.reason for layer in report.skipped)
        before = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
        assert len(converted(before, minimum_size=0)[0].converted) == 2
        fully_shard(before, mesh=mesh)
        assert not converted(before, minimum_size=0)[1]
    finally:
        dist.destroy_process_group()


# ---- the documentation ----


def test_the_first_examples_print_what_the_page_says():
    """Each block of code of docs/how-to/convert-a-model.md that prints, followed by its output."""
    page = (DOCS / "how-to" / "convert-a-model.md").read_text()
    examples = re.findall(r"```python\n([^`]*)```\n\n((?:    .*\n)+)", page)
    assert len(examples) >= 2
    scope = {}
    for code, output in examples:
        with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(code, scope)  # the page's own code
        said = [f"{type(w.message).__name__}: {w.message}" for w in caught] + printed.getvalue().splitlines()
        assert " ".join(" ".join(said).split()) == " ".join(output.split())
    assert scope["report"].converted
