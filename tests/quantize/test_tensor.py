"""QuantizedTensor as its users see it: numbers, writes, shapes, layouts."""

import copy

import pytest
import torch
import torch.distributed as dist

from te_lite.quantize.tensor import QuantizedTensor
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize import formats
from tests.quantize.kinds import COL_FROM_ROW, KINDS, all_kinds, assert_holds, devices, made, oracle, same_bytes, values

# Numbers


@devices
@all_kinds
@pytest.mark.parametrize("shape", [(160, 256), (3, 5, 96), (64,), (0, 32)])
def test_numbers_are_the_oracles(kind, shape, device):
    v = values(*shape, device=device)
    x = made(kind, v)
    assert (x.dtype, x.device) == (v.dtype, v.device)
    assert_holds(kind, x, oracle(kind, v))
    assert_bitwise_equal("fp32", x.dequantize(torch.float32).cpu(), oracle(kind, v, torch.float32))


def test_dequantize_rounds_once():
    """A way through bf16 would lose what fp32 holds."""
    x = made("e4m3", values(64, 64))
    exact = x.dequantize(torch.float32)
    assert not torch.equal(exact, x.dequantize().float())
    assert_bitwise_equal("bf16", exact.bfloat16(), x.dequantize())


@all_kinds
def test_a_cast_rounds_once(kind):
    """Masters are often made as param.detach().clone().float()."""
    x = made(kind, values(64, 64))
    for dtype in (torch.float32, torch.float16):
        for cast in (x.to(dtype), x.detach().clone().type(dtype), x.to("cpu", dtype, non_blocking=True)):
            assert type(cast) is torch.Tensor
            assert_bitwise_equal(str(dtype), cast, x.dequantize(dtype))
    for cast in (x.float(), x.double().float()):
        assert_bitwise_equal("fp32", cast, x.dequantize(torch.float32))
    assert type(x.to(torch.bfloat16, copy=True)) is type(x) and x.bfloat16() is x
    leaf = values(32, 64).requires_grad_()
    weight = values(32, 64, seed=1, dtype=torch.float32)
    (KINDS[kind][0]().quantize(leaf).float() * weight).sum().backward()
    assert_bitwise_equal("gradient", leaf.grad, weight.bfloat16())


@all_kinds
def test_gradients_pass_both_ways(kind):
    v = values(32, 64).requires_grad_()
    x = KINDS[kind][0]().quantize(v)
    weight = values(32, 64, seed=1, dtype=torch.float32)
    (x.dequantize(torch.float32) * weight).sum().backward()
    assert_bitwise_equal("gradient", v.grad, weight.bfloat16())


# Writing


WRITES = {
    "add_": lambda x, o: x.add_(o, alpha=0.5),
    "mul_": lambda x, o: x.mul_(1.5),
    "addcdiv_": lambda x, o: x.addcdiv_(o, o.abs() + 1, value=-0.1),
    "lerp_": lambda x, o: x.lerp_(o, 0.25),
    "zero_": lambda x, o: x.zero_(),
    "fill_": lambda x, o: x.fill_(3.0),
    "copy_": lambda x, o: x.copy_(o),
    "copy_ wider": lambda x, o: x.copy_(o.double()),
    "copy_ broadcast": lambda x, o: x.copy_(o[0]),
    "copy_ number": lambda x, o: x.copy_(1.5),
    "out=": lambda x, o: torch.add(o, 1, out=x),
    "normal_": lambda x, o: x.normal_(generator=torch.Generator(o.device).manual_seed(5)),
    "foreach": lambda x, o: (torch._foreach_add_([x, o.clone()], [o, o]), x)[1],
    "masked_fill_": lambda x, o: x.masked_fill_(o > 0, 2.0),
}


@all_kinds
@pytest.mark.parametrize("how", WRITES)
def test_a_write_computes_and_quantizes_again(kind, how):
    """Into the same object and memory, in both layouts: the bytes of the plain result quantized."""
    v, other = values(48, 64), values(48, 64, seed=1)
    quantizer = KINDS[kind][0]()
    x = quantizer(v)
    version, memory = x._version, [t.data_ptr() for t in x.get_data_tensors()]
    plain = x.dequantize()
    got = WRITES[how](x, other)
    assert got is x and x._version > version and [t.data_ptr() for t in x.get_data_tensors()] == memory
    assert x.dtype == torch.bfloat16
    want = quantizer(other.double().float() if how == "copy_ wider" else WRITES[how](plain, other))
    same_bytes(how, x, want)


@all_kinds
def test_quantize_takes_a_wider_source_as_it_is(kind):
    """fp32 masters are rounded once, not to the tensor's dtype first."""
    master = values(48, 64, dtype=torch.float32, seed=3)
    x = made(kind, values(48, 64))
    assert x.quantize_(master) is x
    want = KINDS[kind][0]()(master)
    same_bytes("bytes", x, want)
    rounded = KINDS[kind][0]()(master.bfloat16())
    assert not torch.equal(rounded.dequantize(torch.float32), want.dequantize(torch.float32))


def test_views_and_detached_tensors_share_the_numbers():
    x = made("e4m3", values(4, 8, 32))
    for alias in (x.view(32, 32), x.detach(), x.data, copy.copy(x)):
        assert type(alias) is QuantizedTensor
        alias.mul_(2)
        assert_bitwise_equal("alias", x.dequantize().flatten(), alias.dequantize().flatten())


def test_bytes_are_copied_between_equal_formats():
    """Quantizing the numbers again could move a scale."""
    x, y = made("e4m3", values(32, 32)), made("e4m3", values(32, 32, seed=1))
    x.q.row_scale.mul_(0.75)  # a scale that its own amax would not give
    y.copy_(x)
    y.update_usage(columnwise_usage=False)
    x.update_usage(columnwise_usage=False)
    same_bytes("copied", y, x)


def test_copy_between_formats_goes_through_the_numbers():
    x, y = made("e5m2", values(32, 32)), made("e4m3", values(32, 32, seed=1))
    y.copy_(x)
    same_bytes("copied", y, made("e4m3", x.dequantize()))


def test_copy_from_columns_alone_goes_through_the_numbers():
    x, y = made("e4m3", values(32, 32)), made("e4m3", values(32, 32, seed=1))
    x.update_usage(rowwise_usage=False)
    y.copy_(x)
    same_bytes("copied", y, made("e4m3", x.dequantize()))


def test_a_write_of_another_shape_is_refused():
    x = made("e4m3", values(32, 64))
    before = x.dequantize()
    with pytest.raises(RuntimeError):
        x.copy_(values(64, 32))
    with pytest.raises(RuntimeError):
        x.t_()
    assert_bitwise_equal("untouched", x.dequantize(), before)


# name -> (what would change the shape or the memory, the operator that the error names)
RESHAPING_WRITES = {
    "squeeze_": (lambda x: x.squeeze_(), "squeeze_"),
    "squeeze_ dim": (lambda x: x.squeeze_(0), "squeeze_"),
    "squeeze_ dims": (lambda x: x.squeeze_((0,)), "squeeze_"),
    "unsqueeze_": (lambda x: x.unsqueeze_(0), "unsqueeze_"),
    "transpose_": (lambda x: x.transpose_(0, 1), "transpose_"),
    "transpose_ same shape": (lambda x: x.transpose_(1, 2), "transpose_"),
    "t_": (lambda x: x.view(32, 32).t_(), "t_"),
    "swapaxes_": (lambda x: x.swapaxes_(0, 2), "transpose_"),
    "swapdims_": (lambda x: x.swapdims_(0, 2), "transpose_"),
    "as_strided_": (lambda x: x.as_strided_((4, 4), (4, 1)), "as_strided_"),
    "resize_": (lambda x: x.resize_(4, 4), "resize_"),
    "resize_as_": (lambda x: x.resize_as_(values(3, 3)), "resize_as_"),
    "set_": (lambda x: x.set_(values(1, 32, 32, seed=1)), "set_"),
    "set_ nothing": (lambda x: x.set_(), "set_"),
    "out= fewer": (lambda x: torch.add(values(32, 32), 1, out=x), "add"),
    "out= more": (lambda x: torch.add(values(2, 32, 32), 1, out=x), "add"),
    "out= of a reduction": (lambda x: torch.sum(values(4, 32), 0, out=x), "sum"),
    "out= of two": (lambda x: torch.max(values(4, 32), 0, out=(x, torch.empty(0, dtype=torch.long))), "max"),
}


@pytest.mark.parametrize("kind", ["e4m3", "mxfp8"])
@pytest.mark.parametrize("how", RESHAPING_WRITES)
def test_a_write_that_would_change_the_shape_is_refused(how, kind):
    """Aloud and by name; the numbers stay."""
    write, name = RESHAPING_WRITES[how]
    x = made(kind, values(1, 32, 32))
    before = x.dequantize()
    with pytest.raises(RuntimeError, match=rf"\b{name}.*QuantizedTensor\(.*; take"):
        write(x)
    assert_holds("untouched", x, before)


def test_data_of_another_shape_is_taken():
    x, y = made("e4m3", values(32, 64)), made("mxfp8", values(2, 4, 32, seed=1))
    x.data = y
    assert_holds("data", x, y.dequantize())


@pytest.mark.parametrize("read_only", [False, True])
def test_detach_touches_no_number(read_only):
    """A scale that the numbers' own amax would not give stays as it is."""
    x = made("e4m3", values(32, 64).requires_grad_())
    x.q.row_scale.mul_(0.75)
    want = copy.deepcopy(x.detach())
    x.quantizer = None if read_only else x.quantizer
    assert x.requires_grad and x.detach_() is x and not x.requires_grad
    with torch.inference_mode():  # where it reaches the tensor itself
        assert x.detach_() is x
    same_bytes("detached", x, want)


def test_plain_data_is_refused():
    x = made("e4m3", values(32, 64))
    with pytest.raises(TypeError, match="quantize_"):
        x.data = values(32, 64)
    y = made("e4m3", values(32, 64, seed=1, dtype=torch.float32))
    x.data = y
    assert x.q is y.q and x.dtype == torch.float32


def test_collectives_do_not_lose_what_they_write(one_rank):
    x = made("e4m3", values(32, 32))
    other = values(32, 32, seed=1)
    for write in (
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather_into_tensor(x, other),
        lambda: dist.reduce_scatter_tensor(x, other),
    ):
        with pytest.raises(RuntimeError, match="collective"):
            write()
    parts = [torch.empty(32, 32, dtype=torch.bfloat16)]
    dist.all_gather(parts, x)
    assert_bitwise_equal("read", parts[0], x.dequantize())
    dist.all_gather([x], other)  # which torch copies there
    same_bytes("written", x, made("e4m3", other))


# Shapes


@all_kinds
@pytest.mark.parametrize("change", [
    lambda x: x.view(-1, 32), lambda x: x.view(4, 3, 2, -1), lambda x: x.reshape(2, 12, 32), lambda x: x.flatten(0, 1),
    lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(1).squeeze(1), lambda x: x[None], lambda x: x.unflatten(0, (2, 2)),
])  # fmt: skip
def test_leading_shapes_stay_quantized(kind, change):
    v = values(4, 6, 32)
    x = made(kind, v)
    got = change(x)
    assert_holds("shape", got, change(x.dequantize()))
    assert got.q is x.q


@pytest.mark.parametrize("change", [
    lambda x: x.view(-1), lambda x: x.reshape(4, 6, 8, 4), lambda x: x.t() if x.dim() == 2 else x.transpose(0, 2),
    lambda x: x[1], lambda x: x[..., :16], lambda x: x.unsqueeze(-1), lambda x: x.view(torch.int16), lambda x: x + 1,
])  # fmt: skip
def test_other_shapes_dequantize(change):
    x = made("e4m3", values(4, 6, 32))
    got = change(x)
    assert type(got) is torch.Tensor
    assert_bitwise_equal("shape", got, change(x.dequantize()))


def test_new_tensors_of_its_shape_are_plain():
    x = made("e4m3", values(4, 6, 32))
    for new in (torch.zeros_like(x), torch.empty_like(x), x.new_zeros(3), torch.zeros_like(x, dtype=torch.float32)):
        assert type(new) is torch.Tensor and new.device == x.device
    assert torch.zeros_like(x).shape == x.shape and torch.zeros_like(x).dtype == x.dtype
    assert torch.equal(torch.full_like(x, 2.0), torch.full((4, 6, 32), 2.0, dtype=x.dtype))


# Layouts


@devices
@pytest.mark.parametrize("kind", COL_FROM_ROW)
def test_layouts_come_and_go(kind, device):
    v = values(40, 64, device=device)
    both, x = made(kind, v), made(kind, v, columnwise=False)
    assert x._columnwise_data is None and x.get_data_tensors()[1] is None
    x.update_usage(columnwise_usage=True)
    same_bytes("made on demand", x, both)
    x.update_usage(rowwise_usage=False)
    assert x._rowwise_data is None
    assert_holds("columnwise alone", x, oracle(kind, v))
    with pytest.raises(ValueError, match="no data at all"):
        x.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="rowwise"):
        x.update_usage(rowwise_usage=True)
    both.free_caches()
    assert both._columnwise_data is None
    x.free_caches()
    assert x._columnwise_data is not None


@pytest.mark.parametrize("kind", ["mxfp8", "block1", "rowwise"])
def test_a_layout_with_scales_of_its_own_is_not_made_from_the_other(kind):
    v = values(128, 256)
    x = made(kind, v, columnwise=False)
    with pytest.raises(RuntimeError, match="columnwise"):
        x.update_usage(columnwise_usage=True)
    both = made(kind, v)
    both.free_caches()
    assert both._columnwise_data is not None
    x = made(kind, v, rowwise=False)
    block = KINDS[kind][1].block
    turned = formats.Format(block[::-1], mx=kind == "mxfp8", pow2=kind == "block1", own_limit=kind == "block1")
    assert_holds("by column", x, turned.round_trip(v))


@pytest.mark.parametrize("kind", ["e4m3", "given"])
def test_transformer_engines_names(kind):
    v = values(48, 64)
    x = made(kind, v)
    for data in (x._data, x._rowwise_data):
        assert data.dtype == torch.uint8 and data.shape == x.shape and data.data_ptr() == x.q.row.data_ptr()
    for data in (x._transpose, x._columnwise_data):
        assert data.dtype == torch.uint8 and data.shape == x.shape[::-1] and data.data_ptr() == x.q.col.data_ptr()
    assert x._scale_inv is x._rowwise_scale_inv
    back = x._data.view(x.q.row.dtype).float() * x._scale_inv
    assert_bitwise_equal("data and scale", back.bfloat16(), x.dequantize())
    assert_bitwise_equal("transpose", x._transpose, x._data.t())
    x._data.copy_(x._data.flip(0))  # bytes, not numbers
    assert_bitwise_equal("written", x.dequantize(), back.flip(0).to(x.dtype))
    assert x.get_metadata()["rowwise_data"] is x.q.row and x.get_metadata()["quantizer"] is x.quantizer


def test_block_formats_have_no_per_tensor_names():
    x = made("mxfp8", values(64, 64))
    assert not hasattr(x, "_data") and not hasattr(x, "_scale_inv")
    assert x._rowwise_scale_inv.dtype == torch.uint8 and x._columnwise_data is not None
