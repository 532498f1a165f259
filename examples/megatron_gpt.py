"""Trains Megatron-core's GPT, its layers te_lite's under Transformer Engine's name. docs/how-to/megatron.md.

    torchrun --nproc-per-node 2 examples/megatron_gpt.py --tp 2 --recipe tensorwise --overlap
    torchrun --nproc-per-node 8 examples/megatron_gpt.py --tp 4 --pp 2 --layers 32 --hidden 4096 --ffn 14336 \
        --heads 32 --groups 8 --sequence 4096 --micro-batches 16 --recipe delayed --distributed-optimizer

    torchrun --nproc-per-node 2 examples/megatron_gpt.py --experts 4 --ep 2 --recipe delayed    # mixture of experts

On a machine without GPUs the ranks run on the CPU. The data are sequences that count up from a token of their own.
"""

import argparse
import json
import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import te_lite as te
import te_lite.compat.transformer_engine  # noqa: F401  # before Megatron looks for Transformer Engine

CPU = not torch.cuda.is_available()
if CPU:
    import megatron_on_cpu

    megatron_on_cpu.patch()
warnings.filterwarnings("ignore", module="megatron")

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import cuda_graphs  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

if CPU:
    megatron_on_cpu.patch_imported()


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 2, "hidden": 128, "ffn": 256, "heads": 4, "groups": 2, "vocabulary": 256, "sequence": 128}
    counts = {"micro-batch": 2, "micro-batches": 2, "steps": 20, "tp": 1, "pp": 1, "experts": 0, "ep": 1}
    for name, usual in (sizes | counts).items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--recipe", default="bf16", choices=("bf16", "delayed", "tensorwise", "mxfp8", "blockwise"))
    parser.add_argument("--spec", default="te", choices=("te", "local"), help="local: Megatron's own layers")
    parser.add_argument("--recompute", choices=("full", "selective"))
    parser.add_argument("--cuda-graphs", default="none", choices=("none", "local", "transformer_engine"))
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log-json", type=Path, help="write the losses to this JSON file")
    for name in ("overlap", "fp8-param", "distributed-optimizer", "fuse-wgrad"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


def config(args: argparse.Namespace) -> TransformerConfig:
    given: dict[str, Any] = {}
    if args.recipe != "bf16":
        given.update(fp8="e4m3" if args.recipe in ("mxfp8", "blockwise") else "hybrid", fp8_recipe=args.recipe)
    if args.recompute == "full":
        given.update(recompute_method="uniform", recompute_num_layers=1)
    te_spec = args.spec == "te"
    if args.experts:
        given.update(
            num_moe_experts=args.experts, moe_ffn_hidden_size=args.ffn, expert_model_parallel_size=args.ep,
            moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=1e-2, moe_grouped_gemm=te_spec,
            moe_permute_fusion=te_spec,
        )  # fmt: skip
    return TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads, num_query_groups=args.groups,
        ffn_hidden_size=args.ffn, normalization="RMSNorm", activation_func=torch.nn.functional.silu,
        gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp,
        sequence_parallel=args.tp > 1 and te_spec, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, fp8_param=args.fp8_param, tp_comm_overlap=args.overlap,
        recompute_granularity=args.recompute, persist_layer_norm=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=args.fuse_wgrad, cuda_graph_impl=args.cuda_graphs,
        finalize_model_grads_func=finalize_model_grads, **given,
    )  # fmt: skip


def build(args: argparse.Namespace) -> tuple[TransformerConfig, DistributedDataParallel, Any]:
    """(config, the model in Megatron's DDP, its optimizer)."""
    cfg = config(args)
    experts = args.experts or None
    local = get_gpt_layer_local_spec(experts, moe_grouped_gemm=False, normalization="RMSNorm")
    grouped = get_gpt_layer_with_transformer_engine_spec(experts, moe_grouped_gemm=True)
    model = GPTModel(
        cfg, grouped if args.spec == "te" else local, vocab_size=args.vocabulary,
        max_sequence_length=args.sequence, position_embedding_type="rope", share_embeddings_and_output_weights=False,
        pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage(),
    )  # fmt: skip
    model = Float16Module(cfg, model if CPU else model.cuda())
    shared = args.fp8_param and args.distributed_optimizer
    reuse = {"reuse_grad_buf_for_mxfp8_param_ag": shared and args.recipe == "mxfp8"}
    # The stream on which its hooks add gradients up; a capture must not wait for the default one.
    with nullcontext() if CPU else torch.cuda.stream(torch.cuda.Stream()):
        ddp = DistributedDataParallel(
            cfg, DistributedDataParallelConfig(grad_reduce_in_fp32=True, fp8_param_gather=shared, **reuse,
                                               use_distributed_optimizer=args.distributed_optimizer), model,
        )  # fmt: skip
    if not CPU:
        torch.cuda.synchronize()
    cfg.no_sync_func = ddp.no_sync
    adam = OptimizerConfig(
        optimizer="adam", lr=args.lr, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0,
        use_distributed_optimizer=args.distributed_optimizer, fp8_recipe=None if args.recipe == "bf16" else args.recipe,
        **reuse,
    )  # fmt: skip
    return cfg, ddp, get_megatron_optimizer(adam, [ddp])


def captures(args: argparse.Namespace, cfg: TransformerConfig, ddp: Any, optimizer: Any) -> Any:
    """What captures Transformer Engine's graphs; None where there are none, or Megatron captures by itself."""
    # Megatron-core 0.16.1 hands out the first layer's input again before its backward has read it.
    cuda_graphs.TensorReusePool.insert = lambda pool, tensor: None
    if args.cuda_graphs != "transformer_engine":
        return None
    batch, data = args.micro_batch, mpu.get_data_parallel_world_size()
    init_num_microbatches_calculator(dist.get_rank(), None, batch * args.micro_batches * data, batch, data)
    return cuda_graphs.TECudaGraphHelper([ddp], cfg, args.sequence, batch, [optimizer])


def train(args: argparse.Namespace) -> list[float]:
    """The loss of each step, on the ranks that print it."""
    device = torch.device("cpu") if CPU else torch.device("cuda", torch.cuda.current_device())
    cfg, ddp, optimizer = build(args)
    graphs = captures(args, cfg, ddp, optimizer)
    found: list[float] = []
    draw = torch.Generator().manual_seed(mpu.get_data_parallel_rank())
    position = torch.arange(args.sequence, device=device).expand(args.micro_batch, -1)
    mask = (
        None
        if args.spec == "te"
        else torch.ones(args.sequence, args.sequence, device=device).triu(1).bool()[None, None]
    )

    def batches() -> Any:
        while True:
            start = torch.randint(args.vocabulary, (args.micro_batch, 1), generator=draw)
            yield ((start + torch.arange(args.sequence + 1)) % args.vocabulary).to(device)

    def forward(data: Any, model: Any) -> Any:
        tokens = next(data)
        out = model(tokens[:, :-1], position, mask, labels=tokens[:, 1:])
        return out, lambda losses: (losses.float().mean(), {"loss": losses.float().mean().detach()})

    data, schedule = batches(), get_forward_backward_func()
    tokens = args.sequence * args.micro_batch * args.micro_batches * mpu.get_data_parallel_world_size()
    for step in range(args.steps):
        began = time.perf_counter()
        if step == 1 and graphs is not None:
            graphs.create_cudagraphs()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward, data_iterator=data, model=[ddp], num_microbatches=args.micro_batches,
            seq_length=args.sequence, micro_batch_size=args.micro_batch, forward_only=False,
        )  # fmt: skip
        good, norm, _ = optimizer.step()
        if not CPU:
            torch.cuda.synchronize()
        if losses and mpu.get_tensor_model_parallel_rank() == mpu.get_data_parallel_rank() == 0:
            loss = sum(float(one["loss"]) for one in losses) / len(losses)
            found.append(loss)
            speed = tokens / (time.perf_counter() - began)
            print(f"step {step:3}  loss {loss:.4f}  grad norm {norm:.3f}  {speed:,.0f} tokens/s", flush=True)
        assert good, "the gradients were not finite"
    if dist.get_rank() == 0 and args.spec == "te":
        print(te.format_report(te.overlap_report()), flush=True)
    return found


def main() -> None:
    args = options()
    if not CPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if CPU else "nccl")
    mpu.initialize_model_parallel(args.tp, args.pp, expert_model_parallel_size=args.ep)
    tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=True)
    if args.overlap:
        from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

        mode = UserBufferQuantizationMode.NONE if args.recipe == "bf16" else UserBufferQuantizationMode.FP8
        shape = [args.sequence * args.micro_batch, args.hidden]
        initialize_ub(shape=shape, tp_size=args.tp, quantization_modes=[mode], ub_cfgs={})
    if CPU:
        with megatron_on_cpu.CpuForCuda():
            losses = train(args)
    else:
        losses = train(args)
    if losses and args.log_json:
        args.log_json.write_text(json.dumps({"losses": losses}))
    if args.overlap:
        te.destroy_ub()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
