"""te.TransformerLayer and te.MultiheadAttention against the layer written out in plain torch."""

import itertools
import re
from dataclasses import fields, replace

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_close_to_oracle
from tests.harness import through_a_file, under
from tests.modules.layer_reference import FFN, HEADS, HIDDEN, Case, D, Layer, draw, make, step
from tests.reference import TRUTH, stored_in

BF16 = torch.bfloat16
OPTIONS = {
    "layout": ("sbhd", "bshd", "thd"),
    "qkv": ("split", "interleaved", "flat"),
    "groups": (4, 2, 1),
    "norm": ("LayerNorm", "RMSNorm", "LayerNorm-", "RMSNorm-"),
    "arrangement": (("pre",), ("post",), ("output",), ("output", "post"), ("parallel",), ("decoder",),
                    ("decoder", "post"), ("decoder", "output")),
    "placing": ((), ("rope",), ("rope interleaved",), ("rope", "RMSNorm"), ("L2Normalization", "rope"),
                ("LayerNorm",)),
    "mask": ("causal", "window", "padding", "padding_causal", "arbitrary"),
    "activation": ("gelu", "swiglu", "srelu"),
    "bias": (True, False),
    "dropout": (0.0, 0.1),
}  # fmt: skip


def possible(given: dict) -> bool:
    return not (given.get("layout") == "thd" and given.get("mask") == "arbitrary")


def pairwise() -> list[Case]:
    """Cases in which each possible pair of values of two options occurs."""
    pairs = itertools.combinations(OPTIONS.items(), 2)
    waiting = [{a: one, b: other} for (a, these), (b, those) in pairs for one in these for other in those]
    waiting = [pair for pair in waiting if possible(pair)]
    cases = []
    while waiting:
        case: dict = {}
        for pair in waiting:
            if all(case.get(key, value) == value for key, value in pair.items()) and possible(case | pair):
                case |= pair
        cases.append(Case(**case))
        waiting = [pair for pair in waiting if any(getattr(cases[-1], key) != value for key, value in pair.items())]
    return cases


CASES = [*pairwise(), Case(layout="thd", arrangement=("decoder",), placing=("rope",), groups=2)]


def name_of(case: Case) -> str:
    changed = [getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != f.default]
    return " ".join("+".join(value) if isinstance(value, tuple) else str(value) for value in changed)


def joined(found: dict) -> dict:
    """Biases of q, k and v as one: that of k has no gradient, for softmax does not see it."""
    parts: dict[str, list] = {}
    for name, value in found.items():
        parts.setdefault(re.sub(r"(query|key|value)_(?=bias)|[qk](?=_norm.bias)", "qkv", name), []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def compare(got: dict, truth: dict, low: dict, label: str = "") -> None:
    assert got.keys() == truth.keys()
    got, truth, low = joined(got), joined(truth), joined(low)
    for name, value in got.items():
        assert_close_to_oracle(f"{label} {name}", value, truth[name], low[name])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_in_fp32_against_the_layer_written_out_in_fp64(case):
    """Outputs and all gradients err at most twice as much as the same program in fp32."""
    layer = make(case)
    inputs, dy = draw(case, torch.float32)
    parameters = dict(layer.named_parameters())
    truth, low = (Layer(case).run(parameters, inputs, dy, a) for a in (TRUTH, stored_in(torch.float32)))
    compare(step(layer, case, inputs, dy), truth, low)


@pytest.mark.parametrize("mask", ["window", "padding_causal", "arbitrary"])
def test_masks_may_come_with_the_call(mask):
    case = Case(arrangement=("decoder",), mask=mask)
    inputs, dy = draw(case, torch.float32)
    own = case.arguments()
    names = "self_attn_mask_type", "window_size", "enc_dec_attn_mask_type", "enc_dec_window_size"
    given = {name: own[name] for name in names}
    usual = {name: "causal" if name.endswith("type") else None for name in given}
    bare = make(case, **usual)
    got, want = step(bare, case, inputs, dy, **given), step(make(case), case, inputs, dy)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not torch.equal(step(bare, replace(case, mask="causal"), inputs, dy)["out"], want["out"])


def test_gaps_between_packed_sequences():
    """What lies in them changes nothing, angles too; they give what the MLP makes of themselves."""
    case = Case(layout="thd", placing=("rope",), mask="padding_causal")
    layer, (inputs, _), calls = make(case), draw(case, torch.float32), case.calls()
    (a, b), x = case.lengths["x"], inputs["x"]
    gap = torch.randn(3, HIDDEN)
    got = layer(torch.cat((x[:a], gap, x[a:])), **calls, cu_seqlens_q_padded=torch.tensor([0, a + 3, a + 3 + b]))
    want = layer(x, **calls)
    torch.testing.assert_close(torch.cat((got[:a], got[a + 3 :])), want)
    attended = gap + layer.self_attention.proj.bias  # attention gives 0 there
    torch.testing.assert_close(got[a : a + 3], attended + layer.layernorm_mlp(attended))


def check_recipe(case: Case, recipe: str, device: str, steps: int) -> None:
    """Steps of a bf16 layer under a recipe."""
    case = replace(case, stretch=8)  # of fewer tokens a single value on the other side of a boundary decides
    layer, oracle, low = make(case, BF16, device), Layer(case, recipe), Layer(case, recipe)
    parameters = {name: p.cpu() for name, p in layer.named_parameters()}
    for i in range(steps):
        inputs, dy = draw(case, BF16, seed=i)
        with under(recipe):
            out = step(layer, case, inputs, dy)
        truth = oracle.run(parameters, inputs, dy, TRUTH)
        worst = low.reference(parameters, inputs, dy, BF16, device, truth)
        compare({name: t.cpu() for name, t in out.items()}, truth, worst, f"{recipe} step {i}")


RECIPE_CASES = [
    Case(groups=2, placing=("rope", "RMSNorm")),
    Case(norm="RMSNorm-", activation="swiglu", bias=False, qkv="interleaved", layout="bshd", placing=("rope",)),
    Case(arrangement=("decoder",), mask="padding_causal", activation="swiglu"),
    Case(arrangement=("post",), dropout=0.1, layout="thd", qkv="flat"),
    Case(arrangement=("output",), mask="window"),
    Case(arrangement=("parallel",), activation="srelu"),
]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
@pytest.mark.parametrize("case", RECIPE_CASES, ids=name_of)
def test_recipes_in_bf16(case, recipe, device):
    check_recipe(case, recipe, device, steps=2 if recipe == "delayed" else 1)


ATTENTIONS = [("self", True, True, True), ("self", False, False, False), ("cross", True, False, True),
              ("cross", False, True, False)]  # fmt: skip


@pytest.mark.parametrize("kind, normed, returns_bias, returns_norm", ATTENTIONS)
def test_attention_alone(kind, normed, returns_bias, returns_norm):
    case = Case(groups=2, qkv="split" if normed else "interleaved", mask="causal" if kind == "self" else "padding")
    module = te.MultiheadAttention(
        HIDDEN, HEADS, D, 0.0, num_gqa_groups=2, input_layernorm=normed, attention_type=kind, return_bias=returns_bias,
        return_layernorm_output=returns_norm, fuse_qkv_params=not normed, device="cpu",
        attn_mask_type="causal" if kind == "self" else "padding",
    )  # fmt: skip
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape) * 0.3)
    inputs = {of: torch.randn(case.shape(of)) for of in ("x", "encoder")[: 1 + (kind == "cross")]}
    dy, given = torch.randn(case.shape("x")), case.calls()
    mask = given["enc_dec_attn_mask"] if kind == "cross" else None

    def total(out, bias, ln_out):
        y = out if bias is None else out + bias
        return (y * dy.to(y).view_as(y)).sum() + (0.0 if ln_out is None else ln_out.sin().sum())

    leaves = {of: t.clone().requires_grad_() for of, t in inputs.items()}
    outputs = module(leaves["x"], mask, leaves.get("encoder"))
    outputs = list(outputs) if returns_bias or returns_norm else [outputs]
    assert len(outputs) == 1 + returns_bias + returns_norm
    ln_out = outputs.pop() if returns_norm else None
    total(outputs[0], outputs[1] if returns_bias else None, ln_out).backward()
    got = {of: t.grad.flatten(0, 1) for of, t in leaves.items()} | {n: p.grad for n, p in module.named_parameters()}
    found = []
    for arith in (TRUTH, stored_in(torch.float32)):
        oracle = Layer(case)
        oracle.arith = arith
        p = {f"m.{n}": v.detach().to(arith.compute).requires_grad_() for n, v in module.named_parameters()}
        of = {key: t.flatten(0, 1).to(arith.compute).requires_grad_() for key, t in inputs.items()}
        out, ln_out = oracle.attention("m", p, of["x"], normed, of.get("encoder"))
        total(out, None, ln_out if returns_norm else None).backward()
        found.append({key: t.grad for key, t in of.items()} | {n.removeprefix("m."): v.grad for n, v in p.items()})
    compare(got, *found)


def test_names_are_transformer_engines():
    """Of the state dicts of Transformer Engine's layers, read off its constructors."""
    attention = "core_attention._extra_state proj.weight proj.bias proj._extra_state"
    norm = "layer_norm_weight layer_norm_bias _extra_state"
    split = "query_weight key_weight value_weight query_bias key_bias value_bias"
    mlp = f"{norm} fc1_weight fc1_bias fc2_weight fc2_bias"

    def keys(**modules: str) -> set[str]:
        found = set()
        for name, names in modules.items():
            found |= {f"{name.replace('__', '.')}.{key}" for key in names.split()}
        return found

    own = dict(self_attention=attention, layernorm_mlp=mlp)
    qkv = dict(self_attention__layernorm_qkv=f"{norm} {split}")
    cross = dict(
        inter_attention=attention, inter_attention__layernorm_query=f"{norm} query_weight query_bias",
        inter_attention__key_value="key_weight value_weight key_bias value_bias _extra_state",
    )  # fmt: skip
    fused = {
        "self_attention__layernorm_qkv": f"{norm} weight bias",
        "inter_attention__layernorm_query": f"{norm} weight bias",
        "inter_attention__key_value": "weight bias _extra_state",
    }
    norms = dict(self_attention__q_norm="weight _extra_state", self_attention__k_norm="weight _extra_state")
    both = dict(self_attention__q_norm="_extra_state", self_attention__k_norm="_extra_state")
    ends = dict(self_attention__qkv=f"{split} _extra_state", layernorm="weight bias _extra_state")
    for arguments, expected in (
        ({}, own | qkv),
        ({"layer_type": "decoder"}, own | qkv | cross),
        ({"layer_type": "decoder", "fuse_qkv_params": True}, own | cross | fused),
        ({"output_layernorm": True}, own | ends),
        ({"qk_norm_type": "RMSNorm"}, own | qkv | norms),
        ({"qk_norm_type": "L2Normalization"}, own | qkv | both),
    ):
        layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", **arguments)
        assert set(layer.state_dict()) == keys(**expected), arguments
        again = te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", **arguments)
        again.load_state_dict(through_a_file(layer.state_dict()))
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), again.parameters(), strict=True))
    whole = te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", bias=False, normalization="RMSNorm")
    assert not any("bias" in name for name in whole.state_dict())
