"""Ranks of the tests of the public verbs, started by torchrun: a line for each check; exit status 1 if one fails.

    torchrun --nproc-per-node 2 tests/distributed/run_verbs.py --only exact --seed 7 --iterations 200

exact: shapes, dimensions, dtypes, exchanges and frozen operands are drawn, of values whose products add up exactly in
fp32 in any order, so that plain torch knows every bit, but for NCCL's sums of more than two partials in 16 bits: it
rounds between them in an order of its own. recipes: every recipe against te.Linear, which other tests hold against an
oracle. A failure of either prints the seed that repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TE_LITE_AUTO"] = "rule"  # what is fastest would differ from run to run
os.environ["TE_LITE_UB_TIMEOUT"] = "20"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.numerics import assert_bitwise_equal  # noqa: E402
from tests.distributed.overlapping import begin, in_eighths, poison, specified  # noqa: E402
from tests.distributed.suites import run_checks  # noqa: E402
from tests.distributed.verbs_checks import CHECKS as OTHERS  # noqa: E402
from tests.distributed.verbs_hostile import HOSTILE  # noqa: E402
from tests.distributed.verbs_symmetric import symmetric  # noqa: E402
from tests.harness import OPTIONS  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATHERS = (None, "auto", "ring_exchange", "fused")  # on CPU ranks a ring runs where a fused kernel is asked for
SCATTERS = (*GATHERS, "pipeline")
ITERATIONS = 24


def values(key: tuple, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same for one key on every rank."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(repr(key).encode()))
    return in_eighths(torch.randn(shape, generator=generator, device="cpu")).to(torch.get_default_device(), dtype)


class Case:
    """One drawn call: the same on every rank. shape: of x_shard, or of x of linear_reduce_scatter."""

    def __init__(self, seed: int, size: int, ub: bool) -> None:
        draw = random.Random(seed)
        self.seed, self.size, self.ub = seed, size, ub
        self.dtype, self.gathers = draw.choice(DTYPES), draw.random() < 0.5
        dims = draw.choice((2, 2, 3, 4))
        self.dim = draw.randrange(dims - 1)
        lead = [draw.choice((1, 2, 3, 5) if dims > 2 else (1, 7, 8, 12)) for _ in range(dims - 1)]
        lead[self.dim] *= 1 if self.gathers else size
        self.k = draw.choice((16, 24, 64))
        self.shape = (*lead, self.k)
        self.ns = [draw.choice((16, 40, 64)) for _ in range(draw.choice((1, 1, 2, 3)) if self.gathers else 1)]
        self.bias, self.residual = draw.random() < 0.5, not self.gathers and draw.random() < 0.5
        self.overlap = draw.choice(GATHERS if self.gathers else SCATTERS)
        self.wants = {name: draw.random() < 0.8 for name in ("x", "w", "b", "residual")}
        self.delay = draw.choice((0, 0, 500)) if ub else 0
        hides = ub and self.overlap is not None
        self.ring = hides and len(self.ns) == 1  # this rank's own partial is not rounded before the sum
        # Of a sum whose order is NCCL's: what has been added up, and how often fewer bits were kept, here or there.
        self.magnitude: Tensor | None = None
        self.roundings = 0
        self.strict = hides and (len(self.ns) == 1 or self.wants["w"] or not self.wants["x"])

    def of(self, name: str, rank: int, shape: tuple[int, ...]) -> Tensor:
        return values((self.seed, name, rank), shape, self.dtype)

    def out_shape(self, n: int) -> tuple[int, ...]:
        shape = [*self.shape[:-1], n]
        shape[self.dim] = shape[self.dim] * self.size if self.gathers else shape[self.dim] // self.size
        return tuple(shape)

    def summed(self, partials: list[Tensor], rank: int, *more: Tensor) -> Tensor:
        """This rank's part of the sum of fp32 partials, in the protocol's roundings, or in those of a collective."""
        mine = [p.chunk(self.size, self.dim)[rank] for p in partials]
        if not self.ring and self.size > 2 and mine[0].is_cuda and self.dtype.itemsize == 2:
            self.magnitude = sum(t.float().abs() for t in (*mine, *more))
            self.roundings = (self.size - 1) + 1 + 2 * len(more)  # NCCL's sums; the exact one; what both add after it
        if self.ring:
            parts = [p if r == rank else p.to(self.dtype).float() for r, p in enumerate(mine)]
            return sum([*parts, *[m.float() for m in more]]).to(self.dtype)
        total = sum(p.to(self.dtype).float() for p in mine).to(self.dtype)
        for m in more:
            total = total + m
        return total


def exact_case(case: Case, rank: int, group: Any) -> None:
    size, dim, dtype = case.size, case.dim, case.dtype
    ranks = range(size)
    x = case.of("x", rank, case.shape).requires_grad_(case.wants["x"])
    ws = [[case.of(f"w{i}", r, (n, case.k)) for i, n in enumerate(case.ns)] for r in ranks]
    bs = [[case.of(f"b{i}", r, (n,)) for i, n in enumerate(case.ns)] for r in ranks]
    dys = [[case.of(f"dy{i}", r, case.out_shape(n)) for i, n in enumerate(case.ns)] for r in ranks]
    weights = [w.clone().requires_grad_(case.wants["w"]) for w in ws[rank]]
    biases = [b.clone().requires_grad_(case.wants["b"]) if case.bias else None for b in bs[rank]]
    xs = [case.of("x", r, case.shape).float() for r in ranks]
    options = {"dim": dim - (case.seed % 2) * x.dim(), "overlap": case.overlap, "strict": case.strict}
    residual, got, want = None, {}, {}
    if case.gathers:
        one = len(weights) == 1
        given = (weights[0], biases[0]) if one else (tuple(weights), tuple(biases) if case.bias else None)
        ys = te.all_gather_linear(x, given[0], group, bias=given[1], **options)
        ys = (ys,) if one else ys
        whole = torch.cat(xs, dim)
        for i, y in enumerate(ys):
            plus = bs[rank][i].float() if case.bias else 0
            got[f"y{i}"], want[f"y{i}"] = y, (whole @ ws[rank][i].float().T + plus).to(dtype)
        partials = [sum(dys[r][i].float() @ ws[r][i].float() for i in range(len(ys))) for r in ranks]
        want["dx"] = case.summed(partials, rank)
        tokens, own = whole, dys[rank]
    else:
        residual = case.of("residual", rank, case.out_shape(case.ns[0])) if case.residual else None
        residual = residual.requires_grad_(case.wants["residual"]) if case.residual else None
        # As a row-parallel linear has it, every rank gives the bias; it is added to this rank's part of the sum.
        y = te.linear_reduce_scatter(x, weights[0], group, bias=biases[0], residual=residual, **options)
        ys, got["y"] = (y,), y
        more = [t for t in (bs[rank][0] if case.bias else None, residual) if t is not None]
        want["y"] = case.summed([xs[r] @ ws[r][0].float().T for r in ranks], rank, *[m.detach() for m in more])
        own = [torch.cat([dys[r][0] for r in ranks], dim)]
        want["dx"] = (own[0].float() @ ws[rank][0].float()).to(dtype)
        tokens = xs[rank]
    if any(y.requires_grad for y in ys):
        torch.autograd.backward(ys, dys[rank])
    flat = tokens.reshape(-1, case.k)
    for i, weight in enumerate(weights):
        got[f"dw{i}"], got[f"db{i}"] = weight.grad, None if biases[i] is None else biases[i].grad
        want[f"dw{i}"] = (own[i].float().reshape(-1, own[i].shape[-1]).T @ flat).to(dtype) if case.wants["w"] else None
        summed = dys[rank][i].float().reshape(-1, case.ns[i]).sum(0).to(dtype)
        want[f"db{i}"] = summed if case.bias and case.wants["b"] else None
    got["dx"], want["dx"] = x.grad, want["dx"] if case.wants["x"] else None
    got["dr"] = None if residual is None else residual.grad
    want["dr"] = dys[rank][0] if case.residual and case.wants["residual"] else None
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is None:
            continue
        assert got[name].is_contiguous()
        if case.magnitude is not None and name == ("dx" if case.gathers else "y"):
            near(f"{vars(case)}: {name}", got[name].detach(), value, case.magnitude, case.roundings / 2)  # of eps / 2
        else:
            assert_bitwise_equal(f"{vars(case)}: {name}", got[name].detach(), value)


def repeated(run: Callable[[int], None], seed: int, iterations: int, what: str) -> None:
    for one in range(seed, seed + iterations):
        try:
            run(one)
        except BaseException as error:
            raise AssertionError(f"repeat it: --only {what} --seed {one} --iterations 1") from error


def exact(args: argparse.Namespace, device: torch.device) -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for ub in (False, True):
        buffers = begin(1024, 64, group, device, dtype=torch.float32) if ub else None

        def run(seed: int, buffers=buffers, ub=ub) -> None:
            case = Case(seed, size, ub)
            if buffers is not None:
                buffers.executor.set_delays(seed * size + rank, case.delay)
                if seed % 4 == 0:
                    poison([buffers])
            exact_case(case, rank, group)

        repeated(run, args.seed, args.iterations, "exact")


def near(label: str, got: Tensor, want: Tensor, magnitude: Tensor, roundings: float) -> None:
    """Within so many roundings of the magnitude that has been added up; fp8 values are off by an eighth at most."""
    bound = roundings * torch.finfo(got.dtype).eps * 1.3 * magnitude.float()
    off = (got.float() - want.float()).abs() - bound
    assert (off <= 0).all(), f"{label}: {off.max()} over the bound"


def recipe_case(seed: int, name: str, group: Any, ub: bool) -> None:
    """Three steps of the verbs and of te.Linear, of whose programs the exchanges are `specified` with userbuffers."""
    draw, rank, size = random.Random(f"{seed} {name}"), dist.get_rank(), dist.get_world_size()
    recipe = OPTIONS[name] if name in OPTIONS else te.recipe.from_name(name)
    dtype = draw.choice((torch.float32, torch.bfloat16))
    k, ns = draw.choice((32, 64)), [draw.choice((48, 96)) for _ in range(draw.choice((1, 2)))]
    dim, tokens = draw.choice((0, 1)), draw.choice((3, 8, 16))
    lead = (tokens, 2) if dim == 0 else (2, tokens)
    overlap = draw.choice(("auto", "ring_exchange")) if ub else None
    flags = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True} if ub else {}
    common = {"tp_group": group, "tp_size": size, "sequence_parallel": True, "params_dtype": dtype, "device": "cpu"}
    common["sequence_dim"] = dim
    up = [te.Linear(k, n * size, parallel_mode="column", ub_name="qkv", **common, **flags) for n in ns]
    plain = [te.Linear(k, n * size, parallel_mode="column", **common) for n in ns]
    down = te.Linear(ns[0] * size, k, parallel_mode="row", ub_name="proj", **common, **flags)
    scales, scales_down = te.DelayedScales(len(ns)), te.DelayedScales()
    ws = [module.weight.detach().clone().requires_grad_() for module in (*up, down)]
    bs = [module.bias.detach().clone().requires_grad_() for module in (*up, down)]
    for twin, module in zip(plain, up, strict=True):
        twin.load_state_dict(module.state_dict(), strict=False)
    for step in range(3):
        generator = torch.Generator().manual_seed(seed * 97 + step * 13 + rank)
        x = torch.randn(*lead, k, generator=generator).to(dtype).requires_grad_()
        dy = torch.randn(*lead, k, generator=generator).to(dtype)
        strict = ub and overlap is not None
        one = len(ns) == 1
        with te.autocast(recipe=recipe) if recipe.is_fp8 else nullcontext():
            given = (ws[0], bs[0]) if one else (tuple(ws[:-1]), tuple(bs[:-1]))
            options = {"dim": dim, "overlap": overlap, "strict": strict}
            hs = te.all_gather_linear(x, given[0], group, bias=given[1], scales=scales, **options)
            hs = (hs,) if one else hs
            y = te.linear_reduce_scatter(hs[0], ws[-1], group, bias=bs[-1], scales=scales_down, **options)
        for h in hs:
            h.retain_grad()
        torch.autograd.backward([y, *hs[1:]], [dy, *[torch.ones_like(h) for h in hs[1:]]])
        # The widest hides the gather; the others read what is there.
        widest = max(range(len(ns)), key=lambda i: ns[i])
        modules = [up[i] if i == widest else plain[i] for i in range(len(ns))]
        leaves = [x.detach().clone().requires_grad_() for _ in ns]
        with specified() if ub else nullcontext():
            with te.autocast(recipe=recipe) if recipe.is_fp8 else nullcontext():
                wanted = [module(leaf) for module, leaf in zip(modules, leaves, strict=True)]
                want = down(wanted[0])
            torch.autograd.backward([want, *wanted[1:]], [dy, *[torch.ones_like(h) for h in wanted[1:]]])
        label = f"{name} {dtype} seed {seed} step {step}"
        pairs = {"y": (y, want), "dw": (ws[-1].grad, down.weight.grad), "db": (bs[-1].grad, down.bias.grad)}
        for i, module in enumerate(modules):
            pairs |= {f"h{i}": (hs[i], wanted[i]), f"dw{i}": (ws[i].grad, module.weight.grad)}
            pairs[f"db{i}"] = bs[i].grad, module.bias.grad
        if one:
            pairs["dx"] = x.grad, leaves[0].grad
        for what, (a, b) in pairs.items():
            assert_bitwise_equal(f"{label}: {what}", a.detach(), b.detach())
        if not one:
            size_of = sum(h.grad.float().abs() @ w.detach().float().abs() for h, w in zip(hs, ws, strict=False))
            dist.all_reduce(size_of)
            part = size_of.chunk(size, dim)[rank]
            # Each of the products' and the ranks' sums is rounded; fp32 adds up N terms of each.
            roundings = 2 * (len(ns) + size) + (sum(ns) if dtype == torch.float32 else 0)
            near(f"{label}: dx", x.grad, sum(leaf.grad for leaf in leaves), part, roundings)
        for tensor in (*ws, *bs, *[p for m in (*up, *plain, down) for p in m.parameters()]):
            tensor.grad = None


def recipes(args: argparse.Namespace, device: torch.device) -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    names = (*te.recipe.available(), "current_per_shard", "blockwise_fp32")
    for ub in (False, True):
        buffers = begin(16 * 2 * size, 96, group, device, dtype=torch.float32) if ub else None

        def run(seed: int, buffers=buffers, ub=ub) -> None:
            for name in names:
                if buffers is not None:
                    buffers.executor.set_delays(seed + dist.get_rank(), random.Random(f"{seed}{name}").choice((0, 300)))
                    poison([buffers])
                recipe_case(seed, name, group, ub)

        repeated(run, args.seed, max(1, args.iterations // 12), "recipes")


CHECKS = {"exact": exact, "recipes": recipes}
CHECKS |= {check.__name__: lambda args, device, check=check: check(device) for check in (symmetric, *OTHERS, *HOSTILE)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=CHECKS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    args = parser.parse_args()
    _, _, device = init_ranks(args.device)
    torch.set_default_device(device)
    skipped = ("recipes",) if device.type == "cuda" else ()  # te.Linear's GEMMs are not cut alike there
    asked = [name for name in CHECKS if name not in skipped and args.only in (None, name)]
    run_checks({name: partial(CHECKS[name], args, device) for name in asked})
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
