"""The casts against formulas written down again here; on a GPU the fp8 bytes and scales bit for bit."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_lite.ops import cast, transpose
from te_lite.ops import source as S
from te_lite.ops.activation import ACTIVATIONS, Activation
from tests.ops.paths import chosen

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FLOAT_MAX = float(np.finfo(np.float32).max)
NAN, INF = float("nan"), float("inf")
FORMATS = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def scale_of(amax: float, largest: float, eps: float = 0.0, pow2: bool = False) -> np.float32:
    """The rule (docs/background/numerics.md) in numpy scalars."""
    a = np.float32(amax)
    if a < np.float32(eps):
        a = np.float32(eps)
    if a == 0 or not np.isfinite(a):
        return np.float32(1)
    with np.errstate(over="ignore"):
        s = min(np.float32(largest) / a, np.float32(FLOAT_MAX))
    return (s.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32) if pow2 else s


def bytes_of(v: Tensor, s: float, fp8: torch.dtype) -> Tensor:
    """uint8: fp32 v times s, clamped, rounded by torch on the CPU; every nan as 0x7F."""
    q = v.cpu().float() * torch.tensor(s, dtype=torch.float32)
    q8 = torch.where(q.isnan(), 0.0, q).clamp(-LARGEST[fp8], LARGEST[fp8]).to(fp8).view(torch.uint8)
    return torch.where(q.isnan(), torch.tensor(0x7F, dtype=torch.uint8), q8)


def assert_same_bytes(got: Tensor, want: Tensor) -> None:
    got = got.cpu().view(torch.uint8)
    assert got.shape == want.shape and got.is_contiguous()
    wrong = (got != want).nonzero()
    if len(wrong):
        i = tuple(wrong[0].tolist())
        raise AssertionError(f"{len(wrong)} bytes differ, first at {i}: {got[i]:#04x}, should be {want[i]:#04x}")


def padded_transpose(row: Tensor) -> Tensor:
    m, n = row.shape
    out = torch.zeros(n, -(-m // 16) * 16, dtype=torch.uint8)
    out[:, :m] = row.t()
    return out


def special(m: int, n: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Random over many binades, with every kind of value that has a rule of its own where there is room."""
    x = torch.randn(m, n) * torch.exp2(torch.randint(-12, 12, (m, n)).float())
    odd = torch.tensor([0.0, -0.0, NAN, INF, -INF, 1e-40, -3e-8, 448.0, 464.0, 465.0, 57344.0, 61440.0, -1e30])
    if m * n >= 2 * len(odd):
        x.view(-1)[torch.randperm(m * n)[: len(odd)]] = odd
    return x.to(dtype).to(device)


# ---- scale ----


@given(
    st.integers(0, 0x7FFFFFFF),
    st.sampled_from([448.0, 57344.0]),
    st.sampled_from([0.0, 1e-12, 1e30]),
    st.booleans(),
)
def test_scale_of_any_amax(bits, largest, eps, pow2):
    amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    got = cast.scale_from_amax_ref(amax, largest, eps, pow2)
    want = scale_of(float(amax), largest, eps, pow2)
    assert got.dtype == torch.float32 and np.float32(got.item()).tobytes() == want.tobytes()


@dataclass(frozen=True)
class Scale:
    amax: float
    want: float
    eps: float = 0.0
    pow2: bool = False


SCALES = [
    Scale(0.0, 1.0),
    Scale(INF, 1.0),
    Scale(NAN, 1.0),
    Scale(2.0, 224.0),
    Scale(2.0, 128.0, pow2=True),
    Scale(1e-45, FLOAT_MAX),
    Scale(1e-45, 2.0**127, pow2=True),
    Scale(0.0, 44.8, eps=10.0),
    Scale(20.0, 22.4, eps=10.0),
    Scale(NAN, 1.0, eps=10.0),
]


@pytest.mark.parametrize("case", SCALES, ids=str)
def test_scale_table(case):
    got = cast.scale_from_amax_ref(torch.tensor([case.amax]), 448.0, case.eps, case.pow2)
    assert got.item() == np.float32(case.want)


# ---- transform, on any device ----

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(0, 16), (1, 16), (7, 33), (64, 64), (130, 70), (4092, 40), (17, 515)]
ALL = {"hp_dtype": torch.float32, "row": True, "col": True, "bias_grad": torch.float32}


def run_poisoned(source: S.Source, fp8: torch.dtype, scale, amax, amax_out, pow2=False, eps=0.0, **want):
    """The op on outputs that hold 0x7F everywhere: an element that it does not write shows."""

    def poisoned(*args):
        for t in args[-1 - len(cast.Transformed._fields) : -1]:
            if t is not None:
                t.view(torch.uint8).fill_(0x7F)
        cast._transform_op(*args)

    given = {"scale": scale, "amax": amax, "amax_out": amax_out, "pow2": pow2, "eps": eps}
    return cast.transform(source, fp8_dtype=fp8, op=poisoned, **given, **{**ALL, **want})


def sources(m: int, n: int, dtype: torch.dtype, device: str) -> dict[str, S.Source]:
    def random(*shape):
        return (2 * torch.randn(*shape)).to(dtype).to(device)

    table = {"plain": S.plain(special(m, n, dtype, device))}
    for one in (*map(Activation.of, ACTIVATIONS), Activation.of("clamped_swiglu", {"limit": 1.0})):
        h, dy = random(m, n * (2 if one.glu else 1)), random(m, n)
        table |= {one.name: S.act(h, one), f"d{one.name}": S.dact(dy, h, one)}
    statistics = torch.randn(m, device=device), torch.rand(m, device=device) + 0.5
    table["layernorm"] = S.norm(random(m, n), *statistics, random(n), random(n))
    return table | {"rmsnorm": S.norm(random(m, n), None, statistics[1], random(n), None, zero_centered=True)}


def check_transform(source: S.Source, fp8: torch.dtype, scale: float) -> None:
    device = source.device
    history = torch.full((3, 5), 0.125, device=device)
    s = torch.tensor([scale], device=device)
    out = run_poisoned(source, fp8, s, None, history[0, 3])
    v = out.hp.cpu()
    want = S.produce_ref(source).cpu()
    assert v.shape == (source.rows, source.cols)
    finite = want.isfinite()
    assert torch.equal(v.isfinite(), finite)
    if finite.any():
        # Transcendentals are approximate on the GPU; a wrong constant or operand is off by far more.
        magnitude = 1 + want[finite].abs() if source.kind != "plain" else torch.tensor(0.0)
        assert ((v[finite] - want[finite]).abs() <= 2**-17 * magnitude * 8).all()
    row = bytes_of(v, scale, fp8)
    assert_same_bytes(out.row, row)
    assert_same_bytes(out.col, padded_transpose(row))
    assert out.scale_inv.cpu().numpy().tobytes() == (np.float32(1) / np.float32([scale])).tobytes()
    largest = torch.where(v.isnan(), INF, v.abs()).amax() if v.numel() else torch.tensor(0.0)
    assert history[0, 3].item() == max(largest.item(), 0.125)
    history[0, 3] = 0.125
    assert (history == 0.125).all(), "amax_out wrote beside its element"
    total = v.double().sum(0)
    bound = 2**-18 * v.double().abs().sum(0)
    assert (((out.bias_grad.cpu() - total).abs() <= bound) | ~bound.isfinite()).all(), "bias_grad"
    assert torch.equal(out.bias_grad.isfinite().cpu(), total.float().isfinite())


@pytest.mark.parametrize("device", DEVICES)
@FORMATS
@pytest.mark.parametrize("dtype", S.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain(shape, dtype, fp8, device):
    check_transform(S.plain(special(*shape, dtype, device)), fp8, 0.37)


@pytest.mark.parametrize("device", DEVICES)
@FORMATS
@pytest.mark.parametrize("dtype", S.DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (39, 66), (130, 96)], ids=str)
def test_every_source(shape, dtype, fp8, device):
    for source in chosen(sources(*shape, dtype, device).values(), dtype, fp8, device):
        check_transform(source, fp8, 3.3)


@pytest.mark.parametrize("device", DEVICES)
@FORMATS
@pytest.mark.parametrize("scale", [INF, NAN, 0.0, FLOAT_MAX, 1e-45])
def test_pads_are_zero_bytes_and_nan_comes_only_from_the_arithmetic(scale, fp8, device):
    x = torch.randn(7, 33, device=device)
    out = run_poisoned(S.plain(x), fp8, torch.tensor([scale], device=device), None, None)
    row = bytes_of(x, scale, fp8)
    assert_same_bytes(out.row, row)
    assert_same_bytes(out.col, padded_transpose(row))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hp", S.DTYPES)
def test_hp_is_rounded_from_fp32_and_fp8_is_not_rounded_twice(hp, device):
    x = torch.randn(33, 48, device=device)
    out = run_poisoned(S.plain(x), E4M3, torch.ones(1, device=device), None, None, hp_dtype=hp)
    assert torch.equal(out.hp, x.to(hp))
    assert_same_bytes(out.row, bytes_of(x, 1.0, E4M3))
    assert not torch.equal(bytes_of(x.bfloat16(), 1.0, E4M3), bytes_of(x, 1.0, E4M3)), "nothing would show"


@pytest.mark.parametrize("device", DEVICES)
@FORMATS
@pytest.mark.parametrize("pow2, eps", [(False, 0.0), (True, 0.0), (False, 100.0)])
@pytest.mark.parametrize("content", ["random", "zeros", "nan", "inf", "subnormal", "empty"])
def test_current_scaling(content, pow2, eps, fp8, device):
    x = torch.randn(0 if content == "empty" else 70, 96, device=device)
    if content == "zeros":
        x.zero_()
    elif content == "subnormal":
        x *= 1e-41
    elif content in ("nan", "inf"):
        x[3, 4] = float(content)
    source = S.plain(x)
    partials = cast.amax(source)
    amax = torch.where(x.isnan(), INF, x.abs()).max().item() if x.numel() else 0.0
    assert partials.dtype == torch.float32 and partials.dim() == 1 and 1 <= partials.numel() <= 1024
    assert partials.max().item() == amax == cast.amax_ref(source).max().item()
    out = run_poisoned(source, fp8, None, partials, None, pow2, eps)
    s = scale_of(amax, LARGEST[fp8], eps, pow2)
    assert out.scale.cpu().numpy().tobytes() == np.float32([s]).tobytes()
    assert out.scale_inv.cpu().numpy().tobytes() == np.float32([1 / s]).tobytes()
    row = bytes_of(x, float(s), fp8)
    assert_same_bytes(out.row, row)
    assert_same_bytes(out.col, padded_transpose(row))


@pytest.mark.parametrize("device", DEVICES)
def test_amax_of_every_source(device):
    for name, source in sources(70, 130, torch.bfloat16, device).items():
        got, want = cast.amax(source).max().item(), cast.amax_ref(source).max().item()
        assert got == want or abs(got - want) <= 2**-17 * want, name
    known = torch.ones(3, device=device)
    assert cast.amax(S.plain(torch.zeros(2, 2, device=device), amax=known)) is known


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_asked_for_is_made(device):
    x = torch.randn(5, 16, device=device)
    scale = torch.full((1,), 2.0, device=device)
    history = torch.tensor([9.0, 0.0], device=device)
    for wanted in ({"row": True}, {"col": True}, {"row": True, "col": True}):
        out = cast.transform(S.plain(x), fp8_dtype=E4M3, scale=scale, **wanted)
        made = {name for name, t in out._asdict().items() if t is not None}
        assert made == {*wanted, "scale_inv"}
    out = cast.transform(S.act(x, Activation.of("relu")), hp_dtype=torch.bfloat16)
    assert torch.equal(out.hp, x.relu().bfloat16()) and {*out[1:]} == {None}
    assert {*cast.transform(S.plain(x), amax_out=history[0])} == {None}
    assert history.tolist() == [9.0, 0.0], "a smaller amax must not replace a larger one"
    cast.transform(S.plain(x), amax_out=history[1:])
    assert history.tolist() == [9.0, x.abs().max().item()]
    two = [cast.transform(S.plain(x), fp8_dtype=E4M3, scale=scale, row=True).scale_inv for _ in range(2)]
    assert two[0].data_ptr() not in (two[1].data_ptr(), scale.data_ptr())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 0)], ids=str)
def test_transpose(shape, device):
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    want = padded_transpose(data)
    for dtype in (E4M3, E5M2, torch.uint8):
        got = transpose.transpose(data.view(dtype).to(device))
        assert got.dtype == dtype
        assert_same_bytes(got, want)
    assert_same_bytes(transpose.transpose_ref(data), want)


# ---- as an op, and bad input ----


def test_ops_pass_torch_s_own_checks():
    x, scale, history = torch.randn(7, 20), torch.ones(1), torch.zeros(2, 2)
    source = S.dact(x[:, :10].contiguous(), x, Activation.of("swiglu"))
    hp = cast.transform(source, hp_dtype=torch.bfloat16, bias_grad=torch.float32, act_dtype=torch.bfloat16)
    act = {"act_dtype": E4M3, "act_scale": scale}
    fp8 = cast.transform(source, fp8_dtype=E4M3, row=True, col=True, scale=scale, bias_grad=torch.float32, **act)
    # torch's schema check compares by arithmetic, which fp8 does not have: without fp8 it checks all else.
    for check, out, s in (("test_schema", hp, None), ("test_faketensor", fp8, scale)):
        args = (*source.flat, s, None, None, None, s, 0.0, False, *out, history[1, 1])
        torch.library.opcheck(cast._transform_op.overload, args, test_utils=check)
        torch.library.opcheck(cast._amax_op.overload, source.flat, test_utils=check)
        torch.library.opcheck(torch.ops.te_lite.transpose.default, (x.byte(),), test_utils=check)


def test_compiled_without_a_graph_break():
    def quantize(x, history):
        source = S.act(x, Activation.of("swiglu"))
        delayed = cast.transform(source, fp8_dtype=E4M3, row=True, scale=history[1, :1], amax_out=history[0, 0])
        current = cast.transform(source, fp8_dtype=E5M2, col=True, amax=cast.amax(source), bias_grad=torch.float32)
        return delayed.row, current.col, current.scale_inv, current.bias_grad

    x = torch.randn(9, 40)
    eager, compiled = torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)
    want = quantize(x, eager)
    got = torch.compile(quantize, backend="aot_eager", fullgraph=True)(x, compiled)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(eager, compiled) and eager[0, 0] != 0.5


def test_fake_cuda_tensors_without_a_gpu():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(33, 64, device="cuda", dtype=torch.bfloat16)
        partials = cast.amax(S.plain(x))
        out = cast.transform(S.plain(x), fp8_dtype=E4M3, row=True, col=True, amax=partials)
        assert out.col.shape == (64, 48) and out.col.device.type == "cuda" and out.scale_inv.shape == (1,)
        assert transpose.transpose(out.row).shape == (64, 48)


def test_fp8_without_a_layout_is_refused():
    for function in (cast.transform, cast.transform_ref):
        with pytest.raises(ValueError, match="row=False, col=False: ask for at least one layout"):
            function(S.plain(torch.zeros(4, 6)), fp8_dtype=E4M3, scale=torch.ones(1))


@pytest.mark.parametrize(
    "scales",
    [{}, {"scale": torch.ones(1, dtype=torch.bfloat16)}, {"amax": torch.ones(1, dtype=torch.float64)},
     {"amax": torch.ones(1025)}],
)  # fmt: skip
def test_fp8_without_a_scale_that_kernels_read_is_refused(scales):
    with pytest.raises((TypeError, ValueError), match="scale"):
        cast.transform(S.plain(torch.zeros(4, 6)), fp8_dtype=E4M3, row=True, **scales)


def test_transpose_refuses_wider_types():
    with pytest.raises(ValueError, match="one-byte"):
        transpose.transpose(torch.zeros(4, 6))


def test_nearest_even_is_what_the_oracle_s_cast_does():
    """Every value half way between two neighbours of E4M3 goes to the even one: bytes_of may be trusted."""
    grid = torch.arange(0, 0x7F, dtype=torch.uint8).view(E4M3).float()
    half = (grid[:-1] + grid[1:]) / 2
    got = cast.transform_ref(S.plain(half[None]), fp8_dtype=E4M3, row=True, scale=torch.ones(1)).row.view(torch.uint8)
    assert all(int(b) == i + i % 2 for i, b in enumerate(got[0].tolist()))
