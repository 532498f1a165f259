"""Whether two trees of te_lite compute the same bits: every output, gradient, scale and history of many cases.

    python benchmarks/same_bits.py --old HEAD~3                      # a revision against this checkout, on the CPU
    python benchmarks/same_bits.py --old HEAD~3 --ranks 2            # the cases of tensor parallelism, on CPU ranks
    python benchmarks/same_bits.py --old ../before --new . --device cuda
    python benchmarks/same_bits.py --old HEAD --cases 'Linear delayed*'

One program, benchmarks/bits/child.py, runs once with each tree on its path, in processes of its own; it uses public
names only and does not know which tree it has. What it writes is compared here: the first difference is named, with the
coordinate and both values. Exit status 0: all the same. 1: a tensor differs, or a case ran in one tree only. 2: a tree
could not be had, or a child ended by itself.

--new-cases names cases that only the new tree has to run. What te.overlap_report() says of a case is compared too, and
differences are shown, but they are no failure: the words may change. A case that raises the same error in both trees
shows nothing; these are listed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks.trees import ROOT, environment, two_trees

CHILD = Path(__file__).resolve().parent / "bits" / "child.py"
SHOWN = 20  # cases of each kind
GPU_PARTS = 7  # processes of each tree, two recipes each; each compiles kernels on one core
TAIL = 4000  # characters of a child that failed

Cases = dict[str, dict[str, Any]]


@dataclass
class Comparison:
    """What differs. tensors: case -> its differing tensors, first first. one_sided: case -> where it ran and why not
    in the other tree. facts: remarks that are no failure. silent: case -> the error that both trees raise."""

    cases: int = 0
    compared: int = 0
    tensors: dict[str, list[str]] = field(default_factory=dict)
    one_sided: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether the trees agree, and there was something to agree about."""
        return self.compared > 0 and not self.tensors and not self.one_sided


def state(case: dict[str, Any] | None) -> str:
    """ "ran", or why it did not."""
    if case is None:
        return "is not there"
    if case["error"]:
        return f"raised {case['error']}"
    return f"skipped: {case['skipped']}" if case["skipped"] else "ran"


def compare(old: Cases, new: Cases, new_cases: Sequence[str] = ()) -> Comparison:
    """Every tensor of every case. new_cases: patterns of names that the old tree need not run."""
    found = Comparison()
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        states = state(before), state(after)
        found.cases += 1
        if states == ("ran", "ran"):
            _compare_case(name, before, after, found)
        elif states[1] == "ran" and any(fnmatch.fnmatchcase(name, pattern) for pattern in new_cases):
            found.facts[name] = f"new: the old tree {states[0]}"
        elif "ran" in states or states[0].split(":")[0] != states[1].split(":")[0]:
            found.one_sided[name] = f"old {states[0]}; new {states[1]}"
        else:
            found.silent[name] = states[1]
    return found


def _compare_case(name: str, before: dict[str, Any], after: dict[str, Any], found: Comparison) -> None:
    """Adds the differences of a case that ran in both trees. What only one of them has differs too."""
    differing = []
    for tensor in dict.fromkeys((*before["tensors"], *after["tensors"])):
        was, now = before["tensors"].get(tensor), after["tensors"].get(tensor)
        found.compared += 1
        if was == now:
            continue
        if was is None or now is None:
            differing.append(f"{tensor}: only in the {'new' if was is None else 'old'} tree")
        elif was[:2] != now[:2]:
            differing.append(f"{tensor}: was {was[0]} {was[1]}, is {now[0]} {now[1]}")
        else:
            differing.append(f"{tensor} ({was[0]} {was[1]})")
    if differing:
        found.tensors[name] = differing
    if before["facts"] != after["facts"]:
        keys = sorted(key for key in before["facts"] | after["facts"] if
                      before["facts"].get(key) != after["facts"].get(key))  # fmt: skip
        found.facts[name] = "; ".join(f"{k}: {before['facts'].get(k)} -> {after['facts'].get(k)}" for k in keys)


@dataclass
class Runner:
    """Starts the child with one of the trees."""

    args: argparse.Namespace
    scratch: Path

    def __post_init__(self) -> None:
        # A copy: all children run the same program, whatever is written to meanwhile.
        self._child = self.scratch / "program" / CHILD.name
        shutil.copytree(CHILD.parent, self._child.parent, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, folder: Path, label: str, cases: Sequence[str], part: tuple[int, int], dump: Path | None) -> Cases:
        """One child; case -> result, of ranks with their number before each tensor."""
        every = self.args.every if dump is None else 1
        out = self.scratch / f"{label}{part[0]}.json"
        command = [sys.executable]
        if self.args.ranks:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.args.ranks}"]
        command += [str(self._child), "--out", str(out), "--device", self.args.device]
        command += ["--part", *map(str, part), "--every", str(every), "--cases", *cases]
        command += ["--ranks"] if self.args.ranks else []
        command += ["--dump", str(dump)] if dump is not None else []
        variables = {"TE_LITE_CACHE": str(self.scratch / f"cache_{label}")}  # what one tree has kept is not the other's
        try:
            done = subprocess.run(
                command, cwd=self.scratch, env=environment(folder, **variables), capture_output=True, text=True,
                timeout=self.args.limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the child with the {label} tree did not end in {self.args.limit:g} s") from None
        if done.returncode:
            said = (done.stdout + done.stderr)[-TAIL:]
            raise RuntimeError(f"the child with the {label} tree ended with status {done.returncode}:\n{said}")
        return self._read(out, folder)

    def _read(self, out: Path, folder: Path) -> Cases:
        paths = [out.with_suffix(f".{rank}.json") for rank in range(self.args.ranks)] if self.args.ranks else [out]
        merged: Cases = {}
        for rank, path in enumerate(paths):
            content = json.loads(path.read_text())
            for name in ("te_lite", "extension"):
                if not Path(content[name]).is_relative_to(folder):
                    raise RuntimeError(f"a child was to run {folder} and has imported {content[name]}")
            for name, case in content["cases"].items():
                prefix = f"rank {rank} " if self.args.ranks else ""
                one = merged.setdefault(name, {**case, "tensors": {}, "facts": {}})
                one["tensors"] |= {prefix + key: value for key, value in case["tensors"].items()}
                one["facts"] |= {prefix + key: value for key, value in case["facts"].items()}
        return merged

    def both(self, folders: tuple[Path, Path], cases: Sequence[str]) -> tuple[Cases, Cases]:
        """The cases with the old and with the new tree, in as many processes as --jobs allows at a time."""
        args = self.args
        jobs = [(label, folder, (part, args.parts)) for part in range(args.parts)
                for label, folder in zip(("old", "new"), folders, strict=True)]  # fmt: skip
        with ThreadPoolExecutor(args.jobs) as pool:
            parts = list(pool.map(lambda job: (job[0], self.run(job[1], job[0], cases, job[2], None)), jobs))
        results: tuple[Cases, Cases] = {}, {}
        for label, part in parts:
            results[label == "new"].update(part)
        return results

    def values(self, folders: tuple[Path, Path], case: str) -> str:
        """Runs one case again in both trees, and says where its first differing tensor differs."""
        dumps = self.scratch / "dump_old", self.scratch / "dump_new"
        with ThreadPoolExecutor(self.args.jobs) as pool:
            jobs = zip(folders, ("old", "new"), dumps, strict=True)
            list(pool.map(lambda job: self.run(job[0], job[1], [case.replace("[", "[[]")], (0, 1), job[2]), jobs))
        for path in sorted(dumps[0].rglob("*.pt")):
            other = dumps[1] / path.relative_to(dumps[0])
            if not other.exists():
                return f"{path.name} of the old tree has no counterpart"
            (name, was), (_, now) = (torch.load(one, weights_only=True) for one in (path, other))
            said = first_difference(was, now)
            if said:
                rank = f"{path.parent.name} " if self.args.ranks else ""
                return f"{rank}{name}: {said}"
        return "run again, it is the same in both trees: something in it depends on more than its inputs"


def first_difference(was: torch.Tensor, now: torch.Tensor) -> str:
    """The first coordinate where the bytes differ, both values, and how many differ; "" where none does."""
    if was.dtype != now.dtype or was.shape != now.shape:
        return f"was {was.dtype} {list(was.shape)}, is {now.dtype} {list(now.shape)}"
    if not was.numel():
        return ""
    size = was.element_size()
    rows = [t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for t in (was, now)]
    differs = (rows[0] != rows[1]).any(1)
    both_nan = was.float().isnan().reshape(-1) & now.float().isnan().reshape(-1)
    places = (differs & ~both_nan).nonzero().view(-1)
    if not len(places):
        return ""
    first = int(places[0])
    where = [int(i) for i in torch.unravel_index(torch.tensor(first), was.shape)] if was.dim() else []
    old, new = (t.reshape(-1)[first].item() for t in (was, now))
    return f"{len(places)} of {was.numel()} values differ, first at {where}: was {old!r}, is {new!r}"


def report(found: Comparison, values: str = "") -> str:
    """What a reader wants to know first: how much was compared, then the first difference."""
    lines = []
    for title, kept in (("remark", found.facts), ("raised in both trees", found.silent)):
        lines += [f"{title}: {name}: {text}" for name, text in list(kept.items())[:SHOWN]]
        lines += [f"... and {len(kept) - SHOWN} more such cases"] if len(kept) > SHOWN else []
    lines += [f"in one tree only: {name}: {text}" for name, text in list(found.one_sided.items())[:SHOWN]]
    for name, tensors in list(found.tensors.items())[:SHOWN]:
        lines.append(f"differs: {name}: {len(tensors)} tensors, first {tensors[0]}")
    if values:
        lines.append(f"first difference: {next(iter(found.tensors))}: {values}")
    differing = sum(map(len, found.tensors.values()))
    lines.append(
        f"{found.cases} cases, {found.compared} tensors compared: {differing} tensors of {len(found.tensors)} cases "
        f"differ, {len(found.one_sided)} cases ran in one tree only, {len(found.silent)} raised in both"
    )
    lines.append("SAME BITS" if found.same else "NOT THE SAME")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, help="git revision or folder")
    parser.add_argument("--new", default=str(ROOT), help="git revision or folder; default: this checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=0, help="run the cases of so many ranks instead")
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--every", type=int, default=1, help="take every so many-th case, for a quick look")
    parser.add_argument("--new-cases", nargs="+", default=[], help="patterns of cases that the old tree need not run")
    parser.add_argument("--parts", type=int, help="processes of each tree; default: 1, on a GPU 7")
    parser.add_argument("--jobs", type=int, help="processes at a time; default: those of both trees, of ranks one")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for one process")
    args = parser.parse_args(argv)
    args.parts = 1 if args.ranks else args.parts or (GPU_PARTS if args.device == "cuda" else 1)
    args.jobs = args.jobs or (1 if args.ranks else 2 * args.parts)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="te_lite_bits_") as name:
        scratch = Path(name)
        runner = Runner(args, scratch)
        try:
            folders = two_trees(args.old, args.new, scratch)
            found = compare(*runner.both(folders, args.cases), args.new_cases)
            values = runner.values(folders, next(iter(found.tensors))) if found.tensors else ""
        except (RuntimeError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    print(report(found, values))
    print(f"{time.monotonic() - begin:.0f} s")
    return 0 if found.same else 1


if __name__ == "__main__":
    raise SystemExit(main())
