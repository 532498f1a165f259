"""Two ranks of test_alias_parts.py: fp8 weights whose masters are sharded, a vocabulary that is split, and
what frameworks set on modules that are built."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

import te_lite as te
import te_lite.compat.alias.modules  # noqa: F401  # modules follow what is set on them
from te_lite.compat.alias.cross_entropy import parallel_cross_entropy
from te_lite.compat.alias.tensors import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    replace_raw_data,
)
from te_lite.testing.distributed import init_ranks, leave_ranks
from te_lite.testing.numerics import assert_bitwise_equal


def check_masters(recipe: str, out_features: int, in_features: int, rank: int) -> None:
    """The bytes after the all-gather are those of quantize_(whole master); columnwise data is made anew from them."""
    with te.quantized_model_init(recipe=recipe):
        linear = te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16, device="cpu")
    weight, count = linear.weight, out_features * in_features
    buffer = torch.full((count,), 99, dtype=torch.uint8)
    before = weight.dequantize().clone()
    replace_raw_data(weight, buffer)
    assert_bitwise_equal("moved", weight.dequantize(), before)
    x = torch.randn(4, in_features, dtype=torch.bfloat16, requires_grad=True)
    linear(x).sum().backward()  # makes columnwise data of the old bytes
    master = torch.randn(out_features, in_features)
    want = copy.deepcopy(weight).detach().quantize_(master)
    cut = count // 3 + 5  # across rows and blocks
    mine = (slice(0, cut), slice(cut, count))[rank]
    shard = master.view(-1)[mine].clone()
    args = [weight], [shard], [mine.start], dist.group.WORLD
    cast_master_weights_to_fp8(*args, manual_post_all_gather_processing=True)
    parts = [torch.empty_like(buffer) for _ in range(2)]
    dist.all_gather(parts, buffer)
    buffer.copy_(torch.cat((parts[0][:cut], parts[1][cut:])))
    post_all_gather_processing([weight])
    assert_bitwise_equal("scales", weight.q.row_scale.contiguous(), want.q.row_scale.contiguous())
    assert_bitwise_equal("bytes", weight.q.row.view(torch.uint8), want.q.row.view(torch.uint8))
    x.grad = None
    with te.autocast(recipe=recipe):
        linear(x).sum().backward()
        y = x.detach().clone().requires_grad_()
        linear.weight = torch.nn.Parameter(want)
        linear(y).sum().backward()
    if recipe != "delayed":  # whose scales of dy have moved between the two
        assert_bitwise_equal("dx", x.grad, y.grad)


def check_cross_entropy(rank: int) -> None:
    """torch's cross entropy in fp64 of the whole vocabulary."""
    vocabulary = 48
    x = torch.randn(5, 2, vocabulary).mul(4).requires_grad_()
    target = torch.randint(0, vocabulary, (5, 2))
    target[2, 1] = -100
    dloss = torch.randn(5, 2)
    shard = x.detach()[..., rank * 24 : rank * 24 + 24].requires_grad_()
    for smoothing in (0.0, 0.1):
        shard.grad = x.grad = None
        loss = parallel_cross_entropy(shard, target, smoothing, False, dist.group.WORLD)
        loss.backward(dloss)
        kind = {"reduction": "none", "label_smoothing": smoothing}
        want = F.cross_entropy(x.double().flatten(0, 1), target.flatten(), **kind).view(5, 2)
        want.backward(dloss.double())
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(shard.grad, x.grad[..., rank * 24 : rank * 24 + 24], rtol=1e-5, atol=1e-6)
        mean = parallel_cross_entropy(shard, target, smoothing, True, dist.group.WORLD)
        torch.testing.assert_close(mean.double(), want.sum() / 9, rtol=1e-6, atol=1e-6)


def check_parallel_mode(mode: str, sequence_parallel: bool, delayed: bool) -> None:
    """Without its parallel_mode a linear that has run is that of this rank alone, as Megatron's shared experts want it
    whose communication is another's; with it again it is what it was."""
    options = {"tp_group": dist.group.WORLD, "tp_size": 2, "device": "cpu", "delay_wgrad_compute": delayed}
    linear = te.Linear(16, 16, sequence_parallel, parallel_mode=mode, bias=False, **options)
    x = torch.randn(4, linear.in_features)
    before = linear(x)
    linear.parallel_mode = None
    y = linear(x.requires_grad_())
    want = x.detach() @ linear.weight.detach().t()
    torch.testing.assert_close(y.detach(), want, rtol=1e-5, atol=1e-6)
    dy = torch.randn(y.shape)
    given = dy.clone(), x.detach().clone()
    y.backward(dy)
    with torch.no_grad():
        x.zero_(), dy.zero_()  # the caller's: a gradient that waits has copies
    if delayed:
        linear.backward_dw()
    torch.testing.assert_close(linear.weight.grad, given[0].t() @ given[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, given[0] @ linear.weight.detach(), rtol=1e-5, atol=1e-6)
    linear.parallel_mode = mode
    assert_bitwise_equal("again", linear(given[1]), before)
    try:
        linear.parallel_mode = "colum"
    except ValueError as error:
        assert "'column'" in str(error) and linear.parallel_mode == mode
    else:
        raise AssertionError("there is no such mode")


def check_sequence_parallel() -> None:
    """Set to False for a generation and back, as Megatron does it on all modules of a model."""
    options = {"tp_group": dist.group.WORLD, "tp_size": 2, "device": "cpu"}
    mlp = te.LayerNormMLP(16, 32, sequence_parallel=True, set_parallel_mode=True, bias=False, **options)
    x = torch.randn(4, 16)
    dist.broadcast(x, 0)
    with torch.no_grad():
        half = x.chunk(2)[dist.get_rank()].contiguous()
        scattered = mlp(half)
        mlp.sequence_parallel = False
        whole = mlp(x)
        mlp.sequence_parallel = True
        torch.testing.assert_close(scattered, whole.chunk(2)[dist.get_rank()], rtol=1e-5, atol=1e-6)
        assert_bitwise_equal("again", mlp(half), scattered)


def check_group_of_all() -> None:
    """NeMo sets one group on all modules: those that are whole on each rank have no use for it."""
    whole = te.Linear(16, 16, bias=False, device="cpu")
    whole.set_tensor_parallel_group(dist.group.WORLD)
    assert whole.tp_size == 1 and whole(torch.ones(4, 16)).shape == (4, 16)
    split = te.Linear(16, 16, parallel_mode="row", bias=False, device="cpu")
    try:
        split.set_tensor_parallel_group(dist.group.WORLD)
    except ValueError as error:
        assert "tp_size=1" in str(error)
    else:
        raise AssertionError("it was to be split, and built for one rank")


def main() -> None:
    rank, _, _ = init_ranks("cpu")
    torch.manual_seed(5)
    for recipe in ("delayed", "current", "blockwise"):
        check_masters(recipe, 160, 144, rank)
        check_masters(recipe, 48, 64, rank)
    check_cross_entropy(rank)
    for mode in ("column", "row"):
        for sequence_parallel in (False, True):
            for delayed in (False, True):
                check_parallel_mode(mode, sequence_parallel, delayed)
    check_sequence_parallel()
    check_group_of_all()
    leave_ranks()


if __name__ == "__main__":
    main()
