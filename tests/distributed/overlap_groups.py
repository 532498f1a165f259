"""Checks of userbuffers for groups that are not the world, each with modules against their twins."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist

import te_lite as te
from te_lite.overlap import group as group_module
from te_lite.overlap import userbuffers
from tests.distributed.overlapping import (
    COLUMN,
    LAYERS,
    Sizes,
    assert_same,
    begin,
    check_pass,
    pair_of,
    poison,
    rows_of,
)
from tests.distributed.run_modules import new_groups


def check_group(group, device, recipes=("bf16", "delayed", "mxfp8"), delay: int = 500) -> None:
    """Every module in one group, whose ranks take their own time."""
    buffers = userbuffers._groups[tuple(dist.get_process_group_ranks(group))]
    buffers.executor.set_delays(dist.get_rank(), delay)
    for recipe in recipes:
        for which in LAYERS:
            pair = pair_of(which, recipe, device, group=group)
            for step, m in enumerate((32, 8)):
                check_pass(pair, step, m)
    buffers.executor.set_delays(0, 0)


def parts_of_the_world(device) -> None:
    """tp 2 in a world of 4: neighbours without a group to name them, then ranks that are not next to each other."""
    pair, index = new_groups([[0, 1], [2, 3]])
    te.initialize_ub([128, 128], 2, device=device)
    assert [group.ranks for group in userbuffers.groups()] == [((0, 1), (2, 3))[index]]
    check_group(pair, device)
    te.destroy_ub()
    apart, _ = new_groups([[0, 2], [3, 1]])
    begin(128, 128, apart, device)
    check_group(apart, device)


def two_groups_at_once(device) -> None:
    """A rank in two groups: both have buffers of their own, and their modules take turns."""
    world, (pair, _) = dist.group.WORLD, new_groups([[0, 3], [1, 2]])
    groups = [begin(256, 128, world, device), begin(128, 128, pair, device)]
    assert len(userbuffers.groups()) == 2
    for group in groups:
        group.executor.set_delays(dist.get_rank(), 500)
    for recipe in ("bf16", "mxfp8"):
        pairs = [pair_of(which, recipe, device, group=group) for which in LAYERS for group in (world, pair)]
        batches = [p.batch(i, 16) for i, p in enumerate(pairs)]
        calls = [p.forward(batch) for p, batch in zip(pairs, batches, strict=True)]
        poison(groups)
        for p, batch, call in reversed(list(zip(pairs, batches, calls, strict=True))):
            assert_same(p.label, p.backward(call), p.expected(batch))


def one_group_has_none(device) -> None:
    """Buffers for one group only: modules of the other run Collective and say so."""
    pair, index = new_groups([[0, 1], [2, 3]])
    alone, _ = new_groups([[0, 2], [1, 3]])
    begin(128, 128, alone, device)
    module = te.Linear(
        128, 128, parallel_mode="row", tp_group=pair, tp_size=2, sequence_parallel=True, ub_overlap_rs=True,
        ub_overlap_ag=True, ub_name="proj", params_dtype=torch.bfloat16, device=device, name="no userbuffers here",
    )  # fmt: skip
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    module(x).sum().backward()
    rows = {row["gemm"]: row for row in te.overlap_report() if row["module"] == module.name}
    for gemm in ("fprop", "dgrad"):  # which gathers dy for wgrad too
        assert rows[gemm]["schedule"] == "collective"
        assert f"no userbuffers for the ranks {[[0, 1], [2, 3]][index]}" in rows[gemm]["reason"]


def a_group_that_spans_hosts(device) -> None:
    """One rank says that it runs elsewhere: one warning, Collective with the reason everywhere, strict an error."""
    elsewhere = mock.patch.object(group_module, "host_identity", lambda: "another-host boot")
    with elsewhere if dist.get_rank() == 1 else nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        te.initialize_ub([128, 128], dist.get_world_size(), device=device)
        said = [str(w.message) for w in caught if "overlap is off" in str(w.message)]
        assert len(said) == (dist.get_rank() == 0)
        pair = pair_of(COLUMN, "bf16", device)
        check_pass(pair, 1, 8)
        for row in rows_of(pair).values():
            assert row["schedule"] in ("collective", "local")
            assert (
                "the group spans hosts: ranks [0, 2, 3] on" in row["reason"] and "[1] on another-host" in row["reason"]
            )
        te.destroy_ub()
        try:
            te.initialize_ub([128, 128], dist.get_world_size(), device=device, strict=True)
        except RuntimeError as error:
            assert "spans hosts" in str(error)
        else:
            raise AssertionError("strict passed over a group that spans hosts")


def whole_world(device) -> None:
    """A short pass over as many ranks as there are."""
    wide = Sizes(256, 256, 256)  # MXFP8 takes multiples of 32 on each rank
    group = begin(32 * dist.get_world_size(), 256, dist.group.WORLD, device)
    group.executor.set_delays(dist.get_rank(), 200)
    for recipe, method in (("bf16", "bulk"), ("mxfp8", "pipeline")):
        for which in LAYERS:
            pair = pair_of(which, recipe, device, method, sizes=wide)
            check_pass(pair, 1, 8)
            check_pass(pair, 2, 3)


GROUPS = [parts_of_the_world, two_groups_at_once, one_group_has_none, a_group_that_spans_hosts]
EIGHT = [whole_world]
