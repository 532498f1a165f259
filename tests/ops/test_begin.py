"""Kernels that are launched before the one before them has ended wait for it first, and then see what it wrote."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import te_lite
from te_lite.ops import flags, reduce
from te_lite.ops.cast import amax, transform, transform_ref
from te_lite.ops.group_max import group_max_kernel
from te_lite.ops.norm import norm_forward
from te_lite.ops.source import plain
from te_lite.ops.transpose import transpose_kernel
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.interpreted import ACTIVE
from tests.ops.test_compile_sm90 import compile_for

OPS = Path(te_lite.__file__).parent / "ops"
E4M3 = torch.float8_e4m3fn
TRANSPOSED = {"data": "*u8", "out": "*u8", "rows": "i32", "cols": "i32", "padded": "i32"}
WAITED = {"flag": "*i32", "word": "*i32", "stride": "i32", "mask": "i32", "delta": "i32", "abort": "*i32"}


def kernels() -> dict[str, ast.FunctionDef]:
    """Every function of te_lite/ops that is compiled and named a kernel."""
    trees = [ast.parse(path.read_text()) for path in sorted(OPS.glob("*.py"))]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    named = [node for node in found if node.name.endswith("_kernel") and node.decorator_list]
    assert len({node.name for node in named}) == len(named), "two of one name"
    return {node.name: node for node in named}


def first_call(function: ast.FunctionDef) -> str:
    """Its first statement behind the docstring."""
    return ast.unparse(function.body[ast.get_docstring(function) is not None])


def waits_for_ranks(function: ast.FunctionDef) -> bool:
    return "wait_flags" in ast.unparse(function) or "_POLL" in ast.unparse(function)


def test_every_kernel_waits_first() -> None:
    """Those that wait for other ranks without letting the next one start; the wait kernel at its end, for it polls
    while the kernel before runs."""
    found = kernels()
    assert len(found) >= 16
    expected = {name: "after_previous()" if waits_for_ranks(found[name]) else "begin()" for name in found}
    assert {name for name, call in expected.items() if call == "after_previous()"} == {
        "group_max_kernel",
        "wait_kernel",
    }
    for name, function in found.items():
        if name == "wait_kernel":
            assert ast.unparse(function.body[-1]) == expected[name]
        else:
            assert first_call(function) == expected[name], name


def test_the_fused_gemms_wait_first_too() -> None:
    """And let the next kernel start in one place, behind the loop that awaits shards, and not of a reduce-scatter."""
    source = (OPS.parent / "csrc" / "gemm_fused.cu").read_text()
    assert "griddepcontrol.wait" in source[source.index("extern") :].split("setmaxnreg")[0]
    load = source[source.index("void produce(") : source.index("void store_output(")]
    assert source.count("launch_dependents") == load.count('if (GATHER) asm volatile("griddepcontrol.launch_dep') == 1
    assert load.rindex("await(") < load.rindex("if (GATHER) continue;") < load.index("launch_dependents")


def test_the_grouped_gemms_wait_first_too() -> None:
    source = (OPS.parent / "csrc" / "gemm_grouped.cu").read_text()
    assert "griddepcontrol.wait; griddepcontrol.launch_dependents;" in source[source.index("extern") :].split("set")[0]


def test_the_check_finds_a_kernel_that_does_not() -> None:
    late, early = (ast.parse(f"def f():\n    'doc'\n    {body}").body[0] for body in ("x = 1; begin()", "begin()"))
    assert first_call(late) != "begin()" == first_call(early)


def instructions(capability: int, kernel, types: dict[str, str], constants: dict, monkeypatch) -> tuple[int, int]:
    """How many waits for the kernel before, and starts of the next one, a kernel becomes."""
    target = GPUTarget("cuda", capability, 32)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: target))
    ptx = compile_for(target, kernel, types, constants, 4).asm["ptx"]
    return ptx.count("griddepcontrol.wait"), ptx.count("griddepcontrol.launch_dependents")


@pytest.mark.skipif(ACTIVE, reason="the interpreter compiles nothing")
def test_what_the_calls_become(monkeypatch) -> None:
    """Nothing on GPUs that have no such instructions. The wait kernel waits in a branch, too."""
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64}
    assert instructions(90, transpose_kernel, TRANSPOSED, blocks, monkeypatch) == (1, 1)
    assert instructions(80, transpose_kernel, TRANSPOSED, blocks, monkeypatch) == (0, 0)
    assert instructions(90, flags.wait_kernel, WAITED, {}, monkeypatch) == (2, 0)


@pytest.mark.skipif(ACTIVE, reason="the interpreter compiles nothing")
def test_kernels_of_rings_need_no_hopper(monkeypatch) -> None:
    """Those that a ring launches beside its GEMMs compile for compute capability 8.0, too; none of them ran there."""
    summed = {"staging": "*bf16", "own": "*fp32", "out": "*bf16", "bias": "*bf16"}
    summed |= dict.fromkeys(("total", "n", "rank"), "i32")
    sizes = {"RANKS": 4, "VECTOR": 8, "STEP": reduce._STEP}
    largest = {"slots": "*i64", "targets": "*i64", "values": "*fp32", "out": "*fp32", "delta": "i32", "count": "i32"}
    largest |= dict.fromkeys(("done", "word", "abort"), "*i32")
    assert instructions(80, flags.wait_kernel, WAITED, {}, monkeypatch) == (0, 0)
    assert instructions(80, reduce.reduce_kernel, summed, sizes, monkeypatch) == (0, 0)
    assert instructions(80, group_max_kernel, largest, {"RANKS": 4, "PER_RANK": 1}, monkeypatch) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 4096])
def test_a_chain_of_kernels_sees_what_each_wrote(rows: int) -> None:
    """Two hundred times norm, maxima, cast, in the same memory, without a pause: the bits of the oracle."""
    torch.manual_seed(rows)
    gamma = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    inputs = [torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16) * 2.0 ** (i % 7 - 3) for i in range(20)]
    x = torch.empty_like(inputs[0])
    got = []
    for step in range(200):
        x.copy_(inputs[step % len(inputs)])
        y = norm_forward(x, gamma, None, 1e-5, True, False)[0]
        got.append((y, transform(plain(y), fp8_dtype=E4M3, row=True, col=True, amax=amax(plain(y)))))
    torch.cuda.synchronize()
    for step, (y, cast) in enumerate(got):
        expected = norm_forward(inputs[step % len(inputs)], gamma, None, 1e-5, True, False)[0]
        assert_bitwise_equal(f"norm {step}", y, expected)
        torch.cuda.synchronize()
        want = transform_ref(
            plain(expected), fp8_dtype=E4M3, row=True, col=True, amax=expected.float().abs().max().view(1)
        )
        for name in ("row", "col", "scale_inv"):
            assert_bitwise_equal(f"{name} {step}", getattr(cast, name), getattr(want, name))
