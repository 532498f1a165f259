"""A Megatron-style GPT: pre-norm blocks, causal rotary attention, SwiGLU, tied vocabulary-parallel embedding.

S sequence length, B batch, H hidden, A heads, D = H/A head size, F ffn, V vocabulary, R tp_size.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import te_lite as te

from .data import seeded_generator
from .mesh import Mesh
from .moe import MixtureOfExperts, MoEConfig
from .parallel_layers import (
    VocabParallelEmbedding,
    copy_to_ranks,
    gather_sequence,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class GPTConfig:
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq_length: int
    params_dtype: torch.dtype
    sequence_parallel: bool = False
    recompute: bool = False
    overlap: bool = False
    fuse_wgrad: bool = False
    moe: MoEConfig | None = None


def parallel_options(config: GPTConfig, mesh: Mesh) -> dict[str, object]:
    """What every parallel te_lite module of the model is built with."""
    return {
        "bias": False,
        "tp_group": mesh.tp_group,
        "tp_size": mesh.tp_size,
        "sequence_parallel": config.sequence_parallel,
        "params_dtype": config.params_dtype,
        "fuse_wgrad_accumulation": config.fuse_wgrad,
        "device": mesh.device,
    }


def rotary_table(seq_length: int, head_size: int) -> Tensor:
    """cos and sin of s / 10000^(2 i / D), [2, S, D/2] (Su et al., 2021)."""
    frequencies = 10000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.arange(seq_length).unsqueeze(1) * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """[..., S, D] -> the same: features i and i + D/2 of position s, as a plane, turned by angle (s, i)."""
    cos, sin = rotary[:, : x.shape[-2]].unbind(0)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    """x [S, B, H] (its shard [S/R, B, H] with sequence parallelism) -> the same shape.

        q, k, v = rms_norm(x) @ qkv_weight^T           [S, B, A/R, 3, D], column-parallel
        a = softmax(causal(rotate(q) rotate(k)^T / sqrt(D))) v
        x = x + a @ proj_weight^T                      row-parallel
        g, u = rms_norm(x) @ fc1_weight^T;  x = x + (silu(g) * u) @ fc2_weight^T      or a mixture of such MLPs

    The rows of qkv_weight are ordered [A, 3, D]: a shard of rows is whole heads with their q, k and v.
    """

    def __init__(self, config: GPTConfig, mesh: Mesh) -> None:
        super().__init__()
        options = parallel_options(config, mesh)
        # Megatron's flags: column-parallel layers overlap the gather forward and whole collectives backward,
        # row-parallel ones the reduce-scatter forward and the gather backward
        gather = {"ub_overlap_ag": True} if config.overlap else {}
        bulk = {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True} if config.overlap else {}
        scatter = {"ub_overlap_rs": True} if config.overlap else {}
        self.local_heads = config.heads // mesh.tp_size
        self.qkv = te.LayerNormLinear(
            config.hidden,
            3 * config.hidden,
            normalization="RMSNorm",
            parallel_mode="column",
            ub_name="qkv",
            **options,
            **gather,
            **bulk,
        )
        self.proj = te.Linear(
            config.hidden, config.hidden, parallel_mode="row", ub_name="proj", **options, **gather, **scatter
        )
        if config.moe is not None:
            self.mlp: nn.Module = MixtureOfExperts(
                config.hidden, config.ffn, config.moe, mesh, config.params_dtype, config.fuse_wgrad
            )
            return
        self.mlp = te.LayerNormMLP(
            config.hidden,
            config.ffn,
            normalization="RMSNorm",
            activation="swiglu",
            set_parallel_mode=True,
            **options,
            **gather,
            **bulk,
            **scatter,
        )

    def attention(self, x: Tensor, rotary: Tensor) -> Tensor:
        """x + attention(rms_norm(x)); the norm is qkv's."""
        q, k, v = rearrange(self.qkv(x), "s b (heads three d) -> three b heads s d", heads=self.local_heads, three=3)
        a = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        a = rearrange(a, "b heads s d -> s b (heads d)")
        return self.proj(a, residual=x)  # x is added in the pass that sums the ranks' partial results

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = self.attention(x, rotary)
        return self.mlp(x, residual=x)


class GPT(nn.Module):
    """tokens, targets int64 [B, S] -> loss [S, B] in nats, the same on all tensor parallel ranks.

    x = embedding(tokens); x = block(x) for each block; logits = rms_norm(x) @ embedding.weight^T.
    The head multiplies the full sequence by this rank's V/R rows; logits are never gathered.
    """

    def __init__(self, config: GPTConfig, mesh: Mesh) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        like = {"params_dtype": config.params_dtype, "device": mesh.device}
        self.embedding = VocabParallelEmbedding(
            config.vocab,
            config.hidden,
            tp_group=mesh.tp_group,
            sequence_parallel=config.sequence_parallel,
            **like,
        )
        rotary = rotary_table(config.seq_length, config.hidden // config.heads)
        self.register_buffer("rotary", rotary.to(mesh.device, config.params_dtype), persistent=False)
        self.blocks = nn.ModuleList(Block(config, mesh) for _ in range(config.layers))
        self.final_norm = te.RMSNorm(config.hidden, sequence_parallel=config.sequence_parallel, **like)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens.t())
        recompute = self.config.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x = te.checkpoint(block, x, self.rotary, use_reentrant=False)
            else:
                x = block(x, self.rotary)
        x = self.final_norm(x)
        if self.config.sequence_parallel:
            x = gather_sequence(x, self.mesh.tp_group)
        else:
            x = copy_to_ranks(x, self.mesh.tp_group)
        logits_shard = F.linear(x, self.embedding.weight)
        return vocab_parallel_cross_entropy(logits_shard, targets.t(), self.mesh.tp_group)


def is_sharded(parameter: Tensor) -> bool:
    """Whether each tensor parallel rank holds another piece of this parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def take_shard(full: Tensor, mesh: Mesh, dim: int, blocks: int) -> Tensor:
    """This rank's piece of a full weight along dim. A weight that stacks several matrices ([gate; up]) is cut
    block by block, so that the shard is [gate shard; up shard]."""
    pieces = [block.chunk(mesh.tp_size, dim)[mesh.tp_rank] for block in full.chunk(blocks, dim)]
    return torch.cat(pieces, dim)


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Every rank draws the full weight in fp32 on the CPU, from a generator seeded by (seed, name), and keeps
    its piece: the model is the same for every tp_size and device. Norm weights stay as built (ones).

    Standard deviation 1/sqrt(H) / 2 (0.02 at H = 640, GPT-2's, and larger for smaller models), and less by
    sqrt(2 layers) for the two matrices that write into the residual stream. An expert's name has its number among all.
    """
    config, mesh = model.config, model.mesh
    std = 0.5 / math.sqrt(config.hidden)
    for name, parameter in model.named_parameters():
        if "norm" in name or parameter.numel() == 0:
            continue
        expert = getattr(parameter, "expert", None)
        generator = seeded_generator(seed, name if expert is None else f"{name.rstrip('0123456789')}{expert}")
        shape = list(parameter.shape)
        dim = getattr(parameter, "partition_dim", 0)
        if is_sharded(parameter):
            shape[dim] *= mesh.tp_size
        residual = name.endswith("proj.weight") or "mlp.fc2" in name
        scale = std / math.sqrt(2 * config.layers) if residual else std
        full = torch.randn(shape, generator=generator, dtype=torch.float32) * scale
        if is_sharded(parameter):
            full = take_shard(full, mesh, dim, blocks=2 if name.endswith("fc1_weight") else 1)
        parameter.copy_(full)
