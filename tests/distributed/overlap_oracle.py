"""Results of overlapped modules beside the fp32 oracle of the unsharded ones."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from te_lite.testing.numerics import measure
from tests.distributed.overlapping import LAYERS, Pair
from tests.distributed.run_modules import shard_input, shard_output, shard_parameter
from tests.harness import Oracle

_truths: dict[tuple, tuple[dict, dict]] = {}


def oracle_step(pair: Pair, step: int, batch: tuple[Tensor, Tensor], oracles: dict) -> tuple[dict, dict]:
    """(truth, low-precision reference), shared by the methods: they must all be within its bounds."""
    key = (pair.spec, pair.recipe, pair.size, step)
    if key not in _truths:
        # One rank computes it for all of them: they share cores.
        maker = list(LAYERS).index((pair.spec.kind, pair.spec.mode)) % pair.size
        made = [None]
        if pair.rank == maker:
            oracle = oracles.setdefault(key[:3], Oracle(pair.spec, pair.full, pair.recipe, device=pair.device))
            made = [oracle.step(*batch)]
        dist.broadcast_object_list(made, dist.get_global_rank(pair.tp_group, maker), group=pair.tp_group)
        _truths[key] = made[0]
    return _truths[key]


def check_oracle(pair: Pair, label: str, got: dict[str, Tensor], truth: dict, low: dict) -> None:
    """Results within the bounds of the fp32 oracle of the unsharded module.

    All ranks' together, and each rank's by itself, where its bound is at least that of all. Of a rank's 24 tokens one
    value that is quantized the other way can double the error, of the reference too, which then says little of what
    that rank may err."""
    wrong, parameters = [], dict(pair.module.named_parameters())
    for name, value in got.items():
        if getattr(parameters.get(name), "sequence_parallel", False):
            value = value.clone()
            dist.all_reduce(value, group=pair.tp_group)
        part = {"out": shard_output, "dx": shard_input}.get(name, partial(shard_parameter, name))
        own = [part(t, pair.spec, pair.rank) for t in (truth[name], low[name])]
        ranks: list = [None] * pair.size
        mine = [t.reshape(-1).cpu() for t in (value.reshape(own[0].shape), *own)]
        dist.all_gather_object(ranks, mine, group=pair.tp_group)
        whole = measure(f"{label}: {name} of all ranks", *(torch.cat(parts) for parts in zip(*ranks, strict=True)))
        alone = measure(f"{label}: {name}", *mine)
        bounds = max(alone.rms_bound, whole.rms_bound), max(alone.max_bound, whole.max_bound)
        alone = replace(alone, rms_bound=bounds[0], max_bound=bounds[1])
        wrong += [str(close) for close in (whole, alone) if not close.ok]
    assert not wrong, "\n".join(wrong)
