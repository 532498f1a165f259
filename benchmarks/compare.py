"""Two results files of one benchmark, row by row: what became slower?

    python benchmarks/compare.py before/modules.json after/modules.json
    python benchmarks/compare.py before/peers.json after/peers.json --limit 1.03 --columns gpu_us wall_us

    ratio = new / old                    of each number of a row; the row is found by its identity columns
    slow  = ratio > --limit              in a column of --columns
    missing                              no such row or no such number in the new file

Exit status 0: nothing is slow or missing, and at least one number of --columns was compared. 1 otherwise. Rows that
only the new file has are named and cost nothing. Two files are two runs, so a small difference may be the machine's.
For a verdict on two trees use benchmarks/two_trees.py, whose processes alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

from benchmarks import result_files
from benchmarks.result_files import IDENTITY, Key

LIMIT = 1.05
COLUMNS = ("gpu_us", "step_us")  # those that a benchmark has decide
PLACE = ("device", "driver", "torch", "triton")  # two files that differ here compare machines too
Row = dict[str, object]


@dataclass
class Comparison:
    """Ratios new / old by row and column, and what decides the exit status."""

    ratios: dict[Key, dict[str, float]]
    slow: list[str]
    missing: list[str]
    added: list[str]
    compared: int  # numbers of the deciding columns

    def holds(self) -> bool:
        return bool(self.compared) and not self.slow and not self.missing


def numbers(row: Row, identity: Sequence[str]) -> dict[str, float]:
    """The measured numbers of a row; none where it failed."""
    if row.get("error"):
        return {}
    return {
        name: value
        for name, value in row.items()
        if name not in identity and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def compared(old: dict, new: dict, columns: Sequence[str], limit: float) -> Comparison:
    """old, new: contents of two results files. ValueError where they are not of one benchmark."""
    if old["name"] != new["name"]:
        raise ValueError(f"results of {old['name']!r} and {new['name']!r}: must be of one benchmark; give two of one")
    identity = IDENTITY[old["name"]]
    before, after = result_files.keyed(old), result_files.keyed(new)
    out = Comparison({}, [], [], [" ".join(map(str, key)) for key in after if key not in before], 0)
    for key, row in before.items():
        label, mine = " ".join(map(str, key)), numbers(row, identity)
        theirs = numbers(after[key], identity) if key in after else {}
        out.ratios[key] = {name: theirs[name] / number for name, number in mine.items() if number and name in theirs}
        for column in columns:
            if column not in mine:
                continue
            if column not in theirs:
                out.missing.append(f"{label}: {column}")
                continue
            out.compared += 1
            if theirs[column] > limit * mine[column]:
                out.slow.append(f"{label}: {column} {mine[column]:.1f} to {theirs[column]:.1f}")
    return out


def summary(old: dict, new: dict, found: Comparison) -> str:
    """A line a row, worst and best and median of each column, and what is slow or missing."""
    columns = list(dict.fromkeys(column for ratios in found.ratios.values() for column in ratios))

    def cells(ratios: dict[str, float]) -> list[str]:
        return [f"{ratios[column]:.3f}" if column in ratios else "-" for column in columns]

    lines = [[*map(str, key), *cells(ratios)] for key, ratios in found.ratios.items()]
    identity = IDENTITY[old["name"]]
    blank = [""] * (len(identity) - 1)
    for name, fold in (("highest", max), ("median", statistics.median), ("lowest", min)):
        whole = {c: fold([ratios[c] for ratios in found.ratios.values() if c in ratios]) for c in columns}
        lines.append([name, *blank, *cells(whole)])
    said = [result_files.text_table((*identity, *columns), lines)]
    said += [f"other {name}: {old[name]}, {new[name]}" for name in PLACE if old[name] != new[name]]
    said += [f"only in the new file: {name}" for name in found.added]
    said += [f"MISSING {name}" for name in found.missing] + [f"SLOWER {name}" for name in found.slow]
    said.append(f"{found.compared} numbers compared, {len(found.slow)} slower, {len(found.missing)} missing")
    return "\n".join(said)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="results file of before")
    parser.add_argument("new", type=Path, help="results file of the same benchmark")
    parser.add_argument("--limit", type=float, default=LIMIT, help="highest new / old of a column that decides")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), help="columns of times that decide")
    args = parser.parse_args(argv)
    old, new = (json.loads(path.read_text()) for path in (args.old, args.new))
    try:
        found = compared(old, new, args.columns, args.limit)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(summary(old, new, found))
    return 0 if found.holds() else 1


if __name__ == "__main__":
    raise SystemExit(main())
