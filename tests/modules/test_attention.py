"""te.DotProductAttention against attention written out in fp64, query by query."""

import math
from dataclasses import dataclass

import pytest
import torch

import te_lite as te
from te_lite.testing.numerics import assert_bound_bites

B, H, G, D, DV = 2, 4, 2, 8, 12


@dataclass(frozen=True)
class Case:
    kind: str = "causal"
    sq: int = 9
    skv: int = 9
    window: tuple[int, int] | None = None
    bottom_right: bool | None = None
    scale: float | None = None
    bias: str = "no_bias"
    lengths: bool = False  # padding by cu_seqlens instead of masks


CASES = [
    Case(), Case(sq=5), Case("causal_bottom_right", sq=5), Case("causal_bottom_right"), Case("no_mask", skv=13),
    Case("no_mask", window=(3, 1)), Case("no_mask", sq=5, window=(2, -1)), Case(window=(2, 0)),
    Case(sq=5, window=(2, 0)), Case("causal_bottom_right", sq=5, window=(2, 0)), Case(sq=5, bottom_right=True),
    Case("causal_bottom_right", sq=5, bottom_right=False), Case("padding_causal", sq=5, bottom_right=True),
    Case("no_mask", sq=5, window=(1, 2), bottom_right=False), Case(scale=0.7),
    Case("no_mask", sq=12, skv=5, window=(2, 2)),
    Case("padding"), Case("padding", skv=13), Case("padding", skv=13, lengths=True), Case("padding_causal"),
    Case("padding,causal"), Case("padding_causal", lengths=True), Case("padding_causal_bottom_right", sq=5),
    Case("padding_causal", window=(2, 0)), Case("padding", window=(2, 2)), Case("arbitrary", skv=13),
    Case("arbitrary", window=(4, 4)), Case("causal", bias="post_scale_bias"), Case("no_mask", bias="post_scale_bias"),
    Case("padding", bias="pre_scale_bias"),
]  # fmt: skip
LENGTHS = {5: [3, 5], 9: [6, 9], 12: [12, 7], 13: [4, 11]}  # of the two sequences, by what they are padded to


def sees(case: Case, i: int, j: int, nq: int, nkv: int) -> bool:
    """Key j is seen by query i, of sequences of nq and nkv tokens: Transformer Engine's rules."""
    causal = "causal" in case.kind
    corner = "bottom_right" in case.kind if causal else case.bottom_right in (None, True)
    distance = j - i - (nkv - nq if corner else 0)
    left, right = case.window or (-1, -1)
    right = 0 if causal else right
    inside = i < nq and j < nkv if "padding" in case.kind else True
    return inside and (left < 0 or distance >= -left) and (right < 0 or distance <= right)


def written_out(case: Case, q, k, v, hidden, bias):
    """[B, Sq, H, DV] by loops over queries; 0 where a query sees nothing. q [B, Sq, H, D], k, v [B, Skv, G, D]."""
    scale = case.scale or 1 / math.sqrt(D)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(B):
        padded = "padding" in case.kind
        nq, nkv = (LENGTHS[n][b] if padded else n for n in (case.sq, case.skv))
        for h in range(H):
            g = h // (H // G)
            for i in range(case.sq):
                keys = [
                    j
                    for j in range(case.skv)
                    if sees(case, i, j, nq, nkv) and not (hidden is not None and hidden[b, 0, i, j])
                ]
                if keys:
                    logits = k[b, keys, g] @ q[b, i, h]
                    if case.bias == "post_scale_bias":
                        logits = logits * scale + bias[0, h, i, keys]
                    else:
                        logits = (logits + (bias[0, h, i, keys] if bias is not None else 0)) * scale
                    out[b, i, h] = logits.softmax(0) @ v[b, keys, g]
    return out


def padding_masks(case: Case):
    made = [torch.arange(n)[None] >= torch.tensor(LENGTHS[n])[:, None] for n in (case.sq, case.skv)]
    q, kv = (mask[:, None, None] for mask in made)
    return q if case.sq == case.skv else (q, kv)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_loops_in_fp64(case):
    shapes = (case.sq, H, D), (case.skv, G, D), (case.skv, G, DV)
    q, k, v = (torch.randn(B, *shape, dtype=torch.float64) for shape in shapes)
    hidden = torch.rand(B, 1, case.sq, case.skv) < 0.4 if case.kind == "arbitrary" else None
    bias = torch.randn(1, H, case.sq, case.skv, dtype=torch.float64) if case.bias != "no_bias" else None
    dout = torch.randn(B, case.sq, H, DV, dtype=torch.float64)
    module = te.DotProductAttention(
        H, (D, DV), G, attn_mask_type=case.kind, window_size=case.window, softmax_scale=case.scale, qkv_format="bshd",
        bottom_right_diagonal=case.bottom_right, attention_type="self" if case.sq == case.skv else "cross",
    )  # fmt: skip
    given = {}
    if "padding" in case.kind and case.lengths:
        given = {"cu_seqlens_q": cumulative(LENGTHS[case.sq]), "cu_seqlens_kv": cumulative(LENGTHS[case.skv])}
    elif "padding" in case.kind:
        given = {"attention_mask": padding_masks(case)}
    elif hidden is not None:
        given = {"attention_mask": hidden}
    if bias is not None:
        given |= {"core_attention_bias_type": case.bias, "core_attention_bias": bias}
    results = {}
    for name in ("truth", "bshd", "sbhd", "checkpointed"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if name == "truth":
            out = written_out(case, *leaves, hidden, bias).flatten(2)
        elif name == "sbhd":
            out = module(*(t.transpose(0, 1) for t in leaves), qkv_format="sbhd", **given).transpose(0, 1)
        else:
            out = module(*leaves, **given, checkpoint_core_attention=name == "checkpointed")
        (out * dout.flatten(2)).sum().backward()
        results[name] = [out.detach(), *(leaf.grad for leaf in leaves)]
    for name in ("bshd", "sbhd", "checkpointed"):
        for what, got, want in zip("out dq dk dv".split(), results[name], results["truth"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda m, w=what, n=name: f"{n} {w}: {m}")


@pytest.mark.parametrize("kind, window", [("padding_causal", None), ("padding", None), ("padding_causal", (2, 0)),
                                          ("padding_causal_bottom_right", None)])  # fmt: skip
@pytest.mark.parametrize("gaps", [False, True])
def test_packed_sequences_are_sequences_alone(kind, window, gaps):
    """thd: each sequence as in bshd, bit for bit; what lies between gives 0 and no gradient."""
    counts_q, counts_kv = [3, 1, 6], [5, 1, 4]
    begins_q, begins_kv = (
        ([0, 4, 7, 14], [0, 6, 8, 13]) if gaps else (cumulative(c).tolist() for c in (counts_q, counts_kv))
    )
    q = torch.randn(begins_q[-1], H, D, requires_grad=True)
    k, v = (torch.randn(begins_kv[-1], G, d, requires_grad=True) for d in (D, DV))
    module = te.DotProductAttention(H, (D, DV), G, qkv_format="thd", attn_mask_type=kind, window_size=window)
    given = {"cu_seqlens_q": cumulative(counts_q), "cu_seqlens_kv": cumulative(counts_kv)}
    if gaps:
        given |= {"cu_seqlens_q_padded": torch.tensor(begins_q), "cu_seqlens_kv_padded": torch.tensor(begins_kv)}
    out = module(q, k, v, max_seqlen_q=6, max_seqlen_kv=5, **given)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    want, wanted = torch.zeros_like(out), [torch.zeros_like(t) for t in (q, k, v)]
    for b_q, n_q, b_kv, n_kv in zip(begins_q, counts_q, begins_kv, counts_kv, strict=False):
        places = slice(b_q, b_q + n_q), *(slice(b_kv, b_kv + n_kv),) * 2
        own = [t.detach()[place][None].requires_grad_() for t, place in zip((q, k, v), places, strict=True)]
        alone = module(
            *own, qkv_format="bshd", attn_mask_type=kind.replace("padding_", "").replace("padding", "no_mask")
        )
        want[places[0]] = alone[0].detach()
        for whole, part, place in zip(wanted, torch.autograd.grad(alone.square().sum(), own), places, strict=True):
            whole[place] = part[0]
    assert torch.equal(out, want) and all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_a_rank_has_its_share_of_heads_and_bf16_errs_as_torchs():
    module = te.DotProductAttention(8, 16, 4, tp_size=2)
    q = torch.randn(16, 2, 4, 16, dtype=torch.bfloat16)
    k, v = (torch.randn(16, 2, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    out = module(q, k, v)
    truth = module(q.double(), k.double(), v.double())
    logits = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(2, 2)) / 4
    weights = logits.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(-1)
    reference = torch.einsum("bhst,tbhd->sbhd", weights, v.repeat_interleave(2, 2)).flatten(2)
    assert_bound_bites("out", out, truth, reference, lambda o: o.roll(1, 0))
    assert out.shape == (16, 2, 64) and out.is_contiguous()


def test_dropout_is_of_training_and_of_the_trackers_state():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    module = te.DotProductAttention(H, D, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    q, k, v = (torch.randn(6, B, H, D) for _ in range(3))
    state = tracker.get_states()
    before = torch.get_rng_state()
    first = module(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)
    second = module(q, k, v)
    tracker.set_states(state)
    assert torch.equal(module(q, k, v), first) and not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(q, k, v), te.DotProductAttention(H, D)(q, k, v))


def test_state_dict_has_transformer_engines_key_and_may_lack_it():
    module = te.DotProductAttention(H, D)
    assert list(module.state_dict()) == ["_extra_state"]
    module.load_state_dict({"_extra_state": torch.empty(0, dtype=torch.uint8)})
    module.load_state_dict({})


@pytest.mark.parametrize("given, error, text", [
    ({"softmax_type": "learnable"}, NotImplementedError, "softmax_type"),
    ({"return_max_logit": True}, NotImplementedError, "return_max_logit"),
    ({"cp_group": [1, 2]}, NotImplementedError, "context parallelism"),
    ({"attn_mask_type": "causl"}, ValueError, "nearest: causal"),
    ({"window_size": (-2, 0)}, ValueError, "window_size"),
    ({"num_gqa_groups": 3}, ValueError, "num_gqa_groups=3"),
    ({"tp_size": 3}, ValueError, "tp_size=3"),
    ({"qkv_format": "hsbd"}, ValueError, "qkv_format"),
    ({"attention_dropout": 1.5}, ValueError, "attention_dropout"),
])  # fmt: skip
def test_constructors_refuse(given, error, text):
    with pytest.raises(error, match=text):
        te.DotProductAttention(H, D, **given)


@pytest.mark.parametrize("given, error, text", [
    ({"alibi_slopes": torch.ones(H)}, NotImplementedError, "alibi_slopes"),
    ({"inference_params": object()}, NotImplementedError, "inference_params"),
    ({"fp8_output": True}, NotImplementedError, "fp8_output"),
    ({"core_attention_bias_type": "alibi"}, NotImplementedError, "alibi"),
    ({"core_attention_bias_type": "post_scale_bias"}, NotImplementedError, "post_scale_bias"),
    ({"attn_mask_type": "padding"}, ValueError, "cu_seqlens_q"),
    ({"attn_mask_type": "arbitrary"}, ValueError, "attention_mask"),
    ({"qkv_format": "thd"}, ValueError, "dimensions"),
])  # fmt: skip
def test_calls_refuse(given, error, text):
    q = torch.randn(6, B, H, D)
    with pytest.raises(error, match=text):
        te.DotProductAttention(H, D)(q, q, q, **given)
    with pytest.raises(ValueError, match="heads"):
        te.DotProductAttention(H, D, G)(q, q, q)
    with pytest.raises(ValueError, match="dtypes"):
        te.DotProductAttention(H, D)(q, q.double(), q)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_as_on_the_cpu(case):
    """bf16 on the GPU errs at most twice as much as bf16 on the CPU, whatever kernel torch chooses."""
    if case.bias != "no_bias" or case.lengths:
        pytest.skip("the CPU's test covers it")
    sizes = (case.sq, H, 16), (case.skv, G, 16), (case.skv, G, 16)
    tensors = [torch.randn(B, *size, dtype=torch.bfloat16) for size in sizes]
    hidden = torch.rand(B, 1, case.sq, case.skv) < 0.4
    module = te.DotProductAttention(
        H, 16, G, attn_mask_type=case.kind, window_size=case.window, softmax_scale=case.scale, qkv_format="bshd",
        bottom_right_diagonal=case.bottom_right,
    )  # fmt: skip
    found = {}
    for name, device, dtype in (
        ("out", "cuda", torch.bfloat16),
        ("truth", "cpu", torch.float64),
        ("reference", "cpu", torch.bfloat16),
    ):
        mask = padding_masks(case) if "padding" in case.kind else hidden if case.kind == "arbitrary" else None
        if mask is not None:
            mask = tuple(m.to(device) for m in mask) if isinstance(mask, tuple) else mask.to(device)
        leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
        out = module(*leaves, attention_mask=mask)
        out.float().square().sum().backward() if dtype != torch.float64 else out.square().sum().backward()
        found[name] = [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]
    for what, out, truth, reference in zip("out dq dk dv".split(), *found.values(), strict=True):
        assert_bound_bites(what, out, truth, reference, lambda t: -t)


def test_the_window_of_causal_masks_is_none_for_others():
    q, k, v = (torch.randn(6, 2, 2, 8) for _ in range(3))
    want = te.DotProductAttention(2, 8, attn_mask_type="no_mask")(q, k, v)
    with pytest.warns(UserWarning, match=r"window_size=\(-1, 0\) is that of causal masks"):
        got = te.DotProductAttention(2, 8, attn_mask_type="no_mask", window_size=(-1, 0))(q, k, v)
    assert torch.equal(got, want) and not torch.equal(got, te.DotProductAttention(2, 8)(q, k, v))
