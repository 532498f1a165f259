"""Ranks of the module tests, started by torchrun: every module against the unsharded oracle.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/run_modules.py --suite modules

Prints one line for each tensor (worst rank: name, errors, bounds, ok) and a verdict; exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

# A copy of one rank's program: one thread, decided before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.numerics import Closeness, measure  # noqa: E402
from tests import reference  # noqa: E402
from tests.harness import BLOCKED, OPTIONS, RECIPES, Oracle, build, leaf, under  # noqa: E402
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec  # noqa: E402


class Sizes(NamedTuple):
    """Tokens M = sequence * batch; features on each of 4 ranks are multiples of 16."""

    sequence: int
    batch: int
    k: int
    n: int
    ffn: int


SMALL = Sizes(16, 3, 64, 128, 128)
SEVERAL = Sizes(48, 3, 192, 320, 192)  # blocks of 32 and of 128, whole ones and ragged ones, also on each rank
FILLED = Sizes(128, 4, 192, 320, 192)  # each of 4 ranks has as many tokens as fill a block


@dataclass(frozen=True)
class Case:
    spec: Spec
    recipe: str
    fused: bool = False  # fuse_wgrad_accumulation
    microbatches: int = 1  # forwards before their backwards
    filled: bool = False  # each rank's tokens fill their blocks

    @property
    def blocked(self) -> bool:
        return self.recipe in BLOCKED

    @property
    def sizes(self) -> Sizes:
        return FILLED if self.filled else SEVERAL if self.blocked else SMALL

    def __str__(self) -> str:
        s = self.spec
        parts = [s.kind, self.recipe, s.mode or "", "sp" if s.sequence_parallel else "", "bias" if s.bias else ""]
        if s.kind != LINEAR:
            parts += [s.normalization, "zero-centered" if s.zero_centered else ""]
        if s.kind == LN_MLP:
            parts.append(s.activation)
        parts += ["ln_out" if s.returns_norm else "", "main_grad" if self.fused else ""]
        parts.append(f"{self.microbatches} in flight" if self.microbatches > 1 else "")
        parts.append("filled blocks" if self.filled else "")
        return " ".join(p for p in parts if p)


def all_cases(tp: int) -> Iterator[Case]:
    for recipe in RECIPES:
        yield from product(recipe, tp) if tp == 2 and recipe not in BLOCKED else sampled(recipe, tp)
    for recipe, mode in itertools.product(BLOCKED, ("column", "row")):
        spec = Spec(LINEAR, mode=mode, tp=tp, sequence_parallel=True)
        yield Case(spec, recipe, filled=True)
        if recipe in OPTIONS:
            yield Case(spec, recipe)


def product(recipe: str, tp: int) -> Iterator[Case]:
    """module x mode x sequence parallel x bias x norm; zero-centered gains and activations take turns."""
    turn = itertools.count()
    for sp, bias in itertools.product((False, True), (True, False)):
        for mode in ("column", "row"):
            yield Case(Spec(LINEAR, bias=bias, mode=mode, tp=tp, sequence_parallel=sp), recipe)
        for norm in ("LayerNorm", "RMSNorm"):
            i = next(turn)
            common = {"normalization": norm, "zero_centered": i % 2 == 1, "bias": bias, "tp": tp}
            yield Case(Spec(LN_LINEAR, mode="column", sequence_parallel=sp, **common), recipe)
            activation = ("gelu", "swiglu", "geglu", "srelu")[i // 2 % 4]
            yield Case(Spec(LN_MLP, activation=activation, sequence_parallel=sp, **common), recipe)
    yield Case(Spec(LINEAR, tp=tp), recipe)  # parallel_mode None with a group: every rank the whole
    sp = {"tp": tp, "sequence_parallel": True}
    yield Case(Spec(LN_LINEAR, mode="column", returns_norm=True, **sp), recipe)
    yield Case(Spec(LN_MLP, returns_norm=True, **sp), recipe)
    for kind, mode in ((LINEAR, "column"), (LINEAR, "row"), (LN_MLP, None)):
        yield Case(Spec(kind, mode=mode, **sp), recipe, fused=True)
        if recipe != "delayed":  # scales would move between the backwards
            yield Case(Spec(kind, mode=mode, **sp), recipe, microbatches=3)


def sampled(recipe: str, tp: int) -> Iterator[Case]:
    """Every module and mode with and without sequence parallelism; the other options take turns."""
    for sp in (False, True):
        common = {"tp": tp, "sequence_parallel": sp}
        yield Case(Spec(LINEAR, mode="column", bias=sp, **common), recipe)
        yield Case(Spec(LINEAR, mode="row", bias=not sp, **common), recipe)
        norm = "RMSNorm" if sp else "LayerNorm"
        yield Case(Spec(LN_LINEAR, norm, mode="column", bias=not sp, returns_norm=sp, **common), recipe)
        yield Case(Spec(LN_MLP, norm, activation="swiglu" if sp else "gelu", bias=sp, **common), recipe)
    sp = {"tp": tp, "sequence_parallel": True}
    yield Case(Spec(LINEAR, tp=tp), recipe)
    yield Case(Spec(LINEAR, mode="row", **sp), recipe, fused=True)
    if recipe != "delayed":  # scales would move between the backwards
        yield Case(Spec(LN_MLP, **sp), recipe, microbatches=3)


def chunk(t: Tensor, dim: int, rank: int, tp: int) -> Tensor:
    return t.chunk(tp, dim)[rank]


def shard_parameter(name: str, full: Tensor, spec: Spec, rank: int) -> Tensor:
    """This rank's part of a parameter or of its gradient."""
    kind = {"fc1": "column", "fc2": "row"}.get(name.split("_")[0], spec.mode)
    if "layer_norm" in name or kind is None:
        return full
    if kind == "column":
        return chunk(full, 0, rank, spec.tp)
    return chunk(full, 1, rank, spec.tp) if name.endswith("weight") else full


def shard_input(t: Tensor, spec: Spec, rank: int) -> Tensor:
    if spec.mode == "row":
        return chunk(t, -1, rank, spec.tp)
    split = spec.sequence_parallel and (spec.mode == "column" or spec.kind == LN_MLP)
    return chunk(t, 0, rank, spec.tp) if split else t


def shard_output(t: Tensor, spec: Spec, rank: int) -> Tensor:
    if spec.mode == "column":
        return chunk(t, -1, rank, spec.tp)
    split = spec.sequence_parallel and (spec.mode == "row" or spec.kind == LN_MLP)
    return chunk(t, 0, rank, spec.tp) if split else t


def expected(name: str, value: Tensor, case: Case, rank: int) -> Tensor:
    """This rank's part of the oracle's tensor `name`."""
    if name == "ln_out":
        return value  # gathered: the whole on every rank
    if name == "out":
        return shard_output(value, case.spec, rank)
    if name == "dx":
        return shard_input(value, case.spec, rank)
    return shard_parameter(name, value, case.spec, rank)


def make_module(case: Case, parameters: dict[str, Tensor], group, device) -> torch.nn.Module:
    rank = dist.get_rank(group)
    shards = {name: shard_parameter(name, p, case.spec, rank) for name, p in parameters.items()}
    extra = (
        {"return_layernorm_output": True, "return_layernorm_output_gathered": True} if case.spec.returns_norm else {}
    )
    options = {"tp_group": group, "tp_size": case.spec.tp, "sequence_parallel": case.spec.sequence_parallel, **extra}
    if case.fused:
        options["fuse_wgrad_accumulation"] = True
    module = build(case.spec, *case.sizes[2:], device=device, parameters=shards, **options)
    if case.fused:
        for name, p in module.named_parameters():
            if name.endswith("weight") and "layer_norm" not in name:
                p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return module


def make_parameters(case: Case) -> dict[str, Tensor]:
    p = reference.make_parameters(case.spec, *case.sizes[2:], seed=3, dtype=torch.bfloat16)
    return reference.spread_parameters(case.spec, p) if case.blocked else p


def make_batch(case: Case, seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Full x [S, B, K] and dy [S, B, width]."""
    sequence, batch, k, n, _ = case.sizes
    width = k if case.spec.kind == LN_MLP else n
    x = reference.make_tokens(sequence * batch, k, seed=seed, dtype=torch.bfloat16, scale=scale)
    dy = reference.make_tokens(sequence * batch, width, seed=seed + 1, dtype=torch.bfloat16, scale=0.1 * scale)
    if case.blocked:
        x, dy = reference.spread_tokens(case.spec, x, dy)
    return x.view(sequence, batch, k), dy.view(sequence, batch, width)


def module_step(module, case: Case, batches: list[tuple[Tensor, Tensor]], group, device) -> list[dict[str, Tensor]]:
    """All forwards, then all backwards; per batch {"out", "dx"} and, in the last, the summed gradients."""
    rank, spec = dist.get_rank(group), case.spec
    module.zero_grad(set_to_none=True)
    inputs = [leaf(shard_input(x, spec, rank), device) for x, _ in batches]
    with under(case.recipe):
        returned = [module(x) for x in inputs]
    results = []
    for x, ret, (_, dy) in zip(inputs, returned, batches, strict=True):
        out = ret[0] if case.spec.returns_norm else ret
        out.backward(shard_output(dy, spec, rank).to(device))
        results.append({"out": out.detach(), "dx": x.grad})
        if case.spec.returns_norm:
            results[-1]["ln_out"] = ret[1].detach()
    te.reduce_sequence_parallel_grads(module)
    for name, p in module.named_parameters():
        if p.numel():
            results[-1][name] = p.grad if p.grad is not None else p.main_grad
    return results


def run_case(case: Case, group, device, replica: int = 0) -> list[Closeness]:
    """Steps of one module (delayed scaling two, the second with the scales of the first) against the
    oracle.
    """
    rank = dist.get_rank(group)
    p = make_parameters(case)
    module = make_module(case, p, group, device)
    oracle = Oracle(case.spec, p, case.recipe, device=device)
    measured = []
    for i in range(2 if case.recipe == "delayed" else 1):
        seeds = [100 * replica + 10 * i + 2 * j for j in range(case.microbatches)]
        batches = [make_batch(case, seed, 1.0 + 5 * replica) for seed in seeds]
        if case.fused:
            for q in module.parameters():
                if hasattr(q, "main_grad"):
                    q.main_grad.zero_()
        got = module_step(module, case, batches, group, device)
        both = [oracle.step(x, dy) for x, dy in batches]
        for j in range(case.microbatches):
            for name, value in got[j].items():
                truth, low = (_total(both, j, name, k) for k in (0, 1))
                truth, low = (expected(name, t.reshape(_shape(case, name, t)), case, rank) for t in (truth, low))
                label = f"{case}, step {i}{f' batch {j}' if case.microbatches > 1 else ''}: {name}"
                measured.append(measure(label, value, truth, low))
    check_reasons(case)
    return measured


SHARD_MULTIPLE = {"blockwise": 128, "blockwise_fp32": 128, "current_per_shard": 16}


def check_reasons(case: Case) -> None:
    """The report of the one module that lives says when ragged shards are multiplied in high precision."""
    gathers = case.spec.sequence_parallel and (case.spec.mode is not None or case.spec.kind == LN_MLP)
    multiple = SHARD_MULTIPLE.get(case.recipe) if gathers else None
    reasons = {row["reason"] for row in te.overlap_report()}
    assert reasons == ({""} if multiple is None else {f"bf16 where a rank's tokens are not a multiple of {multiple}"})


def _shape(case: Case, name: str, t: Tensor) -> tuple[int, ...]:
    return (*case.sizes[:2], t.shape[-1]) if name in ("out", "dx", "ln_out") else tuple(t.shape)


def _total(both, j: int, name: str, which: int) -> Tensor:
    """The oracle's tensor of batch j; a parameter's gradient is the sum over batches."""
    if name in ("out", "dx", "ln_out"):
        return both[j][which][name]
    return sum(pair[which][name] for pair in both)


# Reporting


def worst(results: list[list[Closeness]]) -> list[Closeness]:
    """Of each tensor the rank where error / bound is largest."""

    def badness(c: Closeness) -> float:
        return max(c.rms_error / max(c.rms_bound, 1e-30), c.max_error / max(c.max_bound, 1e-30), bool(c.note) * 1e9)

    return [max(row, key=badness) for row in zip(*results, strict=True)]


def report(lines: list[Closeness]) -> bool:
    """Rank 0 prints the worst rank of each tensor; True if every rank's tensors are within their bounds."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, lines)
    rows = worst(gathered)
    if dist.get_rank() == 0:
        for row in rows:
            print(row, flush=True)
        FAILED.extend(row for row in rows if not row.ok)
    return all(row.ok for row in rows)


def suite_modules(device) -> bool:
    """The world is one tensor-parallel group."""
    good = [report(run_case(case, dist.group.WORLD, device)) for case in all_cases(dist.get_world_size())]
    return all(good)


def new_groups(layout: list[list[int]]):
    """This rank's group of `layout`; every rank makes all of them."""
    groups = [dist.new_group(ranks) for ranks in layout]
    index = next(i for i, ranks in enumerate(layout) if dist.get_rank() in ranks)
    return groups[index], index


def suite_mesh(device) -> bool:
    """tp 2 in a world of 4, ranks of a group not next to each other; each replica has data of its own
    size.
    """
    group, replica = new_groups([[0, 2], [1, 3]])
    good = []
    for recipe, sp in itertools.product(RECIPES, (False, True)):
        for kind, mode in ((LINEAR, "column"), (LINEAR, "row"), (LN_LINEAR, "column"), (LN_MLP, None)):
            case = Case(Spec(kind, mode=mode, tp=2, sequence_parallel=sp), recipe)
            lines = run_case(case, group, device, replica)
            good.append(report([replace(line, name=f"replicas, {line.name}") for line in lines]))
    return all(good)


FAILED: list[Closeness] = []  # rank 0: what to show again, last
SUITES: dict[str, Callable[[torch.device], bool]] = {"modules": suite_modules, "mesh": suite_mesh}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, default="modules")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    rank, world, device = init_ranks(args.device)
    try:
        good = SUITES[args.suite](device)
    except BaseException:
        # Ended at once, so that the other ranks do not wait in a collective for this one.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if rank == 0:
        for line in FAILED:
            print(line)
        print(f"{args.suite} on {world} {args.device} ranks: {'all within bounds' if good else 'FAILED'}", flush=True)
    leave_ranks()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
