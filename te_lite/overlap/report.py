"""overlap_report(): how every GEMM of every module communicates, what it moves, and why not as asked."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

from te_lite.overlap.schedule import Note, Schedule
from te_lite.tables import aligned

_rows: weakref.WeakKeyDictionary[Any, dict[str, dict[str, Any]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # of _rows: a thread may build plans while another reports

GEMMS = ("fprop", "dgrad", "wgrad")
COLUMNS = ("module", "gemm", "schedule", "recipe", "operands", "shape", "sent", "reason")


def record(module: Any, linear: str, formats: tuple[str, ...], **shared: Any) -> None:
    """Notes the newest plan of one linear of `module`. formats: of the operands of its three GEMMs.

    linear: "" for a module that is one linear, "fc1" or "fc2"; a GEMM is then called "fprop" or "fc1_fprop" and so on.
    shared: columns that its GEMMs have in common: schedule (a Schedule), recipe, shape (K, N), reason.
    """
    made = {}
    for gemm, operands in zip(GEMMS, formats, strict=True):
        name = f"{linear}_{gemm}" if linear else gemm
        owner = getattr(module, "name", None) or type(module).__name__
        made[name] = dict.fromkeys(COLUMNS) | {"module": owner, "gemm": name, "operands": operands, **shared}
    with _lock:
        _rows.setdefault(module, {}).update(made)


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what the newest call has added."""
    schedule: Schedule = row["schedule"]
    # A GEMM that moves nothing of its own: what it reads another has brought.
    gemm = row["gemm"].rpartition("_")[2]
    nothing = Note("local" if schedule.notes else schedule.methods.get(gemm, schedule.name), 0)
    note = schedule.notes.get(gemm, nothing)
    return row | {
        "schedule": note.method,
        "shape": (schedule.rows, *row["shape"]),
        "sent": note.sent,
        "reason": "; ".join(filter(None, (row["reason"], note.reason, schedule.remarks.get(gemm)))),
    }


def overlap_report() -> list[dict[str, Any]]:
    """One row for each GEMM of each module that has run, of its newest call.

    module, gemm; schedule: "local", "collective", "ring", "pipeline", "fused", "bulk", "external" (of wgrad: of the
    exchange beside it); recipe and the number formats of the two operands; shape: (M, K, N) of the forward GEMM on this
    rank; sent: bytes that this rank sent to others; reason: where something is not as asked, why.
    """
    with _lock:
        rows = [row for rows in _rows.values() for row in rows.values()]
    return [_told(row) for row in rows]


def format_report(rows: list[dict[str, Any]]) -> str:
    """The rows as an aligned table; equal rows are counted in the last column."""
    counts: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        cells = {**row, "shape": " x ".join(map(str, row["shape"])), "sent": f"{row['sent'] / 2**20:.2f} MiB"}
        counts[tuple(cells[column] for column in COLUMNS)] += 1
    return aligned([(*COLUMNS, "count"), *((*cells, str(count)) for cells, count in counts.items())])
