"""te.fuse: checkpoints, copies and sharding of fused models, and te.unfuse."""

import copy
import io
import warnings
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.compat.convert import ConvertedLinear
from te_lite.testing.distributed import launch
from tests.compat.llamas import assert_same, build, draw, fused, run

BF16 = torch.bfloat16

# ---- checkpoints and copies ----


def test_checkpoints_move_both_ways(tmp_path):
    plain, other = build("qwen2", BF16), build("qwen2", BF16)
    made = fused(other, "current")
    for source, target in ((plain, made), (made, build("qwen2", BF16))):
        state = source.state_dict()
        assert target.load_state_dict(state, strict=True) == ([], [])
        assert_same(target.state_dict(), state)
    made.save_pretrained(tmp_path / "saved")
    read = type(plain).from_pretrained(tmp_path / "saved", dtype=BF16)
    assert_same(read.state_dict(), plain.state_dict())
    torch.save(made.state_dict(), tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt", weights_only=True), plain.state_dict())
    assert run(made, ids := draw(2, 8))["loss"] == run(fused(plain, "current"), ids)["loss"]


def test_a_model_on_meta_is_fused_and_then_loaded():
    source, ids = build("qwen3"), draw(2, 8)
    expected = run(fused(source), ids)
    for assign in (True, False):
        with torch.device("meta"):
            model = type(source)(source.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = te.fuse(model, "bf16")
        assert len(report.fused) == 4 and model.model.layers[0].mlp.up_proj.weight.is_meta
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=assign)
        for name, buffer in source.named_buffers():
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, buffer)
        assert_same(run(model, ids), expected, f"assign={assign}")


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how):
    made, ids = fused(build("qwen2", BF16), "current"), draw(2, 8)
    expected = run(made, ids)
    if how == "deepcopy":
        copied = copy.deepcopy(made)
    else:
        torch.save(made, file := io.BytesIO())
        copied = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert_same(run(copied, ids), expected)
    assert len(te.unfuse(copied)) == 2 * (2 + 3 + 1 + 1 + 3)


# ---- unfuse ----


def seen_of(model):
    """Of each module its class, and what it has."""
    return {name: (type(part), set(vars(part)), part.training) for name, part in model.named_modules()}


def test_unfuse_gives_the_model_back():
    model, ids = build("qwen2"), draw(2, 8)
    before, parameters = seen_of(model), dict(model.named_parameters())
    expected = run(model, ids)
    te.fuse(model, "current")
    assert seen_of(model) != before
    run(model, ids)
    names = te.unfuse(model)
    assert "model.layers.1.input_layernorm" in names and "model.layers.1.self_attn.o_proj" in names
    assert seen_of(model) == before and all(parameters[name] is p for name, p in model.named_parameters())
    assert_same(run(model, ids), expected)
    assert te.unfuse(model) == ()


def test_unfuse_keeps_what_happened_meanwhile():
    """Values of the parameters, modes, attributes, and layers that were converted by the other call."""
    model, ids = build(), draw(4, 16)
    te.convert_to_float8_training(model.lm_head, minimum_size=0)
    te.fuse(model, "bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, ids)
    optimizer.step()
    model.eval()
    model.model.layers[0].mlp.note = "mine"
    state = copy.deepcopy(model.state_dict())
    te.unfuse(model)
    assert_same(model.state_dict(), state)
    assert isinstance(model.lm_head, ConvertedLinear) and model.model.layers[0].mlp.note == "mine"
    assert not any(part.training for part in model.modules())
    reference = build()
    reference.load_state_dict(state)
    te.convert_to_float8_training(reference.lm_head, minimum_size=0)
    assert_same(run(model, ids), run(reference.eval(), ids))


def test_sharded_by_fsdp():
    """Before and after te.fuse, over 2 ranks."""
    launch(Path(__file__).with_name("ranks_fuse.py"), ranks=2, timeout=180)
