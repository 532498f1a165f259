"""overlap_report(): which schedule and recipe every GEMM of every module uses, and why not another."""

from __future__ import annotations

import weakref
from typing import Any

from te_lite.tables import aligned

_rows: weakref.WeakKeyDictionary[Any, dict[str, dict[str, str]]] = weakref.WeakKeyDictionary()


GEMMS = ("fprop", "dgrad", "wgrad")


def record(module: Any, linear: str, *, schedule: str, recipe: str, formats: tuple[str, ...], reason: str) -> None:
    """Notes what the newest plan of one linear of `module` does; formats: of the operands of its three GEMMs.

    linear: "" for a module that is one linear, "fc1" or "fc2"; a GEMM is then called "fprop" or "fc1_fprop" and so on.
    """
    rows = _rows.setdefault(module, {})
    for gemm, operands in zip(GEMMS, formats, strict=True):
        name = f"{linear}_{gemm}" if linear else gemm
        rows[name] = {
            "module": getattr(module, "name", None) or type(module).__name__,
            "gemm": name,
            "schedule": schedule,
            "recipe": recipe,
            "operands": operands,
            "reason": reason,
        }


def overlap_report() -> list[dict[str, str]]:
    """One row for each GEMM of each module that has run: module, gemm, schedule, recipe, the number formats of its two
    operands, and the reason where something is not as asked."""
    return [dict(row) for rows in _rows.values() for row in rows.values()]


def format_report(rows: list[dict[str, str]]) -> str:
    """The rows as an aligned table; equal rows are counted in the last column."""
    counts: dict[tuple[str, ...], int] = {}
    head = ("module", "gemm", "schedule", "recipe", "operands", "reason")
    for row in rows:
        key = tuple(row[column] for column in head)
        counts[key] = counts.get(key, 0) + 1
    table = [(*head, "count"), *((*key, str(count)) for key, count in counts.items())]
    return aligned(table)
