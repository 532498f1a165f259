"""What only shows on a GPU: cached launches, alignment, large matrices, graphs, streams, determinism."""

import numpy as np
import pytest
import torch
from torch import Tensor

from te_lite.ops import block_cast, cast, cast_kernels, launch, transpose
from te_lite.ops import source as S
from te_lite.ops.activation import Activation
from tests.ops.test_cast import (
    E4M3,
    E5M2,
    INF,
    LARGEST,
    NAN,
    assert_same_bytes,
    bytes_of,
    padded_transpose,
    run_poisoned,
    scale_of,
    special,
)

pytestmark = pytest.mark.gpu


def _quantize(x: Tensor, fp8: torch.dtype = E4M3) -> cast.Transformed:
    source = S.plain(x)
    return cast.transform(source, fp8_dtype=fp8, row=True, col=True, amax=cast.amax(source))


def _check(out: cast.Transformed, x: Tensor, fp8: torch.dtype = E4M3) -> None:
    s = scale_of(x.abs().max().item(), LARGEST[fp8])
    assert out.scale_inv.item() == float(1 / s)
    row = bytes_of(x, float(s), fp8)
    assert_same_bytes(out.row, row)
    assert_same_bytes(out.col, padded_transpose(row))


def test_a_cached_launch_is_never_taken_for_another():
    """Types, sizes, formats and alignments in turn, twice: the second round goes through the cache."""
    launch._COMPILED.clear()
    base = torch.randn(200 * 256 + 8, device="cuda")
    for _ in range(2):
        for dtype in S.DTYPES:
            for fp8 in (E4M3, E5M2):
                for m, n in ((128, 256), (128, 240), (1, 256), (127, 16), (16, 1)):
                    for offset in (0, 1, 4):
                        x = base.to(dtype)[offset : offset + m * n].view(m, n)
                        _check(_quantize(x, fp8), x, fp8)


def _reads_words() -> set[bool]:
    """Whether the casts launched since the cache of launches was emptied did."""
    kernels = (id(cast_kernels.transform_kernel), id(cast_kernels.one_row_kernel), id(block_cast.block_kernel))
    return {key[4][0].kind == "words" for key in launch._COMPILED if key[0] in kernels}


WORD_SHAPES = [(2, 16), (15, 48), (130, 80), (257, 208), (1000, 336), (4092, 64), (64, 4112)]


@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", WORD_SHAPES, ids=str)
def test_casts_of_words(shape, dtype, fp8, row, monkeypatch):
    """Every bit, by both ways to a scale, of values with rules of their own too; the pad is zero whatever the scale."""
    monkeypatch.setattr(cast_kernels, "FEW", 0)
    launch._COMPILED.clear()
    x = special(*shape, dtype, "cuda")
    finite = torch.where(x.isfinite(), x, 0.0)
    for v, scale in ((x, 0.37), (x, NAN), (x, INF), (finite, 3.0), (finite, None), (x, None), (x * 0, None)):
        amax_out = torch.full((1,), 0.125, device="cuda")
        source = S.plain(v)
        given = {"amax": cast.amax(source)} if scale is None else {"scale": torch.tensor([scale], device="cuda")}
        by = given.get("scale"), given.get("amax")
        out = run_poisoned(source, fp8, *by, amax_out, hp_dtype=None, row=row, bias_grad=None)
        amax = torch.where(v.isfinite(), v.abs().float(), INF).max().item()
        s = scale_of(amax, LARGEST[fp8]) if scale is None else np.float32(scale)
        want = bytes_of(v, float(s), fp8)
        if row:
            assert_same_bytes(out.row, want)
        assert_same_bytes(out.col, padded_transpose(want))
        np.testing.assert_array_equal(out.scale_inv.cpu().numpy(), np.float32(1) / np.float32([s]))  # any nan is nan
        assert amax_out.item() == max(amax, 0.125)
    assert _reads_words() == {True}


def test_what_is_read_as_words():
    """Plain 16-bit tensors, where a transposed copy with one scale (of large ones) or of blocks of 128 is wanted."""
    wide, ones = torch.randn(2064, 2048, device="cuda"), torch.ones(2064, device="cuda")
    for dtype, cols, want in (
        (torch.bfloat16, 2048, True),
        (torch.float16, 2048, True),
        (torch.float32, 2048, False),
        (torch.bfloat16, 2040, False),
    ):
        launch._COMPILED.clear()
        source = S.plain(wide[:, :cols].to(dtype).contiguous())
        _quantize(source.x)
        block_cast.block_cast(source, block=128, row=False, col=True)
        assert _reads_words() == {want}, (dtype, cols)
    launch._COMPILED.clear()
    x, one = wide.bfloat16(), ones[:1].clone()
    for layouts in (
        {"row": True},
        {"row": True, "col": True, "bias_grad": torch.float32},
        {"col": True, "hp_dtype": torch.bfloat16},
    ):
        cast.transform(S.plain(x), fp8_dtype=E4M3, scale=one, **layouts)
    cast.transform(S.plain(x), fp8_dtype=E4M3, col=True, col_scale=ones[:2048].clone())
    block_cast.block_cast(S.plain(x), block=128, square=True, col=True)
    cast.transform(S.act(x, Activation.of("gelu")), fp8_dtype=E4M3, col=True, scale=one)
    assert _reads_words() == {False}


def test_amax_out_at_every_alignment():
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    history = torch.zeros(2, 9, device="cuda")
    for _ in range(2):
        for i in range(9):
            cast.transform(S.plain(x * (i + 1)), amax_out=history[1, i])
    assert history[0].count_nonzero() == 0
    assert history[1].tolist() == [(x * (i + 1)).abs().max().float().item() for i in range(9)]


@pytest.mark.parametrize("where", [(0, 0), (4095, 2047), (2000, 1000)])
def test_one_large_element_anywhere_is_the_amax(where):
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    x[where] = -1000.0
    out = torch.zeros(1, device="cuda")
    cast.transform(S.plain(x), hp_dtype=torch.float32, amax_out=out)
    assert out.item() == 1000.0 and cast.amax(S.plain(x)).max().item() == 1000.0


def test_more_than_2_to_31_elements():
    m, n = 70000, 32768
    x = torch.randn(1024, n, device="cuda", dtype=torch.bfloat16).repeat(69, 1)[:m].contiguous()
    x[-1, -1] = 100.0
    out = _quantize(x)
    s = scale_of(100.0, 448.0)
    assert out.scale_inv.item() == float(1 / s)
    for rows in (slice(0, 64), slice(65500, 65600), slice(m - 64, m)):
        want = bytes_of(x[rows], float(s), E4M3)
        assert_same_bytes(out.row[rows], want)
        assert_same_bytes(out.col.view(torch.uint8)[:, rows].t().contiguous(), want)
    assert torch.equal(transpose.transpose(out.row).view(torch.uint8), out.col.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1000, 336), (4092, 2064), (33000, 208)], ids=str)
def test_the_order_of_tiles_changes_no_bit(shape):
    """Partial maxima have tiles taken from the last on; 33000 rows are more than a program has tiles for each."""
    m, n = shape
    x, h = (torch.randn(m, width, device="cuda", dtype=torch.bfloat16) for width in (n, 2 * n))
    gamma, rstd = torch.randn(n, device="cuda"), torch.rand(m, device="cuda")
    for source in (
        S.plain(x),
        S.plain(x.float()),
        S.act(h, Activation.of("swiglu")),
        S.dact(x, h, Activation.of("swiglu")),
        S.norm(x, None, rstd, gamma),
    ):
        amax = cast.amax(source)
        scale = cast.scale_from_amax_ref(amax.max().view(1), 448.0)
        for how in ({"row": True}, {"col": True}, {"row": True, "col": True, "bias_grad": torch.float32}):
            outs = [cast.transform(source, fp8_dtype=E4M3, **how, **by) for by in ({"amax": amax}, {"scale": scale})]
            outs[1] = outs[1]._replace(scale=scale)  # where it is given, it is not written again
            for field, got, want in zip(outs[0]._fields, *outs, strict=True):
                assert (got is want is None) or torch.equal(got.view(torch.uint8), want.view(torch.uint8)), field


def test_bias_grad_has_the_same_bits_every_time():
    source = S.dact(
        torch.randn(4092, 512, device="cuda", dtype=torch.bfloat16),
        torch.randn(4092, 1024, device="cuda", dtype=torch.bfloat16), Activation.of("swiglu"),
    )  # fmt: skip
    first = cast.transform(source, bias_grad=torch.float32).bias_grad
    for _ in range(5):
        assert torch.equal(cast.transform(source, bias_grad=torch.float32).bias_grad, first)


def test_the_whole_of_current_scaling_is_captured():
    """No host sync, and a replay computes the scale of the new data."""
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    _quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _quantize(x)
    for factor in (1.0, 7.0):
        x.copy_(torch.randn_like(x) * factor)
        graph.replay()
        _check(out, x)


def test_runs_on_the_current_stream():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        y = x * 3
        out = _quantize(y)
    stream.synchronize()
    _check(out, y)


@pytest.mark.multigpu
def test_a_tensor_on_another_device():
    x = torch.randn(64, 64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    _check(_quantize(x), x)
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(not launch.triton.__version__.startswith(launch.CONVENTION_READ), reason="an unread convention")
def test_kernels_are_launched_by_the_extension():
    """Every kernel of a cast is ready in te_lite._C, none goes through Triton's launcher."""
    launch._COMPILED.clear()
    source = S.plain(torch.randn(64, 96, device="cuda"))
    with torch.no_grad():
        cast.transform(source, fp8_dtype=E4M3, row=True, col=True, amax=cast.amax(source), bias_grad=torch.float32)
    assert len(launch._COMPILED) == 3  # amax, cast, column sums
    assert all(isinstance(ready, launch._C.Kernel) for ready in launch._COMPILED.values())
