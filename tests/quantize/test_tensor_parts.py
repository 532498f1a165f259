"""Parts of a QuantizedTensor: rows stay quantized and follow the whole; others are plain."""

import pytest
import torch

from te_lite.quantize.tensor import QuantizedTensor
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize.kinds import all_kinds, assert_holds, devices, made, values

PARTS = {
    "chunk": lambda x: x.chunk(3), "split": lambda x: x.split(128), "sizes": lambda x: x.split((256, 0, 32, 32)),
    "slice": lambda x: (x[128:200], x[:128], x[-64:]), "narrow": lambda x: (x.narrow(0, 256, 64),),
    "all": lambda x: (x[:], *x.chunk(1)),
}  # fmt: skip


@devices
@all_kinds
@pytest.mark.parametrize("how", PARTS)
def test_parts_stay_quantized(kind, how, device):
    """They follow what is written to the whole."""
    x = made(kind, values(320, 96, device=device))
    parts, wanted = PARTS[how](x), PARTS[how](x.dequantize())
    assert len(parts) == len(wanted)
    whole_blocks = not kind.startswith("block2") or how not in ("chunk", "sizes")
    for part, want in zip(parts, wanted, strict=True):
        if whole_blocks or type(part) is QuantizedTensor:
            assert_holds(how, part, want)
        else:
            assert_bitwise_equal(how, part, want)
    held = [part for part in parts if type(part) is QuantizedTensor]
    assert bool(held) == whole_blocks
    x.copy_(values(320, 96, seed=1, device=device))
    for part, want in zip(parts, PARTS[how](x.dequantize()), strict=True):
        if type(part) is QuantizedTensor:
            assert_holds(f"{how} after a write", part, want)


@all_kinds
def test_parts_of_three_dimensions_stay_quantized(kind):
    x = made(kind, values(4, 64, 96))
    for part, want in zip(x.chunk(2), x.dequantize().chunk(2), strict=True):
        assert_holds("chunk", part, want)


@all_kinds
def test_a_part_is_read_only(kind):
    x = made(kind, values(256, 64))
    before = x.dequantize()
    for part in (*x.chunk(2), x[:128]):
        with pytest.raises(RuntimeError, match="a part shares scales with the rest"):
            part.mul_(2)
    assert_bitwise_equal("whole", x.dequantize(), before)


@all_kinds
def test_gradients_of_parts(kind):
    """Each to its rows; those of a part that nothing used are zero."""
    x = made(kind, values(256, 64)).requires_grad_()
    first, _ = x.chunk(2)
    weight = values(128, 64, seed=1)
    (first * weight).sum().backward()
    assert_bitwise_equal("used", x.grad[:128], weight)
    assert not x.grad[128:].any()


@pytest.mark.parametrize("cut", [
    lambda x: x.chunk(2, -1), lambda x: x.split(3, 1), lambda x: (x[:, 1:3],), lambda x: (x[::2],),
])  # fmt: skip
def test_parts_that_are_not_rows_dequantize(cut):
    x = made("e4m3", values(4, 6, 32))
    for part, want in zip(cut(x), cut(x.dequantize()), strict=True):
        assert type(part) is torch.Tensor
        assert_bitwise_equal("part", part, want)


def test_parts_of_columns_alone_dequantize():
    x = made("e4m3", values(64, 32))
    x.update_usage(rowwise_usage=False)
    assert all(type(part) is torch.Tensor for part in x.chunk(2))
