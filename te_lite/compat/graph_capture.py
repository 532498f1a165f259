"""Captures for te.make_graphed_callables: warm-up that leaves no trace, then the graphs of each slot in their order."""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from te_lite.autocast import OPEN
from te_lite.compat.graph_replay import Graph, Original, Slot, address
from te_lite.modules.base import UNPLANNED, TeLiteModule
from te_lite.modules.verbs import DelayedScales
from te_lite.modules.weights import WeightCache
from te_lite.quantize.delayed import fix_together
from te_lite.quantize.tensor import QuantizedTensor


class Event(NamedTuple):
    """One capture: of the slot's forward, or of its backward."""

    slot: int
    module: int
    backward: bool


class Captures:
    """CUDA graphs that share memory. pool: torch's handle of it, None: a new one."""

    def __init__(self, pool: Any, tensors: Sequence[Tensor]) -> None:
        off = [t.device for t in tensors if not t.is_cuda]
        if off or not tensors:
            there = f"a tensor on {off[0]}" if off else "no tensor"
            raise ValueError(
                f"make_graphed_callables got {there}: CUDA graphs hold work on CUDA tensors; move it there"
            )
        self.device = tensors[0].device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.stream = torch.cuda.Stream(self.device)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """On the stream of the captures: allocators, cuBLAS and te_lite keep memory for each."""
        torch.cuda.synchronize(self.device)
        with torch.random.fork_rng([self.device]), torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize(self.device)

    @contextmanager
    def capture(self, apart: bool = False) -> Iterator[Any]:
        """Gives the graph of what runs inside. Other threads may call CUDA meanwhile: NCCL's do. apart: in memory of
        its own, for what outlives a micro-batch: other graphs write temporaries to the shared memory in each."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # it might end another graph, which no capture allows
        try:
            pool = torch.cuda.graph_pool_handle() if apart else self.pool
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                yield graph
        except RuntimeError as error:
            if "legacy stream" in str(error.__context__):
                raise RuntimeError(
                    "make_graphed_callables: gradients of the parameters are added up on the default stream, which no "
                    "capture may use: an output of an earlier step is alive, or hooks as DDP's were made there; delete "
                    "it and the loss, make DDP under torch.cuda.stream(torch.cuda.Stream()), and begin a new process"
                ) from error
            raise
        finally:
            if collects:
                gc.enable()


class Capturing:
    """A module between eager and graphed. context: opens the autocast that its graphs hold."""

    def __init__(
        self, original: Original, context: Callable[[], AbstractContextManager[Any]], stack: ExitStack
    ) -> None:
        self.original, self.context, self.first = original, context, True
        self.cached: list[WeightCache] = []
        children = list(original.module.modules())
        self.linears = [child for child in children if isinstance(child, TeLiteModule)]
        self.verbs = [child for child in children if isinstance(child, DelayedScales)]
        self.scales = [linear._scales for linear in self.linears] + [child.states for child in self.verbs]
        if original.caches:
            for linear in self.linears:
                if linear is not original.module:
                    hook = linear.register_forward_pre_hook(self._hooks_first(linear), with_kwargs=True)
                    stack.callback(hook.remove)

    def _hooks_first(self, linear: nn.Module) -> Callable[..., Any]:
        """What hands `linear` is_first_microbatch. Megatron's subclasses take no argument; they read an attribute."""
        if "is_first_microbatch" in inspect.signature(linear.forward).parameters:
            return self._hand_first
        if not hasattr(linear, "is_first_microbatch"):
            self.original.refuse(
                TypeError, f"hold a {type(linear).__name__}, whose forward takes no is_first_microbatch: leave out "
                "cache_quantized_params"
            )  # fmt: skip
        return self._set_first

    def _set_first(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        module.is_first_microbatch = self.first

    def _hand_first(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """is_first_microbatch for a linear of te_lite, whatever its caller gave."""
        if len(args) > 1:
            return (args[0], self.first, *args[2:]), kwargs
        return args, kwargs | {"is_first_microbatch": self.first}

    def forget_plans(self) -> None:
        """They hold scales that are about to go."""
        for linear in self.linears:
            linear._planned = UNPLANNED
        for verb in self.verbs:
            verb.plans.clear()

    def run(self, slot: Slot) -> list[Any]:
        """The module's outputs, flat; their structure goes to the slot."""
        args, kwargs, original = slot.args, slot.kwargs, self.original
        if original.caches and isinstance(original.module, TeLiteModule):
            args, kwargs = self._hand_first(original.module, args, kwargs)
        with torch.set_grad_enabled(original.training), self.context():
            found = original.forward(*args, **kwargs)
        outputs, spec = tree_flatten(found)
        wrong = [type(t).__name__ for t in outputs if type(t) not in (Tensor, nn.Parameter, type(None))]
        if wrong:
            original.refuse(TypeError, f"cannot give a {wrong[0]}: outputs must be tensors or None; return plain ones")
        slot.out_spec = None if isinstance(found, Tensor) else spec
        self.first = False
        return outputs

    def capture_weights(self, captures: Captures) -> None:
        """What is_first_microbatch=True does, once for all slots."""
        each = [pair for one in self.linears for pair in zip(one._caches, one._planned[1], strict=False)]
        cached = [(cache, plan) for cache, plan in each if cache._kept[2] is not None]
        if not cached:
            return
        original = self.original
        with original.pools.recording() as used, captures.capture(apart=True) as graph, torch.no_grad():
            original.kept = [cache.again(plan.operands) for cache, plan in cached]
        original.weights, self.cached = Graph(graph, -math.inf, used), [cache for cache, _ in cached]

    def capture_forward(self, slot: Slot, captures: Captures, at: float) -> list[Any]:
        original = self.original
        if original.caches and original.weights is None:
            self.capture_weights(captures)
        with original.pools.recording() as used, captures.capture() as graph:
            outputs = self.run(slot)
        slot.forward = Graph(graph, at, used)
        slot.outputs = tuple([t if t is None else t.detach() for t in outputs])
        slot.grad_outputs = (None,) * len(outputs)
        if any(cache._kept[2] is not q for cache, q in zip(self.cached, original.kept, strict=True)):
            original.refuse(
                NotImplementedError, "cannot keep a quantized weight that each forward computes anew, as parametrize "
                "does: leave out cache_quantized_params"
            )  # fmt: skip
        return outputs

    def capture_backward(self, slot: Slot, outputs: list[Any], captures: Captures, at: float, retain: bool) -> None:
        wanted = [t for t in (*slot.inputs, *self.original.params) if t.requires_grad]
        makers = [t for t in outputs if t is not None and t.requires_grad]
        if not (wanted and makers):
            return
        params: list[Any] = list(self.original.params)
        slot.grad_outputs = tuple([torch.empty_like(t) if t is not None and t.requires_grad else None for t in outputs])
        given = [t for t in slot.grad_outputs if t is not None]
        with marks_put_back(params), self.original.pools.recording() as used:
            with captures.capture() as graph:
                grads = torch.autograd.grad(makers, wanted, given, retain_graph=retain, allow_unused=True)
            slot.added = tuple([param for param in params if getattr(param, "grad_added_to_main_grad", False)])
        slot.backward, slot.ends, slot.kept = (
            Graph(graph, at, used),
            math.inf if retain else at,
            outputs if retain else 0,
        )
        found = dict(zip(map(id, wanted), grads, strict=True))
        # A weight whose gradient goes into main_grad takes part, so that backward runs; one without any does not.
        slot.params = tuple([p for p in params if found.get(id(p)) is not None or hasattr(p, "main_grad")])
        slot.params = tuple([p for p in slot.params if p.requires_grad])
        slot.grads = tuple([found.get(id(t)) for t in (*slot.inputs, *slot.params)])
        written = [p for p in params if hasattr(p, "main_grad")]
        slot.main_grads = tuple(
            [(p, address(p.main_grad), bool(getattr(p, "overwrite_main_grad", False))) for p in written]
        )


def warm_up(slots: Sequence[tuple[Slot, Capturing]], rounds: int, unused: bool) -> None:
    """Each slot's forward and backward; gradients go nowhere. unused: an input may have none."""
    for _ in range(rounds):
        for slot, module in slots:
            outputs = module.run(slot)
            makers = [t for t in outputs if t is not None and t.requires_grad]
            wanted = [t for t in (*slot.inputs, *module.original.module.parameters()) if t.requires_grad]
            if not (makers and wanted):
                continue
            grads = torch.autograd.grad(makers, wanted, [torch.ones_like(t) for t in makers], allow_unused=True)
            asked = sum(t.requires_grad for t in slot.inputs)
            if any(grad is None for grad in grads[:asked]) and not unused:
                i = [i for i, t in enumerate(slot.inputs) if t.requires_grad][[g is None for g in grads].index(True)]
                module.original.refuse(
                    ValueError, f"find no gradient of input {i}, whose sample requires one: pass a sample without "
                    "requires_grad, or allow_unused_input=True"
                )  # fmt: skip


@contextmanager
def weights_restored(modules: Sequence[Capturing]) -> Iterator[None]:
    """Afterwards is_first_microbatch=False finds what it would have found before."""
    linears = {linear: [cache._kept for cache in linear._caches] for one in modules for linear in one.linears}
    caching = {linear: linear._caching for linear in linears}
    try:
        yield
    finally:
        for linear, kept in linears.items():
            linear._caching = caching[linear]
            for cache, value in zip(linear._caches, kept, strict=True):
                cache._kept = value


@contextmanager
def marks_put_back(params: Sequence[Any]) -> Iterator[None]:
    """Within, no parameter says that its main_grad is old, or was added to; afterwards each says what it said."""
    names = "grad_added_to_main_grad", "main_grad_is_old"
    marks = [(param, name, getattr(param, name)) for param in params for name in names if hasattr(param, name)]
    for param, name, _ in marks:
        setattr(param, name, False)
    try:
        yield
    finally:
        for param, name, mark in marks:
            setattr(param, name, mark)


@contextmanager
def no_trace(modules: Sequence[Capturing]) -> Iterator[None]:
    """Afterwards scales, histories, buffers and main_grad are what they were before; scales lie where graphs may read
    them from then on."""
    scales = list(dict.fromkeys(one for module in modules for one in module.scales))
    saved = [(one, one.dump()) for one in scales]
    owners = [module.original.module for module in modules]
    buffers = [(buffer, buffer.clone()) for owner in owners for buffer in owner.buffers()]
    params: list[Any] = list(dict.fromkeys(p for owner in owners for p in owner.parameters()))
    accumulated = [(param, param.main_grad) for param in params if isinstance(_main_grad(param), Tensor)]
    _lend(accumulated)
    try:
        with marks_put_back(params), OPEN.pools.recording():
            yield
        fix_together([state for one in scales for state in one._live.values()])
    except BaseException:
        for module in modules:
            module.forget_plans()
        raise
    finally:
        for param, grad in accumulated:
            param.main_grad = grad
        with torch.no_grad():
            for one, numbers in saved:
                one.load(numbers)
            for buffer, value in buffers:
                buffer.copy_(value)


def _main_grad(param: Any) -> Any:
    return getattr(param, "main_grad", None)


def _lend(accumulated: list[tuple[Any, Tensor]]) -> None:
    """Each parameter a main_grad to write to, in memory that all share."""
    largest: dict[Any, Tensor] = {}
    for _, grad in accumulated:
        key = grad.dtype, grad.device
        if key not in largest or largest[key].numel() < grad.numel():
            largest[key] = torch.empty(grad.numel(), dtype=grad.dtype, device=grad.device)
    for param, grad in accumulated:
        param.main_grad = largest[grad.dtype, grad.device][: grad.numel()].view(grad.shape)


def record(
    events: Sequence[Event], slots: Sequence[Slot], modules: Sequence[Capturing], captures: Captures, retain: bool
) -> None:
    """All graphs, in the order of `events`."""
    outputs: dict[int, list[Any]] = {}
    for module in modules:
        module.first = False
        module.original.found()
    for at, (slot, module_index, backward) in enumerate(events):
        module = modules[module_index]
        if not backward:
            outputs[slot] = module.capture_forward(slots[slot], captures, at)
        elif module.original.training:
            module.capture_backward(slots[slot], outputs.pop(slot), captures, at, retain)


def refuse_what_no_graph_holds(module: nn.Module) -> None:
    """Found before anything runs."""
    name = type(module).__name__
    for child in module.modules():
        hooks = (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks)
        if child is not module and any(hooks):
            raise RuntimeError(
                f"{name} holds a {type(child).__name__} with hooks: a replay would not run them; register them after "
                "make_graphed_callables, on the module that it gets"
            )
        if isinstance(child, TeLiteModule) and child.delay_wgrad_compute:
            raise NotImplementedError(
                f"make_graphed_callables of a {type(child).__name__} with delay_wgrad_compute=True: no graph holds "
                "backward_dw(); build it without, or capture whole steps by torch.cuda.graph"
            )
    if any(buffer.requires_grad for buffer in module.buffers()):
        raise RuntimeError(f"{name} has a buffer that requires a gradient: make it a parameter")
    if any(param._backward_hooks for param in module.parameters() if not isinstance(param, QuantizedTensor)):
        raise RuntimeError(
            f"{name} has a parameter with hooks of Tensor.register_hook, which the capture would run into the graph: "
            "register them after make_graphed_callables"
        )
