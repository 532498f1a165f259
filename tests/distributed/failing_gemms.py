"""Faults in which a GEMM raises on one rank, which lives on: its peers must not wait for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

import te_lite as te
from te_lite.overlap.exchange import Gemm
from tests.distributed.mismatches import make, said, step, until_it_fails, victim
from tests.distributed.overlapping import COLUMN, ROW


def failing(which: Callable[[str, int], bool]) -> Any:
    """Products raise on the victim where which(label, how many there were before) holds."""
    original, calls = Gemm.product, []

    def product(self, *args, **kwargs):
        calls.append(self.label)
        if victim() and which(self.label, len(calls) - 1):
            raise ValueError("this GEMM went wrong")
        return original(self, *args, **kwargs)

    return mock.patch.object(Gemm, "product", product)


def gemm_fails(device) -> None:
    """The others hear of it at once and in the victim's words, forward and backward."""
    for which, name in ((COLUMN, "te_lite.fprop"), (ROW, "te_lite.fprop"), (COLUMN, "te_lite.dgrad")):
        pair = make(which, device)
        with failing(lambda label, _, name=name: label == name):
            said("gemm", until_it_fails(lambda pair=pair: step(pair)))
        said("gemm, the next call", lambda pair=pair: step(pair))
        te.destroy_ub()
        dist.barrier()


def fails_before_an_amax(device) -> None:
    """In the victim's second piece: the others, done with theirs, come to an amax to be reduced."""
    pair = make(COLUMN, device, recipe="delayed")
    with failing(lambda _, before: before == 1):
        said("before an amax", lambda: step(pair))
    te.destroy_ub()
    dist.barrier()


def fails_while_auto_measures(device) -> None:
    """In the last round of what auto times: the others come to the times to be reduced."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TE_LITE_AUTO="measure", TE_LITE_CACHE=folder),
    ):
        pair = make(COLUMN, device, ub_cfgs=None)
        with failing(lambda _, before: before == 17):  # six rounds of one by Collective and two by a ring
            said("while auto measures", lambda: step(pair))
        te.destroy_ub()
        dist.barrier()
