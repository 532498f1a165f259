"""The quantizers that make QuantizedTensors for a caller."""

import copy

import pytest
import torch
import torch.distributed as dist

import te_lite as te
from te_lite.compat.callers import for_callers
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize.formats import E4M3, Format
from tests.quantize.kinds import KINDS, all_kinds, assert_holds, devices, made, oracle, same_bytes, values


@devices
def test_a_given_scale_is_used_and_the_amax_recorded(device):
    scale, amax = torch.tensor([3.0], device=device), torch.zeros(1, device=device)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    v = values(32, 32, device=device)
    quantizer(v)
    assert_bitwise_equal("amax", amax.cpu(), v.abs().max().float().view(1).cpu())
    quantizer(v / 2)
    assert_bitwise_equal("the maximum stays", amax.cpu(), v.abs().max().float().view(1).cpu())
    scale.fill_(5.0)
    want = Format().round_trip  # of another scale: the oracle is asked for both
    form = Format()
    later = form.dequantize(form.quantize(v.cpu(), torch.tensor(5.0)), v.dtype)
    assert_holds("a scale set later", quantizer(v), later)
    assert not torch.equal(later, want(v.cpu()))
    quantizer.calibrate(v * 4)
    assert_bitwise_equal("calibrated", amax.cpu(), (v * 4).abs().max().float().view(1).cpu())


@all_kinds
def test_update_quantized_and_make_empty(kind):
    quantizer = KINDS[kind][0]()
    dst = quantizer.make_empty((3, 16, 64), dtype=torch.bfloat16)
    assert not dst.dequantize().any()
    memory = [t.data_ptr() for t in dst.get_data_tensors()]
    v = values(3, 16, 64)
    assert quantizer.update_quantized(v, dst) is dst
    assert [t.data_ptr() for t in dst.get_data_tensors()] == memory
    same_bytes("updated", dst, quantizer(v))
    with pytest.raises(TypeError, match="make_empty"):
        quantizer.update_quantized(v, torch.empty_like(v))
    with pytest.raises(TypeError, match="make_empty"):
        quantizer.update_quantized(v, made("e5m2" if kind != "e5m2" else "e4m3", v))


@all_kinds
def test_a_flag_that_leaves_the_destination_as_it_is(kind):
    quantizer = KINDS[kind][0]()
    dst, flag, v = quantizer(values(32, 64)), torch.ones(1), 3 * values(32, 64)
    before, amax = dst.clone(), getattr(quantizer._value, "amax", torch.zeros(1)).clone()
    assert quantizer.update_quantized(v, dst, noop_flag=flag) is dst
    same_bytes("left", dst, before)
    assert torch.equal(getattr(quantizer._value, "amax", torch.zeros(1)), amax)
    quantizer.update_quantized(v, dst, noop_flag=flag.zero_())
    same_bytes("written", dst, quantizer(v))
    assert quantizer(values(32, 64), out=dst) is dst
    same_bytes("out", dst, quantizer(values(32, 64)))
    with pytest.raises(TypeError, match="noop_flag"):
        quantizer.update_quantized(v, dst, noop_flag=torch.ones(1, dtype=torch.int32))


@all_kinds
def test_usage_belongs_to_each_copy(kind):
    quantizer = KINDS[kind][0]()
    other = quantizer.copy()
    other.set_usage(columnwise=False)
    v = values(32, 64)
    assert other(v)._columnwise_data is None and quantizer(v)._columnwise_data is not None
    other.set_usage(rowwise=False, columnwise=True)
    assert other(v)._rowwise_data is None and other(v)._columnwise_data is not None
    other.calibrate(v)


def test_an_amax_reduction_needs_its_group(one_rank):
    with pytest.raises(ValueError, match="amax_reduction_group"):
        te.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True, amax_reduction_group=dist.group.WORLD)
    v = values(32, 32)
    assert_holds("one rank", quantizer(v), oracle("e4m3", v))
    assert quantizer.make_empty((4, 32)).quantizer.amax_group is dist.group.WORLD


@pytest.mark.parametrize("make, error", [
    (lambda: te.Float8CurrentScalingQuantizer(torch.int8), TypeError),
    (lambda: te.Float8Quantizer(torch.ones(1), torch.ones(1), torch.bfloat16), TypeError),
    (lambda: te.MXFP8Quantizer(torch.float16), TypeError),
    (lambda: te.Float8BlockQuantizer(torch.float16), TypeError),
    (lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=3), ValueError),
    (lambda: te.Float8CurrentScalingQuantizer(E4M3, rowwise=False, columnwise=False)(torch.ones(16, 16)), ValueError),
])  # fmt: skip
def test_bad_arguments(make, error):
    with pytest.raises(error):
        make()


@all_kinds
def test_quantizers_say_what_they_make(kind):
    quantizer = KINDS[kind][0]()
    x = quantizer(values(2, 16, 64))
    assert quantizer.dtype == x.q.row.dtype and quantizer.internal is False
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    assert x._columnwise_data.shape == quantizer.get_columnwise_shape((2, 16, 64))
    square = quantizer(values(4, 8, 32))._columnwise_data.shape
    assert square == quantizer.get_columnwise_shape((4, 8, 32)), "also where both layouts have as many rows"
    assert quantizer.is_quantizable(values(3)) and not quantizer.is_quantizable(torch.ones(2, 2, dtype=torch.int32))
    assert not quantizer.is_quantizable(torch.tensor(1.0))
    if hasattr(quantizer, "get_scale_shape"):
        for shape in ((2, 16, 64), (40, 136)):
            v = quantizer(values(*shape))
            assert quantizer.get_scale_shape(shape, False) == v._rowwise_scale_inv.shape
            assert quantizer.get_scale_shape(shape, True) == v._columnwise_scale_inv.shape
    wrapped = for_callers(quantizer._value, True, False)
    assert type(wrapped) is type(quantizer) and wrapped.get_usages() == {"rowwise": True, "columnwise": False}


@all_kinds
def test_several_tensors_and_the_precision_that_a_result_stands_for(kind):
    quantizer = KINDS[kind][0]()
    v, w = values(16, 64, dtype=torch.float32), values(3, 32, 64, seed=1)
    for got, given in zip(quantizer.multi_quantize([v, w]), (v, w), strict=True):
        same_bytes("each", got, quantizer(given))
    as_bf16 = quantizer.quantize(v.requires_grad_(), dtype=torch.bfloat16)
    assert as_bf16.dtype == torch.bfloat16
    assert_bitwise_equal("numbers of fp32", as_bf16.dequantize(torch.float32), quantizer(v).dequantize().detach())
    as_bf16.dequantize().sum().backward()
    assert torch.equal(v.grad, torch.ones_like(v))
    quantizer.internal = True
    assert not quantizer(v).requires_grad
    quantizer.internal = False
    assert quantizer(v).requires_grad
    made = quantizer.make_empty((16, 64), requires_grad=True)
    assert made.requires_grad and not quantizer.make_empty((16, 64), pin_memory=False).requires_grad


@pytest.mark.parametrize("pow2", [False, True])
def test_amax_and_scale_of_the_caller(pow2):
    """use_existing_amax: the scale of that amax; else both are left there. Zeros of make_empty leave nothing."""
    v, (amax, scale) = values(32, 64), torch.zeros(2, 1)
    plain = te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=pow2)
    assert plain.amax is None and plain.scale is None
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=pow2, amax=amax, scale=scale)
    same_bytes("its own amax", quantizer(v), plain(v))
    assert quantizer.amax is amax and quantizer.scale is scale and amax == v.abs().max().float()
    assert_bitwise_equal("scale", scale, plain(v)._scale_inv.reciprocal() if pow2 else 448 / amax)
    dst = quantizer.make_empty((32, 64), dtype=v.dtype)
    assert amax == v.abs().max().float()
    before = amax.clone(), scale.clone()
    quantizer.update_quantized(4 * v, dst, noop_flag=torch.ones(1))
    assert (amax, scale) == before and not dst.dequantize().any()
    given = te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=pow2, use_existing_amax=True, amax=2 * amax)
    same_bytes("of the amax that is there", given(v), te.Float8Quantizer(given.scale, torch.zeros(1), E4M3)(v))
    assert given.amax == 2 * amax and given.scale < scale
    with pytest.raises(ValueError, match="pass amax="):
        te.Float8CurrentScalingQuantizer(E4M3, use_existing_amax=True)
    with pytest.raises(TypeError, match="amax is"):
        te.Float8CurrentScalingQuantizer(E4M3, amax=torch.zeros(2))


def test_a_tensor_of_given_bytes():
    quantizer = te.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), E4M3)
    v = values(2, 16, 32)
    made = quantizer(v)
    data = made._data.clone()
    got = quantizer.create_tensor_from_data(data, fake_dtype=v.dtype, requires_grad=True)
    assert_bitwise_equal("numbers", got.dequantize().detach(), made.dequantize())
    assert got.requires_grad and got.dtype == v.dtype
    data.zero_()
    assert not got.dequantize().any()
    zeros = torch.zeros(4, 4, dtype=torch.uint8)
    for wrong in (torch.ones(4, 4), zeros.view(torch.float8_e5m2), zeros.bool(), zeros.t()[:, :2], zeros[0, 0]):
        with pytest.raises(TypeError, match="contiguous bytes of torch.uint8 or torch.float8_e4m3fn"):
            quantizer.create_tensor_from_data(wrong)


FIXED = (
    "force_pow_2_scales amax_epsilon with_amax_reduction amax_reduction_group use_existing_amax scale amax dtype other"
)


@all_kinds
def test_what_a_built_quantizer_does_not_follow_cannot_be_set(kind):
    built = KINDS[kind][0]()
    for quantizer in (built, built.copy(), copy.deepcopy(built), for_callers(built._value)):
        quantizer.rowwise_usage, quantizer.columnwise_usage, quantizer.internal = True, False, False
        for name in FIXED.split():
            with pytest.raises(AttributeError, match=rf"Quantizer\.{name} = 1: .*build one with {name}"):
                setattr(quantizer, name, 1)


def test_the_precision_of_a_result_is_that_of_out():
    quantizer = te.MXFP8Quantizer(E4M3)
    out = quantizer.make_empty((32, 64), dtype=torch.bfloat16)
    assert quantizer.quantize(values(32, 64), out=out, dtype=torch.bfloat16) is out
    with pytest.raises(ValueError, match="out stands for torch.bfloat16; leave dtype out"):
        quantizer.quantize(values(32, 64), out=out, dtype=torch.float16)
