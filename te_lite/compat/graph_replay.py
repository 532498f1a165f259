"""Replays: what te.make_graphed_callables leaves of a module, for each of its micro-batches a Slot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from te_lite.autocast import OPEN, Pass, current
from te_lite.functional.saved import backward_method
from te_lite.quantize import replay
from te_lite.quantize.delayed import Pool, Pools
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.recipe import Recipe

Address = tuple[int, ...]


def address(t: Tensor) -> Address:
    """Where a tensor's numbers lie, those of a quantized one in every layout."""
    parts = t.q.tensors[:4] if isinstance(t, QuantizedTensor) else (t,)
    return tuple([part.data_ptr() for part in parts if part is not None])


def amp_dtype() -> torch.dtype | None:
    """The dtype of the open torch.amp.autocast on CUDA; None where none is open."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _put(static: Tensor, value: Tensor) -> None:
    """A copy, unless the value lies there."""
    if static.data_ptr() != value.data_ptr() or static.stride() != value.stride():
        static.copy_(value)


class Graph(NamedTuple):
    """A captured graph. at: when, among those that share its memory. pools: those in which it records amaxes."""

    graph: Any
    at: float
    pools: list[Pool]


class Original:
    """A module as it runs eagerly.

    forward: its own. recipe: that of its autocast, None where that does not enable. caches: its quantized weights are
    kept across micro-batches; `weights` quantizes them anew in the same memory, `kept` holds that memory.
    """

    weights: Graph | None = None

    def __init__(self, module: nn.Module, recipe: Recipe | None, caches: bool) -> None:
        forward: Any = vars(module).get("forward")  # an attribute of the object
        self.own: Any = forward.original.own if isinstance(forward, Graphed) else forward
        self.forward: Callable[..., Any] = self.own or type(module).forward.__get__(module)
        self.module, self.recipe, self.caches = module, recipe, caches
        self.training, self.amp, self.pools = module.training, amp_dtype(), OPEN.pools
        self.kept: list[Any] = []
        self.params: dict[nn.Parameter, tuple[dict[str, Any], str, Address, bool]] = {}

    def found(self) -> None:
        """Notes the parameters that graphs are about to read where they lie."""
        for child in self.module.modules():
            for name, param in child._parameters.items():
                if param is not None:
                    self.params[param] = (child._parameters, name, address(param), param.requires_grad)

    def refuse(self, kind: type[Exception], what: str) -> NoReturn:
        raise kind(f"the graphs of {type(self.module).__name__} {what}")

    def check(self) -> None:
        """The parameters are where the graphs read them, and ask for the gradients that these compute."""
        for param, (owner, name, where, grad) in self.params.items():
            now = owner.get(name)
            if now is param and address(param) == where and param.requires_grad <= grad:
                continue
            how = "asks for a gradient and did not" if now is param and address(param) == where else "was replaced"
            self.refuse(RuntimeError, f"read its parameter {name!r}, which {how} since: make the graphs again")


class Slot:
    """The graphs of one module for one micro-batch, and the memory that they read and write.

    inputs: of the module's arguments. outputs: None where the module gave None. grad_outputs: None for an output that
    wants no gradient. params: those that get gradients. grads: of inputs and params, None where there is none.
    ends: when what forward keeps for backward may be overwritten, by graphs captured from then on.
    """

    backward: Graph | None = None
    outputs: tuple[Tensor | None, ...]
    out_spec: Any
    grad_outputs: tuple[Tensor | None, ...] = ()
    params: tuple[nn.Parameter, ...] = ()
    grads: tuple[Tensor | None, ...] = ()
    main_grads: tuple[tuple[Any, Address, bool], ...] = ()  # (parameter, where its main_grad is, overwritten)
    added: tuple[Any, ...] = ()  # of which backward says that it added to main_grad
    ends = math.inf
    kept: Any = None
    generation = 0  # what forward kept; another number means that it is gone

    def __init__(self, original: Original, args: Any, kwargs: dict[str, Any], live: set[Slot]) -> None:
        self.original, self.live, self.keys = original, live, tuple(kwargs)
        self.args, self.kwargs, self.clones = args, kwargs, False
        inputs, self.spec = tree_flatten((args, kwargs))
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        self.flat = all(isinstance(t, Tensor) for t in (*args, *kwargs.values()))
        self.forward: Graph

    # inputs

    def values(self, args: tuple, kwargs: dict[str, Any], grad: bool) -> list[Tensor]:
        """The call's arguments, in the order of `inputs`, which they must resemble."""
        name = type(self.original.module).__name__
        if kwargs.keys() != set(self.keys):
            raise TypeError(
                f"{name} was captured with the keyword arguments {list(self.keys)}, got {list(kwargs)}: pass exactly "
                "these, and all others as they stood in sample_args"
            )
        ordered = {key: kwargs[key] for key in self.keys}
        values: list[Any] = [*args, *ordered.values()]
        if not self.flat:
            values, spec = tree_flatten((args, ordered))
            if spec != self.spec:
                self.original.refuse(ValueError, f"take arguments nested as {self.spec}, got {spec}: pass them so")
        if len(values) != len(self.inputs):
            self.original.refuse(ValueError, f"take {len(self.inputs)} tensors, got {len(values)}: pass these")
        for i, (static, value) in enumerate(zip(self.inputs, values, strict=True)):
            same = isinstance(value, Tensor) and value.shape == static.shape
            if not same or value.dtype != static.dtype or value.device != static.device:
                self._refuse(i, value)
            if grad and value.requires_grad and not static.requires_grad:
                self.original.refuse(
                    ValueError, f"compute no gradient of input {i}, which requires one: its sample must require it too"
                )
        return values

    def _refuse(self, i: int, value: Any) -> NoReturn:
        def said(t: Any) -> str:
            return f"{list(t.shape)} {t.dtype} on {t.device}" if isinstance(t, Tensor) else type(t).__name__

        rule = f"take {said(self.inputs[i])} as input {i}, got {said(value)}: a graph's shapes and dtypes are those of "
        self.original.refuse(ValueError, f"{rule}the sample; pad or cast the input, or make graphs for this one")

    # replays

    def replay(self, graph: Graph) -> None:
        for other in [slot for slot in self.live if slot.ends < graph.at]:
            other.spoil()  # its memory is this graph's too
        graph.graph.replay()
        for pool in graph.pools:
            pool.touched = True

    def spoil(self) -> None:
        """What the last forward kept for backward is gone."""
        self.generation += 1
        self.live.discard(self)

    def run_forward(self, values: tuple[Tensor, ...], first: bool, grad: bool) -> None:
        for static, value in zip(self.inputs, values, strict=True):
            _put(static, value)
        if first and self.original.weights is not None:
            self.replay(self.original.weights)
        self.spoil()
        self.replay(self.forward)
        if grad and self.backward is not None:
            self.live.add(self)

    def run_backward(self, grads: tuple[Tensor | None, ...], generation: int) -> None:
        """From the gradients of the outputs to self.grads."""
        if generation != self.generation:
            self.original.refuse(
                RuntimeError,
                "have lost what this backward needs: their forward, or graphs that share its memory, were replayed "
                "since; run forwards and backwards in the order of capture, which _order sets, each backward once",
            )
        for param, where, overwritten in self.main_grads:
            if (address(param.main_grad), bool(getattr(param, "overwrite_main_grad", False))) != (where, overwritten):
                what = f"main_grad of a parameter {tuple(param.shape)}, which was replaced since, or its overwrite_"
                self.original.refuse(RuntimeError, f"write to the {what}main_grad changed: make the graphs again")
            if getattr(param, "main_grad_is_old", False):  # the graph adds, and what it gives is the first gradient
                param.main_grad.zero_()
                param.main_grad_is_old = False
        for static, grad in zip(self.grad_outputs, grads, strict=True):
            if static is not None and grad is None:
                static.zero_()
            elif static is not None and grad is not None:
                _put(static, grad)
        assert self.backward is not None
        self.replay(self.backward)
        if self.ends < math.inf:
            self.spoil()
        for param in self.added:
            param.grad_added_to_main_grad = True

    # delayed scaling

    @property
    def steps(self) -> bool:
        """Whether scales take steps."""
        return bool(self.forward.pools or (self.backward is not None and self.backward.pools))

    def open_pass(self) -> Pass | None:
        """That of the outermost autocast, whose end takes the step of the forward scales; None where none is open."""
        original = self.original
        if replay.OPEN.frames or torch._C._current_graph_task_id() != -1:
            original.refuse(
                RuntimeError, "record amaxes for delayed scaling, so no checkpoint may compute them again: put the "
                "checkpoint inside of the module, before its graphs are made"
            )  # fmt: skip
        if OPEN.pools is not original.pools:
            original.refuse(RuntimeError, "step scales of the thread that made them: call them there")
        return next((outer.state.one_pass for outer in reversed(OPEN.stack) if outer.state is not None), None)

    def check_recipe(self) -> None:
        """An autocast around the call says what the graphs do, if it says anything."""
        state, recipe = current(), self.original.recipe
        if state is not None and recipe is not None and not (state.enabled and state.recipe == recipe):
            self.original.refuse(
                RuntimeError, f"quantize by {recipe}, and the te.autocast around the call says {state.recipe}: open it "
                "with the recipe that make_graphed_callables got, or make the graphs again"
            )  # fmt: skip


class Replay(torch.autograd.Function):
    """A slot's forward and backward. claims: this call's backward is the last of its pass."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, call: tuple[bool, bool, bool], *inputs: Tensor) -> tuple[Tensor | None, ...]:
        first, grad, ctx.claims = call
        slot.run_forward(inputs[: len(slot.inputs)], first, grad)
        ctx.slot, ctx.generation = slot, slot.generation
        ctx.leaves = [t if t.is_leaf and t.requires_grad else None for t in inputs]
        ctx.set_materialize_grads(False)
        outputs = tuple([t if t is None else t.detach() for t in slot.outputs])
        pairs = zip(outputs, slot.grad_outputs, strict=True)
        ctx.mark_non_differentiable(*[t for t, grad in pairs if grad is None and t is not None])
        return outputs

    @backward_method
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        slot: Slot = ctx.slot
        for leaf, static in zip(ctx.leaves, slot.grads, strict=True):
            # Autograd has made what an earlier backward returned the leaf's own, and will add to it.
            if leaf is not None and static is not None and leaf.grad is not None:
                if leaf.grad.data_ptr() == static.data_ptr():
                    leaf.grad = leaf.grad.clone()
        slot.run_backward(grads, ctx.generation)
        if slot.steps:
            pools: Pools = slot.original.pools
            pools.close(ctx.claims)
        found = [t if t is None else t.detach() for t in slot.grads]
        if slot.clones:
            first = len(slot.inputs)
            found[first:] = [t if t is None else t.clone() for t in found[first:]]
        return None, None, *found


class Graphed:
    """A module's forward as graphs, while the module trains if they were captured so (else: while it does not). In the
    other mode, and after reset(), it is the module's own."""

    def __init__(self, slot: Slot) -> None:
        self.slot: Slot | None = slot
        self.original = slot.original

    def reset(self) -> None:
        """Lets go of the graphs. No output and no gradient of theirs may be used any more."""
        self.slot, module = None, self.original.module
        if vars(module).get("forward") is self:
            del module.forward
            if self.original.own is not None:
                module.forward = self.original.own

    def __reduce__(self) -> tuple:
        """In copies and pickles of the module: the copy's own forward."""
        return getattr, (self.original.module, "forward")

    def _first(self, kwargs: dict[str, Any]) -> bool:
        """is_first_microbatch, which the modules inside follow, whatever the outer one hands them."""
        first = kwargs.pop("is_first_microbatch", None)
        if first is not None and not isinstance(first, bool) or (first is None and self.original.caches):
            raise ValueError(
                f"is_first_microbatch={first!r}: graphs with cache_quantized_params=True need True, which quantizes "
                "weights, or False, which takes them as they were quantized last"
            )
        return bool(first)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        slot, original = self.slot, self.original
        if slot is None or original.module.training != original.training:
            return original.forward(*args, **kwargs)
        for name in ("cuda_graph_stream", "cuda_graph_event"):
            if kwargs.pop(name, None) is not None:
                raise NotImplementedError(f"{name}: te_lite replays on the current stream; use torch.cuda.stream(...)")
        first = self._first(kwargs)
        grad = torch.is_grad_enabled()
        values = slot.values(args, kwargs, grad)
        original.check()
        slot.check_recipe()
        if amp_dtype() != original.amp:
            original.refuse(RuntimeError, f"were captured under torch.amp.autocast of {original.amp}: call them so")
        if grad and not original.training and any(t.requires_grad for t in (*values, *original.params)):
            original.refuse(RuntimeError, "were captured in eval() and have no backward: call them in torch.no_grad()")
        claims, around = False, None
        if slot.steps:
            around = slot.open_pass()
            claims = grad and (around is None or not around.claimed)
            if around is not None and grad:
                around.claimed = True
        outputs = Replay.apply(slot, (first, grad, claims), *values, *slot.params)
        if slot.steps and around is None and grad:
            original.pools.update("forward")
        return outputs[0] if slot.out_spec is None else tree_unflatten(outputs, slot.out_spec)
