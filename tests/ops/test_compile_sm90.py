"""What the cast kernels become on a Hopper GPU, read from the compiler on any machine."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_lite.ops import block_kernels as B
from te_lite.ops import cast_kernels as K
from te_lite.ops import transpose
from te_lite.ops.activation import Activation, built
from te_lite.ops.source import WORDS, Form
from tests.ops.interpreted import ACTIVE

pytestmark = pytest.mark.skipif(ACTIVE, reason="the interpreter compiles nothing")

SM90 = GPUTarget("cuda", 90, 32)
# The version that tiles were chosen with on GPUs. Triton 3.7 needs more registers for 1 x 128 in both layouts.
TUNED = triton.__version__.startswith("3.6.")
SIZES = {"eps": "fp32", "rows": "i32", "cols": "i32", "padded": "i32", "count": "i32"}


def compile_sm90(
    kernel, types: dict[str, str], constants: dict, num_warps: int, aligned: bool = True, registers: int | None = None
):
    return compile_for(SM90, kernel, types, constants, num_warps, aligned, registers)


def compile_for(
    target: GPUTarget, kernel, types: dict[str, str], constants: dict, num_warps: int, aligned: bool = True,
    registers: int | None = None,
):  # fmt: skip
    """types: those of the arguments that are given; the others, constants aside, are None.

    aligned: pointers and sizes are multiples of 16, as Triton finds out by itself at a launch.
    """
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name not in types:
            signature[name] = "constexpr"
            values[(i,)] = constants.get(name)
            continue
        signature[name] = types[name]
        if aligned and name not in ("amax_out", "eps"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "maxnreg": registers})


def resources(compiled, folder: Path) -> str | None:
    """What a thread needs, as cuobjdump reports it. None where the tool is not there."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not os.access(tool, os.X_OK):
        return None
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def local_memory(compiled, folder: Path) -> int | None:
    """Bytes of stack and local memory a thread needs: spilled registers."""
    report = resources(compiled, folder)
    if report is None:
        return None
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", report)
    assert found, report
    return sum(map(int, found))


def scalar_stores(compiled) -> int:
    return len(re.findall(r"st\.global\.b32", compiled.asm["ptx"]))


@dataclass(frozen=True)
class Case:
    """form: the source. x: its type. fp8: the output's. hp: type of a high-precision output, with sums. act: that of
    the activation of a gradient, by column."""

    form: Form
    x: str
    fp8: str
    col: bool
    few: bool = False
    hp: str = ""
    current: bool = False
    sums: bool = False
    act: str = ""

    @property
    def types(self) -> dict[str, str]:
        types = {**SIZES, "x": self.x, "row": self.fp8, "scale_inv": "*fp32"}
        types |= {"amax": "*fp32"} if self.current else {"scale": "*fp32", "amax_out": "*fp32"}
        types |= {"col": self.fp8} if self.col else {}
        types |= {"hp": self.hp} if self.hp else {}
        types |= {"partial": "*fp32"} if self.hp or self.sums else {}
        types |= {"dy": self.x} if self.form.kind == "dact" else {}
        types |= {"act": self.act, "act_scale": "*fp32", "act_scale_inv": "*fp32"} if self.act else {}
        types |= {"rstd": "*fp32", "mean": "*fp32", "gamma": self.x, "beta": self.x} if self.form.kind == "norm" else {}
        return types


E4M3, E5M2 = "*fp8e4nv", "*fp8e5"
CASES = [
    Case(Form("plain"), "*bf16", E4M3, col=False),
    Case(Form("plain"), "*bf16", E4M3, col=True, current=True),
    Case(Form("plain"), "*bf16", E5M2, col=True, few=True),
    Case(Form("plain"), "*bf16", E5M2, col=True, sums=True),
    Case(Form("plain"), "*fp32", E4M3, col=True, current=True, sums=True),
    Case(Form("plain"), "*fp32", E4M3, col=True),
    Case(Form("plain"), "*fp32", E5M2, col=True, hp="*fp32"),
    Case(Form("norm"), "*bf16", E4M3, col=True),
    Case(Form("act", Activation.of("gelu")), "*fp16", E4M3, col=True),
    Case(Form("act", Activation.of("swiglu")), "*bf16", E4M3, col=True),
    Case(Form("dact", Activation.of("swiglu")), "*bf16", E5M2, col=True, hp="*bf16"),
    Case(Form("act", Activation.of("clamped_swiglu")), "*bf16", E4M3, col=True),
    Case(Form("dact", Activation.of("clamped_swiglu")), "*bf16", E5M2, col=True),
    Case(Form("dact", Activation.of("geglu")), "*fp32", E4M3, col=True, few=True, hp="*bf16"),
    Case(Form("dact", Activation.of("qgelu")), "*bf16", E4M3, col=False, current=True),
    Case(Form("dact", Activation.of("swiglu")), "*bf16", E5M2, col=True, act=E4M3),
    Case(Form("dact", Activation.of("swiglu")), "*bf16", E5M2, col=True, act=E4M3, current=True),
    Case(Form("dact", Activation.of("geglu")), "*bf16", E5M2, col=True, act=E4M3, sums=True),
    Case(Form("dact", Activation.of("gelu")), "*bf16", E5M2, col=True, act=E4M3, sums=True),
]


def _name(case: Case) -> str:
    act = "-act" if case.act else ""
    return f"{case.form.kind}-{case.form.activation.name}-{case.x[1:]}-{case.fp8[1:]}-col{case.col}{act}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_transform(case, tmp_path):
    counted = bool(case.act) and not (case.hp or case.sums)  # as ops/cast.py has it, of 16 bits
    config = K.cast_config(case.col, case.form.kind != "plain", case.few, bool(case.hp), case.sums, counted)
    block_m, block_n, num_warps, registers, _ = config
    constants = {
        "FORM": case.form, "POW2": False,
        "FP8_MAX": 57344.0 if case.fp8 == E5M2 else 448.0, "BLOCK_M": block_m, "BLOCK_N": block_n, "LOOP": False,
    }  # fmt: skip
    compiled = compile_sm90(K.transform_kernel, case.types, constants, num_warps, registers=registers)
    ptx = compiled.asm["ptx"]
    name = "e5m2x2" if case.fp8 == E5M2 else "e4m3x2"
    assert re.search(rf"cvt\.rn\.satfinite\.{name}\.f32", ptx), "the hardware's own fp8 conversion is not used"
    assert "div.rn.f32" in ptx and "div.rn.ftz" not in ptx, "1 / scale must be an IEEE division"
    assert ("atom" in ptx or "red.global" in ptx) == (not case.current), "only amax_out needs an atomic"
    backwards = case.current or case.form.kind == "norm"
    assert ("%nctaid.x" in ptx) == backwards, (
        "the last rows first, where they have just been read: from the last program"
    )
    # 16 bytes a thread both ways; a transposed store that is not along m would write single bytes.
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v[24]\.b32", ptx)
    assert not re.search(r"st\.global\S*\.b8", ptx), "fp8 is stored byte by byte"
    if case.col:
        most = 1 + ("partial" in case.types) * (1 + case.form.activation.glu) + bool(case.act)  # scales, column sums
        assert scalar_stores(compiled) <= most, "the transposed copy is stored by single words"
    assert local_memory(compiled, tmp_path) in (0, None), "registers spill"
    if counted:
        used = int(re.findall(r"REG:(\d+)", resources(compiled, tmp_path) or "REG:0")[-1])
        assert used <= 128, "three tiles fit at once, not four"


def test_sizes_that_are_not_multiples_of_16_compile_too(tmp_path):
    block_m, block_n, num_warps, *_ = K.cast_config(True, False, False, False, False)
    constants = {
        "FORM": Form("plain"), "POW2": True, "FP8_MAX": 448.0,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "LOOP": True,
    }  # fmt: skip
    case = Case(Form("plain"), "*bf16", E4M3, col=True, current=True)
    compiled = compile_sm90(K.transform_kernel, case.types, constants, num_warps, aligned=False)
    assert local_memory(compiled, tmp_path) in (0, None), "registers spill"


def check_words(compiled, folder: Path, registers: int, scalars: int) -> None:
    """16 bytes a thread in every load and store of the tile; registers: more of them, and fewer tiles fit at once."""
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 8, "four quarters, two loads each"
    assert not re.search(r"st\.global\S*\.(b8|b16|v2)", ptx) and scalar_stores(compiled) <= scalars
    assert local_memory(compiled, folder) in (0, None), "registers spill"
    assert int(re.findall(r"REG:(\d+)", resources(compiled, folder) or "REG:0")[-1]) <= registers


@pytest.mark.parametrize("x", ["*bf16", "*fp16"])
@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_casts_of_words(fp8, row, current, x, tmp_path):
    block_m, block_n, num_warps, registers, _ = K.WORD_CONFIGS[row]
    types = Case(Form("plain"), x, fp8, col=True, current=current).types
    if not row:
        del types["row"]
    constants = {
        "FORM": WORDS, "POW2": False,
        "FP8_MAX": 57344.0 if fp8 == E5M2 else 448.0, "BLOCK_M": block_m, "BLOCK_N": block_n, "LOOP": False,
    }  # fmt: skip
    compiled = compile_sm90(K.transform_kernel, types, constants, num_warps, registers=registers)
    check_words(compiled, tmp_path, 64, 1)


@pytest.mark.parametrize("x", ["*bf16", "*fp16"])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("row", [False, True])
def test_blocks_of_words(row, pow2, x, tmp_path):
    (block_m, block_n, num_warps, registers, _), _ = B.block_config(128, False, row, True, WORDS, pow2, False)
    types = {"eps": "fp32", "x": x, "col": E4M3, "col_scale": "*fp32"} | dict.fromkeys(
        ("rows", "cols", "padded"), "i32"
    )
    types |= {"row": E4M3, "row_scale": "*fp32"} if row else {}
    # Strides that are 1 become constants, as at a launch.
    constants = {"row_scale_m": 1, "col_scale_n": 1}
    types |= dict.fromkeys(("row_scale_n", "col_scale_m"), "i32")
    constants |= {
        "FORM": WORDS, "SQUARE": False,
        "CAP": 0 if pow2 else 3.0e38, "POW2": pow2, "FLAT": False, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "LOOP": False, "HALVES": False,
    }  # fmt: skip
    compiled = compile_sm90(B.block_kernel, types, constants, num_warps, registers=registers)
    most = (80 if pow2 else 128) if TUNED else (104 if pow2 else 224)
    check_words(compiled, tmp_path, most if row else 72, 1 + row)


@pytest.mark.parametrize("form", [Form("plain"), Form("dact", Activation.of("swiglu"))], ids=lambda form: form.kind)
def test_amax(form, tmp_path):
    block_m, block_n, num_warps, *_ = K.AMAX_CONFIG
    types = {"x": "*bf16", "partials": "*fp32", "rows": "i32", "cols": "i32"}
    types |= {"dy": "*bf16"} if form.two else {}
    constants = {"FORM": form, "BLOCK_M": block_m, "BLOCK_N": block_n}
    compiled = compile_sm90(K.amax_kernel, types, constants, num_warps)
    ptx = compiled.asm["ptx"]
    assert "atom" not in ptx and re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert local_memory(compiled, tmp_path) in (0, None), "registers spill"


def test_transpose(tmp_path):
    block_m, block_n, num_warps = transpose._TILE
    types = {"data": "*u8", "out": "*u8", "rows": "i32", "cols": "i32", "padded": "i32"}
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    compiled = compile_sm90(transpose.transpose_kernel, types, constants, num_warps)
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v4\.b32", ptx)
    assert local_memory(compiled, tmp_path) in (0, None), "registers spill"


@pytest.mark.parametrize("kind", ["plain", "norm", "act", "dact"])
@pytest.mark.parametrize("pow2, sums", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("row, col", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "block, square, fp8", [(32, False, E4M3), (32, False, E5M2), (128, False, E4M3), (128, True, E4M3)]
)
def test_blocks(block, square, fp8, row, col, pow2, sums, kind, tmp_path):
    """Squares are of weights, which are plain."""
    if square and kind != "plain":
        pytest.skip("weights are plain")
    if not (sums or (kind != "plain" and row and col)):
        pytest.skip("less than with sums")
    if not (pow2 or block == 128):
        pytest.skip("MX scales are powers of two")
    form = Form(kind, built("swiglu" if "act" in kind else "", ()))
    config, halves = B.block_config(block, square, row, col, form, pow2, sums)
    block_m, block_n, num_warps, registers, _ = config
    types = {"eps": "fp32", "x": "*bf16"} | ({"partial": "*fp32"} if sums else {})
    sizes = ("rows", "cols", "padded", "row_scale_m", "row_scale_n", "col_scale_m", "col_scale_n")
    types |= dict.fromkeys(sizes, "i32")
    scale = "*u8" if block == 32 else "*fp32"
    types |= {"row": fp8, "row_scale": scale} if row else {}
    types |= {"col": fp8, "col_scale": scale} if col else {}
    types |= {"dy": "*bf16"} if kind == "dact" else {}
    types |= {"rstd": "*fp32", "mean": "*fp32", "gamma": "*bf16", "beta": "*bf16"} if kind == "norm" else {}
    constants = {
        "FORM": form, "SQUARE": square, "CAP": 0 if pow2 else 3.0e38, "POW2": pow2,
        "FLAT": block == 32, "BLOCK_M": block_m, "BLOCK_N": block_n, "LOOP": False,
        "HALVES": halves,
    }  # fmt: skip
    compiled = compile_sm90(B.block_kernel, types, constants, num_warps, registers=registers)
    made = "e4m3x2" if fp8 == E4M3 else "e5m2x2"
    assert set(re.findall(r"cvt\.rn\.satfinite\.(\w+)\.f32", compiled.asm["ptx"])) == {made}
    # Two tiles of 128 x 128 with scales along both sides do not fit; 6 KB a thread was the alternative.
    most = 288 if (block, row, col, kind, sums) == (128, True, True, "dact", True) else 64
    assert (local_memory(compiled, tmp_path) or 0) <= most, "registers spill"
