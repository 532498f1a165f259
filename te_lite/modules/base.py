"""What Linear, LayerNormLinear and LayerNormMLP share: parallel state, plans, scale state, checks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite.autocast import State, current, strict
from te_lite.functional.linear import Call
from te_lite.functional.plan import DelayedWgrads, LinearPlan, MainGrad, WgradSink
from te_lite.modules import scale_state
from te_lite.modules.backward_thread import backward_on_calling_thread
from te_lite.modules.checks import (
    check_construction,
    check_input,
    check_main_grad,
    check_offered,
    check_recomputation,
    check_scatter,
    check_userbuffers,
)
from te_lite.modules.plans import build_plans
from te_lite.modules.scale_state import ScaleStates
from te_lite.modules.weights import ParamSpec, WeightCache, default_device
from te_lite.overlap.userbuffers import UB_FLAGS, generation
from te_lite.parallel import group_size
from te_lite.quantize import replay, statistics
from te_lite.quantize.params import parameter_operand
from te_lite.quantize.tensor import QuantizedTensor


def free_caches(module: nn.Module) -> None:
    """In `module` and its children: forgets the quantized weights that is_first_microbatch keeps, and the columnwise
    data of quantized parameters where the rowwise data can give it again."""
    for child in module.modules():
        if isinstance(child, TeLiteModule):
            child.clear_caches()
    for param in module.parameters():
        if isinstance(param, QuantizedTensor):
            param.free_caches()


class TeLiteModule(nn.Module):
    """Base of the modules that hold linears.

    Subclasses set `gemm_names`, one a linear, and define `_linear_shapes()` and `_weight_versions()`.
    """

    gemm_names: tuple[str, ...] = ("",)

    def __init__(
        self,
        given: Mapping[str, Any],
        modes: tuple[str | None, ...],
        ub_names: tuple[str | None, ...],
        sizes: tuple[str, ...],
    ) -> None:
        """given: the arguments of the subclass's constructor, by name. sizes: those of them that count features. modes,
        ub_names: of the linears."""
        super().__init__()
        owner, tp_size, params_dtype = type(self).__name__, given["tp_size"], given["params_dtype"]
        check_construction(owner, modes, tp_size, params_dtype, {size: given[size] for size in sizes})
        self.tp_group = given["tp_group"]
        self.tp_size = group_size(self.tp_group, tp_size)
        self._modes = modes
        self.sequence_parallel = bool(given["sequence_parallel"]) and self.tp_size > 1
        self.sequence_dim = given["sequence_dim"]
        if type(self.sequence_dim) is not int or self.sequence_dim < 0:
            raise ValueError(f"sequence_dim={self.sequence_dim!r}: must be 0 or count a later dimension of the input")
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        self.delay_wgrad_compute = given["delay_wgrad_compute"]
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.name = given["name"] or given.get("ub_name")
        self._ub_flags, self._ub_names = {flag: given[flag] for flag in UB_FLAGS}, ub_names
        check_userbuffers(self, ub_names, given["symmetric_ar_type"])
        self._device = default_device(given["device"])
        self._rng_tracker = given["get_rng_state_tracker"]
        self._rng_name = given.get("rng_tracker_name") or "model-parallel-rng"
        self._specs: dict[str, ParamSpec] = {}
        self._scales = ScaleStates(len(self.gemm_names))
        self._caches = tuple(WeightCache() for _ in self.gemm_names)
        self._plans: tuple[LinearPlan, ...] = ()
        self._plan_key: Any = None
        self._sinks = tuple(self._make_sink() for _ in self.gemm_names)
        self._ran_fp8 = self._caching = self._quantized = False
        self._wgrad_hooks: list[Callable[[], None]] = []

    # parameters

    def _fork(self) -> Any:
        if self._rng_tracker is None:
            return contextlib.nullcontext()
        tracker = self._rng_tracker()
        return tracker.fork(self._rng_name) if self._rng_name in tracker.get_states() else contextlib.nullcontext()

    def _add_params(self, specs: dict[str, ParamSpec]) -> None:
        for name, spec in specs.items():
            self._specs[name] = spec
            self.register_parameter(name, spec.make(self.params_dtype, self._device, self._fork))

    def _add_no_bias(self, name: str) -> None:
        """What stands for an absent bias: a zero-length tensor that is no parameter and in no checkpoint."""
        empty = torch.empty(0, dtype=self.params_dtype, device=self._device)
        self.register_buffer(name, empty, persistent=False)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draws all parameters anew; those on the meta device come to life on the module's device."""
        if defer_init:
            return
        device = default_device(None) if str(self._device) == "meta" else self._device
        for name, spec in self._specs.items():
            old = getattr(self, name)
            if old.device.type == "meta" or (spec.quantizer is not None and not isinstance(old, QuantizedTensor)):
                made = spec.make(old.dtype, device, self._fork)
                made.requires_grad_(old.requires_grad)
                self.register_parameter(name, made)
            else:
                spec.fill(old, self._fork)
                spec.mark(old)  # to_empty() makes new parameters without the attributes
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.device.type == "meta":
                setattr(self, name, torch.empty_like(buffer, device=device))
        self.clear_caches()

    def clear_caches(self) -> None:
        """Forgets quantized weights kept for is_first_microbatch=False."""
        for cache in self._caches:
            cache.clear()

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """The group for tp_size > 1, when the constructor did not get one; its size must be tp_size."""
        size = group_size(tp_group, 1)
        if size != self.tp_size:
            raise ValueError(
                f"tp_group has {size} ranks but the module was built with tp_size={self.tp_size}; pass a group of "
                f"{self.tp_size} ranks"
            )
        self.tp_group, self._plan_key = tp_group, None

    # weight gradients

    def _make_sink(self) -> WgradSink:
        sink = MainGrad() if self.fuse_wgrad_accumulation else WgradSink()
        return DelayedWgrads(sink) if self.delay_wgrad_compute else sink

    def need_backward_dw(self) -> bool:
        """True when weight gradients wait for backward_dw()."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the oldest weight gradients that backward put off; of an MLP fc2's, then fc1's."""
        if not self.delay_wgrad_compute:
            return
        if not any([sink.run_next() for sink in reversed(self._sinks)]):
            raise RuntimeError(
                "backward_dw() has no stored weight gradient: it must follow a backward of this module, once for each"
            )
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Calls `hook()` after each backward_dw()."""
        self._wgrad_hooks.append(hook)

    # the dimension that sequence parallelism splits

    def _sequence_first(self, inp: Tensor, quantized: bool = False) -> Tensor:
        """A view of inp with the dimension that sequence parallelism splits in front; the rest of the module sees
        tokens. quantized: an output or gradient is to be, which has no strides."""
        if not (self.sequence_dim and self.sequence_parallel):
            return inp
        if inp.dim() < self.sequence_dim + 2 or quantized or isinstance(inp, QuantizedTensor):
            raise ValueError(
                f"{type(self).__name__}(sequence_dim={self.sequence_dim}): got {type(inp).__name__} {list(inp.shape)}; "
                f"pass a plain tensor of at least {self.sequence_dim + 2} dimensions, without fp8_output and fp8_grad"
            )
        return inp.movedim(self.sequence_dim, 0)

    def _outputs(self, out: Tensor, bias: Tensor | None, ln_out: Tensor | None = None) -> Any:
        """What forward returns; what _sequence_first did is undone, in memory of its own."""
        if self.sequence_dim and self.sequence_parallel:
            back = (t if t is None else t.movedim(0, self.sequence_dim) for t in (out, ln_out))
            out, ln_out = (t if t is None else t.clone(memory_format=torch.contiguous_format) for t in back)
        outputs = (out, *((bias,) if self.return_bias else ()), *(() if ln_out is None else (ln_out,)))
        return outputs if len(outputs) > 1 else out

    # plans

    def _linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in_features, out_features) of this rank, one pair a linear."""
        raise NotImplementedError

    def _weight_versions(self) -> tuple[Any, ...]:
        """What changes when autograd sees a write to a weight, one value a linear."""
        raise NotImplementedError

    def _keep_original(self) -> bool:
        return False

    def _state(self) -> State | None:
        """What the next call follows; ConvertedLinear has a recipe of its own where no autocast is open."""
        return current()

    def _begin(
        self,
        inp: Tensor,
        features: int,
        weights: tuple[Tensor, ...],
        first_microbatch: bool | None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Call:
        """Checks the input, brings the plans up to date and says what this call does."""
        state = self._state()
        dtype = check_input(self, inp, features, weights[0])
        if self._modes == ("row",) and self.sequence_parallel:
            check_scatter(self, inp)
        grad = torch.is_grad_enabled()
        if grad and self.fuse_wgrad_accumulation:
            check_main_grad(self, weights)
        if grad and inp.is_cuda:
            backward_on_calling_thread()
        if replay.in_foreign_recomputation():
            check_recomputation(self, state, self._ran_fp8)
        key = (None if state is None else state.key, dtype, inp.device, statistics.collecting(), generation(), strict())
        if self._plan_key != key:
            self._plans = build_plans(self, state, dtype, inp.device)
            self._plan_key = key
            self.clear_caches()
        self._ran_fp8 |= state is not None and state.enabled
        cached: tuple = (None,) * len(weights)
        if self._quantized:
            together = zip(weights, self._plans, strict=True)
            cached = tuple(parameter_operand(weight, plan.operands, grad) for weight, plan in together)
        elif first_microbatch is not None:
            # A recomputed call takes what its first run took, whatever has become of the caches since.
            cached = replay.recall((id(self), "weights"), lambda: self._cached_weights(first_microbatch, weights))
        elif self._caching:
            self.clear_caches()
        self._caching = first_microbatch is not None
        first, last = self._plans[0].operands, self._plans[-1].operands
        if state is not None and (fp8_output or fp8_grad):
            y = (fp8_output, last.output, last.fprop.a.format.label)
            dx = (fp8_grad, first.grad_input, first.dgrad.a.format.label)
            check_offered(self, state.recipe, {"fp8_output": y, "fp8_grad": dx})
        return Call(
            self._plans,
            weights,
            cached,
            grad,
            state is not None and self._claims_first(state, inp),
            last.output if fp8_output else None,
            first.grad_input if fp8_grad else None,
        )

    def _cached_weights(self, first_microbatch: bool, weights: tuple[Tensor, ...]) -> tuple[Any, ...]:
        together = zip(self._caches, weights, self._weight_versions(), self._plans, strict=True)
        return tuple(
            cache.get(first_microbatch, weight, version, plan.operands) for cache, weight, version, plan in together
        )

    def _claims_first(self, state: State, inp: Tensor) -> bool:
        """True when this module's backward will be the last of the pass, so that it takes the backward scales' step."""
        if not (state.enabled and state.recipe.delayed()):
            return False
        backward_follows = torch.is_grad_enabled() or replay.is_open()

        def claim() -> bool:
            if state.one_pass.claimed or not backward_follows:
                return False
            wanted = inp.requires_grad or any(param.requires_grad for param in self.parameters(recurse=False))
            state.one_pass.claimed = wanted
            return wanted

        return replay.recall((id(self), "first"), claim)

    def _run(self, function: Any, call: Call, *args: Any) -> Any:
        """function(call, *args), noted by autograd where a backward may follow."""
        if not call.grad:
            return function.forward(None, call, *args)
        if self._quantized and torch.compiler.is_compiling():
            # Dynamo would go on without the weight's gradient; an error makes it leave this call to Python.
            raise RuntimeError("torch.compile traces no quantized parameters; leave out fullgraph=True")
        return function.apply(call, *args)

    # state

    def get_extra_state(self) -> Tensor:
        """Delayed scaling's state as one fp32 tensor (empty when there is none); see modules/scale_state.py."""
        return self._scales.dump()

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state gave, of whatever recipe; it waits there until a recipe needs it."""
        self._scales.load(scale_state.as_tensor(state))
        self._plan_key = None

    def _apply(self, fn: Callable, recurse: bool = True) -> TeLiteModule:
        self._scales.detach_from_device()
        self._plan_key = None
        self.clear_caches()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_plans=(), _plan_key=None, _scales=self._scales.detached_copy(), _wgrad_hooks=[])
        state.update(tp_group=None, _rng_tracker=None)  # of this process; set_tensor_parallel_group() after loading
        state["_caches"] = tuple(WeightCache() for _ in self.gemm_names)
        state["_sinks"] = ()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sinks = tuple(self._make_sink() for _ in self.gemm_names)

    def __deepcopy__(self, memo: dict[int, Any]) -> TeLiteModule:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made.tp_group, made._rng_tracker = self.tp_group, self._rng_tracker  # shared, not copied
        for name, spec in made._specs.items():
            spec.mark(getattr(made, name))  # a copied Parameter has lost its attributes
        return made
