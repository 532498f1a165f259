"""produce_ref against independent formulas in fp64 with torch autograd; constructors refuse bad input."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_lite.ops import source as S
from te_lite.ops.activation import ACTIVATIONS, Activation, built
from tests import reference

NAMES = ACTIVATIONS
BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
CLAMPED = "clamped_swiglu"
ONES = [*map(Activation.of, NAMES), Activation.of(CLAMPED, {"limit": 1.5, "alpha": 0.3, "glu_linear_offset": -0.4})]


def test_modules_are_compared_for_every_activation():
    assert set(reference.ALL_ACTIVATIONS) == set(NAMES)


def activation64(one: Activation, h: Tensor) -> Tensor:
    if one.name in BASES:
        return BASES[one.name](h)
    gate, up = h.chunk(2, dim=1)
    if one.name == CLAMPED:
        limit, alpha, offset = one.parameters
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + offset)
    if one.name == "glu":
        return torch.sigmoid(gate) * up
    return BASES[GATED[one.name]](gate) * up


def assert_fp32_of(got: Tensor, want: Tensor, magnitude: float = 1.0) -> None:
    """A few fp32 roundings from the fp64 value; magnitude is that of the terms that may cancel.

    A wrong constant in a formula, or the halves exchanged, is off by more than 2^-12.
    """
    assert got.dtype == torch.float32 and got.shape == want.shape
    worst = ((got.double() - want).abs() / (2**-20 * (want.abs() + magnitude))).max()
    assert worst <= 1, f"{worst:.3g} times the bound"


def test_exactly_these_activations():
    assert sorted(NAMES) == sorted([*BASES, *GATED, "glu", CLAMPED])
    assert all(Activation.of(name).glu == (name not in BASES) for name in NAMES)


@pytest.mark.parametrize("dtype", S.DTYPES)
@pytest.mark.parametrize("one", ONES, ids=str)
def test_activation_and_its_gradient(one, dtype):
    m, f = 33, 18
    h = (3 * torch.randn(m, f * (2 if one.glu else 1))).to(dtype)
    dy = torch.randn(m, f).to(dtype)
    h64 = h.double().requires_grad_()
    y64 = activation64(one, h64)
    y64.backward(dy.double())
    value, gradient = S.act(h, one), S.dact(dy, h, one)
    assert (value.rows, value.cols) == (m, f) and (gradient.rows, gradient.cols) == tuple(h.shape)
    terms = 1 + float(dy.abs().max()) * float(h.abs().max()) ** 2
    assert_fp32_of(S.produce_ref(value), y64.detach(), terms)
    assert_fp32_of(S.produce_ref(gradient), h64.grad, terms)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_far_out_is_its_limit_and_nan_stays(name):
    """x * s * (1 - s) would be inf * 0 there."""
    far = torch.tensor([[1e30, -1e30, float("inf"), float("-inf"), float("nan")]])
    h = torch.cat((far, torch.ones_like(far)), 1) if name not in BASES else far
    gate = S.produce_ref(S.dact(torch.ones_like(far), h, Activation.of(name)))[0, :5].tolist()
    up = 2e30 if name in ("srelu", "sreglu") else 0.0 if name in ("glu", CLAMPED) else 1.0
    assert gate[0] == pytest.approx(up) and gate[1] == 0 and gate[3] == 0
    assert gate[2] == (float("inf") if up > 1 else up)
    # torch passes the gradient of relu through where x is nan.
    assert gate[4] != gate[4] or name in ("relu", "reglu")


def test_at_and_beyond_the_clamps():
    """Below, at and above limits, of the gate and of up: TE's gradient passes at a limit and is 0 beyond."""
    one = Activation.of(CLAMPED, {"limit": 2})
    values = torch.tensor([-2.5, -2.0, -1.0, 2.0, 2.5])
    gate, up = (t.reshape(-1, 1) for t in torch.meshgrid(values, values, indexing="ij"))
    h, dy = torch.cat((gate, up), 1), torch.rand(25, 1) + 0.5
    got, h64 = S.produce_ref(S.dact(dy, h, one)), h.double().requires_grad_()
    activation64(one, h64).backward(dy.double())
    assert_fp32_of(got, h64.grad)
    assert torch.equal(got[:, :1] == 0, (gate > 2) | (up == -1.0)) and torch.equal(got[:, 1:] == 0, up.abs() > 2)
    beyond = S.produce_ref(S.act(torch.tensor([[50.0, 90.0], [2.0, 2.0], [50.0, -90.0], [2.0, -2.0]]), one))
    assert torch.equal(beyond[::2], beyond[1::2])
    nan = float("nan")
    assert S.produce_ref(S.act(torch.tensor([[nan, 1.0], [1.0, nan]]), one)).isnan().all()


def test_parameters():
    """Rounded to fp32, as kernels have them; those that are not given have TE's defaults."""
    fp32 = torch.tensor(1.702).item()
    assert Activation.of(CLAMPED) == built(CLAMPED, (7.0, fp32, 1.0)) == Activation.of(CLAMPED, {"limit": 7})
    assert Activation.of(CLAMPED, {"glu_linear_offset": 0}).named["glu_linear_offset"] == 0.0
    assert len({Activation.of(CLAMPED), Activation.of(CLAMPED, {"alpha": 1.702}), Activation.of("swiglu")}) == 2


_NAN = float("nan")


@pytest.mark.parametrize("given, kind, match", [
    ({"limits": 7.0}, ValueError, "limits.*takes limit, alpha, glu_linear_offset; leave out"),
    ({"limit": "7"}, TypeError, "'7': must be a number; pass"), ({"limit": True}, TypeError, "True: must be a number"),
    ({"alpha": torch.ones(3)}, TypeError, "must be a number; pass"), ({"limit": 0}, ValueError, "=0: must .*> 0; "),
    ({"limit": -7.0}, ValueError, "-7.0: must"), ({"alpha": _NAN}, ValueError, "nan: must be finite"),
    ({"limit": _NAN}, ValueError, "nan: must"), ({"glu_linear_offset": 1e39}, ValueError, "must be finite in fp32"),
    ((7.0,), TypeError, "must be a dict.*pass"),
])  # fmt: skip
def test_bad_parameters_name_value_rule_and_remedy(given, kind, match):
    with pytest.raises(kind, match=match):
        Activation.of(CLAMPED, given)


def test_the_gate_comes_first():
    h = torch.tensor([[-1.0, 2.0, 10.0, 100.0]])
    assert S.produce_ref(S.act(h, Activation.of("reglu"))).tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("mean, beta, zero_centered", [(True, True, False), (False, False, True), (True, False, True)])
def test_norm(mean, beta, zero_centered):
    m, n = 9, 21
    x, gamma = torch.randn(m, n).bfloat16(), torch.randn(n).bfloat16()
    x64 = x.double()
    mu = x64.mean(1) if mean else torch.zeros(m).double()
    rstd = 1 / ((x64 - mu[:, None]).square().mean(1) + 1e-5).sqrt()
    b = torch.randn(n).bfloat16() if beta else None
    want = (x64 - mu[:, None]) * rstd[:, None] * (gamma.double() + zero_centered)
    want = want if b is None else want + b.double()
    source = S.norm(x, mu.float() if mean else None, rstd.float(), gamma, b, zero_centered)
    assert_fp32_of(S.produce_ref(source), want)


def test_plain_is_the_tensor():
    x = torch.randn(3, 4).half()
    source = S.plain(x, amax=torch.ones(1))
    assert torch.equal(S.produce_ref(source), x.float())
    assert (source.dtype, source.device, source.amax.item()) == (x.dtype, x.device, 1.0)


def test_empty():
    for rows, cols in ((0, 8), (4, 0)):
        assert S.produce_ref(S.act(torch.empty(rows, cols), Activation.of("swiglu"))).shape == (rows, cols // 2)


_X = torch.zeros(4, 6)
_REFUSED = {
    "integers": (TypeError, lambda: S.plain(_X.int())),
    "fp64": (TypeError, lambda: S.plain(_X.double())),
    "three dimensions": (ValueError, lambda: S.plain(_X[None])),
    "transposed": (ValueError, lambda: S.plain(_X.t())),
    "unknown activation": (ValueError, lambda: S.act(_X, Activation.of("no such"))),
    "no activation": (ValueError, lambda: S.act(_X, Activation.of(""))),
    "odd gated width": (ValueError, lambda: S.act(_X[:, :5].contiguous(), Activation.of("swiglu"))),
    "dy of h's width": (ValueError, lambda: S.dact(_X, _X, Activation.of("swiglu"))),
    "dy of another type": (ValueError, lambda: S.dact(_X.half(), _X, Activation.of("gelu"))),
    "gamma of rows": (ValueError, lambda: S.norm(_X, None, torch.ones(4), torch.ones(4))),
    "rstd of columns": (ValueError, lambda: S.norm(_X, None, torch.ones(6), torch.ones(6))),
    "bf16 statistics": (TypeError, lambda: S.norm(_X, None, torch.ones(4).bfloat16(), torch.ones(6))),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_bad_input_names_rule_and_remedy(name):
    kind, build = _REFUSED[name]
    with pytest.raises(kind, match="(must be|needs).*;"):
        build()
