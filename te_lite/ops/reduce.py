"""provisional"""

import torch
from torch import Tensor


def reduce_slots(staging: Tensor, own: Tensor, bias: Tensor | None, rank: int, out_dtype: torch.dtype) -> Tensor:
    size = staging.shape[0]
    total = torch.zeros_like(own, dtype=torch.float32)
    for i in range(1, size):
        total += staging[(rank + i) % size].float()
    total += own.float()
    if bias is not None:
        total += bias.float()
    return total.to(out_dtype)
