"""torch's FlopCounterMode sees every GEMM, once, whatever computes it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import te_lite as te
from te_lite.ops import gemm, gemm_fused, gemm_scaled
from te_lite.testing.distributed import device_params
from tests.harness import OPTIONS, RECIPES, under

M, K, N, F = 32, 64, 96, 160
# module -> (how it is made, the products of features of its GEMMs)
MODULES = {
    "Linear": (lambda **kw: te.Linear(K, N, **kw), [K * N]),
    "LayerNormLinear": (lambda **kw: te.LayerNormLinear(K, N, **kw), [K * N]),
    "LayerNormMLP": (lambda **kw: te.LayerNormMLP(K, F, **kw), [K * F, K * F]),
    "LayerNormMLP swiglu": (lambda **kw: te.LayerNormMLP(K, F, activation="swiglu", **kw), [2 * K * F, K * F]),
}
devices = pytest.mark.parametrize("device", device_params())


def counted(module, recipe, device, x_grad=True):
    """Flops of one forward and backward, a leading dimension more than a matrix has."""
    x = torch.randn(2, M // 2, K, dtype=torch.bfloat16, device=device, requires_grad=x_grad)
    with FlopCounterMode(display=False) as counter:
        with under(recipe):
            out = module(x)
        out.sum().backward()
        if module.need_backward_dw():
            module.backward_dw()
    return counter.get_total_flops()


def made(name, device, **kw):
    return MODULES[name][0](params_dtype=torch.bfloat16, device=device, **kw)


@devices
@pytest.mark.parametrize("recipe", [*RECIPES, *OPTIONS])
@pytest.mark.parametrize("name", MODULES)
def test_three_gemms_a_linear(name, recipe, device):
    """Frozen weights: no wgrad; an input without gradient in front of a Linear: no dgrad."""
    module, products = made(name, device), MODULES[name][1]
    assert counted(module, recipe, device) == 3 * 2 * M * sum(products)
    assert counted(module, recipe, device, x_grad=False) == (2 if name == "Linear" else 3) * 2 * M * sum(products)
    for weight in (p for p in module.parameters() if p.dim() == 2):
        weight.requires_grad_(False)
    assert counted(module, recipe, device) == 2 * 2 * M * sum(products)


OTHER_SINKS = {
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "both": {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
}


@devices
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sink", OTHER_SINKS)
def test_weight_gradients_that_go_elsewhere(sink, recipe, device):
    module = made("LayerNormLinear", device, **OTHER_SINKS[sink])
    module.weight.main_grad = torch.zeros(N, K, device=device)
    assert counted(module, recipe, device) == 3 * 2 * M * K * N


@devices
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gemms_that_write_into_a_given_tensor(out_dtype, device):
    """On GPUs these are no ops of te_lite; both ways are run wherever torch has fp8 GEMMs."""
    a, b = (torch.randn(n, K, device=device).to(torch.float8_e4m3fn) for n in (M, N))
    scales = torch.ones(1, device=device), torch.ones(1, device=device)
    out = torch.empty(M, N, dtype=out_dtype, device=device)
    for multiply in (gemm.gemm_fp8, gemm._gemm_fp8_cuda, gemm_scaled.gemm_fp8_rowwise):
        with FlopCounterMode(display=False) as counter:
            multiply(a, b, *scales, out_dtype, None, False, out)
        assert counter.get_total_flops() == 2 * M * N * K, multiply
    with FlopCounterMode(display=False) as counter:
        gemm.gemm(a.bfloat16(), b.bfloat16(), torch.bfloat16, None, torch.empty(M, N, dtype=torch.bfloat16).to(device))
    assert counter.get_total_flops() == 2 * M * N * K


@pytest.mark.parametrize("transposed", [False, True])
def test_a_fused_launch_is_counted(transposed, monkeypatch):
    """The kernel itself, which no dispatcher sees, is left out here."""
    launched = []

    class Kernel:
        def launch(self, *arguments):
            launched.append(arguments)

    monkeypatch.setattr(gemm_fused, "_loaded", lambda index, kind: Kernel())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    a = torch.randn(M, K).bfloat16()
    b = torch.randn(K, N).bfloat16().t() if transposed else torch.randn(N, K).bfloat16()
    kind = gemm_fused.Kind(True, a.dtype, b.dtype, "none", a.dtype, 2, transposed, 128)
    sizes = dict.fromkeys(("delta", "m", "n", "k", "rank", "flags", "pairs", "columns", "scales"), 0)
    none = dict.fromkeys(("ready", "counters", "word", "abort", "a_scale", "b_scale", "bias"))
    arguments = gemm_fused.Arguments(**none, **sizes)
    with FlopCounterMode(display=False) as counter:
        gemm_fused.launch(kind, 1, arguments, a=a, b=b, other=a, to=())
    assert counter.get_total_flops() == 2 * M * N * K and len(launched) == 1
    gemm_fused.launch(kind, 1, arguments, a=a, b=b, other=a, to=())  # unwatched
    assert len(launched) == 2
