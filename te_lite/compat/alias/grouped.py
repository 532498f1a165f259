"""transformer_engine.pytorch.GroupedLinear, with what Megatron asks of it for checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_lite.compat.alias.modules import Fp8Meta, quantizers
from te_lite.modules import grouped_linear


class GroupedFp8Meta(Fp8Meta):
    """With fp8_checkpoint: False, for there is no state of each expert to split."""

    def _known(self) -> dict[str, Any]:
        return {"fp8_checkpoint": False} | super()._known()


def _named(module: grouped_linear.GroupedLinear, name: str) -> Any:
    """Where a property raises an AttributeError, Python asks here, and nn.Module would answer without its words."""
    return quantizers(module) if name == "quantizers" else nn.Module.__getattr__(module, name)


grouped_linear.GroupedLinear.__getattr__ = _named  # type: ignore[method-assign, assignment]


class GroupedLinear(grouped_linear.GroupedLinear):
    """te_lite's, which answers Megatron's sharded checkpoints that there is no state to split: the entry of each expert
    is then the state of all experts of its rank, and loads where a rank has as many of them."""

    fp8 = fp8_calibration = False
    fp8_meta = property(GroupedFp8Meta)
