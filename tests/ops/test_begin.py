"""Kernels that are launched before the one before them has ended wait for it first, and then see what it wrote."""

import ast
from pathlib import Path

import pytest
import torch

import te_lite
from te_lite.ops.cast import amax, transform, transform_ref
from te_lite.ops.norm import norm_forward
from te_lite.ops.source import plain
from te_lite.testing.numerics import assert_bitwise_equal

OPS = Path(te_lite.__file__).parent / "ops"
E4M3 = torch.float8_e4m3fn


def kernels() -> dict[str, ast.FunctionDef]:
    """Every function of te_lite/ops that is compiled and named a kernel."""
    trees = [ast.parse(path.read_text()) for path in sorted(OPS.glob("*.py"))]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in found if node.name.endswith("_kernel") and node.decorator_list}


def begins(function: ast.FunctionDef) -> bool:
    """Whether its first statement, behind the docstring, is begin()."""
    first = function.body[ast.get_docstring(function) is not None]
    return isinstance(first, ast.Expr) and ast.unparse(first.value) in ("begin()", "begin(True)")


def test_every_kernel_waits_first() -> None:
    """But the one that waits for flags: it polls while the kernel before runs, and waits for that at its end."""
    found = kernels()
    assert len(found) >= 16
    assert [name for name, function in found.items() if not begins(function)] == ["wait_kernel"]
    assert ast.unparse(found["wait_kernel"].body[-1]) == "begin(True)"
    source = (OPS.parent / "csrc" / "gemm_fused.cu").read_text()
    body = source[source.index("extern") :]
    assert "griddepcontrol.wait" in body.split("setmaxnreg")[0]


def test_the_check_finds_a_kernel_that_does_not() -> None:
    late = ast.parse("def f():\n    'doc'\n    x = 1\n    begin()").body[0]
    assert not begins(late) and begins(ast.parse("def f():\n    'doc'\n    begin()").body[0])


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
