"""One rank of benchmarks/megatron_gpt.py: Megatron-core's GPT over one Transformer Engine, under one recipe.

The seeds train one after the other; megatron_data.py says what they share and what they draw. Several ranks are started
by torchrun. Each data parallel rank has micro-batches of its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.megatron_data import Shard, fill, tokens_of

FP8 = {  # of Megatron's config
    "bf16": {},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


def over_te(args: argparse.Namespace) -> bool:
    """Megatron's own layers get no Transformer Engine but on the CPU, where Megatron's other generators do not work."""
    return args.candidate != "local" or args.device == "cpu"


class Training:
    """The model with Megatron's DDP, schedule and optimizer."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        from megatron.core import parallel_state, tensor_parallel
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
            share_embeddings_and_output_weights=False, pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )  # fmt: skip
        place = parallel_state.get_tensor_model_parallel_rank(), args.tp, model.decoder.layers[0].layer_number - 1
        model = Float16Module(config, model.cuda() if device.type == "cuda" else model)
        fill(model.module, args.seed, args.seed_is, Shard(*place))
        sharded = {"use_distributed_optimizer": args.distributed_optimizer}
        wrapped = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **sharded)
        self.ddp = DistributedDataParallel(config, wrapped, model)
        config.no_sync_func = self.ddp.no_sync
        recipe = {"fp8_recipe": FP8[args.recipe]["fp8_recipe"]} if FP8[args.recipe] else {}
        adam = OptimizerConfig(
            optimizer="adam", lr=args.lr, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0, **sharded, **recipe
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
            tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp,
            sequence_parallel=args.tp > 1, tp_comm_overlap=args.overlap == "on",
            params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, persist_layer_norm=False,
            masked_softmax_fusion=False, gradient_accumulation_fusion=False,
            finalize_model_grads_func=finalize_model_grads, **FP8[args.recipe],
        )  # fmt: skip

    def _forward(self, data: Any, model: Any) -> Any:
        tokens = next(data)
        out = model(tokens[:, :-1], self.position, self.mask, labels=tokens[:, 1:])
        return out, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})

    def step(self, batches: list[Tensor]) -> Tensor:
        """The mean loss of the micro-batches on the last pipeline stage, 0 elsewhere."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter(batches), model=[self.ddp],
            num_microbatches=len(batches), seq_length=self.args.sequence, micro_batch_size=self.args.micro_batch,
            forward_only=False,
        )  # fmt: skip
        good, *_ = self.optimizer.step()
        assert good, "the gradients were not finite"
        found = [one["loss"] for one in losses]
        return torch.stack(found).mean() if found else torch.zeros((), device=self.device)


def line_up(device: torch.device) -> None:
    """Every rank has done its work when this returns on any."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def of_all_ranks(losses: list[Tensor], wall_us: list[float], peak: float) -> tuple[list[float], list[float], float]:
    """(losses, the mean of the data parallel ranks; wall_us and peak, of the slowest rank and the fullest)."""
    from megatron.core import parallel_state

    counted = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    mean = torch.stack(losses).double() * counted / parallel_state.get_data_parallel_world_size()
    largest = torch.tensor([*wall_us, peak], dtype=torch.float64, device=mean.device)
    dist.all_reduce(mean)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    *wall_us, peak = largest.tolist()
    return [round(loss, 6) for loss in mean.tolist()], wall_us, peak


def of_every_rank(steps: float, device: torch.device) -> int:
    """The most that any rank asks for."""
    most = torch.tensor([steps], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return math.ceil(most.item())


def train(args: argparse.Namespace, device: torch.device, data: list[list[Tensor]]) -> dict:
    """losses of each step of `data`. Of the last seed, which finds caches filled and the GPU warm, also medians of
    further steps, once the process has trained for --settle seconds, for so long its host may take twice its time:
    wall_us of the slowest rank, gpu_us of this one."""
    training, cuda, start = Training(args, device), device.type == "cuda", time.perf_counter()
    args.began = args.began or start
    losses, gpu_us, wall_us = [], [], []
    for batches in data:
        line_up(device)
        losses.append(training.step(batches))
    line_up(device)
    last = args.seed == args.seeds[-1]
    now, more = time.perf_counter(), itertools.cycle(data)
    for _ in range(
        last and of_every_rank(max(0.0, args.began + args.settle - now) * len(data) / (now - start), device)
    ):
        training.step(next(more))
    for _ in range(last and args.timed):
        line_up(device)
        if cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        began = time.perf_counter()
        training.step(next(more))
        if cuda:
            end.record()
            torch.cuda.synchronize()
        wall_us.append(1e6 * (time.perf_counter() - began))
        gpu_us.append(1e3 * begin.elapsed_time(end) if cuda else wall_us[-1])
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    said, wall_us, peak = of_all_ranks(losses, wall_us, peak)
    found = {"losses": said, "peak_gib": peak if cuda else None, "schedules": schedules()}  # while the model is there
    if not gpu_us:
        return found
    quarters = statistics.quantiles(gpu_us, n=4) if len(gpu_us) > 1 else [0.0, 0.0, 0.0]
    gpu = statistics.median(gpu_us)
    return found | {"gpu_us": gpu, "wall_us": statistics.median(wall_us), "spread": (quarters[2] - quarters[0]) / gpu}


def make_userbuffers(args: argparse.Namespace, device: torch.device) -> None:
    """As megatron.training does, for Transformer Engine 2.7 or newer."""
    from transformer_engine.pytorch.module import base

    modes = base.UserBufferQuantizationMode
    base.initialize_ub(
        shape=[args.sequence * args.micro_batch, args.hidden], tp_size=args.tp,
        quantization_modes=[modes.FP8 if FP8[args.recipe] else modes.NONE], ub_cfgs={},
        bootstrap_backend="nccl" if device.type == "cuda" else "gloo",
    )  # fmt: skip


def schedules() -> list[str] | None:
    """What te_lite's GEMMs did, by its report. None where it is not there."""
    te_lite = sys.modules.get("te_lite")
    return sorted({row["schedule"] for row in te_lite.overlap_report()}) if te_lite else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidate", required=True, choices=("te_lite", "te", "local"))
    parser.add_argument("--recipe", required=True, choices=list(FP8))
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--seed-is", required=True, choices=("rounding", "weights"))
    parser.add_argument("--overlap", required=True, choices=("off", "on"))
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    sizes = ("layers", "hidden", "ffn", "heads", "groups", "vocabulary", "sequence", "micro-batch")
    for name in (*sizes, "micro-batches", "steps", "timed", "tp", "pp", "ranks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--settle", type=float, required=True)
    parser.add_argument("--device", required=True)
    parser.set_defaults(began=0.0)
    return parser.parse_args()


def join(args: argparse.Namespace) -> torch.device:
    """Into the world of ranks, which one process is by itself; this rank's device."""
    if args.ranks == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ |= alone
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    one: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if args.ranks == 1 else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **one)
    return device


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore")  # Megatron's, about what is not installed
    if args.candidate == "te_lite" or (args.candidate, args.device) == ("local", "cpu"):
        os.environ["TE_LITE_REPLACE_TE"] = "1"
        import te_lite.compat.transformer_engine  # noqa: F401
    device = join(args)
    if device.type == "cpu":
        from examples import megatron_on_cpu

        megatron_on_cpu.patch()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(args.tp, args.pp)
    found: dict[str, Any] = {"runs": []}
    if args.candidate != "local":
        import transformer_engine

        found["version"] = transformer_engine.__version__
    if args.overlap == "on":
        make_userbuffers(args, device)
    first = parallel_state.get_data_parallel_rank() * args.micro_batches
    batches = range(first, first + args.micro_batches)
    data = [[tokens_of(step, args, batch).to(device) for batch in batches] for step in range(args.steps)]
    for seed in args.seeds:
        args.seed = seed
        if device.type == "cpu":
            megatron_on_cpu.patch_imported()
            with megatron_on_cpu.CpuForCuda():
                found["runs"].append(train(args, device, data))
        else:
            torch.cuda.reset_peak_memory_stats()
            found["runs"].append(train(args, device, data))
        found |= {name: found["runs"][-1].pop(name) for name in ("peak_gib", "schedules")}
        gc.collect()
        if args.candidate != "local":
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

            FP8GlobalStateManager.reset()  # of the scales of the model that is gone
        if dist.get_rank() == 0:
            args.json.write_text(json.dumps(found))
    line_up(device)  # nobody uses a peer's memory any more
    if args.overlap == "on":
        from transformer_engine.pytorch.module.base import destroy_ub

        destroy_ub()
    parallel_state.destroy_model_parallel()
    gc.collect()  # who holds a group of gloo's longer may end in an abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
