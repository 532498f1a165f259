"""What holds at this moment, as attributes: in_backward, capturing. Code that dynamo traces reads them here.

torch.compile guards what traced code read: it asks again before each call, and this module answers anew each time.
"""

from __future__ import annotations

import torch

from te_lite.ops import registry


def __getattr__(name: str) -> bool:
    if name == "in_backward":
        return torch._C._current_graph_task_id() != -1
    if name == "capturing":  # a CUDA graph
        return registry.capturing()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
