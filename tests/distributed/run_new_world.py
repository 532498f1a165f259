"""Two ranks, started by torchrun, that leave torch.distributed with userbuffers open and begin it again with other
numbers, as a program does that restarts its ranks in the same processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

import te_lite as te
from tests.distributed.verbs_checks import refused


def main() -> None:
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False)
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=2)
    given = {"tp_group": dist.group.WORLD, "dtype": torch.float32, "device": "cpu"}
    te.initialize_ub([64, 32], 2, **given)
    kept = te.Linear(
        16, 16, params_dtype=torch.float32, device="cpu", parallel_mode="column", sequence_parallel=True,
        tp_group=dist.group.WORLD, tp_size=2, ub_overlap_ag=True, ub_name="fc1",
    )  # fmt: skip
    kept(torch.ones(4, 16))
    dist.destroy_process_group()
    with te.autocast(recipe="current"), refused(RuntimeError, "was destroyed"):
        kept(torch.ones(4, 16))

    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=1 - rank, world_size=2)
    world, x = dist.group.WORLD, torch.full((2, 16), float(dist.get_rank()))
    whole = torch.arange(4.0).view(4, 1).expand(4, 16).contiguous()
    plain = te.Linear(
        16, 16, params_dtype=torch.float32, device="cpu", parallel_mode="column", sequence_parallel=True,
        tp_group=world, tp_size=2,
    )  # fmt: skip
    calls = [
        lambda: te.all_gather(x, world),
        lambda: te.all_gather_linear(x, torch.eye(16), world),
        lambda: te.linear_reduce_scatter(whole, torch.eye(16), world, overlap=None),
        lambda: plain(x),
        lambda: te.symmetric_empty([4], torch.float32, world, device="cpu"),
    ]
    for call in calls:
        with refused(RuntimeError, "was destroyed since", r"destroy_ub\(\), then initialize_ub\(\)"):
            call()
    alone = [dist.new_group([other]) for other in range(2)][dist.get_rank()]
    with refused(RuntimeError, "was destroyed since"):  # nor do others' ranks make the old ones valid again
        te.initialize_ub([64, 32], 1, **given | {"tp_group": alone})
    for ub in (False, True):
        te.destroy_ub()
        if ub:
            te.initialize_ub([64, 32], 2, **given | {"tp_group": world})
        assert te.all_gather(x, world).wait()[:, 0].tolist() == [0, 0, 1, 1]
        part = te.linear_reduce_scatter(whole, torch.eye(16), world)[:, 0].tolist()
        assert part == [2 * dist.get_rank() * 2, 2 * (dist.get_rank() * 2 + 1)], part
        plain(x).sum().backward()
    te.destroy_ub()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
