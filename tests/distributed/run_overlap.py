"""Ranks of the overlap tests, started by torchrun: modules with userbuffers against torch.distributed and the oracle.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/run_overlap.py --suite matrix
    ... --suite random --iterations 1000 --seed 7

matrix: module x recipe x method, 20 iterations each, 12 on CPUs, with delays, poison, several layers in the same
buffers, several forwards before their backwards. random: shape, module, recipe, method and delays are drawn; a failure
prints the arguments that repeat it. --repeats 12: bodies are recorded and replayed, on CPU ranks by a stand-in.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path

# One thread a rank, decided before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TE_LITE_AUTO"] = "rule"  # what is fastest would differ from run to run

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.overlap.config import LAYER_GEMMS, offered  # noqa: E402
from te_lite.overlap.group import Group  # noqa: E402
from te_lite.overlap.userbuffers import UB_FLAGS  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from tests.distributed.overlap_oracle import check_oracle, oracle_step  # noqa: E402
from tests.distributed.overlapping import (  # noqa: E402
    LAYERS,
    METHODS,
    Gathered,
    Pair,
    Sizes,
    assert_same,
    begin,
    poison,
    specified,
)
from tests.harness import OPTIONS, RECIPES  # noqa: E402
from tests.modules.cpu_recordings import record_on_cpu  # noqa: E402
from tests.reference import LINEAR, LN_MLP  # noqa: E402

ITERATIONS = {"cuda": 20, "cpu": 12}  # after 12 the order of calls, the batches, poison and delays begin again
HOOKED = (0, 11)  # iterations in which every gathered operand is compared
SLOW = 7  # iteration of bf16 with delays of up to 20 ms
SIZES = Sizes(128, 128, 128)
TOKENS = (24, 8, 32)  # of a rank; 32 fill MXFP8's blocks
FILLED = (128, 8, 32)  # of a rank, for formats whose shards must be filled to be multiplied as they are
STATEFUL = ("delayed",)
HYBRID = ("delayed", "current", "current_per_shard")
# Recipes whose fprop the fused kernels take; of these bf16's dgrad too: an fp8 dgrad is summed in parts.
FUSED = ("bf16", "delayed", "current", "current_per_shard", "rowwise", "rowwise_with_gw_hp")
NAMES = {"column": ("qkv", "fc1"), "row": ("proj", "fc2"), None: ("fc1",)}


def confirmed(pairs: Sequence[Pair], method: str, fused: Collection[str], ragged: bool) -> None:
    """The report says that what the flags ask for has happened. fused: GEMMs that a fused kernel must have taken;
    ragged: but for a newest call whose shards it refuses. Where a ring runs in the place of `method`, it says why."""
    mine = {pair.label for pair in pairs}
    rows = [row for row in te.overlap_report() if row["module"] in mine]
    assert rows
    for row in rows:
        gemm = row["gemm"].rpartition("_")[2]
        if gemm != "wgrad":
            assert row["schedule"] != "collective" and row["sent"], row
        if gemm in fused:
            refused = ragged and "tokens are not a multiple" in row["reason"]
            assert row["schedule"] == "fused" or refused or (method == "auto" and row["schedule"] == "bulk"), row
        elif method == "fused" and row["schedule"] == "ring":
            assert row["reason"], row
        elif method not in ("fused", "auto"):
            assert row["schedule"] != "fused", row


class Combination:
    """All modules under one recipe and method, sharing the buffers."""

    def __init__(self, recipe: str, method: str, group, device, dump: Path | None = None) -> None:
        self.recipe, self.method, self.device, self.dump = recipe, method, device, dump
        make = lambda *which, **more: Pair(*which, recipe, method, SIZES, group, device, **more)  # noqa: E731
        self.pairs = [make(*which) for which in LAYERS]
        # More of the same kinds, with other weights.
        self.pairs += [make(LINEAR, "column", seed=5, ub_name="fc1"), make(LINEAR, "row", seed=5, ub_name="fc2")]
        self.tokens = FILLED if recipe in ("blockwise", "current_per_shard") else TOKENS
        self.known: dict[tuple[int, int], dict[str, Tensor]] = {}
        # Fused kernels are other GEMMs: bit for bit the same only from run to run.
        self.exact = device.type == "cpu" or method not in ("fused", "auto")

    def check(self, index: int, which: int, label: str, got: dict[str, Tensor], want: dict[str, Tensor] | None) -> None:
        if want is None:
            want = self.known.get((index, which))
        if want is None and self.exact:
            want = self.pairs[index].expected(self.batches[which][index])
        self.known.setdefault((index, which), want if want is not None else got)
        if want is not None:
            try:
                assert_same(label, got, want)
            except AssertionError:
                self.keep(index, which, label, got, want)
                raise

    def keep(self, index: int, which: int, label: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        """What differs and what it was made of, for another look, with --dump."""
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            pair = self.pairs[index]
            found = {"label": label, "got": got, "want": want, "batch": self.batches[which][index]}
            found |= {"module": pair.module.state_dict(), "twin": pair.twin.state_dict(), "known": self.known}
            torch.save(found, self.dump / f"mismatch_rank{dist.get_rank()}.pt")

    def iterate(self, iteration: int, group) -> None:
        """Forwards of every module on one batch or two, then their backwards in some order."""
        rng = random.Random(f"{self.recipe} {self.method} {iteration}")
        stateful = self.recipe in STATEFUL
        pairs = list(range(len(self.pairs))) if iteration % 2 else [0, 1, 2, 3]
        which = [(iteration + i) % 3 for i in range((1, 1, 1, 2)[iteration % 4])]
        calls = [(p, w) for w in which for p in pairs]
        order = rng.sample(calls, len(calls)) if iteration % 4 == 3 else calls[::-1] if iteration % 2 else calls
        results = {}
        for twin in (False, True) if stateful and self.exact else (False,):
            passes = {(p, w): self.pairs[p].forward(self.batches[w][p], twin) for p, w in calls}
            if iteration % 3 == 1 and not twin:
                poison([group])
            results[twin] = {(p, w): self.pairs[p].backward(passes[p, w], twin) for p, w in order}
        for (p, w), got in results[False].items():
            label = f"{self.pairs[p].label}, iteration {iteration}, batch {w}"
            if not stateful:
                self.check(p, w, label, got, None)
            elif self.exact:
                assert_same(label, got, results[True][p, w])
        self.results = results[False]

    def run(self, group, oracles: dict) -> None:
        self.batches = [
            [pair.batch(100 * w + 7 * i, m) for i, pair in enumerate(self.pairs)] for w, m in enumerate(self.tokens)
        ]
        for iteration in range(ITERATIONS[self.device.type]):
            delay = 20000 if iteration == SLOW and self.recipe == "bf16" else (0, 200, 0, 1000)[iteration % 4]
            group.executor.set_delays(1000 * iteration + group.rank, delay)
            if iteration in HOOKED:
                with Gathered() as gathered:
                    self.iterate(iteration, group)
                assert gathered.compared > 10
                if iteration == HOOKED[1]:  # 32 tokens a rank are among them
                    assert bool(gathered.columns) == (self.recipe in ("delayed", "current"))
            else:
                self.iterate(iteration, group)
            if iteration < (2 if self.recipe in STATEFUL else 1):
                for (p, w), got in self.results.items():
                    if p < len(LAYERS):
                        self.against_oracle(p, w, iteration, got, oracles)
        group.executor.set_delays(0, 0)
        # By its rule auto takes the same kernels.
        fused = ("fprop", *(("dgrad",) if self.recipe == "bf16" else ())) if self.recipe in FUSED else ()
        fused = fused if self.method in ("fused", "auto") else ()
        fused = fused if self.device.type == "cuda" else ()
        confirmed(self.pairs, self.method, fused, ragged=self.recipe == "current_per_shard")

    def against_oracle(self, p: int, w: int, step: int, got: dict[str, Tensor], oracles: dict) -> None:
        pair = self.pairs[p]
        truth, low = oracle_step(pair, step, self.batches[w][p], oracles)
        check_oracle(pair, f"{pair.label}, step {step}", got, truth, low)


def suite_matrix(args, device) -> None:
    world = dist.group.WORLD
    methods = [m for m in METHODS if args.device == "cuda" or m != "fused"]
    oracles: dict = {}
    for method in args.methods or methods:
        tokens = max(max(TOKENS), max(FILLED)) * dist.get_world_size()
        group = begin(tokens, max(SIZES.k, SIZES.n, SIZES.ffn), world, device, method, strict=True)
        ring_again = method == "auto" and device.type == "cpu"
        for recipe in args.recipes or (("bf16", "mxfp8") if ring_again else (*RECIPES, "current_per_shard")):
            started = time.monotonic()
            Combination(recipe, method, world, device, args.dump).run(group, oracles)
            if dist.get_rank() == 0:
                print(f"{recipe} {method}: ok, {time.monotonic() - started:.1f} s", flush=True)
        te.destroy_ub()


DRAWN, REPLAYED = 25, 12  # random iterations that share userbuffers; passes after which bodies have been replayed


def draw_methods(rng: random.Random, device) -> dict[str, dict[str, str]]:
    """ub_cfgs with a method for each GEMM, of those that are offered there."""
    cfgs = {}
    for name in LAYER_GEMMS:
        if name.endswith("_wgrad"):
            continue
        cfgs[name] = {"method": rng.choice([m for m in offered(name) if m != "fused" or device.type == "cuda"])}
    return cfgs


def draw_flags(rng: random.Random) -> dict[str, bool]:
    flags = {flag: rng.random() < 0.7 for flag in UB_FLAGS}
    if flags["ub_overlap_rs_dgrad"] and rng.random() < 0.5:
        flags["ub_overlap_rs_dgrad"] = False  # it excludes the bulks, which must have their turn
    return flags


def random_iteration(rng: random.Random, group: Group, tokens: int, device, repeats: int) -> int:
    """One or two modules of random shape, flags and recipe, passes of a few random token counts; bodies recorded."""
    world, size = dist.group.WORLD, dist.get_world_size()
    pairs, said = [], []
    for _ in range(rng.choice((1, 1, 2))):
        (kind, mode), recipe = rng.choice(list(LAYERS)), rng.choice((*RECIPES, "current_per_shard"))
        # Of the last, an MLP's middle, a fused dgrad makes the gradient where each rank has a multiple of 64.
        sizes = Sizes(*(16 * size * rng.choice(of) for of in ((1, 2, 3, 4), (1, 2, 3, 4), (1, 3, 4, 8))))
        flags, bias, ub_name = draw_flags(rng), rng.random() < 0.5, rng.choice(NAMES[mode])
        named = {} if kind == LN_MLP else {"ub_name": ub_name}
        named["activation"] = rng.choice(("swiglu", "gelu"))
        said.append(f"{kind} {mode} {recipe} {sizes} bias {bias} {flags} {ub_name} {named['activation']}")
        pairs.append(Pair(kind, mode, recipe, "bulk", sizes, world, device, bias=bias, **flags, **named))
    counts = [rng.choice((1, 3, 8, 16, 32, 33, 128, 3 * tokens // size)) for _ in range(rng.choice((1, 2, 3)))]
    counts, delay, order = counts * repeats, rng.choice((0, 100, 1000, 20000)), rng.random()
    said.append(f"tokens {counts} delay {delay}")  # over capacity now and then
    group.executor.set_delays(rng.getrandbits(30) + group.rank, delay)
    batches = [(pair, pair.batch(rng.getrandbits(20), m)) for m in counts for pair in pairs]
    shuffled = rng.sample(range(len(batches)), len(batches)) if order < 0.5 else list(range(len(batches)))
    poisoned, results, fused = rng.random() < 0.3, [], False
    watched = Gathered() if rng.random() < 0.3 else nullcontext()  # it makes ranks wait for each other
    for twin in (False, True):
        with specified() if twin else watched:
            calls = []
            for pair, batch in batches:
                calls.append(pair.forward(batch, twin))
                fused |= any(row["schedule"] == "fused" for row in te.overlap_report())
            if poisoned and not twin:
                poison([group])
            results.append([])
            for i in shuffled:
                results[-1].append(batches[i][0].backward(calls[i], twin))
                fused |= any(row["schedule"] == "fused" for row in te.overlap_report())
    for got, want, i in zip(*results, shuffled, strict=True):
        compare("; ".join(said), got, want, fused, batches[i][0])
    found = [pair.module._planned[1][0].recordings for pair in pairs]
    return sum(not isinstance(known, int) for one in found if one for known in one._known.values())


def rms(t: Tensor) -> Tensor:
    return t.double().square().mean().sqrt()


def compare(label: str, got: dict[str, Tensor], want: dict[str, Tensor], fused: bool, pair: Pair) -> None:
    """Bit for bit; where a fused kernel has run, as close as another order of the same sums is.

    A bf16 result that is rounded the other way moves by about u = 2^-8. What an MLP casts to fp8 after it has steps of
    up to s, 2^-3 in E4M3 and 2^-2 in HYBRID's gradients: u / s of the values move by s, rms sqrt(s u). HYBRID's scales
    are no powers of two here and move by up to u, as a tensor's largest value does: as many values again move by s.
    """
    if not fused:
        return assert_same(label, got, want)
    for name, value in got.items():
        share = 2.0**-6  # another rounding of a bf16 result, and of what fc2 makes of fc1's
        if pair.spec.kind == LN_MLP and pair.recipe != "bf16":
            share = (2 * 2.0**-2 * 2.0**-8 if pair.recipe in HYBRID else 2.0**-3 * 2.0**-8) ** 0.5
        error, bound = rms(value.double() - want[name].double()), share * rms(want[name]) + 1e-30
        assert error <= bound, f"{label}: {name} off by {error}, bound {bound}"


def suite_random(args, device) -> None:
    group, size, recorded = None, dist.get_world_size(), 0
    if args.repeats > 1 and device.type == "cpu":
        record_on_cpu(pytest.MonkeyPatch())
    for iteration in range(args.first, args.first + args.iterations):
        epoch = random.Random(f"{args.seed} methods {iteration // DRAWN}")
        cfgs, tokens, hidden = draw_methods(epoch, device), size * epoch.choice((40, 128)), 64 * size
        if group is None or iteration % DRAWN == 0:
            te.destroy_ub()
            group = begin(tokens, hidden, dist.group.WORLD, device, ub_cfgs=cfgs)
        try:
            recorded += random_iteration(random.Random(f"{args.seed} {iteration}"), group, tokens, device, args.repeats)
        except BaseException:
            print(f"repeat it: --suite random --seed {args.seed} --first {iteration} --iterations 1", file=sys.stderr)
            raise
        if dist.get_rank() == 0 and (iteration + 1) % 50 == 0:
            print(f"{iteration + 1} random iterations, no mismatch", flush=True)
    te.destroy_ub()
    assert recorded or args.repeats < REPLAYED or args.iterations == 1, "no body was recorded"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("matrix", "random"), default="matrix")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", nargs="*", choices=METHODS, help="of the matrix; default: all")
    parser.add_argument("--recipes", nargs="*", choices=(*RECIPES, *OPTIONS), help="of the matrix; default: all")
    parser.add_argument("--dump", type=Path, help="folder for the tensors of a mismatch in the matrix")
    parser.add_argument("--iterations", type=int, default=30, help="of the random suite")
    parser.add_argument("--first", type=int, default=0, help="number of the first random iteration")
    parser.add_argument("--repeats", type=int, default=1, help="passes of each token count of a random iteration")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rank, world, device = init_ranks(args.device)
    try:
        {"matrix": suite_matrix, "random": suite_random}[args.suite](args, device)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, so that no rank waits for this one
    if rank == 0:
        print(f"{args.suite} on {world} {args.device} ranks: no mismatch", flush=True)
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
