"""What the kernels of fused schedules become on a Hopper GPU, read from the compiler on any machine."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from triton.compiler import ASTSource

from te_lite.ops import flags, reduce
from te_lite.ops.gemm_gather import gather_kernel
from tests.ops.interpreted import ACTIVE
from tests.ops.test_compile_sm90 import SM90, local_memory

pytestmark = pytest.mark.skipif(ACTIVE, reason="the interpreter compiles nothing")

WORDS = {
    "ready",
    "epoch",
    "abort",
    "a_scale",
    "b_scale",
    "bias",
    "own_scale",
    "gathered_scale",
    "flag",
    "word",
    "stride",
    "mask",
    "delta",
    "rank",
    "rows_per_piece",
    "pieces",
    "tail",
}
SHARED_MEMORY = 227 * 1024


def compile_sm90(
    kernel, types: dict[str, str], constants: dict, num_warps: int, num_stages: int = 3, unaligned: set[str] = WORDS
):
    """As at a launch with sizes and addresses that are multiples of 16, shards' rows excepted."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = types.get(name, "constexpr")
        if name not in types:
            values[(i,)] = constants.get(name)
        elif name not in unaligned | {"m"} and not types[name].startswith("tensordesc"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(ASTSource(kernel, signature, values, attributes), target=SM90, options=options)


@dataclass(frozen=True)
class Case:
    """stack: bytes of spilled registers that are tolerated, outside of the main loop."""

    a: str = "bf16"
    b: str = ""
    out: str = "bf16"
    scale: tuple[str, str] = ("none", "none")
    bias: str = ""
    tile: tuple[int, int, int] = (128, 256, 8)
    ranks: int = 4
    stack: int = 0
    turned: bool = False  # b lies as [k, n]

    @property
    def block_k(self) -> int:
        return 128 if self.a.startswith("fp8") else 64

    @property
    def constants(self) -> dict:
        block_m, block_n, _ = self.tile
        a_scale, b_scale = self.scale
        return {
            "RANKS": self.ranks, "A_SCALE": a_scale, "B_SCALE": b_scale, "BLOCK_M": block_m,
            "BLOCK_N": block_n, "BLOCK_K": self.block_k, "GROUP": 8, "B_T": self.turned,
        }  # fmt: skip

    def operand(self, kind: str, parts: int = 1) -> str:
        """parts: of how many of them a tile consists."""
        rows = {"a": self.tile[0], "b": self.tile[1]}[kind] // parts
        block = (self.block_k, rows) if self.turned and kind == "b" else (rows, self.block_k)
        return f"tensordesc<{self.a if kind == 'a' else self.b or self.a}[{block[0]}, {block[1]}]>"

    def types(self) -> dict[str, str]:
        types = dict.fromkeys(("ready", "epoch", "abort"), "*i32")
        types |= dict.fromkeys(("delta", "m", "n", "k", "rank", "rows_per_piece", "pieces", "stride"), "i32")
        types |= dict.fromkeys(("own_scale", "gathered_scale", "a_scale", "b_scale"), "*fp32") if self.b_scaled else {}
        return types | ({"bias": f"*{self.bias}"} if self.bias else {})

    @property
    def b_scaled(self) -> bool:
        return self.scale != ("none", "none")


E4M3, E5M2 = "fp8e4nv", "fp8e5"
TENSOR, ROW = ("tensor", "tensor"), ("row", "row")
GATHER = [
    Case(),
    Case(turned=True),
    Case("fp16", out="fp32", bias="fp32"),
    Case("fp16", bias="fp16", tile=(128, 128, 8), turned=True),
    Case(E4M3, scale=ROW, bias="bf16"),
    Case(E4M3, scale=("shard", "tensor")),
    Case(E5M2, E4M3, out="fp32", scale=ROW, bias="bf16", stack=16),
    Case(E4M3, scale=ROW, bias="bf16", tile=(128, 128, 8)),
    Case(tile=(64, 128, 4)),
    Case(E4M3, scale=ROW, bias="bf16", tile=(64, 64, 4)),
]


def check_main_loop(compiled, case: Case, folder: Path, stages: int, loops: int) -> None:
    ptx = compiled.asm["ptx"]
    kinds = {"bf16": "bf16", "fp16": "f16", E4M3: "e4m3", E5M2: "e5m2"}
    assert f"wgmma.mma_async.sync.aligned.m64n{case.tile[1]}" in ptx
    assert f".f32.{kinds[case.a]}.{kinds[case.b or case.a]}" in ptx
    # Loads of `stages - 1` steps before each of the loops and one in it: a loop that was not pipelined has fewer.
    loads = 2 * loops * stages
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == loads
    assert "wgmma.wait_group.sync.aligned 1" in ptx, "a product is awaited before the next is issued"
    assert compiled.metadata.shared <= SHARED_MEMORY // (1 if case.tile[0] * case.tile[1] > 8192 else 2)
    assert (local_memory(compiled, folder) or 0) <= case.stack, "registers spill"
    assert not re.search(r"C75\d\d", assembler_log(compiled, folder)), "wgmma is serialized"
    wait = re.search(r"ld\.acquire\.sys\.global\.b32.*?bar\.sync 0;\s*fence\.proxy\.async\.global;", ptx, re.DOTALL)
    assert wait and "ld.relaxed.sys.global.b32" in wait[0] and "ld.global.nc" not in ptx


def assembler_log(compiled, folder: Path) -> str:
    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    done = subprocess.run(
        [tool, "-v", "-arch=sm_90a", source, "-o", folder / "kernel.o"], capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", GATHER, ids=str)
def test_gather(case, tmp_path):
    block_m, block_n, num_warps = case.tile
    parts = 4 if case.out == "fp32" or case.scale[1] == "row" else 2
    types = case.types() | {"own": case.operand("a"), "gathered": case.operand("a"), "b_desc": case.operand("b")}
    types |= {"b_tail": case.operand("b", 2), "tail": "i32"}
    types["out_desc"] = f"tensordesc<{case.out}[1, {block_m}, {block_n // parts}]>"
    compiled = compile_sm90(gather_kernel, types, case.constants | {"PARTS": parts}, num_warps, 4)
    halved = block_n == 256  # the last tiles
    check_main_loop(compiled, case, tmp_path, 4, loops=2 + halved)
    stores = 2 * parts + halved * parts // 2
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.global", compiled.asm["ptx"])) == stores


@pytest.mark.parametrize("wire, own, bias, ranks", [("bf16", "fp32", "bf16", 4), ("fp32", "fp32", "", 8)])
def test_reduce(wire, own, bias, ranks, tmp_path):
    types = {"staging": f"*{wire}", "own": f"*{own}", "out": "*bf16", "total": "i32", "n": "i32", "rank": "i32"}
    types |= {"bias": f"*{bias}"} if bias else {}
    constants = {"RANKS": ranks, "VECTOR": 8, "STEP": reduce._STEP}
    compiled = compile_sm90(reduce.reduce_kernel, types, constants, reduce._WARPS, unaligned={"rank"})
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\.L1::evict_first\S*\.v4\.b32", ptx) and "st.global.v4.b32" in ptx
    assert not re.search(r"ld\.global\S*\.b16", ptx) and local_memory(compiled, tmp_path) in (0, None)


def test_wait_kernel():
    types = {"flag": "*i32", "word": "*i32", "stride": "i32", "mask": "i32", "delta": "i32", "abort": "*i32"}
    compiled = compile_sm90(flags.wait_kernel, types, {}, 1)
    assert "ld.acquire.sys.global.b32" in compiled.asm["ptx"] and compiled.metadata.shared == 0
    # The abort word lies in host memory: read often, it slows the copies that are waited for.
    assert re.search(
        r"and\.b32 v, polls, 4095;\s*setp\.ne\.u32 p, v, 0;\s*@p bra POLL;\s*ld\.relaxed\.sys", compiled.asm["ptx"]
    )
