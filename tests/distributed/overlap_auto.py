"""Checks of "auto" by measurement: agreed on, remembered, never Collective's equal by noise alone."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import te_lite as te
from te_lite.overlap import choice
from tests.distributed.overlapping import COLUMN, LAYERS, MLP, begin, pair_of, rows_of


def folder() -> Path:
    """An empty one, the same on all ranks."""
    made = [tempfile.mkdtemp(prefix="te_lite_auto_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, 0)
    return Path(made[0])


def measuring(where: Path):
    return mock.patch.dict(os.environ, TE_LITE_AUTO="measure", TE_LITE_CACHE=str(where))


def chosen(which, device, recipe: str = "bf16") -> dict[str, str]:
    """GEMM -> schedule, of the exchanges that "auto" settles, after a forward and a backward."""
    pair = pair_of(which, recipe, device, "auto")
    pair.backward(pair.forward(pair.batch(1, 32)))
    rows = rows_of(pair)
    decided = {name: row for name, row in rows.items() if "auto: " in row["reason"]}
    for row in decided.values():
        assert "collective " in row["reason"] and "ring " in row["reason"] and row["sent"], row
    return {name: row["schedule"] for name, row in decided.items()}


def every_way_that_may_win(device) -> None:
    """The fastest is taken; Collective unless another saves 2%. Results are right either way."""
    for times, expected in (
        ({"collective": 100.0, "ring": 97.0, "fused": 200.0}, "ring"),
        ({"collective": 100.0, "ring": 99.0, "fused": 200.0}, "collective"),
        ({"collective": 50.0, "ring": 99.0, "fused": 200.0}, "collective"),
    ):
        measure = lambda self, ways, group, check, times=times: {name: times[name] for name in ways}  # noqa: E731
        with measuring(folder()), mock.patch.object(choice.Choices, "_measure", measure):
            begin(32 * dist.get_world_size(), 128, dist.group.WORLD, device, "auto", strict=True)
            for which in LAYERS:
                found = chosen(which, device)
                assert found and set(found.values()) == {expected}, found
                pair = pair_of(which, "bf16", device, "auto")
                got, want = pair.backward(pair.forward(pair.batch(2, 32))), pair.expected(pair.batch(2, 32))
                # Collective rounds at each of R - 1 additions where the protocol rounds once: R * 2^-9, R up to 4.
                for name in got:
                    error = (got[name].double() - want[name].double()).norm() / want[name].double().norm()
                    assert error < 2.0**-7, f"{expected}: {pair.label} {name} off by {error}"
            te.destroy_ub()


def measured_once_and_kept(device) -> None:
    """All ranks take the same way; the next userbuffers read it and time nothing; a broken file is none."""
    where = folder()
    with measuring(where):
        begin(32 * dist.get_world_size(), 128, dist.group.WORLD, device, "auto")
        first = [chosen(which, device) for which in (COLUMN, MLP)]
        said: list = [None] * dist.get_world_size()
        dist.all_gather_object(said, first)
        assert all(first) and all(other == first for other in said), said
        te.destroy_ub()
        dist.barrier()
        kept = json.loads((where / "overlap.json").read_text())
        assert kept and all(set(times) >= {"collective", "ring"} for times in kept.values())
        assert all(us > 0 for times in kept.values() for us in times.values())
        with mock.patch.object(choice.Choices, "_measure", side_effect=AssertionError("measured again")):
            begin(32 * dist.get_world_size(), 128, dist.group.WORLD, device, "auto")
            assert [chosen(which, device) for which in (COLUMN, MLP)] == first
            te.destroy_ub()
        dist.barrier()
        if dist.get_rank() == 0:
            (where / "overlap.json").write_text("{half")
        dist.barrier()
        begin(32 * dist.get_world_size(), 128, dist.group.WORLD, device, "auto")
        assert chosen(COLUMN, device)
        te.destroy_ub()
        dist.barrier()
        assert json.loads((where / "overlap.json").read_text())


AUTO = [every_way_that_may_win, measured_once_and_kept]
