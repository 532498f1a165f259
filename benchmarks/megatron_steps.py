"""One process of benchmarks/megatron_gpt.py: Megatron-core's GPT over one Transformer Engine, under one recipe.

Both seeds train one after the other. What they share: initial weights in fp32, drawn by the parameter's name; the data
of each step. What a seed draws: which way each weight is rounded to bf16 (--seed-is rounding), or the weights
themselves (--seed-is weights).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

FP8 = {  # of Megatron's config
    "bf16": {},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
DEVIATION = 0.02  # of the initial weights, as Megatron's


def local_name(name: str) -> str:
    """Of a parameter of the TE spec in the local spec."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 -> bf16, up or down at random: by chance to the nearer one more often, so that the mean is right."""
    noise = torch.randint(1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int, seed_is: str) -> None:
    for name, param in model.named_parameters():
        own = zlib.crc32(local_name(name).encode())
        draw = torch.Generator(param.device).manual_seed(own + (seed if seed_is == "weights" else 0))
        if param.dim() == 1:
            param.fill_(1.0)
            continue
        values = torch.empty(param.shape, device=param.device).normal_(0.0, DEVIATION, generator=draw)
        param.copy_(rounded(values, draw.manual_seed(own + 7919 * (seed + 1))))


def tokens_of(step: int, args: argparse.Namespace) -> Tensor:
    """[micro batch, sequence + 1]: each token is followed by its successor in half of the cases, else by one of few
    frequent ones (their number falls as 1/rank), so that there is something to learn, and losses stay above 0."""
    draw = torch.Generator().manual_seed(17 + step)
    shape = args.micro_batch, args.sequence + 1
    rank = torch.rand(shape, generator=draw).mul_(torch.log(torch.tensor(float(args.vocabulary)))).exp_()
    found = (rank.long() * 7919) % args.vocabulary
    follows = torch.rand(shape, generator=draw) < 0.5
    for i in range(1, shape[1]):
        found[:, i] = torch.where(follows[:, i], (found[:, i - 1] + 1) % args.vocabulary, found[:, i])
    return found


def over_te(args: argparse.Namespace) -> bool:
    """Megatron's own layers get no Transformer Engine but on the CPU, where Megatron's other generators do not work."""
    return args.candidate != "local" or args.device == "cpu"


class Training:
    """The model with Megatron's DDP, schedule and optimizer."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt import gpt_layer_specs as specs
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.args, self.device, self.local = args, device, args.candidate == "local"
        tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=over_te(args), force_reset_rng=True)
        torch.manual_seed(1)
        config = self.config()
        spec = specs.get_gpt_layer_with_transformer_engine_spec
        model = GPTModel(
            config, specs.get_gpt_layer_local_spec(normalization="RMSNorm") if self.local else spec(),
            vocab_size=args.vocabulary, max_sequence_length=args.sequence, position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )  # fmt: skip
        model = Float16Module(config, model.cuda() if device.type == "cuda" else model)
        fill(model.module, args.seed, args.seed_is)
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        config.no_sync_func = self.ddp.no_sync
        recipe = {"fp8_recipe": FP8[args.recipe]["fp8_recipe"]} if FP8[args.recipe] else {}
        adam = OptimizerConfig(
            optimizer="adam", lr=args.lr, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0, **recipe
        )
        self.optimizer = get_megatron_optimizer(adam, [self.ddp])
        length = args.sequence
        self.position = torch.arange(length, device=device).expand(args.micro_batch, -1)
        hidden = torch.ones(length, length, device=device).triu(1).bool()[None, None] if self.local else None
        self.mask = hidden

    def config(self) -> Any:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.transformer_config import TransformerConfig

        args = self.args
        return TransformerConfig(
            num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads,
            num_query_groups=args.groups, ffn_hidden_size=args.ffn, normalization="RMSNorm", activation_func=F.silu,
            gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
            params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, persist_layer_norm=False,
            masked_softmax_fusion=False, gradient_accumulation_fusion=False,
            finalize_model_grads_func=finalize_model_grads, **FP8[args.recipe],
        )  # fmt: skip

    def _forward(self, data: Any, model: Any) -> Any:
        tokens = next(data)
        out = model(tokens[:, :-1], self.position, self.mask, labels=tokens[:, 1:])
        return out, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})

    def step(self, tokens: Tensor) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter([tokens]), model=[self.ddp], num_microbatches=1,
            seq_length=self.args.sequence, micro_batch_size=self.args.micro_batch, forward_only=False,
        )  # fmt: skip
        good, *_ = self.optimizer.step()
        assert good, "the gradients were not finite"
        return losses[0]["loss"]


def train(args: argparse.Namespace, device: torch.device, data: list[Tensor]) -> dict:
    """losses of each step; medians of the steps after the warm-up."""
    training, cuda = Training(args, device), device.type == "cuda"
    losses, gpu_us, wall_us = [], [], []
    for tokens in data:
        if cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
        began = time.perf_counter()
        loss = training.step(tokens)
        if cuda:
            end.record()
            torch.cuda.synchronize()
        wall_us.append(1e6 * (time.perf_counter() - began))
        gpu_us.append(1e3 * begin.elapsed_time(end) if cuda else wall_us[-1])
        losses.append(round(float(loss), 6))
    warm = min(args.warmup, len(data) - 1)
    found = {"losses": losses, "gpu_us": statistics.median(gpu_us[warm:]), "wall_us": statistics.median(wall_us[warm:])}
    quarters = statistics.quantiles(gpu_us[warm:], n=4) if len(data) - warm > 1 else [0.0, 0.0, 0.0]
    return found | {"spread": (quarters[2] - quarters[0]) / found["gpu_us"]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidate", required=True, choices=("te_lite", "te", "local"))
    parser.add_argument("--recipe", required=True, choices=list(FP8))
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--seed-is", required=True, choices=("rounding", "weights"))
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    names = ("layers", "hidden", "ffn", "heads", "groups", "vocabulary", "sequence", "micro-batch", "steps", "warmup")
    for name in names:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    return parser.parse_args()


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore")  # Megatron's, about what is not installed
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if args.candidate == "te_lite" or (args.candidate, args.device) == ("local", "cpu"):
        os.environ["TE_LITE_REPLACE_TE"] = "1"
        import te_lite.compat.transformer_engine  # noqa: F401
    device = torch.device(args.device)
    if device.type == "cpu":
        from examples import megatron_on_cpu

        megatron_on_cpu.patch()
    store = dist.HashStore()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1, 1)
    found: dict[str, Any] = {"runs": []}
    if args.candidate != "local":
        import transformer_engine

        found["version"] = transformer_engine.__version__
    data = [tokens_of(step, args).to(device) for step in range(args.steps)]
    for seed in args.seeds:
        args.seed = seed
        if device.type == "cpu":
            megatron_on_cpu.patch_imported()
            with megatron_on_cpu.CpuForCuda():
                found["runs"].append(train(args, device, data))
        else:
            torch.cuda.reset_peak_memory_stats()
            found["runs"].append(train(args, device, data))
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        gc.collect()
        if args.candidate != "local":
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

            FP8GlobalStateManager.reset()  # of the scales of the model that is gone
        args.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
