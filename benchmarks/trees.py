"""Trees of te_lite beside each other: a folder or a git revision, with the extension that belongs to it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.commands import SAFE_ENVIRONMENT
from benchmarks.result_files import tree_hash

ROOT = Path(__file__).resolve().parents[1]


def tree(what: str, scratch: Path) -> Path:
    """The folder of a tree: `what` itself where it is one, else the files of that git revision, put below `scratch`.

    ValueError where it is neither, or holds no te_lite.
    """
    if Path(what).is_dir():
        folder = Path(what).resolve()
    else:
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", what], capture_output=True)
        if packed.returncode:
            said = packed.stderr.decode().strip()
            raise ValueError(f"{what!r}: must be a folder or a git revision; git says: {said}")
        folder = scratch / "tree"
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    if not (folder / "te_lite" / "__init__.py").exists():
        raise ValueError(f"{what!r}: holds no te_lite/__init__.py; give the root of a checkout")
    return folder


def extension(folder: Path) -> Path | None:
    """The built te_lite._C of this Python in a tree."""
    found = sorted((folder / "te_lite").glob(f"_C.{sys.implementation.cache_tag}*.so"))
    return found[0] if found else None


def _sources(folder: Path) -> tuple[str, bytes]:
    return tree_hash(folder / "te_lite" / "csrc"), (folder / "setup.py").read_bytes()


def build_extension(folder: Path, like: Path) -> None:
    """Leaves te_lite._C in `folder` where it has none: that of the tree `like` where the sources are the same, else
    built. RuntimeError with the compiler's words where that fails."""
    if extension(folder) is not None:
        return
    other = extension(like)
    if other is not None and _sources(folder) == _sources(like):
        shutil.copy2(other, folder / "te_lite" / other.name)
        return
    print(f"building te_lite._C in {folder}", flush=True)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if built.returncode or extension(folder) is None:
        raise RuntimeError(f"setup.py build_ext in {folder}: {built.stdout[-2000:]}{built.stderr[-2000:]}")


def two_trees(old: str, new: str, scratch: Path) -> tuple[Path, Path]:
    """Both folders, each with its extension."""
    folders = tree(old, scratch / "old"), tree(new, scratch / "new")
    for folder, other in (folders, folders[::-1]):
        build_extension(folder, other)
    return folders


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """For a process that imports te_lite of this tree and of no other."""
    return {
        **os.environ,
        **SAFE_ENVIRONMENT,
        "PYTHONPATH": str(folder),
        "PYTHONSAFEPATH": "",  # the script's own folder stays on the path
        "OMP_NUM_THREADS": "1",
        **variables,
    }
