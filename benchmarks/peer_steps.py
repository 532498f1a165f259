"""What benchmarks/peers.py times: the same module by te_lite, Transformer Engine, torch and torchao, and its GEMMs.

A module is called in one of three ways:

    autograd     gradients are returned to autograd; weights are quantized in every step
    main_grad    fuse_wgrad_accumulation: weight gradients are added to fp32 main_grad, and what backward returns for a
                 weight is a dummy, as Megatron calls it. Norm weights get a .grad
    cached       main_grad, and the weights that the first micro-batch quantized are used again
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.modules import BF16, ModuleStep, Shape, build_te, build_torch, gemm_step, linears

CALLS = ("autograd", "main_grad", "cached")
# Recipe -> its class, which has the same name in both libraries.
RECIPES = {
    "bf16": None,
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}
# Package -> what is used of it.
PEERS = {"transformer_engine": "transformer_engine.pytorch", "torchao": "torchao.float8"}
ERROR_SHAPE = Shape("error", 256, 256, 384)
WARM_STEPS = 3  # before results are compared: delayed scaling's scales come from earlier steps
SEED = 1234


@dataclass(frozen=True)
class Case:
    """What the candidates of one interleaved run have in common."""

    shape: Shape
    module: str
    recipe: str
    call: str

    def row(self) -> dict[str, str]:
        return {"shape": self.shape.name, "module": self.module, "recipe": self.recipe, "call": self.call}


def installed(packages: Sequence[str] = tuple(PEERS)) -> tuple[dict[str, str], list[str]]:
    """(package -> version) of the peers that this Python can import, and a sentence on each other one."""
    found, left_out = {}, []
    for package in packages:
        try:
            importlib.import_module(PEERS[package])
        except ModuleNotFoundError:
            left_out.append(f"{package} is left out: it is not installed.")
        except Exception as error:  # a library of its own that cannot be loaded, say
            print(f"{package}: {error}")
            left_out.append(f"{package} is left out: importing it raises {type(error).__name__}.")
        else:
            found[package] = str(getattr(importlib.import_module(package), "__version__", "unknown"))
    return found, left_out


def library(candidate: str) -> tuple[ModuleType, ModuleType]:
    """Modules and recipes of "te_lite" or "te"."""
    names = ("te_lite", "te_lite.recipe")
    if candidate == "te":
        names = (PEERS["transformer_engine"], "transformer_engine.common.recipe")
    return importlib.import_module(names[0]), importlib.import_module(names[1])


def forget(candidates: Sequence[str]) -> None:
    """Drops what the libraries keep of modules that are gone: delayed scaling updates the scales of all it knows."""
    places = {"te_lite": "te_lite", "te": "transformer_engine.pytorch.quantization"}
    for candidate in candidates:
        if candidate in places:
            resolve_name(f"{places[candidate]}:FP8GlobalStateManager").reset()


def fill(module: nn.Module, device: str) -> nn.Module:
    """The same parameters in every module of one kind."""
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for parameter in module.parameters():
            mean, deviation = (0.0, 0.023) if parameter.dim() == 2 else (1.0, 0.1)
            parameter.normal_(mean, deviation, generator=generator)
    return module


def operands(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """x and dy, in which all candidates of a case share the memory."""
    generator = torch.Generator(device).manual_seed(SEED + 1)
    sizes = (case.shape.hidden, linears(case.module, case.shape)[-1][1])
    x, dy = (torch.randn(case.shape.tokens, n, device=device, dtype=BF16, generator=generator) for n in sizes)
    return x, dy


def own(x: Tensor) -> Tensor:
    """A leaf of its own in the memory of x."""
    return x.detach().requires_grad_()


@dataclass
class PeerStep(ModuleStep):
    """A step of a te_lite or Transformer Engine module. first: is_first_microbatch."""

    first: bool | None = None

    def forward(self) -> Tensor:
        with self.context():
            return self.module(self.x, is_first_microbatch=self.first)

    def reset(self) -> None:
        super().reset()
        for parameter in self.module.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.grad_added_to_main_grad = False


def peer_step(candidate: str, case: Case, x: Tensor, dy: Tensor) -> PeerStep:
    """te_lite's or Transformer Engine's module, called as the case says."""
    te, recipes = library(candidate)
    fused, device = case.call != "autograd", str(x.device)
    module = fill(build_te(case.module, case.shape, device, te, fuse_wgrad_accumulation=fused), device)
    for parameter in module.parameters() if fused else ():
        if parameter.dim() == 2:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    context: Callable = contextlib.nullcontext
    if case.recipe != "bf16":
        context = functools.partial(te.autocast, enabled=True, recipe=getattr(recipes, RECIPES[case.recipe])())
    work = PeerStep(module, context, own(x), dy)
    if case.call == "cached":
        work.first = True
        work.reset()
        work.step()
        work.first = False
    return work


def torch_step(case: Case, x: Tensor, dy: Tensor, compiled: bool = False, float8: bool = False) -> ModuleStep:
    """torch's own modules. float8: converted by torchao, with tensorwise scales."""
    module = fill(build_torch(case.module, case.shape, str(x.device)), str(x.device))
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        root = nn.Sequential(module)  # a linear that is the root itself would not be replaced
        module = convert_to_float8_training(root, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    return ModuleStep(torch.compile(module) if compiled else module, contextlib.nullcontext, own(x), dy)


def block_gemm_step(module: str, shape: Shape, device: str) -> Callable[[], None]:
    """gemm_step with a scale for 1 x 128 values of x and dy and for 128 x 128 of w, by torch."""
    one_row, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    calls: list[Callable[[], Tensor]] = []

    def random(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, device=device, dtype=BF16).to(torch.float8_e4m3fn)

    def product(m: int, n: int, k: int, weight: bool) -> None:
        blocks = -(-k // 128)
        scale_a, scale_b = (torch.ones(blocks, rows, device=device).t() for rows in (m, n))
        if weight:  # cuBLAS reads rows of scales in fours
            scale_b = torch.ones(-(-n // 128), -(-blocks // 4) * 4, device=device).t()
        calls.append(functools.partial(
            F.scaled_mm, random(m, k), random(n, k).t(), scale_a=scale_a, scale_recipe_a=one_row, scale_b=scale_b,
            scale_recipe_b=square if weight else one_row, output_dtype=BF16,
        ))  # fmt: skip

    for k, n in linears(module, shape):
        product(shape.tokens, n, k, True)  # y = x w^T
        product(shape.tokens, k, n, True)  # dx = dy w
        product(n, k, shape.tokens, False)  # dw = dy^T x

    def step() -> None:
        for call in calls:
            call()

    return step


def gemms(case: Case, device: str) -> Callable[[], None]:
    if case.recipe == "blockwise":
        return block_gemm_step(case.module, case.shape, device)
    return gemm_step(case.module, case.shape, case.recipe != "bf16", device)


Step = ModuleStep | Callable[[], None]


def builders(case: Case, device: str, peers: dict[str, str], compiled: bool) -> dict[str, Callable[[], Step]]:
    """Candidate -> what builds it. peers: those installed; compiled: also torch.compile's and torchao's modules."""
    x, dy = operands(case, device)
    found: dict[str, Callable[[], Step]] = {"te_lite": functools.partial(peer_step, "te_lite", case, x, dy)}
    if "transformer_engine" in peers:
        found["te"] = functools.partial(peer_step, "te", case, x, dy)
    if case.call == "autograd" and case.recipe == "bf16":
        found["torch"] = functools.partial(torch_step, case, x, dy)
        if compiled:
            found["torch_compiled"] = functools.partial(torch_step, case, x, dy, True)
    if case.call == "autograd" and case.recipe == "current" and compiled and "torchao" in peers:
        found["torchao"] = functools.partial(torch_step, case, x, dy, True, True)
    if case.module == "LayerNormMLP" and (case.recipe != "blockwise" or torch.device(device).type == "cuda"):
        found["gemms"] = functools.partial(gemms, case, device)
    return found


def results(work: ModuleStep) -> list[Tensor]:
    """y, dx and the gradient of each parameter, of one step after WARM_STEPS others."""
    for _ in range(WARM_STEPS):
        work.reset()
        work.step()
    work.reset()
    parameters = list(work.module.parameters())
    for parameter in parameters:
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    y = work.forward()
    y.backward(work.dy)
    grads = [p.main_grad if getattr(p, "grad_added_to_main_grad", False) else p.grad for p in parameters]
    return [y.detach(), work.x.grad, *grads]


def worst_error(work: ModuleStep, case: Case) -> float:
    """The largest |out - oracle| / |oracle| over y, dx and the gradients; the oracle is torch's module in fp64."""
    device = str(work.x.device)
    oracle = fill(build_torch(case.module, case.shape, device), device).double()
    wide = ModuleStep(oracle, contextlib.nullcontext, work.x.detach().double().requires_grad_(), work.dy.double())
    pairs = zip(results(work), results(wide), strict=True)
    return max(((out.double() - right).norm() / right.norm()).item() for out, right in pairs)
