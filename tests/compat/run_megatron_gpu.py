"""One case of test_megatron_gpu.py, on one GPU: examples/megatron_gpt.py beside the same training in another way.

    torchrun --nproc-per-node 1 tests/compat/run_megatron_gpu.py '{"options": "--cuda-graphs local", "beside": ""}'

Prints the losses of both. torch computes deterministically, so that the same work gives the same bits.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before CUDA starts
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import megatron_on_cpu
import torch
import torch.distributed as dist

megatron_on_cpu.stand_in_for_apex()
import megatron_gpt as example  # noqa: E402

from te_lite.compat.alias.manager import FP8GlobalStateManager  # noqa: E402

STEPS = 6
SIZES = f"--hidden 256 --ffn 512 --heads 4 --groups 2 --sequence 128 --steps {STEPS} --lr 0.002"


def losses(options: str, cached: bool) -> list[float]:
    """cached: Megatron's modules keep quantized weights across micro-batches."""
    plain = example.config

    def config(args: Any) -> Any:
        made = plain(args)
        made.disable_parameter_transpose_cache = not cached
        return made

    example.tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(1)
    with mock.patch.object(example, "config", config):
        found = example.train(example.options([*SIZES.split(), *options.split()]))
    gc.collect()
    FP8GlobalStateManager.reset()
    return found


def check(options: str, beside: str, bound: float = 0.0, steps: int = 6, cached: bool = True) -> None:
    """bound: relative, of the losses of so many steps; 0: the same bits."""
    want, got = losses(beside, cached), losses(options, cached)
    print("want", want, "\ngot ", got, flush=True)
    assert len(got) == len(want) == STEPS and got[-1] < 0.95 * got[0], "it has not learnt"
    pairs = list(zip(got, want, strict=True))[:steps]
    apart = max(abs(a / b - 1) for a, b in pairs)
    if bound:
        assert apart <= bound, f"losses are {apart:.2e} apart, at most {bound:.2e} is allowed"
    elif apart:
        again = losses(beside, cached)  # is what it is compared with the same twice?
        noise = max(abs(a / b - 1) for a, b in zip(again, want, strict=True))
        assert noise, f"losses are {apart:.2e} apart, and must have the same bits, as two runs of {beside!r} have"
        assert apart <= 4 * noise, f"losses are {apart:.2e} apart, those of two runs of {beside!r} {noise:.2e}"


def main() -> None:
    cuda, case = not example.CPU, json.loads(sys.argv[1])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("nccl" if cuda else "gloo")
    example.mpu.initialize_model_parallel(1, 1)
    if cuda:
        check(**case)
    else:
        with megatron_on_cpu.CpuForCuda():
            check(**case)
    print("all is well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
