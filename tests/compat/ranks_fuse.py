"""Over 2 ranks: fused decoder layers sharded by FSDP2 beside the same layers unsharded, bit for bit.

Gradients are averaged. The layers are not transformers', whose import takes long.
"""

import copy
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.memory import kept_tensors  # noqa: E402
from te_lite.testing.numerics import assert_bitwise_equal  # noqa: E402
from tests.compat.layers import Layer  # noqa: E402

BF16 = torch.bfloat16


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.layers, self.recompute = nn.ModuleList([Layer(), Layer()]), recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def sharded(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(model, batch):
    """(y, gradients)."""
    x, dy = batch
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.backward(dy)
    return y.detach(), [p.grad for p in model.parameters()]


def check(recipe, recompute, mesh, ranks):
    torch.manual_seed(0)
    whole = Model(recompute).to(BF16)
    report = te.fuse(whole, recipe)
    assert len(report.fused) == 4 and not report.left
    model = sharded(copy.deepcopy(whole), mesh)
    assert list(model.state_dict()) == list(whole.state_dict())
    for step in range(2):
        batches = [(torch.randn(2, 16, 64, dtype=BF16), torch.randn(2, 16, 64, dtype=BF16)) for _ in range(ranks)]
        each = [run(whole, batch) for batch in batches]
        y, grads = run(model, batches[dist.get_rank()])
        assert_bitwise_equal(f"{recipe} {step} y", y, each[dist.get_rank()][0])
        for i, (name, p) in enumerate(whole.named_parameters()):
            p.grad = sum(one[1][i] for one in each) / ranks
            assert_bitwise_equal(f"{recipe} {step} {name}", grads[i].full_tensor(), p.grad)
        with torch.no_grad():  # by a power of two: else the vectors' ends of a shard are rounded in another way
            for p, q in zip(whole.parameters(), model.parameters(), strict=True):
                p.add_(p.grad, alpha=-0.125)
                q.add_(q.grad, alpha=-0.125)
    shapes = [tuple(t.shape) for t in kept_tensors(model(batches[0][0]))]
    assert shapes and not {(192, 64), (128, 64)} & set(shapes), "a joined weight is kept from forward to backward"


def check_refusals(mesh):
    late = Model()
    fully_shard(late.layers[0], mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = te.fuse(late)
    assert [layer.name for layer in report.left] == ["layers.0.self_attn", "layers.0.mlp"]
    assert all("is a DTensor" in layer.reason for layer in report.left)
    alone = Model()
    te.fuse(alone)
    fully_shard(alone.layers[0].mlp, mesh=mesh)
    try:
        te.unfuse(alone)
    except RuntimeError as error:
        assert "FSDPFusedMLP" in str(error)
    else:
        raise AssertionError("unfuse of a class that fully_shard made")


def main() -> None:
    init_ranks("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe, recompute in (("bf16", True), ("current", False)):
        check(recipe, recompute, mesh, dist.get_world_size())
    check_refusals(mesh)
    leave_ranks()


if __name__ == "__main__":
    main()
