"""te.fuse: checkpoints, copies and sharding of fused models, and te.unfuse."""

import copy
import gc
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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


def test_files_of_safetensors_have_every_weight(tmp_path):
    """Weights that lie side by side in memory are no weights that are shared, for whoever saves a state dict."""
    accelerate, safetensors = pytest.importorskip("accelerate"), pytest.importorskip("safetensors.torch")
    made = fused(build("qwen2", BF16), "current")
    state = made.state_dict()
    for name, param in made.named_parameters():
        assert state[name].data_ptr() == param.data_ptr() and state[name]._version == param._version
        assert state[name].untyped_storage().nbytes() == param.nbytes
    with torch.no_grad():
        next(iter(state.values())).add_(1.0)  # a view, as of any state dict: writes are seen
    assert made.state_dict(keep_vars=True).keys() == state.keys()
    before, accelerator = copy.deepcopy(state), accelerate.Accelerator(cpu=True)
    accelerator.prepare(made)
    accelerator.save_state(tmp_path)
    safetensors.save_model(made, tmp_path / "one.safetensors")
    for load in (
        lambda: accelerator.load_state(tmp_path),
        lambda: safetensors.load_model(made, tmp_path / "one.safetensors"),
    ):
        for param in made.parameters():
            param.data.normal_()
        load()
        assert_same(made.state_dict(), before)


@pytest.mark.parametrize("end", ["deleted", "cast", "assigned"])
def test_a_state_dict_outlives_its_module(end):
    """The memory of parameters that lie side by side is kept by what a state dict has of them."""
    module = te.Linear(256, 768, parameters_split=("q", "k", "v"), device="cpu", params_dtype=torch.float32)
    x, y = torch.randn(4, 256), None
    before, state = copy.deepcopy(dict(module.named_parameters())), module.state_dict()
    if end == "deleted":
        del module
    elif end == "cast":
        module.half()
    else:
        y = module(x)
        module.load_state_dict(state, assign=True)
    gc.collect()
    other = [torch.full((256, 256), torch.nan) for _ in range(20)]  # into memory that is free
    for name, param in before.items():
        assert torch.equal(state[name], param), name
    if end == "assigned":
        assert torch.equal(module(x), y)
    assert all(t.isnan().all() for t in other)
    module = te.Linear(64, 96, parameters_split=("q", "k"), device="cpu")
    with torch.inference_mode():
        state = module.state_dict()
    assert not any(state[name].is_inference() for name, _ in module.named_parameters())


def test_files_of_safetensors_have_every_part_of_a_split_weight(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer = te.Linear(32, 96, parameters_split=("q", "k", "v"), device="cpu")
    before = copy.deepcopy(layer.state_dict())
    safetensors.save_model(layer, tmp_path / "one.safetensors")
    for param in layer.parameters():
        param.data.normal_()
    safetensors.load_model(layer, tmp_path / "one.safetensors")
    assert_same(layer.state_dict(), before)


@pytest.mark.parametrize("how", ["fuse", "convert"])
def test_scales_resume_beside_the_state_dict(how, tmp_path):
    """The model that resumes has not run. Its next step has the bits of the other's."""

    def made(model):
        if how == "fuse":
            return fused(model)
        te.convert_to_float8_training(model, "current", lambda _, name: "lm_head" not in name, tokens=None)
        return model

    def step(model, ids):
        with te.autocast(recipe="delayed"):
            return run(model, ids)

    first = made(build("llama", BF16))
    for _ in range(2):
        step(first, draw(2, 32))
    dcp.save({"model": first.state_dict(), "scales": te.scales_state_dict(first)}, checkpoint_id=tmp_path, no_dist=True)
    second, unlike = made(build("llama", BF16)), made(build("llama", BF16))
    state = {"model": second.state_dict(), "scales": te.scales_state_dict(second)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    for one in (second, unlike):
        one.load_state_dict(state["model"])
    te.load_scales_state_dict(second, state["scales"])
    assert_same(te.scales_state_dict(second), te.scales_state_dict(first))
    ids = draw(2, 32)
    want, fresh = step(first, ids), step(unlike, ids)
    assert not torch.equal(fresh["logits"], want["logits"])
    assert_same(step(second, ids), want)
    assert_same(te.scales_state_dict(second), te.scales_state_dict(first))
    before = te.scales_state_dict(second)
    name = next(iter(before))
    for wrong in ({**before, "other": before[name]}, {key: value for key, value in before.items() if key != name}):
        with pytest.raises(ValueError, match="other|" + re.escape(name)):
            te.load_scales_state_dict(second, wrong)
    damaged = {**before, list(before)[-1]: before[name].index_fill(0, torch.tensor(6), -1.0)}
    with pytest.raises(ValueError, match="extra state"):
        te.load_scales_state_dict(second, {key: torch.zeros_like(value) for key, value in before.items()} | damaged)
    assert_same(te.scales_state_dict(second), before)
    layers = second.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    assert te.scales_state_dict(second).keys() == before.keys()


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
