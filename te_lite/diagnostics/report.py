"""overlap_report(): how every GEMM of every module communicates, what it moves, and why not as asked; from plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from te_lite.functional.parallel import LocalGemms
from te_lite.functional.plan import LinearPlan
from te_lite.modules.plans import PLANNED, PLANNED_LOCK
from te_lite.overlap.exchange import Outcome
from te_lite.tables import aligned

COLUMNS = ("module", "gemm", "schedule", "recipe", "operands", "shape", "sent", "reason")


def overlap_report() -> list[dict[str, Any]]:
    """One row for each GEMM of each module that has run, of its newest call.

    module, gemm; schedule: "local", "collective", "ring", "pipeline", "fused", "bulk", "external" (of wgrad: of the
    exchange beside it); recipe; operands: their number formats; shape: (M, K, N) of the forward GEMM on this rank;
    sent: bytes that this rank sent to others; reason: where something is not as asked, why.
    """
    with PLANNED_LOCK:
        modules = list(PLANNED.items())
    return [
        row for module, plans in modules for plan in plans for row in _rows(module.name or type(module).__name__, plan)
    ]


def _rows(module: str, plan: LinearPlan) -> Iterator[dict[str, Any]]:
    info, parallel = plan.info, plan.parallel
    assert info is not None  # a module's plan
    places = [exchange.place for exchange in parallel.exchanges]
    ran = any([place.note is not None for place in places])
    for place, formats in zip(places, info.formats, strict=True):
        # A GEMM that moves nothing of its own: what it reads another has brought.
        planned = place.method or ("local" if place.group else "collective")
        idle = "local" if ran or type(parallel) is LocalGemms else planned
        note = place.note or Outcome(idle, 0)
        gemm = f"{info.linear}_{place.gemm}" if info.linear else place.gemm
        reason = "; ".join(filter(None, (info.reason, note.reason, place.remark)))
        shape = (parallel.rows, *info.shape)
        row = module, gemm, note.method, info.recipe, formats, shape, note.sent, reason
        yield dict(zip(COLUMNS, row, strict=True))


def format_report(rows: list[dict[str, Any]]) -> str:
    """The rows as an aligned table; equal rows are counted in the last column."""
    counts: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        cells = {**row, "shape": " x ".join(map(str, row["shape"])), "sent": f"{row['sent'] / 2**20:.2f} MiB"}
        counts[tuple(cells[column] for column in COLUMNS)] += 1
    return aligned([(*COLUMNS, "count"), *((*cells, str(count)) for cells, count in counts.items())])
