"""What torch.utils.flop_counter counts of te_lite's products: 2 * M * N * K each, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from te_lite.ops.registry import Op, register, returns_nothing


def product_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """The number of floating-point operations of a[M, K] @ b[N, K]^T."""
    return 2 * a[0] * a[1] * b[0]


def counts_product(op: Op) -> Op:
    """`op`, whose first arguments are a[M, K] and b[N, K], counted."""
    register_flop_formula(op.overload.overloadpacket)(product_flops)
    return op


# A launch as dispatch modes see it where no op of te_lite or torch stands for it.
_launched = counts_product(register("launched(Tensor a, Tensor b) -> ()", cpu=returns_nothing, cuda=returns_nothing))
_modes = torch._C._len_torch_dispatch_stack


def launched(a: Tensor, b: Tensor) -> None:
    """a[M, K] @ b[N, K]^T is computed by a launch of te_lite's own. Within an op no mode sees it, and none has to."""
    if _modes():
        _launched(a, b)
