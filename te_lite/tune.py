"""`te_lite tune`: measures ahead of a run what "auto" measures at its first use (docs/how-to/overlap-methods.md).

    torchrun --nproc-per-node 4 --no-python te_lite tune --hidden 8192 --ffn 28672 --tokens 8192
    torchrun --nproc-per-node 4 -m te_lite.tune --hidden 4096 --ffn 14336 --tokens 8192 2048 --recipes bf16 delayed

Runs the linears of a Transformer layer (qkv, proj and the MLP), tensor and sequence parallel over all ranks, forward
and backward, for every recipe and token count; what was measured goes into auto's file, and what it means is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import te_lite as te
from te_lite.overlap.choice import cache_file
from te_lite.overlap.config import LAYER_GEMMS, is_scatter
from te_lite.testing.distributed import init_ranks, leave_ranks

FLAGS = {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": True}
EVERYWHERE = [name for name in LAYER_GEMMS if not name.endswith("_wgrad")]


def layer(args: argparse.Namespace, device: torch.device) -> list[tuple[nn.Module, int]]:
    """(module, its input's features on this rank) of each module."""
    ranks = dist.get_world_size()
    common: dict[str, Any] = {"bias": args.bias, "params_dtype": torch.bfloat16, "device": device, "tp_size": ranks}
    common |= {"tp_group": dist.group.WORLD, "sequence_parallel": True, **FLAGS}
    hidden, normed = args.hidden, common | {"normalization": "RMSNorm"}
    qkv = te.LayerNormLinear(hidden, args.qkv or 3 * hidden, parallel_mode="column", ub_name="qkv", **normed)
    proj = te.Linear(hidden, hidden, parallel_mode="row", ub_name="proj", **common)
    mlp = te.LayerNormMLP(hidden, args.ffn, set_parallel_mode=True, activation=args.activation, **normed)
    return [(qkv, hidden), (proj, hidden // ranks), (mlp, hidden)]


def step(module: nn.Module, x: Tensor, residual: Tensor | None, recipe: str) -> None:
    with te.autocast(enabled=recipe != "bf16", recipe=te.recipe.from_name(recipe)):
        out = module(x, residual=residual)
    out.backward(torch.randn_like(out))


def tune(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The report's rows of all that ran, which say what was measured. Collective."""
    from tqdm import tqdm

    ranks, rank = dist.get_world_size(), dist.get_rank()
    cfgs = {name: {"method": "auto", "fp8_buf": args.fp8_buf and is_scatter(name, "auto")} for name in EVERYWHERE}
    te.initialize_ub([max(args.tokens), args.hidden], ranks, ub_cfgs=cfgs, device=device, strict=True)
    jobs = list(product(args.recipes, args.tokens, range(3)))
    rows: list[dict[str, Any]] = []
    for recipe, tokens, index in tqdm(jobs, desc="timing", unit="module", disable=rank != 0):
        module, features = layer(args, device)[index]
        here = tokens if features != args.hidden else tokens // ranks  # a row-parallel input has all tokens
        x = torch.randn(here, features, device=device, dtype=torch.bfloat16, requires_grad=True)
        adds = args.residual and not isinstance(module, te.LayerNormLinear)
        residual = torch.randn(tokens // ranks, args.hidden, device=device, dtype=x.dtype) if adds else None
        step(module, x, residual, recipe)
        rows += [row for row in te.overlap_report() if "auto: " in row["reason"]]
        del module
    te.destroy_ub()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="te_lite tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--ffn", type=int, required=True, help="of all ranks; of a gated activation one half")
    parser.add_argument("--qkv", type=int, default=0, help="output features of qkv; default 3 * hidden")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="of all ranks, each count that occurs")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "delayed"])
    parser.add_argument("--activation", default="swiglu")
    parser.add_argument("--bias", action="store_true", help="linears with a bias, for auto other GEMMs")
    parser.add_argument("--residual", action="store_true", help="proj and the MLP add one, for auto other GEMMs")
    parser.add_argument("--fp8-buf", action="store_true", help="partial sums travel in fp8 where that is possible")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        print("te_lite tune: start it under torchrun, on the ranks that will run: see --help", file=sys.stderr)
        return 2
    os.environ["TE_LITE_AUTO"] = "measure"
    rank, _, device = init_ranks(args.device)
    rows = tune(args, device)
    if rank == 0:
        print(te.format_report(rows), f"kept in {cache_file()}", sep="\n", flush=True)
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
