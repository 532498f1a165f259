"""What Linear, LayerNormLinear and LayerNormMLP share: parallel state, plans, scale state, checks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_lite import epoch
from te_lite.arguments import flag
from te_lite.autocast import OPEN, State
from te_lite.functional.layer import PLAIN, Call
from te_lite.functional.plan import DelayedWgrads, LinearPlan, MainGrad, Recompute, WgradSink, expect_new_sum
from te_lite.functional.shared_input import SharedInput
from te_lite.modules import checks
from te_lite.modules.backward_thread import backward_on_calling_thread
from te_lite.modules.norm import add_norm
from te_lite.modules.plans import build_plans
from te_lite.modules.scale_state import ScaleStates
from te_lite.modules.weights import SpecModule, WeightCache, default_device
from te_lite.ops.registry import FakeTensor, capturing, makes_data
from te_lite.overlap.userbuffers import UB_FLAGS
from te_lite.parallel import TensorParallel, group_size
from te_lite.quantize import replay
from te_lite.quantize.graph_scales import GraphScales
from te_lite.quantize.params import parameter_operand
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.tensor import QuantizedTensor

Each = tuple[str | None, ...]  # one a linear
Plans = tuple[LinearPlan, ...]
UNPLANNED: tuple[Any, Plans] = (None, ())  # (key, plans): one value, which another thread may replace at any time


def free_caches(module: nn.Module) -> None:
    """In `module` and its children: forgets the quantized weights that is_first_microbatch keeps, and the columnwise
    data of quantized parameters where the rowwise data can give it again."""
    for child in module.modules():
        if isinstance(child, TeLiteModule):
            child.clear_caches()
    for param in module.parameters():
        if isinstance(param, QuantizedTensor):
            param.free_caches()


class TeLiteModule(SpecModule):
    """Base of the modules that hold linears.

    Subclasses set `gemm_names`, one a linear.
    """

    gemm_names: tuple[str, ...] = ("",)
    save_original_input = False
    _recompute = Recompute.NOWHERE  # LinearPlan's, of a linear that follows another
    _graph_scales: GraphScales
    _layer: Any  # see layer_of()
    _default: State | None = None  # what a call follows where no autocast is open
    _shared: tuple[SharedInput, int] | None = None  # LinearPlan's shared, where the recipe allows it

    def __init__(self, given: Mapping[str, Any], modes: Each, ub_names: Each, sizes: tuple[str, ...]) -> None:
        """given: the arguments of the subclass's constructor, by name. sizes: those of them that count features, first
        the input's. modes, ub_names: of the linears."""
        super().__init__()
        checks.check_construction(type(self).__name__, modes, given, sizes)
        self.tp_group = given["tp_group"]
        self.tp_size = group_size(self.tp_group, given["tp_size"])
        self._modes = modes
        parallel = self.tp_size > 1 and given.get("set_parallel_mode", True)
        self.sequence_parallel = bool(given["sequence_parallel"] and parallel)
        self.sequence_dim = given["sequence_dim"]
        if type(self.sequence_dim) is not int or self.sequence_dim < 0:
            raise ValueError(f"sequence_dim={self.sequence_dim!r}: must be 0 or count a later dimension of the input")
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        self.delay_wgrad_compute = given["delay_wgrad_compute"]
        self.params_dtype = given["params_dtype"] or torch.get_default_dtype()
        self.name = given["name"] or given.get("ub_name")
        self._ub_flags, self._ub_names = {flag: given[flag] for flag in UB_FLAGS}, ub_names
        checks.check_userbuffers(self, ub_names, given["symmetric_ar_type"])
        self._device = default_device(given["device"])
        self._rng_tracker = given["get_rng_state_tracker"]
        self._rng_name = given.get("rng_tracker_name") or "model-parallel-rng"
        self._scales = ScaleStates(len(self.gemm_names))
        self._caches = tuple(WeightCache() for _ in self.gemm_names)
        self._uncached: tuple[QTensor | None, ...] = (None,) * len(self.gemm_names)
        self._scatters = modes == ("row",)
        self._planned = UNPLANNED
        self._outer_input = "normalization" not in given or given["return_layernorm_output"]
        self._sinks = tuple(map(self._make_sink, range(len(self.gemm_names))))
        self._outstanding = replay.Outstanding()
        self._caching = self._quantized = False
        self._wgrad_hooks: list[Callable[[], None]] = []
        self.use_bias, self.return_bias = given["bias"], given["return_bias"]
        if "normalization" in given:
            add_norm(self, given[sizes[0]], given)

    # parameters

    def _fork(self) -> Any:
        tracker: Any = self._rng_tracker() if self._rng_tracker is not None else None
        known = tracker is not None and self._rng_name in tracker.get_states()
        return tracker.fork(self._rng_name) if known else contextlib.nullcontext()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's, which setattr and load_state_dict(assign=True) call too: plans hold for the old parameter."""
        self._planned = UNPLANNED
        super().register_parameter(name, param)

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
        self.tp_group, self._planned = tp_group, UNPLANNED

    # weight gradients

    def _make_sink(self, index: int) -> WgradSink:
        """The sink for weight gradients of the linear of that index."""
        sink = MainGrad() if self.fuse_wgrad_accumulation else WgradSink()
        return DelayedWgrads(sink, self._callers(index)) if self.delay_wgrad_compute else sink

    def _callers(self, index: int) -> tuple[bool, bool]:
        """Whether dy and x of that linear lie in memory that the caller has too: the last one's dy and, unless a norm
        makes it for the linear alone, the first one's x; but what is gathered lies in memory of its own."""
        tp = TensorParallel(self._modes[index], self.tp_size, self.tp_group, self.sequence_parallel)
        last = index == len(self.gemm_names) - 1
        return last and not tp.gathers_grad, index == 0 and self._outer_input and not tp.gathers_input

    def need_backward_dw(self) -> bool:
        """True where delay_wgrad_compute is set: backward then leaves weight gradients to backward_dw()."""
        return self.delay_wgrad_compute

    def run_delayed(self) -> bool:
        """Computes the oldest delayed weight gradients; of an MLP fc2's, then fc1's. False: none wait."""
        sinks: Any = self._sinks  # DelayedWgrads
        ran = any([sink.run_next() for sink in reversed(sinks)])
        for hook in self._wgrad_hooks if ran else ():
            hook()
        return ran

    def backward_dw(self) -> None:
        """Computes the oldest delayed weight gradients; RuntimeError where none wait."""
        if self.delay_wgrad_compute and not self.run_delayed():
            raise RuntimeError(
                "backward_dw() has no stored weight gradient: it must follow a backward of this module, once for each"
            )

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Calls `hook()` after each backward_dw()."""
        self._wgrad_hooks.append(hook)

    # the dimension that sequence parallelism splits

    def _sequence_first(self, inp: Tensor | None, quantized: bool = False) -> Any:
        """A view of inp with the dimension that sequence parallelism splits in front; the rest of the module sees
        tokens. quantized: an output or gradient is to be, which has no strides."""
        if inp is None:
            return None
        if inp.dim() < self.sequence_dim + 2 or quantized or isinstance(inp, QuantizedTensor):
            raise ValueError(
                f"{type(self).__name__}(sequence_dim={self.sequence_dim}): got {type(inp).__name__} {list(inp.shape)}; "
                f"pass a plain tensor of at least {self.sequence_dim + 2} dimensions, without fp8_output and fp8_grad"
            )
        return inp.movedim(self.sequence_dim, 0)

    def _outputs(self, out: Any, bias: Tensor | None) -> Any:
        """What forward returns of out = y or (y, norm(x)); what _sequence_first did is undone, in memory of its own."""
        out, ln_out = out if isinstance(out, tuple) else (out, None)
        if self.sequence_dim and self.sequence_parallel:
            back = (t if t is None else t.movedim(0, self.sequence_dim) for t in (out, ln_out))
            out, ln_out = (t if t is None else t.clone(memory_format=torch.contiguous_format) for t in back)
        if bias is not None and not torch.is_grad_enabled():
            bias = bias.detach()  # a reentrant checkpoint makes what it returns its own, the very tensor: no parameter
        outputs = (out, *((bias,) if self.return_bias else ()), *(() if ln_out is None else (ln_out,)))
        return outputs if len(outputs) > 1 else out

    # one call

    def _linear_names(self) -> list[tuple[list[str], list[str]]]:
        """Names of the parameters (weights, biases) of each linear: several where they are split."""
        raise NotImplementedError

    def _compiled_problem(self, *given: Any) -> str:
        """compiled.problem(), called by dynamo: a method, for what is bound needs no guard."""
        from te_lite.modules.compiled import problem

        return problem(self, *given)

    _compiled_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _begin(
        self, inp: Tensor, weights: tuple[Tensor, ...], first: bool | None, fp8_output: bool, fp8_grad: bool,
        residual: Tensor | None, parts: tuple[Tensor, ...] = (),
    ) -> Call:  # fmt: skip
        """What this call does. Plans and all that was checked hold while the key does. first: is_first_microbatch.
        parts: what the first weight was joined from, where it was."""
        stack = OPEN.stack
        state: Any  # State | None
        (state, strict, _) = stack[-1] if stack else (self._default, False, False)
        recomputes = torch._C._current_graph_task_id() != -1 or bool(replay.OPEN.frames)  # may_repeat(), without a call
        if recomputes:
            state = checks.followed((id(self), "state"), type(self).__name__, self._outstanding, state)
        grad = torch.is_grad_enabled()
        if not isinstance(inp, Tensor):
            checks.refuse_type(self, inp)
        weight, last, shape = weights[0], weights[-1], inp.shape
        amp = torch._C._is_any_autocast_enabled() and checks.amp_dtype(inp)
        key = (
            None if state is None else state.key, inp.dtype, inp.device, shape and shape[-1], len(shape) > 1, amp,
            strict, inp.__class__ is FakeTensor, weight.dtype, weight.device, epoch.number,
            weight.__class__ in PLAIN or weight.__class__, last.__class__ in PLAIN or last.__class__,
            self._scales.version,
        )  # fmt: skip
        (planned, plans), delayed = self._planned, state is not None and state.delayed
        if planned != key:
            plans = self._plan(key, inp, weights, state, strict)
        if grad and (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
            checks.check_wgrad_targets(self, weights)
        if grad and inp.is_cuda and torch._C._is_multithreading_enabled():
            backward_on_calling_thread()
        if self._scatters and self.sequence_parallel and inp.shape[0] % self.tp_size:
            checks.refuse_uneven(self, inp)
        if delayed and capturing():
            checks.check_capture(self, state)
            self._scales.fix()
        if residual is not None:
            checks.check_residual(residual, inp, last, plans)
        cached, first = self._uncached, None if OPEN.graphs else first
        if first is not None:
            first = first if first.__class__ is bool else flag(type(self).__name__, "is_first_microbatch", first)
            if first and self.fuse_wgrad_accumulation:
                expect_new_sum(weights, grad)
            first = first if plans[0].caches or plans[-1].caches else None
        if self._quantized:
            cached = tuple([parameter_operand(w, plan.operands, grad) for w, plan in zip(weights, plans, strict=True)])
        elif first is not None:
            # A recomputed call takes what its first run took, whatever has become of the caches since.
            cached = replay.recall((id(self), "weights"), lambda: self._cached_weights(first, weights, parts, plans))
        elif self._caching:
            self.clear_caches()
        if self._caching is not (first is not None):  # torch's __setattr__ takes 2 us
            self._caching = first is not None
        output = grad_input = None
        if fp8_output or fp8_grad:
            output, grad_input = checks.check_offered(self, state, fp8_output, fp8_grad, plans)
        pools = state.pools if delayed else None
        claims = pools is not None and (recomputes or (grad and not state.one_pass.claimed))
        claims = claims and self._claims_first(state.one_pass, recomputes, inp, weights)
        versions = tuple([part._version for part in parts]) if grad and parts and not parts[0].is_inference() else ()
        note = self._outstanding.note(state, grad)
        return Call(plans, weights, cached, grad, claims, output, grad_input, pools, parts, versions, note)

    def _plan(self, key: tuple, inp: Tensor, weights: tuple[Tensor, ...], state: State | None, strict: bool) -> Plans:
        """Checks what the key stands for, and plans anew."""
        dtype, real = checks.check_input(self, inp, weights[0]), makes_data(inp.device)
        pools = state.one_pass.pools if state is not None and state.delayed and real else None
        waits = pools is not None and self._graph_scales.hand_over(pools)
        plans = build_plans(self, state, dtype, weights, strict)
        if waits:
            self._scales.step_taken()
        # Where states were replaced meanwhile the next call plans again.
        self._planned = (key, plans) if real and key[-1] == self._scales.version else UNPLANNED
        self._outstanding.start(state)
        self.clear_caches()
        return plans

    def _cached_weights(
        self, first: bool, weights: tuple[Tensor, ...], parts: tuple[Tensor, ...], plans: Plans
    ) -> tuple[Any, ...]:
        made_of = parts or weights[:1], *[(w,) for w in weights[1:]]
        each = zip(self._caches, weights, made_of, plans, strict=True)
        return tuple([cache.get(first, w, of, p.operands) if p.caches else None for cache, w, of, p in each])

    def _claims_first(self, one_pass: Any, recomputes: bool, inp: Tensor, weights: tuple[Tensor, ...]) -> bool:
        """True when this module's backward will be the last of the pass (a Pass with pools), so that it takes the
        backward scales' step. recomputes: the call may be computed again, which then claims the same."""
        if recomputes:
            one_pass.pools.expect()
            return replay.recall((id(self), "first"), partial(self._claims_first, one_pass, False, inp, weights))
        grad = torch.is_grad_enabled()
        if one_pass.claimed or not (grad or replay.is_open()):
            return False
        # In the first run of a reentrant checkpoint nothing asks for a gradient yet. A claim too many does no harm.
        wanted = not grad or inp.requires_grad or weights[0].requires_grad or weights[-1].requires_grad
        one_pass.claimed = wanted or any([param.requires_grad for param in self.parameters(recurse=False)])
        return one_pass.claimed

    # state

    def get_extra_state(self) -> Tensor:
        """Delayed scaling's state as one fp32 tensor; see modules/scale_state.py."""
        self._graph_scales.settle()
        return self._scales.dump()

    def set_extra_state(self, state: Any) -> None:
        """Takes what get_extra_state gave, of whatever recipe; it waits there until a recipe needs it."""
        self._scales.load(state)
        self._graph_scales = GraphScales(self._scales, self._graph_scales.device)
        self._planned = UNPLANNED

    def _apply(self, fn: Callable, recurse: bool = True) -> SpecModule:
        self.clear_caches()  # torch swaps no parameter that somebody refers to weakly
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *given: Any) -> None:
        self.clear_caches()
        super()._load_from_state_dict(*given)

    def _renewed(self) -> None:
        super()._renewed()
        self._planned = UNPLANNED
        device = next(self.parameters()).device  # of children too: a parametrized weight's are there
        known = self.__dict__.get("_graph_scales")
        if known is None or known.device != device:
            if known is not None:
                known.settle()
            self._graph_scales = GraphScales(self._scales, device)
        self.clear_caches()

    def __getstate__(self) -> dict[str, Any]:
        self._graph_scales.settle()
        state = self.__dict__ | {"_planned": UNPLANNED, "_scales": copy.copy(self._scales)}
        del state["_graph_scales"]
        # Of this process; set_tensor_parallel_group() after loading.
        state.update(tp_group=None, _rng_tracker=None, _wgrad_hooks=[], _outstanding=replay.Outstanding())
        state["_caches"] = tuple(WeightCache() for _ in self.gemm_names)
        state["_sinks"] = tuple(map(self._make_sink, range(len(self.gemm_names))))
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> TeLiteModule:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(TeLiteModule.__getstate__(self), memo))
        made.tp_group, made._rng_tracker = self.tp_group, self._rng_tracker  # shared, not copied
        return made
