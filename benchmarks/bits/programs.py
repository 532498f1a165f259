"""Cases of several modules: what one hands to the next, what they share, what is stored and read again."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import torch
from case import PER_TENSOR, RECIPES, STATEFUL, Case, Draw, recipe_of, under
from digests import Recorder
from steps import record_state, update
from torch import Tensor, nn

import te_lite as te

K, FFN, TOKENS = 128, 160, 40
Program = Callable[[Case, Recorder, torch.device], None]


def _parameters(module: nn.Module, draw: Draw) -> None:
    for _, param in sorted(module.named_parameters()):
        with torch.no_grad():
            param.copy_(draw.tensor(*param.shape, dtype=param.dtype, scale=0.1))


def _block(device: torch.device) -> nn.ModuleDict:
    """qkv, proj and an MLP, as in a Transformer layer without its attention."""
    common = {"params_dtype": torch.bfloat16, "device": device}
    return nn.ModuleDict(
        {
            "qkv": te.LayerNormLinear(K, K, normalization="RMSNorm", **common),
            "proj": te.Linear(K, K, bias=False, **common),
            "mlp": te.LayerNormMLP(K, FFN, activation="swiglu", **common),
        }
    )


def _through(block: nn.ModuleDict, x: Tensor, first: bool | None = None, **quantized: bool) -> Tensor:
    a = block["qkv"](x, first, **{key: value for key, value in quantized.items() if key == "fp8_output"})
    a = block["proj"](a, first, residual=x, **{key: value for key, value in quantized.items() if key == "fp8_grad"})
    return block["mlp"](a, first, residual=a)


def _step(block: nn.ModuleDict, case: Case, draw: Draw, recorder: Recorder, label: str, **given: object) -> None:
    block.zero_grad(set_to_none=True)
    x = draw.tokens(TOKENS, K, dtype=torch.bfloat16).requires_grad_()
    with under(case.recipe):
        y = _through(block, x, **given)
    y.backward(draw.tokens(TOKENS, K, dtype=torch.bfloat16, scale=0.1))
    recorder.add(f"{label} y", y)
    recorder.add(f"{label} dx", x.grad)
    for name, param in block.named_parameters():
        recorder.add(f"{label} grad of {name}", param.grad)
    record_state(block, recorder, label)
    update(block)


def block_steps(case: Case, recorder: Recorder, device: torch.device) -> None:
    """Three steps of a layer, whose modules share the autocast and delayed scaling's pass."""
    block, draw = _block(device), Draw(case.name, device)
    _parameters(block, draw)
    for step in range(3):
        _step(block, case, draw, recorder, f"step {step}")


def handed_on(case: Case, recorder: Recorder, device: torch.device) -> None:
    """A quantized output goes into the next linear, whose quantized gradient comes back."""
    block, draw = _block(device), Draw(case.name, device)
    _parameters(block, draw)
    for step in range(3):
        _step(block, case, draw, recorder, f"step {step}", fp8_output=True, fp8_grad=True)


def stored(case: Case, recorder: Recorder, device: torch.device) -> None:
    """Two steps, then a copy, a checkpoint read into new modules, and one more step of each."""
    block, draw = _block(device), Draw(case.name, device)
    _parameters(block, draw)
    for step in range(2):
        _step(block, case, draw, recorder, f"step {step}")
    copied, loaded, file = copy.deepcopy(block), _block(device), io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for label, one in (("copied", copied), ("loaded", loaded), ("itself", block)):
        _step(one, case, Draw(f"{case.name} after", device), recorder, label)


def calibrated(case: Case, recorder: Recorder, device: torch.device) -> None:
    """Histories are recorded in high precision, then used."""
    block, draw = _block(device), Draw(case.name, device)
    _parameters(block, draw)
    for step in range(2):
        with te.autocast(enabled=False, calibrating=True, recipe=recipe_of(case.recipe)):
            y = _through(block, draw.tokens(TOKENS, K, dtype=torch.bfloat16))
        recorder.add(f"calibrating {step}", y)
        record_state(block, recorder, f"calibrating {step}")
    _step(block, case, draw, recorder, "used")


def changed_recipe(case: Case, recorder: Recorder, device: torch.device) -> None:
    """Steps under this recipe, another one, none, and this one again: plans and scales are made anew."""
    block, draw = _block(device), Draw(case.name, device)
    _parameters(block, draw)
    other = Case(case.kind, "delayed" if case.recipe != "delayed" else "current")
    for step, one in enumerate((case, case, other, Case(case.kind, "bf16"), case, case)):
        _step(block, one, draw, recorder, f"step {step}")


def converted(case: Case, recorder: Recorder, device: torch.device) -> None:
    """torch's own linears, quantized in place."""
    draw = Draw(case.name, device)
    sizes = {"device": device, "dtype": torch.bfloat16}
    model = nn.Sequential(nn.Linear(K, FFN, **sizes), nn.GELU(), nn.Linear(FFN, K, bias=False, **sizes))
    _parameters(model, draw)
    te.convert_to_float8_training(model, recipe=recipe_of(case.recipe), minimum_size=0)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        x = draw.tokens(TOKENS, K, dtype=torch.bfloat16).requires_grad_()
        y = model(x)
        y.backward(draw.tokens(TOKENS, K, dtype=torch.bfloat16, scale=0.1))
        recorder.add(f"step {step} y", y)
        recorder.add(f"step {step} dx", x.grad)
        for name, param in model.named_parameters():
            recorder.add(f"step {step} grad of {name}", param.grad)


def graphs(case: Case, recorder: Recorder, device: torch.device) -> None:
    """A step captured in a CUDA graph after two that were not; three replays with new inputs."""
    block, draw = _block(device), Draw(case.name, device)
    _parameters(block, draw)
    x = draw.tokens(TOKENS, K, dtype=torch.bfloat16).requires_grad_()
    dy = draw.tokens(TOKENS, K, dtype=torch.bfloat16, scale=0.1)
    results: list[Tensor] = []

    def step() -> None:
        x.grad = None
        block.zero_grad(set_to_none=True)
        with under(case.recipe):
            y = _through(block, x)
        y.backward(dy)
        results[:] = [y.detach(), x.grad, *(param.grad for param in block.parameters() if param.grad is not None)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for replay in range(3):
        with torch.no_grad():
            x.copy_(draw.tokens(TOKENS, K, dtype=torch.bfloat16, scale=2.0**replay))
        graph.replay()
        for i, tensor in enumerate(results):
            recorder.add(f"replay {replay} result {i}", tensor)
        record_state(block, recorder, f"replay {replay}")


PROGRAMS: dict[str, Program] = {
    "block": block_steps,
    "handed on": handed_on,
    "stored": stored,
    "calibrated": calibrated,
    "changed recipe": changed_recipe,
    "converted": converted,
    "graphs": graphs,
}


def _runs(program: str, recipe: str, device: torch.device) -> bool:
    if program == "handed on":
        return recipe in PER_TENSOR
    if program == "calibrated":
        return recipe in STATEFUL
    if program == "converted":
        return recipe not in ("bf16", *STATEFUL)
    return program != "graphs" or device.type == "cuda"


def cases(device: torch.device) -> Iterator[Case]:
    """Every program with the recipes for which it means something."""
    for program in PROGRAMS:
        for recipe in (*RECIPES, "delayed_recent"):
            if _runs(program, recipe, device):
                yield Case(program, recipe)


def run_program(case: Case, recorder: Recorder, device: torch.device) -> None:
    """The program of that kind."""
    torch.manual_seed(20)
    PROGRAMS[case.kind](case, recorder, device)
