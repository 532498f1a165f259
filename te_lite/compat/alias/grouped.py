"""transformer_engine.pytorch.GroupedLinear, with what Megatron asks of it for checkpoints."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from te_lite.modules import grouped_linear


class GroupedLinear(grouped_linear.GroupedLinear):
    """te_lite's, which answers Megatron's sharded checkpoints that there is no state to split: the entry of each expert
    is then the state of all experts of its rank, and loads where a rank has as many of them."""

    fp8 = fp8_calibration = False
    fp8_meta: Any = MappingProxyType({"fp8_checkpoint": False})

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Called before a state is loaded. Nothing is needed: ours is made when a recipe needs it."""
