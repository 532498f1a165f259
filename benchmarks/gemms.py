"""GEMMs of every number format against cuBLAS in bf16 and against torch._scaled_mm, interleaved in one run.

    python benchmarks/gemms.py
    python benchmarks/gemms.py --device cpu        # smoke test at a tiny shape; its numbers mean nothing

The operands are quantized already: rows time the product alone, with whatever te_lite does to the operands on the way
(MXFP8 is scaled to bf16 first). "bf16" is torch.mm, "bf16 by te_lite" the same product as LayerNormMLP computes it.
`of_bf16` is the time of the bf16 GEMM over that of the row, `of_torch` the time of torch's bare call on the same
operands and scales. Of a product that is added to an fp32 matrix in one GEMM, as a weight gradient is to main_grad, it
is the time of the product in fp32 and torch's addition after it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # an installed te_lite is not needed

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import bench, result_files
from te_lite.ops.gemm import gemm, gemm_accumulate_
from te_lite.ops.source import plain
from te_lite.quantize.blockwise import SQUARES, VECTORS, Blocks
from te_lite.quantize.mxfp8 import MX
from te_lite.quantize.per_tensor import Current, PerTensorFormat
from te_lite.quantize.qtensor import QTensor, matmul
from te_lite.quantize.rowwise import ROWS, Rows

RESULTS = Path(__file__).resolve().parent / "results"
BF16 = torch.bfloat16
SHAPES = (
    (8192, 8192, 8192), (8192, 8192, 7168), (8192, 7168, 8192), (8192, 4096, 14336), (8192, 14336, 4096),
    (2048, 4096, 4096), (512, 2048, 5632),
)  # fmt: skip
SMOKE_SHAPES = ((32, 128, 48),)

ADDED = ("tensorwise", "rowwise", "blockwise, 1x128 twice")

Call = Callable[[], Tensor | None]


def product(a: QTensor, b: QTensor, fast: bool = False) -> Call:
    return lambda: matmul(a, "row", b, "row", BF16, None, fast)


def added(name: str, a: QTensor, b: QTensor) -> dict[str, Call]:
    """The product of a and b added to an fp32 matrix, in one GEMM and in two steps."""
    out = torch.zeros(a.shape[0], b.shape[0], device=a.row.device)
    together = f"{name}, added to fp32"
    return {
        together: lambda: a.format.accumulate_(out, a.operand("row"), b.operand("row"), False),
        f"{together} after it": lambda: out.add_(matmul(a, "row", b, "row", torch.float32)),
    }


def added_bf16(x: Tensor, w: Tensor) -> dict[str, Call]:
    """added() of 16-bit operands that lie as a weight gradient's do, their columns far apart."""
    out, dy, inp = torch.zeros(x.shape[0], w.shape[0], device=x.device), x.t().contiguous(), w.t().contiguous()
    return {
        "bf16, added to fp32": lambda: gemm_accumulate_(out, dy, inp),
        "bf16, added to fp32 after it": lambda: out.add_(gemm(dy.t(), inp.t(), torch.float32)),
    }


def torch_calls(x: Tensor, w: Tensor) -> dict[str, Call]:
    """The bare calls into torch, on operands laid out for them beforehand."""
    if not x.is_cuda:
        return {}
    one_x, one_w = (Current(PerTensorFormat()).quantize(plain(t))[0] for t in (x, w))
    rows_x, rows_w = Rows(ROWS).quantize(plain(x))[0], Rows(ROWS).quantize(plain(w))[0]
    blocks_x, blocks_w = Blocks(VECTORS).quantize(plain(x))[0], Blocks(SQUARES).quantize(plain(w))[0]
    a, b = rows_x.row_scale.view(-1, 1), rows_w.row_scale.view(1, -1)
    padded = blocks_w.row_scale.as_strided(
        (blocks_w.row_scale.shape[0], -(-blocks_w.row_scale.shape[1] // 4) * 4), blocks_w.row_scale.stride()
    )
    kinds = F.ScalingType

    def tensorwise(fast: bool) -> Call:
        scales = {"scale_a": one_x.row_scale, "scale_b": one_w.row_scale}
        return lambda: torch._scaled_mm(one_x.row, one_w.row.t(), **scales, out_dtype=BF16, use_fast_accum=fast)

    def rowwise(fast: bool) -> Call:
        return lambda: torch._scaled_mm(
            rows_x.row, rows_w.row.t(), scale_a=a, scale_b=b, out_dtype=BF16, use_fast_accum=fast
        )

    return {
        "torch tensorwise": tensorwise(False),
        "torch tensorwise, fast accumulation": tensorwise(True),
        "torch rowwise": rowwise(False),
        "torch rowwise, fast accumulation": rowwise(True),
        "torch blockwise": lambda: F.scaled_mm(
            blocks_x.row, blocks_w.row.t(), scale_a=blocks_x.row_scale, scale_recipe_a=kinds.BlockWise1x128,
            scale_b=padded.t(), scale_recipe_b=kinds.BlockWise128x128, output_dtype=BF16,
        ),
    }  # fmt: skip


def calls(x: Tensor, w: Tensor) -> dict[str, Call]:
    """Name -> the product of x and w, quantized in that way."""

    def both(quantizer_x, quantizer_w) -> tuple[QTensor, QTensor]:
        return quantizer_x.quantize(plain(x))[0], quantizer_w.quantize(plain(w))[0]

    tensorwise, rows = both(Current(PerTensorFormat()), Current(PerTensorFormat())), both(Rows(ROWS), Rows(ROWS))
    blocks, mx = both(Blocks(VECTORS), Blocks(SQUARES)), both(MX(), MX())
    vectors = both(Blocks(VECTORS), Blocks(VECTORS))
    return {
        "bf16": lambda: torch.mm(x, w.t()),
        "bf16 by te_lite": lambda: gemm(x, w),
        "mxfp8": product(*mx),
        "tensorwise": product(*tensorwise),
        "tensorwise, fast accumulation": product(*tensorwise, fast=True),
        "rowwise": product(*rows),
        "rowwise, fast accumulation": product(*rows, fast=True),
        "blockwise": product(*blocks),
        "blockwise, 1x128 twice": product(*vectors),
        **{
            key: call
            for name, pair in zip(ADDED, (tensorwise, rows, vectors), strict=True)
            for key, call in added(name, *pair).items()
        },
        **added_bf16(x, w),
        **torch_calls(x, w),
    }


PEERS = {
    "bf16 by te_lite": "bf16",
    "tensorwise": "torch tensorwise",
    "tensorwise, fast accumulation": "torch tensorwise, fast accumulation",
    "rowwise": "torch rowwise",
    "rowwise, fast accumulation": "torch rowwise, fast accumulation",
    "blockwise": "torch blockwise",
    **{f"{name}, added to fp32": f"{name}, added to fp32 after it" for name in ("bf16", *ADDED)},
}


def measure(m: int, k: int, n: int, clock: bench.Clock, args: argparse.Namespace) -> list[dict]:
    x = torch.randn(m, k, device=args.device, dtype=BF16)
    w = torch.randn(n, k, device=args.device, dtype=BF16) * k**-0.5
    candidates = [bench.Candidate(name, call) for name, call in calls(x, w).items()]
    timings = bench.time_interleaved(candidates, clock, rounds=args.rounds, wall_rounds=0)

    def share(of: str | None, name: str) -> float | None:
        if of not in timings or not timings[of].gpu_us or not timings[name].gpu_us:
            return None
        return timings[of].gpu_us / timings[name].gpu_us

    return [
        {
            "m": m, "k": k, "n": n, "gemm": name, "gpu_us": t.gpu_us, "host_us": t.host_us,
            "tflops": bench.tflops(2.0 * m * k * n, t.gpu_us), "of_bf16": share("bf16", name),
            "of_torch": share(PEERS.get(name), name), "spread": t.spread, "exposed": t.exposed, "error": t.error,
        }
        for name, t in timings.items()
    ]  # fmt: skip


def summary(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        numbers = [
            (row[key], spec)
            for key, spec in (("gpu_us", ".1f"), ("tflops", ".0f"), ("of_bf16", ".2f"), ("of_torch", ".2f"))
        ]
        cells = ["-" if value is None else format(value, spec) for value, spec in numbers]
        lines.append([f"{row['m']}x{row['k']}x{row['n']}", row["gemm"], *cells, row["error"] or ""])
    return result_files.text_table(("M x K x N", "gemm", "gpu_us", "TFLOP/s", "of bf16", "of torch", "error"), lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tree-hash", help="git tree hash of te_lite/; computed from the files when not given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for gemms.json")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    clock = bench.clock_for(args.device)
    shapes = SHAPES if torch.device(args.device).type == "cuda" else SMOKE_SHAPES
    rows = [row for m, k, n in shapes for row in measure(m, k, n, clock, args)]
    tree = args.tree_hash or result_files.tree_hash(Path(__file__).resolve().parents[1] / "te_lite")
    names = ["x".join(map(str, shape)) for shape in shapes]
    result_files.write_results(args.out / "gemms.json", "gemms", rows, tree=tree, device=args.device, shapes=names)
    print(summary(rows))
    return 1 if any(row["error"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
