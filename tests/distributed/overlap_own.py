"""An exchange of one's own: a class in a file like this one, and a line in the table."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist

import te_lite as te
from te_lite.overlap.bulk import Bulk
from te_lite.overlap.exchange import Gathering, Gemm
from te_lite.overlap.exchanges import EXCHANGES
from te_lite.quantize.qtensor import Layout, QTensor
from tests.distributed.overlapping import GATHERS, LAYERS, SCATTERS, begin, everywhere, pair_of, rows_of


class Whole(Bulk):
    """Gathers by copy engines, and multiplies once everything is there; what it scatters it pushes in one piece."""

    name = "whole"
    gathers = scatters = True

    def all_gather(self, q: QTensor, layout: Layout, *, multiplied: bool = False, whole: bool = True) -> Gathering:
        return super().all_gather(q, layout)

    def all_gather_gemm(self, gemm: Gemm, gathering: Gathering) -> Any:
        return gemm(gathering.whole())


def an_exchange_of_ones_own(device) -> None:
    """ub_cfgs takes it by its name wherever it serves, the report calls it so, and results are right."""
    with mock.patch.dict(EXCHANGES, whole=Whole):
        cfgs = everywhere("whole", *GATHERS, *SCATTERS)
        begin(32 * dist.get_world_size(), 128, dist.group.WORLD, device, ub_cfgs=cfgs, strict=True)
        for recipe in ("bf16", "current", "mxfp8"):
            for which in LAYERS:
                pair = pair_of(which, recipe, device, "pipeline")
                got, want = pair.backward(pair.forward(pair.batch(2, 32))), pair.expected(pair.batch(2, 32))
                schedules = {row["schedule"] for name, row in rows_of(pair).items() if not name.endswith("wgrad")}
                assert schedules == {"whole"}, rows_of(pair)
                for name in got:  # a GEMM that is not cut may sum in another order
                    error = (got[name].double() - want[name].double()).norm() / want[name].double().norm()
                    assert error < 2.0**-7, f"{pair.label} {name} off by {error}"
        te.destroy_ub()


OWN = [an_exchange_of_ones_own]
