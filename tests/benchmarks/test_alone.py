"""benchmarks/alone.py: the courses that it sums up are those of modules, and what it says of them."""

import json

import pytest
import torch

import te_lite as te
from benchmarks import alone
from benchmarks.modules import Shape
from te_lite.overlap.one_rank import FASTER
from tests import reference
from tests.harness import leaf, under
from tests.overlap.one_rank import Launches, force


@pytest.mark.parametrize("recompute", [None, False])
@pytest.mark.parametrize("hidden", [64, 8192])  # of the wide one activation(h) is computed again anyway
@pytest.mark.parametrize("recipe", alone.RECIPES)
def test_courses_are_those_of_modules(recipe, hidden, recompute, monkeypatch):
    force(monkeypatch)
    launches, options = Launches(monkeypatch), {"activation": "swiglu", "params_dtype": torch.bfloat16, "device": "cpu"}
    module = te.LayerNormMLP(hidden, 64, bias=False, recompute_activation=recompute, **options)
    x = leaf(reference.make_tokens(16, hidden, dtype=torch.bfloat16))
    with under(recipe):
        module(x).sum().backward()
    plan = module._planned[1][1]
    found = alone.courses(alone.RECIPES[recipe], plan.recomputes_x, plan.recomputes_apart)
    assert launches.wants == [(alone.RECIPES[recipe], grad) for grad in (False, True)]
    assert all(candidate.startswith("fused") for candidate in found["both"])
    assert not any("fused" in candidate for candidate in found["now"])


def rows(shape, recipe, **us):
    return [
        {"shape": shape, "recipe": recipe, "what": "course", "candidate": name, "gpu_us": t} for name, t in us.items()
    ]


SHAPES = {"wide": Shape("wide", 8192, 4096, 14336), "deep": Shape("deep", 8192, 8192, 7168)}
SHAPES["small"] = Shape("small", 512, 2048, 5632)


def test_what_the_table_should_say():
    work = 8192 * 4096 * 14336
    found = rows("wide", "delayed", now=100.0, fc1=95.0, dgrad=93.0, both=90.0)
    found += rows("deep", "delayed", now=100.0, fc1=101.0, dgrad=96.0, both=99.0)
    found += rows("small", "delayed", now=10.0, both=5.0) + rows("wide", "bf16", now=100.0, both=99.0)
    said = alone.spans(found, SHAPES)
    assert said == [
        f"    ('fp8', False): Span({2 * work}, 4096),",
        f"    ('fp8', True): Span({work}, 8192),",
    ]
    found = rows("wide", "current", now=100.0, fc1=101.0) + rows("deep", "current", now=100.0, fc1=90.0)
    (line,) = alone.spans(found, SHAPES)
    assert f"('amax', False): Span({2 * work}, 8192)" in line and "lost" in line
    assert "nothing" in alone.spans([], SHAPES)[0]


def test_the_table_says_what_was_measured():
    content = json.loads((alone.modules.RESULTS / "alone.json").read_text())
    said = alone.spans(content["rows"], {shape["name"]: Shape(**shape) for shape in content["shapes"]})
    assert [line.strip() for line in said] == [
        f"{key}: {span.__class__.__name__}{tuple(span)}," for key, span in FASTER.items()
    ]


def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TE_LITE_EPILOGUES", "")
    options = ["--device", "cpu", "--rounds", "1", "--wall-rounds", "0", "--out", str(tmp_path)]
    assert alone.main([*options, "--recipes", "current"]) == 0
    assert (tmp_path / "alone.json").exists()
