"""Checks of overlapped modules that every rank runs: sizes, shapes, capacity, what the report says."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist

import te_lite as te
from te_lite.functional import norm
from te_lite.modules.base import UNPLANNED
from te_lite.overlap import ring
from te_lite.overlap.buffers import Scatter
from te_lite.testing.numerics import assert_bitwise_equal
from te_lite.watch import all_reduce_max, group_max
from tests.distributed.overlapping import (
    COLUMN,
    LAYERS,
    MLP,
    NORMED,
    ROW,
    assert_same,
    begin,
    check_pass,
    pair_of,
    poison,
    rows_of,
    settle,
    specified,
)
from tests.distributed.run_groups import refuses
from tests.distributed.run_modules import shard_input
from tests.harness import RECIPES, leaf, under
from tests.overlap.threads import count_from


def token_counts_change(device) -> None:
    """Any number of tokens, also none and such as give unequal blocks, in turn, with evaluation in between."""
    size = dist.get_world_size()
    group = begin(64 * size, 128, dist.group.WORLD, device)
    for method, recipe in (("bulk", "bf16"), ("bulk", "mxfp8"), ("pipeline", "blockwise"), ("pipeline", "current")):
        pairs = [pair_of(which, recipe, device, method) for which in LAYERS]
        for step, m in enumerate((64, 3, 0, 1, 7, 33, 64, 0, 0, 16)):
            for pair in pairs:
                check_pass(pair, 10 * step, m)
                with torch.no_grad(), under(recipe):
                    x, _ = pair.batch(step, max(m // 4, 1))
                    x = shard_input(x, pair.spec, pair.rank).to(device)
                    out = pair.module(x)
                    with specified():
                        assert_bitwise_equal(f"{pair.label} evaluation", out, pair.twin(x))
    assert group.control.broken is None


def over_capacity(device) -> None:
    """Collective on every rank, with the reason; what fits again overlaps again; strict raises on every rank."""
    size = dist.get_world_size()
    begin(16 * size, 128, dist.group.WORLD, device)
    for method, recipe in (("bulk", "bf16"), ("pipeline", "current"), ("ring_exchange", "mxfp8")):
        for which in LAYERS:
            pair = pair_of(which, recipe, device, method)
            for step, (m, fits) in enumerate(((8, True), (160, False), (200, False), (8, True))):
                check_pass(pair, step, m)
                for name, row in rows_of(pair).items():
                    if name.endswith("wgrad") and not row["reason"]:
                        continue
                    asked = "initialize_ub was given the shape" in row["reason"]
                    assert asked != fits and (row["schedule"] == "collective") != fits, row
    pair = pair_of(COLUMN, "bf16", device)
    x = shard_input(pair.batch(1, 160)[0], pair.spec, pair.rank).to(device)

    def forward() -> None:
        with te.autocast(recipe=te.recipe.from_name("current"), strict=True):
            pair.module(x)

    refuses(RuntimeError, "overlap by 'ring_exchange' was asked for and does not happen", forward)
    with te.autocast(recipe=te.recipe.from_name("current"), strict=True):
        pair.module(x[:8])
    te.destroy_ub()
    begin(16 * size, 128, dist.group.WORLD, device, strict=True)
    pair = pair_of(ROW, "bf16", device)
    wide = shard_input(pair.batch(1, 160)[0], pair.spec, pair.rank).to(device)
    refuses(RuntimeError, "give it the largest [tokens, hidden]", lambda: pair.module(wide))
    check_pass(pair, 3, 8)
    # Refused in a backward alone, before anything has begun: the group goes on.
    pair.module._ub_flags["ub_overlap_rs"], pair.module._planned = False, UNPLANNED
    out = pair.module(wide)
    refuses(RuntimeError, "dgrad: overlap by 'ring_exchange' was asked for", lambda: out.sum().backward())
    pair.module._ub_flags["ub_overlap_rs"], pair.module._planned = True, UNPLANNED
    pair.module.zero_grad(set_to_none=True)
    check_pass(pair, 4, 8)


def flags_without_effect(device) -> None:
    """Flags without sequence parallelism, or without userbuffers for the group: named in the report, strict raises."""
    size = dist.get_world_size()
    common = {"tp_group": dist.group.WORLD, "tp_size": size, "device": device, "params_dtype": torch.bfloat16}
    flags = {"ub_overlap_ag": True, "ub_name": "qkv", "parallel_mode": "column"}
    refuses(
        RuntimeError,
        "before te.initialize_ub",
        lambda: te.Linear(64, 64 * size, sequence_parallel=True, **common, **flags),
    )
    begin(64 * size, 64, dist.group.WORLD, device)
    unnamed = {**common, **flags, "ub_name": None}
    refuses(ValueError, "ub_name", lambda: te.Linear(64, 64 * size, sequence_parallel=True, **unnamed))
    apart = te.Linear(64, 64 * size, **common, **flags)
    apart.name = "without sequence parallelism"
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=device)
    apart(x)
    (reason,) = {row["reason"] for row in te.overlap_report() if row["module"] == apart.name}
    assert "sequence parallelism is off" in reason
    module = te.Linear(64, 64 * size, sequence_parallel=True, **common, **flags)
    want = module(x).clone()
    te.destroy_ub()
    module.name = "after destroy_ub"
    assert_bitwise_equal("without userbuffers", module(x), want)
    (reason,) = {row["reason"] for row in te.overlap_report() if row["module"] == module.name}
    assert "call initialize_ub" in reason
    with torch.no_grad():
        refuses(RuntimeError, "does not happen", lambda: _strictly(module, x))


def _strictly(module, x):
    with te.autocast(recipe=te.recipe.from_name("current"), strict=True):
        module(x)


def number_formats_side_by_side(device) -> None:
    """bf16 first and last, fp8 between, one backward through all of them; the same with a twin."""
    size = dist.get_world_size()
    group = begin(32 * size, 128, dist.group.WORLD, device)
    recipes = ("bf16", "current", "mxfp8", "bf16")
    pairs = [pair_of(MLP, recipe, device, seed=i) for i, recipe in enumerate(recipes)]
    for step in range(3):
        batch = pairs[0].batch(step, 32)
        results = []
        for twin in (False, True):
            with specified() if twin else nullcontext():
                h = x = leaf(shard_input(batch[0], pairs[0].spec, pairs[0].rank), device)
                for pair in pairs:
                    with under(pair.recipe):
                        h = (pair.twin if twin else pair.module)(h)
                if not twin and step:
                    poison([group])
                h.backward(shard_input(batch[1], pairs[0].spec, pairs[0].rank).to(device))
            result = {"out": h.detach(), "dx": x.grad}
            for i, pair in enumerate(pairs):
                module = pair.twin if twin else pair.module
                result.update({f"{i} {name}": p.grad for name, p in module.named_parameters()})
                module.zero_grad(set_to_none=True)
            results.append(result)
        assert_same(f"step {step}", *results)


def more_dimensions(device) -> None:
    """[S, B, K], [B, S, K] and [2, B/2, S, K]: the result is that of [S * B, K], in the caller's shape, whatever the
    strides; the sequence is what is gathered and scattered."""
    size, sequences = dist.get_world_size(), 4
    begin(32 * size, 128, dist.group.WORLD, device)
    for recipe in (*RECIPES, "current_per_shard"):
        for which in LAYERS:
            for dim, leading in enumerate(((sequences,), (sequences,), (2, 2))):
                pair = pair_of(which, recipe, device)
                batch = pair.batch(1, 24)
                want = pair.expected(batch)
                x, dy = pair.inputs(batch)
                x = x.detach().view(-1, *leading, x.shape[-1]).movedim(0, dim)
                if not dim:
                    x = x.transpose(0, 1).contiguous().transpose(0, 1)  # batch first in memory
                x.requires_grad_()
                pair.module.sequence_dim = dim
                with under(recipe):
                    out = pair.module(x)
                dy = dy.view(-1, *leading, dy.shape[-1]).movedim(0, dim)
                assert out.shape == dy.shape and out._base is None and out.is_contiguous()
                out.backward(dy)
                got = {"out": out.detach().movedim(dim, 0).reshape(want["out"].shape)}
                got["dx"] = x.grad.movedim(dim, 0).reshape(want["dx"].shape)
                got.update({name: p.grad for name, p in pair.module.named_parameters() if p.grad is not None})
                assert_same(f"{pair.label}, the sequence in dimension {dim}", got, want)
    pair.module.sequence_dim = 2
    refuses(ValueError, "at least 4 dimensions", lambda: pair.module(x.detach().flatten(0, 1)))


def report_names_the_methods(device) -> None:
    """overlap_report() says for every GEMM what happened, and how much was sent."""
    size = dist.get_world_size()
    begin(32 * size, 128, dist.group.WORLD, device)
    expected = {
        COLUMN: {"fprop": "ring", "dgrad": "bulk", "wgrad": "bulk"},
        ROW: {"fprop": "pipeline", "dgrad": "ring", "wgrad": "external"},
    }
    for which, methods in expected.items():
        pair = pair_of(which, "mxfp8", device)
        check_pass(pair, 1, 32)
        for gemm, row in rows_of(pair).items():
            assert row["schedule"].startswith(methods[gemm]) and not row["reason"], row
            scatters = methods[gemm] == "pipeline" or (which is COLUMN and gemm == "wgrad")
            a_value = 2 if scatters else 1 + 1 / 32  # a bf16 sum, or E4M3 and a scale for each 32
            assert row["sent"] == 32 * 128 * a_value * (size - 1), row
    text = te.format_report(te.overlap_report())
    assert "pipeline" in text and "external" in text and "MiB" in text


def report_of_one_bulk(device) -> None:
    """With one of the two bulk flags the other exchange is Collective's: both are reported, and of this call alone."""
    size = dist.get_world_size()
    begin(32 * size, 128, dist.group.WORLD, device)
    for flag, methods in (
        ("ub_bulk_dgrad", {"dgrad": "bulk", "wgrad": "collective"}),
        ("ub_bulk_wgrad", {"dgrad": "collective", "wgrad": "bulk"}),
    ):
        module = te.Linear(
            128, 128, parallel_mode="column", tp_group=dist.group.WORLD, tp_size=size, sequence_parallel=True,
            ub_name="qkv", params_dtype=torch.bfloat16, device=device, name=flag, **{flag: True},
        )  # fmt: skip
        for wanted in (False, True):
            module.weight.requires_grad_(wanted)
            x = torch.ones(32, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
            module(x).sum().backward()
            rows = {row["gemm"]: row for row in te.overlap_report() if row["module"] == flag}
            got = {gemm: rows[gemm]["schedule"] for gemm in methods}
            assert got == (methods if wanted else {"dgrad": "collective", "wgrad": "local"}), rows
            assert bool(rows["dgrad"]["reason"]) == (flag == "ub_bulk_wgrad" and not wanted), rows


def epochs_wrap_around(device) -> None:
    """Flags that start at 2^32 - 3, and at 2^31 - 3, where a signed comparison would turn."""
    size = dist.get_world_size()
    for first in (2**32 - 3, 2**31 - 3):
        group = begin(32 * size, 128, dist.group.WORLD, device)
        count_from(first, group, *group._maxima.values())
        settle()
        group.executor.set_delays(dist.get_rank(), 500)
        pairs = [pair_of(which, "mxfp8", device) for which in LAYERS]
        for step in range(6):
            for pair in pairs:
                check_pass(pair, step, 8)
        te.destroy_ub()


def partials_in_pieces(device) -> None:
    """Reduce-scatters whose partials are pushed in one or two pieces, which takes shapes that fill a GPU: the size from
    which on that is done is lowered."""
    size, seen = dist.get_world_size(), []
    begin(256 * size, 128, dist.group.WORLD, device, "pipeline")
    push = Scatter.push

    def watched(scatter: Scatter, partial: torch.Tensor, destination: int, piece: int = 0) -> None:
        seen.append(scatter.cuts)
        push(scatter, partial, destination, piece)

    with mock.patch.object(ring, "PIECE_ELEMENTS", 1), mock.patch.object(Scatter, "push", watched):
        for recipe in RECIPES:
            for which in (ROW, COLUMN, MLP):
                seen.clear()
                check_pass(pair_of(which, recipe, device, "pipeline"), 1, 256)
                assert any(max(cuts) == 2 for cuts in seen), f"{which} {recipe}: nothing was cut"
            check_pass(pair_of(ROW, recipe, device, "pipeline"), 2, 64)  # whole again, in the same slots


def maxima_over_ranks(device) -> None:
    """Bit for bit those of an all-reduce, of any number of partials; on GPUs captured ones and others in turn."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = begin(16 * size, 128, dist.group.WORLD, device, cuda_graphs=device.type == "cuda")
    generator = torch.Generator().manual_seed(rank)
    graph, captured = None, None
    held, held_elementwise = (torch.zeros(7, device=device) for _ in range(2))
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = group_max("captured maxima", held, dist.group.WORLD)
            all_reduce_max("captured elementwise", held_elementwise, dist.group.WORLD)
    for i in range(60):
        partials = torch.rand(7 if i % 3 == 0 else 1 + 41 * i, generator=generator).to(device) * 2.0 ** (i - 30)
        if i % 10 == 5 and i % size == rank:
            partials[-1] = float("inf")
        want = partials.amax().view(1)
        dist.all_reduce(want, dist.ReduceOp.MAX)
        if i % 3 == 0 and graph is not None:
            held.copy_(partials)
            held_elementwise.copy_(partials)
            graph.replay()
            assert_bitwise_equal(f"captured maximum {i}", captured, want)
            each = partials.clone()
            dist.all_reduce(each, dist.ReduceOp.MAX)
            assert_bitwise_equal(f"captured elementwise {i}", held_elementwise, each)
        assert_bitwise_equal(f"maximum {i}", group_max("maxima", partials, dist.group.WORLD), want)
        values = partials[: 1 + 17 * i].clone()
        want = values.clone()
        dist.all_reduce(want, dist.ReduceOp.MAX)
        all_reduce_max("elementwise", values, dist.group.WORLD)
        assert_bitwise_equal(f"elementwise maxima {i}", values, want)
    cuda = device.type == "cuda"
    assert group.control.broken is None and bool(group._maxima) == cuda
    if cuda:
        eager, graphs = ([group._maxima[graph, each] for each in (False, True)] for graph in (False, True))
        assert [maximum._epoch for maximum in eager] == [60, 60], "not through userbuffers"
        assert [int(maximum._done[0]) for maximum in graphs] == [20, 20], "not through userbuffers"  # the device counts


def norms_sum_the_slots(device) -> None:
    """Behind a bulk reduce-scatter, and only there, a norm's backward reads the slots themselves; not where its output
    is returned, whose gradient is added before."""
    size, seen = dist.get_world_size(), []
    begin(32 * size, 128, dist.group.WORLD, device)
    backward = norm.norm_backward

    def watched(*args):
        seen.append(args[6] is not None)
        return backward(*args)

    with mock.patch.object(norm, "norm_backward", watched):
        for recipe in RECIPES:
            for which in (NORMED, MLP):
                for method in ("bulk", "pipeline"):
                    seen.clear()
                    pair = pair_of(which, recipe, device, method)
                    check_pass(pair, 3, 32)
                    assert any(seen) == (method == "bulk"), pair.label
        seen.clear()
        module = te.LayerNormLinear(
            128, 128, parallel_mode="column", tp_group=dist.group.WORLD, tp_size=size, sequence_parallel=True,
            ub_name="qkv", params_dtype=torch.bfloat16, device=device, ub_bulk_dgrad=True, ub_bulk_wgrad=True,
            return_layernorm_output=True,
        )  # fmt: skip
        x = torch.ones(32, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
        y, normed = module(x)
        (y.sum() + normed.sum()).backward()
        assert seen == [False]


SIZES = [
    maxima_over_ranks,
    norms_sum_the_slots,
    partials_in_pieces,
    epochs_wrap_around,
    token_counts_change,
    over_capacity,
    flags_without_effect,
    number_formats_side_by_side,
    more_dimensions,
    report_names_the_methods,
    report_of_one_bulk,
]
