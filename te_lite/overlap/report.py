"""overlap_report(): which schedule and recipe every GEMM of every module uses, and why not another."""

from __future__ import annotations

import weakref
from typing import Any

_rows: weakref.WeakKeyDictionary[Any, dict[str, dict[str, str]]] = weakref.WeakKeyDictionary()


def record(module: Any, gemm: str, *, schedule: str, recipe: str, reason: str) -> None:
    """Notes what the newest plan of one linear of `module` does; gemm: "linear", "fc1" or "fc2"."""
    name = getattr(module, "name", None) or type(module).__name__
    _rows.setdefault(module, {})[gemm] = {
        "module": name,
        "gemm": gemm,
        "schedule": schedule,
        "recipe": recipe,
        "reason": reason,
    }


def overlap_report() -> list[dict[str, str]]:
    """One row for each linear that has run: module, gemm, schedule, recipe, reason (empty when all is as asked)."""
    return [dict(row) for rows in _rows.values() for row in rows.values()]


def format_report(rows: list[dict[str, str]]) -> str:
    """The rows as an aligned table; equal rows are counted in the last column."""
    counts: dict[tuple[str, ...], int] = {}
    head = ("module", "gemm", "schedule", "recipe", "reason")
    for row in rows:
        key = tuple(row[column] for column in head)
        counts[key] = counts.get(key, 0) + 1
    table = [(*head, "count"), *((*key, str(count)) for key, count in counts.items())]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )
