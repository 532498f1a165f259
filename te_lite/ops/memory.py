"""What the current GPU's allocator has given out, and what it could still give."""

import torch


def allocated() -> int:
    """Bytes given out so far, those that it got back included."""
    return torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["allocated"]


def room() -> int:
    """Bytes that it could still give out."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
