"""Run under torchrun: the vocabulary-parallel layers against torch's unsharded ones in fp64; prints one JSON line.

Every rank compares its own shard; the largest error over all ranks and the failures are printed.
"""

import json
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from examples.gpt import mesh, parallel_layers

SEQ, BATCH, VOCAB, HIDDEN = 8, 3, 32, 16


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype
    scale: float  # of the logits: 1e4 overflows exp in every type unless the maximum of the whole group is taken off
    bound: float  # relative to the largest value


# fp64: rounding of sums of 32 terms in another order; fp32: the same with its roundoff, and that of the inputs
CASES = (
    Case("fp64", torch.float64, 3.0, 1e-14),
    Case("fp64 large", torch.float64, 1e4, 1e-14),
    Case("fp32", torch.float32, 3.0, 2e-6),
    Case("fp32 large", torch.float32, 1e4, 2e-6),
)


def relative_error(ours: Tensor, truth: Tensor) -> float:
    if ours.shape != truth.shape or not bool(ours.isfinite().all()):
        return float("inf")
    return float((ours.double() - truth.double()).abs().max() / truth.double().abs().max().clamp_min(1e-300))


def cross_entropy(case: Case, here: mesh.Mesh) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(SEQ, BATCH, VOCAB, generator=generator, dtype=torch.float64) * case.scale).to(case.dtype)
    targets = torch.randint(VOCAB, (SEQ, BATCH), generator=generator)
    dloss = torch.randn(SEQ, BATCH, generator=generator, dtype=torch.float64)

    truth_logits = logits.double().clone().requires_grad_()  # .double() alone may be logits itself
    truth = F.cross_entropy(truth_logits.flatten(0, 1), targets.flatten(), reduction="none").view(SEQ, BATCH)
    truth.backward(dloss)

    shard = logits.chunk(here.tp_size, -1)[here.tp_rank].clone().requires_grad_()
    loss = parallel_layers.vocab_parallel_cross_entropy(shard, targets, here.tp_group)
    loss.backward(dloss.to(loss.dtype))
    return {
        "loss": relative_error(loss.detach(), truth.detach()),
        "dlogits": relative_error(shard.grad, truth_logits.grad.chunk(here.tp_size, -1)[here.tp_rank]),
    }


def embedding(sequence_parallel: bool, here: mesh.Mesh) -> dict[str, float]:
    """Forward must be exact: one rank has the row and the others add zeros."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (SEQ, BATCH), generator=generator)
    dx = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    truth_table = table.clone().requires_grad_()
    truth = F.embedding(tokens, truth_table)
    truth.backward(dx)

    layer = parallel_layers.VocabParallelEmbedding(
        VOCAB,
        HIDDEN,
        tp_group=here.tp_group,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float64,
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        layer.weight.copy_(table[layer.first : layer.last])
    x = layer(tokens)
    parts = here.tp_size if sequence_parallel else 1
    place = here.tp_rank if sequence_parallel else 0
    x.backward(dx.chunk(parts)[place])
    exact = 0.0 if torch.equal(x.detach(), truth.detach().chunk(parts)[place]) else float("inf")
    return {"x": exact, "dtable": relative_error(layer.weight.grad, truth_table.grad[layer.first : layer.last])}


def head(sequence_parallel: bool, here: mesh.Mesh) -> dict[str, float]:
    """x @ w^T with w cut by rows: the gradient of x is the sum over ranks, scattered with sequence parallelism."""
    generator = torch.Generator().manual_seed(3)
    x, w, dy = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((SEQ, BATCH, HIDDEN), (VOCAB, HIDDEN), (SEQ, BATCH, VOCAB))
    )
    truth_x = x.clone().requires_grad_()
    (truth_x @ w.t()).backward(dy)
    parts = here.tp_size if sequence_parallel else 1
    place = here.tp_rank if sequence_parallel else 0
    own = x.chunk(parts)[place].clone().requires_grad_()
    enter = parallel_layers.gather_sequence if sequence_parallel else parallel_layers.copy_to_ranks
    y = enter(own, here.tp_group) @ w.chunk(here.tp_size)[here.tp_rank].t()
    y.backward(dy.chunk(here.tp_size, -1)[here.tp_rank])
    return {"dx": relative_error(own.grad, truth_x.grad.chunk(parts)[place])}


def main() -> None:
    here = mesh.connect(int(sys.argv[1]), "cpu")
    results: list[tuple[str, float, float]] = []
    for case in CASES:
        for name, error in cross_entropy(case, here).items():
            results.append((f"{case.name} {name}", error, case.bound))
    for sequence_parallel in (False, True):
        for part in (embedding, head):
            for name, error in part(sequence_parallel, here).items():
                results.append((f"{part.__name__} sp={sequence_parallel} {name}", error, 1e-14))
    everyone: list[list] = [[] for _ in range(here.world_size)]
    dist.all_gather_object(everyone, results)
    if here.is_main:
        failures = [f"rank {r}: {n}: {e} > {b}" for r, rows in enumerate(everyone) for n, e, b in rows if not e <= b]
        print(json.dumps({"checked": len(results), "failures": failures}))
    mesh.disconnect()


if __name__ == "__main__":
    main()
