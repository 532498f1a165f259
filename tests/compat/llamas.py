"""Small models of transformers for the tests of te.fuse."""

import copy
from functools import partial

import pytest
import torch

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal, assert_close_to_oracle

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")
VOCABULARY = 96


def build(architecture="llama", dtype=torch.float32, **sizes):
    """A model whose norms and biases are not what they are at the start."""
    given = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **given | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def fused(model, recipe="bf16", **options):
    """A fused copy."""
    made = copy.deepcopy(model)
    te.fuse(made, recipe, **options)
    return made


def exact(model):
    """A copy in fp64, its norms too, which transformers computes in fp32 whatever x is."""
    made = copy.deepcopy(model).double()
    made.config._experts_implementation = "eager"  # grouped products are of other dtypes alone
    for part in made.modules():
        if "RMSNorm" in type(part).__name__:
            eps = part.eps if hasattr(part, "eps") else part.variance_epsilon
            part.forward = partial(_norm, part, eps, type(part).__name__.startswith("Gemma"))
    return made


def _norm(part, eps, zero_centered, x):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (part.weight + zero_centered)


def draw(*shape):
    return torch.randint(3, VOCABULARY, shape)


def run(model, ids):
    """{"logits", "loss", gradients} of one forward and backward."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


def assert_same(got, expected, label=""):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise_equal(f"{label} {name}", got[name], value)


def assert_close(got, truth, reference, factor=2.0):
    assert got.keys() == truth.keys() == reference.keys()
    for name, value in truth.items():
        if value.dim():  # of one number no mean error is known
            assert_close_to_oracle(name, got[name], value, reference[name], factor)


def beside(*linears):
    ends = [linear.weight.data_ptr() + linear.weight.nbytes for linear in linears[:-1]]
    return ends == [linear.weight.data_ptr() for linear in linears[1:]]


def lie_together(model):
    """Whether the weights that one product reads are one block of memory."""
    return all(
        beside(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        and beside(layer.mlp.gate_proj, layer.mlp.up_proj)
        for layer in model.model.layers
    )
