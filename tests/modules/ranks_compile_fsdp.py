"""Over 2 ranks: blocks compiled whole, then sharded by FSDP2, beside the same blocks in eager mode, bit for bit."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.numerics import assert_bitwise_equal  # noqa: E402
from tests.harness import under  # noqa: E402

BF16 = torch.bfloat16


def sharded(blocks: list[nn.Module], mesh: object) -> nn.Module:
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(nn.Sequential(*blocks), mesh=mesh)


def check(recipe: str, rank: int, mesh: object) -> None:
    torch.manual_seed(0)
    blocks = [te.LayerNormMLP(32, 64, activation="swiglu", params_dtype=BF16, device="cpu") for _ in range(2)]
    copies = copy.deepcopy(blocks)
    compiled = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in copies]
    nets = sharded(blocks, mesh), sharded(compiled, mesh)
    for i in range(4):
        outputs = []
        for net in nets:
            torch.manual_seed(10 * i + rank)
            net.zero_grad()
            with under(recipe):
                y = net(torch.randn(16, 32, dtype=BF16) * 3**i)
            y.backward(torch.randn_like(y))
            outputs.append(y.detach())
        assert_bitwise_equal(f"{recipe} {i} y", outputs[1], outputs[0])
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert_bitwise_equal(f"{recipe} {i} gradient", q.grad.to_local(), p.grad.to_local())
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.01)
                q.add_(q.grad, alpha=-0.01)
    for one, other in zip(blocks, copies, strict=True):
        assert_bitwise_equal(f"{recipe} state", other.get_extra_state(), one.get_extra_state())


def main() -> None:
    init_ranks("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe in ("current", "delayed"):
        check(recipe, dist.get_rank(), mesh)
    leave_ranks()


main()
