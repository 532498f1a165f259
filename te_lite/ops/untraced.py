"""What torch.compile leaves to Python. To be imported where dynamo traces: it imports dynamo, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def constant(function: Any) -> Any:
    """Decorates what dynamo is to call while it traces, with constants, and whose result is one."""
    function._dynamo_marked_constant = True
    return function


class _Left:
    """One attribute for each reason: a function that dynamo leaves to Python for it."""


_left = _Left()
_reasons: dict[str, str] = {}  # to the attribute


@constant
def _named(reason: str) -> str:
    if reason not in _reasons:
        name = _reasons[reason] = f"reason_{len(_reasons)}"
        setattr(_left, name, torch.compiler.disable(_call, reason=reason))
    return _reasons[reason]


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def untraced(reason: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs) as in eager mode, nothing in it compiled: one graph break, which `reason` explains.
    With fullgraph=True that is an error."""
    return getattr(_left, _named(reason))(function, *args, **kwargs)
