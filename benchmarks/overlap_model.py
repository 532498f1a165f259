"""The model of overlap_times.py against the measured rows, and what it says of other sizes. No GPU needed.

    python benchmarks/overlap_model.py
    python benchmarks/overlap_model.py --plot docs/img/overlap_model.png

The constants are an H200's, and so are the rows: overlap_gemms_h200.json of 4 ranks, overlap_gemms_h200_tp2.json of 2.
Printed: predicted and measured time of each row, where there is one; the errors; the reduce-scatters that
overlap_played.py plays; for a layer's forward over TP size, hidden size and place, Collective's time over that of the
best overlapped schedules, and up to which hidden size they gain nothing. All but the first as in
docs/notebook/overlap-model.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

from benchmarks import result_files
from benchmarks.overlap_times import (
    ITEMSIZE,
    Machine,
    Problem,
    collective,
    copies,
    fused,
    fused_narrow,
    gemm,
    limit,
    ring,
)
from benchmarks.report import RESULTS, markdown

MEASURED = tuple(RESULTS / f"overlap_gemms{name}.json" for name in ("_h200", "_h200_tp2"))
NETWORK = 45.0  # GB/s from a GPU to other hosts: an adapter of 400 Gbit/s each. Not measured
TPS, HIDDEN = (2, 4, 8, 16), (2048, 4096, 8192, 16384)
MODELS = {"gemm": gemm, "copies": copies, "collective": collective, "ring": ring, "fused": fused}
MODELS |= {"fused narrow": fused_narrow}  # reduce-scatters only
PLAYED = ("gemm", "fused", "fused narrow")
Pairs = dict[str, tuple[float, float]]  # operation -> (predicted, measured)


def read(paths: Iterable[Path]) -> list[dict]:
    """Those of the files that there are."""
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def on_one_host(tp: int) -> Machine:
    """NCCL's share of the links between two GPUs is fitted to the rows of tp 2. These are of a newer tree than those of
    tp 4: its wait kernels poll early and take 1.2 to 1.6 us (docs/notebook/schedules.md, What was tried)."""
    return replace(Machine(), nccl_share=0.66, wait=1.4) if tp == 2 else Machine()


def compare(contents: list[dict], machine: Callable[[int], Machine] = on_one_host) -> dict[str, Pairs]:
    """By candidate, the rows of files of overlap_gemms.py. machine: of a tp."""
    found: dict[str, Pairs] = {name: {} for name in MODELS}
    for content in contents:
        for row in content["rows"]:
            if row["candidate"] in MODELS and row["gpu_us"]:
                p = Problem(row["op"], content["tp"], row["m"], row["k"], row["n"], row["dtype"])
                operation = f"{row['op']} {row['shape']} {row['dtype']} tp {p.tp}"
                found[row["candidate"]][operation] = MODELS[row["candidate"]](machine(p.tp), p), row["gpu_us"]
    return found


def errors(pairs: Pairs) -> tuple[float, float, str]:
    """(median, worst, the operation of the worst) of |predicted / measured - 1|."""
    off = {operation: abs(predicted / measured - 1) for operation, (predicted, measured) in pairs.items()}
    worst = max(off, key=lambda operation: off[operation])
    return statistics.median(off.values()), off[worst], worst


def error_rows(found: dict[str, Pairs]) -> list[list[str]]:
    """Of each candidate, all-gathers and reduce-scatters apart, and each tp."""
    rows = []
    for candidate, op, tp in itertools.product(found, ("AG", "RS"), TPS):
        first, last = f"{op} ", f" tp {tp}"
        here = [name for name in found[candidate] if name.startswith(first) and name.endswith(last)]
        if here:
            median, worst, where = errors({name: found[candidate][name] for name in here})
            where = where.removeprefix(first).removesuffix(last)
            rows.append([candidate, op, str(tp), str(len(here)), f"{median:.1%}", f"{worst:.1%}", where])
    return rows


def played_rows(contents: list[dict]) -> list[list[str]]:
    """Of files of overlap_played.py: GEMM, fused with bf16 and with fp8 on the wire, predicted and as two GPUs play
    them."""
    rows = [row for content in contents for row in content["rows"]]
    played = {(row["played"], row["shape"], row["dtype"], row["candidate"]): row["gpu_us"] for row in rows}
    lines: dict[tuple[str, str], list[str]] = {}
    for row in (row for row in rows if row["candidate"] == "gemm"):
        tp, key = row["played"], (row["shape"], row["dtype"])
        p, machine = Problem("RS", tp, row["m"], row["k"], row["n"], row["dtype"]), on_one_host(tp)
        lines.setdefault(key, [*key]).append(", ".join(f"{MODELS[name](machine, p):.0f}" for name in PLAYED))
        lines[key].append(", ".join(f"{played[tp, *key, name]:.0f}" for name in PLAYED))
    return list(lines.values())


def layer(tp: int, tokens: int, hidden: int, dtype: str) -> list[Problem]:
    """qkv, fc1, proj, fc2 of a forward pass, in the proportions of Llama 3 70b: ffn 3.5 hidden, gated, 8 query heads a
    key head."""
    gathers = [Problem("AG", tp, tokens, hidden, n // tp, dtype) for n in (hidden * 5 // 4, hidden * 7)]
    return gathers + [Problem("RS", tp, tokens, k // tp, hidden, dtype) for k in (hidden, hidden * 7 // 2)]


def gain(machine: Machine, problems: list[Problem]) -> tuple[float, float]:
    """(time by Collective, limit), over the time of ring or fused, whichever takes less of each."""
    best = sum(min(ring(machine, p), fused(machine, p)) for p in problems)
    return sum(collective(machine, p) for p in problems) / best, sum(limit(machine, p) for p in problems) / best


def on_a_host_each(tp: int) -> Machine:
    """If ranks could push over the network."""
    return replace(Machine(), bandwidth=NETWORK)


def on_two_hosts(tp: int) -> Machine:
    """If they could, half of the ranks on each host. Every push to the other host crosses the network through this
    rank's adapter, while NCCL's rings bring a shard over once, through all adapters."""
    machine, far = Machine(), tp // 2
    mean = (tp - 1) / (far / NETWORK + (far - 1) / machine.bandwidth)
    share = machine.nccl_share * min(machine.bandwidth, far * NETWORK) / mean
    return replace(machine, bandwidth=mean, nccl_share=share)


def sweep(tokens: int) -> list[list[str]]:
    """A row for each place and hidden size: gain in bf16 / fp8 at each tp, in brackets the share of the limit of pushes
    (nothing on two hosts, where NCCL is not bound by it)."""
    rows = []
    for place in (on_one_host, on_a_host_each, on_two_hosts):
        for hidden in HIDDEN:
            cells = []
            for tp in TPS:
                gains = [gain(place(tp), layer(tp, tokens, hidden, dtype)) for dtype in ITEMSIZE]
                shares = ["" if place is on_two_hosts else f" ({share:.2f})" for _, share in gains]
                cells.append(" / ".join(f"{g:.2f}{share}" for (g, _), share in zip(gains, shares, strict=True)))
            rows.append([place.__name__.replace("_", " "), str(hidden), *cells])
    return rows


def edges() -> list[list[str]]:
    """The largest hidden size, in steps of 512, where overlap gains nothing on one host, bf16 / fp8 at each tp: with so
    many tokens, and with NCCL's constant, measured at tp 4, the same at every tp or in proportion to tp - 1."""
    rows = []
    for tokens, grows in ((8192, False), (2048, False), (8192, True), (2048, True)):
        cells = []
        for tp in TPS:
            machine = replace(on_one_host(tp), nccl=Machine().nccl * ((tp - 1) / 3 if grows else 1))
            none = [
                max(
                    (h for h in range(512, 16385, 512) if gain(machine, layer(tp, tokens, h, dtype))[0] <= 1), default=0
                )
                for dtype in ITEMSIZE
            ]
            cells.append(" / ".join(str(hidden or "-") for hidden in none))
        rows.append(
            [str(tokens), f"{Machine().nccl / 3:.0f} us (R-1)" if grows else f"{Machine().nccl:.0f} us", *cells]
        )
    return rows


def plot(path: Path, tokens: int) -> None:
    """Collective's time over the best overlapped, against hidden size, on one host."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [base * 2**i for i in range(4) for base in (1024, 1536)] + [16384]
    figure, axes = pyplot.subplots(1, len(ITEMSIZE), figsize=(10, 4), sharey=True)
    for axis, dtype in zip(axes, ITEMSIZE, strict=True):
        for tp in TPS:
            gains = [gain(on_one_host(tp), layer(tp, tokens, hidden, dtype))[0] for hidden in sizes]
            axis.plot(sizes, gains, marker=".", label=f"tp {tp}")
        axis.axhline(1, color="grey", linestyle="--", linewidth=1)
        axis.set(xscale="log", xticks=sizes[::2], xticklabels=sizes[::2], xlabel="hidden size")
        axis.set(title=f"{dtype}, {tokens} tokens, forward of a layer")
        axis.minorticks_off()
    axes[0].set(ylabel="Collective / best overlapped, predicted")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", default=MEASURED)
    parser.add_argument("--tokens", type=int, default=8192, help="of all ranks, in the table over sizes")
    parser.add_argument("--plot", type=Path, help="also draw the gain against hidden size")
    args = parser.parse_args(argv)
    contents = read(args.results)
    found = compare(contents)
    cells = {name: {op: f"{a:.0f} / {b:.0f} = {a / b:.2f}" for op, (a, b) in found[name].items()} for name in found}
    rows = [[op, *(cells[name].get(op, "") for name in MODELS)] for op in cells["gemm"]]
    print(result_files.text_table(("predicted / measured", *MODELS), rows), end="\n\n")
    print(
        markdown(("candidate", "op", "tp", "rows", "median error", "worst", "where"), error_rows(found), text_columns=2)
    )
    print("\nReduce-scatters: GEMM, fused with bf16 and with fp8 on the wire, us\n")
    names = [f"tp {tp}, {what}" for tp in (4, 8) for what in ("predicted", "played")]
    print(markdown(("shape", "type", *names), played_rows(read([RESULTS / "overlap_played.json"])), text_columns=2))
    print(f"\nCollective / best overlapped (limit / best), bf16 / fp8, forward of a layer, {args.tokens} tokens\n")
    print(markdown(("ranks", "hidden", *(f"tp {tp}" for tp in TPS)), sweep(args.tokens), text_columns=2))
    print("\nNothing gained up to hidden, on one host, bf16 / fp8\n")
    print(markdown(("tokens", "NCCL's constant", *(f"tp {tp}" for tp in TPS)), edges(), text_columns=2))
    if args.plot:
        plot(args.plot, args.tokens)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
