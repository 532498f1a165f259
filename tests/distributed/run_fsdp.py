"""te_lite modules under torch's fully_shard (FSDP2), and checkpoints by torch.distributed.checkpoint.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/run_fsdp.py --device cpu

Sharded over 2 ranks every gradient is a sum of two and a half of it, so all bits must be those of unsharded copies.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.modules import base  # noqa: E402
from te_lite.ops.activation import Activation  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from tests.harness import RECIPES, has_scales, under  # noqa: E402

M, K, FFN = 32, 64, 128
PAGE = Path(__file__).parents[2] / "docs/how-to/shard-with-fsdp.md"


class Model(nn.Sequential):
    """The three modules, one after the other; under tensor parallelism column, row, column and row."""

    def __init__(
        self, device: torch.device | str, tp: dist.ProcessGroup | None = None, activation: str = "swiglu", **options
    ) -> None:
        torch.manual_seed(0 if tp is None else dist.get_rank(tp))
        options = {"params_dtype": torch.bfloat16, "device": device, **options}
        modes: list[dict] = [{}, {}, {}]
        if tp is not None:
            options |= {"tp_group": tp, "tp_size": dist.get_world_size(tp), "sequence_parallel": True}
            modes = [{"parallel_mode": "column"}, {"parallel_mode": "row"}, {"set_parallel_mode": True}]
        super().__init__(
            te.LayerNormLinear(K, FFN, **modes[0], **options),
            te.Linear(FFN, K, **modes[1], **options),
            te.LayerNormMLP(K, FFN, activation=activation, **modes[2], **options),
        )

    def forward(self, x: Tensor, **kwargs) -> Tensor:
        for module in self:
            x = module(x, **kwargs)
        return x


def shard(model: Model, mesh: DeviceMesh, **options) -> Model:
    for module in model:
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def pair(mesh: DeviceMesh, **options) -> tuple[Model, Model]:
    device = mesh.device_type
    return shard(Model(device), mesh, **options), Model(device)


def draw(device: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    x, dy = (torch.randn(M, K, generator=generator).bfloat16().to(device) for _ in range(2))
    return x.requires_grad_(), dy


def differences(sharded: Model, whole: Model, recipe: str, group: dist.ProcessGroup, seeds: int = 3, run=None) -> int:
    """Steps of both with SGD: how many tensors differ. group: over which gradients are averaged. run: what a step
    calls in place of a model."""
    wrong, device = 0, next(whole.parameters()).device.type
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (sharded, whole)]
    for seed in range(seeds):
        seen = []
        for model in (sharded, whole):
            x, dy = draw(device, seed)
            model.zero_grad()
            with under(recipe, **({} if recipe == "bf16" else {"amax_reduction_group": dist.group.WORLD})):
                y = (run or type(model).__call__)(model, x)
            y.backward(dy)
            seen.append((y.detach(), x.grad))
        wrong += sum(not torch.equal(a, b) for a, b in zip(*seen, strict=True))
        with torch.no_grad():  # what both would give if neither quantized
            wrong += recipe != "bf16" and torch.equal((run or type(whole).__call__)(whole, x), y)
        for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(theirs.grad, group=group)
            theirs.grad /= dist.get_world_size(group)
            wrong += not torch.equal(ours.grad.full_tensor(), theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
        parameters = zip(sharded.parameters(), whole.parameters(), strict=True)
        wrong += sum(not torch.equal(a.full_tensor(), b) for a, b in parameters)
    modules = zip(sharded, whole, strict=True)
    return wrong + sum(not torch.equal(a.get_extra_state(), b.get_extra_state()) for a, b in modules)


def recipes(mesh: DeviceMesh) -> int:
    wrong = 0
    for recipe in RECIPES:
        if te.check_recipe_support(te.recipe.from_name(recipe), mesh.device_type)[0]:
            for reshard in (True, False):
                wrong += differences(*pair(mesh, reshard_after_forward=reshard), recipe, mesh.get_group())
    return wrong


def recomputation(mesh: DeviceMesh) -> int:
    def run(model: Model, x: Tensor) -> Tensor:
        return te.checkpoint(model, x, use_reentrant=False)

    return differences(*pair(mesh), "delayed", mesh.get_group(), run=run)


def microbatches(mesh: DeviceMesh) -> int:
    """A weight that is quantized for the first is used for the second, gathered anew as it may be."""
    return differences(
        *pair(mesh), "current", mesh.get_group(), run=lambda model, x: model(x, is_first_microbatch=True)
        + model(x, is_first_microbatch=False),
    )  # fmt: skip


def plans(mesh: DeviceMesh) -> int:
    """FSDP exchanges parameters in each step, which is no reason to decide anything anew: one build a module."""
    count, build = [], base.build_plans
    base.build_plans = lambda *args: count.append(1) or build(*args)
    try:
        model = shard(Model(mesh.device_type), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for seed in range(3):
            x, dy = draw(mesh.device_type, seed)
            with under("current"):
                model(x).backward(dy)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        base.build_plans = build
    return len(count) - len(model)


def with_tensor_parallelism(mesh: DeviceMesh) -> int:
    """2 x 2 ranks: shards of tensor-parallel shards."""
    grid = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("data", "tensor"))
    tensor, data = grid.get_group("tensor"), grid["data"]
    models = shard(Model(mesh.device_type, tensor), data), Model(mesh.device_type, tensor)
    return differences(*models, "current", data.get_group())


def meta_device(mesh: DeviceMesh) -> int:
    """Built without memory, sharded, then drawn: every rank the same, of the right spread, and trains."""
    model = shard(Model("meta"), mesh)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(1)
    for module in model:
        module.reset_parameters()
    wrong = 0
    for name, param in model.named_parameters():
        full, norm = param.full_tensor().float(), "layer_norm" in name
        wrong += not isinstance(param, DTensor)
        if name.endswith("bias") or norm:
            wrong += not torch.equal(full, torch.full_like(full, float(norm and name.endswith("weight"))))
        else:  # the standard error of the deviation of n values is sigma / sqrt(2 n)
            wrong += not abs(full.std() / 0.023 - 1) < 6 / (2 * full.numel()) ** 0.5
    x, dy = draw(mesh.device_type, 0)
    with under("current"):
        model(x).backward(dy)
    return wrong + sum(not param.grad.full_tensor().any() for param in model.parameters())


def mixed_precision(mesh: DeviceMesh) -> int:
    """Masters in fp32, which FSDP casts for the GEMMs."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = shard(Model(mesh.device_type, params_dtype=torch.float32), mesh, mp_policy=policy)
    whole = Model(mesh.device_type, params_dtype=torch.float32).bfloat16()
    x, dy = draw(mesh.device_type, 0)
    with under("current"):
        got, want = sharded(x), whole(x)
    got.backward(dy)
    want.backward(dy)
    wrong = int(not torch.equal(got, want))
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        mean = theirs.grad.float()
        dist.all_reduce(mean)
        wrong += ours.grad.dtype != torch.float32 or not torch.equal(ours.grad.full_tensor(), mean / 2)
    return wrong


def refusals(mesh: DeviceMesh) -> int:
    """What would go wrong in silence says so."""
    device, wrong = mesh.device_type, 0

    def refuses(what: str, run: Callable[[], object]) -> int:
        try:
            run()
        except RuntimeError as error:
            return what not in str(error)
        return 1

    x = torch.randn(M, K, device=device).bfloat16()
    options = {"device": device, "params_dtype": torch.bfloat16}
    late = fully_shard(te.Linear(K, K, delay_wgrad_compute=True, **options), mesh=mesh)
    late(x).sum().backward()
    wrong += refuses("leave out delay_wgrad_compute", late.backward_dw)
    fused = te.Linear(K, K, fuse_wgrad_accumulation=True, **options)
    fused.weight.main_grad = torch.zeros(K, K, device=device)
    fused = fully_shard(fused, mesh=mesh)
    wrong += refuses("no main_grad", lambda: fused(x))
    split = te.Linear(K, K, **options)
    split(x)  # it has plans
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh, [Shard(0)]))
    return wrong + refuses("is a DTensor", lambda: split(x))


def _gated(name: str, model: Model) -> bool:
    """Whether a parameter is a gated fc1: [gate; up]."""
    owner, _, parameter = name.rpartition(".")
    return parameter.startswith("fc1") and Activation.of(model.get_submodule(owner).activation).glu


def as_dtensors(model: Model, mesh: DeviceMesh) -> dict[str, Tensor]:
    """A tensor-parallel model's state for torch.distributed.checkpoint, by the function of the documents."""
    code = re.search(r"```python\n(from torch.distributed.checkpoint.*?)\nsave\(", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["as_dtensors"](model, mesh)


def reload_unsharded(mesh: DeviceMesh) -> int:
    return sum(_reloaded(mesh, activation) for activation in ("gelu", "swiglu"))


def _reloaded(mesh: DeviceMesh, activation: str) -> int:
    """Written by 2 tensor-parallel ranks, read by a model on one, and by 2 again; no reader has run before."""
    device, recipe = mesh.device_type, "delayed"
    parallel, whole = Model(device, mesh.get_group(), activation=activation), Model(device, activation=activation)
    for seed in range(2):
        x, dy = draw(device, seed)
        with under(recipe):
            parallel(x).backward(dy)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(as_dtensors(parallel, mesh), checkpoint_id=folder[0])
    state = {name: v.unflatten(0, (2, -1)) if _gated(name, whole) else v for name, v in whole.state_dict().items()}
    dcp.load(state, checkpoint_id=folder[0])
    whole.load_state_dict({name: v.flatten(0, 1) if _gated(name, whole) else v for name, v in state.items()})
    again = Model(device, mesh.get_group(), activation=activation)
    for param in again.parameters():
        nn.init.zeros_(param)
    dcp.save(state, checkpoint_id=folder[0] + "/whole")
    dcp.load(sharded := as_dtensors(again, mesh), checkpoint_id=folder[0] + "/whole")
    local = {name: value.to_local() for name, value in sharded.items()}
    again.load_state_dict({name: v.flatten(0, 1) if _gated(name, again) else v for name, v in local.items()})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    kept = parallel.state_dict()
    wrong = sum(not torch.equal(v.cpu(), kept[name].cpu()) for name, v in again.state_dict().items())
    for (name, ours), theirs in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        parts = [torch.empty_like(theirs) for _ in range(mesh.size())]
        dist.all_gather(parts, theirs.detach())
        if _gated(name, whole):
            full = torch.cat([part.chunk(2)[i] for i in range(2) for part in parts])
        else:
            full = torch.cat(parts, theirs.partition_dim) if theirs.partition_dim >= 0 else parts[0]
        wrong += not torch.equal(ours, full)
    for ours, theirs in zip(whole, parallel, strict=True):
        # What was loaded and not used yet lies where it was read to, on the CPU.
        loaded, kept = ours.get_extra_state().cpu(), theirs.get_extra_state().cpu()
        wrong += not (has_scales(loaded) and torch.equal(loaded, kept))
    x = torch.randn(M, K, device=device, generator=torch.Generator(device).manual_seed(3)).bfloat16()
    with torch.no_grad():
        got, want = whole(x), parallel(x.chunk(mesh.size())[mesh.get_local_rank()])
    parts = [torch.empty_like(want) for _ in range(mesh.size())]
    dist.all_gather(parts, want)
    # Every rounding to bf16 is off by 2^-9 at most, and fewer than ten follow each other; a permuted fc1 by everything.
    return wrong + int((got - torch.cat(parts)).float().norm() > 10 * 2**-9 * got.float().norm())


def norms(mesh: DeviceMesh) -> int:
    """Sharded norms, whose extra state is empty, through torch.distributed.checkpoint into others."""
    device = mesh.device_type

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        options = {"params_dtype": torch.bfloat16, "device": device}
        model = nn.Sequential(te.LayerNorm(K, **options), te.Linear(K, K, **options), te.RMSNorm(K, **options))
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
        return fully_shard(model, mesh=mesh)

    source, target = made(0), made(1)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(source.state_dict(), checkpoint_id=folder[0])
    state = target.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    target.load_state_dict(state)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    x, _ = draw(device, 0)
    return int(not {"0._extra_state", "2._extra_state"} <= set(state)) + int(not torch.equal(source(x), target(x)))


OF_TWO = (
    recipes, recomputation, microbatches, plans, meta_device, mixed_precision, refusals, reload_unsharded, norms,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    rank, size, device = init_ranks(parser.parse_args().device)
    mesh, failed = init_device_mesh(device.type, (size,)), 0
    try:
        for case in OF_TWO if size == 2 else (with_tensor_parallelism,):
            wrong = torch.tensor(float(case(mesh)), device=device)
            dist.all_reduce(wrong)
            failed += bool(wrong)
            if rank == 0:
                print(f"{case.__name__}: {'ok' if not wrong else f'{int(wrong)} WRONG'}", flush=True)
    finally:
        leave_ranks()
    if rank == 0:
        print("all agree" if not failed else f"{failed} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
