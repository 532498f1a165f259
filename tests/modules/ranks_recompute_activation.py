"""Over 2 ranks: LayerNormMLP with and without recompute_activation, by torch.distributed and by userbuffers."""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from tests.harness import RECIPES  # noqa: E402
from tests.modules.test_recompute_activation import compare, run  # noqa: E402

K, FFN, TOKENS = 64, 128, 64  # TOKENS of this rank
METHODS = {"fc1_fprop": "ring_exchange", "fc2_fprop": "pipeline", "fc2_dgrad": "ring_exchange"}
FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")


def module(recompute: bool, parallel: bool, overlap: bool, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(dist.get_rank())
    return te.LayerNormMLP(
        K, FFN, activation="swiglu", normalization="RMSNorm", params_dtype=torch.bfloat16, device=device,
        set_parallel_mode=True, sequence_parallel=parallel, tp_group=dist.group.WORLD, tp_size=dist.get_world_size(),
        recompute_activation=recompute, **dict.fromkeys(FLAGS, overlap),
    )  # fmt: skip


def main() -> None:
    _, size, device = init_ranks(sys.argv[2])
    cfgs = {name: {"method": method} for name, method in METHODS.items()}
    te.initialize_ub([TOKENS * size, K], size, tp_group=dist.group.WORLD, device=device, ub_cfgs=cfgs)
    for recipe, (parallel, overlap) in itertools.product(RECIPES, ((False, False), (True, False), (True, True))):
        modules = [module(recompute, parallel, overlap, device) for recompute in (True, False)]
        compare(*(run(each, recipe, TOKENS) for each in modules))
        assert [plans[1].recomputes_x for _, plans in (each._planned for each in modules)] == [True, False]
    te.destroy_ub()
    leave_ranks()


main()
