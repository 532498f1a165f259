"""One rank of test_megatron.py: Megatron-core's precision-aware distributed optimizer on the alias's FusedAdam.

    torchrun --nproc-per-node 2 tests/compat/ranks_megatron_optimizer.py

Losses are compared with those of Megatron's optimizer over fp32 masters of its own.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from te_lite.testing.distributed import init_ranks, leave_ranks
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.ranks_megatron import LOCAL, TE, Case, Run, check, dist_checkpointing, megatron_on_cpu, mpu

AWARE: tuple[tuple[str, Any], ...] = (("use_precision_aware_optimizer", True),)
FP16 = (("main_params_dtype", torch.float16), ("exp_avg_dtype", torch.uint8))
# (fields of Megatron's OptimizerConfig, the dtype of FusedAdam's masters)
KEPT: list[tuple[tuple[tuple[str, Any], ...], torch.dtype]] = [
    ((), torch.int16),  # remainders are Megatron's default
    ((("store_param_remainders", False),), torch.float32),
    ((("exp_avg_dtype", torch.bfloat16), ("exp_avg_sq_dtype", torch.float16)), torch.int16),
    (FP16, torch.float16),
]
BF16_STATES = (("exp_avg_dtype", torch.bfloat16), ("exp_avg_sq_dtype", torch.bfloat16))


def check_state(run: Run, case: Case, sharding: str, master: torch.dtype) -> None:
    """A sharded checkpoint of the distributed optimizer gives another model's the same state and the same steps."""
    metadata = {"distrib_optim_sharding_type": sharding, "dp_cp_group": mpu.get_data_parallel_group(True)}
    model = run.model.sharded_state_dict(metadata=metadata)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        saved = run.optimizer.sharded_state_dict(model, metadata=metadata)
        dist_checkpointing.save({"model": model, "optimizer": saved}, folder[0])
        other = Run(TE, case)
        model = other.model.sharded_state_dict(metadata=metadata)
        wanted = other.optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
        loaded = dist_checkpointing.load({"model": model, "optimizer": wanted}, folder[0])
        other.model.load_state_dict(loaded["model"])
        other.optimizer.load_state_dict(loaded["optimizer"])
        dist.barrier()
    adam, again = run.optimizer.optimizer, other.optimizer.optimizer
    masters = {state["master_param"].dtype for state in adam.state.values()}
    assert masters == {master}, f"{case}: {masters}"
    for group, new in zip(adam.param_groups, again.param_groups, strict=True):
        assert new["step"] == group["step"] >= case.steps
        for param, twin in zip(group["params"], new["params"], strict=True):
            assert set(adam.state[param]) == set(again.state[twin]) == {"exp_avg", "exp_avg_sq", "master_param"}
            for name in adam.state[param]:
                held, found = adam.get_unscaled_state(param, name), again.get_unscaled_state(twin, name)
                assert_bitwise_equal(f"{case} {name}", found, held)
    assert run.step() == other.step() and run.step() == other.step(), case


def check_parts_are_refused() -> None:
    """Under delayed scaling Megatron gives FusedAdam flat parts of fp8 parameters, which te_lite's do not have."""
    try:
        Run(TE, Case("delayed", fp8_param=True, distributed=True, steps=1, precise=AWARE))
    except NotImplementedError as error:
        assert "parts of quantized parameters are copies" in str(error), error
        return
    raise AssertionError("no step would reach the model, and nothing said so")


def main() -> None:
    rank, _, _ = init_ranks("cpu")
    mpu.initialize_model_parallel(1, 1)
    with megatron_on_cpu.CpuForCuda():
        local = Run(LOCAL, Case())
        weights = {name: param.detach().clone() for name, param in local.model.named_parameters()}
        reference = local.backward()
        truth = Run(LOCAL, Case(), weights, torch.float32).backward()
        known: dict[Case, Any] = {}
        check(Case(fuse=True, steps=3), truth, reference, weights, known)
        for fields, master in KEPT:
            case = Case(fuse=True, distributed=True, steps=3, precise=AWARE + fields)
            run = check(case, truth, reference, weights, known)
            check_state(run, case, "dp_reshardable", master)
            if not fields:  # remainders, gathered in fp32
                check_state(run, case, "fully_reshardable", master)
            del run  # the next report is not of it
            if rank == 0:
                print(f"ok {case}", flush=True)
        # The masters are Megatron's own.
        case = Case("tensorwise", fp8_param=True, distributed=True, steps=3, precise=AWARE + BF16_STATES)
        check(case, truth, reference, weights, known)
        check_parts_are_refused()
        if rank == 0:
            print(f"ok {case}", flush=True)
    dist.barrier()
    leave_ranks()


if __name__ == "__main__":
    main()
