"""The fused reduce-scatter of more ranks than there are GPUs, played by two of them.

    torchrun --nproc-per-node 2 benchmarks/overlap_played.py

Each GPU runs the kernel of one of R ranks: it multiplies all of a rank's rows and stores what it has for the R - 1
other owners into as many slots of the other GPU, as if all of them were there. Tiles, flags and bytes in and out of a
GPU are those of R ranks, and the sum of what arrived is checked. What R GPUs do to each other is not played: all bytes
take the one way between two. Interleaved: the GEMM alone (cuBLAS), the copies alone (what the R - 1 others get, in
bf16), the kernel ("fused"), and with partial sums in fp8 ("fused narrow"). Shapes, limit and relative_error are those
of overlap_gemms.py, and of a layer's whole K each of R ranks has its share. The limit is that of copies in bf16, so
"fused narrow" may be beyond it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from benchmarks import bench
from benchmarks.modules import BF16, RESULTS
from benchmarks.overlap_gemms import SHAPES, Shape, summary
from benchmarks.ranks import run_on_ranks
from benchmarks.recipes import RanksClock
from te_lite.ops.gemm_scatter import MOST_BLOCKS, Narrow, gemm_scatter
from te_lite.ops.narrow import BLOCK, E4M3

WRITTEN_FOR = 4  # ranks that SHAPES are written for
# Of relative_error. bf16: R - 1 partials of a norm s and their sum, s sqrt(R), are each rounded by 2^-9 at most, which
# is 2^-9 ((R-1) / sqrt(R) + 1) of the sum: 0.007 at 8 ranks. fp8: 0.025 is expected (numerics.md, Partial
# sums on a narrower wire), and the mean of so many values hardly strays.
MOST_ERROR = {"fused": 2.0**-7, "fused narrow": 2.0**-5}
SCATTERS = tuple(shape for shape in SHAPES if shape.op == "RS")
ALWAYS = 1 << 30  # an epoch that no use reaches


class Slots:
    """[ranks, *shape] here and there: owner's slot lies at the other GPU, which plays one of the owners itself."""

    def __init__(self, ranks: int, shape: tuple[int, ...], dtype: torch.dtype, fill: float, device: torch.device):
        self.rank, self.peer = dist.get_rank(), 1 - dist.get_rank()
        self.here = symmetric_memory.empty((ranks, *shape), dtype=dtype, device=device).fill_(fill)
        handle = symmetric_memory.rendezvous(self.here, dist.group.WORLD.group_name)
        self.there = handle.get_buffer(self.peer, self.here.shape, dtype)

    def of(self, owner: int) -> Tensor:
        """Where this rank's part for an owner goes; for itself, which the kernel does not send, anywhere."""
        return self.there[self.rank if owner == self.peer else owner]

    def addresses(self) -> list[int]:
        return [self.of(owner).data_ptr() for owner in range(self.here.shape[0])]


class Problem:
    """What one GPU does of gemm_scatter of `ranks` ranks."""

    def __init__(self, shape: Shape, dtype: str, ranks: int, device: torch.device) -> None:
        self.ranks, self.m, self.rank, self.peer = ranks, shape.m // ranks, dist.get_rank(), 1 - dist.get_rank()
        self.a = torch.randn(shape.m, shape.k, device=device, dtype=BF16)
        self.b = torch.randn(shape.n, shape.k, device=device, dtype=BF16)
        self.scale = None
        if dtype == "fp8":
            self.a, self.b, self.scale = self.a.to(E4M3), self.b.to(E4M3), torch.ones(1, device=device)
        nan = float("nan")
        self.staging = Slots(ranks, (self.m, shape.n), BF16, nan, device)
        self.narrow = Slots(ranks, (self.m, shape.n), torch.uint8, 0x7F, device)  # nan in E4M3
        self.scales = Slots(ranks, (shape.n // BLOCK, self.m), torch.float32, nan, device)
        self.ready = Slots(ranks, (MOST_BLOCKS,), torch.int32, 0, device)
        words = torch.zeros(ranks * MOST_BLOCKS + 3, dtype=torch.int32, device=device)
        self.counters, self.epoch, self.abort = words[:-2], words[-2:-1], words[-1:]
        self.free = torch.full((ranks,), ALWAYS, dtype=torch.int32, device=device)
        self.uses = 0
        torch.cuda.synchronize()
        dist.barrier()

    def gemm(self) -> Tensor:
        if self.scale is None:
            return self.a @ self.b.t()
        return torch._scaled_mm(self.a, self.b.t(), self.scale, self.scale, out_dtype=BF16, use_fast_accum=True)

    def copies(self) -> None:
        for owner in (owner for owner in range(self.ranks) if owner != self.rank):
            self.staging.of(owner).copy_(self.staging.here[owner])

    def fused(self, narrow: bool = False) -> Tensor:
        self.uses += 1
        slots = self.narrow if narrow else self.staging
        staging = slots.here.view(E4M3) if narrow else slots.here
        how = Narrow(self.scales.here, self.scales.addresses(), BF16) if narrow else None
        return gemm_scatter(
            self.a, self.b, slots.addresses(), self.ready.addresses(), staging, self.ready.here, self.free,
            self.counters, self.epoch, self.uses, self.abort, self.rank, self.scale, self.scale, narrow=how,
        )  # fmt: skip

    def exact(self) -> Tensor:
        """fp32: this GPU's own rows, and of the other's all but those that the other keeps."""
        full = (self.a.float() @ self.b.float().t()).view(self.ranks, self.m, -1)
        both = [torch.empty_like(full) for _ in range(2)]
        dist.all_gather(both, full)
        rest = [both[self.peer][owner] for owner in range(self.ranks) if owner != self.peer]
        return torch.stack([both[self.rank][self.rank], *rest]).sum(0)


def compare(shape: Shape, dtype: str, ranks: int, args: argparse.Namespace, device: torch.device) -> list[dict]:
    """A row for each candidate. The same on both ranks."""
    problem = Problem(shape, dtype, ranks, device)
    ways: dict[str, Callable[[], object]] = {
        "gemm": problem.gemm,
        "copies": problem.copies,
        "fused": problem.fused,
        "fused narrow": lambda: problem.fused(narrow=True),
    }
    errors, exact = {}, problem.exact()
    for name, most in MOST_ERROR.items():
        error = (ways[name]().float() - exact).norm() / exact.norm()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        errors[name] = float(error)
        assert errors[name] < most, f"{shape} {dtype}, {ranks} ranks: {errors}"
    candidates = [bench.Candidate(name, step) for name, step in ways.items()]
    timings = bench.time_interleaved(candidates, RanksClock(device), rounds=args.rounds, wall_rounds=0)
    limit = max(timings[name].gpu_us or 0.0 for name in ("gemm", "copies"))
    rows = []
    for timing in timings.values():
        row = {"op": shape.op, "shape": shape.name, "dtype": dtype, "m": shape.m, "k": shape.k, "n": shape.n}
        row |= {"played": ranks, "candidate": timing.name, "gpu_us": timing.gpu_us, "spread": timing.spread}
        row["of_limit"] = limit / timing.gpu_us if timing.gpu_us else None
        rows.append(row | {"relative_error": errors.get(timing.name), "exposed": timing.exposed, "error": timing.error})
    return rows


@torch.no_grad()
def measure(args: argparse.Namespace, device: torch.device, rows: list[dict], write: Callable[[], None]) -> None:
    if device.type != "cuda" or dist.get_world_size() != 2:
        raise SystemExit(f"{dist.get_world_size()} {device.type} ranks: two GPUs play; start it with torchrun on 2")
    for ranks in args.ranks:
        for shape in SCATTERS:
            shape = replace(shape, k=shape.k * WRITTEN_FOR // ranks)
            for dtype in ("bf16", "fp8"):
                rows.extend(compare(shape, dtype, ranks, args, device))
                write()


def table(rows: list[dict]) -> str:
    played = dict.fromkeys(row["played"] for row in rows)
    return "\n".join(f"{ranks} ranks\n{summary([row for row in rows if row['played'] == ranks])}" for ranks in played)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8], help="how many are played")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for overlap_played.json")
    parser.add_argument("--device", default="cuda", help="GPUs: no kernel plays on a CPU")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run_on_ranks("overlap_played", parse(argv), measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
