"""What the ranks of the fault tests do together, and faults in which they do not run the same program."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable

import torch.distributed as dist

import te_lite as te
from te_lite.overlap import userbuffers
from tests.distributed.faults import VICTIM
from tests.distributed.overlapping import COLUMN, MLP, begin, pair_of
from tests.harness import RECIPES


def say(name: str, what: object) -> None:
    print(f"{name}: {what}", flush=True)


def said(name: str, run: Callable[[], object]) -> str:
    """What run() raises, printed with the seconds it took."""
    started = time.monotonic()
    try:
        run()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "nothing was raised"
    say(name, f"[{time.monotonic() - started:.1f} s] {text}")
    return text


def victim() -> bool:
    return dist.get_rank() == VICTIM


def make(which, device, recipe="bf16", tokens: int = 32, **options):
    """Userbuffers for the world, and a module that uses them."""
    begin(tokens * dist.get_world_size(), 128, dist.group.WORLD, device, **options)
    return pair_of(which, recipe, device)


def step(pair, m: int = 8) -> None:
    pair.backward(pair.forward(pair.batch(1, m)))


def until_it_fails(run: Callable[[], None], seconds: float = 60.0) -> Callable[[], None]:
    """run() again and again: what was announced is compared beside the work, so the call after may be the one."""

    def loop() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            run()
            userbuffers.groups()[0].control.check()
            time.sleep(0.01)

    return loop


def mismatch(device) -> None:
    """Another shape, then another recipe on the victim: named on all ranks, with both sides' words."""
    pair = make(MLP, device)
    said("shape mismatch", until_it_fails(lambda: step(pair, 16 if victim() else 8)))
    te.destroy_ub()
    dist.barrier()
    pair = make(COLUMN, device, recipe="mxfp8" if victim() else "bf16")
    said("recipe mismatch", until_it_fails(lambda: step(pair)))
    te.destroy_ub()
    dist.barrier()


# The same recipe with another option, by which nothing that travels changes its type or shape.
OPTIONS_APART = (("blockwise", "blockwise_fp32"), ("rowwise", "rowwise_fp32"), ("current", "current_per_shard"))


def recipes(device) -> None:
    """Every two recipes on two ranks, whose first difference may be an amax that one of them reduces."""
    for ours, theirs in [*itertools.combinations(RECIPES, 2), *OPTIONS_APART]:
        pair = make(MLP, device, recipe=theirs if victim() else ours)
        said(f"{ours} and {theirs}", until_it_fails(lambda pair=pair: step(pair)))
        te.destroy_ub()
        dist.barrier()


def order(device) -> None:
    """Modules alike but for their names, called in another order by the victim."""
    pairs = [make(MLP, device), pair_of(MLP, "bf16", device)]
    for pair, name in zip(pairs, ("layer 1", "layer 2"), strict=True):
        pair.module.name = name

    def both() -> None:
        for pair in reversed(pairs) if victim() else pairs:
            pair.forward(pair.batch(1, 8))

    said("order", until_it_fails(both))
    te.destroy_ub()
    dist.barrier()


def left(device) -> None:
    """The victim ends its userbuffers in order, the others go on."""
    pair = make(MLP, device)
    step(pair)
    dist.barrier()
    if victim():
        te.destroy_ub()
    else:
        said("left", until_it_fails(lambda: step(pair)))
        te.destroy_ub()
    dist.barrier()


def unnoticed(device) -> None:
    """The victim's last backwards come in another order, and then userbuffers end: nobody calls anything any more."""
    pair = make(MLP, device)
    step(pair)
    calls = [pair.forward(pair.batch(i, m)) for i, m in enumerate((8, 16))]
    dist.barrier()  # on GPUs a rank may come to the mismatch while another issues its forwards
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for call in reversed(calls) if victim() else calls:
                pair.backward(call)
        except RuntimeError as error:  # the watcher was there first
            caught.append(error)
        te.destroy_ub()
    say("unnoticed", "; ".join(str(getattr(one, "message", one)) for one in caught))
    dist.barrier()


def mismatch_in_backward(device) -> None:
    """Two backwards that do not fit, in another order on the victim: gloo would end the process."""
    pair = make(MLP, device)
    calls = [pair.forward(pair.batch(i, m)) for i, m in enumerate((200, 400))]
    said("backward mismatch", lambda: [pair.backward(call) for call in (reversed(calls) if victim() else calls)])
    te.destroy_ub()
    dist.barrier()


def refused_alone(device) -> None:
    """strict on the victim alone: it raises and does not come to the exchange; the others are told that it left."""
    pair = make(COLUMN, device)

    def forward() -> None:
        with te.autocast(enabled=False, strict=victim()):
            pair.module(pair.inputs(pair.batch(1, 200))[0])

    said("refused alone", forward)
    te.destroy_ub()
    dist.barrier()


def mismatch_over_capacity(device) -> None:
    """As mismatch, where both calls are Collective's because they do not fit."""
    pair = make(COLUMN, device)
    said("collective mismatch", until_it_fails(lambda: step(pair, 208 if victim() else 200)))
    te.destroy_ub()
    dist.barrier()


def mismatch_of_capacity(device) -> None:
    """One call fits, the other does not: one waits in the arena, one for torch.distributed."""
    pair = make(COLUMN, device)
    said("capacity mismatch", until_it_fails(lambda: step(pair, 200 if victim() else 8)))
    te.destroy_ub()
    dist.barrier()
