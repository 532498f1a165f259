"""One rank of test_megatron.py: Megatron-core's GPT with its TE layer spec over te_lite, against its own local spec.

    torchrun --nproc-per-node 2 tests/compat/ranks_megatron.py tp

Each case runs Megatron's schedule over two micro-batches, with its DDP and, where `steps`, its optimizer.
"""

import argparse
import contextlib
import gc
import math
import re
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import te_lite as te
import te_lite.compat.transformer_engine  # noqa: F401  # from here on Megatron finds Transformer Engine
from examples import megatron_on_cpu
from te_lite.testing.distributed import init_ranks, leave_ranks
from te_lite.testing.numerics import UNIT_ROUNDOFF, assert_bitwise_equal, assert_close_to_oracle

megatron_on_cpu.patch()
warnings.filterwarnings("ignore")  # Megatron's, about what is not installed

import megatron.core.extensions.transformer_engine as extensions  # noqa: E402
from megatron.core import dist_checkpointing, tensor_parallel  # noqa: E402, F401
from megatron.core import parallel_state as mpu  # noqa: E402
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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

megatron_on_cpu.patch_imported()

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY = 2, 64, 4, 2, 128, 128
BATCH, SEQUENCE, MICRO_BATCHES = 2, 32, 2
HISTORY = 4  # rows of delayed scaling, of which row 0 waits for the running pass; Megatron's default is that row alone
RECIPES = ("bf16", "delayed", "tensorwise", "mxfp8", "blockwise")
OURS = {"tensorwise": "current"}  # names of the report

# Roundings to E4M3 (half a spacing: 2^-4) and to E5M2 (2^-3), as rms of uniform errors; those of the operands of each
# GEMM between a gradient and the loss are independent and add in squares.
ROUNDING = math.hypot(2.0**-4, 2.0**-3) / math.sqrt(3.0)
GEMMS = 2 * 4 * LAYERS


@dataclass(frozen=True)
class Case:
    recipe: str = "bf16"
    recompute: tuple[str, ...] = ()  # ("full",), or the modules of selective recomputation
    overlap: bool = False
    fuse: bool = False
    fp8_param: bool = False
    distributed: bool = False  # Megatron's distributed optimizer
    steps: int = 0  # with the optimizer, after the gradients were compared
    precise: tuple[tuple[str, Any], ...] = ()  # more fields of Megatron's OptimizerConfig


CASES = {
    "one": [
        *(Case(recipe) for recipe in RECIPES),
        *(Case(recipe, recompute=("full",)) for recipe in ("bf16", "delayed", "tensorwise")),
        *(Case(recipe, recompute=("core_attn", "mlp")) for recipe in ("delayed", "mxfp8")),
        Case("tensorwise", recompute=("layernorm",)),
        Case("tensorwise", fuse=True, fp8_param=True, steps=3),
    ],
    "tp": [
        *(Case(recipe, overlap=overlap) for overlap in (False, True) for recipe in RECIPES),
        Case("delayed", recompute=("full",)),
    ],
    "pp": [Case(recipe, fuse=recipe != "mxfp8") for recipe in RECIPES],
    "dp": [
        Case("bf16", fuse=True, steps=3),
        Case("bf16", fuse=True, distributed=True, steps=3),
        *(Case(recipe, fp8_param=True, distributed=True, steps=3) for recipe in RECIPES[1:]),
    ],
}


def config(
    case: Case, tp: int, pp: int, dtype: torch.dtype, sequence_parallel: bool, **given: Any
) -> TransformerConfig:
    if case.recipe != "bf16":
        given.update(fp8="e4m3" if case.recipe in ("mxfp8", "blockwise") else "hybrid", fp8_recipe=case.recipe)
        given.update(fp8_amax_history_len=HISTORY)
    if case.recompute == ("full",):
        given.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif case.recompute:
        given.update(recompute_granularity="selective", recompute_modules=list(case.recompute))
    return TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=FFN, normalization="RMSNorm", activation_func=torch.nn.functional.silu, gated_linear_unit=True,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, sequence_parallel=sequence_parallel, params_dtype=dtype, pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=case.fuse, fp8_param=case.fp8_param, tp_comm_overlap=case.overlap,
        finalize_model_grads_func=finalize_model_grads, **given,
    )  # fmt: skip


def local_name(name: str) -> str:
    """Of a parameter of the TE spec in the local spec; weight3 of grouped experts is that of local_experts.3."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return re.sub(r"experts\.(linear_fc\d)\.weight(\d+)", r"experts.local_experts.\2.\1.weight", name)


class Run:
    """A GPT with its schedule. weights: of the local spec, by name."""

    def __init__(self, spec: Any, case: Case, weights: dict[str, torch.Tensor] | None = None,
                 dtype: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
        self.local = spec is LOCAL
        self.config = self._config(case, dtype)
        tensor_parallel.model_parallel_cuda_manual_seed(3, te_rng_tracker=True, force_reset_rng=True)
        torch.manual_seed(1)
        ends = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}
        self.model = GPTModel(
            self.config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope",
            share_embeddings_and_output_weights=False, **ends,
        )  # fmt: skip
        if weights is not None:
            with torch.no_grad():
                for name, param in self.model.named_parameters():
                    param.copy_(weights[local_name(name)])
        self.model.to(dtype) if not case.fp8_param else None
        reuse = {"reuse_grad_buf_for_mxfp8_param_ag": True} if case.distributed and case.recipe == "mxfp8" else {}
        wrapped = Float16Module(self.config, self.model) if dtype == torch.bfloat16 else self.model
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=case.distributed,
            fp8_param_gather=case.fp8_param and case.distributed, **reuse,
        )  # fmt: skip
        self.ddp = DistributedDataParallel(self.config, ddp, wrapped)
        self.config.no_sync_func = self.ddp.no_sync
        self.optimizer = None
        if case.steps:
            recipe = dict(case.precise) | ({} if case.recipe == "bf16" else {"fp8_recipe": case.recipe})
            options = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, params_dtype=dtype, clip_grad=1.0,
                                      use_distributed_optimizer=case.distributed, **recipe, **reuse)  # fmt: skip
            self.optimizer = get_megatron_optimizer(options, [self.ddp])

    def _config(self, case: Case, dtype: torch.dtype, **more: Any) -> TransformerConfig:
        tp, pp = mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
        return config(case, tp, pp, dtype, sequence_parallel=tp > 1 and not self.local, **more)

    def _forward(self, batches: Any, model: Any) -> Any:
        tokens = next(batches)
        position = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None] if self.local else None
        out = model(tokens[:, :-1], position, mask, labels=tokens[:, 1:])
        return out, lambda losses: (losses.float().mean(), {"losses": losses.detach().float()})

    def backward(self) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """(the loss of each token, None but on the last stage; the gradients by the local spec's names)."""
        draw = torch.Generator().manual_seed(7 + mpu.get_data_parallel_rank())
        tokens = [torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw) for _ in range(MICRO_BATCHES)]
        self.ddp.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter(tokens), model=[self.ddp],
            num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        grads = {local_name(name): param.main_grad.clone() for name, param in self.model.named_parameters()}
        return torch.cat([one["losses"] for one in losses]) if losses else None, grads

    def step(self) -> float:
        losses, _ = self.backward()
        good, *_ = self.optimizer.step()
        self.optimizer.zero_grad()
        assert good and losses is not None
        return float(losses.mean())


def check_swapped(run: Run, case: Case) -> None:
    """te_lite ran, by the recipe asked for, and under delayed scaling amaxes were recorded."""
    assert extensions.HAVE_TE
    layer = run.model.decoder.layers[0]
    assert isinstance(layer.self_attention.linear_qkv, te.LayerNormLinear)
    assert isinstance(layer.self_attention.core_attention, te.DotProductAttention)
    assert isinstance(layer.self_attention.linear_proj, te.Linear) and isinstance(layer.mlp.linear_fc2, te.Linear)
    assert isinstance(run.model.decoder.final_layernorm, te.RMSNorm) or not mpu.is_pipeline_last_stage()
    rows = te.overlap_report()
    recipes = {row["recipe"] for row in rows}
    assert recipes == {OURS.get(case.recipe, case.recipe)}, f"{case}: {recipes}"
    tp = mpu.get_tensor_model_parallel_world_size()
    schedules = {row["schedule"] for row in rows}
    assert ({"ring", "bulk"} <= schedules) == case.overlap, schedules
    assert tp == 1 or case.overlap or "collective" in schedules, schedules
    state = layer.mlp.linear_fc1.get_extra_state()
    assert (state[1] > 0) == (case.recipe == "delayed"), "the length of the histories"
    if state[1]:
        length, count = int(state[1]), int(state[2])
        assert length == HISTORY, f"{length} rows of history"
        history, scale = state[6 : 6 + length * count].view(length, count), state[6 + length * count :][:count]
        slots = slice(0, 1 if case.fp8_param else 2)  # of x and of w, unless that is quantized by its own amax
        passed = history[1:, slots] > 0
        assert bool(passed.any(0).all()), f"no pass has left an amax: {history}"
        assert bool((scale[slots] != 1.0).all()), "scales have taken no step"
    if case.fp8_param:
        assert isinstance(layer.mlp.linear_fc1.weight, te.QuantizedTensor)


def compare(name: str, case: Case, got: torch.Tensor, truth: torch.Tensor, reference: torch.Tensor) -> None:
    """bf16: twice the error of the local spec. fp8: more than bf16's own, at most the roundings' random walk."""
    if case.recipe == "bf16":
        assert_close_to_oracle(name, got, truth, reference)
        return
    error = float((got - truth).norm() / truth.norm())
    assert error <= ROUNDING * math.sqrt(GEMMS), f"{case} {name}: relative error {error:.3f}"
    if "layers" in name:
        bf16 = float((reference - truth).norm() / truth.norm())
        assert error > 2 * bf16, f"{case} {name}: error {error:.2e} is bf16's {bf16:.2e}, so fp8 did not run"


@contextlib.contextmanager
def userbuffers(case: Case) -> Any:
    if not case.overlap:
        yield
        return
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    mode = UserBufferQuantizationMode.NONE if case.recipe == "bf16" else UserBufferQuantizationMode.FP8
    size = mpu.get_tensor_model_parallel_world_size()
    initialize_ub(shape=[SEQUENCE * BATCH, HIDDEN], tp_size=size, quantization_modes=[mode], ub_cfgs={},
                  bootstrap_backend="gloo")  # fmt: skip
    yield
    te.destroy_ub()


def check(case: Case, truth: Any, reference: Any, weights: dict, known: dict[Case, Any]) -> Run:
    gc.collect()  # of the last case, so that the report is of this one
    with userbuffers(case):
        run = Run(TE, case, weights)
        run.backward()  # delayed scaling's scales, which start at 1, have taken a step
        losses, grads = run.backward()
        check_swapped(run, case)
        if losses is not None:
            compare("loss", case, losses, truth[0], reference[0])
        for name, grad in grads.items():
            if not case.distributed:  # else a rank's gradients are whole in its shard alone
                compare(name, case, grad, truth[1][name], reference[1][name])
        plain = known.get(replace(case, recompute=()))
        if case.recompute:
            for name, grad in grads.items():
                assert_bitwise_equal(f"{case} {name}", grad, plain[1][name])
        known[case] = losses, grads
        if case.steps:
            curve = [run.step() for _ in range(case.steps)]
            assert curve[-1] < 0.95 * curve[0], (case, curve)
            known[case] = curve
            # The distributed optimizer is the same optimizer: its first steps agree but for the order of sums, by
            # which a weight may round to its neighbour.
            alone = known.get(replace(case, distributed=False, precise=()))
            if case.distributed and alone:
                bound = UNIT_ROUNDOFF[torch.bfloat16]
                assert all(abs(a / b - 1) < bound for a, b in zip(curve, alone, strict=True)), (curve, alone)
    return run


def check_fusions() -> None:
    """What Megatron takes from Transformer Engine by an option, against its own code: RoPE, cross entropy, router and
    permutation of a mixture of experts."""
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw)
    for score in ("softmax", "sigmoid"):
        found, weights = [], {}
        for fused, dtype in ((False, torch.bfloat16), (False, torch.float32), (True, torch.bfloat16)):
            tensor_parallel.model_parallel_cuda_manual_seed(3, te_rng_tracker=True, force_reset_rng=True)
            moe = replace(
                config(Case(), 1, 1, dtype, False), num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64,
                moe_router_score_function=score, moe_token_dispatcher_type="allgather", moe_router_fusion=fused,
                moe_permute_fusion=fused, apply_rope_fusion=fused, cross_entropy_loss_fusion=fused,
                cross_entropy_fusion_impl="te",
            )  # fmt: skip
            spec = get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=False)
            model = GPTModel(moe, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
                             position_embedding_type="rope").to(dtype)  # fmt: skip
            weights = weights or {name: param.detach().clone() for name, param in model.named_parameters()}
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(weights[name])
            position = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
            loss = model(tokens[:, :-1], position, None, labels=tokens[:, 1:]).float()
            loss.mean().backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
            found.append({"loss": loss.detach(), **grads})
        reference, truth, out = found
        for name in out:
            assert_close_to_oracle(f"{score} {name}", out[name], truth[name], reference[name])


def check_packed() -> None:
    """Two sequences packed into one (thd) give what each gives alone, with a sliding window."""
    tensor_parallel.model_parallel_cuda_manual_seed(3, te_rng_tracker=True, force_reset_rng=True)
    model = GPTModel(replace(config(Case(), 1, 1, torch.float32, False), window_size=(4, 0)), TE, VOCABULARY, SEQUENCE,
                     position_embedding_type="rope")  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE))
    ends = torch.tensor([0, 20, SEQUENCE], dtype=torch.int32)
    position = torch.cat((torch.arange(20), torch.arange(SEQUENCE - 20)))[None]
    params = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=20, max_seqlen_kv=20)
    packed = model(tokens, position, None, packed_seq_params=params)
    alone = [model(tokens[:, part], position[:, part], None) for part in (slice(0, 20), slice(20, SEQUENCE))]
    assert_bitwise_equal("packed", packed, torch.cat(alone, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("world", choices=CASES)
    world = parser.parse_args().world
    rank, size, _ = init_ranks("cpu")
    mpu.initialize_model_parallel(size if world == "tp" else 1, size if world == "pp" else 1)
    with megatron_on_cpu.CpuForCuda():
        local = Run(LOCAL, Case())
        weights = {name: param.detach().clone() for name, param in local.model.named_parameters()}
        reference = local.backward()
        truth = Run(LOCAL, Case(), weights, torch.float32).backward()
        known: dict[Case, Any] = {}
        if world == "one":
            check_fusions()
            check_packed()
            gc.collect()
        for case in CASES[world]:
            check(case, truth, reference, weights, known)
            if rank == 0:
                print(f"ok {case}", flush=True)
    dist.barrier()
    leave_ranks()


LOCAL = get_gpt_layer_local_spec(normalization="RMSNorm")
TE = get_gpt_layer_with_transformer_engine_spec()

if __name__ == "__main__":
    main()
