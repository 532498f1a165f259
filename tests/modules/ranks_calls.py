"""Over 2 ranks: calls of a warm step of an LayerNormMLP that overlaps, ring forward and bulk backward."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from tests.modules.test_calls import counted  # noqa: E402

MOST = 200, 190
METHODS = {"fc1_fprop": "ring_exchange", "fc2_fprop": "pipeline", "fc2_dgrad": "ring_exchange"}


def main() -> None:
    init_ranks("cpu")
    group, size = dist.group.WORLD, dist.get_world_size()
    cfgs = {name: {"method": method} for name, method in METHODS.items()}
    te.initialize_ub([64 * size, 64], size, tp_group=group, dtype=torch.bfloat16, device="cpu", ub_cfgs=cfgs)
    module = te.LayerNormMLP(
        64, 64 * size, activation="swiglu", normalization="RMSNorm", params_dtype=torch.bfloat16, device="cpu",
        set_parallel_mode=True, sequence_parallel=True, tp_group=group, tp_size=size, ub_overlap_ag=True,
        ub_overlap_rs=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True,
    )  # fmt: skip
    found = counted(module, torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True), "delayed")
    assert found[0] <= MOST[0] and found[1] <= MOST[1], found
    te.destroy_ub()
    leave_ranks()


main()
