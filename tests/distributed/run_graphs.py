"""Overlapped modules in CUDA graphs: replays with changing inputs against copies of them run eagerly, 100 of whole
steps, 10 of what te.make_graphed_callables makes.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/run_graphs.py

The captured and the eager step run the same kernels on the same data, so every bit must agree.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te
from te_lite.testing.distributed import init_ranks, leave_ranks
from tests.harness import has_scales

TOKENS, HIDDEN, FFN = 512, 256, 512
RECIPES = ("bf16", "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")
REPLAYS = 100
GEMMS = [
    f"{layer}_{gemm}"
    for layer, gemm in itertools.product(("qkv", "fc1", "proj", "fc2"), ("fprop", "dgrad"))
    if gemm == "fprop" or layer in ("proj", "fc2")
]
CONFIGS = {method: {gemm: {"method": method} for gemm in GEMMS} for method in ("ring_exchange", "fused")}
# Partial sums in fp8; as the name says only where a fused kernel sends them.
NARROW = {gemm: {"method": "fused", "fp8_buf": True} for gemm in ("proj_fprop", "fc2_fprop", "fc1_dgrad")}
CONFIGS["fused, fp8_buf"] = {**CONFIGS["fused"], **NARROW}
FUSED_RECIPES = ("bf16", "delayed", "current", "rowwise")
FLAGS = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
SCATTERS = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True}


def make(kind: str, device: torch.device, flags: dict[str, bool]) -> torch.nn.Module:
    torch.manual_seed(dist.get_rank())
    options = {"sequence_parallel": True, "tp_group": dist.group.WORLD, "tp_size": dist.get_world_size(), **flags}
    options |= {"device": device, "params_dtype": torch.bfloat16}
    if kind == "row":
        return te.Linear(FFN, HIDDEN, parallel_mode="row", ub_name="proj", **options)
    return te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **options)


def step(module: torch.nn.Module, recipe: str, x: Tensor, dy: Tensor, residual: Tensor | None) -> list[Tensor]:
    """Forward and backward; output, input gradient, parameter gradients."""
    x.grad = None
    module.zero_grad(set_to_none=True)
    with te.autocast(recipe != "bf16", recipe=recipe, strict=True):
        y = module(x, **({} if residual is None else {"residual": residual}))
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def draw(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed * dist.get_world_size() + dist.get_rank())
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def compare(kind: str, recipe: str, flags: dict[str, bool], device: torch.device, replays: int, narrow: bool) -> bool:
    """Whether every replay gave the bits of the eager step, on all ranks. narrow: with partial sums in fp8."""
    module, world = make(kind, device, flags), dist.get_world_size()
    shard = (TOKENS // world, HIDDEN)
    shape = (TOKENS, FFN // world) if kind == "row" else shard
    x, dy = draw(shape, 0, device).requires_grad_(), draw(shard, 1, device)
    residual = draw(shard, 2, device) if kind == "row" else None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(module, recipe, x, dy, residual)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(module, recipe, x, dy, residual)
    assert (recipe == "delayed") == has_scales(module.get_extra_state())
    twin = copy.deepcopy(module)  # which takes delayed scaling's steps too
    wrong = 0
    for i in range(replays):
        new_x, new_dy, new_residual = (draw(s, 3 * i + 3 + j, device) for j, s in enumerate((shape, shard, shard)))
        with torch.no_grad():
            x.copy_(new_x)
            dy.copy_(new_dy)
            if residual is not None:
                residual.copy_(new_residual)
        for t in captured:
            t.fill_(float("nan"))
        graph.replay()
        got = [t.clone() for t in captured]
        added = None if residual is None else new_residual
        eager = step(twin, recipe, new_x.requires_grad_(), new_dy, added)  # between replays, in slots of its own
        wrong += not all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))
    sent = TOKENS // world * HIDDEN * 33 // 32 * (world - 1)
    assert not narrow or any(row["sent"] == sent for row in te.overlap_report()), te.overlap_report()
    total = torch.tensor([wrong], device=device)
    dist.all_reduce(total)
    return total.item() == 0


def compare_callables(kind: str, recipe: str, flags: dict[str, bool], device: torch.device, replays: int) -> bool:
    """The same of te.make_graphed_callables, whose forwards and backwards are graphs of their own."""
    module, world = make(kind, device, flags), dist.get_world_size()
    twin = copy.deepcopy(module)
    shard = (TOKENS // world, HIDDEN)
    shape = (TOKENS, FFN // world) if kind == "row" else shard
    sample = draw(shape, 0, device).requires_grad_()
    kwargs = {"residual": draw(shard, 1, device)} if kind == "row" else {}
    te.make_graphed_callables(module, (sample,), sample_kwargs=kwargs, recipe=None if recipe == "bf16" else recipe)
    wrong = 0
    for i in range(replays):
        x, dy, residual = (draw(s, 3 * i + 3 + j, device) for j, s in enumerate((shape, shard, shard)))
        added = residual if kind == "row" else None
        pair = []
        for one in (module, twin):
            found = step(one, recipe, x.clone().requires_grad_(), dy, added)
            pair.append([t.clone() for t in (*found, one.get_extra_state())])
        wrong += len(pair[0]) != len(pair[1]) or not all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    total = torch.tensor([wrong], device=device)
    dist.all_reduce(total)
    return total.item() == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=REPLAYS)
    parser.add_argument("--methods", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    args = parser.parse_args()
    rank, world, device = init_ranks("cuda")
    good = True
    for name, flags in itertools.product(args.methods, (FLAGS, SCATTERS)):
        te.initialize_ub([TOKENS, HIDDEN], world, ub_cfgs=CONFIGS[name], strict=True, cuda_graphs=True)
        narrow = "fp8_buf" in name
        # A row-parallel linear alone scatters before anything was gathered; it adds a residual.
        for kind, recipe in [("mlp", recipe) for recipe in (FUSED_RECIPES if narrow else RECIPES)] + [("row", "bf16")]:
            backward = "scatters" if flags is SCATTERS else "bulk"
            found = {f"{args.replays} replays": compare(kind, recipe, flags, device, args.replays, narrow)}
            if flags is FLAGS and not narrow:
                steps = -(-args.replays // 10)
                found[f"{steps} of callables"] = compare_callables(kind, recipe, flags, device, steps)
            for what, same in found.items():
                good &= same
                if rank == 0:
                    said = f"{name}, {backward}, {kind}, {recipe}: {what}"
                    print(said, "ok" if same else "DIFFER", flush=True)
        te.destroy_ub()
    if rank == 0:
        print("all replays agree" if good else "FAILED", flush=True)
    leave_ranks()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
