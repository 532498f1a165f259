"""transformer_engine.pytorch.optimizers on torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

_STATES = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam (adam_w_mode=False) or AdamW by torch's fused kernel, with Transformer Engine's state.

    state: exp_avg and exp_avg_sq in fp32, whatever the parameter is; the step is one number in each group. A parameter
    of 16 bits is updated in fp32 and rounded once. Masters, states of other dtypes, decoupled gradients, capturable and
    bias_correction=False raise NotImplementedError.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
        capturable: bool = False, master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32, exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32, use_decoupled_grad: bool = False,
        store_param_remainders: bool = False, set_grad_none: bool | None = None,
    ) -> None:  # fmt: skip
        states = {"master_weight_dtype": master_weight_dtype, "exp_avg_dtype": exp_avg_dtype}
        wrong = [
            name for name, dtype in (states | {"exp_avg_sq_dtype": exp_avg_sq_dtype}).items() if dtype.itemsize != 4
        ]
        flags = {
            "master_weights": master_weights, "use_decoupled_grad": use_decoupled_grad, "amsgrad": amsgrad,
            "store_param_remainders": store_param_remainders, "bias_correction=False": not bias_correction,
            "capturable": capturable,
        }  # fmt: skip
        if wrong := wrong + [name for name, on in flags.items() if on]:
            raise NotImplementedError(f"FusedAdam({', '.join(wrong)}): te_lite's has fp32 states alone; leave it out")
        self.adam_w_mode = bool(adam_w_mode)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Zeros for `param`, before any step."""
        for name in _STATES:
            self.state[param].setdefault(name, torch.zeros_like(param, dtype=torch.float32))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which gives states the dtype of their parameter; these stay fp32."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            for name in _STATES:
                if name in (held := state_dict["state"].get(index, {})):
                    self.state[param][name] = held[name].detach().to(param.device, torch.float32, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            group["step"] += 1
            if params:
                self._step(group, params)
        return loss

    def _step(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.initialize_state(param)
        wide: list[Any] = [param.float() if param.dtype.itemsize < 4 else param for param in params]
        both = zip(params, wide, strict=True)
        grads = [param.grad.to(value.dtype) for param, value in both if param.grad is not None]
        averages, squares = ([self.state[param][name] for param in params] for name in _STATES)
        before = torch.full((len(params),), float(group["step"] - 1), device=params[0].device)  # adam() adds 1
        numbers = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        adam(
            wide, grads, averages, squares, [], list(before.unbind()), fused=True, amsgrad=False, maximize=False,
            decoupled_weight_decay=self.adam_w_mode, beta1=group["betas"][0], beta2=group["betas"][1], **numbers,
        )  # fmt: skip
        if narrow := [pair for pair in zip(params, wide, strict=True) if pair[0] is not pair[1]]:
            torch._foreach_copy_([param for param, _ in narrow], [value for _, value in narrow])


class FusedSGD(torch.optim.SGD):
    """torch.optim.SGD by its fused kernel. wd_after_momentum raises NotImplementedError."""

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
        materialize_master_grads: bool = True, set_grad_none: bool | None = None,
    ) -> None:  # fmt: skip
        if wd_after_momentum:
            raise NotImplementedError("FusedSGD(wd_after_momentum=True): te_lite's decays before; leave it out")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, fused=True)


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
