"""Quantizers on views, on expanded tensors and on sources that are computed as they are read."""

import pytest
import torch
from torch import Tensor

import te_lite as te
from te_lite.functional.linear import as_matrix
from te_lite.ops.activation import Activation
from te_lite.ops.source import Source, act, dact, norm, plain, produce_ref
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize.cases import (
    ALL,
    DEVICES,
    QUANTIZED,
    check_col,
    check_layouts,
    check_row,
    fill,
    make_operands,
    oracle,
    quantizers,
)

# ---- sources ----


def strided(v: Tensor) -> dict[str, Tensor]:
    """Views of v [64, 64] as a module may be given them."""
    return {
        "transposed": v.t(),
        "every other column": v[:, ::2],
        "every other row": v[::2],
        "one row expanded": v[:1].expand(40, 64),
        "one column expanded": v[:, :1].expand(64, 48),
        "offset": v.reshape(-1)[7 : 7 + 40 * 48].view(40, 48),
        "3-D": v.view(4, 16, 64),
        "3-D permuted": v.view(4, 16, 64).transpose(0, 1),
        "4-D": v.view(2, 4, 8, 64).permute(2, 0, 1, 3),
    }


def dense(v: Tensor) -> Tensor:
    return v.clone(memory_format=torch.contiguous_format)


@DEVICES
@QUANTIZED
def test_strided_and_expanded_inputs(case, device):
    v = fill((64, 64), "rows apart", 3)
    for name, view in strided(v.to(device)).items():
        want = dense(strided(v)[name]).reshape(-1, view.shape[-1])
        matrix = as_matrix(view, torch.bfloat16)
        for label, quantizer, views in quantizers(case, v.dtype, device):
            check_layouts(f"{name} {label}", quantizer, plain(matrix), want, views)


@ALL
def test_a_module_takes_a_view_as_it_takes_a_copy(case):
    """Output and gradients of a linear: the same bits from a view as from a dense copy of it."""
    base, weight = (fill((64, 64), "rows apart", seed) for seed in (4, 5))
    for name, view in strided(base).items():
        results = []
        for x in (view, dense(view)):
            module = te.Linear(view.shape[-1], 64, bias=False, params_dtype=torch.bfloat16, device="cpu")
            with torch.no_grad():
                module.weight.copy_(weight[:, : view.shape[-1]])
            x = x.detach().requires_grad_()
            with te.autocast(enabled=True, recipe=case.recipe()):
                out = module(x)
            out.float().square().sum().backward()
            results.append((out.detach(), dense(x.grad), module.weight.grad))
        for what, a, b in zip(("out", "dx", "dw"), *results, strict=True):
            assert_bitwise_equal(f"{name} {what}", a, b)


def fused_sources(dtype: torch.dtype, device: str) -> dict[str, Source]:
    def matrix(m: int, n: int, seed: int) -> Tensor:
        return fill((m, n), "normal", seed, dtype).to(device)

    x, gamma, beta = matrix(150, 144, 1), matrix(1, 144, 2)[0], matrix(1, 144, 3)[0]
    mean = x.float().mean(1)
    rstd = torch.rsqrt(x.float().var(1, unbiased=False) + 1e-5)
    return {
        "LayerNorm": norm(x, mean, rstd, gamma, beta),
        "RMSNorm": norm(x, None, rstd, gamma, None, zero_centered=True),
        "gelu": act(x, Activation.of("gelu")),
        "swiglu": act(matrix(150, 288, 4), Activation.of("swiglu")),
        "gradient of swiglu": dact(x, matrix(150, 288, 5), Activation.of("swiglu")),
        "gradient of srelu": dact(x, matrix(150, 144, 6), Activation.of("srelu")),
    }


@QUANTIZED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fused_sources(dtype, case):
    """What a norm or an activation computes is quantized from its fp32 value; bytes and scales are the oracle's.

    On the CPU, where both compute the same fp32 values. The sums of the columns come along.
    """
    for name, source in fused_sources(dtype, "cpu").items():
        v = produce_ref(source)
        for label, quantizer, views in quantizers(case, dtype, "cpu"):
            row, col = oracle(views, quantizer, v)
            both, sums = quantizer.quantize(source, row=True, col=True, bias_grad=torch.float32)
            assert both.shape == tuple(v.shape) and both.dtype == dtype
            check_row(f"{name} {label}", both, row, views)
            check_col(f"{name} {label}", both, col, views)
            # fp32 sums of 150 terms in any order
            bound = 150 * 2.0**-24 * v.double().abs().sum(0)
            assert sums.dtype == torch.float32 and bool(((sums.double() - v.double().sum(0)).abs() <= bound).all())


# ---- what stays unquantized ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@ALL
def test_which_operands_are_quantized(case, dtype):
    ops = make_operands(case, dtype, "cpu")
    v = fill((7, 48), "rows apart", 6, dtype)
    fp8 = {"x": case.x, "w": case.w, "dy": case.dy}
    for gemm, pair in {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}.items():
        for tensor, quantizer in zip(pair, (getattr(ops, gemm).a, getattr(ops, gemm).b), strict=True):
            q = quantizer.quantize(plain(v), row=True)[0]
            if fp8[tensor] is None or (gemm == "wgrad" and not case.wgrad):
                assert_bitwise_equal(f"{case.label} {gemm} {tensor}", q.dequantize(), v)
            else:
                assert q.row.dtype == fp8[tensor].row.fp8, f"{case.label} {gemm} {tensor}: {q.row.dtype}"
                assert quantizer.format.label, "what overlap_report() calls it"
