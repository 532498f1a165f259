"""One call of a module's linears: what it reads and gives, and the autograd.Function that runs it.

A Layer (linear.py, layernorm_linear.py, layernorm_mlp.py) says what is computed. What all layers share stands here:
keeping tensors for backward, replaying recorded launches, the dummy gradient that Megatron's hooks look for, and
closing a pass of delayed scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import Any, Protocol

import torch
from torch import Tensor

from te_lite.functional.plan import LinearPlan, inf_to_nan
from te_lite.functional.recordings import Flattened
from te_lite.functional.saved import Item, backward_method, flatten, not_before, unflatten, wants, without_amp
from te_lite.ops.source import Source, plain
from te_lite.overlap.epilogues import GemmInput
from te_lite.quantize.delayed import Pools
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.quantizer import Quantizer
from te_lite.quantize.tensor import QuantizedTensor

_aliases: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


@dataclass(slots=True)
class Call:
    """What a module decided for one call: one plan a linear, its weight parameter, a quantized weight to reuse or None.

    grad: a backward may follow. closes_pass: this is the pass's first fp8 module, whose backward is the last to get
    there and updates the backward scales. pools: of a pass under delayed scaling.
    output, grad_input: quantizers of y and dx when the caller takes them quantized. parts: parameters that the weight
    was joined from, where it was; versions: theirs in forward. note: of replay.Outstanding, to be held as long as the
    call's graph.
    """

    plans: tuple[LinearPlan, ...]
    weights: tuple[Tensor, ...]
    cached: tuple[QTensor | None, ...]
    grad: bool
    closes_pass: bool = False
    output: Quantizer | None = None
    grad_input: Quantizer | None = None
    pools: Pools | None = None
    parts: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()
    note: Any = None

    def kept_parts(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
        """(what is kept in place of `tensors` where the weight was joined of parts; for parts_joined()).

        A weight that is a copy of its parts is not kept, but they are: FSDP frees them meanwhile. `weights` then has
        the first of them.
        """
        whole = self.weights[0]
        if _aliases(whole, self.parts[0]):
            return tensors, []
        at = [i for i, t in enumerate(tensors) if t.shape == whole.shape and _aliases(t, whole)]
        self.weights = self.parts[0], *self.weights[1:]  # of which backward asks the dtype and the columns alone
        others = [t for i, t in enumerate(tensors) if i not in at]
        return [*others, *(self.parts if at else ())], at

    def check_parts(self, needs: Iterable[bool]) -> None:
        """RuntimeError where a part of a split weight was written to since forward. needs: whether dx, whether dw.

        Autograd checks the versions of what it saved. But a joined weight has a version of its own, which does not
        change when its parts are written to. To be called before anything that was saved is read.
        """
        if any(needs) and self.versions and tuple([part._version for part in self.parts]) != self.versions:
            raise RuntimeError(
                "a split weight was written to between forward and backward, which still needed it; run backward "
                "before the optimizer's step"
            )

    def parts_joined(self, saved: Sequence[Tensor], at: list[int], dy: Tensor) -> Sequence[Tensor]:
        """The tensors that kept_parts() was given, from what it gave: the parts are joined again."""
        if not at:
            return saved
        tensors, parts = list(saved[: -len(self.parts)]), saved[-len(self.parts) :]
        if self.plans[0].compiled and dy.numel():
            parts = [not_before(dy[(0,) * dy.dim()], part) for part in parts]
        whole = torch.cat(tuple(parts))
        for i in at:
            tensors.insert(i, whole)
        return tensors


PLAIN = (Tensor, torch.nn.Parameter)  # what is read without asking for its class
unsafe_view = torch.ops.aten._unsafe_view.default  # a view that is no view: autograd sees no base


def as_matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K] -> [M, K], plain, contiguous, in `dtype`."""
    x = x.dequantize() if isinstance(x, QuantizedTensor) else x
    if x.dim() == 2 and x.dtype == dtype and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).to(dtype).contiguous()


def as_operand(x: Tensor, plan: LinearPlan, *, grad: bool) -> GemmInput:
    """x[..., K], or dy[..., N] with grad, as a GEMM's quantizer takes it; what is in its format is used as it is.

    A tensor that will be gathered is quantized anew: its ranks may have chosen different scales. What the caller can
    write to is copied where it is read after backward.
    """
    if x.__class__ in PLAIN and x.dim() == 2 and x.dtype == plan.dtype and x.is_contiguous():
        return Source("plain", x)
    if isinstance(x, QuantizedTensor):
        quantizer = plan.operands.dgrad.a if grad else plan.operands.fprop.a
        gathered = plan.gathers_dy if grad else plan.gathers_x
        whole = x.q.row is not None and (x.q.col is not None or x.q.format.col_from_row)
        if x.q.format == quantizer.format and whole and not gathered:
            return x.q.map(Tensor.clone) if plan.sink.late and x.quantizer is not None else x.q
    return Source("plain", as_matrix(x, plan.dtype))


def output_shape(x_shape: torch.Size, features: int, plan: LinearPlan | None) -> tuple[int, ...]:
    """The shape of y for x of x_shape.

    plan: of the linear, where a gather or a scatter of tokens changes the first dimension."""
    leading = list(x_shape[:-1])
    if plan is not None and plan.gathers_x:
        leading[0] *= plan.tp.size
    elif plan is not None and plan.gathers_dy:
        leading[0] //= plan.tp.size
    return (*leading, features)


def as_output(
    y: Tensor, x_shape: torch.Size, quantizer: Quantizer | None = None, plan: LinearPlan | None = None
) -> Tensor:
    """y[M, N] as [..., N] with the leading dimensions of x_shape, not a view of anything; quantized when a quantizer is
    given. plan: as of output_shape."""
    if quantizer is None and len(x_shape) == 2:
        return y
    shape = output_shape(x_shape, y.shape[-1], plan)
    if quantizer is not None:
        return QuantizedTensor(quantizer.quantize(plain(y))[0], shape)
    return unsafe_view(y, shape)


class Layer(Protocol):
    """What a module computes. A module hands in the same object until it computes something else: the object is part
    of the key under which its launches are recorded.

    params: as LayerFunction takes them: the module's parameters, then the residual; None stands for what is absent.
    needs: what needs() gave. weights: of each linear's weight, its places in `needs` and among forward's arguments.
    """

    @property
    def weights(self) -> tuple[tuple[int, int], ...]: ...

    def needs(self, call: Call, x: Tensor, params: Sequence[Any]) -> tuple[Any, ...]:
        """Which gradients will be wanted: first of x, or of the norm, and of the weight; of biases their dtypes."""

    def forward(self, call: Call, needs: Any, x: Tensor, params: Sequence[Any]) -> Sequence[Item]:
        """(y, norm(x) where it is an output else None, *what is kept)."""

    def backward(self, back: Backward, kept: list[Any], dy: Tensor, dln: Tensor | None) -> Sequence[Tensor | None]:
        """The gradients of x and params but the residual; they end in dw, db of each linear. kept: by forward; the
        layer may empty it, so that what was read for the last time is free. dln: of norm(x), where it was an output."""


@dataclass(slots=True)
class Backward:
    """What a backward knows of its forward."""

    call: Call
    needs: Any  # what Layer.needs() gave, without weights whose gradient this backward was not asked for
    planned: Any  # what it gave
    x_shape: torch.Size


class LayerFunction(torch.autograd.Function):
    """y, or (y, norm(x)), of x and params.

    Forward and backward ask the module's Recordings first. Where the launches are recorded, try_replay() issues them
    and gives what the layer would have given, as tensors and specs (see saved.py). Otherwise the layer itself runs.
    Autograd casts gradients to the dtypes of what they belong to. Forward and backward ask themselves whether torch.amp
    is on: the decorators that other Functions have would be another Python call in each step.
    """

    @staticmethod
    def forward(ctx: Any, layer: Layer, call: Call, x: Tensor, *params: Any) -> Any:
        if torch._C._is_any_autocast_enabled():
            return _forward_without_amp(ctx, layer, call, x, *params)
        recordings, needs, shape = call.plans[0].recordings, layer.needs(call, x, params), x.shape
        found = key = None
        if recordings is not None and x.__class__ in PLAIN and call.output is None:
            inputs = x, *params
            for q in call.cached:
                if q is not None:
                    inputs += q.tensors
            key, found = recordings.try_replay((layer, "forward", needs), inputs)
        if found is not None:
            first = call.plans[0]
            for plan in call.plans:  # overlap_report() shows it, and the body would have set it
                plan.parallel.rows = x.numel() // shape[-1] * (first.tp.size if first.gathers_x else 1)
        elif key is None:
            found = Flattened(*flatten(layer.forward(call, needs, x, params)))
        else:
            found = recordings.run(key, inputs, partial(layer.forward, call, needs, x, params))  # type: ignore[union-attr]
        tensors, specs, spec_id = found  # specs: of y, of norm(x) or None, then of what is kept
        outputs = 1 if specs[1] is None else 2
        if call.grad:
            kept, copies = tensors[outputs:], list[int]()
            if call.parts:
                kept, copies = call.kept_parts(kept)
            ctx.save_for_backward(*kept)
            ctx.kept = layer, call, needs, shape, specs, spec_id, copies
        return tensors[0] if outputs == 1 else tuple(tensors[:2])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dln: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The gradients of forward's arguments. Its parts are no functions: each step would pay for the calls."""
        if torch._C._is_any_autocast_enabled() or torch.is_grad_enabled():
            return _checked_backward(ctx, dy, dln)
        # 1. What forward kept.
        layer, call, needs, x_shape, specs, spec_id, copies = ctx.kept
        if call.parts:
            call.check_parts(needs[:2])  # before saved_tensors, whose own check may miss them
        saved = call.parts_joined(ctx.saved_tensors, copies, dy) if call.parts else ctx.saved_tensors
        plans, recordings, answers = call.plans, call.plans[0].recordings, call.plans[0].sink.answers
        if plans[0].sink.takes:  # it would put what nobody asks for elsewhere
            for need, at in layer.weights:
                if needs[need] and not wants(ctx, at):
                    needs = *needs[:need], False, *needs[need + 1 :]
        if plans[-1].hides_overflow and not isinstance(dy, QuantizedTensor):
            dy = inf_to_nan(dy)

        # 2. Recorded launches are issued, where there are any: try_replay() says what `key` and `found` mean. `inputs`
        # are all tensors that they read or write. Without a spec_id nothing says which layouts were kept.
        key = found = inputs = None
        plain_dy = dy.__class__ is Tensor and dln is None and call.grad_input is None
        if recordings is not None and spec_id is not None and plain_dy:
            targets, overwrites = (), ()
            if answers:
                written = [plan.sink.where(weight) for plan, weight in zip(plans, call.weights, strict=True)]
                targets, overwrites = zip(*written, strict=True)
            inputs = dy, *targets, *saved
            key, found = recordings.try_replay((layer, "backward", needs, spec_id, *overwrites), inputs)

        # 3. Otherwise the layer runs, and is recorded where it has a key.
        if found is None:
            kept, placed = unflatten(specs[2:], saved)
            body = partial(layer.backward, Backward(call, needs, ctx.kept[2], x_shape), kept, dy, dln)
            # Where some were copied for the launches to read, the key is not theirs but that of the originals.
            if key is None or any(map(is_not, placed, saved)):
                del inputs, saved, placed, kept  # the layer frees what it has read
                grads = list(body())
            else:
                found = recordings.run(key, inputs, body)
        if found is not None:  # the gradients that are there, and a spec for each, None for the others
            grads = list(found.tensors)
            for i, spec in enumerate(found.specs):
                if spec is None:
                    grads.insert(i, None)

        # 4. A sink that has put a weight gradient elsewhere says what autograd gets. `grads` end in dw and db of each
        # linear.
        wanted = ctx.needs_input_grad[2:]  # of each of `grads`, then of the residual
        if answers:
            for plan, weight, (need, at) in zip(plans, call.weights, layer.weights, strict=True):
                if needs[need]:
                    grads[at - 2] = plan.sink.answer(grads[at - 2], weight)

        # 5. The pass is closed under delayed scaling. The residual was added to y: its gradient is dy.
        if call.pools is not None:
            call.pools.close(call.closes_pass)
        residual = None
        if wanted[-1]:
            residual = dy.dequantize() if isinstance(dy, QuantizedTensor) else dy
        return None, None, *grads, residual


_forward_without_amp, _checked_backward = without_amp(LayerFunction.forward), backward_method(LayerFunction.backward)
_apply = super(torch.autograd.Function, LayerFunction).apply  # what apply() calls where no torch.func transform is
_alive = torch._C._functorch.unwrap_if_dead  # of a tensor that outlives its transform: what it wrapped


def run_layer(layer: Layer, call: Call, x: Tensor, *params: Any) -> Any:
    """y, or (y, norm(x)); see LayerFunction."""
    if not call.grad:
        return LayerFunction.forward(None, layer, call, x, *params)
    apply = LayerFunction.apply if torch._C._are_functorch_transforms_active() else _apply
    if params[-1] is not None:
        params = *params[:-1], _alive(params[-1])
    return apply(layer, call, _alive(x), *params)
