"""What the Triton kernels of overlap become on a Hopper GPU, read from the compiler on any machine."""

import re

import pytest
import triton
from triton.compiler import ASTSource

from te_lite.ops import flags, reduce
from te_lite.ops.group_max import group_max_kernel
from tests.ops.interpreted import ACTIVE
from tests.ops.test_compile_sm90 import SM90, local_memory

pytestmark = pytest.mark.skipif(ACTIVE, reason="the interpreter compiles nothing")


def compile_sm90(
    kernel, types: dict[str, str], constants: dict, num_warps: int, unaligned: set[str], num_stages: int = 3
):
    """As at a launch with sizes and addresses that are multiples of 16, `unaligned` excepted."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = types.get(name, "constexpr")
        if name not in types:
            values[(i,)] = constants.get(name)
        elif name not in unaligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(ASTSource(kernel, signature, values, attributes), target=SM90, options=options)


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
    compiled = compile_sm90(flags.wait_kernel, types, {}, 1, unaligned=set(types))
    assert "ld.acquire.sys.global.b32" in compiled.asm["ptx"] and compiled.metadata.shared == 0
    # The abort word lies in host memory: read often, it slows the copies that are waited for.
    assert re.search(
        r"and\.b32 v, polls, 4095;\s*setp\.ne\.u32 p, v, 0;\s*@p bra POLL;\s*ld\.relaxed\.sys", compiled.asm["ptx"]
    )


def test_group_max(tmp_path):
    types = dict.fromkeys(("slots", "targets"), "*i64") | dict.fromkeys(("done", "word", "abort"), "*i32")
    types |= {"values": "*fp32", "out": "*fp32", "delta": "i32", "count": "i32"}
    compiled = compile_sm90(group_max_kernel, types, {"RANKS": 4, "PER_RANK": 1}, 1, unaligned=set(types))
    ptx = compiled.asm["ptx"]
    sends, polls = ptx.index("st.relaxed.sys.global.b64"), ptx.index("ld.relaxed.sys.global.b64")
    # A lane a rank, each once: first the rank's own kernels in turn, then all sends, then the polls, then the epoch.
    assert ptx.count("st.relaxed.sys.global.b64") == ptx.count("ld.relaxed.sys.global.b64") == 1
    assert ptx.index("ld.acquire.sys.global.b32") < sends < polls < ptx.rindex("st.global") < ptx.index("atom.")
    assert re.search(r"atom\S*\.release\S*\.exch", ptx) and "ld.global.nc" not in ptx
    assert local_memory(compiled, tmp_path) in (0, None)
