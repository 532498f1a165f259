"""produce_ref against independent formulas in fp64 with torch autograd; constructors refuse bad input."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_lite.ops import source as S
from te_lite.ops.activation import ACTIVATIONS, Activation

NAMES = ACTIVATIONS
BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def activation64(name: str, h: Tensor) -> Tensor:
    if name not in GATED:
        return BASES[name](h)
    gate, up = h.chunk(2, dim=1)
    return BASES[GATED[name]](gate) * up


def assert_fp32_of(got: Tensor, want: Tensor, magnitude: float = 1.0) -> None:
    """A few fp32 roundings from the fp64 value; magnitude is that of the terms that may cancel.

    A wrong constant in a formula, or the halves exchanged, is off by more than 2^-12.
    """
    assert got.dtype == torch.float32 and got.shape == want.shape
    worst = ((got.double() - want).abs() / (2**-20 * (want.abs() + magnitude))).max()
    assert worst <= 1, f"{worst:.3g} times the bound"


def test_exactly_te_s_ten_activations():
    assert sorted(NAMES) == sorted([*BASES, *GATED])
    assert all(Activation.of(name).glu == (name in GATED) for name in NAMES)


@pytest.mark.parametrize("dtype", S.DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_activation_and_its_gradient(name, dtype):
    m, f = 33, 18
    h = (3 * torch.randn(m, f * (2 if name in GATED else 1))).to(dtype)
    dy = torch.randn(m, f).to(dtype)
    h64 = h.double().requires_grad_()
    y64 = activation64(name, h64)
    y64.backward(dy.double())
    value, gradient = S.act(h, Activation.of(name)), S.dact(dy, h, Activation.of(name))
    assert (value.rows, value.cols) == (m, f) and (gradient.rows, gradient.cols) == tuple(h.shape)
    terms = 1 + float(dy.abs().max()) * float(h.abs().max()) ** 2
    assert_fp32_of(S.produce_ref(value), y64.detach(), terms)
    assert_fp32_of(S.produce_ref(gradient), h64.grad, terms)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_far_out_is_its_limit_and_nan_stays(name):
    """x * s * (1 - s) would be inf * 0 there."""
    far = torch.tensor([[1e30, -1e30, float("inf"), float("-inf"), float("nan")]])
    h = torch.cat((far, torch.ones_like(far)), 1) if name in GATED else far
    gate = S.produce_ref(S.dact(torch.ones_like(far), h, Activation.of(name)))[0, :5].tolist()
    up = 2e30 if name in ("srelu", "sreglu") else 1.0
    assert gate[0] == pytest.approx(up) and gate[1] == 0 and gate[3] == 0
    assert gate[2] == (float("inf") if up > 1 else 1.0)
    # torch passes the gradient of relu through where x is nan.
    assert gate[4] != gate[4] or name in ("relu", "reglu")


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
    "unknown activation": (ValueError, lambda: S.act(_X, Activation.of("mish"))),
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
