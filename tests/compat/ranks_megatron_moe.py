"""One rank of test_megatron.py: Megatron-core's grouped experts (TEGroupedMLP) over te_lite, against SequentialMLP.

    torchrun --nproc-per-node 2 tests/compat/ranks_megatron_moe.py ep

Schedule, weights and bounds are ranks_megatron.py's. The reference is Megatron's local spec; with tensor parallelism,
where that has no sequence parallelism, the TE spec with one linear an expert.
"""

import argparse
import gc
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import te_lite as te
from te_lite.testing.distributed import init_ranks, leave_ranks
from te_lite.testing.numerics import assert_bitwise_equal, assert_close_to_oracle
from tests.compat import ranks_megatron as dense
from tests.compat.ranks_megatron import Case, Run, dist_checkpointing, megatron_on_cpu, mpu

EXPERTS, TOP_K = 4, 2


@dataclass(frozen=True)
class MoeCase(Case):
    dispatcher: str = "alltoall"
    permute: bool = False  # moe_permute_fusion: the alias's permutation
    grouped: bool = True  # else one linear an expert
    pad: bool = False  # moe_router_padding_for_quantization


RECIPES = ("bf16", "delayed", "tensorwise")
CASES = {
    "one": [
        *(MoeCase(recipe, permute=True) for recipe in dense.RECIPES),
        MoeCase("bf16"),
        MoeCase("bf16", dispatcher="allgather"),
        *(MoeCase(recipe, permute=True, recompute=("moe",)) for recipe in RECIPES),
        *(MoeCase(recipe, permute=True, recompute=("moe_act",)) for recipe in ("bf16", "tensorwise")),
        MoeCase("tensorwise", permute=True, pad=True),
        MoeCase("bf16", fuse=True, permute=True, steps=3),
        MoeCase("tensorwise", fuse=True, permute=True, steps=3),
        *(MoeCase(recipe, permute=True, fp8_param=True, steps=3) for recipe in dense.RECIPES[1:]),
    ],
    "ep": [
        *(MoeCase(recipe, permute=True, fuse=recipe != "bf16") for recipe in RECIPES),
        MoeCase("bf16", fuse=True, steps=3),
    ],
    "tp": [MoeCase(recipe, permute=True) for recipe in RECIPES],
}


def spec(local: bool, grouped: bool) -> Any:
    if local:
        return dense.get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    return dense.get_gpt_layer_with_transformer_engine_spec(EXPERTS, moe_grouped_gemm=grouped)


class MoeRun(Run):
    def __init__(self, local: bool, case: MoeCase, weights: Any = None, dtype: torch.dtype = torch.bfloat16) -> None:
        self.wanted = local
        super().__init__(spec(local, case.grouped), case, weights, dtype)

    def _config(self, case: MoeCase, dtype: torch.dtype) -> Any:
        self.local = self.wanted
        return super()._config(
            case, dtype, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
            moe_ffn_hidden_size=dense.FFN, moe_token_dispatcher_type=case.dispatcher, moe_grouped_gemm=case.grouped,
            moe_permute_fusion=case.permute, moe_router_padding_for_quantization=case.pad, moe_aux_loss_coeff=1e-2,
            expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
        )  # fmt: skip


def check_swapped(run: MoeRun, case: MoeCase) -> None:
    """te_lite's GroupedLinear ran, and under delayed scaling took amaxes of every expert that had tokens."""
    ep = mpu.get_expert_model_parallel_world_size()
    for layer in run.model.decoder.layers:
        for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
            assert isinstance(linear, te.GroupedLinear) and linear.num_gemms == EXPERTS // ep
            assert all(weight.allreduce == (ep == 1) for weight in linear.parameters())
            state = linear.get_extra_state()
            assert (state[1] > 0) == (case.recipe == "delayed"), "the length of the histories"
            if state[1]:
                length, count = int(state[1]), int(state[2])
                scale = state[6 + length * count :][:count].view(linear.num_gemms, 3)
                stepping = 1 if case.fp8_param else 2  # of x and of w, unless that is quantized by its own amax
                assert bool((scale[:, :stepping] != 1.0).all()), "scales of x or w have taken no step"
            if case.fp8_param:
                assert all(isinstance(getattr(linear, name), te.QuantizedTensor) for name in linear.weight_names)


def check_state(run: MoeRun, case: MoeCase) -> None:
    """A checkpoint of Megatron's, sharded, gives another model the same weights, scales and results."""
    other, metadata = MoeRun(False, case), {"dp_cp_group": mpu.get_data_parallel_group(True)}
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        dist_checkpointing.save(run.model.sharded_state_dict(metadata=metadata), folder[0])
        wanted = other.model.sharded_state_dict(metadata=metadata)
        other.model.load_state_dict(dist_checkpointing.load(wanted, folder[0]))
        dist.barrier()
    for (name, a), b in zip(run.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        if a is not None:
            assert_bitwise_equal(f"{case} {name}", b, a)


def check(case: MoeCase, truth: Any, reference: Any, weights: dict, known: dict[MoeCase, Any]) -> None:
    """bf16: errors of at most twice the local spec's. fp8: of at most twice one linear's an expert by that recipe, and
    nearer to its gradients than bf16 is."""
    gc.collect()
    run = MoeRun(False, case, weights)
    run.backward()  # delayed scaling's scales, which start at 1, have taken a step
    losses, grads = run.backward()
    check_swapped(run, case)
    honest = reference
    if case.recipe != "bf16":
        # The alias's permutation has zeros in padded rows, as Transformer Engine's; Megatron's own has tokens there,
        # which are other rows to quantize.
        plain = MoeCase(case.recipe, grouped=False, pad=case.pad, permute=case.pad, fp8_param=case.fp8_param)
        if plain not in known:
            each = MoeRun(False, plain, weights)
            each.backward()
            known[plain] = each.backward()
        honest = known[plain]
    assert_close_to_oracle(f"{case} loss", losses, truth[0], honest[0])
    assert grads.keys() == truth[1].keys()
    for name, grad in grads.items():
        assert_close_to_oracle(f"{case} {name}", grad, truth[1][name], honest[1][name])
        if "layers" in name and case.recipe != "bf16":
            distance = [(other - honest[1][name]).norm() for other in (grad, reference[1][name])]
            assert distance[0] < distance[1], f"{case} {name}: fp8 did not run {distance}"
    if case.recompute:
        for name, grad in grads.items():
            assert_bitwise_equal(f"{case} {name}", grad, known[replace(case, recompute=())][1][name])
    known[case] = losses, grads
    if case.permute and not case.recompute:
        check_state(run, case)
    if case.steps:
        curve = [run.step() for _ in range(case.steps)]
        assert curve[-1] < 0.95 * curve[0], (case, curve)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("world", choices=CASES)
    world = parser.parse_args().world
    rank, size, _ = init_ranks("cpu")
    tp, ep = size if world == "tp" else 1, size if world == "ep" else 1
    mpu.initialize_model_parallel(tp, 1, expert_model_parallel_size=ep)
    with megatron_on_cpu.CpuForCuda():
        plain = MoeCase(grouped=False)
        first = MoeRun(tp == 1, plain)
        weights = {dense.local_name(name): param.detach().clone() for name, param in first.model.named_parameters()}
        reference = first.backward()
        truth = MoeRun(tp == 1, plain, weights, torch.float32).backward()
        known: dict = {}
        for case in CASES[world]:
            check(case, truth, reference, weights, known)
            if rank == 0:
                print(f"ok {case}", flush=True)
    dist.barrier()
    leave_ranks()


if __name__ == "__main__":
    main()
