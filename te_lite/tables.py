"""Tables for people to read."""

from __future__ import annotations

from typing import Any


def aligned(table: list[Any]) -> str:
    """Rows of strings as columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "\n".join(line.rstrip() for line in lines)
