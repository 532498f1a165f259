"""transformer_engine.pytorch.initialize_ub: te_lite's with the one argument more that Transformer Engine's has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_lite.overlap import userbuffers


def initialize_ub(
    shape: Sequence[int], tp_size: int, use_fp8: bool = False, quantization_modes: Any = None,
    dtype: torch.dtype = torch.bfloat16, ub_cfgs: Any = None, bootstrap_backend: str | None = None,
    with_cublasmp: bool = False, **options: Any,
) -> None:  # fmt: skip
    """te_lite.initialize_ub, whose own `options` may follow. with_cublasmp=True raises NotImplementedError."""
    if with_cublasmp:
        raise NotImplementedError(
            "initialize_ub(with_cublasmp=True): te_lite overlaps by its own kernels and copies; leave it out"
        )
    userbuffers.initialize_ub(shape, tp_size, use_fp8, quantization_modes, dtype, ub_cfgs, bootstrap_backend, **options)
