"""One CPU rank of test_megatron_graphs.py: Megatron-core's own CUDA graphs over te_lite, played by tests/cpu_graph.py.

    torchrun --nproc-per-node 1 tests/compat/ranks_megatron_graphs.py local

Megatron's files are unmodified: CudaGraphManager (local) or TECudaGraphHelper (transformer_engine) warm up, capture and
replay. Losses, gradients and delayed scaling's state of every step must be those of the same model without graphs.
"""

import contextlib
import gc
import sys
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from tests.compat import ranks_megatron as ranks  # Megatron over te_lite, on a CPU
from tests.compat.graphing import CpuCaptures
from tests.cpu_graph import CpuGraph

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer import cuda_graphs

import te_lite as te
from examples import megatron_on_cpu
from te_lite.compat import graph_capture
from te_lite.testing.distributed import init_ranks, leave_ranks
from te_lite.testing.numerics import assert_bitwise_equal

STEPS = 3  # the first is eager
ONE = [
    *(ranks.Case(recipe, steps=STEPS) for recipe in ("bf16", "delayed", "mxfp8")),
    ranks.Case("delayed", fuse=True, fp8_param=True, steps=STEPS),
    ranks.Case("tensorwise", fuse=True, fp8_param=True, distributed=True, steps=STEPS),
]
PIPELINE = [ranks.Case("bf16", fuse=True, steps=STEPS), ranks.Case("delayed", steps=STEPS)]


class Graph(CpuGraph):
    """torch.cuda.CUDAGraph."""

    replays = 0

    def register_generator_state(self, state: Any) -> None:
        pass

    def replay(self) -> None:
        Graph.replays += 1
        super().replay()


@contextlib.contextmanager
def played() -> Any:
    """What Megatron's graphs ask of torch.cuda."""
    instead = {
        "CUDAGraph": Graph, "graph": lambda graph, **_: graph.capture(), "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda *_: None, "set_stream": lambda _: None, "default_stream": lambda: None,
        "get_device_capability": lambda *_: (9, 0), "memory_stats": lambda: dict.fromkeys(MEMORY, 0),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in instead.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(graph_capture, "Captures", CpuCaptures))
        # Megatron-core 0.16.1 hands out the first layer's input as a gradient's buffer before its backward has read it.
        stack.enter_context(mock.patch.object(cuda_graphs.TensorReusePool, "insert", lambda pool, tensor: None))
        yield


MEMORY = ("allocated_bytes.all.current", "reserved_bytes.all.current")


@dataclass
class Trained:
    losses: list[Any]
    grads: list[dict]
    states: list[list]


def train(case: Any, impl: str, weights: dict, **more: Any) -> Trained:
    """STEPS steps with Megatron's optimizer."""
    plain = ranks.config
    with mock.patch.object(ranks, "config", lambda *a, **k: replace(plain(*a, **k), cuda_graph_impl=impl, **more)):
        run = ranks.Run(ranks.TE, case, weights)
    helper = None
    if impl == "transformer_engine":
        helper = cuda_graphs.TECudaGraphHelper([run.ddp], run.config, ranks.SEQUENCE, ranks.BATCH, [run.optimizer])
    found = Trained([], [], [])
    linears = [m for m in run.model.modules() if isinstance(m, te.Linear | te.LayerNormLinear)]
    for step in range(STEPS):
        if helper is not None and step == 1:
            helper.create_cudagraphs()
        losses, grads = run.backward()
        found.losses.append(losses)
        found.grads.append(grads)
        found.states.append([linear.get_extra_state() for linear in linears])
        good, *_ = run.optimizer.step()
        run.optimizer.zero_grad()
        assert good
    if helper is not None:
        helper.delete_cuda_graphs()
    return found


def check(case: Any, impl: str, weights: dict, **more: Any) -> None:
    # Megatron's own graphs quantize weights in each micro-batch.
    more |= {"disable_parameter_transpose_cache": True} if impl == "local" and case.recipe == "delayed" else {}
    want = train(case, "none", weights, **more)
    gc.collect()
    Graph.replays = 0
    cuda_graphs._CudagraphGlobalRecord.cudagraph_created = False
    with played():
        got = train(case, impl, weights, **more)
    # Forward and backward of each layer and micro-batch, in all steps but the first.
    if impl == "local" and mpu.get_pipeline_model_parallel_world_size() == 1:
        assert Graph.replays == (STEPS - 1) * 2 * ranks.LAYERS * ranks.MICRO_BATCHES, Graph.replays
    for step in range(STEPS):
        label = f"{impl} {case} {more} step {step}"
        if want.losses[step] is not None:
            assert_bitwise_equal(f"{label}: losses", got.losses[step], want.losses[step])
        for name, grad in want.grads[step].items():
            assert_bitwise_equal(f"{label}: {name}", got.grads[step][name], grad)
        for mine, theirs in zip(got.states[step], want.states[step], strict=True):
            assert_bitwise_equal(f"{label}: scales", mine, theirs)
    if torch.distributed.get_rank() == 0:
        print(f"ok {case} {more}", flush=True)


def main() -> None:
    impl = sys.argv[1]
    _, size, _ = init_ranks("cpu")
    mpu.initialize_model_parallel(1, size)
    init_num_microbatches_calculator(0, None, ranks.BATCH * ranks.MICRO_BATCHES, ranks.BATCH, 1)
    assert cuda_graphs.HAVE_TE_GRAPHS
    with megatron_on_cpu.CpuForCuda():
        local = ranks.Run(ranks.LOCAL, ranks.Case())
        weights = {name: param.detach().clone() for name, param in local.model.named_parameters()}
        for case in ONE if size == 1 else PIPELINE:
            check(case, impl, weights)
            gc.collect()
        if impl == "transformer_engine" and size == 1:  # the MLPs run eagerly, in the same passes
            check(ranks.Case("delayed", steps=STEPS), impl, weights, cuda_graph_scope=["attn"])
    leave_ranks()


if __name__ == "__main__":
    main()
