"""What is quantized is read: no GEMM leaves a layout that was made for it, whichever gradients are wanted."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import te_lite as te
from te_lite.functional import layer
from te_lite.functional.parallel import LocalGemms
from te_lite.quantize.blockwise import BlockFormat
from te_lite.quantize.per_tensor import PerShardFormat, PerTensorFormat
from te_lite.quantize.qtensor import QTensor
from te_lite.quantize.rowwise import RowFormat
from te_lite.testing.distributed import device_params
from tests.harness import FP8, OPTIONS, under

M, K = 48, 64
KINDS = {te.Linear: ["weight"], te.LayerNormLinear: ["weight"], te.LayerNormMLP: ["fc1_weight", "fc2_weight"]}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
ALLOCATIONS = (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format)


class Made(TorchDispatchMode):
    """Every fp8 tensor that is allocated for a cast or a transposition to fill, or that one returns."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS or func.namespace == "te_lite":
            self.tensors += [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.dtype in FP8_DTYPES]
        return out


def unread(run, monkeypatch):
    """(shapes of the fp8 tensors that run() made and no GEMM and no other layout was made from, how many it made)."""
    read, operand, dequantize = set(), QTensor.operand, QTensor.dequantize

    def note(q, layout):
        given = q.row if layout == "row" or q.col is None else q.col
        data, scale = operand(q, layout)
        read.update(t.untyped_storage().data_ptr() for t in (given, data))
        return data, scale

    def note_all(q, layout=None):
        data = q.col if q.row is None or (layout == "col" and q.col is not None) else q.row
        read.add(data.untyped_storage().data_ptr())
        return dequantize(q, layout)

    def multiplying(matmul):
        def multiply(format, a, b, *rest):
            read.update(operand[0].untyped_storage().data_ptr() for operand in (a, b))
            return matmul(format, a, b, *rest)

        return multiply

    for format in (BlockFormat, PerTensorFormat, PerShardFormat, RowFormat):
        monkeypatch.setattr(format, "matmul", multiplying(format.matmul))
    monkeypatch.setattr(QTensor, "operand", note)
    monkeypatch.setattr(QTensor, "dequantize", note_all)
    with Made() as made:
        run()
    monkeypatch.undo()
    left = [tuple(t.shape) for t in made.tensors if t.untyped_storage().data_ptr() not in read]
    return left, len(made.tensors)


def wanted(module, kind, gradients):
    """Asks for no more than these gradients; whether x is one of them."""
    norm = [name for name, _ in module.named_parameters() if "norm" in name]
    trained = {"all": None, "none": [], "x": [], "w": KINDS[kind], "last w": KINDS[kind][-1:], "x and first w":
               KINDS[kind][:1], "norm": norm}[gradients]  # fmt: skip
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained is None or name in trained)
    return gradients in ("all", "x", "x and first w")


@pytest.mark.parametrize("gradients", ["all", "none", "x", "w", "last w", "x and first w", "norm"])
@pytest.mark.parametrize("recipe", [*FP8, *OPTIONS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_is_read(kind, recipe, gradients, monkeypatch):
    if gradients == "norm" and kind is te.Linear:
        pytest.skip("it has none")
    for tokens in (M, 2 * K, 8 * K):  # with many a weight may stay transposed
        module = kind(K, K, device="cpu", params_dtype=torch.bfloat16)
        x = torch.randn(tokens, K).bfloat16().requires_grad_(wanted(module, kind, gradients))
        dy = torch.randn(tokens, K).bfloat16()

        def run(module=module, x=x, dy=dy):
            with under(recipe):
                y = module(x)
            if y.requires_grad:
                y.backward(dy)

        left, count = unread(run, monkeypatch)
        assert count and not left, f"{tokens} tokens: of {count} fp8 tensors nobody reads {left}"


def test_an_unread_layout_is_found(monkeypatch):
    """A kept weight has both layouts; a call that is never differentiated reads one."""
    module = te.Linear(K, K, device="cpu", params_dtype=torch.bfloat16)
    x = torch.randn(M, K).bfloat16()

    def run():
        with torch.no_grad(), under("current"):
            module(x, is_first_microbatch=True)

    assert unread(run, monkeypatch) == ([(K, K)], 3)


# A backward holds no more than it reads


@pytest.mark.parametrize("recipe", [name for name in FP8 if name != "rowwise_with_gw_hp"])  # its wgrad reads dy
@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_gradient_is_let_go_before_the_products(kind, recipe, monkeypatch):
    """The gradient of a sum has no memory of its own, so it is copied to be quantized."""
    module, copies = kind(K, K, device="cpu", params_dtype=torch.bfloat16), []
    as_matrix, backward = layer.as_matrix, LocalGemms.backward

    def copied(x, dtype):
        made = as_matrix(x, dtype)
        copies.extend([weakref.ref(made)] if made is not x else [])
        return made

    def multiply(schedule, *arguments):
        assert copies and not any(copy() is not None for copy in copies)
        return backward(schedule, *arguments)

    with under(recipe):
        y = module(torch.randn(M, K).bfloat16().requires_grad_())
    monkeypatch.setattr(layer, "as_matrix", copied)
    monkeypatch.setattr(LocalGemms, "backward", multiply)
    y.sum().backward()


@pytest.mark.parametrize("device", [d for d in device_params() if d.values != ("cpu",)])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_of_a_frozen_backward(dtype, recipe, device):
    """1024 x 1024: by how much backward raises the process' peak, and in bf16 also beyond what forward left: dx takes
    2.1 MB, dy and w in fp8 1.05 each. A copy of dy would make it 6.3."""
    module = te.Linear(1024, 1024, bias=False, device=device, params_dtype=dtype)
    module.weight.requires_grad_(False)
    for _ in range(8):  # at first cuBLAS takes its workspace, and recorders hold all that they see
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with under(recipe):
            y = module(torch.randn(1024, 1024, device=device, dtype=dtype, requires_grad=True))
        before, left = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        y.sum().backward()
        after = torch.cuda.max_memory_allocated()
        del y
    assert (after - before) / 1e6 < 5.5
    assert dtype == torch.float32 or (after - left) / 1e6 < 5.5
