"""Over 2 ranks: layers with and without sequence parallelism and overlap against the layer of one rank."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.numerics import assert_close_to_oracle  # noqa: E402
from tests.harness import under  # noqa: E402
from tests.modules.layer_reference import FFN, HEADS, HIDDEN, Case, Layer, draw, make, step  # noqa: E402
from tests.modules.test_transformer_layer import joined  # noqa: E402
from tests.reference import TRUTH  # noqa: E402

SPLIT = Case(tp=2, arrangement=("decoder",), placing=("rope", "RMSNorm"), activation="swiglu", groups=2)
CASES = [
    SPLIT,
    Case(tp=2, arrangement=("output", "post"), qkv="interleaved", norm="RMSNorm-", placing=("LayerNorm",)),
    Case(tp=2, arrangement=("post",), bias=False, dropout=0.1, mask="padding_causal"),
    Case(tp=2, arrangement=("parallel",), norm="RMSNorm", layout="thd"),
]
METHODS = {
    "qkv_fprop": "ring_exchange", "qkv_dgrad": "bulk", "qkv_wgrad": "bulk", "proj_fprop": "pipeline",
    "proj_dgrad": "ring_exchange", "fc1_fprop": "ring_exchange", "fc1_dgrad": "bulk", "fc1_wgrad": "bulk",
    "fc2_fprop": "pipeline", "fc2_dgrad": "ring_exchange",
}  # fmt: skip


def shard(whole: torch.Tensor, param: torch.nn.Parameter, rank: int) -> torch.Tensor:
    """Of a parameter or its gradient, as this rank holds it."""
    return whole.chunk(2, param.partition_dim)[rank] if param.tensor_model_parallel else whole


def check(case: Case, recipe: str, dtype: torch.dtype, device, sequence_parallel: bool, **extra) -> dict:
    """The schedule of each GEMM. The group is given after the constructor; gradients that are partial sums are added by
    te_lite's helper."""
    rank, group = dist.get_rank(), dist.group.WORLD
    case = replace(case, sequence_parallel=sequence_parallel, stretch=8)
    whole = make(replace(case, tp=1), dtype)
    layer = te.TransformerLayer(
        HIDDEN, FFN, HEADS, params_dtype=dtype, device=device, tp_size=2, set_parallel_mode=True,
        sequence_parallel=sequence_parallel, **(case.arguments() | extra),
    )  # fmt: skip
    layer.set_tensor_parallel_group(group)
    layer.train(not case.dropout)
    with torch.no_grad():
        for (name, param), full in zip(layer.named_parameters(), whole.parameters(), strict=True):
            assert param.shape == shard(full, param, rank).shape, name
            param.copy_(shard(full, param, rank))
    inputs, dy = draw(case, dtype)
    dim = extra.get("sequence_dim", 0)
    parts = {of: t.chunk(2, dim)[rank] if sequence_parallel else t for of, t in inputs.items()}
    with under(recipe):
        got = step(layer, case, parts, dy.chunk(2, dim)[rank] if sequence_parallel else dy)
    te.reduce_sequence_parallel_grads(layer)
    parameters = dict(whole.named_parameters())
    truth = Layer(case, recipe).run(parameters, inputs, dy, TRUTH)
    low = Layer(case, recipe).reference(parameters, inputs, dy, dtype, device, truth)
    own = dict(layer.named_parameters())
    for found in (truth, low):
        for name, value in found.items():
            if name in own:
                found[name] = shard(value, own[name], rank)
            elif sequence_parallel:
                whole_shape = case.shape("encoder" if name == "encoder" else "x")
                found[name] = value.view(whole_shape).chunk(2, dim)[rank].flatten(0, -2)
    assert got.keys() == truth.keys()
    got = {name: (t.grad if t is not None else got[name]).cpu() for name in got for t in (own.get(name),)}
    got, truth, low = joined(got), joined(truth), joined(low)
    for name, value in got.items():
        label = f"{case} {recipe} rank {rank} {name}"
        assert_close_to_oracle(label, value, truth[name], low[name])
    return {(row["module"].split(".")[-1], row["gemm"]): row["schedule"] for row in te.overlap_report()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    _, size, device = init_ranks(parser.parse_args().device)
    for case in CASES:
        for sequence_parallel in (False, True):
            check(case, "bf16", torch.float32, device, sequence_parallel)
    check(replace(SPLIT, layout="bshd"), "bf16", torch.float32, device, True, sequence_dim=1)
    for recipe in ("bf16", "current", "delayed"):
        check(CASES[1], recipe, torch.bfloat16, device, True)
    cfgs = {name: {"method": method} for name, method in METHODS.items()}
    te.initialize_ub([96, HIDDEN], size, tp_group=dist.group.WORLD, dtype=torch.bfloat16, device=device, ub_cfgs=cfgs)
    for recipe in ("bf16", "current"):
        # Gradients of a head's norm are 8 numbers, too few for what fp8 does to them to average out.
        case = SPLIT if recipe == "bf16" else replace(SPLIT, placing=("rope",))
        schedules = check(case, recipe, torch.bfloat16, device, True, ub_tp_comm_overlap=True)
    for linear, gemm, schedule in (
        ("layernorm_qkv", "fprop", "ring"), ("layernorm_qkv", "wgrad", "bulk"), ("layernorm_query", "fprop", "ring"),
        ("key_value", "dgrad", "bulk"), ("proj", "fprop", "pipeline"), ("proj", "dgrad", "ring"),
        ("layernorm_mlp", "fc1_fprop", "ring"), ("layernorm_mlp", "fc2_fprop", "pipeline"),
    ):  # fmt: skip
        assert schedules[linear, gemm] == schedule, schedules
    te.destroy_ub()
    leave_ranks()


main()
