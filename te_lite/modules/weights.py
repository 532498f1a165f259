"""Parameters of the modules: creation, initialisation, attributes, and quantized copies reused across micro-batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext
from torch.utils.dlpack import from_dlpack, to_dlpack

from te_lite.arguments import checked_device, flag
from te_lite.modules.scale_state import as_tensor
from te_lite.ops.nvtx import ranged
from te_lite.ops.registry import FakeTensor, makes_data
from te_lite.ops.source import DTYPES, plain
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import GemmOperands, Quantizer
from te_lite.quantize.tensor import QuantizedTensor, quantized

Init = Callable[[Tensor], Any]


def default_device(device: Any) -> Any:
    """The device asked for. None and "cuda" (the constructors' default) leave it open: they mean that of an open
    device context (`with torch.device("meta")`, torch.set_default_device), else the GPU, or the CPU where is none."""
    if device is not None and str(device) != "cuda":
        return checked_device(device) if makes_data(torch.device("cpu")) else device  # fake tensors need no GPU
    # torch.get_default_device() says cpu for an open context of the CPU and for none.
    modes = torch.overrides._get_current_function_mode_stack()
    opened = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return opened[-1] if opened else "cuda" if torch.cuda.is_available() else "cpu"


def default_init(weight: Tensor) -> Tensor:
    """Normal, standard deviation 0.023: Transformer Engine's default."""
    return nn.init.normal_(weight, mean=0.0, std=0.023)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """How one parameter is made. partition_dim: the dimension split over ranks, None if every rank holds it whole.

    random: drawn, so an RNG tracker's state applies. sequence_parallel: its gradient is a partial sum per rank; None
    leaves the attribute out.
    late_grad: its gradient comes with backward_dw(), so Megatron's post-backward hook must wait.
    quantizer: it is held quantized, and its first value kept on the CPU where `preserve`.
    """

    shape: tuple[int, ...]
    init: Init
    partition_dim: int | None = None
    random: bool = False
    sequence_parallel: bool | None = None
    late_grad: bool = False
    quantizer: Quantizer | None = None
    preserve: bool = False

    def fill(self, param: Tensor, fork: Callable[[], Any]) -> None:
        """Initialises `param` in place. fork: context in which random ones are drawn."""
        value = torch.empty_like(param) if isinstance(param, QuantizedTensor) else param
        with torch.no_grad(), fork() if self.random else nullcontext():
            self.init(value)
        if isinstance(param, QuantizedTensor):
            param.quantize_(value)
            if self.preserve:
                param._high_precision_init_val = value.cpu()

    def make(self, dtype: torch.dtype, device: torch.device | str, fork: Callable[[], Any]) -> nn.Parameter:
        """A new parameter, initialised unless `device` is meta; not marked yet. fork: context in which random ones are
        drawn."""
        param = nn.Parameter(torch.empty(self.shape, dtype=dtype, device=device))
        if param.device.type == "meta":
            return param
        if self.quantizer is not None:
            param = nn.Parameter(quantized(param, self.quantizer))  # of no numbers yet
        self.fill(param, fork)
        return param

    def mark(self, param: nn.Parameter) -> None:
        """Attributes that Megatron reads."""
        whole = self.partition_dim is None
        marks = {"tensor_model_parallel": not whole, "partition_dim": -1 if whole else self.partition_dim}
        if self.sequence_parallel is not None:
            marks["sequence_parallel"] = self.sequence_parallel
        if self.late_grad:
            marks["skip_backward_post_hook"] = True
        vars(param).update(marks, partition_stride=1)


def give_own_storages(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Parameters of `module` that share a block of memory with others stand in its state dict with a storage each, over
    the same memory. safetensors and accelerate take tensors of one storage for one tensor with several names."""
    for name, param in module._parameters.items():
        kept = state_dict.get(prefix + name)
        if type(kept) is not Tensor or kept is param or kept.is_meta or kept.is_inference() or not kept.numel():
            continue
        if kept.nbytes != kept.untyped_storage().nbytes() and (kept.is_cuda or not kept.is_shared()):
            with torch.inference_mode(False):
                kept.data = from_dlpack(to_dlpack(kept.detach()))  # another tensor: it keeps the block alive


class SpecModule(nn.Module):
    """A module with the parameters `_specs`. They keep their attributes, whatever makes new Parameters of them: copies,
    to_empty(), load_state_dict(assign=True). `_extra_state` may be absent from what it loads, as from torch's modules.
    """

    params_dtype: torch.dtype
    _device: Any = None

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[str, ParamSpec] = {}

    def _fork(self) -> AbstractContextManager[Any]:
        """The context in which random parameters are drawn."""
        return nullcontext()

    def _add_params(self, specs: dict[str, ParamSpec], adjacent: bool = False) -> None:
        """New parameters. adjacent: of equal trailing shape, they share one block of memory, in order."""
        self._specs.update(specs)
        made = {name: spec.make(self.params_dtype, self._device, self._fork) for name, spec in specs.items()}
        plain_memory = not any(param.is_meta or isinstance(param, QuantizedTensor) for param in made.values())
        if adjacent and len(made) > 1 and plain_memory:
            block = torch.cat([param.detach() for param in made.values()])
            for param, part in zip(made.values(), block.split([len(param) for param in made.values()]), strict=True):
                param.data = part
        for name, param in made.items():
            self.register_parameter(name, param)
        self._renewed()

    def _add_biases(self, specs: dict[str, ParamSpec], wanted: bool) -> None:
        """As _add_params; where they are not wanted a zero-length tensor stands for each absent bias, which is no
        parameter and in no checkpoint."""
        if wanted:
            return self._add_params(specs, True)
        for name in specs:
            self.register_buffer(name, torch.empty(0, dtype=self.params_dtype, device=self._device), persistent=False)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draws all parameters anew; those on the meta device come to life on the module's device."""
        if flag("reset_parameters", "defer_init", defer_init):
            return
        device = default_device(None) if str(self._device) == "meta" else self._device
        for name, spec in self._specs.items():
            old = getattr(self, name)
            if old.device.type == "meta" or (spec.quantizer is not None and not isinstance(old, QuantizedTensor)):
                made = spec.make(old.dtype, device, self._fork)
                made.requires_grad_(old.requires_grad)
                self.register_parameter(name, made)
            else:  # the optimizer may hold it
                spec.fill(old, self._fork)
        self._renewed()

    def _renewed(self) -> None:
        """After parameters may have been replaced; what stands for an absent bias follows them to their device."""
        params = {name: param for name in self._specs if (param := self._parameters.get(name)) is not None}
        for name, param in params.items():
            if not hasattr(param, "tensor_model_parallel"):
                self._specs[name].mark(param)
        for name, buffer in self._buffers.items():
            if buffer is not None and not buffer.numel() and params:
                self._buffers[name] = torch.empty_like(buffer, device=next(iter(params.values())).device)

    def _apply(self, fn: Callable, recurse: bool = True) -> SpecModule:
        """As torch's, but a quantized parameter takes what fn gives as its .data: torch would swap it, attributes
        and all, for another."""
        params: dict[str, Any] = self._parameters
        held: dict[str, Any] = {name: p for name, p in params.items() if isinstance(p, QuantizedTensor)}
        for name, param in held.items():
            with torch.no_grad():
                made, grad = fn(param), param.grad
                if torch._has_compatible_shallow_copy_type(param, made):
                    param.data = made
                else:  # on the meta device: another parameter, as torch's own there
                    held[name] = nn.Parameter(made, param.requires_grad)
                if grad is not None:
                    held[name].grad = fn(grad)
        params.update(dict.fromkeys(held))
        try:
            super()._apply(fn, recurse)
        finally:
            params.update(held)
        self._renewed()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._renewed()

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        give_own_storages(self, destination, prefix)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *others) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *others)
        self._renewed()
        if f"{prefix}_extra_state" in missing:
            missing.remove(f"{prefix}_extra_state")


class StatelessModule(SpecModule):
    """A module whose `_extra_state` says nothing."""

    def get_extra_state(self) -> Tensor:
        """Empty: there is no state, but in Transformer Engine's modules, too, the key must be there."""
        return torch.empty(0, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Takes what says that there is no state; anything else raises TypeError or ValueError."""
        if as_tensor(state).numel():
            raise ValueError(f"extra state of {state.numel()} numbers for {type(self).__name__}, which has none")


def check_param(owner: str, spec: ParamSpec, name: str, param: Tensor, device: torch.device, packed: bool) -> None:
    """A parameter has not become what no kernel reads, or an ordinary tensor though made quantized, behind the module's
    back. device: of the weights. packed: contiguous."""
    if isinstance(getattr(param, "placements", None), tuple):
        raise RuntimeError(
            f"{owner}.{name} is a DTensor, which the kernels cannot read: shard modules with fully_shard, which hands "
            "them plain tensors, or with the modules' own parallel_mode"
        )
    if spec.quantizer is not None and not (isinstance(param, QuantizedTensor) or param.is_meta):
        raise RuntimeError(
            f"{owner}.{name} was made under quantized_model_init and is now a {type(param).__name__} that holds no "
            "quantized data (FSDP, to_empty() and load_state_dict(assign=True) replace parameters): build the module "
            "without quantized_model_init, or copy values into the parameter"
        )
    fits = (tuple(param.shape), param.device) == (spec.shape, device) and param.dtype in DTYPES
    if not fits or (packed and not param.is_contiguous()):
        raise ValueError(
            f"{owner}.{name} is {tuple(param.shape)} {param.dtype} on {param.device}, strides {param.stride()}: must "
            f"be contiguous {spec.shape}, bfloat16, float16 or float32, on {device}; replace it by such a parameter"
        )


class _Join(torch.autograd.Function):
    """Parameters that lie one behind the other in memory, seen as one tensor; backward hands each its rows."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[0] for part in parts]
        ctx.set_materialize_grads(False)
        first = parts[0]
        end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
        for part in parts:  # neighbours in memory may still be allocations of their own
            if part.data_ptr() != end or not part.is_contiguous() or part.untyped_storage().data_ptr() != storage:
                return torch.cat(parts)
            end += part.numel() * part.element_size()
        shape = (sum(ctx.sizes), *first.shape[1:])
        empty: Any = first.new_empty(0)  # Any: the types of set_ lack the form without strides
        return empty.set_(first.untyped_storage(), first.storage_offset(), shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * len(ctx.sizes) if grad is None else grad.split(ctx.sizes)


def join(parts: tuple[Tensor, ...]) -> Tensor:
    """The parts concatenated along dim 0; without a copy where they lie together."""
    for part in parts:
        if type(part) is not nn.Parameter and (isinstance(part, QuantizedTensor) or hasattr(part, "placements")):
            raise RuntimeError(
                f"a part of parameters_split is a {type(part).__name__} of shape {tuple(part.shape)}: parts are joined "
                "in memory, so each must be a plain tensor; shard modules with fully_shard, quantize undivided weights"
            )
    return torch.cat(parts) if type(parts[0]) is FakeTensor else _Join.apply(*parts)


class WeightCache:
    """A quantized weight kept across micro-batches.

    Reused only when the caller says is_first_microbatch=False and the weight is the very tensor that was quantized, not
    written to through autograd's eyes since. A computed weight (of a parametrization) is another one in each forward.
    True and None quantize again (writes through `.data`, a flat buffer or a fused optimizer leave no trace).
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        # (key, the tensors that it was made of, weak so that a computed one can be freed, the quantized weight): one
        # value, which other threads replace.
        self._kept: tuple[tuple | None, tuple[weakref.ref[Tensor], ...], Any] = None, (), None

    def get(self, first: bool, weight: Tensor, parts: tuple[Tensor, ...], operands: GemmOperands) -> QTensor:
        """The quantized weight to use, quantized now when `first` or when the kept one is stale; both layouts, each as
        its GEMM takes it (where fprop and dgrad differ in format too, by row alone). parts: what it is joined from."""
        quantizer, for_dgrad = operands.fprop.b, operands.dgrad.b
        return self.reuse(
            first, parts, (quantizer, for_dgrad), lambda: _quantized(weight.detach(), quantizer, for_dgrad)
        )

    def reuse(self, first: bool, parts: tuple[Tensor, ...], what: Any, make: Callable[[], Any]) -> Any:
        """make(), which quantizes the parts, or what it gave before; as get(). what: how it quantizes."""
        tracked = not any(part.is_inference() for part in parts)  # or it has no version
        written = [(part._version, isinstance(part, FakeTensor) or part.data_ptr()) for part in parts if tracked]
        key = written, what, torch.is_inference_mode_enabled()
        kept, of, q = self._kept
        same = tracked and [id(ref()) for ref in of] == [id(part) for part in parts]
        if q is None or first or not same or kept != key:
            q = make()
            self._kept = key, tuple([weakref.ref(part) for part in parts]), q
        return q

    def again(self, operands: GemmOperands) -> QTensor | None:
        """get(True, ...) of the weight that is kept; None where none is."""
        parts = tuple([part for ref in self._kept[1] if (part := ref()) is not None])
        if not parts or len(parts) < len(self._kept[1]):
            return None
        return self.get(True, parts[0] if len(parts) == 1 else join(parts), parts, operands)


@ranged("te_lite.quantize")
def _quantized(weight: Tensor, quantizer: Quantizer, for_dgrad: Quantizer) -> QTensor:
    source = plain(weight, name="weight")
    q, _ = quantizer.quantize(source, row=True, col=for_dgrad is quantizer)
    if for_dgrad is not quantizer and for_dgrad.format == quantizer.format:
        col, _ = for_dgrad.quantize(source, row=False, col=True)
        q.col, q.col_scale = col.col, col.col_scale
    return q
