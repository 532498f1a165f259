"""Ranks that do not run the same, without userbuffers, started one by one by test_unlike_ranks.py.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 \\
        python tests/distributed/run_unlike_ranks.py tokens

Each line on stdout is "case: what this rank saw". A rank that goes on has neither died nor been left waiting.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from tests.distributed.mismatches import said, say, victim  # noqa: E402
from tests.harness import RECIPES, under  # noqa: E402

HIDDEN = 128
KINDS = ("column", "row", "norm and column", "mlp")


def make(kind: str, device, dtype=torch.bfloat16, group=None, hidden: int = HIDDEN) -> torch.nn.Module:
    """Sequence-parallel over the world, or over `group`."""
    common = {"tp_group": group or dist.group.WORLD, "sequence_parallel": True, "params_dtype": dtype, "device": device}
    if kind == "mlp":
        return te.LayerNormMLP(hidden, 256, set_parallel_mode=True, **common)
    if kind == "norm and column":
        return te.LayerNormLinear(hidden, 256, parallel_mode="column", **common)
    return te.Linear(hidden, 256, parallel_mode=kind, **common)


def tokens(module, m: int, dtype=torch.bfloat16) -> torch.Tensor:
    """[m, features] for this rank."""
    weight = next(p for name, p in module.named_parameters() if name in ("weight", "fc1_weight"))
    return torch.randn(m, weight.shape[1], dtype=dtype, device=weight.device).requires_grad_()


def shard(kind: str, m: int) -> int:
    """Tokens that a rank passes of m of its own: the input of a row-parallel linear has those of all ranks."""
    return m * dist.get_world_size() if kind == "row" else m


def counts(device) -> None:
    """Token counts, forward: the victim has one more, many more, none."""
    for kind in KINDS:
        module = make(kind, device)
        for name, m in {"one more": 17, "many more": 256, "none": 0}.items():
            x = tokens(module, shard(kind, m if victim() else 16))
            said(f"{kind}, {name}", lambda module=module, x=x: module(x))
    row = make("row", device)
    x = tokens(row, 16 * dist.get_world_size() + victim())
    said("row, no multiple", lambda: row(x))


def backwards(device) -> None:
    """Two backwards of different token counts, which the victim calls in the other order."""
    for kind in KINDS:
        module = make(kind, device)
        outs = [module(tokens(module, shard(kind, m))) for m in (16, 17)]
        first = outs[1 if victim() else 0]
        said(f"{kind}, backward", lambda first=first: first.sum().backward())


def dtypes(device) -> None:
    """The victim's parameters and input have another dtype, or are of another width."""
    for kind in KINDS:
        dtype = torch.float32 if victim() else torch.bfloat16
        module = make(kind, device, dtype)
        x = tokens(module, shard(kind, 16), dtype)
        said(f"{kind}, dtype", lambda module=module, x=x: module(x))
    column = make("column", device, hidden=HIDDEN + 16 * victim())
    x = tokens(column, 16)
    said("column, features", lambda: column(x))


def recipes(device) -> None:
    """The victim runs each recipe while the others run without one. Column-parallel: x travels first."""
    for recipe in RECIPES:
        module = make("column", device)
        x = tokens(module, 16)

        def forward(module=module, x=x, recipe=recipe) -> None:
            with under(recipe if victim() else "bf16"):
                module(x)

        if recipe != "bf16":
            said(f"bf16 and {recipe}", forward)


def gradients(device) -> None:
    """The victim has no gradient of the norm's bias."""
    norm = te.LayerNorm(HIDDEN, sequence_parallel=True, device=device)
    norm(torch.randn(4, HIDDEN, device=device)).sum().backward()
    if victim():
        norm.bias.grad = None
    said("gradients", lambda: te.reduce_sequence_parallel_grads(norm, dist.group.WORLD))


def alike(device) -> None:
    """After all errors the ranks still run together; a group of one rank has nobody to compare with."""
    for kind in KINDS:
        module = make(kind, device)
        module(tokens(module, shard(kind, 16))).sum().backward()
    mine = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    alone = make("column", device, group=mine)
    alone(tokens(alone, 16 + victim())).sum().backward()
    say("alike", "ok")


SUITES = {"tokens": [counts, backwards], "all": [counts, backwards, dtypes, recipes, gradients]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    device = init_ranks(args.device)[2]
    try:
        for case in [*SUITES[args.suite], alike]:
            case(device)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
