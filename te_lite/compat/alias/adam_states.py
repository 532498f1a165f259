"""The states of FusedAdam: how fp32 numbers are kept in fewer bits, and how they are read, written and saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from te_lite.quantize.tensor import QuantizedTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
# What a caller names, and what the state's tensor is made of. uint8 stands for fp8, as in Transformer Engine.
STORED = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.uint8: torch.float8_e4m3fn,
}
# The largest number that a scaled state holds. The others need no scale.
RANGE = {torch.float16: torch.finfo(torch.float16).max / 2, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
_MANTISSA = 0x7FFFFF
_SMALLEST = torch.finfo(torch.float32).tiny


def store_(stored: Tensor, scale: Tensor | None, wide: Tensor) -> None:
    """stored = wide / scale, rounded to nearest even; scale is None for fp32 and bf16, where it is 1.

    stored: fp32, bf16, fp16 or float8_e4m3fn; wide: fp32, of the same shape; scale: fp32 [1], written first. It is the
    smallest power of two with max |wide| / scale <= RANGE. So stored * scale is exact, and storing that again gives the
    same numbers. All become NaN where one is not finite.
    """
    if scale is None or not wide.numel():
        stored.copy_(wide)
        return
    wide = wide.to(stored.device)
    needed = wide.abs().amax() / RANGE[stored.dtype]
    power = ((needed.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)
    scale.copy_(torch.where(needed.isfinite(), power.clamp_min(_SMALLEST), needed))
    stored.copy_(wide * scale.view(()).reciprocal())


def restore(stored: Tensor, scale: Tensor | None) -> Tensor:
    """stored * scale, fp32; `stored` itself if it is fp32 or int16."""
    if stored.dtype in (torch.float32, torch.int16):
        return stored
    wide = stored.float()
    return wide if scale is None else wide.mul_(scale.view(()))


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master: the integer (bits of param << 16) + remainder, read as fp32.

    param: bf16; remainder: int16, signed, of the same shape.
    """
    upper = param.detach().view(torch.int16).to(torch.int32) << 16
    return (upper + remainder).contiguous().view(torch.float32)


def split_master_(param: Tensor, remainder: Tensor, master: Tensor) -> None:
    """What join_master puts together. param is the nearest bf16; a tie goes away from zero, not to even.

    master: fp32. Its NaNs become the one NaN whose lower bits are 0: rounding another's up could leave a number.
    """
    bits = master.masked_fill(master.isnan(), torch.nan).view(torch.int32)
    lower = bits.to(torch.int16)
    remainder.copy_(lower)
    param.view(torch.int16).copy_((bits - lower) >> 16)


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class AdamStates(torch.optim.Optimizer):
    """exp_avg, exp_avg_sq and master_param of each parameter. FusedAdam's constructor says which, and in which dtypes.

    name_to_dtype_map: of the states that there are, as their dtypes were asked for.
    """

    name_to_dtype_map: dict[str, torch.dtype]
    master_weights: bool
    store_param_remainders: bool  # of bf16 parameters
    _asked_remainders: bool  # in the constructor, which has no effect without fp32 masters
    capturable: bool
    _scales: dict[Tensor, dict[str, Tensor]]  # fp32 [1] by parameter and name, where a state has one
    _quantized: list[Tensor]  # the quantized parameters that were given

    def _plain(self, param: Tensor) -> Tensor:
        """The parameter's numbers in fp32, contiguous: its own memory if it is so."""
        wide = param.dequantize(torch.float32) if isinstance(param, QuantizedTensor) else param.detach().float()
        return wide.contiguous()

    def _has_remainder(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16 and not isinstance(param, QuantizedTensor)

    def _make(self, param: Tensor, name: str) -> None:
        """The state `name` of `param`: zeros, contiguous, and its scale of 1 if it has one."""
        remainder = name == MASTER and self._has_remainder(param)
        dtype = torch.int16 if remainder else STORED[self.name_to_dtype_map[name]]
        if isinstance(param, DTensor) and (remainder or dtype in RANGE):
            what = "store_param_remainders" if remainder else f"{name} of {self.name_to_dtype_map[name]}"
            raise NotImplementedError(f"FusedAdam: {what} of a DTensor; use states of fp32 or bf16")
        if capturing():
            raise RuntimeError(
                "FusedAdam makes a state while a CUDA graph is captured, which each replay would make again; take a "
                "step before, or call initialize_state"
            )
        self.state[param][name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        if dtype in RANGE:
            self._scales.setdefault(param, {})[name] = torch.ones(1, device=param.device)

    def _scale(self, param: Tensor, name: str) -> Tensor | None:
        return self._scales.get(param, {}).get(name)

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Before any step: moments are 0, the master is the parameter. States that are there stay.

        store_param_remainders: what the constructor was given, or None. False raises ValueError where it was True.
        """
        if store_param_remainders is False and self._has_remainder(param):
            raise ValueError(
                "initialize_state(store_param_remainders=False): the constructor was given True; leave it out"
            )
        for name in self.name_to_dtype_map:
            if name not in self.state[param]:
                self._make(param, name)
                if name == MASTER and not self._has_remainder(param):
                    self.set_scaled_state(param, name, self._plain(param))

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """The state in fp32: itself if it is kept so, else a copy. Remainders: the int16 tensor itself."""
        return restore(self.state[param][state_name], self._scale(param, state_name))

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Writes the state, rounded to its dtype, with a new scale if it has one.

        unscaled_state: fp32, of the parameter's shape; int16 for the remainders of a master. Raises TypeError for other
        dtypes, ValueError for other shapes and for names of states that this optimizer does not have.

        As Megatron-core loads checkpoints: remainders may be integers in fp32 (fully_reshardable), and the flag that is
        called padding is passed over (dp_reshardable).
        """
        if state_name == "padding" and unscaled_state is False:
            return
        if state_name not in self.name_to_dtype_map:
            raise ValueError(
                f"FusedAdam has no state {state_name!r}: must be one of {', '.join(self.name_to_dtype_map)}; "
                "master_param needs master_weights=True"
            )
        remainder = state_name == MASTER and self._has_remainder(param)
        needed = torch.int16 if remainder else torch.float32
        if remainder and unscaled_state.dtype == torch.float32:
            integers = unscaled_state.to(torch.int16)
            unscaled_state = integers if torch.equal(integers.float(), unscaled_state) else unscaled_state
        if unscaled_state.dtype != needed:
            remedy = "give remainders, or leave store_param_remainders out" if remainder else "cast it"
            raise TypeError(f"set_scaled_state: {state_name} is {unscaled_state.dtype}: must be {needed}; {remedy}")
        if unscaled_state.shape != param.shape:
            raise ValueError(
                f"set_scaled_state: {state_name} is {tuple(unscaled_state.shape)}: must be {tuple(param.shape)}, the "
                "parameter's shape; reshape it"
            )
        if state_name not in self.state[param]:
            self._make(param, state_name)
        store_(self.state[param][state_name], self._scale(param, state_name), unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with all states in fp32, except for remainders, which stay int16."""
        packed = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for index, held in packed["state"].items():
            packed["state"][index] = {name: self.get_unscaled_state(params[index], name) for name in held}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Writes states of any dtype but int16 through fp32 into those that are there, so CUDA graphs see them.

        Raises TypeError where remainders are given to masters, or masters to remainders. Raises NotImplementedError
        where quantized parameters with masters here were replaced by parts of them, which would be copies.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        kept = {id(param) for param in params}
        if self.master_weights and any(id(param) not in kept for param in self._quantized):
            raise NotImplementedError(
                "FusedAdam(master_weights=True): parts of quantized parameters are copies, so no step would reach the "
                "model; use parameters in high precision, or leave use_precision_aware_optimizer out"
            )
        before, groups = self.state, [dict(group) for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})
        for group, old in zip(self.param_groups, groups, strict=True):
            self._settle(group, old)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(saved, params, strict=True):
            held = {name: value for name, value in state_dict["state"].get(index, {}).items() if value is not None}
            self.state[param] = {name: value for name, value in before.get(param, {}).items() if name in held}
            for name, value in held.items():
                self.set_scaled_state(param, name, self._as_fp32(param, name, value.detach()))
            if not held:
                del self.state[param]

    def _settle(self, group: dict[str, Any], old: dict[str, Any]) -> None:
        """A loaded group has step and lr in the tensors that it had under capturable, else a number as its step."""
        group.setdefault("bias_correction", old["bias_correction"])
        group.setdefault("step", 0)
        for name in ("step", "lr"):
            if self.capturable and isinstance(tensor := old[name], Tensor):
                group[name] = tensor.copy_(torch.as_tensor(group[name]).reshape(tensor.shape))
        if not self.capturable:
            group["step"] = int(group["step"])

    def _as_fp32(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        if name == MASTER and self._has_remainder(param):
            return value
        if name != MASTER or value.dtype != torch.int16 or not self.master_weights:
            return value.float()
        if self._asked_remainders:  # Megatron-core allocates int16 for every parameter, and sets the masters later
            return self._plain(param)
        raise TypeError(
            f"load_state_dict: {name} is torch.int16, remainders, for a parameter of {param.dtype}: must be fp32; give "
            "store_param_remainders=True to the constructor, as was done where it was saved"
        )
