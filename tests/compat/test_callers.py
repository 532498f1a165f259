"""The quantizers that make QuantizedTensors for a caller."""

import pytest
import torch
import torch.distributed as dist

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.quantize.formats import E4M3, Format
from tests.quantize.kinds import KINDS, all_kinds, assert_holds, devices, made, oracle, same_bytes, values


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    before, amax = dst.clone(), getattr(quantizer, "amax", torch.zeros(1)).clone()
    assert quantizer.update_quantized(v, dst, noop_flag=flag) is dst
    same_bytes("left", dst, before)
    assert torch.equal(getattr(quantizer, "amax", torch.zeros(1)), amax)
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
