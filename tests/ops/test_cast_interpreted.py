"""Indexing, masks and padding of the cast kernels, in the interpreter, on values that fp8 holds exactly."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from te_lite.ops import block_cast, cast, cast_kernels, gemm_scaled, row_cast, sums
from te_lite.ops import source as S
from te_lite.ops.activation import ACTIVATIONS, Activation
from te_lite.ops.transpose import _transpose_cuda, transpose_ref
from te_lite.ops.word_tiles import words_fit
from tests.ops.interpreted import only_interpreted, run_interpreted

E4M3 = torch.float8_e4m3fn


CLAMPED = Activation.of("clamped_swiglu", {"limit": 1, "alpha": 0})  # of small integers a product of powers of two


def test_cast_kernels_in_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """At most two programs for a column of tiles, so that each has several tiles to go through."""
    monkeypatch.setattr(cast, "sm_count", lambda device: 1)
    monkeypatch.setattr(sums, "MOST_SPLITS", 2)


def _small(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


MANY = 4000  # elements; the interpreter is slow


def _sources(m: int, n: int) -> dict[str, S.Source]:
    """Only products of small integers and powers of two: one right result, in fp8 too. Of many tiles one for each way
    to read them."""
    x, h, dy = _small(m, n), _small(m, 2 * n), _small(m, n)
    mean, rstd = torch.randint(-1, 2, (m,)).float(), 2.0 ** torch.randint(-1, 2, (m,))
    gamma, beta = torch.randint(1, 3, (n,)).bfloat16(), torch.randint(-1, 2, (n,)).bfloat16()
    sources = {
        "plain": S.plain(x.bfloat16()),
        "sreglu": S.act(h, Activation.of("sreglu")),
        "dreglu": S.dact(dy.bfloat16(), h.bfloat16(), Activation.of("reglu")),
        "layernorm": S.norm(x, mean, rstd, gamma, beta),
    }
    if m * n > MANY:
        return sources
    return sources | {
        "relu": S.act(x.half(), Activation.of("relu")),
        "clamped_swiglu": S.act(h, CLAMPED),
        "drelu": S.dact(dy, x, Activation.of("relu")),
        "dclamped_swiglu": S.dact(dy, h, CLAMPED),
        "rmsnorm zero centered": S.norm(x, None, rstd, torch.zeros(n), None, zero_centered=True),
    }


@dataclass(frozen=True)
class Shape:
    """m, n: rows and columns (of one half). why: what it is there for."""

    m: int
    n: int
    why: str


SHAPES = [
    Shape(1, 16, "one row"),
    Shape(7, 33, "ragged in both"),
    Shape(48, 64, "whole tiles along n, no pad"),
    Shape(130, 70, "several tiles along both"),
    Shape(3, 300, "several tiles along n only"),
    Shape(0, 8, "no rows"),
    Shape(5, 0, "no columns"),
]


def _transform(source: S.Source, **wanted) -> cast.Transformed:
    """cast.transform() by its kernel, on outputs that hold 0x7F everywhere: an element that it does not write shows."""

    def poisoned(*args):
        for t in args[-1 - len(cast.Transformed._fields) : -1]:
            if t is not None:
                t.view(torch.uint8).fill_(0x7F)
        cast._transform_cuda(*args)

    return cast.transform(source, op=poisoned, **wanted)


ALL = {"hp_dtype": torch.float32, "fp8_dtype": E4M3, "row": True, "col": True, "bias_grad": torch.float32}


@only_interpreted
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_interpreted_activation(name):
    """And its gradient, of values that numpy's exp does not round as torch's does."""
    one = Activation.of(name, {"limit": 1.5} if name.startswith("clamped") else None)
    h, dy = 3 * torch.randn(33, 40), torch.randn(33, 20 if one.glu else 40)
    for source in (S.act(h, one), S.dact(dy, h, one)):
        out = _transform(source, hp_dtype=torch.float32)
        torch.testing.assert_close(out.hp, S.produce_ref(source), rtol=1e-5, atol=1e-5)


@only_interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.why)
def test_interpreted_transform(shape):
    for name, source in _sources(shape.m, shape.n).items():
        history, want_amax = torch.full((2, 3), 0.25), torch.tensor(0.25)
        scale = torch.tensor([2.0])
        out = _transform(source, scale=scale, amax_out=history[0, 1], **ALL)
        want = cast.transform_ref(source, scale=scale, amax_out=want_amax, **ALL)
        for field, got, expected in zip(out._fields, out, want, strict=True):
            # By value, since the sign of a zero product is not at stake here.
            absent = got is expected is None
            assert absent or torch.equal(got.float(), expected.float()), f"{name}: {field} differs"
        assert out.col.view(torch.uint8)[:, shape.m :].count_nonzero() == 0, f"{name}: pad is not zero bytes"
        assert history[0, 1] == want_amax and (history == 0.25).sum() >= 5, f"{name}: amax_out"


@only_interpreted
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[5]], ids=lambda s: s.why)
def test_interpreted_activation_of_a_gradient(shape):
    """By column, and in high precision, beside all else."""
    for name, source in _sources(shape.m, shape.n).items():
        if source.kind != "dact":
            continue
        act, act_scale = source._replace(kind="act", dy=None), torch.tensor([4.0])
        out = _transform(source, act_dtype=E4M3, act_scale=act_scale, scale=torch.tensor([2.0]), **ALL)
        col = cast.transform_ref(act, fp8_dtype=E4M3, col=True, scale=act_scale)
        assert torch.equal(out.act.float(), col.col.float()) and out.act_scale_inv == col.scale_inv, name
        assert out.act.view(torch.uint8)[:, shape.m :].count_nonzero() == 0, f"{name}: pad is not zero bytes"
        hp = _transform(source, act_dtype=torch.float32, hp_dtype=torch.float32, bias_grad=torch.float32)
        assert torch.equal(hp.act, S.produce_ref(act)) and hp.act_scale_inv is None, name
        want = cast.transform_ref(source, scale=torch.tensor([2.0]), **ALL)
        for field in ("hp", "row", "col", "scale_inv", "bias_grad"):
            assert torch.equal(getattr(out, field).float(), getattr(want, field).float()), f"{name}: {field} differs"
        assert torch.equal(hp.hp, want.hp) and torch.equal(hp.bias_grad, want.bias_grad), name


WORDS = [Shape(130, 80, "several tiles along both"), Shape(3, 80, "fewer rows than a word has"), Shape(260, 64, "pad")]


@only_interpreted
@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("shape", WORDS, ids=lambda s: s.why)
def test_interpreted_words(shape, row, monkeypatch):
    monkeypatch.setattr(cast_kernels, "FEW", 0)
    dtype = (torch.bfloat16, torch.float16)[(WORDS.index(shape) + row) % 2]
    source = S.plain(_small(shape.m, shape.n).to(dtype))
    assert words_fit(source)
    for given in ({"scale": torch.tensor([2.0])}, {"amax": torch.tensor([1.0, 448.0])}):
        amax_out, want_amax = torch.zeros(1), torch.zeros(1)
        out = _transform(source, fp8_dtype=E4M3, row=row, col=True, amax_out=amax_out, **given)
        want = cast.transform_ref(source, fp8_dtype=E4M3, row=row, col=True, amax_out=want_amax, **given)
        for field, got, expected in zip(out._fields, out, want, strict=True):
            assert (got is None and expected is None) or torch.equal(got.float(), expected.float()), field
        assert amax_out == want_amax
    out = block_cast._allocate(source, 128, False, row, True, False, None)
    block_cast._block_cast_cuda(*source.flat, 128, False, True, 0.0, torch.finfo(dtype).max, False, *out)
    want = block_cast.block_cast_ref(source, block=128, row=row, col=True)
    for field, got, expected in zip(out._fields, out, want, strict=True):
        assert (got is None and expected is None) or torch.equal(got.float(), expected.float()), field


@only_interpreted
@pytest.mark.parametrize(
    "shape", [*(s for s in SHAPES if s.n < 300), Shape(300, 70, "many tiles")], ids=lambda s: s.why
)
def test_interpreted_last_tile_first(shape):
    """With partial maxima, and for a norm, tiles are taken from the last row of them on: no bit changes."""
    for name, source in _sources(shape.m, shape.n).items():
        given = {"scale": torch.tensor([2.0])}, {"amax": torch.tensor([1.0, 224.0])}
        outs = [_transform(source, **one, **ALL) for one in given]
        outs = [out._replace(scale=None) for out in outs]  # where it is given, it is not written again
        for field, got, expected in zip(outs[0]._fields, *outs, strict=True):
            absent = got is expected is None
            assert absent or torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), f"{name}: {field} differs"


@only_interpreted
@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_interpreted_pad_is_zero_whatever_the_scale(scale):
    source = S.plain(_small(7, 33))
    out = _transform(source, fp8_dtype=E4M3, col=True, scale=torch.tensor([scale]))
    assert out.col.view(torch.uint8)[:, 7:].count_nonzero() == 0


@only_interpreted
def test_interpreted_amax_out_counts_nan_as_inf():
    x = _small(130, 70)
    x[100, 3] = float("nan")
    amax_out = torch.zeros(1)
    _transform(S.plain(x), amax_out=amax_out)
    assert amax_out.item() == float("inf")


@only_interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.why)
def test_interpreted_amax(shape):
    for name, source in _sources(shape.m, shape.n).items():
        partials = cast._amax_cuda(*source.flat)
        assert partials.dtype == torch.float32 and 1 <= partials.numel() <= 1024
        assert partials.max() == cast.amax_ref(source).max(), name
    if shape.m * shape.n:
        for value in (float("nan"), float("-inf")):
            x = _small(shape.m, shape.n)
            x[-1, -1] = value
            partials = cast._amax_cuda(*S.plain(x).flat)
            assert partials.max() == float("inf") and not partials.isnan().any()


@only_interpreted
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("amax", [0.0, 1e-45, 3.0, 1e38, float("inf"), float("nan")])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_interpreted_scale(amax, pow2, eps):
    """The last of 600 partial maxima counts; the scale agrees in every bit."""
    partials = torch.zeros(600)
    partials[-1] = amax
    source = S.plain(_small(4, 16))
    out = _transform(source, fp8_dtype=E4M3, row=True, amax=partials, eps=eps, pow2=pow2)
    scale = cast.scale_from_amax_ref(torch.tensor([amax]), 448.0, eps, pow2)
    assert torch.equal(out.scale_inv.view(torch.int32), (1.0 / scale).view(torch.int32))


@only_interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.why)
def test_interpreted_transpose(shape):
    data = torch.randint(0, 256, (shape.m, shape.n), dtype=torch.uint8)
    got = _transpose_cuda(data)
    assert torch.equal(got, transpose_ref(data))


BLOCKS = {
    "mx": (32, False, True),
    "vectors": (128, False, False),
    "flat": (128, False, True),
    "squares": (128, True, False),
}


BLOCK_SHAPES = [*SHAPES, Shape(300, 150, "many tiles along m"), Shape(140, 128, "whole blocks")]
E5M2_SHAPES = [SHAPES[1], SHAPES[3], SHAPES[5]]  # no index hangs on the type; a tile without sums is another program


@only_interpreted
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(
    ("shape", "dtype", "sums"),
    [(shape, E4M3, torch.float32) for shape in BLOCK_SHAPES] + [(s, torch.float8_e5m2, None) for s in E5M2_SHAPES],
    ids=lambda v: getattr(v, "why", str(v)),
)
def test_interpreted_blocks(shape, kind, sums, dtype):
    (block, square, flat), compared = BLOCKS[kind], 0
    for name, source in _sources(shape.m, shape.n).items():
        if source.kind == "dact" and source.activation.glu and shape.n % block:
            continue  # block_cast itself takes another way there
        v = S.produce_ref(source)
        if dtype != E4M3 and not torch.equal(v, v.to(dtype).float()):
            continue  # more bits than E5M2 has, and the interpreter rounds
        compared += 1
        out = block_cast._allocate(source, block, square, True, True, flat, sums, dtype)
        for t in out[: 4 + (sums is not None)]:
            t.copy_(torch.full(t.shape, 112.0))
        block_cast._block_cast_cuda(*source.flat, block, square, True, 0.0, torch.finfo(source.x.dtype).max, flat, *out)
        want = block_cast.block_cast_ref(
            source, block=block, square=square, row=True, col=True, flat=flat, bias_grad=sums, dtype=dtype
        )
        for field, got, expected in zip(out._fields, out, want, strict=True):
            assert got is expected is None or torch.equal(got.float(), expected.float()), f"{name}: {field} differs"
        if flat and shape.m * shape.n:
            dense = block_cast._dequantize_cuda(out.col, out.col_scale, block, 1, torch.float32)
            assert torch.equal(dense, block_cast.dequantize_blocks_ref(out.col, out.col_scale, block, 1, torch.float32))
    assert compared


@only_interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.why)
def test_interpreted_rows(shape):
    for name, source in _sources(shape.m, shape.n).items():
        amax = torch.zeros(source.rows + source.cols)
        row_cast._amax_cuda(*source.flat, amax[: source.rows], amax[source.rows :])
        assert torch.equal(amax, row_cast.vector_amax_ref(source, True, True)), name
        scale, inverse = row_cast._vector_scales_cuda(amax, True)
        want = row_cast.vector_scales_ref(amax, True)
        assert torch.equal(scale, want[0]) and torch.equal(inverse, want[1])
        vectors = {"row_scale": scale[: source.rows], "col_scale": scale[source.rows :]}
        both, one = (True, True), (True, False)  # without col and row_scale: columns' scales by row
        for row, col in (both, one) if shape in (SHAPES[1], SHAPES[3]) else (both,):
            given = vectors if col else {"row_scale": None, "col_scale": vectors["col_scale"]}
            out = _transform(source, fp8_dtype=E4M3, row=row, col=col, **given)
            want = cast.transform_ref(source, fp8_dtype=E4M3, row=row, col=col, **given)
            assert torch.equal(out.row.float(), want.row.float()), name
            assert not col or torch.equal(out.col.float(), want.col.float()), name
        if source.cols:
            for got, expected in zip(
                row_cast._row_cast_cuda(*source.flat, True), row_cast.row_cast_ref(source), strict=True
            ):
                assert torch.equal(got.float(), expected.float()), name


@only_interpreted
@pytest.mark.parametrize("length", [1, 3, 1024, 1025])
def test_interpreted_one_scale_for_many_rows(length):
    assert torch.equal(gemm_scaled._vector(torch.tensor([3.0]), length), torch.full((length,), 3.0))
