"""Over 2 ranks: checkpoints of whose first input each rank keeps a part, against those that keep it whole."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.numerics import assert_bitwise_equal  # noqa: E402
from tests.harness import under  # noqa: E402

K = 32
# The first two have no equal parts, the third's memory has another order.
INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "odd": lambda x: x[:17, 0, : K - 1].contiguous(),
    "three dimensions": lambda x: x[:7, :3, : K - 1].contiguous(),
    "transposed": lambda x: x.transpose(0, 1),
}


class Block(nn.Module):
    """Pads the features to K; both linears are split, the tokens are not."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        given = {"tp_group": dist.group.WORLD, "tp_size": 2, "params_dtype": torch.bfloat16, "device": device}
        self.column = te.LayerNormLinear(K, 2 * K, parallel_mode="column", **given)
        self.row = te.Linear(2 * K, K, parallel_mode="row", **given)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.row(self.column(nn.functional.pad(x, (0, K - x.shape[-1])))) * scale


def steps(block: Block, recipe: str, x: Tensor, **options: object) -> tuple[list[Tensor], bool]:
    """(results of two steps, whether an input's memory was given back before backward)."""
    found, freed = [], True
    for i in range(2):
        source, scale = x.clone().requires_grad_(), torch.full((), 1.5 + i, device=x.device, requires_grad=True)
        with under(recipe):
            hidden = source * 1.0
            assert hidden.stride() == x.stride()
            memory = StorageWeakRef(hidden.untyped_storage())
            y = te.checkpoint(block, hidden, scale, **options)
        del hidden
        freed &= memory.expired()
        y.float().square().sum().backward()
        found += [y.detach(), source.grad, scale.grad, *(param.grad for param in block.parameters())]
        block.zero_grad()
    return found, freed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    _, _, device = init_ranks(parser.parse_args().device)
    group = dist.group.WORLD
    for recipe in ("bf16", "delayed", "mxfp8"):
        for name, take in INPUTS.items():
            for reentrant in (True, False):
                torch.manual_seed(0)
                x = take(torch.randn(24, 4, K).bfloat16().to(device))
                results = []
                for kept in ({}, {"distribute_saved_activations": True, "tp_group": group}):
                    torch.manual_seed(dist.get_rank())
                    results.append(steps(Block(device), recipe, x, use_reentrant=reentrant, **kept))
                (want, whole_freed), (got, freed) = results
                assert freed and not whole_freed, (freed, whole_freed)
                for i, (a, b) in enumerate(zip(got, want, strict=True)):
                    assert_bitwise_equal(f"{recipe}, {name}, reentrant {reentrant}, result {i}", a, b)
    print("VERDICT: parts are gathered", flush=True)
    leave_ranks()


if __name__ == "__main__":
    main()
