"""Weight gradients of te.GroupedLinear: added to main_grad wherever it lies, or computed later."""

import pytest
import torch

import te_lite as te
from te_lite.functional import grouped
from te_lite.testing.numerics import assert_close_to_oracle
from tests.modules.test_grouped_linear import BF16, GROUPS, RECIPES, SIZES, K, N, data, equal, made, step
from tests.modules.test_grouped_mm import exact
from tests.ops.paths import DEVICES
from tests.ops.test_grouped_each import watched


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("single", [False, True])
def test_main_grad(single, recipe, device):
    """Added in fp32 to what is there; of buffers in either order, and of any."""
    x, dy = data()
    want = torch.stack(step(made(device, bias=False), x, dy, recipe=recipe)[2:])
    for way in ("one buffer", "reversed", "apart"):
        module = made(device, bias=False, fuse_wgrad_accumulation=True, single_grouped_weight=single)
        start = torch.randn(GROUPS, N, K)
        block = (start.flip(0) if way == "reversed" else start).clone().to(device)
        grads = list(block.unbind())[:: -1 if way == "reversed" else 1]
        if way == "apart":
            grads = [grad.clone() for grad in grads]
        if single:
            module.weight.main_grad = torch.stack(grads)
        else:
            for weight, grad in zip(module.parameters(), grads, strict=True):
                weight.main_grad = grad
        for weight in module.parameters():
            weight.grad_added_to_main_grad = False
        got = step(module, x, dy, recipe=recipe)
        assert all(weight.grad_added_to_main_grad for weight in module.parameters())
        assert len(got) == 2 + len(list(module.parameters())), "a dummy for Megatron's hooks"
        main = torch.stack([p.main_grad for p in module.parameters()]).view(GROUPS, N, K).cpu()
        bound = 2.0**-8 * want.abs() + 2.0**-20 * (start.abs() + 1)  # want is rounded to bf16, main_grad is not
        assert ((main - start - want).abs() <= bound).all(), way
    with pytest.raises(RuntimeError, match="main_grad"):
        step(made(device, fuse_wgrad_accumulation=True), x, dy, recipe=recipe)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", ["one buffer", "apart", "some", "single", "late"])
def test_the_first_gradient_replaces(way, recipe, device):
    """In the first micro-batch; the second one's is added, and the bits are those of a sum that starts at zero. some:
    the first two weights say it by overwrite_main_grad, the others hold zeros."""
    x, dy = data()
    grads = []
    for start in (0.0, float("nan")):
        late, single = way == "late", way == "single"
        options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": late, "single_grouped_weight": single}
        module = made(device, bias=False, **options)
        block = torch.full((GROUPS, N, K), start, device=device)
        for i, weight in enumerate(module.parameters()):
            weight.main_grad = block if single else block[i].clone() if way == "apart" else block[i]
            if way == "some" and i > 1:
                weight.main_grad.zero_()
            weight.overwrite_main_grad = way == "some" and i < 2
        for first in (True, False):
            leaf = x.to(device).clone().requires_grad_()
            with te.autocast(enabled=recipe != "bf16", recipe=None if recipe == "bf16" else recipe):
                y = module(leaf, SIZES, is_first_microbatch=first)
            for weight in module.parameters() if way == "some" or start == 0.0 else ():
                weight.main_grad_is_old = False  # nothing is replaced, or what overwrite_main_grad says
            y.backward(dy.to(device))
            for weight in module.parameters():
                weight.overwrite_main_grad = False
        for _ in range(2 * late):
            module.backward_dw()
        grads.append([weight.main_grad.cpu() for weight in module.parameters()])
    want, got = grads
    assert torch.stack(want).view(GROUPS, N, K)[0].any()
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=2.0**-16, atol=2.0**-16 * float(a.abs().max()))


@pytest.mark.parametrize("shared", ["weight", "main_grad"])
@pytest.mark.parametrize("overwrites", [False, True])
def test_experts_that_share(shared, overwrites):
    """A weight, or where its gradient goes: the sum of both is there, of which nothing replaces the other."""
    x, dy = data()
    sizes, grads = (50, 40, 46, 0), []
    for start in (0.0, float("nan")):
        module = made(bias=False, fuse_wgrad_accumulation=True)
        if shared == "weight":
            module.weight1 = module.weight0
        for weight in module.parameters():
            weight.main_grad = torch.full((N, K), start)
            weight.overwrite_main_grad = overwrites and start != 0.0
        module.weight1.main_grad = module.weight0.main_grad
        step(module, x, dy, sizes, "current", is_first_microbatch=None if overwrites or start == 0.0 else True)
        grads.append(module.weight0.main_grad)
    assert grads[0].any() and torch.equal(*grads)


@pytest.mark.parametrize("fused", [False, True])
def test_sizes_that_the_host_knows_reach_the_products(fused, monkeypatch):
    """Of a list and of a tensor on the CPU; te.scaled_grouped_mm, whose offs may be anywhere, knows none."""
    known = []

    def watch(name: str) -> None:
        inner = getattr(grouped, name)
        at = -2 if name == "group_wgrad_accumulate_" else -1  # there whether it adds comes last
        monkeypatch.setattr(grouped, name, lambda *given: (known.append((name, given[at])), inner(*given))[1])

    for name in ("group_product", "group_wgrad", "group_wgrad_accumulate_"):
        watch(name)
    x, dy = data()
    module = made(bias=False, fuse_wgrad_accumulation=fused)
    for weight in module.parameters():
        weight.main_grad = torch.zeros(N, K)
    names = ["group_product", "group_product", "group_wgrad_accumulate_" if fused else "group_wgrad"]
    for given in (list(SIZES), SIZES, torch.tensor(SIZES)):
        known.clear()
        step(module, x, dy, given, "current")
        assert known == [(name, list(SIZES)) for name in names]
    known.clear()
    leaf, w = x.clone().requires_grad_(), torch.randn(GROUPS, K, N, dtype=BF16).requires_grad_()
    te.scaled_grouped_mm(leaf, w, torch.tensor(SIZES).cumsum(0).int()).backward(dy)
    assert [sizes for _, sizes in known] == [None] * 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", ["bf16", "current", "delayed", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
)
def test_one_expert_after_the_other(recipe, monkeypatch):
    """Where the host knows the sizes; of a tensor on the GPU all at once. Both are the numbers of the loop in fp64."""
    called = watched(monkeypatch)
    x, dy = data()
    low = step(made("cuda", bias=False), x, dy, recipe=recipe)
    each = ["product_each", "product_each", "wgrad_each"]
    for splits, ways in ((SIZES, each), (torch.tensor(SIZES, device="cuda"), [])):
        module = made("cuda", bias=False, fuse_wgrad_accumulation=True)
        for weight in module.parameters():
            weight.main_grad = torch.zeros(N, K, device="cuda")
        called.clear()
        y, dx = step(module, x, dy, splits, recipe)[:2]
        assert called == ways
        w = torch.stack([weight.detach().cpu() for weight in module.parameters()])
        truth = exact(x, w, torch.zeros(GROUPS, N, dtype=BF16), dy, SIZES)
        dw = torch.stack([weight.main_grad.cpu() for weight in module.parameters()])
        for name, a, b, c in zip(("y", "dx", "dw"), (y, dx, dw), truth, (*low[:2], torch.stack(low[2:])), strict=False):
            assert_close_to_oracle(name, a, b, c)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "mxfp8"])
@pytest.mark.parametrize("fused", [False, True])
def test_weight_gradients_that_wait(fused, recipe):
    x, dy = data()
    want = step(made(bias=False), x, dy, recipe=recipe)
    module = made(bias=False, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    if fused:
        for weight in module.parameters():
            weight.main_grad = torch.zeros(N, K)
    called = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    x_own, dy_own = x.clone(), dy.clone()
    leaf = x_own.requires_grad_()
    with te.autocast(recipe=recipe):
        y = module(leaf, SIZES)
    y.backward(dy_own)
    with torch.no_grad():
        x_own.zero_()
        dy_own.zero_()
    assert all(weight.grad is None for weight in module.parameters()) and module.need_backward_dw()
    module.backward_dw()
    grads = [weight.main_grad.to(BF16) if fused else weight.grad for weight in module.parameters()]
    equal(grads, want[2:])
    assert called == [1]
    with pytest.raises(RuntimeError, match="no stored weight gradient"):
        module.backward_dw()


def test_fp8_padding():
    """As Transformer Engine's callers use it; the results are those without."""
    x, dy = data()
    module = made(bias=False)
    want = step(module, x, dy, recipe="rowwise")
    for align, sizes in ((None, (16, 0, 144, 16)), (128, (128, 0, 256, 128))):
        pad, unpad = te.Fp8Padding(GROUPS, align), te.Fp8Unpadding(GROUPS, align)
        leaf = x.clone().requires_grad_()
        padded, wide = pad(leaf, SIZES)
        assert tuple(wide) == sizes and padded.shape[0] == sum(sizes)
        module.zero_grad()
        with te.autocast(recipe="rowwise"):
            y = unpad(module(padded, wide), SIZES)
        y.backward(dy)
        equal([y.detach(), leaf.grad, *(p.grad for p in module.parameters())], want)
        assert pad(padded, wide) == (padded, wide) and unpad(padded, wide) is padded
    with te.autocast(recipe="mxfp8"):
        assert te.Fp8Padding(2)(x, (6, 130))[1] == [32, 160]
    with pytest.raises(ValueError, match="together 135"):
        te.Fp8Padding(GROUPS)(x, (5, 0, 130, 0))
