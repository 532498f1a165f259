"""te.TransformerLayer written out in plain torch: linears and norms of tests/reference.py, attention token by token."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import te_lite as te
from tests import reference
from tests.harness import REALISATIONS
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Arithmetic, Quantization, Spec, quantization, stored_in

HIDDEN, FFN, HEADS, D = 48, 64, 4, 8
LENGTHS = {"x": (6, 4), "encoder": (3, 5)}  # of the two sequences, times Case.stretch; unpadded they have the longest
BATCH = 2


@dataclass(frozen=True)
class Case:
    """Options of a layer. arrangement: "pre", "post" (residual after the norm), "output" (norm at the end), "parallel",
    "decoder", and pairs of them. placing: of queries and keys, by a rotary embedding and a norm, in their order."""

    layout: str = "sbhd"
    qkv: str = "split"  # "interleaved", "flat": one parameter
    groups: int = HEADS
    norm: str = "LayerNorm"
    arrangement: tuple[str, ...] = ("pre",)
    placing: tuple[str, ...] = ()
    mask: str = "causal"
    activation: str = "gelu"
    bias: bool = True
    dropout: float = 0.0  # the tests' modules do not train
    tp: int = 1
    sequence_parallel: bool = False
    stretch: int = 1

    @property
    def lengths(self) -> dict[str, tuple[int, ...]]:
        return {of: tuple(n * self.stretch for n in ns) for of, ns in LENGTHS.items()}

    def arguments(self) -> dict[str, Any]:
        """Of te.TransformerLayer, beside the sizes."""
        kinds = {"RMSNorm-": "RMSNorm", "LayerNorm-": "LayerNorm"}
        norms = [p for p in self.placing if p in NORMS]
        rotated = [p for p in self.placing if p.startswith("rope")]
        return {
            "num_gqa_groups": self.groups, "kv_channels": D, "attn_input_format": self.layout, "bias": self.bias,
            "fuse_qkv_params": self.qkv != "split", "qkv_weight_interleaved": self.qkv == "interleaved",
            "normalization": kinds.get(self.norm, self.norm), "zero_centered_gamma": self.norm.endswith("-"),
            "apply_residual_connection_post_layernorm": "post" in self.arrangement,
            "output_layernorm": "output" in self.arrangement, "parallel_attention_mlp": "parallel" in self.arrangement,
            "layer_type": "decoder" if "decoder" in self.arrangement else "encoder", "activation": self.activation,
            "hidden_dropout": self.dropout, "attention_dropout": self.dropout,
            "drop_path_rate": 0.0 if self.layout == "thd" else self.dropout / 2,
            "self_attn_mask_type": "no_mask" if self.mask == "window" else self.mask,
            "window_size": (2, 1) if self.mask == "window" else None,
            "enc_dec_attn_mask_type": "padding" if self.padded else "no_mask",
            "enc_dec_window_size": (1, 2) if self.mask == "window" else None,
            "qk_norm_type": norms[0] if norms else None, "qk_norm_before_rope": self.placing[:1] == tuple(norms),
            "rotary_pos_interleaved": "rope interleaved" in rotated,
        }  # fmt: skip

    @property
    def padded(self) -> bool:
        return "padding" in self.mask

    def places(self, of: str) -> list[tuple[int, int]]:
        """(sequence, position) of each token, in the order of the rows of [tokens, hidden]."""
        lengths = self.lengths[of]
        if self.layout == "thd":
            return [(b, i) for b, n in enumerate(lengths) for i in range(n)]
        grid = itertools.product(range(BATCH), range(max(lengths)))
        return sorted(grid, key=lambda at: at[::-1]) if self.layout == "sbhd" else list(grid)

    def shape(self, of: str) -> tuple[int, ...]:
        if self.layout == "thd":
            return sum(self.lengths[of]), HIDDEN
        s = max(self.lengths[of])
        return (s, BATCH, HIDDEN) if self.layout == "sbhd" else (BATCH, s, HIDDEN)

    def seen(self, queries: str, keys: str) -> Tensor:
        """bool [tokens, tokens]: which of the keys a query sees."""
        whole = self.layout != "thd" and not self.padded
        ends = {of: (max(n),) * BATCH if whole else n for of, n in self.lengths.items()}
        hidden, own = hidden_pairs(self.stretch), queries == keys
        rows = []
        for b, i in self.places(queries):
            row = []
            for c, j in self.places(keys):
                sees = b == c and i < ends[queries][b] and j < ends[keys][c]
                if own and "causal" in self.mask:
                    sees = sees and j <= i
                elif self.mask == "window":  # in cross attention around the diagonal that ends where both sequences do
                    left, right = (2, 1) if own else (1, 2)
                    at = i + ends[keys][c] - ends[queries][b]
                    sees = sees and at - left <= j <= at + right
                elif own and self.mask == "arbitrary":
                    sees = sees and not bool(hidden[b, 0, i, j])
                row.append(sees)
            rows.append(row)
        return torch.tensor(rows)

    def calls(self) -> dict[str, Any]:
        """Arguments of forward that follow from the masks."""
        given: dict[str, Any] = {}
        ends = {of: torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for of, n in self.lengths.items()}
        if self.layout == "thd":
            given = {"cu_seqlens_q": ends["x"], "cu_seqlens_kv": ends["encoder"]}
        elif self.padded:
            pads = [torch.arange(max(n))[None] >= torch.tensor(n)[:, None] for n in self.lengths.values()]
            x, encoder = (pad[:, None, None] for pad in pads)
            given = {"attention_mask": x, "enc_dec_attn_mask": (x, encoder)}
        elif self.mask == "arbitrary":
            given = {"attention_mask": hidden_pairs(self.stretch)}
        if any(p.startswith("rope") for p in self.placing):
            interleaved = "rope interleaved" in self.placing
            turned = te.RotaryPositionEmbedding(D, 0.5, interleaved=interleaved)(max(map(max, self.lengths.values())))
            given["rotary_pos_emb"] = turned
        return given


NORMS = ("RMSNorm", "LayerNorm", "L2Normalization")


def hidden_pairs(stretch: int) -> Tensor:
    size = LENGTHS["x"][0] * stretch
    hidden = torch.rand(BATCH, 1, size, size, generator=torch.Generator().manual_seed(3)) < 0.4
    return hidden & ~torch.eye(size, dtype=torch.bool)


def rotate(t: Tensor, places: list[tuple[int, int]], interleaved: bool) -> Tensor:
    """t [tokens, heads, D]: its first D/2 channels as complex numbers, turned by position * 10000^(-2c / (D/2))."""
    half = D // 2
    speeds = 10000.0 ** -(torch.arange(0, half, 2, dtype=torch.float64) / half)
    angles = (torch.tensor([i for _, i in places], dtype=torch.float64)[:, None] * speeds)[:, None].to(t.dtype)
    part = t[..., :half]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    flat = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((flat, t[..., half:]), -1)


@dataclass
class Layer:
    """The oracle of a case, with the state of its quantizers."""

    case: Case
    recipe: str = "bf16"
    state: dict[str, Quantization] = field(default_factory=dict)

    def run(
        self, parameters: dict[str, Tensor], inputs: dict[str, Tensor], dy: Tensor, arith: Arithmetic
    ) -> dict[str, Tensor]:
        """{"out", the gradients of the inputs "x" and "encoder", and of each parameter}; scales take their step."""
        self.arith = arith
        p = {k: v.detach().to(arith.compute).requires_grad_() for k, v in parameters.items()}
        leaves = {k: v.detach().flatten(0, -2).to(arith.compute).requires_grad_() for k, v in inputs.items()}
        out = self.forward(p, leaves["x"], leaves.get("encoder"))
        out.backward(dy.flatten(0, -2).to(arith.compute))
        for one in self.state.values():
            one.update()
        grads = {k: v.grad for k, v in leaves.items()} | {k: arith.round(v.grad) for k, v in p.items()}
        return {"out": out.detach()} | grads

    def reference(
        self, parameters: dict[str, Tensor], inputs: dict[str, Tensor], dy: Tensor, dtype: torch.dtype, device: Any,
        truth: dict[str, Tensor],
    ) -> dict[str, Tensor]:  # fmt: skip
        """run() in dtype: each tensor is that of the worst realisation of how the device's cores add."""
        cuda = torch.device(device).type == "cuda" and self.recipe != "bf16"
        tries = [copy.deepcopy(self) for _ in range(REALISATIONS - 1 if cuda else 0)] + [self]
        found = [one.run(parameters, inputs, dy, stored_in(dtype, cuda)) for one in tries]
        return {
            name: max((f[name] for f in found), key=lambda t: float((t - want).norm())) for name, want in truth.items()
        }

    def store(self, t: Tensor, value: bool = True, grad: bool = True) -> Tensor:
        return reference._Store.apply(t, self.arith, value, grad)

    def block(self, kind: str, name: str, p: dict[str, Tensor], x: Tensor, mode: str | None = None, parts: str = ""):
        """(out, norm's output) of the module `name`. parts: prefixes of its weights, where they are split."""
        case = self.case
        own = {key.removeprefix(f"{name}."): value for key, value in p.items() if key.startswith(f"{name}.")}
        for what in ("weight", "bias"):
            if f"{parts.split()[0] if parts else ''}_{what}" in own:
                shards = zip(*(own.pop(f"{part}_{what}").chunk(case.tp) for part in parts.split()), strict=True)
                own[what] = torch.cat([part for rank in shards for part in rank])
        spec = Spec(
            kind, case.norm.removesuffix("-"), case.norm.endswith("-"), case.activation, case.bias,
            mode=mode if case.tp > 1 else None, tp=case.tp, sequence_parallel=case.sequence_parallel,
            returns_norm="post" in case.arrangement,
        )  # fmt: skip
        state = self.state.setdefault(name, quantization(self.recipe, spec))
        return reference.forward(spec, own, x, state, self.arith)

    def attention(self, name: str, p: dict[str, Tensor], x: Tensor, normed: bool, encoder: Tensor | None = None):
        """(out, norm's output) of MultiheadAttention."""
        case, r, keys = self.case, HEADS // self.case.groups, "x" if encoder is None else "encoder"
        kind = LN_LINEAR if normed else LINEAR
        if encoder is None:
            linear = f"{name}.layernorm_qkv" if normed else f"{name}.qkv"
            mixed, ln_out = self.block(kind, linear, p, x, "column", "query key value")
            q, k, v = self.split(mixed, (r, 1, 1))
        else:
            linear = f"{name}.layernorm_query" if normed else f"{name}.query_layer"
            mixed, ln_out = self.block(kind, linear, p, x, "column", "query")
            k, v = self.split(self.block(LINEAR, f"{name}.key_value", p, encoder, "column", "key value")[0], (1, 1))
            q = mixed.unflatten(1, (HEADS, D))
        for step in case.placing:
            q, k = self.placed(step, q, p, f"{name}.q_norm", "x"), self.placed(step, k, p, f"{name}.k_norm", keys)
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        seen = case.seen("x", keys)
        empty = ~seen.any(1)
        # Kernels round what their second products read: the weights forward, the gradient of the logits backward.
        logits = self.store(torch.einsum("thd,uhd->htu", q, k) * D**-0.5, value=False)
        weights = self.store(logits.masked_fill(~(seen | empty[:, None]), -torch.inf).softmax(-1), grad=False)
        out = torch.einsum("htu,uhd->thd", weights.masked_fill(empty[:, None], 0.0), v)
        return self.block(LINEAR, f"{name}.proj", p, self.store(out.flatten(1)), "row")[0], ln_out

    def split(self, t: Tensor, parts: tuple[int, ...]) -> list[Tensor]:
        """[tokens, heads, D] of each of the parts of t, whose columns are those of rank 0, then those of rank 1 ..."""
        lists: list[list[Tensor]] = [[] for _ in parts]
        groups = self.case.groups // self.case.tp
        for shard in t.chunk(self.case.tp, 1):
            heads = iter(shard.split(D, 1))
            for _ in range(groups if self.case.qkv == "interleaved" else 1):
                for part, into in zip(parts, lists, strict=True):
                    into += itertools.islice(heads, part if self.case.qkv == "interleaved" else part * groups)
        return [torch.stack(pieces, 1) for pieces in lists]

    def placed(self, step: str, t: Tensor, p: dict[str, Tensor], norm: str, of: str) -> Tensor:
        if step.startswith("rope"):
            return self.store(rotate(t, self.case.places(of), step == "rope interleaved"))
        if step == "L2Normalization":
            return self.store(t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt())
        spec = Spec(step, step, eps=1e-6)
        return self.store(reference.norm(t, p[f"{norm}.weight"], p.get(f"{norm}.bias"), spec, self.arith))

    def forward(self, p: dict[str, Tensor], x: Tensor, encoder: Tensor | None) -> Tensor:
        arrangement = self.case.arrangement
        post, ends = "post" in arrangement, "output" in arrangement
        x = self.store(x)
        out, ln_out = self.attention("self_attention", p, x, not ends)
        if "parallel" in arrangement:
            return self.store(self.store(x + out) + self.block(LN_MLP, "layernorm_mlp", p, x)[0])
        x = self.store((ln_out if post and not ends else x) + out)
        if encoder is not None:
            out, ln_out = self.attention("inter_attention", p, x, True, self.store(encoder))
            x = self.store((ln_out if post else x) + out)
        out, ln_out = self.block(LN_MLP, "layernorm_mlp", p, x)
        x = self.store((ln_out if post else x) + out)
        if not ends:
            return x
        name, zero_centered = self.case.norm.removesuffix("-"), self.case.norm.endswith("-")
        spec = Spec(name, name, zero_centered, sequence_parallel=self.case.sequence_parallel, tp=self.case.tp)
        return self.store(reference.norm(x, p["layernorm.weight"], p.get("layernorm.bias"), spec, self.arith))


def make(case: Case, dtype: torch.dtype = torch.float32, device: Any = "cpu", **extra: Any) -> te.TransformerLayer:
    """With parameters that all show: no bias is 0, no gain 1. It does not train where the case has dropout."""
    torch.manual_seed(5)
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=dtype, device=device, **(case.arguments() | extra))
    with torch.no_grad():
        for name, param in layer.named_parameters():
            scale = param.shape[1] ** -0.5 if param.dim() == 2 else 0.3
            gain = 1.0 if "norm" in name and name.endswith("weight") and param.dim() == 1 else 0.0
            gain = 0.0 if case.norm.endswith("-") and "_norm.weight" not in name else gain
            param.copy_((torch.randn(param.shape) * scale + gain).to(dtype))
    return layer.train(not case.dropout)


def draw(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and dy; tokens of different size."""
    torch.manual_seed(seed)
    names = ("x", "encoder") if "decoder" in case.arrangement else ("x",)
    inputs = {of: torch.randn(case.shape(of)) * torch.rand(*case.shape(of)[:-1], 1).add(0.5) for of in names}
    return {of: t.to(dtype) for of, t in inputs.items()}, torch.randn(case.shape("x")).to(dtype)


def step(layer: Any, case: Case, inputs: dict[str, Tensor], dy: Tensor, **given: Any) -> dict[str, Tensor]:
    """As Layer.run, of the module."""
    device = next(layer.parameters()).device

    def there(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(there, value))
        return value.to(device) if isinstance(value, Tensor) else value

    layer.zero_grad()
    leaves = {k: v.detach().to(device).clone().requires_grad_() for k, v in inputs.items()}
    calls = {key: there(value) for key, value in (case.calls() | given).items()}
    if "decoder" not in case.arrangement:
        calls.pop("enc_dec_attn_mask", None)
    out = layer(leaves["x"], encoder_output=leaves.get("encoder"), **calls)
    out.backward(dy.to(device))
    found = {"out": out.detach().flatten(0, -2)} | {k: t.grad.flatten(0, -2) for k, t in leaves.items()}
    return found | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
