"""benchmarks/same_bits.py: two copies of the package agree; a changed scale or epsilon is seen, and named."""

import shutil

import pytest
import torch

from benchmarks import same_bits
from benchmarks.trees import ROOT, extension, tree

pytestmark = pytest.mark.skipif(extension(ROOT) is None, reason="te_lite._C is not built in this checkout")
CASES = ("Linear delayed", "Linear current ragged*", "LayerNormLinear bf16")


def copy(folder, edits=()):
    """The package with `edits`: (file, text, other text)."""
    shutil.copytree(ROOT / "te_lite", folder / "te_lite", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "setup.py", folder)
    for name, text, other in edits:
        path = folder / "te_lite" / name
        source = path.read_text()
        assert source.count(text) == 1, f"{name} has no longer one {text!r}; edit another line here"
        path.write_text(source.replace(text, other))
    return str(folder)


def test_two_copies_agree(tmp_path, capsys):
    assert same_bits.main(["--old", copy(tmp_path / "a"), "--new", copy(tmp_path / "b"), "--cases", *CASES]) == 0
    said = capsys.readouterr().out
    assert "SAME BITS" in said and "3 cases" in said


def test_a_changed_scale_and_a_changed_epsilon_are_seen(tmp_path, capsys):
    edits = [
        ("modules/layernorm_linear.py", "eps: float = 1e-5", "eps: float = 1.01e-5"),
        ("recipe.py", "    margin: int = 0\n    fp8_format: Format = Format.HYBRID", "    margin: int = 1\n"
         "    fp8_format: Format = Format.HYBRID"),
    ]  # fmt: skip
    assert same_bits.main(["--old", str(ROOT), "--new", copy(tmp_path / "b", edits), "--cases", *CASES]) == 1
    said = capsys.readouterr().out
    assert "differs: LayerNormLinear bf16: " in said and "differs: Linear delayed: " in said
    assert "differs: Linear current" not in said
    assert "values differ, first at [" in said  # both values of the first one


def case(**given):
    digest = ["float32", [2], "00"]
    return {"tensors": {"out": digest, "dx": digest}, "facts": {}, "error": None, "skipped": None, **given}


def test_what_is_compared():
    old = {"a": case()}
    assert same_bits.compare(old, {"a": case()}).same
    assert not same_bits.compare({}, {}).same  # nothing was compared
    changed = case(tensors={"out": ["float32", [2], "00"], "dx": ["float32", [2], "01"]})
    assert same_bits.compare(old, {"a": changed}).tensors == {"a": ["dx (float32 [2])"]}
    reshaped = case(tensors={"out": ["float32", [2, 1], "00"], "dx": ["float32", [2], "00"]})
    assert list(same_bits.compare(old, {"a": reshaped}).tensors) == ["a"]
    fewer = case(tensors={"out": ["float32", [2], "00"]})
    assert list(same_bits.compare(old, {"a": fewer}).tensors) == ["a"]
    assert same_bits.compare(old, {"a": case(facts={"fprop": "ring"})}).same  # remarks are no difference


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"a": case()}, {"a": case(), "b": case()}),
        ({"a": case(), "b": case(error="KeyError: 1")}, {"a": case(), "b": case()}),
        ({"a": case(), "b": case()}, {"a": case(), "b": case(skipped="needs a GPU")}),
        ({"a": case(), "b": case(error="KeyError: 1")}, {"a": case(), "b": case(error="TypeError: 1")}),
    ],
)
def test_a_case_of_one_tree_only_is_a_difference(old, new):
    found = same_bits.compare(old, new)
    assert not found.same and list(found.one_sided) == ["b"]
    ran = new["b"]["error"] is None and new["b"]["skipped"] is None
    assert same_bits.compare(old, new, ["b*"]).same == ran  # a new case must run in the new tree


def test_the_same_error_in_both_is_listed():
    broken = {"a": case(), "b": case(error="KeyError: 1")}
    found = same_bits.compare(broken, broken)
    assert found.same and list(found.silent) == ["b"] and "1 raised in both" in same_bits.report(found)


def test_first_difference():
    was = torch.zeros(2, 3, dtype=torch.bfloat16)
    now = was.clone()
    assert same_bits.first_difference(was, now) == ""
    now[1, 2], now[1, 1] = 1, -0.0
    assert same_bits.first_difference(was, now) == "2 of 6 values differ, first at [1, 1]: was 0.0, is -0.0"
    assert same_bits.first_difference(was, now.float()).startswith("was torch.bfloat16")
    assert same_bits.first_difference(torch.tensor(1), torch.tensor(2)).endswith("first at []: was 1, is 2")


def test_what_is_no_tree(tmp_path):
    with pytest.raises(ValueError, match="a folder or a git revision"):
        tree("no-such-revision", tmp_path)
    with pytest.raises(ValueError, match="holds no te_lite"):
        tree(str(tmp_path), tmp_path)
