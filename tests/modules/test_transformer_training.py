"""te.TransformerLayer as training loops use it: dropout, main_grad, micro-batches, checkpoints, graphs, compilers."""

import copy
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.testing.distributed import device_params, launch, rank_device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.graphing import DEVICES, graphed
from tests.harness import under
from tests.modules.layer_reference import FFN, HEADS, HIDDEN, Case, Layer, draw, make, step
from tests.modules.test_transformer_layer import compare
from tests.reference import TRUTH, stored_in

BF16 = torch.bfloat16
FUSED = Case(qkv="interleaved", groups=2, norm="RMSNorm", activation="swiglu", bias=False)
DECODER = Case(arrangement=("decoder",), qkv="flat")


def same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_bitwise_equal(name, value, want[name])


def states(layer: torch.nn.Module) -> dict:
    return {name: value for name, value in layer.state_dict().items() if name.endswith("_extra_state")}


# dropout


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dropout_of_elements_and_of_samples(layout, parallel):
    """Each element, or sample, of what attention gives is lost or doubled; x stays. The MLP gives 0 here."""
    s, b = 5, 64
    shape = (s, b, HIDDEN) if layout == "sbhd" else (b, s, HIDDEN)
    for option in ("hidden_dropout", "drop_path_rate"):
        rates = {"hidden_dropout": 0.0, option: 0.5}
        layer = te.TransformerLayer(
            HIDDEN, FFN, HEADS, attention_dropout=0.0, attn_input_format=layout, parallel_attention_mlp=parallel,
            device="cpu", **rates,
        )  # fmt: skip
        torch.nn.init.zeros_(layer.layernorm_mlp.fc2_weight)
        x = torch.randn(shape)
        out = layer.self_attention(x)
        out = out if parallel else out[0]  # biases are 0
        y = layer(x)
        lost, doubled = y == x, y == x + 2 * out
        assert bool((lost | doubled).all())
        if option == "drop_path_rate":
            sample = lost.movedim(1, 0) if layout == "sbhd" else lost
            assert bool((sample.flatten(1).all(1) | ~sample.flatten(1).any(1)).all())
            lost = sample.flatten(1)[:, 0]
        assert abs(float(lost.float().mean()) - 0.5) < 4 * 0.5 * lost.numel() ** -0.5
        layer.eval()
        torch.testing.assert_close(layer(x), x + out)


def test_attention_draws_from_the_trackers_state_and_dropout_from_torchs():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    options = dict(get_rng_state_tracker=lambda: tracker, hidden_dropout=0.0, device="cpu")
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, **options)
    before, own = torch.get_rng_state(), tracker.get_states()
    x = torch.randn(6, 2, HIDDEN)
    torch.set_rng_state(before)
    first = layer(x)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(layer(x), first)
    tracker.set_states(own)
    assert torch.equal(layer(x), first)


# weights and their gradients


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_megatrons_call_accumulates_into_main_grad(recipe):
    """Two micro-batches; the sum is what two backward passes without main_grad give, in fp32."""
    layers = [make(FUSED, device="cpu", fuse_wgrad_accumulation=fused, layer_number=3) for fused in (True, False)]
    weights = [p for name, p in layers[0].named_parameters() if p.dim() == 2]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    for i, first in enumerate((True, False)):
        inputs, dy = draw(FUSED, torch.float32, seed=i)
        for layer in layers:
            x = inputs["x"].clone().requires_grad_()
            with under(recipe):
                y = layer(
                    hidden_states=x, attention_mask=None, encoder_output=None, enc_dec_attn_mask=None,
                    inference_params=None, is_first_microbatch=first, checkpoint_core_attention=False,
                )  # fmt: skip
            y.backward(dy)
    assert len(weights) == 4 and all(w.grad_added_to_main_grad and w.grad is not None for w in weights)
    for (name, got), want in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        assert_bitwise_equal(name, got.main_grad if got.dim() == 2 else got.grad, want.grad)


def test_later_micro_batches_use_the_weights_of_the_first():
    """What is written through .data shows when a first micro-batch comes, for every weight of a decoder."""
    layer = make(DECODER, BF16)
    inputs, dy = draw(DECODER, BF16)
    with torch.no_grad(), under("current"):
        first = layer(inputs["x"], encoder_output=inputs["encoder"], is_first_microbatch=True)
        for name, weight in [(n, p) for n, p in layer.named_parameters() if p.dim() == 2]:
            weight.data.mul_(-0.5)
            kept, new = (layer(inputs["x"], encoder_output=inputs["encoder"], is_first_microbatch=f)
                         for f in (False, True))  # fmt: skip
            assert torch.equal(kept, first) and not torch.equal(new, first), name
            first = new


def test_delayed_weight_gradients():
    late, plain = (make(DECODER, BF16, delay_wgrad_compute=delay) for delay in (True, False))
    late.inter_attention.proj.weight.requires_grad_(False)  # nothing waits there, which is no error
    plain.inter_attention.proj.weight.requires_grad_(False)
    inputs, dy = draw(DECODER, BF16)
    with under("current"):
        want = step(plain, DECODER, inputs, dy)
        got = step(late, DECODER, inputs, dy)
    assert late.need_backward_dw() and not plain.need_backward_dw()
    weights = {name: p for name, p in late.named_parameters() if p.dim() == 2 and p.requires_grad}
    assert len(weights) == 6 and not weights.keys() & got.keys()
    late.backward_dw()
    plain.backward_dw()  # does nothing
    same(got | {name: p.grad for name, p in weights.items()}, want)
    with pytest.raises(RuntimeError, match="backward_dw"):
        late.backward_dw()


# checkpoints


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_gives_the_same_bits(use_reentrant):
    """Of the whole layer and of attention alone, with dropout, under delayed scaling."""
    found = []
    for how in ("none", "layer", "attention"):
        layer = make(Case(), BF16, hidden_dropout=0.1, attention_dropout=0.1, drop_path_rate=0.1)
        results = {}
        for i in range(3):
            inputs, dy = draw(Case(), BF16, seed=i)
            x = inputs["x"].requires_grad_()
            with under("delayed"):
                if how == "layer":
                    y = te.checkpoint(layer, x, use_reentrant=use_reentrant)
                else:
                    y = layer(x, checkpoint_core_attention=how == "attention")
            y.backward(dy)
            results |= {f"{i} y": y.detach(), f"{i} dx": x.grad}
        results |= {name: p.grad for name, p in layer.named_parameters()} | states(layer)
        found.append(results)
    same(found[1], found[0])
    same(found[2], found[0])


# graphs and compilers


@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_a_layer(device, recipe):
    case = Case(qkv="interleaved", norm="RMSNorm", placing=("rope", "RMSNorm"))
    layer = make(case, BF16, device)
    twin = copy.deepcopy(layer)
    x, dy = draw(case, BF16)[0]["x"], None
    rope = case.calls()["rotary_pos_emb"].to(device)

    class Rotated(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x, rotary_pos_emb=rope)

    plain, eager = Rotated(layer), Rotated(twin)
    graphed(plain, recipe, device, samples=(x.to(device).requires_grad_(),))
    for seed in range(3):
        found = []
        for net in (plain, eager):
            inputs, dy = draw(case, BF16, seed)
            x = inputs["x"].to(device).requires_grad_()
            net.zero_grad(set_to_none=True)
            with under(recipe):
                y = net(x)
            y.backward(dy.to(device))
            found.append({"y": y.detach().clone(), "dx": x.grad.clone()} | states(net))
            found[-1] |= {name: p.grad.clone() for name, p in net.named_parameters()}
        same(*found)


ENCODER = Case(placing=("rope", "RMSNorm"), groups=2)


@pytest.mark.parametrize("case, recipe", [(ENCODER, "bf16"), (ENCODER, "delayed"), (DECODER, "current")])
@pytest.mark.parametrize("device", device_params())
def test_compiled_whole(case, recipe, device):
    torch._dynamo.reset()
    layer = make(case, BF16, device)
    twin = copy.deepcopy(layer)
    call = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        inputs, dy = draw(case, BF16, seed)
        with under(recipe):
            want = step(layer, case, inputs, dy)
        with under(recipe):
            got = step(call, case, inputs, dy)
        same({name.removeprefix("_orig_mod."): value for name, value in got.items()}, want)
    same(states(twin), states(layer))
    torch._dynamo.reset()


# where parameters are


def test_meta_and_copies():
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device="meta", qk_norm_type="RMSNorm", output_layernorm=True)
    assert all(p.is_meta for p in layer.parameters())
    assert layer(torch.randn(4, 2, HIDDEN, device="meta")).shape == (4, 2, HIDDEN)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    layer = layer.cpu().eval()
    x = torch.randn(4, 2, HIDDEN)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x)) and bool(layer(x).isfinite().all())


def test_init_methods():
    """init_method fills qkv and fc1; proj and fc2 have a default of their own, as in Transformer Engine."""
    layer = te.TransformerLayer(
        HIDDEN, FFN, HEADS, init_method=lambda w: torch.nn.init.constant_(w, 3.0), device="cpu", fuse_qkv_params=True
    )
    own, mlp = layer.self_attention, layer.layernorm_mlp
    assert bool((own.layernorm_qkv.weight == 3).all() and (mlp.fc1_weight == 3).all())
    for weight in (own.proj.weight, mlp.fc2_weight):
        assert abs(float(weight.detach().std()) / 0.023 - 1) < 0.1


@pytest.mark.parametrize("case", [Case(), Case(arrangement=("post",), dropout=0.1)], ids=["inside", "after"])
def test_torch_amp(case):
    """fp32 parameters; y and the residual have the autocast's dtype, however they are added."""
    layer = make(case)
    inputs, dy = draw(case, torch.float32)
    with torch.autocast("cpu", BF16):
        y = layer(inputs["x"])
    oracle, parameters = Layer(case), dict(layer.named_parameters())
    truth, low = (oracle.run(parameters, inputs, dy, a)["out"] for a in (TRUTH, stored_in(BF16)))
    assert y.dtype == BF16
    compare({"out": y.flatten(0, 1)}, {"out": truth}, {"out": low})


# refusals


@pytest.mark.parametrize("given, error, text", [
    ({"layer_type": "encodr"}, ValueError, "nearest: encoder"),
    ({"hidden_dropout": 1.0}, ValueError, "hidden_dropout"),
    ({"drop_path_rate": -0.1}, ValueError, "drop_path_rate"),
    ({"drop_path_rate": 0.1, "attn_input_format": "thd"}, NotImplementedError, "drop_path_rate"),
    ({"parallel_attention_mlp": True, "layer_type": "decoder"}, ValueError, "parallel_attention_mlp"),
    ({"parallel_attention_mlp": True, "output_layernorm": True}, ValueError, "parallel_attention_mlp"),
    ({"fuse_wgrad_accumulation": True}, ValueError, "fuse_qkv_params"),
    ({"delay_wgrad_compute": True}, ValueError, "fuse_qkv_params"),
    ({"softmax_type": "learnable"}, NotImplementedError, "softmax_type"),
    ({"qk_norm_type": "RmsNorm"}, ValueError, "nearest: RMSNorm"),
    ({"self_attn_mask_type": "causl"}, ValueError, "nearest: causal"),
    ({"enc_dec_attn_mask_type": "causl"}, ValueError, "nearest: causal"),
    ({"normalization": "BatchNorm"}, ValueError, "BatchNorm"),
    ({"sequence_parallel": True, "tp_size": 2}, ValueError, "set_parallel_mode"),
    ({"set_parallel_mode": True, "tp_size": 2, "num_gqa_groups": 1}, ValueError, "num_gqa_groups"),
    ({"num_gqa_groups": 3}, ValueError, "num_gqa_groups"),
    ({"bias": 1}, TypeError, "bias"),
    ({"hidden_dropuot": 0.1}, TypeError, "hidden_dropout"),
])  # fmt: skip
def test_constructors_refuse(given, error, text):
    with pytest.raises(error, match=text):
        te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", **given)


@pytest.mark.parametrize("given, error, text", [
    ({"inference_params": object()}, NotImplementedError, "inference_params"),
    ({"alibi_slopes": torch.ones(HEADS)}, NotImplementedError, "alibi_slopes"),
    ({"core_attention_bias_type": "alibi"}, NotImplementedError, "alibi"),
    ({"encoder_output": torch.ones(4, 2, HIDDEN)}, ValueError, "encoder_output"),
    ({"rotary_pos_emb": te.RotaryPositionEmbedding(8)(3)}, ValueError, "positions"),
])  # fmt: skip
def test_calls_refuse(given, error, text):
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu")
    with pytest.raises(error, match=text):
        layer(torch.randn(4, 2, HIDDEN), **given)
    decoder = te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", layer_type="decoder")
    with pytest.raises(ValueError, match="encoder_output"):
        decoder(torch.randn(4, 2, HIDDEN))
    with pytest.raises(NotImplementedError, match="cp_group"):
        layer.set_context_parallel_group([1, 2], [0, 1], None)


@pytest.mark.parametrize("device", rank_device_params(2))
def test_over_two_ranks(device):
    launch(Path(__file__).with_name("ranks_transformer_layer.py"), "--device", device, ranks=2, timeout=240)
