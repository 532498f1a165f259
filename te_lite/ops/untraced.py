"""What torch.compile leaves to Python. To be imported where dynamo traces: it imports dynamo, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="te_lite's linears and its autocast are not traced; leave out fullgraph=True")
def untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs) as in eager mode, nothing in it compiled: one graph break."""
    return function(*args, **kwargs)
