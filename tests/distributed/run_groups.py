"""Ranks of the group tests, started by torchrun: amax groups, reductions counted, errors on every rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.numerics import assert_bitwise_equal  # noqa: E402
from tests import reference  # noqa: E402
from tests.distributed.run_modules import new_groups  # noqa: E402
from tests.distributed.suites import run_checks  # noqa: E402
from tests.harness import delayed_state, leaf, under  # noqa: E402

DELAYED = te.recipe.DelayedScaling(amax_history_len=4)
BF16 = {"params_dtype": torch.bfloat16}


def tokens(m=32, k=64, seed=1, scale=1.0):
    return reference.make_tokens(m, k, seed=seed, dtype=torch.bfloat16, scale=scale)


def everywhere(value: torch.Tensor, group=None) -> list[torch.Tensor]:
    """The value of each rank of `group`, in order."""
    found: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value.detach().cpu(), group=group)
    return found


@contextmanager
def counted():
    """A list of (operation, elements) for every all-reduce inside; not of integers, by which ranks compare what they
    run."""
    calls, original = [], dist.all_reduce

    def all_reduce(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
        if tensor.is_floating_point():
            calls.append(("max" if op == dist.ReduceOp.MAX else "sum", tensor.numel()))
        return original(tensor, op, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = original


def network(group, size, device, sequence_parallel=True):
    common = {"tp_group": group, "tp_size": size, "sequence_parallel": sequence_parallel, "device": device, **BF16}
    return torch.nn.Sequential(
        te.LayerNormLinear(64, 128, parallel_mode="column", **common),
        te.Linear(128, 64, parallel_mode="row", **common),
        te.LayerNormMLP(64, 128, set_parallel_mode=True, **common),
    )


def one_reduction_a_pass(device) -> None:
    """Three modules, one group: one max-reduction at the autocast's exit, one after the backward."""
    group, size = dist.group.WORLD, dist.get_world_size()
    net = network(group, size, device)
    for _ in range(2):
        x = leaf(tokens(32 // size), device)
        with counted() as forward, under(DELAYED):
            out = net(x)
        with counted() as backward:
            out.sum().backward()
        for label, calls in (("forward", forward), ("backward", backward)):
            reductions = [call for call in calls if call[0] == "max"]
            assert len(reductions) == 1, f"{label}: {calls}"
    with counted() as calls, torch.no_grad(), under(DELAYED):
        net(tokens(32 // size).to(device))
    assert not [call for call in calls if call[0] == "max"], f"inference: {calls}"


def one_reduction_for_each_group(device) -> None:
    """Modules of two groups in one pass: a reduction each, none for a module without a group."""
    world, pair = dist.group.WORLD, new_groups([[0, 1], [2, 3]])[0]
    nets = [network(world, 4, device), network(pair, 2, device)]
    alone = te.Linear(64, 64, device=device, **BF16)
    inputs = [leaf(tokens(32 // size), device) for size in (4, 2)] + [leaf(tokens(), device)]
    with counted() as calls, under(DELAYED):
        outs = [module(x) for module, x in zip([*nets, alone], inputs, strict=True)]
    assert len([c for c in calls if c[0] == "max"]) == 2, calls
    with counted() as calls:
        sum(out.float().sum() for out in outs).backward()
    assert len([c for c in calls if c[0] == "max"]) == 2, calls


def default_amax_group_is_the_tp_group(device) -> None:
    """Replicas with larger data keep their own scales; within a group all ranks agree; the world is asked
    for.
    """
    for layout in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        group, replica = new_groups(layout)
        for mode, k in (("column", 64), ("row", 32)):
            common = {"parallel_mode": mode, "tp_group": group, "tp_size": 2, "device": device, **BF16}
            for amax_group, shared in ((None, False), (dist.group.WORLD, True)):
                module = te.Linear(64, 64, **common)
                recipe = {"recipe": DELAYED, "amax_reduction_group": amax_group}
                with te.autocast(**recipe):
                    out = module(leaf(tokens(k=k, seed=dist.get_rank(), scale=1 + 9 * replica), device))
                out.backward(torch.full_like(out, 1.0 + replica))
                state = delayed_state(module)
                for name, column in (("fwd", 0), ("fwd", 1), ("bwd", 0)):
                    scale = state[f"scale_{name}"][column]
                    assert len({float(s) for s in everywhere(scale, group)}) == 1, f"{layout} {mode} {name}: group"
                    different = len({float(s) for s in everywhere(scale)})
                    if column == 0:
                        assert different == (1 if shared else 2), f"{layout} {mode} {name} {shared}: {different}"


def reduce_amax_false_keeps_ranks_apart(device) -> None:
    recipe = te.recipe.DelayedScaling(reduce_amax=False, amax_history_len=4)
    size = dist.get_world_size()
    common = {"tp_group": dist.group.WORLD, "tp_size": size, "device": device, **BF16}
    module = te.Linear(64, 64, parallel_mode="row", **common)
    with counted() as calls, under(recipe):
        module(leaf(tokens(k=64 // size, seed=dist.get_rank()), device))
    assert not [c for c in calls if c[0] == "max"]
    assert len({float(s) for s in everywhere(delayed_state(module)["scale_fwd"][0])}) == size


def current_scaling_reduces_only_what_is_gathered(device) -> None:
    """x of a column- and dy of a row-parallel linear under sequence parallelism; nothing else."""
    size = dist.get_world_size()
    for mode in ("column", "row"):
        for sp in (False, True):
            common = {"tp_group": dist.group.WORLD, "tp_size": size, "sequence_parallel": sp, "device": device}
            module = te.Linear(128, 128, parallel_mode=mode, **common, **BF16)
            m, k = (32 // size if sp and mode == "column" else 32), (128 if mode == "column" else 128 // size)
            with counted() as forward, under("current"):
                out = module(leaf(tokens(m, k, seed=dist.get_rank() if sp else 0), device))
            with counted() as backward:
                out.sum().backward()
            found = [len([c for c in calls if c[0] == "max"]) for calls in (forward, backward)]
            want = [int(sp and mode == "column"), int(sp and mode == "row")]
            assert found == want, f"{mode} sequence_parallel={sp}: {found}"


def refuses(kind, match: str, fn: Callable) -> None:
    """fn raises `kind` with `match` in its message, on every rank."""
    try:
        fn()
    except kind as error:
        assert match in str(error), f"{match!r} is not in {error!r}"
        said = 1
    else:
        said = 0
    total = sum(int(t) for t in everywhere(torch.tensor(said)))
    assert total == dist.get_world_size(), f"only {total} ranks raised {kind} about {match!r}"


def group_mismatches(device) -> None:
    pair, _ = new_groups([[0, 1], [2, 3]])
    column = {"parallel_mode": "column", "device": device, **BF16}
    refuses(ValueError, "4", lambda: te.Linear(64, 64, tp_group=pair, tp_size=4, **column))
    refuses(ValueError, "2", lambda: te.LayerNormMLP(64, 128, tp_group=dist.group.WORLD, tp_size=2, device=device))
    late = te.Linear(64, 64, tp_size=4, **column)
    refuses(ValueError, "2", lambda: late.set_tensor_parallel_group(pair))
    refuses((ValueError, RuntimeError), "set_tensor_parallel_group", lambda: late(tokens().to(device)))
    late.set_tensor_parallel_group(dist.group.WORLD)
    assert late(tokens().to(device)).shape == (32, 16)
    assert te.Linear(64, 64, tp_group=pair, **column).weight.shape == (32, 64)  # the group decides alone

    foreign = dist.new_group([0])
    if dist.get_rank() != 0:
        foreign_error = None
        try:
            te.Linear(64, 64, tp_group=foreign, tp_size=2, **column)
        except (ValueError, TypeError) as error:
            foreign_error = error
        assert foreign_error is not None and "group" in str(foreign_error)


def late_group_equals_early_group(device) -> None:
    """set_tensor_parallel_group before the first forward is the constructor's tp_group."""
    size = dist.get_world_size()
    outs = []
    for late in (False, True):
        torch.manual_seed(3)
        options = {"parallel_mode": "row", "tp_size": size, "device": device, **BF16}
        module = te.Linear(64, 64, tp_group=None if late else dist.group.WORLD, **options)
        if late:
            module.set_tensor_parallel_group(dist.group.WORLD)
        with under("current"):
            outs.append(module(tokens(k=64 // size).to(device)).detach())
    assert_bitwise_equal("late", outs[1], outs[0])


def sequence_parallel_refusals(device) -> None:
    """Token counts, unreduced amaxes and amax groups that lack ranks: the same error everywhere, nothing
    lost.
    """
    size = dist.get_world_size()
    common = {"tp_group": dist.group.WORLD, "tp_size": size, "sequence_parallel": True, "device": device, **BF16}
    row = te.Linear(128, 64, parallel_mode="row", **common)
    good = tokens(32, 128 // size).to(device)
    with under(DELAYED):
        row(leaf(good, device)).sum().backward()
    before = row.get_extra_state().clone()
    refuses(ValueError, "multiple", lambda: row(tokens(31, 128 // size).to(device)))

    def forward(module, m, k, **autocast):
        with te.autocast(**autocast):
            module(tokens(m, k).to(device))

    unreduced = te.recipe.DelayedScaling(reduce_amax=False)
    refuses(ValueError, "reduce_amax", lambda: forward(row, 32, 128 // size, recipe=unreduced))
    column = te.Linear(64, 128, parallel_mode="column", **common)
    refuses(ValueError, "reduce_amax", lambda: forward(column, 8, 64, recipe=unreduced))
    mine = [dist.new_group([r]) for r in range(size)][dist.get_rank()]
    refuses(ValueError, "group", lambda: forward(column, 8, 64, recipe=DELAYED, amax_reduction_group=mine))
    assert_bitwise_equal("state", row.get_extra_state(), before)
    with under(DELAYED):
        assert row(good).shape == (32 // size, 64)


TWO = [
    one_reduction_a_pass,
    reduce_amax_false_keeps_ranks_apart,
    current_scaling_reduces_only_what_is_gathered,
    late_group_equals_early_group,
    sequence_parallel_refusals,
]
FOUR = [one_reduction_for_each_group, default_amax_group_is_the_tp_group, group_mismatches, *TWO]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    _, world, device = init_ranks(args.device)
    run_checks({check.__name__: partial(check, device) for check in (FOUR if world == 4 else TWO)})
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
