"""QuantizedTensors copied, moved, written to files, kept for backward, printed."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

import te_lite as te
from te_lite.quantize.tensor import QuantizedTensor
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize.kinds import COL_FROM_ROW, all_kinds, assert_holds, devices, made, oracle, same_bytes, values


@devices
@all_kinds
@pytest.mark.parametrize("how", ["clone", "deepcopy", "to", "pickle"])
def test_copies_are_their_own(kind, how, device):
    v = values(48, 64, device=device)
    x = made(kind, v)
    copies = {
        "clone": lambda: x.clone(),
        "deepcopy": lambda: copy.deepcopy(x),
        "to": lambda: x.to(v.device, copy=True),
        "pickle": lambda: pickle.loads(pickle.dumps(x)),
    }
    y = copies[how]()
    assert_holds(how, y, x.dequantize())
    if how != "pickle":  # which leaves out what can be made again
        same_bytes(how, y, x)
    y.zero_()
    assert_holds(f"{how}, after a write to the copy", x, oracle(kind, v))


@pytest.mark.gpu
@all_kinds
def test_moving_between_devices(kind):
    x = made(kind, values(48, 64))
    if kind == "given":
        pytest.skip("its scale stays where the caller put it")
    y = x.cuda()
    assert y.device.type == "cuda"
    same_bytes("there", y, x)
    same_bytes("and back", y.cpu(), x)
    y.mul_(2)
    assert_bitwise_equal("works there", y.dequantize().cpu(), made(kind, x.dequantize() * 2).dequantize())


@devices
@all_kinds
def test_a_file_holds_plain_tensors_bit_for_bit(kind, device):
    x = made(kind, values(3, 16, 64, device=device))
    file = io.BytesIO()
    torch.save({"x": x, "again": x.view(48, 64)}, file)
    assert file.tell() < x.numel() * 4 + 8000  # neither a copy in bf16 nor a whole block of scales
    file.seek(0)
    back = torch.load(file, weights_only=True)
    for name, want in (("x", x), ("again", x.view(48, 64))):
        got = back[name]
        assert got.shape == want.shape and got.quantizer == want.quantizer or kind == "given"
        if kind in COL_FROM_ROW:
            assert got._columnwise_data is None
            got.update_usage(columnwise_usage=True)
        same_bytes(name, got, want)
    file.seek(0)
    assert_bitwise_equal("on the CPU", torch.load(file, map_location="cpu")["x"].dequantize(), x.dequantize().cpu())


def test_a_file_holds_no_block_of_scales():
    """On a GPU scales are cut from blocks."""
    x = made("e4m3", values(16, 64))
    block = torch.zeros(100_000)
    block[:1] = x._scale_inv
    x.q.row_scale = x.q.col_scale = block[:1]
    file = io.BytesIO()
    torch.save(x, file)
    assert file.tell() < 10_000
    file.seek(0)
    assert_bitwise_equal("numbers", torch.load(file).dequantize(), x.dequantize())


@pytest.mark.parametrize("kind", ["e4m3", "mxfp8"])
def test_a_file_is_read_where_only_te_lite_is_imported(kind, tmp_path):
    x = made(kind, values(32, 64))
    torch.save(x, tmp_path / "x.pt")
    torch.save(x.dequantize(), tmp_path / "plain.pt")
    code = (
        "import sys, torch, te_lite\n"
        "x, plain = (torch.load(f'{sys.argv[1]}/{name}.pt', weights_only=True) for name in ('x', 'plain'))\n"
        "assert torch.equal(x.dequantize(), plain)\nx.mul_(2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_file_calls_nothing_but_formats():
    class Evil:
        def __reduce__(self):
            rebuild, args = made("e4m3", values(32, 32)).__reduce_ex__(2)
            return rebuild, (("subprocess:Popen", {"args": ["true"]}), *args[1:])

    file = io.BytesIO()
    torch.save(Evil(), file)
    file.seek(0)
    with pytest.raises(Exception, match="subprocess:Popen.*no TensorFormat"):
        torch.load(file, weights_only=True)


class Keeper(torch.autograd.Function):
    """y = x with the tensor kept quantized for backward, by Transformer Engine's two calls."""

    @staticmethod
    def forward(ctx, plain, x):
        tensors, ctx.x = x.prepare_for_saving()
        ctx.save_for_backward(*tensors, plain)
        return plain.clone()

    @staticmethod
    def backward(ctx, dy):
        rest = ctx.x.restore_from_saved(ctx.saved_tensors)
        assert len(rest) == 1
        return dy * ctx.x.dequantize(), None


@all_kinds
def test_saving_for_backward(kind):
    x, plain = made(kind, values(32, 64)), values(32, 64, seed=1).requires_grad_()
    y = Keeper.apply(plain, x)
    numbers = x.dequantize()
    y.backward(torch.ones_like(y))
    assert_bitwise_equal("gradient", plain.grad, numbers)
    assert_holds("the original is not touched", x, numbers)


@all_kinds
def test_printing(kind):
    x = made(kind, values(3, 16, 64))
    text = repr(x)
    assert "(3, 16, 64)" in text and "bfloat16" in text and x.q.format.label in text and "row+col" in text
    assert f"{x.dequantize()[0, 0, 1].item():.4g}" in text and "read only" not in text
    scale = x.q.row_scale
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale
    assert f"scale_inv {scale.min().item():.4g} to {scale.max().item():.4g}" in text
    assert "(0, 32)" in repr(made(kind, values(0, 32)))
    assert "read only" in repr(QuantizedTensor(x.q, x.shape))


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "blockwise", "delayed"])
def test_a_state_dict_that_is_taken_in_inference_mode(recipe):
    """As by a hook of a validation. A look at a tensor is of the kind of its bytes."""
    with te.quantized_model_init(recipe=recipe):
        module = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu")
    with torch.inference_mode():
        state = module.state_dict()
        seen = module.weight.detach(), module.weight.view(1, 64, 64), state["weight"]
        values = module.weight.dequantize()
    assert not any(t.is_inference() for t in seen)
    assert torch.equal(state["weight"].dequantize(), values)
    other = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu")
    other.load_state_dict({name: value for name, value in state.items() if name != "_extra_state"}, strict=False)
