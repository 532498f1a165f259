"""Runs at the start of each Python process of `python -m te_lite.compat`, which puts this folder on PYTHONPATH."""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(path: str, name: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_finder = _run(os.path.join(os.path.dirname(_HERE), "finder.py"), "te_lite_alias_finder")
sys.meta_path.insert(0, _finder.AliasFinder())

# The sitecustomize that would have run without this folder.
_others = [path for path in sys.path if os.path.abspath(path) != _HERE]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.origin:
    _run(_next.origin, "sitecustomize")
