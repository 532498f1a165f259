"""What the grouped kernels become on a Hopper GPU, read from the compiler on any machine."""

import re

import pytest
import triton

from te_lite.ops import grouped_cast_kernels as C
from te_lite.ops import grouped_gemm as G
from te_lite.ops import grouped_gemm_kernels as K
from te_lite.ops.grouped_gemm_kernels import GemmConfig
from te_lite.ops.source import Form
from tests.ops.interpreted import ACTIVE
from tests.ops.test_compile_sm90 import SM90, local_memory

pytestmark = pytest.mark.skipif(ACTIVE, reason="the interpreter compiles nothing")

I32 = ("groups", "n", "k", "lda", "ldb")
STRIDES = ("a_scale_g", "b_scale_g")


def compiled(kernel, types, constants, warps, stages=3, registers=None):
    """As test_compile_sm90.compile_for, with descriptors and stages."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name not in types:
            signature[name], values[(i,)] = "constexpr", constants.get(name)
            continue
        signature[name] = types[name]
        if types[name][0] in "*i" and name not in ("amax_out", "groups"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=SM90, options={"num_warps": warps, "num_stages": stages, "maxnreg": registers})


def operands(config: GemmConfig, a: str, b: str, scaling: str) -> tuple[dict, dict]:
    """(types, constants) that both kernels share."""
    tma = scaling != "none"
    m, n, k = config[:3]
    types = {"layout": "*i32", "out": "*bf16", **dict.fromkeys(I32, "i32")}
    types |= (
        {"a": f"tensordesc<{a}[{m},{k}]>", "b": f"tensordesc<{b}[{n},{k}]>"} if tma else {"a": f"*{a}", "b": f"*{b}"}
    )
    if tma:
        types |= {"a_scale": "*fp32", "b_scale": "*fp32", **dict.fromkeys(STRIDES, "i32")}
    scales = "outer" if scaling in ("fast", "exact") else scaling
    constants = {"TMA": tma, "SCALES": scales, "EXACT": k if scaling == "exact" else 0, "BLOCK_M": m, "BLOCK_N": n,
                 "BLOCK_K": k, "GROUP_M": config.group_m}  # fmt: skip
    return types, constants | dict.fromkeys(STRIDES, 0)


@pytest.mark.parametrize("kind, a", [("fast", "fp8e4nv"), ("exact", "fp8e5"), ("blocks", "fp8e4nv"), ("16", "bf16")])
@pytest.mark.parametrize("form", ["rows", "groups"])
def test_products(form, kind, a, tmp_path):
    """By tensor cores, of the operands' own types; nothing spills, also where fp32 gradients are added to. But for two
    registers around the loop of exact sums by groups, whose tile measured fastest."""
    spilled = 16 if (form, kind) == ("groups", "exact") else 0
    config, scaling = G.CONFIGS[form, kind], "none" if kind == "16" else kind
    types, constants = operands(config, a, "bf16" if kind == "16" else "fp8e4nv", scaling)
    if form == "rows":
        types |= {"b_rows": "i32"} | ({"a_scale_k": "i32", "b_scale_n": "i32"} if kind == "blocks" else {})
        steps = {"a_scale_m": 1, "b_scale_n": 1, "a_scale_k": 0, "b_scale_k": 1 if kind == "blocks" else 0}
        constants |= steps | {"INNER_FIRST": kind == "16", "B_BLOCK": 128 if kind == "blocks" else 1, "GROUPS": 16}
        found = [compiled(K.rows_kernel, types, constants, config.num_warps, config.num_stages)]
    else:
        types |= {"out_g": "i64"} | ({"a_scale_m": "i32", "b_scale_m": "i32"} if kind == "blocks" else {})
        constants |= {"a_scale_n": 1, "b_scale_k": 1, "a_scale_m": 0, "b_scale_m": 0, "INNER_FIRST": kind == "16"}
        found = [
            compiled(
                K.groups_kernel, types | {"out": out}, constants | {"ADD": add}, config.num_warps, config.num_stages
            )
            for out, add in (("*bf16", False), ("*fp32", True))
        ]
    names = {"fp8e4nv": "e4m3.e4m3", "fp8e5": "e5m2.e4m3", "bf16": "bf16.bf16"}
    for one in found:
        assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.\w+\.f32\.{names[a]}", one.asm["ptx"])
        assert ("cp.async.bulk.tensor" in one.asm["ptx"]) == (kind != "16"), "fp8 tiles come by descriptors"
        assert one.metadata.global_scratch_size == 0 and one.metadata.shared <= 227 * 1024
        assert (local_memory(one, tmp_path) or 0) <= spilled, "registers spill"


SIZES = dict.fromkeys(("groups", "per_group", "cols", "padded", "group_stride"), "i32")


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("row, col", [(True, False), (False, True), (True, True)])
def test_casts(row, col, tokens, tmp_path):
    base = {"x": "*bf16"} | ({"layout": "*i32"} if tokens else {})
    outputs = ({"row": "*fp8e4nv"} if row else {}) | ({"col": "*fp8e4nv"} if col else {})
    blocks = {"FORM": Form("plain"), "POW2": True, "GROUPS": 16}

    def tile(config):
        return {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}

    one, two = C.CAST_CONFIG, C.BLOCK_CONFIG
    types = {**base, **outputs, **SIZES, "amax_stride": "i32", "eps": "fp32", "amax": "*fp32", "scale_inv": "*fp32"}
    found = [
        compiled(C.group_cast_kernel, types, blocks | tile(one) | {"FP8_MAX": 448.0}, one.num_warps, 3, one.registers)
    ]
    types = {**base, **outputs, **SIZES, "eps": "fp32", **dict.fromkeys(("row_scale_n", "col_scale_m"), "i32")}
    types |= ({"row_scale": "*fp32"} if row else {}) | ({"col_scale": "*fp32"} if col else {})
    constants = blocks | tile(two) | {"SQUARE": False, "CAP": 0, "row_scale_m": 1, "col_scale_n": 1, "square_g": 0}
    found.append(compiled(C.group_block_kernel, types, constants, two.num_warps))
    if not tokens:
        types = {
            **base,
            **outputs,
            **SIZES,
            "row_scale": "*fp32",
            "eps": "fp32",
            "row_scale_m": "i32",
            "square_g": "i32",
        }
        absent = {"col_scale_m": 0, "col_scale_n": 0}
        constants = blocks | tile(two) | absent | {"SQUARE": True, "CAP": 0, "row_scale_n": 1}
        found.append(compiled(C.group_block_kernel, types, constants, two.num_warps))
    mx = {"row_values": "*bf16"} if row else {}
    mx |= {"col_values": "*bf16"} if col else {}
    types = {**base, **mx, **dict.fromkeys(("groups", "per_group", "cols"), "i32")}
    found.append(compiled(C.group_mx_kernel, types, {"FORM": Form("plain"), "GROUPS": 16} | tile(C.MX_CONFIG), 1))
    for kernel in found:
        ptx = kernel.asm["ptx"]
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and re.search(r"ld\.global\S*\.v4\.b32", ptx)
        assert not re.search(r"st\.global\S*\.b8", ptx), "fp8 is stored byte by byte"
        assert local_memory(kernel, tmp_path) in (0, None), "registers spill"
