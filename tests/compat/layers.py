"""A decoder layer with the parts and the names of Llama's, without positions: for tests that need no transformers."""

import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=bias)
        self.k_proj, self.v_proj = nn.Linear(64, 32, bias=bias), nn.Linear(64, 32, bias=bias)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """x [batch, tokens, 64] -> the same shape. bias: of attention."""

    def __init__(self, bias=True):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(64, eps=1e-5), nn.RMSNorm(64, eps=1e-5)
        self.self_attn, self.mlp = Attention(bias), Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))
