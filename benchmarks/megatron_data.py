"""What megatron_steps.py trains from: initial weights and tokens, the same for every candidate and number of ranks.

What seeds share: weights in fp32, drawn by the parameter's name; the tokens of each step. What a seed draws: which way
each weight is rounded to bf16 (--seed-is rounding), or the weights themselves (--seed-is weights). Each weight is drawn
as a whole on every rank, and a rank keeps its shard.
"""

from __future__ import annotations

import argparse
import re
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

DEVIATION = 0.02  # of the initial weights, as Megatron's


def local_name(name: str) -> str:
    """Of a parameter of the TE spec in the local spec."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 -> bf16, up or down at random: by chance to the nearer one more often, so that the mean is right."""
    noise = torch.randint(1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


@dataclass(frozen=True)
class Shard:
    """The part of the model that a rank holds: all of it by default."""

    rank: int = 0  # among the tensor parallel ranks
    tp: int = 1
    first_layer: int = 0  # the number of layers in the pipeline stages before

    def whole_name(self, name: str) -> str:
        """The name in the model of one rank. A pipeline stage counts its layers from 0."""
        return re.sub(r"layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + self.first_layer}.", name)

    def whole_shape(self, name: str, shape: torch.Size) -> list[int]:
        """Of a weight [out, in] of which this rank has `shape`."""
        whole = list(shape)
        whole[split_dimension(name)] *= self.tp
        return whole

    def part_of(self, name: str, values: Tensor) -> Tensor:
        """This rank's rows or columns. Those of linear_fc1, [gate; up], are its rows of gate and of up."""
        if "linear_fc1" in name:
            return values.unflatten(0, (2, self.tp, -1))[:, self.rank].flatten(0, 1)
        return values.chunk(self.tp, split_dimension(name))[self.rank]


WHOLE = Shard()


def split_dimension(name: str) -> int:
    """The dimension along which tensor parallelism splits a weight [out, in]."""
    return 1 if "linear_proj" in name or "linear_fc2" in name else 0


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int, seed_is: str, shard: Shard = WHOLE) -> None:
    """Draws the weights of a seed. Those of norms are 1."""
    for name, param in model.named_parameters():
        if param.dim() == 1:
            param.fill_(1.0)
            continue
        own = zlib.crc32(shard.whole_name(local_name(name)).encode())
        draw = torch.Generator(param.device).manual_seed(own + (seed if seed_is == "weights" else 0))
        values = torch.empty(shard.whole_shape(name, param.shape), device=param.device)
        values.normal_(0.0, DEVIATION, generator=draw)
        param.copy_(shard.part_of(name, rounded(values, draw.manual_seed(own + 7919 * (seed + 1)))))


def tokens_of(step: int, args: argparse.Namespace, batch: int = 0) -> Tensor:
    """[micro batch, sequence + 1]: each token is followed by its successor in half of the cases, else by one of few
    frequent ones (their number falls as 1/rank), so that there is something to learn, and losses stay above 0.
    batch: counts the micro-batches of a step over all data parallel ranks."""
    draw = torch.Generator().manual_seed(17 + step + 1_000_003 * batch)
    shape = args.micro_batch, args.sequence + 1
    rank = torch.rand(shape, generator=draw).mul_(torch.log(torch.tensor(float(args.vocabulary)))).exp_()
    own = (rank.long() * 7919) % args.vocabulary
    follows = torch.rand(shape, generator=draw) < 0.5
    follows[:, 0] = False
    place = torch.arange(shape[1]).expand(shape)
    start = place.masked_fill(follows, 0).cummax(1).values  # of the run of successors that a token is in
    return (own.gather(1, start) + place - start) % args.vocabulary
