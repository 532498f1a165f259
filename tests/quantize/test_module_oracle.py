"""The unsharded oracle of block-scaled linears against what ranks would compute, each from its own shards."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from te_lite.testing.numerics import measure
from tests import reference
from tests.emulation import Blocks, Operands, identity
from tests.quantize.formats import E5M2, MX_COL, MX_ROW, Format, blockwise, columnwise, rowwise
from tests.reference import LINEAR, TRUTH, Arithmetic, Spec

M, K, N = 72, 320, 192  # tokens and features: one or several blocks of 32 and 128, and ragged ones

# (x, w, dy by the GEMM that reads them first, then w of dgrad, dy and x of wgrad), None: unquantized
VIEWS = {
    "mxfp8": (MX_ROW, MX_ROW, MX_ROW, MX_COL, MX_COL, MX_COL),
    "blockwise": (
        *(blockwise(1, 128), blockwise(128, 128), blockwise(1, 128)),
        *(blockwise(128, 128), blockwise(128, 1), blockwise(128, 1)),
    ),
    "rowwise": (rowwise(), rowwise(), rowwise(), columnwise(), columnwise(), columnwise()),
    "rowwise_with_gw_hp": (rowwise(), rowwise(), rowwise(), Format(pow2=True), None, None),
    "rowwise_fp32": (rowwise(False), rowwise(False), rowwise(False), *[columnwise(False)] * 3),
    "current_per_shard": (Format(), Format(), Format(fp8=E5M2), Format(), Format(fp8=E5M2), Format()),
}


def tokens(width: int, seed: int) -> Tensor:
    return reference.make_tokens(M, width, seed=seed, dtype=torch.bfloat16).double()


def gathered(v: Tensor, format: Format | None, ranks: int, recipe: str) -> Tensor:
    """v from the ranks' token shards: each quantizes its own, but one scale for all tokens is agreed on."""
    if format is None:
        return v
    return torch.cat([format.round_trip(p) for p in v.chunk(1 if recipe.startswith("rowwise") else ranks)])


def by_ranks(recipe: str, mode: str, tp: int, sp: bool, x: Tensor, w: Tensor, dy: Tensor):
    """(y, dx, dw), fp64, put together from what each rank computes."""
    fx, fw, fdy, fw_dgrad, fdy_wgrad, fx_wgrad = VIEWS[recipe]
    ranks = tp if sp else 1

    def local(v: Tensor, format: Format | None) -> Tensor:
        return v if format is None else format.round_trip(v)

    ys, dxs, dws = [], [], []
    for r in range(tp):
        if mode == "column":
            w_r, dy_r = w.chunk(tp)[r], dy.chunk(tp, 1)[r]
            ys.append(gathered(x, fx, ranks, recipe) @ local(w_r, fw).t())
            dxs.append(local(dy_r, fdy) @ local(w_r, fw_dgrad))
            dws.append(local(dy_r, fdy_wgrad).t() @ gathered(x, fx_wgrad, ranks, recipe))
        else:
            w_r, x_r = w.chunk(tp, 1)[r], x.chunk(tp, 1)[r]
            ys.append(local(x_r, fx) @ local(w_r, fw).t())
            dxs.append(gathered(dy, fdy, ranks, recipe) @ local(w_r, fw_dgrad))
            dws.append(gathered(dy, fdy_wgrad, ranks, recipe).t() @ local(x_r, fx_wgrad))
    if mode == "column":
        return torch.cat(ys, 1), sum(dxs), torch.cat(dws)
    return sum(ys), torch.cat(dxs, 1), torch.cat(dws, 1)


@pytest.mark.parametrize("recipe", VIEWS)
@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_shards_are_quantized_as_ranks_do(recipe, tp, sp, mode):
    spec = Spec(LINEAR, bias=False, mode=mode, tp=tp, sequence_parallel=sp)
    p = reference.make_parameters(spec, K, N, dtype=torch.bfloat16)
    x, dy = tokens(K, 1), tokens(N, 2)
    got = reference.run(spec, p, x, dy, reference.quantization(recipe, spec))
    want = by_ranks(recipe, mode, tp, sp, x, p["weight"].double(), dy)
    for name, value in zip(("out", "dx", "weight"), want, strict=True):
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12 * float(value.abs().max()))


def test_the_views_of_one_tensor_differ_and_each_feeds_its_own_gemm():
    """Every operand replaced by a constant that tells which view was read where."""

    def times(factor: float):
        return lambda v: v * factor

    q = Operands(times(2), times(3), times(5), times(7), times(11), times(13))
    spec = Spec(LINEAR, bias=False)
    p = reference.make_parameters(spec, 32, 48)
    x, dy = reference.make_tokens(8, 32), reference.make_tokens(8, 48, seed=5)
    plain = reference.run(spec, p, x, dy)
    got = reference.run(spec, p, x, dy, reference.Quantization([q]))
    for name, factor in (("out", 2 * 3), ("dx", 5 * 7), ("weight", 11 * 13)):
        torch.testing.assert_close(got[name], factor * plain[name])


def test_an_unquantized_operand_of_wgrad_is_stored_in_the_modules_type():
    q = Operands(lambda v: v * 0, x_wgrad=identity, dy_wgrad=identity)
    spec = Spec(LINEAR, bias=False)
    p = {"weight": torch.zeros(1, 1)}
    x = dy = torch.tensor([[1 + 2.0**-20]])
    arith = Arithmetic(torch.float32, torch.bfloat16)
    assert reference.run(spec, p, x, dy, reference.Quantization([q]), arith)["weight"].item() == 1.0
    assert reference.run(spec, p, x, dy, reference.Quantization([q]), TRUTH)["weight"].item() == (1 + 2.0**-20) ** 2


def test_a_piece_starts_blocks_of_its_own():
    v = torch.randn(80, 64, dtype=torch.float64) * reference.levels(80, 3)[:, None]
    halves = torch.cat([MX_COL.round_trip(half) for half in v.chunk(2)])
    assert torch.equal(Blocks(MX_COL, (2, 1))(v), halves)
    assert not torch.equal(Blocks(MX_COL)(v), halves)
    assert torch.equal(Blocks(MX_ROW, (2, 1))(v), Blocks(MX_ROW)(v))


# Recipe -> which of y, dx, dw change when shards are ignored (in a column-, in a row-parallel linear), when every GEMM
# takes the views of the first that reads a tensor, and when nothing is quantized.
BITES = {
    "mxfp8": ("-xw", "y-w", "-xw", "yxw"),
    "blockwise": ("yxw", "yxw", "--w", "yxw"),
    "rowwise": ("-x-", "y--", "-xw", "yxw"),
    "rowwise_with_gw_hp": ("-x-", "yx-", "-xw", "yx-"),
}


@pytest.mark.parametrize("recipe", BITES)
@pytest.mark.parametrize("mode", ["column", "row"])
def test_with_spread_magnitudes_a_wrong_block_shows(recipe, mode):
    spec = Spec(LINEAR, bias=False, mode=mode, tp=4, sequence_parallel=True)
    p = reference.spread_parameters(spec, reference.make_parameters(spec, K, N, dtype=torch.bfloat16))
    x, dy = reference.spread_tokens(spec, tokens(K, 1), tokens(N, 2))
    right = reference.quantization(recipe, spec)
    truth = reference.run(spec, p, x, dy, right)
    low = reference.run(spec, p, x, dy, right, reference.stored_in(torch.bfloat16))

    def changed(q: reference.Quantization) -> str:
        wrong = reference.run(spec, p, x, dy, q)
        names = {"out": "y", "dx": "x", "weight": "w"}
        return "".join("-" if measure(n, wrong[n], truth[n], low[n]).ok else c for n, c in names.items())

    column, row, same_views, nothing = BITES[recipe]
    unsharded = reference.quantization(recipe, replace(spec, tp=1, sequence_parallel=False))
    assert changed(unsharded) == (column if mode == "column" else row)
    first = right.gemms[0]
    assert changed(reference.Quantization([Operands(first.x, first.w, first.dy)])) == same_views
    assert changed(reference.quantization("bf16", spec)) == nothing
    assert changed(right) == "---"
