"""Checks of partial sums that travel in fp8 (fp8_buf): bit for bit what the option says, and how far off they are."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.distributed as dist

import te_lite as te
from te_lite.overlap.collective import all_gather
from tests.distributed.overlapping import (
    COLUMN,
    LAYERS,
    METHODS,
    ROW,
    SCATTERS,
    Pair,
    begin,
    check_pass,
    pair_of,
    rows_of,
)
from tests.harness import RECIPES

BULKS = ("qkv_wgrad", "fc1_wgrad")


def begin_narrow(tokens: int, device, method: str) -> None:
    cfgs = deepcopy(METHODS[method][1])
    for name in SCATTERS if METHODS[method][0].get("ub_overlap_rs_dgrad") else (*SCATTERS[:2], *BULKS):
        cfgs.setdefault(name, {})["fp8_buf"] = True
    begin(tokens, 128, dist.group.WORLD, device, ub_cfgs=cfgs)


def rings_and_bulk(device) -> None:
    """Of every module and recipe the program that Specified writes down; token counts that blocks do not divide travel
    as always, and the report says so."""
    size = dist.get_world_size()
    for method in ("bulk", "pipeline"):
        begin_narrow(256 * size, device, method)
        for recipe in RECIPES:
            for which in LAYERS:
                pair = pair_of(which, recipe, device, method)
                for step, m in enumerate((128, 16, 256)):
                    check_pass(pair, step, m)
                    check_report(pair, method, m)
        te.destroy_ub()


def check_report(pair: Pair, method: str, m: int) -> None:
    """Of a module with one linear: what its partial sums took, and why where that is no less."""
    if len(pair.module._modes) > 1:
        return
    gemm = "fprop" if pair.module._modes == ("row",) else "wgrad" if method == "bulk" else "dgrad"
    row, narrow = rows_of(pair)[gemm], m % 128 == 0
    assert row["sent"] == m * 128 * (1 + 1 / 32 if narrow else 2) * (pair.size - 1), row
    assert narrow != ("fp8_buf without effect" in row["reason"]), row


def how_far_off(device) -> None:
    """Within what ops/narrow.py allows each of the others' partials, and the rounding of products and of the sum; by
    fused kernels where there are GPUs, else by rings."""
    size, rank, m = dist.get_world_size(), dist.get_rank(), 256
    method = "fused" if device.type == "cuda" else "ring_exchange"
    begin_narrow(m * size, device, method)
    for which in (ROW, COLUMN):
        pair = pair_of(which, "bf16", device, method, bias=False)
        x, out, dy = pair.forward(pair.batch(7, m))
        got, operand, weight = (out, x, pair.module.weight.t()) if which is ROW else (None, dy, pair.module.weight)
        if got is None:
            got = pair.backward((x, out, dy))["dx"]
        partials = all_gather(operand.detach().float() @ weight.detach().float(), dist.group.WORLD)
        partials = partials.view(size, size, m, -1)[:, rank].double()
        others = partials[torch.arange(size, device=device) != rank]
        exact = partials.sum(0)
        # Each block of 128 columns has a scale: 2^-4 of a value, or half a step of a 224th of the block's largest.
        allowed = (2.0**-4 * others.abs() + others.abs().amax(2, keepdim=True) / 224 * 2.0**-10).sum(0)
        rounding = 2.0**-7 * partials.abs().sum(0) + 2.0**-8 * exact.abs()  # products to bf16 before, the sum after
        error = (got.detach().double() - exact).abs()
        assert (error <= allowed + rounding + 1e-6).all(), (error / (allowed + rounding)).max()
        relative = float(error.norm() / exact.norm())
        assert 0.004 < relative < 2.0**-4, relative  # above bf16's alone, or nothing was narrow
        if rank == 0:
            print(f"{pair.label}: relative error {relative:.4f}", flush=True)


NARROW = [rings_and_bulk, how_far_off]
