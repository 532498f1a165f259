"""te.fuse: what is not fused and why, and what the report and the warnings say."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import te_lite as te
from tests.compat.llamas import build, draw, run


def reported(model, *args, **kwargs):
    """(report, texts of the warnings), each of which points here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = te.fuse(model, *args, **kwargs)
    assert all(Path(warning.filename) == Path(__file__) for warning in caught)
    return report, [str(warning.message) for warning in caught]


# ---- what is refused: (half, part of the reason, what is done to the layer) ----


class Sub(nn.Linear):
    pass


class Wrapped(nn.Module):
    """As a library for adapters has it."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


class Parallel(nn.Module):
    """The same parts, in another order."""

    def __init__(self, layer):
        super().__init__()
        for name, part in layer.named_children():
            self.add_module(name, part)

    def forward(self, hidden_states, **others):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
        return hidden_states + attended + self.mlp(self.input_layernorm(hidden_states))


class Mean(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, 1e-6

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)


class Clamped(type(build().model.layers[0].mlp)):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))


class Swapped(type(build().model.layers[0].mlp)):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Dropped(type(build().model.layers[0].mlp)):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class DroppedInside(type(build().model.layers[0].mlp)):
    """By a module of its own, which may be in another mode than its parent."""

    def forward(self, x):
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def with_dropout(mlp):
    mlp.__class__, mlp.dropout = DroppedInside, nn.Dropout(0.1).eval()
    return mlp


class DroppedBefore(type(build().model.layers[0])):
    def forward(self, hidden_states, **others):
        normed = nn.functional.dropout(self.input_layernorm(hidden_states), 0.1, self.training)
        hidden_states = hidden_states + self.self_attn(hidden_states=normed, **others)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Changed(type(build().model.layers[0].self_attn)):
    """Its projections read something else of the same shape."""

    def forward(self, hidden_states, **others):
        return super().forward(hidden_states.tanh(), **others)


class Gated(type(build().model.layers[0].self_attn)):
    """Somebody else reads the same tensor."""

    def forward(self, hidden_states, **others):
        gate = self.gate(hidden_states)
        return super().forward(hidden_states, **others)[0] * gate, None


def gated(attention):
    attention.__class__, attention.gate = Gated, nn.Linear(64, 64)
    return attention


def put(path, make):
    """Replaces the part of that path by make(part)."""

    def do(layer):
        parent, _, name = path.rpartition(".")
        owner = layer.get_submodule(parent)
        setattr(owner, name, make(getattr(owner, name)))

    return do


def subclass(linear):
    linear.__class__ = Sub
    return linear


def of_class(kind):
    def change(mlp):
        mlp.__class__ = kind
        return mlp

    return change


def without_bias(layer):
    for name in ("q_proj", "k_proj"):
        getattr(layer.self_attn, name).bias = nn.Parameter(torch.zeros(getattr(layer.self_attn, name).out_features))


def no_eps(norm):
    made = nn.RMSNorm(64)
    made.weight = norm.weight
    return made


def hook(path, kind):
    return lambda layer: getattr(layer.get_submodule(path), f"register_{kind}_hook")(lambda *_: None)


REFUSED = [
    ("self_attn", "its norm has hooks", hook("input_layernorm", "forward")),
    ("self_attn", "its k_proj has hooks", hook("self_attn.k_proj", "forward_pre")),
    ("self_attn", "its v_proj has hooks", hook("self_attn.v_proj", "full_backward")),
    ("self_attn", "self_attn has hooks", hook("self_attn", "forward_pre")),
    ("mlp", "its norm has hooks", hook("post_attention_layernorm", "full_backward_pre")),
    ("mlp", "mlp has hooks", hook("mlp", "forward")),
    ("mlp", "its down_proj has hooks", hook("mlp.down_proj", "forward")),
    ("self_attn", "is a Wrapped, no nn.Linear", put("self_attn.q_proj", Wrapped)),
    ("self_attn", "Sub is a subclass of nn.Linear", put("self_attn.q_proj", subclass)),
    ("self_attn", "some of its linears have a bias", without_bias),
    ("self_attn", "float64 is not", put("self_attn.v_proj", lambda part: part.double())),
    ("self_attn", "differ in dtype", put("self_attn.v_proj", lambda part: part.half())),
    ("self_attn", "is no RMSNorm of its weight", put("input_layernorm", Mean)),
    ("self_attn", "is no RMSNorm of its weight", put("input_layernorm", no_eps)),
    ("self_attn", "not one weight vector", put("input_layernorm", lambda _: nn.LayerNorm(64))),
    ("self_attn", "its norm has a weight (32", put("input_layernorm", lambda _: nn.RMSNorm(32, eps=1e-6))),
    ("self_attn", "its weight is not a plain parameter", put("self_attn.q_proj", nn.utils.weight_norm)),
    ("mlp", "silu(gate) * up to down_proj", put("mlp", of_class(Clamped))),
    ("mlp", "silu(gate) * up to down_proj", put("mlp", of_class(Swapped))),
    ("mlp", "silu(gate) * up to down_proj", put("mlp.act_fn", lambda _: nn.GELU())),
    ("mlp", "hand out what down_proj gives", put("mlp", of_class(Dropped))),
    ("mlp", "silu(gate) * up to down_proj", put("mlp", with_dropout)),
    ("self_attn", "input_layernorm gives to q_proj", put("self_attn", of_class(Changed))),
    ("self_attn", "input_layernorm gives to gate as well", put("self_attn", gated)),
    ("mlp", "some of its linears have a bias", put("mlp.up_proj", lambda _: nn.Linear(64, 96))),
    ("mlp", "do not fit", put("mlp.up_proj", lambda _: nn.Linear(64, 32, bias=False))),
    ("mlp", "features must be multiples of 16", put("mlp.up_proj", lambda _: nn.Linear(64, 40, bias=False))),
]


@pytest.mark.parametrize(("half", "reason", "change"), REFUSED, ids=[f"{case[0]}: {case[1]}" for case in REFUSED])
def test_half_of_a_layer_is_refused(half, reason, change):
    """Its other half is fused, and so is the next layer."""
    model = build()
    change(model.model.layers[0])
    report, _ = reported(model)
    assert [layer.name for layer in report.left] == [f"model.layers.0.{half}"]
    assert reason in report.left[0].reason and reason in str(report)
    other = "mlp" if half == "self_attn" else "self_attn"
    fused_names = [f"model.layers.0.{other}", "model.layers.1.self_attn", "model.layers.1.mlp"]
    assert [layer.name for layer in report.fused] == fused_names
    layer = model.model.layers[0]
    norm = layer.input_layernorm if half == "self_attn" else layer.post_attention_layernorm
    assert "_own" not in vars(norm) and not isinstance(getattr(layer, half), te.LayerNormMLP)


def test_hooks_of_what_is_refused_fire_and_its_projections_are_converted():
    model, seen = build(), []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append("norm"))
    handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: seen.append("o_proj"))
    report, _ = reported(model)
    names = [layer.name.removeprefix("model.layers.") for layer in report.converted]
    assert names == [*(f"0.self_attn.{name}_proj" for name in "qkvo"), "1.self_attn.o_proj"]
    run(model, draw(2, 8))
    assert seen == ["norm", "o_proj"]
    te.unfuse(model)
    run(model, draw(2, 8))
    handle.remove()
    run(model, draw(2, 8))
    assert seen == ["norm", "o_proj"] * 2 + ["norm"]


def test_layers_whose_parts_are_used_otherwise():
    """Whole layers: another order, a dropout that is not there in evaluation, a norm for two purposes, a part of two
    layers, forwards put on the instance."""
    for change, reason in (
        (lambda layers: layers.__setitem__(0, Parallel(layers[0])), "its layer does not hand"),
        (lambda layers: of_class(DroppedBefore)(layers[0]), "its layer does not hand"),
        (lambda layers: setattr(layers[0], "input_layernorm", layers[1].input_layernorm), "a part of several modules"),
        (lambda layers: setattr(layers[0], "forward", layers[0].forward), "forward of its layer was replaced"),
    ):
        model = build().eval()
        change(model.model.layers)
        plain, ids = copy.deepcopy(model), draw(2, 8)
        report, _ = reported(model, "bf16")
        assert report.left and all(reason in layer.reason for layer in report.left), report.left
        torch.testing.assert_close(run(model, ids), run(plain, ids))


@pytest.mark.parametrize("architecture", ["gemma2", "olmo2", "phi3", "stablelm"])
def test_other_architectures_stay_what_they_are(architecture):
    model, ids = build(architecture), draw(2, 8)
    plain = copy.deepcopy(model)
    report, (text,) = reported(model, "bf16")
    assert not report.fused and ("found no decoder layer" in text) == (architecture == "olmo2")
    torch.testing.assert_close(run(model, ids)["logits"], run(plain, ids)["logits"])


def test_a_layer_that_is_used_twice_is_fused_once():
    model = build()
    model.model.layers[1] = model.model.layers[0]
    plain, ids = copy.deepcopy(model), draw(2, 8)
    report, _ = reported(model, "bf16")
    assert len(report.fused) == 2 and not report.left
    torch.testing.assert_close(run(model, ids), run(plain, ids))


def test_as_wide_as_its_input_is_refused():
    """q, k and v together have the width of a hidden state: a wrong use would not be noticed."""
    model = build(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    report, _ = reported(model)
    assert [layer.name.rpartition(".")[2] for layer in report.left] == ["self_attn", "self_attn"]
    assert "(32, 64), (16, 64), (16, 64)" in report.left[0].reason


# ---- report, warnings, arguments ----


def test_the_report_is_a_table():
    model = build(num_hidden_layers=1)
    report, texts = reported(model)
    head = "2 of 2 halves of decoder layers fused, 1 of 2 other linears converted, to current"
    assert not texts and repr(report) == f"<FuseReport: {head}>"
    assert [line.split() for line in str(report).splitlines()] == [
        head.split(),
        ["layer", "in", "out"],
        ["model.layers.0.self_attn", "64", "128", "fused"],
        ["model.layers.0.mlp", "64", "64", "fused"],
        ["model.layers.0.self_attn.o_proj", "64", "64", "converted"],
        ["lm_head", "64", "96", *"no projection of a decoder layer".split()],
    ]
    report, texts = reported(model)
    assert not texts and {layer.reason for layer in report.left} == {"fused before"} and not report.fused


def test_a_filter_leaves_linears_alone():
    model = build()
    report, texts = reported(model, "current", lambda linear, name: "1.mlp.up" not in name and "o_proj" not in name)
    assert [(layer.name, layer.reason) for layer in report.left] == [
        ("model.layers.1.mlp", "its up_proj: module_filter_fn")
    ]
    assert not texts and [layer.name for layer in report.converted] == [
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_warnings():
    _, (text,) = reported(nn.Sequential(nn.Linear(4, 4)))
    assert "found no decoder layer" in text and "te.convert_to_float8_training" in text
    model = build()
    te.convert_to_float8_training(model, minimum_size=0)
    report, (text,) = reported(model)
    assert "fused 0 of 4 halves" in text and "2 x its q_proj was converted before (call te.fuse first)" in text
    assert not report.fused and not report.converted


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        (("delayed",), ValueError, "te.fuse(model, 'bf16') follows te.autocast(recipe='delayed')"),
        (("nonsense",), ValueError, "not known"),
        ((None,), TypeError, "must be a te_lite.recipe object or a name"),
    ],
)
def test_arguments(args, error, text):
    model = build()
    before = [type(part) for part in model.modules()]
    with pytest.raises(error) as raised:
        te.fuse(model, *args)
    assert text in str(raised.value) and before == [type(part) for part in model.modules()]
    with pytest.raises(TypeError, match="must be an nn.Module"):
        te.fuse(model.state_dict())
