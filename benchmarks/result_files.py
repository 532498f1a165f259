"""Result files of the benchmarks: what was measured, on what, of which sources.

A file is one JSON object with RESULT_FIELDS, then whatever else its writer adds. Documents are rendered from
these files, so a number in a document can be traced to a run.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

RESULT_FIELDS = ("name", "date", "device", "driver", "cuda", "torch", "triton", "python", "tree", "rows")
_GEMM = ("op", "shape", "dtype", "m", "k", "n", "candidate")
# Benchmark -> the columns that name a row.
IDENTITY: dict[str, tuple[str, ...]] = {
    "modules": ("shape", "module", "candidate", "recipe"),
    "kernels": ("m", "n", "kernel"),
    "gemms": ("m", "k", "n", "gemm"),
    "recipes": ("recipe",),
    "graphs": ("shape", "module", "recipe"),
    "alone": ("shape", "recipe", "what", "candidate"),
    "host": ("shape", "module", "recipe"),
    "per_shard": ("tp", "recipe"),
    "layer_gain": ("tokens", "in_features", "out_features", "recipe"),
    "overlap": ("tp", "shape", "recipe", "method"),
    "overlap_gemms": _GEMM,
    "megatron_ranks": ("candidate", "recipe", "overlap", "tp", "pp", "dp"),
    "verbs": ("verb", "shape", "dtype", "candidate"),
    "overlap_played": ("played", *_GEMM),
    "peers": ("shape", "module", "recipe", "call", "candidate"),
    "grouped": ("section", "split", "what", "candidate"),
    "grouped_modules": ("section", "split", "what", "candidate"),
    "grouped_kernels": ("split", "what", "candidate"),
    "llama": ("library", "recipe", "fused", "compiled"),
    "megatron": ("candidate", "recipe"),
}
# gpu_check.py runs them only where --stages names them: three need other libraries, three their time.
BY_NAME = ("peers", "llama", "megatron", "graphs", "grouped", "alone")
Key = tuple[object, ...]
_TREE_SKIPPED = {"__pycache__", "build"}
_TREE_SKIPPED_SUFFIXES = (".pyc", ".so", ".o", ".egg-info")


def tree_hash(folder: Path | str) -> str:
    """git's tree hash of `folder` as it lies on disk, without git: sha1 over (mode, name, blob) entries.

    Build products that git ignores are left out. So a result says which sources it measured, also on a
    machine that got the files without their repository.
    """

    def digest(kind: str, body: bytes) -> bytes:
        return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body).digest()

    def tree(path: Path) -> bytes | None:
        entries = []
        for item in path.iterdir():
            if item.name in _TREE_SKIPPED or item.name.endswith(_TREE_SKIPPED_SUFFIXES):
                continue
            if item.is_dir():
                body = tree(item)
                if body is not None:  # git knows no empty folder
                    entries.append((item.name + "/", b"40000", item.name, body))
            else:
                mode = b"100755" if os.access(item, os.X_OK) else b"100644"
                entries.append((item.name, mode, item.name, digest("blob", item.read_bytes())))
        if not entries:
            return None
        entries.sort(key=lambda entry: entry[0].encode())
        return digest("tree", b"".join(mode + b" " + name.encode() + b"\0" + sha for _, mode, name, sha in entries))

    return (tree(Path(folder)) or digest("tree", b"")).hex()


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None


def environment(device: torch.device | str) -> dict[str, object]:
    """Device, driver and versions: what a reader needs to place a number."""
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "devices": torch.cuda.device_count() if cuda else 0,
        "driver": _driver_version() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
    }


def write_results(
    path: Path | str,
    name: str,
    rows: Sequence[dict],
    *,
    tree: str,
    device: torch.device | str,
    **extra: object,
) -> dict[str, object]:
    """Write one results file and return its content: RESULT_FIELDS, then `extra`. Floats keep 3 decimals."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content: dict[str, object] = {"name": name, "date": now, **environment(device), "tree": tree, **extra}
    content["rows"] = [
        {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} for row in rows
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return content


def keyed(content: dict) -> dict[Key, dict]:
    """The rows of a results file by their identity. ValueError where two rows have the same."""
    if content["name"] not in IDENTITY:
        raise ValueError(f"results of {content['name']!r}: no identity columns; add them to result_files.IDENTITY")
    found: dict[Key, dict] = {}
    for row in content["rows"]:
        key = tuple(row[name] for name in IDENTITY[content["name"]])
        if key in found:
            raise ValueError(f"results of {content['name']!r}: two rows are {key}; name what tells them apart")
        found[key] = row
    return found


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell, for a terminal."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
