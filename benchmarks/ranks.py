"""What the overlap benchmarks share: one program on all ranks, whose rows rank 0 writes as they come."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import result_files
from benchmarks.commands import SAFE_ENVIRONMENT
from te_lite.testing.distributed import init_ranks, leave_ranks

Measure = Callable[[argparse.Namespace, torch.device, list[dict], Callable[[], None]], None]


def run_on_ranks(name: str, args: argparse.Namespace, measure: Measure, summary: Callable[[list[dict]], str]) -> int:
    """measure(args, device, rows, write) on every rank under torchrun, then the summary; exit status 1 after an error.

    args: device, out, tree_hash. write() puts what rows holds by then into <out>/<name>.json.
    """
    os.environ.update(SAFE_ENVIRONMENT)  # NCCL and torch read it when they begin to communicate
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    rank, ranks, device = init_ranks(torch.device(args.device).type)
    if ranks < 2:
        raise SystemExit(f"{name} on {ranks} rank: there is nothing to overlap; start it with torchrun on 2 or more")
    torch.manual_seed(rank)
    rows: list[dict] = []

    def write() -> None:
        if rank == 0:
            result_files.write_results(args.out / f"{name}.json", name, rows, tree=tree, device=args.device, tp=ranks)

    measure(args, device, rows, write)
    if rank == 0 and rows:
        print(summary(rows))
    leave_ranks()
    return 1 if any(row["error"] for row in rows) else 0
