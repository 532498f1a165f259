"""Block, row and column scaled casts: kernels against oracles bit for bit, and what they multiply to."""

import pytest
import torch
from torch import Tensor

from te_lite.ops import block_cast as B
from te_lite.ops import gemm_scaled as G
from te_lite.ops import row_cast as R
from te_lite.ops import source as S
from te_lite.ops.activation import Activation
from te_lite.ops.cast import transform, transform_ref
from tests.ops.paths import DEVICES

SHAPES = [(0, 32), (1, 16), (7, 48), (33, 100), (128, 128), (130, 272), (256, 1024), (300, 8208)]
KINDS = {
    "mx": {"block": 32, "square": False, "flat": True},
    "vectors": {"block": 128, "square": False, "flat": False},
    "flat": {"block": 128, "square": False, "flat": True},
    "squares": {"block": 128, "square": True, "flat": False},
}
PLAIN = [(kind, dtype) for kind in KINDS for dtype in S.DTYPES]
E5M2 = {f"{name} e5m2": {**kind, "dtype": torch.float8_e5m2} for name, kind in KINDS.items()}
PLAIN += [(kind, torch.bfloat16) for kind in E5M2]  # what is read does not ask what is written
KINDS |= E5M2
LAYOUTS = [(True, False), (False, True), (True, True)]


def special(m: int, n: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows and columns of very different size; a zero row, a zero block, inf, nan, subnormals where there is room."""
    x = torch.randn(m, n) * torch.exp(3 * torch.randn(m, 1)) * torch.exp(3 * torch.randn(1, n))
    if m > 32 and n > 64:
        x[3] = 0.0
        x[8:16, :32] = 0.0
        x[20, 40], x[21, 70] = float("inf"), float("nan")
        x[5, :32] = 1e-39 * torch.randn(32)
        x[6] = 1.75 * 2.0 ** torch.arange(n).remainder(20)  # amax / 448 is a power of two, or just above it
        x[7] = torch.nextafter(x[6], torch.tensor(float("inf")))
    return x.to(dtype).to(device)


def sources(m: int, n: int, dtype: torch.dtype, device: str) -> dict[str, S.Source]:
    def random(*shape: int) -> Tensor:
        return (2 * torch.randn(*shape)).to(dtype).to(device)

    stats = torch.rand(m, device=device) + 0.5
    return {
        "plain": S.plain(special(m, n, dtype, device)),
        "norm": S.norm(random(m, n), stats - 1, stats, random(n), random(n), False),
        "swiglu": S.act(random(m, 2 * n), Activation.of("swiglu")),
        "dgelu": S.dact(random(m, n), random(m, n), Activation.of("gelu")),
        "dswiglu": S.dact(random(m, n), random(m, 2 * n), Activation.of("swiglu")),
    }


def same_bytes(got: Tensor | None, want: Tensor | None) -> None:
    assert (got is None) == (want is None)
    if got is None:
        return
    assert got.shape == want.shape and got.dtype == want.dtype

    def bits(t: Tensor) -> Tensor:
        t = t.detach().cpu().contiguous()
        return t.view(torch.uint8 if t.element_size() == 1 else torch.int32)

    wrong = (bits(got) != bits(want)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{len(wrong)} of {got.numel()} differ, first at {at}: {got[at]} for {want[at]}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, dtype", PLAIN, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_of_a_plain_tensor(shape, dtype, kind, device):
    """Every layout alone and both together: the same bytes, those of the oracle on the CPU."""
    x, options = special(*shape, dtype, device), KINDS[kind]
    want = B.block_cast_ref(S.plain(x.cpu()), row=True, col=True, **options)
    for row, col in LAYOUTS:
        for pow2, eps in ((True, 0.0), (False, 1e-3), (True, 1e-3)):
            if (pow2, eps) != (True, 0.0):
                want_now = B.block_cast_ref(S.plain(x.cpu()), row=True, col=True, pow2=pow2, eps=eps, **options)
            else:
                want_now = want
            got = B.block_cast(S.plain(x), row=row, col=col, pow2=pow2, eps=eps, **options)
            for i, wanted in enumerate((row, row, col, col)):
                same_bytes(got[i], want_now[i] if wanted else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40, 160), (130, 272), (300, 384)], ids=str)
def test_blocks_of_other_sources_hold_what_they_produce(shape, kind, device):
    """Against the unfused program on the same device: fp32 values, then the cast of a plain tensor. Sums in fp32."""
    for name, source in sources(*shape, torch.bfloat16, device).items():
        got = B.block_cast(source, row=True, col=True, bias_grad=torch.float32, **KINDS[kind])
        v = transform(source, hp_dtype=torch.float32).hp
        want = B.block_cast_ref(S.plain(v.cpu()), row=True, col=True, **KINDS[kind])
        without = B.block_cast(source, row=True, col=True, **KINDS[kind])  # by halves, where there are two
        for i in range(4):
            same_bytes(got[i], want[i])
            same_bytes(without[i], want[i])
        exact = v.double().sum(0)
        bound = v.double().abs().sum(0) * 2.0**-24 * shape[0]  # fp32 sums in any order
        finite = exact.isfinite()
        assert ((got.bias_grad.double() - exact).abs() <= bound)[finite].all(), name


@pytest.mark.parametrize("fp8, largest, bits", [(torch.float8_e4m3fn, 448.0, 3), (torch.float8_e5m2, 57344.0, 2)])
@pytest.mark.parametrize("block", [32, 128])
def test_scales_are_the_smallest_power_of_two_that_saturates_nothing(block, fp8, largest, bits):
    """By the definition, in fp64."""
    v = torch.randn(64, 512, dtype=torch.float64) * torch.exp(8 * torch.randn(64, 1, dtype=torch.float64))
    v = v.float().double()
    out = B.block_cast(S.plain(v.float()), block=block, dtype=fp8)
    stored = out.row_scale.view(torch.float8_e8m0fnu).double() if block == 32 else out.row_scale.double()
    amax = v.view(64, -1, block).abs().amax(-1)
    assert out.row.dtype == fp8 and (amax <= largest * stored).all() and (amax > largest * stored / 2).all()
    got = out.row.double() * stored.repeat_interleave(block, 1)
    least = stored.repeat_interleave(block, 1) * torch.finfo(fp8).smallest_normal
    assert ((got - v).abs() <= torch.maximum(v.abs(), least) * 2.0 ** -(bits + 1)).all()


@pytest.mark.parametrize("columns", [16, 320, 512])
def test_squares_are_read_where_they_lie(columns):
    """As cuBLAS reads them, rows in fours: in place where there is room for that, else in a copy with zeros."""
    scale = B.block_cast(S.plain(torch.randn(256, columns)), block=128, square=True).row_scale
    fours = -(-scale.shape[1] // 4) * 4
    read = G._squares(scale)
    assert read.data_ptr() == scale.data_ptr() and read.shape == (fours, 2) and read.stride() == (1, fours)
    tight = torch.cat((scale[0], scale.new_ones(fours - scale.shape[1]), scale[1])).as_strided(scale.shape, (fours, 1))
    for given in (scale, scale.contiguous(), tight):
        read = G._squares(given)
        assert read.shape == (fours, 2) and torch.equal(read[: scale.shape[1]].t(), scale)
        if given.untyped_storage().nbytes() < 8 * fours:
            assert read.data_ptr() != given.data_ptr() and not read[scale.shape[1] :].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [(1, 32), (32, 1), (1, 128), (128, 1), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", S.DTYPES, ids=str)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dequantize(fp8, dtype, blocks, device):
    m, n = 200, 336
    data = torch.randint(0, 255, (m, n), dtype=torch.uint8)
    data[(data & 0x7F) >= (0x7F if fp8 == torch.float8_e4m3fn else 0x7C)] = 0  # nan, inf
    shape = (-(-m // blocks[0]), -(-n // blocks[1]))
    scale = torch.rand(shape) if 32 not in blocks else torch.randint(110, 140, shape, dtype=torch.uint8)
    scale.view(-1)[0] = 255 if 32 in blocks else float("nan")
    data = data.view(fp8)
    got = B.dequantize_blocks(data.to(device), scale.to(device), *blocks, dtype).cpu()
    want = B.dequantize_blocks_ref(data, scale, *blocks, dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if 32 in blocks and dtype == torch.bfloat16:
        exact = B.dequantize_blocks_ref(data, scale, *blocks, torch.float32)
        torch.testing.assert_close(want.float(), exact, rtol=0, atol=0, equal_nan=True)  # four bits and an exponent


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("dtype", S.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_columns(shape, dtype, pow2, device):
    x = special(*shape, dtype, device)
    source, on_cpu = S.plain(x), S.plain(x.cpu())
    for row, col in LAYOUTS:
        same_bytes(R.vector_amax(source, row, col), R.vector_amax_ref(on_cpu, row, col))
    amax = R.vector_amax_ref(on_cpu, True, True)
    scale, inverse = R.vector_scales(amax.to(device), pow2)
    for got, want in zip((scale, inverse), R.vector_scales_ref(amax, pow2), strict=True):
        same_bytes(got, want)
    for got, want in zip(R.row_cast(source, pow2), R.row_cast_ref(on_cpu, pow2), strict=True):
        same_bytes(got, want)
    m = shape[0]
    e4m3, scale = torch.float8_e4m3fn, scale.cpu()
    for vectors in (dict(row=True), dict(col=True), dict(row=True, col=True), dict(row=True, flat=True)):
        flat = vectors.pop("flat", False)
        given = {"row_scale": scale[:m]} if vectors.get("row") and not flat else {}
        given |= {"col_scale": scale[m:]} if vectors.get("col") or flat else {}
        want = transform_ref(on_cpu, fp8_dtype=e4m3, **vectors, **given)
        got = transform(source, fp8_dtype=e4m3, **vectors, **{k: v.to(device) for k, v in given.items()})
        same_bytes(got.row, want.row)
        same_bytes(got.col, want.col)
        assert got.scale_inv is None


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_other_sources(device):
    for source in sources(70, 272, torch.bfloat16, device).values():
        v = S.plain(transform(source, hp_dtype=torch.float32).hp.cpu())
        for got, want in zip(R.row_cast(source), R.row_cast_ref(v), strict=True):
            same_bytes(got, want)
        same_bytes(R.vector_amax(source, True, True), R.vector_amax_ref(v, True, True))


GEMMS = [(1, 16, 16), (7, 128, 48), (64, 272, 160), (130, 1040, 272), (256, 512, 640)]


def _error(got: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[float, float]:
    """(largest error, bound) of a GEMM of dequantized fp64 operands; tensor cores keep 14 bits of each partial sum."""
    want = a @ b.t() + (0 if bias is None else bias.double().cpu())
    size = a.abs() @ b.abs().t() + (0 if bias is None else bias.double().cpu().abs())
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-23}[got.dtype]
    error = (got.double().cpu() - want).abs()
    return ((error - rounding * want.abs()) / size.clamp(min=1e-30)).max().item(), 2.0**-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", GEMMS, ids=str)
def test_scaled_gemms(shape, out_dtype, bias, device):
    m, k, n = shape
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    offset = torch.randn(n, device=device).to(out_dtype) if bias else None
    x8, x_scale = R.row_cast(S.plain(x))
    w8, w_scale = R.row_cast(S.plain(w))
    a, b = x8.cpu().double() * x_scale.cpu().double()[:, None], w8.cpu().double() * w_scale.cpu().double()[:, None]
    for fast in (False, True):
        error, bound = _error(G.gemm_fp8_rowwise(x8, w8, x_scale, w_scale, out_dtype, offset, fast), a, b, offset)
        assert error <= bound * (4 if fast else 1)
    # From the middle: cuBLAS wants scales at multiples of 16 bytes.
    part = slice(m // 2, None)
    error, bound = _error(
        G.gemm_fp8_rowwise(x8[part], w8, x_scale[part], w_scale, out_dtype, offset), a[part], b, offset
    )
    assert error <= bound
    one = w_scale[:1].clone()
    b = w8.cpu().double() * one.cpu().double()
    error, bound = _error(G.gemm_fp8_rowwise(x8, w8, x_scale, one, out_dtype, offset), a, b, offset)
    assert error <= bound
    xb = B.block_cast(S.plain(x), block=128)
    a = B.dequantize_blocks_ref(xb.row.cpu(), xb.row_scale.cpu(), 1, 128, torch.float32).double()
    for square in (False, True):
        wb = B.block_cast(S.plain(w), block=128, square=square)
        b = B.dequantize_blocks_ref(wb.row.cpu(), wb.row_scale.cpu(), 128 if square else 1, 128, torch.float32).double()
        y = G.gemm_fp8_blockwise(xb.row, wb.row, xb.row_scale, wb.row_scale, out_dtype, offset)
        error, bound = _error(y, a, b, offset)
        assert error <= bound, square


@pytest.mark.parametrize("m, n", [(1, 256), (300, 1024)])
def test_ops_pass_torch_s_own_checks(m, n):
    source = S.plain(torch.randn(m, n))
    out = B._allocate(source, 32, False, True, True, True, torch.float32)
    args = (*source.flat, 32, False, True, 0.0, 448.0, True, *out)
    torch.library.opcheck(B._block_cast_op.overload, args, test_utils="test_faketensor")
    torch.library.opcheck(R._row_cast_op.overload, (*source.flat, True), test_utils="test_faketensor")
    amax = torch.rand(m)
    torch.library.opcheck(R.vector_scales.overload, (amax, True))


def test_bad_requests_are_refused():
    x = S.plain(torch.randn(32, 64))
    with pytest.raises(ValueError, match="ask for at least one layout"):
        B.block_cast(x, block=128, row=False)
    q = B.block_cast(x, block=128)
    with pytest.raises(ValueError, match="scales of shape"):
        G.gemm_fp8_rowwise(q.row, q.row, q.row_scale, q.row_scale, torch.bfloat16)
    with pytest.raises(ValueError, match="E4M3|float8_e4m3fn"):
        G.gemm_fp8_blockwise(q.row.to(torch.float8_e5m2), q.row, q.row_scale, q.row_scale, torch.bfloat16)
