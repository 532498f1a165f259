"""What torch.compile leaves to Python. To be imported where dynamo traces: it imports dynamo, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_by_reason: dict[str, Callable[..., Any]] = {}


def untraced(reason: str) -> Callable[..., Any]:
    """(function, *args) -> function(*args) as in eager mode, nothing in it compiled: one graph break, which `reason`
    explains; with fullgraph=True an error that says it."""
    if reason not in _by_reason:
        _by_reason[reason] = torch.compiler.disable(_call, reason=reason)
    return _by_reason[reason]


untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # dynamo calls it when it traces
