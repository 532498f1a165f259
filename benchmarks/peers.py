"""te_lite beside Transformer Engine, torch and torchao: the same modules, taking turns in one process.

    python benchmarks/peers.py                                             # all rows, on a GPU
    python benchmarks/peers.py --shapes 8b --modules Linear --calls cached
    python benchmarks/peers.py --compiled                                  # torch.compile and torchao too; minutes more
    python benchmarks/peers.py --device cpu                                # smoke test; its numbers mean nothing

Forward plus backward of modules.py's modules, in the ways of benchmarks/peer_steps.py. A case is a shape, a module, a
recipe and a way of calling; its candidates are interleaved:

    te_lite, te                  in every case; te is Transformer Engine, where it is installed
    torch, torch_compiled        in bf16 with gradients returned to autograd
    torchao                      compiled, tensorwise scales, beside current scaling with gradients returned
    gemms                        the six GEMMs of a LayerNormMLP by torch: bf16, tensorwise fp8 or blocks of scales

    over_te, over_gemms = median over rounds of te_lite's GPU time over the other's in the same round
    wall_over_te        = wall time over wall time
    error_pct           = of a small case, the largest |out - oracle| / |oracle| of y, dx and the gradients, in fp64

Backward runs on the calling thread for all. A row with an error above MAX_ERROR_PCT fails. So does the run where
--total-limit is up before the last case; the file says what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import bench, result_files
from benchmarks.modules import MODULES, RESULTS, ModuleStep, chosen_shapes
from benchmarks.peer_steps import (
    CALLS,
    ERROR_SHAPE,
    PEERS,
    RECIPES,
    Case,
    builders,
    forget,
    installed,
    operands,
    peer_step,
    torch_step,
    worst_error,
)

# fp8: rounding to E5M2 (4.9%) and E4M3 (2.5%) makes 5.5% a product, 7.8% two in a row, as in an MLP's dx; less than
# twice that. bf16: about twice what torch's own MLP has, 0.45.
MAX_ERROR_PCT = {"bf16": 1.0, "fp8": 15.0}
# Wall time: blocks of at least this long and of 5 steps or more. Large shapes get one: the GPU decides there.
WALL_BLOCK_US = 20_000.0
SMALL_TOKENS, LARGE_WALL_ROUNDS = 1024, 1
TOTAL_S = 150.0


@dataclass(frozen=True)
class Run:
    """What holds for all cases of a run."""

    device: str
    clock: bench.Clock
    rounds: int
    wall_rounds: int
    peers: dict[str, str]
    compiled: bool
    errors: dict[tuple[str, Case], float] = field(default_factory=dict)

    def error_pct(self, candidate: str, case: Case) -> float:
        """Of the case at ERROR_SHAPE, where cases that differ by their shape are one: computed once."""
        case = replace(case, shape=ERROR_SHAPE)
        if (candidate, case) not in self.errors:
            x, dy = operands(case, self.device)
            work = torch_step(case, x, dy) if candidate == "torch" else peer_step(candidate, case, x, dy)
            self.errors[candidate, case] = 100 * worst_error(work, case)
        return self.errors[candidate, case]


def checked_error(run: Run, candidate: str, case: Case) -> tuple[float | None, str | None]:
    """(error in percent, what is wrong with it); (None, None) where a candidate has no results to check."""
    if candidate not in ("te_lite", "te", "torch"):
        return None, None
    try:
        found = run.error_pct(candidate, case)
    except Exception as error:  # costs one row, and the others run
        return None, f"{type(error).__name__}: {error}"
    limit = MAX_ERROR_PCT["bf16" if case.recipe == "bf16" else "fp8"]
    # A NaN is below no limit.
    return found, None if found <= limit else f"wrong results: error {found:.3g}%, at most {limit:g}% is expected"


def times_over(samples: dict[str, list[bench.Sample]], candidate: str, other: str) -> float | None:
    """Median over rounds of GPU time of one over the other's."""
    if candidate not in samples or other not in samples:
        return None
    pairs = zip(samples[candidate], samples[other], strict=True)
    return statistics.median(mine.gpu_us / theirs.gpu_us for mine, theirs in pairs)


def measure(case: Case, run: Run) -> list[dict]:
    """One row a candidate, interleaved."""
    found = builders(case, run.device, run.peers, run.compiled)
    rows: dict[str, dict] = {}
    for name in found:
        error_pct, said = checked_error(run, name, case)
        rows[name] = {**case.row(), "candidate": name, "error_pct": error_pct, "error": said}
    forget(list(found))  # of the modules whose results were checked, and of earlier cases
    work: dict[str, object] = {}
    for name, build in found.items():
        try:
            work[name] = build()
        except Exception as error:  # a row with its error, and the others run
            rows[name]["error"] = f"{type(error).__name__}: {error}"
    time_rows(rows, work, case, run)
    return list(rows.values())


def time_rows(rows: dict[str, dict], work: dict[str, object], case: Case, run: Run) -> None:
    """Puts the times of what was built into its row, and te_lite's ratios into its own."""
    candidates = [
        bench.Candidate(name, one.step, one.reset) if isinstance(one, ModuleStep) else bench.Candidate(name, one)
        for name, one in work.items()
    ]
    samples: dict[str, list[bench.Sample]] = {}
    wall_rounds = run.wall_rounds if case.shape.tokens <= SMALL_TOKENS else min(run.wall_rounds, LARGE_WALL_ROUNDS)
    timings = bench.time_interleaved(
        candidates, run.clock, rounds=run.rounds, wall_rounds=wall_rounds, wall_block_us=WALL_BLOCK_US, kept=samples
    )
    for name, timing in timings.items():
        said = timing.error or rows[name]["error"]
        rows[name] |= {key: value for key, value in asdict(timing).items() if key != "name"} | {"error": said}
        if isinstance(work[name], ModuleStep) and timing.error is None:
            rows[name]["kept_mib"] = bench.kept_by_forward(work[name].forward, run.device)
            work[name].reset()
    ours = rows["te_lite"]
    ours |= {f"over_{other}": times_over(samples, "te_lite", other) for other in ("te", "gemms")}
    theirs = rows.get("te", {}).get("wall_us")
    ours["wall_over_te"] = ours["wall_us"] / theirs if ours.get("wall_us") and theirs else None


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for shape, module, recipe, call in itertools.product(args.shapes, args.modules, args.recipes, args.calls):
        yield Case(shape, module, recipe, call)


def measured(args: argparse.Namespace, run: Run) -> tuple[list[dict], list[str]]:
    """(rows of all cases, sentences on those for which there was no time)."""
    rows: list[dict] = []
    todo = list(cases(args))
    with torch.autograd.set_multithreading_enabled(False):
        for done, case in enumerate(todo):
            if time.monotonic() >= args.end:
                after = " ".join(case.row().values())
                return rows, [f"The time was up {len(todo) - done} cases before the end, at {after}."]
            rows += measure(case, run)
            if torch.device(args.device).type == "cuda":
                torch.cuda.empty_cache()
    return rows, []


def summary(rows: list[dict], left_out: list[str]) -> str:
    names = ("shape", "module", "recipe", "call", "candidate")
    columns = {"gpu_us": 1, "wall_us": 1, "kept_mib": 1, "over_te": 3, "over_gemms": 3, "wall_over_te": 3}
    columns |= {"error_pct": 2, "exposed": 0}

    def cell(row: dict, column: str) -> str:
        return "-" if row.get(column) is None else f"{row[column]:.{columns[column]}f}"

    lines = [[*(row[name] for name in names), *(cell(row, column) for column in columns)] for row in rows]
    said = [result_files.text_table((*names, *columns), lines), *left_out]
    said += [f"FAILED {' '.join(row[name] for name in names)}: {row['error']}" for row in rows if row["error"]]
    return "\n".join(said)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", help="names of shapes; all by default")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=MODULES)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=CALLS)
    parser.add_argument("--compiled", action="store_true", help="torch.compile and torchao too; compiles for minutes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall-rounds", type=int, default=3, help=f"at large shapes at most {LARGE_WALL_ROUNDS}")
    parser.add_argument("--total-limit", type=float, default=TOTAL_S, help="seconds; no case begins after them")
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for peers.json")
    args = parser.parse_args(argv)
    args.end = time.monotonic() + args.total_limit
    args.shapes = chosen_shapes(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)  # tiny shapes: more threads only wait for each other
    peers, left_out = installed([name for name in PEERS if name != "torchao" or args.compiled])
    run = Run(args.device, bench.clock_for(args.device), args.rounds, args.wall_rounds, peers, args.compiled)
    rows, too_late = measured(args, run)
    left_out += too_late
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    result_files.write_results(
        args.out / "peers.json", "peers", rows, tree=tree, device=args.device, peers=peers, left_out=left_out,
        shapes=[asdict(shape) for shape in args.shapes],
    )  # fmt: skip
    print(summary(rows, left_out))
    return 1 if too_late or any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
