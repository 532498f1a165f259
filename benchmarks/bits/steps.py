"""Runs a case: builds its module, takes its steps, records every output, gradient, scale and history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from case import Case, Draw, recipe_of, under
from digests import Recorder
from torch import Tensor, nn

import te_lite as te

Run = Callable[[nn.Module, Tensor, Mapping[str, Any]], Any]
LEARNING_RATE = 0.05


def _plain(module: nn.Module, x: Tensor, forward: Mapping[str, Any]) -> Any:
    return module(x, **forward)


def _amp(module: nn.Module, x: Tensor, forward: Mapping[str, Any]) -> Any:
    with torch.amp.autocast(x.device.type, dtype=torch.bfloat16):
        return module(x, **forward)


def _te_checkpoint(reentrant: bool) -> Run:
    def run(module: nn.Module, x: Tensor, forward: Mapping[str, Any]) -> Any:
        return te.checkpoint(module, x, use_reentrant=reentrant, **forward)

    return run


def _torch_checkpoint(module: nn.Module, x: Tensor, forward: Mapping[str, Any]) -> Any:
    options = {"use_reentrant": False, "context_fn": te.checkpoint_context_fn}
    return torch.utils.checkpoint.checkpoint(module, x, **options, **forward)


def _no_grad(module: nn.Module, x: Tensor, forward: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return module(x, **forward)


def _high_precision_inside(module: nn.Module, x: Tensor, forward: Mapping[str, Any]) -> Any:
    with te.autocast(enabled=False):
        first = module(x, **forward)
    return first, module(x, **forward)


def _twice(module: nn.Module, x: Tensor, forward: Mapping[str, Any]) -> Any:
    return module(x, **forward), module(x * 2, **forward)


RUNS: dict[str, Run] = {
    "plain": _plain,
    "amp": _amp,
    "te_checkpoint": _te_checkpoint(False),
    "te_checkpoint_reentrant": _te_checkpoint(True),
    "torch_checkpoint": _torch_checkpoint,
    "no_grad": _no_grad,
    "high_precision_inside": _high_precision_inside,
    "twice": _twice,
}


def build(case: Case, device: torch.device, rank: int = 0, **layout: Any) -> nn.Module:
    """The module of `case` with drawn parameters. layout: what a tensor-parallel rank adds to the constructor."""
    torch.manual_seed(20 + rank)
    sizes = case.features
    given = {"params_dtype": case.dtype, "device": device, **case.build, **layout}
    opened = contextlib.nullcontext()
    if case.initial is not None:
        opened = te.quantized_model_init(recipe=None if case.initial == "delayed" else recipe_of(case.initial))
    with opened:
        if case.kind == "LayerNormMLP":
            module = te.LayerNormMLP(sizes.k, sizes.ffn, **given)
        elif case.kind in ("LayerNorm", "RMSNorm"):
            module = getattr(te, case.kind)(sizes.k, **given)
        else:
            module = getattr(te, case.kind)(sizes.k, sizes.n, **given)
    return module


def prepare(case: Case, module: nn.Module, draw: Draw) -> None:
    """Vectors that are no identity, which of the parameters have gradients, main_grad. In the order of their names."""
    for name, param in sorted(module.named_parameters()):
        if param.dim() == 1:
            with torch.no_grad():
                param.add_(draw.tensor(*param.shape, dtype=param.dtype, scale=0.2))
        if any(part in name for part in case.frozen):
            param.requires_grad_(False)
        if case.main_grad is not None and param.dim() == 2:
            param.main_grad = draw.tensor(*param.shape, dtype=case.main_grad)


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors among what a forward returned."""
    values: Iterable[Any] = outputs if isinstance(outputs, tuple) else (outputs,)
    return [value for value in values if isinstance(value, Tensor)]


class Steps:
    """The steps of one case on one rank.

    shape: of x; out_shape: of a residual. Both are those of this rank. seed: differs where ranks hold shards.
    """

    def __init__(
        self, case: Case, module: nn.Module, recorder: Recorder, device: torch.device,
        shape: tuple[int, ...], out_shape: tuple[int, ...], seed: str,
    ) -> None:  # fmt: skip
        self.case, self.module, self.recorder = case, module, recorder
        self.shape, self.out_shape = shape, out_shape
        self.draw = Draw(seed, device)

    def forward(self, label: str, step: int, forward: Mapping[str, Any]) -> Callable[[], None]:
        """One micro-batch; returns its backward."""
        case, add = self.case, self.recorder.add
        dtype = case.input_dtype or case.dtype
        x = self.draw.tokens(*self.shape, dtype=dtype, scale=2.0**step, special=case.special)
        x.requires_grad_("x" not in case.frozen)
        forward, residual = dict(forward), None
        if case.residual:
            residual = self.draw.tokens(*self.out_shape, dtype=dtype).requires_grad_("residual" not in case.frozen)
            forward["residual"] = residual
        with under(case.recipe):
            outputs = tensors_of(RUNS[case.run](self.module, x, forward))
        for i, out in enumerate(outputs):
            add(f"{label} out {i}", out)
        ends = [out for out in outputs if out.requires_grad]
        grads = [self.draw.tokens(*out.shape, dtype=out.dtype, scale=0.1 * 2.0**-step) for out in ends]

        def backward() -> None:
            if ends:
                torch.autograd.backward(ends, grads)
            add(f"{label} dx", x.grad)
            add(f"{label} dresidual", None if residual is None else residual.grad)

        return backward

    def take(self, step: int) -> None:
        """All micro-batches of a step, its weight gradients, and one of plain SGD."""
        case, module, add = self.case, self.module, self.recorder.add
        module.zero_grad(set_to_none=True)
        waiting = []
        for i, forward in enumerate(case.forward):
            backward = self.forward(f"step {step} batch {i}", step, forward)
            if case.pipelined:
                waiting.append(backward)
            else:
                backward()
        for backward in waiting:
            backward()
        if case.build.get("delay_wgrad_compute") and case.run != "no_grad":
            for _ in case.forward:
                module.backward_dw()
        fused = case.build.get("fuse_wgrad_accumulation")
        for name, param in module.named_parameters():
            add(f"step {step} main_grad of {name}", getattr(param, "main_grad", None))
            if not (fused and hasattr(param, "main_grad")):  # else .grad holds nothing that counts
                add(f"step {step} grad of {name}", param.grad)
        record_state(module, self.recorder, f"step {step}")
        if case.build.get("sequence_parallel"):
            te.reduce_sequence_parallel_grads(module)
            for name, param in module.named_parameters():
                add(f"step {step} reduced grad of {name}", param.grad if param.dim() == 1 else None)
        if not case.special:
            update(module)


def update(module: nn.Module) -> None:
    """param -= rate * gradient, so that the next step has other weights; also through main_grad."""
    with torch.no_grad():
        for param in module.parameters():
            grad = getattr(param, "main_grad", param.grad)
            if grad is not None and param.requires_grad:
                param.sub_((grad.float() * LEARNING_RATE).clamp(-0.1, 0.1).to(param.dtype))


def record_state(module: nn.Module, recorder: Recorder, label: str) -> None:
    """Everything that a checkpoint would hold: parameters, scales and histories."""
    for name, value in module.state_dict().items():
        recorder.add(f"{label} state {name}", value)


def run_case(case: Case, recorder: Recorder, device: torch.device) -> None:
    """All steps of a case in one process."""
    module = build(case, device)
    record_state(module, recorder, "initial")
    prepare(case, module, Draw(f"{case.name} parameters", device))
    shape, out_shape = (*case.tokens, case.features.k), (*case.tokens, case.width)
    steps = Steps(case, module, recorder, device, shape, out_shape, case.name)
    for step in range(case.steps):
        steps.take(step)
