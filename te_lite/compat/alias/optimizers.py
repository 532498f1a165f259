"""transformer_engine.pytorch.optimizers on torch's fused kernels. FusedAdam is in fused_adam.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_lite.compat.alias.fused_adam import FusedAdam, drops_gradients

__all__ = ["FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"]


def _is_on_gpus(group: dict[str, Any]) -> bool:
    return all([param.is_cuda for param in group["params"]])


class FusedSGD(torch.optim.SGD):
    """torch.optim.SGD by its fused kernel, on GPUs: on the CPU that kernel gives wrong numbers in 16 bits.

    set_grad_none: as zero_grad's set_to_none, for all calls. materialize_master_grads: accepted; there are no masters.
    wd_after_momentum raises NotImplementedError.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
        materialize_master_grads: bool = True, set_grad_none: bool | None = None,
    ) -> None:  # fmt: skip
        if wd_after_momentum:
            raise NotImplementedError("FusedSGD(wd_after_momentum=True): te_lite's decays before; leave it out")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.set_grad_none = set_grad_none

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["fused"] = _is_on_gpus(group)
        return super().step(closure)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]  # torch writes it, where fused is given
        """Asked by torch.amp.GradScaler, which then leaves the gradients to step(): only fused kernels divide them."""
        return all([_is_on_gpus(group) for group in self.param_groups])

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or fills them with 0 if set_to_none is False."""
        super().zero_grad(drops_gradients(self.set_grad_none, set_to_none))


def multi_tensor_applier(op: Callable[..., Any], noop_flag: Tensor, tensor_lists: Sequence[Any], *args: Any) -> Any:
    """op(chunk size, noop_flag, tensor_lists, *args)."""
    return op(0, noop_flag, tensor_lists, *args)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: Any
) -> None:
    """tensor_lists (source, target): target = source * scale, in target's dtypes; noop_flag becomes 1 where a source is
    not finite."""
    sources, targets = (list(tensors) for tensors in tensor_lists)
    if not sources:
        return
    largest = torch.stack(torch._foreach_norm(sources, torch.inf, dtype=torch.float32))
    noop_flag.masked_fill_(~largest.isfinite().all(), 1)
    torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(fp32 [1], the norm of all tensors; [len(tensors)], that of each, if per_tensor)."""
    norms = torch.stack(torch._foreach_norm(list(tensor_lists[0]), 2, dtype=torch.float32))
    return torch.linalg.vector_norm(norms).view(1), norms if per_tensor else None
