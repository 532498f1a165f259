"""cublasLt called by te_lite: torch's bits, and sums with those of a product and an addition."""

import itertools
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_lite._C as _C
from te_lite.ops import cublaslt
from te_lite.ops.gemm import gemm_fp8
from te_lite.ops.gemm_scaled import _squares, _vectors, gemm_scaled_accumulate_, gemm_scaled_accumulate_ref_
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.paths import DEVICES
from tests.ops.test_gemm import fp8_accumulation

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# (M, K, N): small, one row, rows off every tile, long sums (for which a larger workspace would bring split K), wide.
SHAPES = [(48, 64, 96), (1, 4096, 4096), (1000, 2048, 3072), (512, 5632, 2048), (16, 1024, 8192), (2048, 512, 5632)]


def operands(m: int, k: int, n: int, a: torch.dtype = E4M3, b: torch.dtype = E4M3, device: str = "cuda") -> tuple:
    return tuple((torch.randn(rows, k, device=device) * 0.7).to(t) for rows, t in ((m, a), (n, b)))


def scales_of(kind: tuple[int, int], m: int, k: int, n: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """As te_lite holds them."""
    blocks = -(-k // 128)
    shapes = {
        cublaslt.TENSOR: ((1,), (1,)),
        cublaslt.ROWS: ((m,), (n,)),
        cublaslt.BLOCKS: ((m, blocks), (n, blocks)),
        cublaslt.SQUARES: ((m, blocks), (-(-n // 128), blocks)),
    }
    return tuple(torch.rand(shape, device=device) + 0.1 for shape in shapes[kind])


def as_read(kind: tuple[int, int], a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if kind in (cublaslt.TENSOR, cublaslt.ROWS):
        return scales[0].view(-1, 1), scales[1].view(1, -1)
    return _vectors(a, scales[0])[1], _squares(scales[1]) if kind == cublaslt.SQUARES else _vectors(b, scales[1])[1]


def by_torch(kind: tuple, a: Tensor, b: Tensor, scales: tuple, dtype: torch.dtype, bias=None, fast=False) -> Tensor:
    types = F.ScalingType
    names = {
        cublaslt.TENSOR: (types.TensorWise, types.TensorWise),
        cublaslt.ROWS: (types.RowWise, types.RowWise),
        cublaslt.BLOCKS: (types.BlockWise1x128, types.BlockWise1x128),
        cublaslt.SQUARES: (types.BlockWise1x128, types.BlockWise128x128),
    }
    how = {"scale_recipe_a": names[kind][0], "scale_recipe_b": names[kind][1], "output_dtype": dtype}
    return F.scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], bias=bias, use_fast_accum=fast, **how)


CASES = [
    (kind, types, out, bias, fast)
    for kind, types, out, bias, fast in itertools.product(
        (cublaslt.TENSOR, cublaslt.ROWS, cublaslt.BLOCKS, cublaslt.SQUARES),
        ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)),
        (BF16, FP32, FP16),
        (False, True),
        (False, True),
    )
    if (kind == cublaslt.TENSOR or (types == (E4M3, E4M3) and out != FP16))  # torch's other calls take no more
    and not (bias and out == FP32)
    and not (fast and kind in (cublaslt.BLOCKS, cublaslt.SQUARES))
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_torchs_bits(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    for kind, types, dtype, biased, fast in CASES:
        if kind in (cublaslt.BLOCKS, cublaslt.SQUARES) and m % 4:
            continue  # rows that te_lite pads before
        a, b = operands(m, k, n, *types)
        scales = as_read(kind, a, b, scales_of(kind, m, k, n))
        bias = torch.randn(n, device="cuda").to(dtype) if biased else None
        out = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
        assert cublaslt.product(out, a, b, *scales, kind, bias, fast), (kind, types, dtype, biased, fast)
        assert_bitwise_equal("out", out, by_torch(kind, a, b, scales, dtype, bias, fast))


KINDS = [cublaslt.TENSOR, cublaslt.ROWS, cublaslt.BLOCKS, cublaslt.SQUARES]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=["tensor", "rows", "blocks", "squares"])
def test_sums_have_the_bits_of_a_product_and_an_addition(kind: tuple, dtype: torch.dtype, device: str) -> None:
    for m, k, n in [(48, 64, 96), (7, 256, 512)] if device == "cpu" else [*SHAPES, (7, 256, 512)]:
        a, b = operands(m, k, n, device=device)
        scales = scales_of(kind, m, k, n, device)
        start = torch.randn(m, n, device=device).to(dtype) * k**0.5
        out, wanted = start.clone(), start.clone()
        gemm_scaled_accumulate_(out, a, b, *scales)
        gemm_scaled_accumulate_ref_(wanted, a, b, *scales, False)
        assert_bitwise_equal("out", out, wanted)
        assert not torch.equal(out, start)


@pytest.mark.gpu
def test_a_sum_takes_no_memory_of_its_own() -> None:
    """The temporary of a product in fp32 would be as large as out."""
    m, k, n = 2048, 512, 5632
    a, b = operands(m, k, n, E5M2)
    one, out = torch.ones(1, device="cuda"), torch.zeros(m, n, device="cuda")
    gemm_scaled_accumulate_(out, a, b, one, one)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gemm_scaled_accumulate_(out, a, b, one, one)
    assert torch.cuda.max_memory_allocated() - before <= cublaslt._MOST_WORKSPACE[True] < out.nbytes


@pytest.mark.gpu
def test_what_it_does_not_compute_is_left_alone() -> None:
    m, k, n = 64, 128, 96
    (a, b), one = operands(m, k, n), torch.ones(1, device="cuda")
    room = torch.full((m * n + 1,), 7.0, device="cuda")
    assert not cublaslt.product(room[1:].view(m, n), a, b, one, one, cublaslt.TENSOR)  # 4 bytes off
    assert not cublaslt.product(room[:-1].view(n, m).t(), a, b, one, one, cublaslt.TENSOR)
    fp64 = torch.full((m, n), 7.0, dtype=torch.float64, device="cuda")
    assert not cublaslt.product(fp64, a, b, one, one, cublaslt.TENSOR)
    both = [t.view(E5M2) for t in (a, b)]  # tensor cores take one at most
    assert not cublaslt.product(room[:-1].view(m, n), *both, one, one, cublaslt.TENSOR)
    assert (room == 7).all() and (fp64 == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("which", [0, 1])
def test_a_scale_where_it_cannot_be_read(which: int) -> None:
    """It costs a copy, and the next call, whose scale lies well, nothing."""
    m, k, n = 80, 144, 112
    (a, b), room = operands(m, k, n), torch.rand(8, device="cuda") + 0.1
    scales = [room[4:5], room[4:5]]
    scales[which] = room[1:2]
    out = torch.full((m, n), 7.0, dtype=BF16, device="cuda")
    assert not cublaslt.product(out, a, b, *scales, cublaslt.TENSOR) and (out == 7).all()
    given = scales[0].clone(), scales[1].clone()
    assert cublaslt.product(out, a, b, *given, cublaslt.TENSOR)
    assert_bitwise_equal("gemm_fp8", gemm_fp8(a, b, *scales, BF16), out)


def test_how_operands_lie() -> None:
    """Rows of fp8 may be apart, 16-bit matrices turned; nothing else is read in place."""
    wide = torch.zeros(64, 96, dtype=E4M3)
    tensor, unscaled = cublaslt.TENSOR, cublaslt.UNSCALED
    assert cublaslt._lies(wide, tensor) == (False, 96) and cublaslt._lies(wide[:, 32:64], tensor) == (False, 96)
    assert not cublaslt._lies(wide.t(), tensor)[1] and not cublaslt._lies(wide[:, ::2], tensor)[1]
    assert not cublaslt._lies(torch.zeros(64, 40, dtype=E4M3)[:, :32], tensor)[1]
    assert not cublaslt._lies(wide[:1].expand(64, 96), tensor)[1]
    assert cublaslt._lies(wide.to(BF16).t(), unscaled) == (True, 96)
    assert not cublaslt._lies(wide.to(BF16)[:, 32:64], unscaled)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS[:3], ids=["tensor", "rows", "blocks"])
def test_rows_that_lie_apart(kind: tuple) -> None:
    """Slices of columns, as of one group of tokens: the product of their copies."""
    m, k, n, first = 512, 256, 1024, 128
    a, b = operands(m, 4 * k, n)
    a, b = a[:, first : first + k], b[:, first : first + k]
    scales = as_read(kind, a, b, scales_of(kind, m, k, n))
    outs = [torch.full((m, n), torch.nan, device="cuda") for _ in range(2)]
    assert cublaslt.product(outs[0], a, b, *scales, kind)
    assert cublaslt.product(outs[1], a.contiguous(), b.contiguous(), *scales, kind)
    # Perhaps by another algorithm: each errs by what a sum of so many products may, of their magnitudes.
    magnitudes = torch.full((m, n), torch.nan, device="cuda")
    assert cublaslt.product(magnitudes, *(t.float().abs().to(E4M3) for t in (a, b)), *scales, kind)
    bound = 2.01 * fp8_accumulation("cuda", k, False) * magnitudes
    assert ((outs[0] - outs[1]).abs() <= bound).all() and ((outs[0] - outs[0].roll(1, 0)).abs() > bound).any()


@pytest.mark.gpu
def test_streams_and_graphs() -> None:
    """Two streams and a graph use one plan; each call has its own addresses and workspace."""
    m, k, n = 1024, 4096, 1024
    inputs = [(*operands(m, k, n), torch.rand(1, device="cuda") + 0.1) for _ in range(8)]
    wanted = [torch.empty(m, n, device="cuda") for _ in inputs]
    for (a, b, scale), out in zip(inputs, wanted, strict=True):
        assert cublaslt.product(out, a, b, scale, scale, cublaslt.TENSOR)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = [torch.full_like(out, torch.nan) for out in wanted]
        torch.cuda.synchronize()
        for i, (a, b, scale) in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                cublaslt.product(outs[i], a, b, scale, scale, cublaslt.TENSOR)
        torch.cuda.synchronize()
        for out, right in zip(outs, wanted, strict=True):
            assert_bitwise_equal("out", out, right)
    a, b, scale = inputs[0]
    out, graph = torch.empty_like(wanted[0]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert cublaslt.product(out, a, b, scale, scale, cublaslt.TENSOR)
    a.copy_(inputs[1][0])
    b.copy_(inputs[1][1])
    scale.copy_(inputs[1][2])
    out.fill_(torch.nan)
    graph.replay()
    assert_bitwise_equal("out", out, wanted[1])


def test_a_library_that_is_not_loaded_is_not_opened() -> None:
    with pytest.raises(RuntimeError, match="not loaded"):
        _C.Cublaslt("libcublasLt.so.99")


HEADER = """
#include <cublasLt.h>
static_assert(CUBLAS_COMPUTE_32F == 68 && CUDA_R_32F == 0 && CUDA_R_16F == 2 && CUDA_R_16BF == 14);
static_assert(CUDA_R_8F_E4M3 == 28 && CUDA_R_8F_E5M2 == 29);
static_assert(CUBLASLT_MATMUL_DESC_TRANSA == 3 && CUBLASLT_MATMUL_DESC_EPILOGUE == 7);
static_assert(CUBLASLT_MATMUL_DESC_BIAS_POINTER == 8 && CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE == 26);
static_assert(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER == 17 && CUBLASLT_MATMUL_DESC_B_SCALE_POINTER == 18);
static_assert(CUBLASLT_MATMUL_DESC_FAST_ACCUM == 25 && CUBLASLT_EPILOGUE_BIAS == 4);
static_assert(CUBLASLT_MATMUL_DESC_A_SCALE_MODE == 31 && CUBLASLT_MATMUL_DESC_B_SCALE_MODE == 32);
static_assert(CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F == 0 && CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F == 3);
static_assert(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F == 4 && CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F == 5);
static_assert(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES == 1 && CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES == 5);
static_assert(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES == 8 && sizeof(cublasLtMatmulHeuristicResult_t) == 96);
"""


def test_constants_are_those_of_the_header(tmp_path: Path) -> None:
    """The values that csrc/cublaslt.cpp and ops/cublaslt.py write down, where a CUDA toolkit is at hand."""
    nvidia = Path(torch.__file__).parents[1] / "nvidia"
    found = [*nvidia.glob("*/include/cublasLt.h"), *Path("/usr/local/cuda/include").glob("cublasLt.h")]
    folders = {path.parent for path in found} | {p.parent for p in nvidia.glob("*/include/cuda_runtime_api.h")}
    # nvcc's, which pip's packages of the runtime lack.
    crt = [*nvidia.glob("*/include/crt/host_defines.h"), *Path("/usr/local/cuda/include").glob("crt/host_defines.h")]
    folders |= {path.parents[1] for path in crt[:1]}
    if not found or not crt:
        pytest.skip("no cublasLt.h on this machine, or not what it includes")
    source = tmp_path / "header.cpp"
    source.write_text(HEADER)
    command = ["g++", "-std=c++17", "-fsyntax-only", *(f"-I{folder}" for folder in folders), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
