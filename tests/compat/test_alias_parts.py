"""What stands behind names of Transformer Engine that te_lite has in compat/ alone."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import te_lite as te
from te_lite.compat.alias import (
    contexts,
    cross_entropy,
    distributed,
    optimizers,
    permutation,
    recipes,
    router,
    support,
    tensors,
)
from te_lite.compat.alias.manager import FP8GlobalStateManager
from te_lite.recipe import Format
from te_lite.testing.distributed import launch


class OtherConstructor(recipes.DelayedScaling):
    """As Megatron-core derives its own."""

    def __init__(self, config: int, fp8_format: Format) -> None:
        super().__init__(margin=config, fp8_format=fp8_format, params_dtype=torch.float32, device="cpu",
                         override_linear_precision=(False, False, False), interval=1)  # fmt: skip


def linear(name: str | None = None) -> te.Linear:
    return te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cpu", name=name)


def test_recipes_are_tolerant():
    made = OtherConstructor(2, Format.E4M3)
    assert (made.margin, made.fp8_format, made.delayed()) == (2, Format.E4M3, True) and "margin=2" in str(made)
    assert isinstance(made, te.recipe.DelayedScaling) and not made.nvfp4()
    assert not te.recipe.DelayedScaling().nvfp4()  # of an autocast that te_lite's own recipe opened
    assert recipes.MXFP8BlockScaling(fp8_format=Format.HYBRID).fp8_format is Format.HYBRID
    assert recipes.Float8BlockScaling(unknown=3).float8_block_scaling()
    for kind in (recipes.MXFP8BlockScaling, recipes.Float8BlockScaling):
        with pytest.raises(ValueError, match="E5M2"):
            kind(fp8_format=Format.E5M2)
    with pytest.raises(NotImplementedError, match="override_linear_precision"):
        recipes.DelayedScaling(override_linear_precision=(False, False, True))
    assert recipes.Float8CurrentScaling(backward_override=None).float8_current_scaling()
    with pytest.raises(NotImplementedError, match="backward_override='dequantized'"):
        recipes.Float8CurrentScaling(backward_override="dequantized")
    with pytest.raises(ValueError, match="fp8_dpa"):
        recipes.Float8CurrentScaling(fp8_dpa=True)
    made.margin = "x"
    with pytest.raises(TypeError, match="margin"):
        contexts.fp8_autocast(True, fp8_recipe=made)


def test_an_autocast_follows_the_recipe_as_it_was_when_it_was_made():
    """Plans are kept by recipe, so a field that is assigned must be seen, and seen by the next autocast alone."""
    layer, x = linear("followed"), torch.randn(16, 32, dtype=torch.bfloat16)
    recipe = recipes.Float8CurrentScaling(fp8_format=Format.E4M3)

    def formats() -> set[str]:
        with contexts.autocast(recipe=recipe):
            layer(x).sum().backward()
        return {row["operands"] for row in te.overlap_report() if row["module"] == "followed"}

    before = formats()
    context = contexts.autocast(recipe=recipe)
    recipe.fp8_format = Format.HYBRID
    assert before == {"e4m3 x e4m3"} and "e5m2 x e4m3" in formats()
    with context:
        layer(x)
    assert {row["operands"] for row in te.overlap_report() if row["module"] == "followed"} == before


def test_support():
    assert support.is_fp8_available() and support.is_mxfp8_available(return_reason=True) == (True, "")
    assert support.check_nvfp4_support() == (False, "te_lite has no fp4") and support.is_bf16_available()
    assert isinstance(support.get_default_recipe(), te.recipe.Recipe)
    hybrid, e4m3 = recipes.DelayedScaling(fp8_format=Format.HYBRID), recipes.MXFP8BlockScaling()
    dtypes = [support.get_fp8_torch_dtype(recipe, way) for recipe in (hybrid, e4m3) for way in (True, False)]
    assert dtypes == [tensors.DType.kFloat8E4M3, tensors.DType.kFloat8E5M2] + [tensors.DType.kFloat8E4M3] * 2
    assert support.get_fp8_max(hybrid) == 448 and support.get_fp8_max(hybrid, fprop_tensor=False) == 57344
    assert [support.get_align_size_for_quantization(recipe) for recipe in (hybrid, e4m3)] == [16, 32]


def test_a_recipe_that_does_not_run_here(monkeypatch):
    support.check_recipe_support(recipes.Float8CurrentScaling())
    monkeypatch.setattr(support, "_check_recipe", lambda recipe: (False, "a reason"))
    with pytest.raises(RuntimeError, match="'current' does not run here: a reason"):
        support.check_recipe_support(recipes.Float8CurrentScaling())


def test_isinstance_by_format_and_dtypes():
    one = te.Float8CurrentScalingQuantizer(tensors.DType.kFloat8E4M3, "cpu")(torch.randn(32, 32))
    mx = te.MXFP8Quantizer(tensors.TE_DType[torch.float8_e4m3fn])(torch.randn(32, 32))
    blocks = te.Float8BlockQuantizer(tensors.DType.kFloat8E4M3)(torch.randn(128, 128))
    kinds = tensors.Float8Tensor, tensors.MXFP8Tensor, tensors.Float8BlockwiseQTensor
    assert [[isinstance(x, kind) for kind in kinds] for x in (one, mx, blocks, torch.ones(2))] == [
        [True, False, False], [False, True, False], [False, False, True], [False, False, False],
    ]  # fmt: skip
    with pytest.raises(NotImplementedError, match="MXFP8Tensor"):
        tensors.MXFP8Tensor(shape=(2, 2))
    with pytest.raises(NotImplementedError, match="mxfp8"):
        tensors.replace_raw_data(mx, torch.empty(1024, dtype=torch.uint8))
    with pytest.raises(TypeError, match="Tensor"):
        tensors.replace_raw_data(torch.ones(4), torch.empty(4, dtype=torch.uint8))


def test_modules_have_the_name_of_their_userbuffer():
    """Megatron-core reads it where it takes a fused module apart."""
    import te_lite.compat.alias.graph  # noqa: F401  # it adds the attribute

    assert te.Linear(32, 32, device="cpu", ub_name="proj").ub_name == "proj" and linear().ub_name is None


def test_a_hook_is_taken_by_either_name():
    import te_lite.compat.alias.modules  # noqa: F401  # it adds Transformer Engine's

    module, calls = te.Linear(32, 32, device="cpu", delay_wgrad_compute=True), []
    for name in ("wgrad_accumulation_and_reduce_hook", "hook"):
        module.register_wgrad_accumulation_and_reduce_hooks(**{name: lambda: calls.append(1)})
    module(torch.randn(4, 32)).sum().backward()
    module.backward_dw()
    assert calls == [1, 1]


def test_sharded_masters_and_vocabularies_and_what_is_set():
    launch(Path(__file__).parent / "ranks_alias.py", ranks=2, timeout=120)


def test_checkpoint_in_its_old_order():
    w = torch.randn(8, 8, requires_grad=True)
    calls = []

    def function(a, b):
        calls.append(1)
        return (a @ w * b).sum()

    x = torch.randn(4, 8, requires_grad=True)
    tracker = te.CudaRNGStatesTracker()
    for args in ((False, lambda: tracker, None, x, 2.0), (False, None, None, x, 2.0), (x, 2.0)):
        calls.clear()
        w.grad = None
        distributed.checkpoint(function, *args).backward()
        assert len(calls) == 2
        torch.testing.assert_close(w.grad, 2.0 * x.detach().sum(0)[:, None].expand(8, 8))
    with pytest.raises(ValueError, match="distribute_saved_activations=True got tp_group=None"):
        distributed.checkpoint(function, True, None, None, x, 2.0)
    flags = distributed.is_fp8_activation_recompute_enabled, distributed.in_fp8_activation_recompute_phase
    with distributed.activation_recompute_forward(True, recompute_phase=True):
        assert all(flag() for flag in flags)
    assert not any(flag() for flag in flags)


@pytest.mark.parametrize("function, pre, biased, groups", [
    ("softmax", True, False, None), ("softmax", False, False, None), ("sigmoid", False, True, None),
    ("sigmoid", False, True, 4), ("sqrtsoftplus", False, False, None), ("softmax", True, False, 4),
])  # fmt: skip
def test_router(function, pre, biased, groups):
    """Token by token in Python, in fp64; gradients by torch's own derivative of that."""
    tokens, experts, topk, scale = 6, 8, 3 if not groups else 4, 1.5
    logits = torch.randn(tokens, experts, requires_grad=True)
    bias = torch.randn(experts) if biased else None
    limits = (groups, 2) if groups else (None, None)
    got, chosen = router.fused_topk_with_score_function(logits, topk, pre, *limits, scale, function, bias)
    x = logits.detach().double().requires_grad_()
    rows = []
    for row in x:
        scores = {"softmax": row.softmax(0) if pre else row, "sigmoid": row.sigmoid(),
                  "sqrtsoftplus": F.softplus(row).sqrt()}[function]  # fmt: skip
        ranking = (scores if bias is None else scores + bias.double()).detach().tolist()
        allowed = set(range(experts))
        if groups:
            size = experts // groups
            worth = [sum(sorted(ranking[g * size : g * size + size])[-(topk // 2) :]) for g in range(groups)]
            best = sorted(range(groups), key=worth.__getitem__)[-2:]
            allowed = {e for e in allowed if e // size in best}
        picked = sorted(allowed, key=ranking.__getitem__)[-topk:]
        values = scores[picked]
        if function != "softmax":
            values = values / values.sum()
        elif not pre:
            values = values.softmax(0)
        rows.append(torch.zeros(experts, dtype=torch.float64).index_put((torch.tensor(picked),), values * scale))
    want = torch.stack(rows)
    assert torch.equal(chosen, want != 0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    weight = torch.randn(tokens, experts)
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    torch.testing.assert_close(logits.grad.double(), x.grad, rtol=1e-4, atol=1e-6)
    routing, scores = router.fused_compute_score_for_moe_aux_loss(logits, topk, function)
    assert bool((routing.sum(-1) == topk).all())
    torch.testing.assert_close(scores.sum(-1), torch.ones(tokens))
    loss = router.fused_moe_aux_loss(scores, torch.full((experts,), 2), tokens, experts, topk, 0.1)
    torch.testing.assert_close(loss, torch.tensor(0.1 * experts / (topk * tokens**2) * tokens * 2))


def test_permutation():
    tokens, experts, hidden = 7, 4, 5
    x = torch.randn(tokens, hidden, requires_grad=True)
    routing = torch.rand(tokens, experts) < 0.4
    routing[0] = False
    probs = torch.randn(tokens, experts, requires_grad=True)
    rows, row_probs, row_map = permutation.moe_permute_with_probs(x, probs, routing)
    pairs = [(t, e) for e in range(experts) for t in range(tokens) if routing[t, e]]
    assert torch.equal(rows, torch.stack([x[t] for t, _ in pairs]))
    assert torch.equal(row_probs, torch.stack([probs[t, e] for t, e in pairs]))
    assert torch.equal(permutation.moe_permute(x, routing, num_out_tokens=len(pairs))[0], rows)
    back = permutation.moe_unpermute(rows, row_map, probs, restore_shape=x.shape)
    torch.testing.assert_close(back, x * (probs * routing).sum(-1, keepdim=True))
    assert torch.equal(permutation.moe_unpermute(rows, row_map, probs), back)
    back.sum().backward()
    torch.testing.assert_close(x.grad, (probs * routing).sum(-1, keepdim=True).expand_as(x))
    torch.testing.assert_close(probs.grad, routing * x.detach().sum(-1, keepdim=True))
    sizes, order = torch.tensor([2, 0, 3, 2]), torch.tensor([2, 3, 0, 1])
    assert torch.equal(permutation.moe_sort_chunks_by_index(x, sizes, order), x[[2, 3, 4, 5, 6, 0, 1]])
    both = permutation.moe_sort_chunks_by_index_with_probs(x, probs[:, 0], sizes, order)
    assert torch.equal(both[0], x[[2, 3, 4, 5, 6, 0, 1]]) and torch.equal(both[1], probs[[2, 3, 4, 5, 6, 0, 1], 0])
    with pytest.raises(ValueError, match="'mask' or 'index'"):
        permutation.moe_permute(x, routing, map_type="indices")


@pytest.mark.parametrize("topk", [1, 2])
def test_permutation_by_index(topk):
    """As by a mask, but that probabilities stand where the index has their experts."""
    tokens, experts, hidden = 7, 4, 5
    x = torch.randn(tokens, hidden, requires_grad=True)
    index = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)]).int()
    mask = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, index.long(), True)
    probs = torch.randn(tokens, topk, requires_grad=True)
    rows, row_map = permutation.moe_permute(x, index, max_token_num=tokens, map_type="index")
    assert torch.equal(rows, permutation.moe_permute(x, mask)[0])
    back = permutation.moe_unpermute(rows, row_map, probs, map_type="index")
    torch.testing.assert_close(back, x * probs.sum(-1, keepdim=True))
    assert torch.equal(permutation.moe_unpermute(rows, row_map, map_type="index", probs=probs), back)
    back.sum().backward()
    torch.testing.assert_close(x.grad, probs.sum(-1, keepdim=True).expand_as(x))
    torch.testing.assert_close(probs.grad, x.detach().sum(-1, keepdim=True).expand_as(probs))
    kept = permutation.moe_permute(x, index, 4, map_type="index")
    assert torch.equal(kept[0], rows[:4]) and permutation.moe_unpermute(*kept, probs, map_type="index").shape == x.shape
    if topk == 1:
        assert torch.equal(permutation.moe_unpermute(rows, row_map, map_type="index"), x)
    else:
        with pytest.raises(ValueError, match="restore_shape"):
            permutation.moe_unpermute(rows, row_map, map_type="index")
    for wrong in ((index[:3],), (mask,), (index, tokens * topk + 1)):
        with pytest.raises(ValueError, match=r"\[tokens, topk\].*map_type='mask'"):
            permutation.moe_permute(x, *wrong, map_type="index")


def test_rows_for_which_the_routing_map_has_nothing():
    """A token that is routed nowhere, and more rows than pairs: they are 0, count for nobody and have no gradient."""
    x = torch.randn(4, 3, requires_grad=True)
    routing = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    rows, row_map = permutation.moe_permute(x, routing, num_out_tokens=8)
    assert rows.shape == (8, 3) and not rows[5:].any() and bool((row_map[0, 5:] == -1).all())
    back = permutation.moe_unpermute(rows, row_map, restore_shape=x.shape)
    torch.testing.assert_close(back, x * routing.sum(1, keepdim=True))
    back.sum().backward()
    torch.testing.assert_close(x.grad, routing.sum(1, keepdim=True).float().expand_as(x))
    garbage = torch.where((row_map[0] < 0)[:, None], torch.nan, rows.detach())
    merging = torch.randn(4, 3, requires_grad=True)
    merged = permutation.moe_unpermute(garbage, row_map, merging)
    merged.sum().backward()
    assert merged.isfinite().all()
    torch.testing.assert_close(merging.grad, routing * x.detach().sum(1, keepdim=True))
    probs = torch.where(routing, torch.rand(4, 3) + 0.1, 0.0)
    probs[0, 1] = 0.0  # a slot by which the routing map is padded
    probs.requires_grad_()
    rows, row_probs, _ = permutation.moe_permute_with_probs(x, probs, routing, num_out_tokens=8)
    assert [bool(row.any()) for row in rows] == [p > 0 for p in row_probs.tolist()] and not row_probs[5:].any()
    (row_probs * torch.arange(1.0, 9.0)).sum().backward()
    want = torch.tensor([[1.0, 3.0, 0.0], [0.0, 4.0, 5.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(probs.grad, want)
    with pytest.raises(ValueError, match="routing_map of 3"):
        permutation.moe_permute(x, routing[:3], 3)
    with pytest.raises(ValueError, match="num_out_tokens=13"):
        permutation.moe_permute(x, routing, 13)


def test_cross_entropy_of_masked_logits_and_of_unknown_labels():
    x = torch.randn(4, 1, 8)
    x[..., 6:] = -torch.inf  # a vocabulary that is padded
    x.requires_grad_()
    target = torch.tensor([0, 1, 2, 3])[:, None]
    loss = cross_entropy.parallel_cross_entropy(x, target)
    want = torch.nn.functional.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view(4, 1)
    torch.testing.assert_close(loss, want)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), x)[0])
    losses = cross_entropy.parallel_cross_entropy(
        torch.randn(3, 1, 8), torch.tensor([-1, 8, 7])[:, None], ignore_idx=-9
    )
    assert losses[:2].isinf().all() and losses[2].isfinite()
    for older in (
        cross_entropy.parallel_cross_entropy(_input=x, target=target),
        cross_entropy.parallel_cross_entropy(None, target, _input=x),
    ):
        assert torch.equal(older, loss)
    with pytest.raises(TypeError, match="pass inp and target"):
        cross_entropy.parallel_cross_entropy(target=target)


def test_padding():
    sizes = [3, 0, 16, 40]
    x = torch.randn(sum(sizes), 4, requires_grad=True)
    for recipe, padded in (("bf16", [16, 0, 16, 48]), ("mxfp8", [32, 0, 32, 64])):
        with te.autocast(recipe=recipe):
            rows, now = te.Fp8Padding(4)(x, sizes)
            back = te.Fp8Unpadding(4)(rows, sizes)
        assert now == padded and rows.shape == (sum(padded), 4) and torch.equal(back, x)
        assert torch.equal(rows[:3], x[:3]) and not rows[3 : padded[0]].any()
        assert torch.equal(torch.autograd.grad(rows.sum(), x)[0], torch.ones_like(x))
    assert te.Fp8Padding(2, align_size=8)(x[:16], [8, 8])[0].data_ptr() == x.data_ptr()
    with pytest.raises(ValueError, match="3 groups"):
        te.Fp8Padding(3)(x, sizes)


def test_multi_tensor():
    flag = torch.zeros(1, dtype=torch.int)
    sources = [torch.randn(3), torch.randn(2, 2)]
    targets = [torch.empty(3, dtype=torch.bfloat16), torch.empty(2, 2)]
    apply = optimizers.multi_tensor_applier
    apply(optimizers.multi_tensor_scale, flag, [sources, targets], 0.5)
    assert flag.item() == 0 and torch.equal(targets[0], (sources[0] * 0.5).bfloat16())
    norm, each = apply(optimizers.multi_tensor_l2norm, flag, [sources], True)
    torch.testing.assert_close(norm, torch.cat([s.flatten() for s in sources]).norm().view(1))
    torch.testing.assert_close(each, torch.stack([s.norm() for s in sources]))
    for bad in (torch.inf, torch.nan):
        sources[1][0, 0] = bad
        apply(optimizers.multi_tensor_scale, flag.zero_(), [sources, targets], 1.0)
        assert flag.item() == 1


def test_what_is_not_there_is_named() -> None:
    for name in ("kFloat4E2M1", "kInt16"):
        assert not hasattr(tensors.DType, name)
        with pytest.raises(NotImplementedError, match=f"DType.{name}"):
            getattr(tensors.DType, name)
    with pytest.warns(UserWarning, match="shards nothing that forward keeps"):
        distributed.prepare_te_modules_for_fsdp(torch.nn.Linear(2, 2))
    te.Float8BlockQuantizer(torch.float8_e4m3fn, all_gather_usage=False)
    with pytest.raises(NotImplementedError, match="all_gather_usage"):
        te.Float8BlockQuantizer(torch.float8_e4m3fn, all_gather_usage=True)
    FP8GlobalStateManager.set_autocast_state(fp8_state=FP8GlobalStateManager.get_autocast_state())
