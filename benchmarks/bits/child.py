"""Runs the cases with the te_lite that Python finds, and writes a digest of everything they compute.

    PYTHONPATH=<tree> python child.py --out digests.json
    PYTHONPATH=<tree> torchrun --standalone --nproc-per-node 2 child.py --ranks --out digests.json

benchmarks/same_bits.py starts it with either of two trees. It does not know which one it runs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from case import Case, recipe_of
from digests import Recorder

import te_lite as te
from te_lite import _C


def chosen(cases: Iterable[Case], args: argparse.Namespace) -> list[Case]:
    """Those that --cases names, and of them this part's. ValueError where two cases have one name."""
    found = list(cases)
    names = [case.name for case in found]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) != len(names) else set()
    if twice:
        raise ValueError(f"cases with one name: {sorted(twice)}; label them apart")
    index, parts = args.part
    wanted = [case for case in found if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in args.cases)]
    recipes = list(dict.fromkeys(case.recipe for case in wanted))  # kernels are compiled in one part each
    return [case for case in wanted[:: args.every] if recipes.index(case.recipe) % parts == index]


def run_one(case: Case, run: Callable[[Recorder], None], device: torch.device, dump: Path | None) -> dict[str, Any]:
    """What a case has come to, as JSON: tensors, facts, seconds, and error or skipped where it did not run."""
    begin = time.perf_counter()
    recorder, error = Recorder(dump), None
    supported, reason = te.check_recipe_support(recipe_of(case.recipe), device)
    if supported:
        te.FP8GlobalStateManager.reset()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(recorder)
        except Exception as raised:  # one case's, and the others run; the parent reports it
            error = f"{type(raised).__name__}: {raised}"
    seconds = round(time.perf_counter() - begin, 4)
    skipped = None if supported else reason
    return {
        "tensors": recorder.tensors, "facts": recorder.facts, "error": error, "skipped": skipped, "seconds": seconds,
    }  # fmt: skip


def one_process(args: argparse.Namespace) -> dict[str, Any]:
    """Case -> result."""
    import programs
    import steps
    import table

    device = torch.device(args.device)
    runs = [(case, steps.run_case) for case in table.cases(device)]
    runs += [(case, programs.run_program) for case in programs.cases(device)]
    by_name = {case.name: run for case, run in runs}
    done = {}
    for case in chosen((case for case, _ in runs), args):
        run = by_name[case.name]
        done[case.name] = run_one(case, lambda r, c=case, f=run: f(c, r, device), device, args.dump)
    return done


def all_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Case -> result of this rank. Where a case raises on some ranks only, all end."""
    import rank_table

    rank, device = rank_table.join(args.device)
    dump = args.dump and args.dump / f"rank{rank}"
    buffers, done = rank_table.Buffers(device), {}
    try:
        for case in chosen(rank_table.cases(device), args):
            done[case.name] = run_one(case, lambda r, c=case: rank_table.run_case(c, r, device, buffers), device, dump)
        buffers.end()
        rank_table.leave()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, so that no rank waits for this one
    return done


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the digests; ranks add their number")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", action="store_true", help="the cases of several ranks, under torchrun")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--every", type=int, default=1, help="take every so many-th case")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("INDEX", "PARTS"))
    parser.add_argument("--dump", type=Path, help="folder for the tensors themselves")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    if args.ranks:
        os.environ["TE_LITE_AUTO"] = "rule"  # what is fastest would differ from run to run
    done = all_ranks(args) if args.ranks else one_process(args)
    out = args.out.with_suffix(f".{os.environ['RANK']}.json") if args.ranks else args.out
    content = {"te_lite": te.__file__, "extension": _C.__file__, "cases": done}
    out.write_text(json.dumps(content))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
