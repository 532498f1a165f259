"""Run under torchrun: what a tiny mixture of experts trains on two ranks that share the experts; written to a file.

test_moe.py runs the same functions in one process.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te
from examples.gpt import data, loop, mesh, optimizer, options
from examples.gpt.moe import is_expert

TINY = (
    *("--layers", "2", "--hidden", "64", "--heads", "4", "--ffn", "64", "--experts", "4", "--seq-length", "32"),
    *("--batch-size", "8", "--warmup", "3", "--eval-tokens", "256", "--eval-every", "0", "--device", "cpu"),
)
STEPS = 12
FP32 = (*TINY, "--params-dtype", "fp32", "--steps", str(STEPS))
RECIPES = [name for name in te.recipe.available() if name != "tensorwise"]
Change = Callable[[torch.nn.Module], None]


def trainer(argv: tuple[str, ...], here: mesh.Mesh, change: Change | None = None) -> loop.Trainer:
    """change: of the model, before its first step."""
    args = options.build_moe_parser().parse_args([*argv, "--ep", str(here.ep_size)])
    options.check(args, here.world_size)
    corpus = data.load_corpus(None, args.seq_length, here)
    made = loop.Trainer(args, options.model_config(args), corpus, here, options.identity(args, corpus.digest))
    if change is not None:
        change(made.model)
        made.optimizer = optimizer.MasterAdamW(made.model, here)
    return made


def losses(argv: tuple[str, ...], here: mesh.Mesh, change: Change | None = None) -> list[float]:
    return trainer(argv, here, change).run(lambda *_: None).losses


def gradients(argv: tuple[str, ...], here: mesh.Mesh, change: Change | None = None) -> dict[str, Tensor]:
    """Of the second of two steps without an update, so that delayed scaling's scales are its own: the loss of each
    token [S, B] of all ranks, and the optimizer's gradients; experts by their number among all."""
    run = trainer(argv, here, change)
    args = run.args
    for _ in range(2):
        run.optimizer.zero_grad()
        tokens, targets = data.train_batch(run.corpus, 0, args.seed, args.batch_size, args.seq_length, here)
        with loop.precision(run.recipe, here):
            loss = run.model(tokens, targets)
        loss.mean().backward()
    found = {"loss": loss.detach()}
    for p, name, grad in zip(run.optimizer.parameters, run.optimizer.names, run.optimizer.gradients(), strict=True):
        found[f"{name.rstrip('0123456789')}{p.expert}" if is_expert(p) else name] = grad.clone()
    if here.world_size > 1:
        everyone: list[dict[str, Tensor]] = [{}] * here.world_size
        dist.all_gather_object(everyone, found)
        found = {name: grad for one in everyone for name, grad in one.items()}
        found["loss"] = torch.cat([one["loss"] for one in everyone], 1)
    return found


def main() -> None:
    out = Path(sys.argv[1])
    here = mesh.connect(1, "cpu", 2)
    # two mistakes that the bounds must notice
    mixed = dataclasses.replace(here, expert_group=here.dp_group)  # experts reduced like everything else
    alone = dataclasses.replace(here, dp_group=None)  # nothing but the experts exchanged
    result = {
        "losses": losses(FP32, here), "mixed losses": losses(FP32, mixed), "gradients": gradients(FP32, here),
        "mixed gradients": gradients(FP32, mixed), "alone gradients": gradients(FP32, alone),
    }  # fmt: skip
    for recipe in RECIPES:
        result[recipe] = gradients((*TINY, "--recipe", recipe), here)
    if here.is_main:
        torch.save(result, out)
    here.barrier()
    mesh.disconnect()


if __name__ == "__main__":
    main()
