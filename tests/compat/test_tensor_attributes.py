"""Quantized tensors as Transformer Engine's callers handle them: bytes and scales that are set, caches, quantizers."""

import copy

import pytest
import torch

import te_lite as te
from te_lite.compat.alias import tensors
from te_lite.compat.alias.names import NotThere
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize import formats
from tests.quantize.kinds import COL_FROM_ROW, KINDS, all_kinds, made, same_bytes, values

TENSORWISE = "e4m3", "e5m2", "pow2", "given"


def test_what_tensors_have_under_the_alias():
    x, y = torch.randn(2, 32, 48)
    tensor = te.Float8CurrentScalingQuantizer(torch.float8_e5m2)(x)
    assert tensor._fp8_dtype is tensors.DType.kFloat8E5M2 and tensor._transpose is not None
    again = tensor._quantizer.update_quantized(y, te.Float8CurrentScalingQuantizer(torch.float8_e5m2)(x))
    assert torch.equal(again.dequantize(), te.Float8CurrentScalingQuantizer(torch.float8_e5m2)(y).dequantize())
    assert torch.equal(tensor._get_quantizer()(x).dequantize(), tensor.dequantize())
    before, moved = tensor.dequantize(), torch.empty(32 * 48, dtype=torch.uint8)
    moved.copy_(tensor._data.view(torch.uint8).flatten())
    tensor._data = moved
    assert tensor._transpose is None and torch.equal(tensor.dequantize(), before)
    moved.bitwise_xor_(0x80)  # the signs
    assert torch.equal(tensor.dequantize(), -before), "the bytes are those of the new memory"
    tensor.update_usage(columnwise_usage=True)
    tensor._reset_caches()
    assert tensor._transpose is None
    for wrong in (moved[:-1], moved.float()):
        with pytest.raises(ValueError, match="_rowwise_data"):
            tensor._data = wrong
    with pytest.raises(AttributeError, match="no one scale"):
        te.MXFP8Quantizer(torch.float8_e4m3fn)(x)._data = moved


def test_bytes_that_a_caller_writes_are_bytes():
    """And not numbers, which copy_ would convert to fp8."""
    weight = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, columnwise=False)(torch.randn(2, 16, 32))
    assert weight._data.shape == (2, 16, 32)
    weight._data.copy_(torch.full((2, 16, 32), 0x38, dtype=torch.uint8))  # 1.0
    assert torch.equal(weight.dequantize(), weight._scale_inv.expand(2, 16, 32))


def test_bytes_from_an_all_gather_are_transposed_where_they_were():
    """CUDA graphs read the columnwise bytes at their address."""
    for kind in ("e4m3", "block2"):
        weight, other = made(kind, values(256, 128)), made(kind, values(256, 128, seed=1))
        where = weight.q.col.data_ptr()
        weight.q.row.copy_(other.q.row)
        weight.q.row_scale.copy_(other.q.row_scale)
        tensors.post_all_gather_processing([weight])
        assert weight.q.col.data_ptr() == where
        assert torch.equal(weight.q.col.view(torch.uint8), other.q.col.view(torch.uint8))
        assert torch.equal(weight.q.col_scale, other.q.col_scale)


@all_kinds
def test_bytes_and_scales_that_are_set_are_those_of_the_tensor(kind):
    """In the memory that was given, whatever was there before: a converter fills a tensor so."""
    want, got = made(kind, values(32, 64)), made(kind, 3 * values(32, 64, seed=1))
    parts = ["_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"]
    given = {name: getattr(want, name).clone() for name in parts}
    for name, part in given.items():
        setattr(got, name, part)
        assert getattr(got, name).data_ptr() == part.data_ptr(), name
    same_bytes("rows and columns", got, want)
    got._rowwise_data = None
    if kind in COL_FROM_ROW:
        assert_bitwise_equal("columns alone", got.dequantize(), want.dequantize())
    assert got._rowwise_data is None and got.get_usages() == {"rowwise": False, "columnwise": True}
    with pytest.raises(ValueError, match="at all"):
        got._columnwise_data = None
    with pytest.raises(ValueError, match="holds no rows"):
        got._rowwise_data = given["_rowwise_data"]
    for name in parts:
        wrong = given[name][:-1] if "data" in name else given[name].double()
        with pytest.raises(ValueError, match=name):
            setattr(want, name, wrong)


@all_kinds
def test_bytes_of_another_kind_or_shape_are_refused(kind):
    """They would be read as other numbers."""
    x = made(kind, values(2, 16, 64))
    before = copy.deepcopy(x)
    other = torch.float8_e5m2 if x._fp8_dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    columns = tuple(x._columnwise_data.shape)
    for name, shapes in (("_rowwise_data", [(64, 32)]), ("_columnwise_data", [(32, 64), (64, 32)])):
        own = torch.zeros_like(getattr(x, name))
        flat = columns == (2, 16, 64)
        wrong = [shape for shape in shapes if name == "_rowwise_data" or (shape == (32, 64)) != flat]
        for bad in (
            own.view(other), own.bool(), own.view(torch.int8), *[own.view(shape) for shape in wrong],
            torch.zeros(own.numel(), 2, dtype=torch.uint8)[:, 0],
        ):  # fmt: skip
            with pytest.raises(ValueError, match=rf"{name} of .*: must be contiguous \(2048,\)"):
                setattr(x, name, bad)
    same_bytes("unchanged", x, before)


@all_kinds
def test_scales_of_another_order_are_refused(kind):
    """Transformer Engine's 1x128 are (K/128, M), te_lite's (M, K/128), and as many."""
    x = made(kind, values(256, 512))
    before = copy.deepcopy(x)
    for name in ("_rowwise_scale_inv", "_columnwise_scale_inv"):
        scale = getattr(x, name)
        if scale.numel() == 1:
            setattr(x, name, scale.reshape(1, 1).clone())
            continue
        for wrong in (scale.reshape(-1), scale.t() if scale.dim() == 2 else scale[:, None]):
            if wrong.shape != scale.shape:
                with pytest.raises(ValueError, match=rf"{name} .*get_scale_shape.*transpose"):
                    setattr(x, name, wrong)
    same_bytes("unchanged", x, before)


@pytest.mark.parametrize("kind", COL_FROM_ROW)
@pytest.mark.parametrize("change", [lambda x: x, copy.deepcopy, torch.clone, lambda x: x.to("cpu", copy=True)])
@pytest.mark.parametrize("name", ["_rowwise_scale_inv", "_columnwise_scale_inv", "_scale_inv"])
def test_a_scale_is_of_both_layouts(kind, change, name):
    """Of copies too, which hold it twice. Of 128x128 the scale of the rows; who sets that of columns sets both."""
    x = change(made(kind, values(256, 512)))
    if kind not in TENSORWISE and name != "_rowwise_scale_inv":
        return
    before = x.dequantize()
    setattr(x, name, 2 * getattr(x, name))
    assert_bitwise_equal("rows", x.dequantize(), 2 * before)
    assert_bitwise_equal("columns", x.q.format.dequantize(x.q, "col"), 2 * before)


@pytest.mark.parametrize("kind", COL_FROM_ROW)
def test_columns_that_are_set_where_there_were_none(kind):
    want = made(kind, values(32, 64))
    got = made(kind, values(32, 64), columnwise=False)
    got._columnwise_data = want._columnwise_data.clone()
    same_bytes("both", got, want)
    odd = made(kind, values(20, 64))
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        odd._columnwise_data = odd._columnwise_data.clone()
    assert odd._columnwise_data.shape == (64, 20)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(COL_FROM_ROW)))
def test_columns_without_scales_cannot_be_set(kind):
    x = made(kind, values(32, 64), columnwise=False)
    with pytest.raises(ValueError, match="no scales of columns"):
        x._columnwise_data = torch.zeros(64, 32, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="quantize the tensor again"):
        x._create_columnwise()


@pytest.mark.parametrize("kind", TENSORWISE)
def test_transposes(kind):
    x, other = made(kind, values(2, 16, 64)), made(kind, values(2, 16, 64, seed=1))
    assert not x._transpose_invalid and x._transpose.shape == (64, 2, 16)
    where = x._transpose.data_ptr()
    x._data.copy_(other._data)
    x._create_transpose()
    assert x._transpose.data_ptr() == where and torch.equal(x._transpose, other._transpose)
    x._transpose_invalid = True
    assert x._transpose is None and x._transpose_invalid
    x._transpose = None
    with pytest.raises(RuntimeError, match="set _transpose"):
        x._transpose_invalid = False
    x._transpose = other._transpose.clone()
    x._transpose_invalid = False
    x.remove_caches()
    x._create_transpose()
    assert torch.equal(x._transpose, other._transpose)
    x._scale_inv = 2 * other._scale_inv
    assert_bitwise_equal("scale", x.dequantize(), 2 * other.dequantize())
    x.update_usage(rowwise_usage=False)
    assert_bitwise_equal("of the columns too", x.dequantize(), 2 * other.dequantize())


def test_blocks_have_no_transpose_by_that_name():
    """By it callers tell Float8Tensor from the others."""
    for kind in ("mxfp8", "block1", "block2"):
        x = made(kind, values(32, 64))
        for name in ("_data", "_transpose", "_scale_inv", "_transpose_invalid", "_create_transpose"):
            assert not hasattr(x, name)
            with pytest.raises(AttributeError):
                setattr(x, name, None if name != "_transpose_invalid" else False)
    assert [made(kind, values(32, 64))._is_2D_scaled for kind in ("block1", "block2")] == [False, True]
    assert not hasattr(made("mxfp8", values(32, 64)), "_is_2D_scaled")


@all_kinds
def test_a_likeness(kind):
    """The same memory under another shape or precision; other bytes where they are given."""
    x, other = made(kind, values(2, 16, 64)).detach(), made(kind, values(2, 16, 64, seed=1))
    like = te.QuantizedTensor.make_like(x, shape=(32, 64), dtype=torch.float32, requires_grad=True)
    assert like.shape == (32, 64) and like.dtype == torch.float32 and like.requires_grad and not x.requires_grad
    assert like._rowwise_data.data_ptr() == x._rowwise_data.data_ptr() and like.quantizer is x.quantizer
    assert_bitwise_equal("numbers", like.dequantize().detach().view(2, 16, 64), x.dequantize(torch.float32))
    filled = type(x).make_like(x, data=other._rowwise_data.flatten(0, 1))
    filled._rowwise_scale_inv = other._rowwise_scale_inv
    assert filled.shape == (32, 64) and torch.equal(filled._rowwise_data.flatten(), other._rowwise_data.flatten())
    assert_bitwise_equal("by row", filled.dequantize().view(2, 16, 64), other.dequantize())
    assert x._columnwise_data is not None and filled._columnwise_data is None
    both = te.QuantizedTensor.make_like(
        x, shape=x.shape, data=other._rowwise_data.clone(), data_transpose=other._columnwise_data.clone()
    )
    assert torch.equal(both._columnwise_data, other._columnwise_data)
    assert x.to_dtype(torch.float16).dequantize().dtype == torch.float16
    for shape in ((64, 32), (16, 64), ()):
        with pytest.raises(ValueError, match="make_like"):
            te.QuantizedTensor.make_like(x, shape=shape)


@pytest.mark.parametrize("kind", TENSORWISE)
def test_a_tensor_is_built_of_bytes(kind):
    """As Megatron-core writes to a shard of a weight: the tensor lies in the weight's memory."""
    whole, source = made(kind, values(32, 64)), made(kind, values(16, 64, seed=1))
    shard = tensors.Float8Tensor(
        shape=torch.Size((16, 64)), dtype=torch.bfloat16, requires_grad=False, data=whole._data.view(-1)[16 * 64 :],
        fp8_scale_inv=whole._scale_inv, fp8_dtype=whole._fp8_dtype, quantizer=whole._quantizer,
    )  # fmt: skip
    assert isinstance(shard, tensors.Float8Tensor) and shard.dtype == torch.bfloat16
    assert_bitwise_equal("numbers", shard.dequantize(), whole.dequantize()[16:])
    whole._quantizer.update_quantized(source.dequantize(), shard)
    assert_bitwise_equal("written through", whole._data[16:], shard._data)
    turned = tensors.Float8Tensor(
        (16, 64), torch.bfloat16, data_transpose=source._transpose, fp8_scale_inv=source._scale_inv,
        fp8_dtype=source._fp8_dtype,
    )  # fmt: skip
    assert turned._data is None and turned.quantizer is None
    assert_bitwise_equal("by column", turned.dequantize(), source.dequantize())
    right = {"data": torch.zeros(4, 4, dtype=torch.uint8), "fp8_scale_inv": torch.ones(1), "fp8_dtype": formats.E4M3}
    for wrong, error, why in (
        ({"data": None}, ValueError, "data"),
        ({"fp8_scale_inv": torch.ones(1, dtype=torch.float64)}, TypeError, "fp8_scale_inv is .*float64"),
        ({"fp8_scale_inv": torch.ones(2)}, TypeError, "one fp32 element"),
        ({"fp8_dtype": torch.uint8}, TypeError, "fp8_dtype=torch.uint8"),
        ({"quantizer": te.Float8CurrentScalingQuantizer(torch.float8_e5m2)}, TypeError, "quantizer of format e4m3"),
    ):
        with pytest.raises(error, match=why):
            tensors.Float8Tensor((4, 4), torch.bfloat16, **right | wrong)


@all_kinds
def test_quantizers_of_tensors(kind):
    """By the class that a caller would make them of; with scale and amax where they have them."""
    x, kinds = made(kind, values(32, 64)), KINDS[kind][0]()
    assert type(x._quantizer) is type(kinds) and x._quantizer.get_usages() == x.get_usages()
    if kind == "given":
        assert x._quantizer.scale == 24.0 and x._quantizer.amax == values(32, 64).abs().max()
    again = KINDS[kind][0]()
    x.update_quantizer(again)
    assert x.quantizer is again._value
    x._quantizer = None
    with pytest.raises(RuntimeError, match="no quantizer"):
        x.quantize_(values(32, 64))
    with pytest.raises(RuntimeError, match="set _quantizer"):
        x.update_quantizer(again)
    x._quantizer = again
    x.quantize_(2 * values(32, 64))
    same_bytes("written", x, again(2 * values(32, 64)))
    other = KINDS["mxfp8" if kind != "mxfp8" else "e4m3"][0]()
    for wrong in (other, other._value):
        with pytest.raises(TypeError, match="_quantizer"):
            x._quantizer = wrong


@all_kinds
def test_flags_copies_and_what_is_let_go(kind):
    x, v = made(kind, values(32, 64)), values(32, 64, seed=1)
    before, flag = x.clone(), torch.ones(1)
    assert x.quantize_(v, noop_flag=flag) is x
    same_bytes("left", x, before)
    x.quantize_(v, noop_flag=flag.zero_())
    same_bytes("written", x, made(kind, v))
    before.copy_from_storage(x)
    same_bytes("copied", before, x)
    for keys in ({"columnwise": False}, {"rowwise": False}):
        less, both = made(kind, 2 * v, **keys), made(kind, v)
        both.copy_from_storage(less)
        assert both.get_usages() == less.get_usages(), "what it lacks is dropped"
        assert_bitwise_equal("copied", both.dequantize(), less.dequantize())
        with pytest.raises(ValueError, match="no data at all"):
            less.copy_from_storage(
                made(kind, v, **{name: False for name in ("rowwise", "columnwise") if name not in keys})
            )
    with pytest.raises(TypeError, match="copy_from_storage"):
        before.copy_from_storage(v)
    with pytest.raises(RuntimeError, match="copy_from_storage"):
        before.copy_from_storage(made(kind, values(16, 64)))
    rows, columns = x.get_data_tensors()
    assert rows.dtype == torch.uint8 and torch.equal(x.get_data_tensors(columnwise_data=False), rows)
    assert torch.equal(x.get_data_tensors(rowwise_data=False), columns)
    with pytest.raises(ValueError, match="nothing"):
        x.get_data_tensors(False, False)
    x.clear()
    assert x.get_usages() == {"rowwise": False, "columnwise": False} and "no data" in repr(x)
    assert x._fp8_dtype == before._fp8_dtype
    for use in (x.dequantize, x.detach, x.clone):
        with pytest.raises(RuntimeError, match="was cleared"):
            use()
    for name in ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"):
        with pytest.raises(ValueError, match=f"{name} of .*quantize it anew"):
            setattr(x, name, getattr(before, name))


@all_kinds
def test_names_that_quantizers_do_not_have(kind):
    quantizer = KINDS[kind][0]()
    for one in (quantizer, quantizer.copy(), copy.deepcopy(quantizer)):
        assert not hasattr(one, "onnx_quantize") and one.get_usages() == {"rowwise": True, "columnwise": True}
        with pytest.raises(NotThere, match=rf"{type(quantizer).__name__}\.onnx_quantize"):
            one.onnx_quantize(values(16, 64))


def test_classes_answer_for_what_is_of_them():
    for kind in (tensors.Float8Tensor, tensors.MXFP8Tensor, tensors.Float8BlockwiseQTensor):
        assert issubclass(kind, te.QuantizedTensor) and not issubclass(te.QuantizedTensor, kind)
    members = [value for name, value in vars(tensors.DType).items() if name.startswith("k")]
    assert len(members) == 9 and all(isinstance(one, tensors.DType) for one in members)
    assert not any(isinstance(one, tensors.DType) for one in (torch.complex64, tensors.DType, "kByte", None))
