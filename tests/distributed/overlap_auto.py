"""Checks of "auto" by measurement: agreed on, remembered, never Collective's equal by noise alone."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import te_lite as te
from te_lite.ops.nvrtc import unavailable
from te_lite.overlap import choice, fused, ring
from te_lite.overlap.buffers import Scatter
from tests.distributed.overlapping import COLUMN, LAYERS, MLP, ROW, begin, pair_of, rows_of


def folder() -> Path:
    """An empty one, the same on all ranks, which goes when the process of rank 0 ends well."""
    made = [tempfile.mkdtemp(prefix="te_lite_auto_") if dist.get_rank() == 0 else None]
    if made[0]:
        atexit.register(shutil.rmtree, made[0], ignore_errors=True)
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
    """All ranks take the same exchange; the next userbuffers read it and time nothing; a broken file is none."""
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


def every_number_of_pieces(device) -> None:
    """What is found fastest is how the partial sums then leave, and they are right."""
    ranks, no_fused = dist.get_world_size(), device.type == "cpu" or unavailable(device)
    way, rows, counts = (ring, 512, (2, 4)) if no_fused else (fused, 2048, (4, 2))  # its rule: 1, 8
    name = way.__name__.rpartition(".")[2]
    for count in counts:
        asked: list[tuple[str, ...]] = []

        def measure(self, ways, group, check, best=f"{name} by {count}", asked=asked):
            asked.append(tuple(ways))
            return {one: 50.0 if one == best else 99.0 for one in ways}

        with measuring(folder()), mock.patch.object(choice.Choices, "_measure", measure):
            begin(rows * ranks, 128, dist.group.WORLD, device, "auto", strict=True)
            pair = pair_of(ROW, "bf16", device, "auto")
            with mock.patch.object(way, "Scatter", side_effect=Scatter) as begun:
                got = pair.backward(pair.forward(pair.batch(1, rows)))
            (call,) = begun.call_args_list
            assert call.kwargs.get("blocks") == count or call.args[3] == (count,) * (ranks - 1), call
            others = ("collective", "ring", name)
            assert set(asked[0]) == {*others, *(f"{name} by {one}" for one in counts)}, asked
            row = rows_of(pair)["fprop"]
            assert row["schedule"] == name and row["reason"].endswith(f": {name} by {count}"), row
            want = pair.expected(pair.batch(1, rows))
            for what in got:
                error = (got[what].double() - want[what].double()).norm() / want[what].double().norm()
                assert error < 2.0**-7, f"{count}: {what} off by {error}"  # as above
            te.destroy_ub()


def a_rank_that_has_forgotten_asks_nobody(device) -> None:
    """What was measured is known to all, so the others, which may replay, need not hear of it."""
    with measuring(folder()):
        begin(32 * dist.get_world_size(), 128, dist.group.WORLD, device, "auto")
        pair = pair_of(COLUMN, "bf16", device, "auto")
        for _ in range(4):
            pair.backward(pair.forward(pair.batch(1, 32)))
            exchanges = pair.module._planned[1][0].parallel.exchanges
            settled = [exchange._settled for exchange in exchanges if hasattr(exchange, "_settled")]
            assert any(settled)
            for one in settled if dist.get_rank() == 0 else ():
                one.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "the ranks do not run the same program"
            te.destroy_ub()


AUTO = [every_way_that_may_win, every_number_of_pieces, measured_once_and_kept, a_rank_that_has_forgotten_asks_nobody]
