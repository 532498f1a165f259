"""Checks of partial sums that travel in fp8 (fp8_buf): how far off they are, and who does without, saying so."""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.distributed as dist

import te_lite as te
from te_lite.overlap.collective import all_gather
from tests.distributed.overlapping import (
    COLUMN,
    METHODS,
    ROW,
    SCATTERS,
    begin,
    check_pass,
    in_eighths,
    pair_of,
    rows_of,
)
from tests.harness import RECIPES


def begin_narrow(tokens: int, device, method: str) -> None:
    cfgs = deepcopy(METHODS[method][1])
    for name in SCATTERS:
        cfgs.setdefault(name, {})["fp8_buf"] = True
    begin(tokens, 128, dist.group.WORLD, device, ub_cfgs=cfgs)


def check_report(pair, m: int, narrow: bool) -> None:
    """Of a module with one linear: what its partial sums took, and why where that is no less."""
    row = rows_of(pair)["fprop" if pair.module._modes == ("row",) else "dgrad"]
    assert row["sent"] == m * 128 * (1 + 1 / 32 if narrow else 2) * (pair.size - 1), row
    assert narrow != ("fp8_buf is for" in row["reason"]), row


def rings_send_as_always(device) -> None:
    """The bits that they give without the option, and the report says that it has no effect."""
    begin_narrow(128 * dist.get_world_size(), device, "pipeline")
    for recipe in RECIPES:
        for which in (ROW, COLUMN):
            pair = pair_of(which, recipe, device, "pipeline")
            check_pass(pair, 1, 128)
            check_report(pair, 128, narrow=False)


def fused_kernels_send_less(device) -> None:
    """Within what ops/narrow.py allows each of the others' partials, and the sum's roundings: products have none. A
    number of tokens that blocks do not divide travels as always."""
    if device.type == "cpu":
        return  # no fused kernels
    size, rank, m = dist.get_world_size(), dist.get_rank(), 256
    for use in range(3):  # slots and flags in turn with those of other sizes
        begin_narrow(m * size, device, "fused")
        for which in (ROW, COLUMN):
            pair = pair_of(which, "bf16", device, "fused", bias=False)
            pair.backward(pair.forward(pair.batch(1, 40)))
            check_report(pair, 40, narrow=False)
            with torch.no_grad():
                pair.module.weight.copy_(in_eighths(8 * pair.module.weight))
            batch = tuple(in_eighths(t * scale) for t, scale in zip(pair.batch(7 + use, m), (1, 10), strict=True))
            x, out, dy = pair.forward(batch)
            operand, weight = (x, pair.module.weight.t()) if which is ROW else (dy, pair.module.weight)
            got = out if which is ROW else pair.backward((x, out, dy))["dx"]
            check_report(pair, m, narrow=True)
            partials = all_gather(operand.detach().float() @ weight.detach().float(), dist.group.WORLD)
            partials = partials.view(size, size, m, -1)[:, rank].double()
            others, exact = partials[torch.arange(size, device=device) != rank], partials.sum(0)
            allowed = (2.0**-4 * others.abs() + others.abs().amax(2, keepdim=True) / 224 * 2.0**-10).sum(0)
            # R terms of up to 17/16 of the partials added in fp32; what that gave to bf16, by half of 2^-7.
            sums = size * 2.0**-24 * 17 / 16 * partials.abs().sum(0)
            rounding = sums + 2.0**-8 * (exact.abs() + allowed + sums)
            error = (got.detach().double() - exact).abs()
            assert (error <= allowed + rounding).all(), (error / (allowed + rounding)).max()
            relative = float(error.norm() / exact.norm())
            assert 0.004 < relative < 2.0**-4, relative  # above bf16's alone, or nothing was narrow
            if rank == 0:
                print(f"{pair.label}: relative error {relative:.4f}", flush=True)
        for recipe in ("delayed", "current", "rowwise"):
            pair = pair_of(ROW, recipe, device, "fused")
            batch = pair.batch(9, m)
            got, want = pair.forward(batch)[1].double(), pair.expected(batch)["out"].double()
            check_report(pair, m, narrow=True)
            assert (got - want).norm() < 2.0**-4 * want.norm(), recipe
        te.destroy_ub()


NARROW = [rings_send_as_always, fused_kernels_send_less]
