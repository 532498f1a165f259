"""The kinds of QuantizedTensor that a caller can make, with the oracle of each."""

from dataclasses import replace

import pytest
import torch

import te_lite as te
from te_lite.compat.callers import CallerQuantizer
from te_lite.quantize.params import weight_quantizer
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.testing.distributed import device_params
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize import formats
from tests.quantize.formats import E4M3, E5M2, Format

SCALE = 24.0
# name -> (quantizer for a caller, the oracle's format of its rows)
KINDS = {
    "e4m3": (lambda **kw: te.Float8CurrentScalingQuantizer(E4M3, **kw), Format()),
    "e5m2": (lambda **kw: te.Float8CurrentScalingQuantizer(E5M2, **kw), Format(fp8=E5M2)),
    "pow2": (
        lambda **kw: te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True, amax_epsilon=1.0, **kw),
        Format(pow2=True, eps=1.0),
    ),
    "given": (
        lambda device="cpu", **kw: te.Float8Quantizer(
            torch.tensor([SCALE], device=device), torch.zeros(1, device=device), E4M3, **kw
        ),
        Format(),
    ),
    "mxfp8": (lambda device=None, **kw: te.MXFP8Quantizer(E4M3, **kw), formats.MX_ROW),
    "mxfp8 e5m2": (lambda device=None, **kw: te.MXFP8Quantizer(E5M2, **kw), replace(formats.MX_ROW, fp8=E5M2)),
    "rowwise": (  # no quantizer for callers, but one for parameters
        lambda device=None, rowwise=True, columnwise=True: CallerQuantizer(
            weight_quantizer(te.recipe.RowwiseScaling(use_power_2_scales=False)), rowwise, columnwise
        ),
        Format((1, None)),
    ),
    "block1": (
        lambda device=None, **kw: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1, **kw),
        formats.blockwise(1, 128),
    ),
    "block2": (
        lambda device=None, **kw: te.Float8BlockQuantizer(E4M3, force_pow_2_scales=False, **kw),
        formats.blockwise(128, 128, pow2=False),
    ),
    "block1 e5m2": (
        lambda device=None, **kw: te.Float8BlockQuantizer(E5M2, block_scaling_dim=1, **kw),
        formats.blockwise(1, 128, fp8=E5M2),
    ),
    "block2 e5m2": (
        lambda device=None, **kw: te.Float8BlockQuantizer(E5M2, **kw),
        formats.blockwise(128, 128, fp8=E5M2),
    ),
}
COL_FROM_ROW = ("e4m3", "e5m2", "pow2", "given", "block2", "block2 e5m2")
all_kinds = pytest.mark.parametrize("kind", KINDS)
devices = pytest.mark.parametrize("device", device_params())


def values(*shape, seed=0, dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(*shape, generator=generator)
    return (v * torch.exp2(torch.randint(-6, 6, (shape[-1],), generator=generator))).to(dtype).to(device)


def made(kind, v, **kw):
    return KINDS[kind][0](device=v.device, **kw).quantize(v)


def oracle(kind, v, dtype=None):
    """What dequantize() must give, by a program that knows nothing of te_lite."""
    form = KINDS[kind][1]
    flat = v.cpu().reshape(-1, v.shape[-1])
    q = form.quantize(flat, torch.tensor(SCALE) if kind == "given" else None)
    return form.dequantize(q, dtype or v.dtype).reshape(v.shape)


def assert_holds(name, x, want):
    """x is quantized and its numbers are `want`, in every layout that it holds."""
    assert type(x) is QuantizedTensor and x.shape == want.shape, (name, type(x), x.shape)
    assert_bitwise_equal(name, x.dequantize().cpu(), want.cpu())


def same_bytes(name, a, b):
    for part, got, want in zip(("row", "row_scale", "col", "col_scale"), a.q.tensors, b.q.tensors, strict=False):
        assert (got is None) == (want is None), f"{name}: {part} held by one only"
        if got is not None:
            assert_bitwise_equal(f"{name} {part}", got.cpu(), want.cpu())
