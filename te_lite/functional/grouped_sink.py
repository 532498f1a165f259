"""Where the weight gradients of a GroupedLinear go, as functional/plan.py's sinks for one linear."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from te_lite.functional.grouped import Wgrad
from te_lite.ops.grouped_gemm import group_wgrad_accumulate_


class GroupedSink:
    """What becomes of the weight gradients of a GroupedLinear: its autograd, main_grad, or a queue until backward_dw().

    late: the last of these.
    """

    def __init__(self, fused: bool, late: bool) -> None:
        self.fused, self.late = fused, late
        self.queue: deque[Callable[[], None]] = deque()

    def take(self, weights: tuple[Any, ...], wgrad: Wgrad) -> Tensor | None:
        """What autograd gets for [G, N, K]. weights: the parameters, one a group or one for all."""
        if self.late:
            copied = wgrad if wgrad.rule.kind != "none" and not wgrad.rule.hp_wgrad else _own(wgrad)
            self.queue.append(partial(self._now, weights, copied))
        elif not self.fused:
            return wgrad(weights[0].dtype)
        else:
            self._now(weights, wgrad)
        if not self.fused or not hasattr(weights[0], "grad_added_to_main_grad"):
            return None
        for weight in weights:
            weight.grad_added_to_main_grad = True
        zeroed = any(getattr(weight, "zero_out_wgrad", False) for weight in weights)
        shape = weights[0].shape if weights[0].dim() == 3 else (len(weights), *weights[0].shape)
        return (weights[0].new_zeros if zeroed else weights[0].new_empty)(shape)  # Megatron's hooks look for a gradient

    def _now(self, weights: tuple[Any, ...], wgrad: Wgrad) -> None:
        for weight in weights:
            if weight.numel() and not weight.untyped_storage().nbytes():
                raise RuntimeError(
                    f"backward_dw() for a weight {tuple(weight.shape)} whose memory is freed, as FSDP does after "
                    "backward: its gradient would reach nobody; leave out delay_wgrad_compute"
                )
        if not self.fused:
            dw = wgrad(weights[0].dtype)
            for weight, one in zip(weights, [dw] if weights[0].dim() == 3 else dw.unbind(), strict=True):
                weight.grad = one if weight.grad is None else weight.grad.add_(one)
            return
        for weight in weights:
            if getattr(weight, "overwrite_main_grad", False):
                weight.main_grad.zero_()
        grads = [weight.main_grad for weight in weights]
        outs = list(grads[0].unbind()) if grads[0].dim() == 3 else grads
        rule = wgrad.rule
        group_wgrad_accumulate_(outs, *wgrad.operands(), rule.wgrad_scaling == "none", rule.fast[2])

    def run_next(self) -> bool:
        """Computes the oldest weight gradients that were put off; False when there are none."""
        if not self.queue:
            return False
        self.queue.popleft()()
        return True


def _own(wgrad: Wgrad) -> Wgrad:
    """With copies of what is not quantized: after backward the caller may write to x and dy."""
    dy, x = (one._replace(data=one.data.clone()) for one in (wgrad.dy, wgrad.x))
    return wgrad._replace(dy=dy, x=x)
