"""The import hook that makes `import transformer_engine` find te_lite. Standard library only, and no relative import:
site/sitecustomize.py runs this file in every process of `python -m te_lite.compat`, long before torch is wanted."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOTS = ("transformer_engine", "transformer_engine_torch")
OVER = "TE_LITE_REPLACE_TE"  # 1: also where the real one is installed
VERSION = "2.10.0+te.lite"  # the Transformer Engine whose names and signatures are followed


class AliasDistribution(importlib.metadata.Distribution):
    """What importlib.metadata says of `transformer-engine`: it is nowhere on disk."""

    _files = {
        "METADATA": f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {VERSION}\n"
        "Summary: te_lite under Transformer Engine's name\n",
        "top_level.txt": "\n".join(ROOTS),
    }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: te_lite's alias of transformer-engine has no files of its own")


class AliasFinder(MetaPathFinder, Loader):
    """Finds the modules of te_lite/compat/alias/names.py and the distribution, and makes the modules."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ROOTS:
            return None
        refuse_real()
        from te_lite.compat.alias.names import MODULES

        if fullname not in MODULES:
            return None
        package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, self, origin="te_lite", is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        from te_lite.compat.alias.names import fill

        fill(module)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if (name is None or re.sub("[-_.]+", "-", name).lower() == "transformer-engine") and not _hidden():
            yield AliasDistribution()


def _hidden() -> str | None:
    """Where the real Transformer Engine lies that the alias must not hide; None where there is none, or by OVER."""
    if os.environ.get(OVER) == "1":
        return None
    if (loaded := sys.modules.get(ROOTS[0])) is not None and not is_alias(loaded):
        return str(loaded.__spec__ and loaded.__spec__.origin)
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and not _is_ours(finder) and (spec := find(ROOTS[0], None)) is not None:
            return str(spec.origin)
    return None


def refuse_real() -> None:
    """ImportError where the real Transformer Engine is installed."""
    if (where := _hidden()) is not None:
        raise ImportError(
            f"transformer_engine is installed at {where}: te_lite's alias would hide it; uninstall it, or set {OVER}=1"
        )


def _is_ours(finder: Any) -> bool:
    """By name: sitecustomize.py made its finder of another copy of this file."""
    return type(finder).__name__ == AliasFinder.__name__


def is_alias(module: ModuleType) -> bool:
    return module.__spec__ is not None and module.__spec__.origin == "te_lite"


def install() -> None:
    """Puts the hook in front of all others, once."""
    refuse_real()
    if not any(map(_is_ours, sys.meta_path)):
        sys.meta_path.insert(0, AliasFinder())
