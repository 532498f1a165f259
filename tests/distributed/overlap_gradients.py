"""Checks of overlapped modules that every rank runs: recomputation, and what becomes of weight gradients."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

import te_lite as te
from te_lite.functional import parallel
from te_lite.ops import cast
from te_lite.overlap.buffers import Gather
from te_lite.overlap.epilogues import Activate, ActivateGrad
from te_lite.quantize import per_tensor
from te_lite.testing.memory import bytes_kept
from te_lite.testing.numerics import assert_bitwise_equal
from tests.distributed.overlapping import (
    COLUMN,
    LAYERS,
    MLP,
    ROW,
    SMALL,
    Gathered,
    Pair,
    assert_same,
    begin,
    check_pass,
    in_eighths,
    pair_of,
    poison,
    rows_of,
    specified,
)
from tests.harness import under
from tests.reference import LINEAR


def checkpointed(device) -> None:
    """Recomputation through userbuffers gives the same bits, reentrant or not."""
    size = dist.get_world_size()
    group = begin(32 * size, 128, dist.group.WORLD, device)
    for recipe in ("bf16", "delayed", "mxfp8"):
        for which, method in ((COLUMN, "bulk"), (ROW, "pipeline"), (MLP, "bulk")):
            for reentrant in (True, False):
                pair = pair_of(which, recipe, device, method)
                for step in range(2):
                    batch = pair.batch(step, 16)
                    x, dy = pair.inputs(batch)
                    with under(recipe):
                        out = te.checkpoint(pair.module, x, use_reentrant=reentrant)
                    poison([group])
                    got = pair.backward((x, out, dy))
                    assert_same(f"{pair.label} reentrant {reentrant}", got, pair.expected(batch))


def weight_gradients(device) -> None:
    """Put off, accumulated into main_grad, or not wanted: the same numbers, nothing read from a slot that is gone."""
    size = dist.get_world_size()
    group = begin(32 * size, 128, dist.group.WORLD, device)
    for recipe in ("bf16", "current", "mxfp8", "rowwise_with_gw_hp"):
        for which in LAYERS:
            for method in ("bulk", "pipeline"):
                plain = pair_of(which, recipe, device, method)
                batch = plain.batch(5, 32)
                want = plain.expected(batch)
                late = pair_of(which, recipe, device, method, delay_wgrad_compute=True)
                call = late.forward(batch)
                call[1].backward(call[2])
                poison([group])
                check_pass(plain, 6, 16)  # other data in the same slots
                late.module.backward_dw()
                grads = {name: p.grad for name, p in late.module.named_parameters() if p.grad is not None}
                for name, grad in grads.items():
                    assert_bitwise_equal(f"{late.label} put off: {name}", grad, want[name])
                assert set(grads) == set(want) - {"out", "dx"}
                frozen_weights(plain, batch, want)
                main_grads(which, recipe, method, batch, want, device)


def frozen_weights(pair: Pair, batch, want) -> None:
    """No weight gradient, and no gather for one; the rest stays the same."""
    for p in pair.module.parameters():
        p.requires_grad_(False)
    with Gathered() as gathered:
        call = pair.forward(batch)
        before = gathered.compared
        got = pair.backward(call)
    if pair.spec.mode == "column" and pair.spec.kind == LINEAR:
        assert gathered.compared == before, "x was gathered for a weight gradient that nobody wants"
    # Without wgrad nothing hides a reduce-scatter, which Collective then sums: dx of a column-parallel linear.
    assert set(got) == {"out", "dx"}
    assert_bitwise_equal(f"{pair.label} frozen: out", got["out"], want["out"])
    if pair.spec.mode == "row":
        assert_bitwise_equal(f"{pair.label} frozen: dx", got["dx"], want["dx"])


def main_grads(which, recipe, method, batch, want, device) -> None:
    """fuse_wgrad_accumulation: added to what is there, in fp32."""
    fused = pair_of(which, recipe, device, method, fuse_wgrad_accumulation=True)
    weights = {name: p for name, p in fused.module.named_parameters() if p.dim() == 2}
    for p in weights.values():
        p.main_grad = torch.ones(p.shape, dtype=torch.float32, device=device)
    got = fused.backward(fused.forward(batch))
    for name, p in weights.items():
        assert name not in got
        error = (p.main_grad - 1 - want[name].float()).abs().max()
        assert error <= 2.0**-7 * want[name].float().abs().max(), f"{fused.label} main_grad of {name}: off by {error}"


def ended_between(device) -> None:
    """destroy_ub() between a forward and its backward: that backward is Collective's, and the memory has gone."""
    size = dist.get_world_size()
    for which in LAYERS:
        group = begin(32 * size, 128, dist.group.WORLD, device)
        pair = pair_of(which, "bf16", device)
        batch = pair.batch(3, 16)
        call = pair.forward(batch)
        te.destroy_ub()
        kept = group.arena._memory
        assert not kept, "the module's plan keeps the userbuffers' memory"
        got, want = pair.backward(call), pair.expected(batch)
        for name, value in want.items():
            error = (got[name].float() - value.float()).abs().max()
            assert error <= 2.0**-6 * value.float().abs().max(), f"{pair.label} {name}: off by {error}"
        reasons = [row["reason"] for gemm, row in rows_of(pair).items() if "fprop" not in gemm and row["sent"]]
        assert any("destroy_ub() has ended" in reason for reason in reasons), reasons


def gradients_travel_by_columns_too(device) -> None:
    """As where dgrad is long enough to hide it: dy of a row-parallel linear is gathered a second time, transposed."""
    size, seen = dist.get_world_size(), []
    begin(32 * size, 128, dist.group.WORLD, device)
    init = Gather.__init__

    def watched(gather: Gather, group, q, layout, *, own: bool, **more) -> None:
        seen.append((layout, own))
        init(gather, group, q, layout, own=own, **more)

    enough = mock.patch.multiple(parallel, COLUMNS_HIDE=1, COLUMNS_FROM=1)
    with enough, mock.patch.object(Gather, "__init__", watched):
        for recipe in ("bf16", "delayed", "current"):
            seen.clear()
            pair = pair_of(ROW, recipe, device, "ring_exchange")
            check_pass(pair, 4, 32)
            check_pass(pair, 5, 8)  # too few tokens for columns that lie side by side
            assert (("col", True) in seen) == (recipe != "bf16"), f"{recipe}: {seen}"


def fused_gemms_make_the_activation(device) -> None:
    """Fused, fc1's fprop leaves swiglu of h and fc2's dgrad the gradient of h; else each is a pass that reads h. With
    current scaling only its maxima are spared. No gradient where that of a bias needs its sums."""
    size, ran = dist.get_world_size(), []
    group = begin(64 * size, 128, dist.group.WORLD, device, "fused")
    sizes = replace(SMALL, ffn=128 * size)

    def watched(what: str, function):
        def seen(*args):
            ran.append(what)
            return function(*args)

        return seen

    def amax(source):  # a call of a source that has its maxima is no pass
        return (cast.amax if source.amax is not None else watched(f"amax of {source.kind}", cast.amax))(source)

    act = mock.patch.object(Activate, "__call__", watched("act", Activate.__call__))
    dact = mock.patch.object(ActivateGrad, "__call__", watched("dact", ActivateGrad.__call__))
    with act, dact, mock.patch.object(per_tensor, "amax", amax):
        for recipe, bias in itertools.product(("bf16", "delayed", "current"), (False, True)):
            pair = pair_of(MLP, recipe, device, "fused", sizes=sizes, bias=bias)
            for seed in range(2):
                ran.clear()
                batch = pair.batch(seed, 64)
                got = pair.backward(pair.forward(batch))
                expected = {"act", "dact"} if group.no_fused else {"dact"} if bias else set()
                expected |= {f"amax of {name}" for name in expected if recipe == "current"}
                assert expected == {"act", "dact", "amax of act", "amax of dact"} & set(ran), f"{pair.label}: {ran}"
                want = pair.expected(batch)
                # No bound of roundings, which tests/ops has bit for bit: a wrong scale, layout or rank is far off.
                for name in got:
                    error = (got[name].double() - want[name].double()).norm() / want[name].double().norm()
                    assert error < 2.0**-6, f"{pair.label} {name} off by {error}"


def fused_in_every_setting(device) -> None:
    """Recomputation and frozen weights change no bit of what is left; saved tensors that lie elsewhere hardly one, as
    cuBLAS has other kernels where addresses are not aligned."""
    group = begin(64 * dist.get_world_size(), 128, dist.group.WORLD, device, "fused")
    sizes = replace(SMALL, ffn=128 * dist.get_world_size())

    def elsewhere(t: torch.Tensor) -> torch.Tensor:
        """t at an address that is no multiple of 16."""
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t) if t.is_floating_point() and t.numel() else t

    for recipe in ("bf16", "delayed", "current"):
        settings = ("plain", "reentrant", "not reentrant", "elsewhere", "fc1_weight", "fc2_weight", "layer_norm_weight")
        pairs = {name: pair_of(MLP, recipe, device, "fused", sizes=sizes, bias=False) for name in settings}
        for step in range(3):  # scales of delayed scaling come from the steps before
            found = {}
            for name, pair in pairs.items():
                batch = pair.batch(step, 64)
                if name.endswith("_weight"):
                    getattr(pair.module, name).requires_grad_(False)
                x, dy = pair.inputs(batch)
                hooks = torch.autograd.graph.saved_tensors_hooks(elsewhere, lambda t: t)
                with under(recipe), hooks if name == "elsewhere" else nullcontext():
                    if "reentrant" in name:
                        out = te.checkpoint(pair.module, x, use_reentrant=name == "reentrant")
                    else:
                        out = pair.module(x)
                found[name] = pair.backward((x, out, dy))
                assert rows_of(pair)["fc2_dgrad"]["schedule"] == ("ring" if group.no_fused else "fused")
            for name, got in found.items():
                assert {"out", "dx"} <= set(got)
                for what, value in got.items():
                    label, want = f"{recipe}, {name}, step {step}: {what}", found["plain"][what]
                    if name != "elsewhere":
                        assert_bitwise_equal(label, value, want)
                    # Sums in another order, rounded to bf16, are at most one place, 2^-7, apart, and few of them are.
                    error = (value.double() - want.double()).norm() / want.double().norm()
                    assert error < 2.0**-8, f"{label} off by {error}"


def fp8_keeps_no_more_than_bf16(device) -> None:
    """Nothing, one weight or both stay transposed: as many as fp8 saves bytes of norm(x), of this rank's tokens, and of
    the activation, of all tokens."""
    size, features = dist.get_world_size(), 512
    begin(256 * size, features, dist.group.WORLD, device)
    weight = features * features // size  # bytes of either
    for m in (64, 128, 192, 256):
        kept = {}
        for recipe in ("bf16", "delayed", "current"):
            pair = pair_of(MLP, recipe, device, sizes=replace(SMALL, k=features, n=features, ffn=features), bias=False)
            x, out, dy = pair.forward(pair.batch(0, m))
            kept[recipe] = bytes_kept(out)
            pair.backward((x, out, dy))
        room = m * features + m * size * (features // size)
        left = room - min(room // weight, 2) * weight
        for recipe in ("delayed", "current"):
            saved = kept["bf16"] - kept[recipe]
            # Scales: cut from blocks of 4 KiB that count whole, of which those of two linears lie in four at most.
            assert abs(saved - left) <= 4 * 4096, f"{recipe}, {m} tokens a rank: {saved} bytes saved, not {left}"


def residuals(device) -> None:
    """Added in the reduction, before its only rounding; its gradient is the output's."""
    size = dist.get_world_size()
    for sequence_parallel in (True, False):  # Collective, which adds it to what was rounded
        options = {"tp_size": size, "tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
        torch.manual_seed(3)
        linear = te.Linear(128, 128, parallel_mode="row", params_dtype=torch.bfloat16, device=device, **options)
        m = 32 if sequence_parallel else 32 * size
        x, residual = (torch.randn(n, 128, device=device).bfloat16() for n in (32 * size, m))
        x = x[:, : 128 // size].contiguous()
        assert_bitwise_equal("collective", linear(x, residual=residual).cpu(), (linear(x) + residual).cpu())
    begin(256 * size, 128, dist.group.WORLD, device, "pipeline")
    for recipe, which, bias in itertools.product(("bf16", "current", "mxfp8"), (ROW, MLP), (True, False)):
        pair = pair_of(which, recipe, device, "pipeline", residual=True, bias=bias)
        for m in (40, 256, 0):  # 40: padded, or in high precision
            check_pass(pair, m, m)
    te.destroy_ub()
    # What fused kernels of a GPU add up has the bits of any other order where no product is rounded.
    for narrow in (False, True):
        cfgs = {"proj_fprop": {"method": "fused", "fp8_buf": narrow}}
        group = begin(256 * size, 128, dist.group.WORLD, device, "fused", ub_cfgs=cfgs)
        for m in (40, 256):
            pair = pair_of(ROW, "bf16", device, "fused", residual=True)
            with torch.no_grad():
                pair.module.weight.copy_(in_eighths(8 * pair.module.weight))
                pair.twin.weight.copy_(pair.module.weight)
            batch = tuple(in_eighths(t * scale) for t, scale in zip(pair.batch(m, m), (1, 10), strict=True))
            got = pair.forward(batch)[1].detach()
            assert rows_of(pair)["fprop"]["schedule"] == ("ring" if group.no_fused else "fused")
            with specified():
                want = pair.forward(batch, twin=True)[1].detach()
            if narrow and not group.no_fused and m == 256:  # added to the rounded sum
                assert not torch.equal(got, want)
                pair.residual = False
                want = pair.forward(batch)[1].detach() + pair.inputs(batch)[1].flip(0)
            assert_bitwise_equal(f"narrow {narrow}, {m} tokens", got.cpu(), want.cpu())
        te.destroy_ub()


GRADIENTS = [
    residuals,
    fp8_keeps_no_more_than_bf16,
    checkpointed,
    weight_gradients,
    ended_between,
    gradients_travel_by_columns_too,
    fused_gemms_make_the_activation,
    fused_in_every_setting,
]
