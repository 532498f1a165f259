"""Files that te_lite keeps from one process to the next, in the folder TE_LITE_CACHE (default ~/.cache/te_lite)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path


@cache
def sources() -> str:
    """A digest of te_lite's source, for what torch keeps: another te_lite must not find it."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return sha256(b"".join([file.read_bytes() for file in files])).hexdigest()


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
