"""transformer_engine.pytorch.optimizers.FusedAdam on torch's fused kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_lite.compat.alias.adam_states import (
    MASTER,
    MOMENTS,
    STORED,
    AdamStates,
    capturing,
    join_master,
    split_master_,
    store_,
)
from te_lite.quantize.tensor import QuantizedTensor

_WIDTHS = (torch.float32, torch.float16, torch.bfloat16)
_PART = 1 << 25  # elements that are updated at once: what is not kept in fp32 has a copy of 128 MiB for the time


def _check_dtype(name: str, dtype: torch.dtype, allowed: Iterable[torch.dtype]) -> None:
    if dtype not in allowed:
        names = ", ".join(str(one) for one in allowed)
        raise ValueError(f"FusedAdam({name}={dtype}): must be one of {names}; pass one of them")


def _parts(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """In order, with at most _PART elements, or one pair that has more."""
    part: list[tuple[Tensor, Tensor]] = []
    elements = 0
    for pair in pairs:
        elements += pair[0].numel()
        if part and elements > _PART:
            yield part
            part, elements = [], pair[0].numel()
        part.append(pair)
    if part:
        yield part


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def drops_gradients(set_grad_none: bool | None, set_to_none: bool | None) -> bool:
    """What zero_grad(set_to_none) of an optimizer built with set_grad_none does: whether it drops them, or writes 0."""
    if set_grad_none is not None and set_to_none not in (None, set_grad_none):
        raise ValueError(
            f"zero_grad(set_to_none={set_to_none}): must be {set_grad_none}, as set_grad_none was given; leave out one"
        )
    return set_to_none is not False and set_grad_none is not False


class FusedAdam(AdamStates):
    """Adam (adam_w_mode=False) or AdamW by torch's fused kernel, with Transformer Engine's arguments and states.

    For each parameter, all in fp32:

        wide = master, or the parameter
        wide, exp_avg, exp_avg_sq = adam(wide, gradient, exp_avg, exp_avg_sq)
        parameter, master, exp_avg, exp_avg_sq = each rounded once, from fp32 to its own dtype

    params: fp32, fp16, bf16 or quantized. Groups hold lr, step, betas, eps, weight_decay and bias_correction.
    bias_correction: False leaves out the division of both averages by 1 - beta**step.
    master_weights: the state master_param. An fp32 parameter is its own master; the state is a copy of it.
    master_weight_dtype: fp32 or fp16. exp_avg_dtype, exp_avg_sq_dtype: fp32, bf16, fp16, or uint8 for E4M3. States of
    fp16 and E4M3 have a scale for each tensor.
    use_decoupled_grad: gradients are read from param.decoupled_grad, in any dtype, in place of param.grad.
    store_param_remainders: of a bf16 parameter with an fp32 master, the state is int16: the master's lower half. The
    parameter is the upper half, rounded; see adam_states.py. It has no effect on others.
    capturable: lr (fp32) and step (int32 [1]) are tensors beside the parameters. A torch.amp.GradScaler passes its
    scale and its found_inf on, so that no step waits for the host.

    Raises ValueError for other dtypes of states, TypeError for other dtypes of parameters, NotImplementedError for
    amsgrad, for capturable with quantized parameters, and for DTensors with scaled states or remainders.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
        capturable: bool = False, master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32, exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32, use_decoupled_grad: bool = False,
        store_param_remainders: bool = False, set_grad_none: bool | None = None,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise NotImplementedError("FusedAdam(amsgrad=True): there is none, as in Transformer Engine; leave it out")
        if master_weights:
            _check_dtype("master_weight_dtype", master_weight_dtype, (torch.float32, torch.float16))
        _check_dtype("exp_avg_dtype", exp_avg_dtype, STORED)
        _check_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype, STORED)
        if set_grad_none is not None:
            warnings.warn("FusedAdam(set_grad_none): pass set_to_none to zero_grad", DeprecationWarning, stacklevel=2)
        self.adam_w_mode, self.capturable, self.set_grad_none = bool(adam_w_mode), bool(capturable), set_grad_none
        self.master_weights, self.use_decoupled_grad = bool(master_weights), bool(use_decoupled_grad)
        self._asked_remainders = bool(store_param_remainders)
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype.itemsize == 4
        dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.name_to_dtype_map = dtypes | ({MASTER: master_weight_dtype} if master_weights else {})
        self._scales, self._quantized = {}, []
        if capturable:
            self._step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0,
                     "bias_correction": bool(bias_correction)},
        )  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            if param.dtype not in _WIDTHS:
                names = ", ".join(str(one) for one in _WIDTHS)
                raise TypeError(f"FusedAdam got a parameter of {param.dtype}: must be of {names}; cast it first")
            if isinstance(param, QuantizedTensor):
                if self.capturable:
                    raise NotImplementedError("FusedAdam(capturable=True) with quantized parameters; leave it out")
                self._quantized.append(param)
        if self.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
            group["step"] = torch.full((1,), int(group["step"]), dtype=torch.int32, device=device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients that step() reads, or fills them with 0 if set_to_none is False."""
        drop = drops_gradients(self.set_grad_none, set_to_none)
        if not self.use_decoupled_grad:
            super().zero_grad(drop)
            return
        for group in self.param_groups:
            for param in group["params"]:
                if drop:
                    param.decoupled_grad = None
                elif (grad := getattr(param, "decoupled_grad", None)) is not None:
                    grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient. The step of a group counts also where none has."""
        if not self.capturable and capturing():
            raise RuntimeError("FusedAdam.step in a CUDA graph repeats one step's numbers; give it capturable=True")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if self.capturable and found_inf is not None and group["params"]:
                group["step"] += (found_inf.to(group["step"].device) != 1).to(torch.int32)
            else:
                group["step"] += 1
            for param in group["params"]:
                self.initialize_state(param)
            pairs = [(param, grad) for param in group["params"] if (grad := self._grad(param)) is not None]
            for part in _parts(pairs):
                self._step(group, part, found_inf)
        return loss

    def _grad(self, param: Tensor) -> Tensor | None:
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        grad = getattr(param, name, None)
        if grad is None:
            return None
        if grad.is_sparse:
            raise NotImplementedError(f"FusedAdam: a sparse {name}; make it dense")
        if grad.shape != param.shape or grad.device != param.device:
            raise ValueError(
                f"FusedAdam: {name} is {tuple(grad.shape)} on {grad.device}: must be as its parameter, "
                f"{tuple(param.shape)} on {param.device}; reshape or move it"
            )
        return grad

    def _wide(self, param: Tensor) -> Tensor:
        """fp32, contiguous: what the kernel updates for `param`."""
        if not self.master_weights or (param.dtype == torch.float32 and not isinstance(param, QuantizedTensor)):
            return self._plain(param)
        if self._has_remainder(param):
            return join_master(param, self.state[param][MASTER])
        return self.get_unscaled_state(param, MASTER)

    def _step(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]], found_inf: Tensor | None) -> None:
        params = [param for param, _ in pairs]
        wide = [self._wide(param) for param in params]
        # All are given to torch's kernel flat: on the CPU it mistakes other strides, on a GPU it refuses them.
        grads = [_local(grad).float().contiguous().view(-1) for _, grad in pairs]
        moments = {name: [self.get_unscaled_state(param, name) for param in params] for name in MOMENTS}
        device = grads[0].device
        if not group["bias_correction"]:
            step = torch.full((), torch.inf, device=device)  # beta ** inf is 0
        elif self.capturable:
            step = group["step"].to(torch.float32).view(())
        else:
            step = torch.full((), float(group["step"]), device=device)
        if self.capturable and not isinstance(group["lr"], Tensor):
            raise TypeError(
                f"FusedAdam(capturable=True): lr is {group['lr']}: must stay the tensor it was, which graphs read; use "
                "group['lr'].fill_(value)"
            )
        adam = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        averages, squares = ([_local(one).view(-1) for one in moments[name]] for name in MOMENTS)
        adam(
            [_local(value).view(-1) for value in wide], grads, averages, squares, [], [step] * len(params),
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )  # fmt: skip
        if getattr(self, "grad_scale", None) is not None:  # which the kernel has taken out of what it was given
            for (_, grad), divided in zip(pairs, grads, strict=True):
                if _local(grad).data_ptr() != divided.data_ptr():
                    _local(grad).copy_(divided.view(_local(grad).shape))
        self._write(params, wide, moments | ({MASTER: wide} if self.master_weights else {}))

    def _write(self, params: list[Tensor], wide: list[Tensor], states: dict[str, list[Tensor]]) -> None:
        """Rounds fp32 numbers to the parameters and to the states, where they are not those themselves."""
        plain: list[tuple[Tensor, Tensor]] = []
        for param, value in zip(params, wide, strict=True):
            if isinstance(param, QuantizedTensor):
                param.quantize_(value)
            elif self._has_remainder(param):
                split_master_(param, self.state[param][MASTER], value)
            elif _local(param).data_ptr() != _local(value).data_ptr():
                plain.append((_local(param.detach()), _local(value)))
        for name, values in states.items():
            for param, value in zip(params, values, strict=True):
                stored, scale = self.state[param][name], self._scale(param, name)
                if scale is not None:
                    store_(stored, scale, value)
                elif stored is not value and stored.dtype != torch.int16:
                    plain.append((_local(stored), _local(value)))
        if plain:
            torch._foreach_copy_([param for param, _ in plain], [value for _, value in plain])
