"""Files that te_lite keeps from one process to the next, in the folder TE_LITE_CACHE (default ~/.cache/te_lite)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def folder() -> Path:
    """Where they are; it may not exist yet."""
    return Path(os.environ.get("TE_LITE_CACHE") or os.path.expanduser("~/.cache/te_lite"))


def write(path: Path, content: bytes) -> None:
    """Replaces `path` as a whole, whoever else reads or writes it; a file that cannot be written is no error."""
    new = path.with_suffix(f".{os.getpid()}-{time.time_ns()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
        new.replace(path)
