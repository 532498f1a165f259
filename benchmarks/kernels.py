"""The cast, transpose, norm and activation kernels against the copy bandwidth of the same run.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --device cpu        # smoke test at a tiny shape; its numbers mean nothing

`bytes` counts each input read once and each output written once. `of_copy` is bytes / time over the same for
a plain copy of a tensor [M, N], interleaved with it. bf16 sources, E4M3 outputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch

from benchmarks import bench, result_files
from te_lite.ops.activation import Activation

RESULTS = Path(__file__).resolve().parent / "results"
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = ((512, 2048), (8192, 4096), (8192, 8192), (8192, 28672))
SMOKE_SHAPES = ((48, 64),)


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. `num_bytes` is what it must move."""

    name: str
    num_bytes: float
    call: Callable[[], object]
    reset: Callable[[], object] | None = None


class Operands:
    """Random inputs of one shape [M, N]; made once and shared by its cases."""

    def __init__(self, m: int, n: int, device: str) -> None:
        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=device, dtype=BF16)

        self.size = float(m * n)
        self.x, self.dy, self.out = random(m, n), random(m, n), random(m, n)
        self.h = random(m, 2 * n)  # [gate | up]
        self.gamma = torch.ones(n, device=device, dtype=BF16)
        self.q = self.x.to(E4M3)
        self.scale = torch.full((1,), 16.0, device=device)
        self.amax_out = torch.zeros(1, device=device)
        self.history = torch.rand(1024, 5, device=device)
        self.scales = torch.ones(5, device=device)


def copy_cases(t: Operands) -> list[Case]:
    return [Case("copy bf16", 4 * t.size, lambda: t.out.copy_(t.x))]


def cast_cases(t: Operands) -> list[Case]:
    """Quantization of a plain tensor: delayed scaling knows its scale, current scaling a tensor's amax."""
    from te_lite.ops import cast, source, transpose

    plain = source.plain(t.x)
    amax = cast.amax(plain)
    size = t.size

    def delayed(**layouts: bool) -> Callable[[], object]:
        return lambda: cast.transform(plain, fp8_dtype=E4M3, scale=t.scale, amax_out=t.amax_out, **layouts)

    def current(**layouts: bool) -> Callable[[], object]:
        return lambda: cast.transform(plain, fp8_dtype=E4M3, amax=amax, **layouts)

    return [
        Case("cast row, delayed", 3 * size, delayed(row=True)),
        Case("cast col, delayed", 3 * size, delayed(col=True)),
        Case("cast row+col, delayed", 4 * size, delayed(row=True, col=True)),
        Case("cast row+col+bias gradient, delayed", 4 * size, delayed(row=True, col=True, bias_grad=torch.float32)),
        Case("cast row, current (amax known)", 3 * size, current(row=True)),
        Case("cast row+col, current (amax known)", 4 * size, current(row=True, col=True)),
        Case("amax", 2 * size, lambda: cast.amax(plain)),
        Case("transpose fp8", 2 * size, lambda: transpose.transpose(t.q)),
    ]


def norm_cases(t: Operands) -> list[Case]:
    """RMSNorm: to bf16, statistics with amax, straight to fp8, backward."""
    from te_lite.ops import cast, norm, source

    mean, rstd, amax = norm.norm_stats(t.x, t.gamma, None, 1e-5, True, False, True)
    fused = source.Source(kind="norm", x=t.x, mean=mean, rstd=rstd, gamma=t.gamma)
    size = t.size
    return [
        Case("rmsnorm forward", 4 * size, lambda: norm.norm_forward(t.x, t.gamma, None, 1e-5, True, False)),
        Case(
            "rmsnorm statistics",
            2 * size,
            lambda: norm.norm_stats(t.x, t.gamma, None, 1e-5, True, False, False),
        ),
        Case(
            "rmsnorm statistics+amax",
            2 * size,
            lambda: norm.norm_stats(t.x, t.gamma, None, 1e-5, True, False, True),
        ),
        Case(
            "rmsnorm to fp8 row+col, delayed",
            4 * size,
            lambda: cast.transform(fused, fp8_dtype=E4M3, scale=t.scale, amax_out=t.amax_out, row=True, col=True),
        ),
        Case(
            "rmsnorm to fp8 row+col, current",
            4 * size,
            lambda: cast.transform(fused, fp8_dtype=E4M3, amax=amax, row=True, col=True),
        ),
        Case("rmsnorm backward", 6 * size, lambda: norm.norm_backward(t.dy, t.x, None, rstd, t.gamma, False)),
    ]


def activation_cases(t: Operands) -> list[Case]:
    """SwiGLU forward h[M, 2N] -> [M, N] and backward (dy[M, N], h) -> [M, 2N]."""
    from te_lite.ops import cast, source

    act, dact = source.act(t.h, Activation.of("swiglu")), source.dact(t.dy, t.h, Activation.of("swiglu"))
    size, again, amax = t.size, {"act_dtype": E4M3, "act_scale": t.scale}, cast.amax(dact)

    def quantize(what: object, fp8_dtype: torch.dtype, **more: object) -> Callable[[], object]:
        kind = {"fp8_dtype": fp8_dtype, "scale": t.scale, "amax_out": t.amax_out, "row": True, "col": True}
        return lambda: cast.transform(what, **(kind | more))

    by_amax = {"scale": None, "amax_out": None, "amax": amax}
    both = by_amax | again

    return [
        Case("swiglu", 6 * size, lambda: cast.transform(act, hp_dtype=BF16)),
        Case("swiglu to fp8 row+col, delayed", 6 * size, quantize(act, E4M3)),
        Case("amax of swiglu", 4 * size, lambda: cast.amax(act)),
        Case("swiglu backward", 10 * size, lambda: cast.transform(dact, hp_dtype=BF16)),
        Case("swiglu backward to fp8 row+col, delayed", 10 * size, quantize(dact, E5M2)),
        Case("amax of swiglu backward", 6 * size, lambda: cast.amax(dact)),
        # What LayerNormMLP's backward computes again: in a pass of its own, and beside the gradient.
        Case("swiglu to fp8 col, delayed", 5 * size, quantize(act, E4M3, row=False, amax_out=None)),
        Case("swiglu backward to fp8 row+col, swiglu by col, delayed", 11 * size, quantize(dact, E5M2, **again)),
        Case("swiglu backward to fp8 row+col, current", 10 * size, quantize(dact, E5M2, **by_amax)),
        Case("swiglu backward to fp8 row+col, swiglu by col, current", 11 * size, quantize(dact, E5M2, **both)),
        Case("swiglu backward, swiglu", 12 * size, lambda: cast.transform(dact, hp_dtype=BF16, act_dtype=BF16)),
    ]


def scaled_cases(t: Operands) -> list[Case]:
    """Quantization with a scale a block, a row, a column; bytes include the scales."""
    from te_lite.ops import block_cast, cast, row_cast, source

    plain, m, n = source.plain(t.x), t.x.shape[0], t.x.shape[1]
    size, cases = t.size, []
    kinds = {"mx": (32, False, 1 / 32), "1x128": (128, False, 4 / 128), "128x128": (128, True, 4 / 128**2)}
    for name, (block, square, scales) in kinds.items():
        for layout, row, col in (("row", True, False), ("col", False, True), ("row+col", True, True)):
            call = partial(block_cast.block_cast, plain, block=block, square=square, row=row, col=col, flat=block == 32)
            cases.append(Case(f"{name} {layout}", (2 + (1 + scales) * (row + col)) * size, call))
    scale = torch.ones(m + n, device=t.x.device)
    vectors = {"row_scale": scale[:m], "col_scale": scale[m:]}
    mx = block_cast.block_cast(plain, block=32, row=True, col=True, flat=True)
    return [
        *cases,
        Case("rowwise row", 3 * size, lambda: row_cast.row_cast(plain)),
        Case("rowwise amaxes", 2 * size, lambda: row_cast.vector_amax(plain, True, True)),
        Case("rowwise amax of columns", 2 * size, lambda: row_cast.vector_amax(plain, False, True)),
        Case(
            "rowwise col, scales known",
            3 * size,
            lambda: cast.transform(plain, fp8_dtype=E4M3, col=True, col_scale=scale[m:]),
        ),
        Case(
            "rowwise row+col, scales known",
            4 * size,
            lambda: cast.transform(plain, fp8_dtype=E4M3, row=True, col=True, **vectors),
        ),
        Case(
            "mx to bf16, row",
            (3 + 1 / 32) * size,
            lambda: block_cast.dequantize_blocks(mx.row, mx.row_scale, 1, 32, BF16),
        ),
        Case(
            "mx to bf16, col",
            (3 + 1 / 32) * size,
            lambda: block_cast.dequantize_blocks(mx.col, mx.col_scale, 32, 1, BF16),
        ),
    ]


def delayed_cases(t: Operands) -> list[Case]:
    from te_lite.ops import delayed

    def update() -> None:
        delayed.delayed_update(t.history, t.scales, 448.0, "max")

    # An update clears row 0, and a cleared row ends the next one early.
    return [Case("delayed update", 2.0 * t.history.nbytes, update, lambda: t.history[0].fill_(1.0))]


FAMILIES = {
    "cast": cast_cases,
    "scaled": scaled_cases,
    "norm": norm_cases,
    "activation": activation_cases,
    "delayed": delayed_cases,
}


def measure(m: int, n: int, families: list[str], clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    operands = Operands(m, n, args.device)
    cases, rows = copy_cases(operands), []
    for family in families:
        try:
            cases += FAMILIES[family](operands)
        except Exception as error:  # one broken family must not cost the others their numbers
            rows.append({"m": m, "n": n, "kernel": family, "error": f"{type(error).__name__}: {error}"})
    run = [bench.Candidate(case.name, case.call, case.reset) for case in cases]
    timings = bench.time_interleaved(run, clock, rounds=args.rounds, wall_rounds=0)
    copied = bench.gbps(cases[0].num_bytes, timings[cases[0].name].gpu_us)
    for case in cases:
        timing = timings[case.name]
        rate = bench.gbps(case.num_bytes, timing.gpu_us)
        row = {"m": m, "n": n, "kernel": case.name, "bytes": int(case.num_bytes), "gpu_us": timing.gpu_us}
        row |= {
            "host_us": timing.host_us,
            "gbps": rate,
            "of_copy": rate / copied if rate and copied else None,
        }
        row |= {"spread": timing.spread, "exposed": timing.exposed, "error": timing.error}
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        numbers = (row.get("gpu_us"), row.get("host_us"), row.get("gbps"))
        cells = ["-" if value is None else f"{value:.1f}" for value in numbers]
        share = row.get("of_copy")
        cells.append("-" if share is None else f"{share:.2f}")
        lines.append([f"{row['m']}x{row['n']}", row["kernel"], *cells, row.get("error") or ""])
    return result_files.text_table(("shape", "kernel", "gpu_us", "host_us", "GB/s", "of copy", "error"), lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", help="as 8192x4096; all by default")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for kernels.json")
    args = parser.parse_args(argv)
    known = SHAPES if torch.device(args.device).type == "cuda" else SMOKE_SHAPES
    if args.shapes:
        args.shapes = [tuple(int(size) for size in text.split("x")) for text in args.shapes]
    else:
        args.shapes = known
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)  # tiny shapes: more threads only wait for each other
    clock = bench.clock_for(args.device)
    rows = []
    for m, n in args.shapes:
        rows += measure(m, n, args.families, clock, args)
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    shapes = [f"{m}x{n}" for m, n in args.shapes]
    result_files.write_results(args.out / "kernels.json", "kernels", rows, tree=tree, device=args.device, shapes=shapes)
    print(summary(rows))
    return 1 if any(row.get("error") for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
