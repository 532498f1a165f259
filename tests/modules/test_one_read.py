"""Where LayerNormMLP(recompute_activation=True) has activation(h) from in backward: a read of h by itself, or the one
that the gradient of h takes."""

import pytest
import torch

from te_lite.ops import cast
from te_lite.ops.activation import Activation
from te_lite.ops.source import act, dact
from te_lite.quantize.identity import Calibrating, Identity
from te_lite.quantize.per_tensor import FORMATS, Current
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import RECIPES, leaf, under
from tests.modules.test_recompute_activation import NORM_AND_FC1, TOKENS, K, freeze, mlp


class Reads:
    """What reads h in backward: the sources that transform() was given, with the layouts of each."""

    def __init__(self, monkeypatch):
        self.of_a, original = [], cast._transform_op

        def noted(*args):
            names = cast.Transformed._fields
            wanted = {name for name, t in zip(names, args[-1 - len(names) : -1], strict=True) if t is not None}
            self.of_a += [wanted & {"hp", "row", "col"}] * (args[0] == "act") + [{"act"}] * ("act" in wanted)
            original(*args)

        monkeypatch.setattr(cast, "_transform_op", noted)


ONE_READ = ["bf16", "delayed", "current"]  # of one rank


@pytest.mark.parametrize("recipe", RECIPES)
def test_where_a_comes_from(recipe, monkeypatch):
    """Forward quantizes it by row alone. Backward has it from the read of h that the gradient of h takes, or, under
    recipes that do not know its scale, from one of its own."""
    module, reads = mlp(True), Reads(monkeypatch)
    x, dy = (reference.make_tokens(TOKENS, K, dtype=torch.bfloat16) for _ in range(2))
    with under(recipe):
        out = module(leaf(x))
    forward, reads.of_a = reads.of_a, []
    out.backward(dy)
    assert module._planned[1][1].one_read == (recipe in ONE_READ)
    if recipe in ONE_READ:
        assert forward == [{"hp"} if recipe == "bf16" else {"row"}] and reads.of_a == [{"act"}]
    else:
        assert {"act"} not in reads.of_a


@pytest.mark.parametrize("recipe", ONE_READ)
def test_what_else_gives_no_gradient_of_h_in_one_read(recipe, monkeypatch):
    """Of a bias alone there is a sum of the gradient of h, and no cast."""
    module, reads = mlp(True), Reads(monkeypatch)
    freeze(NORM_AND_FC1[:2])(module)
    with under(recipe):
        out = module(reference.make_tokens(TOKENS, K, dtype=torch.bfloat16))
    reads.of_a = []
    out.backward(torch.ones_like(out))
    assert reads.of_a == [{"hp"} if recipe == "bf16" else {"col"}]


class Scaled(Current):
    """Of somebody's own, who may quantize as they please."""


E4M3, E5M2 = (FORMATS[dtype] for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
PAIRS = {
    "other rules": (Current(E5M2, pow2=True), Current(E4M3, eps=100.0)),
    "one for both": (Current(E4M3), Current(E4M3)),
    "high precision": (Identity(), Identity()),
    "wider": (Identity(target=torch.float32), Identity(target=torch.float32)),
}
APART = [
    (Scaled(E5M2), Current(E4M3)),
    (Current(E5M2), Scaled(E4M3)),
    (Current(E5M2), Identity()),
    (Identity(), Current(E4M3)),
    (Identity(), Identity(target=torch.float32)),
    (Identity(), Calibrating()),
    (Calibrating(), Calibrating()),
]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("pair", PAIRS)
def test_a_gradient_and_what_was_quantized_before(pair, device):
    (of_grad, of_x), one = PAIRS[pair], Activation.of("swiglu")
    assert of_grad.gives_again(of_x)
    h, dy = (torch.randn(40, n, dtype=torch.bfloat16, device=device) for n in (192, 96))
    source, grad = act(h, one), dact(dy, h, one)
    earlier = of_x.quantize(source)[0].seed_only()
    for row, col, bias_grad in ((True, True, torch.bfloat16), (True, False, None), (False, True, None)):
        q, sums, x = of_grad.quantize_and_again(grad, row, col, bias_grad, earlier)
        want, want_sums = of_grad.quantize(grad, row=row, col=col, bias_grad=bias_grad)
        for got, expected in ((q, want), (x, of_x.again(source, earlier))):
            assert (got.format, got.shape, got.dtype) == (expected.format, expected.shape, expected.dtype)
            assert_bitwise_equal("columns", got.operand("col")[0], expected.operand("col")[0])
            if got.format.label:
                assert_bitwise_equal("scale", got.operand("col")[1], expected.operand("col")[1])
        assert (sums is want_sums is None) or torch.equal(sums, want_sums)


@pytest.mark.parametrize("of_grad, of_x", APART)
def test_what_may_quantize_otherwise_is_asked_apart(of_grad, of_x):
    assert not of_grad.gives_again(of_x)
