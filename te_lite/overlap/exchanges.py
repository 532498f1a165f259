"""The table of exchanges that hide communication, by the names that ub_cfgs gives them.

A new exchange is a class in a file of its own and a line here, from which ub_cfgs and overlap_report() take it
(CONTRIBUTING.md says where its tests are). Order counts: of those that fit a GEMM the first is its default, but where
config.py names one.
"""

from __future__ import annotations

from te_lite.overlap.auto import Auto
from te_lite.overlap.bulk import Bulk, External
from te_lite.overlap.fused import Fused
from te_lite.overlap.ring import Pipeline, Ring

EXCHANGES: dict[str, type[Bulk]] = {
    "auto": Auto,
    "ring_exchange": Ring,
    "pipeline": Pipeline,
    "fused": Fused,
    "bulk": Bulk,
    "external": External,
}
