"""What is quantized is read: no GEMM leaves a layout that was made for it, whichever gradients are wanted."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import te_lite as te
from te_lite.quantize.qtensor import QTensor
from te_lite.testing.distributed import device_params
from te_lite.testing.memory import bytes_kept
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


# A frozen Linear's backward


def frozen(device, size=1024, **options):
    module = te.Linear(size, size, bias=False, device=device, **options)
    module.weight.requires_grad_(False)
    return module, torch.randn(size, size, device=device, requires_grad=True)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_backward_quantizes_dy_alone(recipe):
    """The weight's transpose is from forward, where it takes no more than the input that is not kept."""
    for tokens, made in ((64, [(64, 64)]), (63, [(63, 64)]), (48, [(48, 64), (64, 64)])):  # 63 are padded to 64
        module, x = frozen("cpu", 64)
        with under(recipe):
            y = module(x[:tokens])
        with Made() as backward:
            y.backward(torch.randn(tokens, 64))
        assert sorted(tuple(t.shape) for t in backward.tensors) == made


@pytest.mark.parametrize("recipe", FP8)
def test_a_frozen_weight_keeps_no_more_than_a_trained_one(recipe):
    for tokens in (32, 64, 256):
        kept = []
        for trained in (True, False):
            module, x = frozen("cpu", 64, params_dtype=torch.bfloat16)
            module.weight.requires_grad_(trained)
            with under(recipe):
                y = module(torch.randn(tokens, 64).bfloat16().requires_grad_())
            kept.append(bytes_kept(y))
        assert kept[1] <= kept[0]


@pytest.mark.parametrize("device", [d for d in device_params() if d.values != ("cpu",)])
def test_peak_of_a_frozen_backward(device):
    """fp32 parameters and input, 1024 each way, delayed scaling: dx is 4.2 MB, dy in fp8 1.05; peaks of the process
    before backward and after it."""
    module, x = frozen(device, params_dtype=torch.float32)
    with te.autocast():
        module(x.detach())  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with te.autocast():
        y = module(x)
        dy = torch.randn_like(y)
    before = torch.cuda.max_memory_allocated()
    y.backward(dy)
    assert (torch.cuda.max_memory_allocated() - before) / 1e6 < 5.5
