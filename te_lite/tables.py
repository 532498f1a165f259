"""What people read: tables and warnings."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any


def aligned(table: list[Any]) -> str:
    """Rows of strings as columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "\n".join(line.rstrip() for line in lines)


@cache
def warn_once(about: Any, text: str) -> None:
    """A UserWarning, one for each text and `about` (a weakref.ref of the object, or a name). It points at the newest
    frame outside of te_lite and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("te_lite", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
