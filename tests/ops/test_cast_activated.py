"""transform() of a gradient with act_dtype: the activation from the same read, with the bits of a pass of its own."""

import pytest
import torch

from te_lite.ops import cast
from te_lite.ops import source as S
from te_lite.ops.activation import Activation
from tests.ops.paths import chosen
from tests.ops.test_cast import DEVICES, E4M3, E5M2, FORMATS, assert_same_bytes, run_poisoned, sources


def gradients(m: int, n: int, dtype: torch.dtype, device: str) -> list[S.Source]:
    return [source for source in sources(m, n, dtype, device).values() if source.kind == "dact"]


def same_bits(name: str, got: cast.Transformed, want: cast.Transformed, fields: tuple[str, ...]) -> None:
    for field in fields:
        a, b = getattr(got, field), getattr(want, field)
        assert a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{name}: {field}"


def close_sums(name: str, got: cast.Transformed, want: cast.Transformed, source: S.Source) -> None:
    """Column sums of fp32: a compiler may round a product before it is added, or not; each of m additions rounds."""
    magnitude = S.produce_ref(source).double().abs().sum(0)
    off = (got.bias_grad.double() - want.bias_grad.double()).abs()
    assert (off <= 2.0 * (source.rows + 1) * 2.0**-24 * magnitude).all(), f"{name}: {float(off.max())}"


@pytest.mark.parametrize("device", DEVICES)
@FORMATS
@pytest.mark.parametrize("dtype", S.DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (39, 66), (130, 96)], ids=str)
def test_the_activation_of_a_gradient(shape, dtype, fp8, device):
    """Every bit is that of a pass of its own, and nothing else changes, whatever else is wanted; sums by rounding."""
    scale, act_scale = (torch.tensor([s], device=device) for s in (3.3, 0.7))
    amax = torch.tensor([2.0, 5.0], device=device)
    for source in chosen(gradients(*shape, dtype, device), dtype, fp8, device):
        name, act = source.activation.name, source._replace(kind="act", dy=None)
        alone = {"row": False, "hp_dtype": None, "bias_grad": None}
        col = run_poisoned(act, fp8, act_scale, None, None, **alone)
        hp = cast.transform(act, hp_dtype=dtype).hp
        for by, layouts in (((scale, None), {}), ((None, amax), {"row": False, "bias_grad": None})):
            want = run_poisoned(source, fp8, *by, None, **layouts)
            fields = tuple(field for field, t in want._asdict().items() if t is not None and field != "bias_grad")
            got = run_poisoned(source, fp8, *by, None, act_dtype=fp8, act_scale=act_scale, **layouts)
            same_bits(name, got, want, fields)
            if want.bias_grad is not None:
                close_sums(name, got, want, source)
            same_bits(name, got._replace(col=got.act, scale_inv=got.act_scale_inv), col, ("col", "scale_inv"))
            got = run_poisoned(source, fp8, *by, None, act_dtype=dtype, **layouts)
            same_bits(name, got, want, fields)
            assert torch.equal(got.act.view(torch.uint8), hp.view(torch.uint8)) and got.act_scale_inv is None, name


@pytest.mark.parametrize("source", [S.plain(torch.zeros(4, 6)), S.act(torch.zeros(4, 6), Activation.of("gelu"))])
def test_the_activation_of_what_is_no_gradient_is_refused(source):
    with pytest.raises(ValueError, match="act_dtype"):
        cast.transform(source, hp_dtype=torch.float32, act_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "clamped_swiglu"])
@pytest.mark.parametrize("shape", [(4092, 2064), (8192, 1024), (33000, 208)], ids=str)
def test_the_activation_of_a_gradient_has_the_bits_of_a_pass_of_its_own(shape, activation):
    """Of many tiles; with column sums of 33000 rows a program loops over several."""
    m, n = shape
    act = Activation.of(activation)
    h, dy = (torch.randn(m, width, device="cuda", dtype=torch.bfloat16) for width in (n * (1 + act.glu), n))
    source, act_scale = S.dact(dy, h, act), torch.tensor([3.0, 1.7], device="cuda")[1:]
    want = cast.transform(S.act(h, act), fp8_dtype=E4M3, col=True, scale=act_scale)
    hp = cast.transform(S.act(h, act), hp_dtype=torch.bfloat16).hp
    for sums in (None, torch.float32):
        for given in ({"scale": act_scale}, {"amax": cast.amax(source)}):
            how = given | {"fp8_dtype": E5M2, "row": True, "col": True, "bias_grad": sums}
            alone = cast.transform(source, **how)
            got = cast.transform(source, **how, act_dtype=E4M3, act_scale=act_scale)
            assert_same_bytes(got.act, want.col.cpu().view(torch.uint8))
            assert torch.equal(got.act_scale_inv, want.scale_inv)
            for field in ("row", "col", "scale_inv") + ("bias_grad",) * (sums is not None):
                a, b = getattr(got, field), getattr(alone, field)
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field
        both = cast.transform(source, hp_dtype=torch.bfloat16, act_dtype=torch.bfloat16, bias_grad=sums)
        assert torch.equal(both.act, hp) and torch.equal(both.hp, cast.transform(source, hp_dtype=torch.bfloat16).hp)
