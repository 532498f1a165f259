"""How a format or quantizer is written into a file: the name of its class, and its fields as plain values."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields
from typing import Any, TypeVar

from te_lite.quantize.qtensor import TensorFormat
from te_lite.quantize.quantizer import Quantizer

Kind = TypeVar("Kind", TensorFormat, Quantizer)
Spec = tuple[str, dict[str, Any]]


def to_spec(value: TensorFormat | Quantizer) -> Spec:
    """("module:class", fields); without `format`, which a quantizer shares with its tensor."""
    names = [item.name for item in fields(value) if item.name != "format"]
    return f"{type(value).__module__}:{type(value).__qualname__}", {name: getattr(value, name) for name in names}


def from_spec(spec: Spec, kind: type[Kind], **given: Any) -> Kind:
    """The value that to_spec described, of a subclass of `kind`: a file can make nothing else. given: more fields."""
    name, values = spec
    module, _, attribute = name.partition(":")
    if module.startswith("te_lite.quantize."):
        importlib.import_module(module)
    found = getattr(sys.modules.get(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise TypeError(f"{name!r} in a file is no {kind.__name__} that is known; import the module that defines it")
    return found(**values, **given)
