"""Attributes of a converted layer: what nn.Linear reads of them is read, and those of the caller are no settings."""

import pytest
import torch
from torch import nn

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal


def converted(linear):
    te.convert_to_float8_training(linear, minimum_size=0)
    return linear


def test_a_bias_that_is_given_later_is_added_and_trained():
    linear, x = converted(nn.Linear(64, 32, bias=False)), torch.randn(16, 64)
    without = linear(x).detach()
    linear.bias = nn.Parameter(torch.full((32,), 2.0))
    y = linear(x)
    y.sum().backward()
    assert_bitwise_equal("y", y.detach(), without + 2)
    assert_bitwise_equal("bias.grad", linear.bias.grad, torch.full((32,), 16.0))
    linear.bias = None
    assert_bitwise_equal("y without", linear(x).detach(), without)
    linear.register_parameter("bias", nn.Parameter(torch.ones(32)))
    assert_bitwise_equal("y again", linear(x).detach(), without + 1)


@pytest.mark.parametrize(("name", "value"), [("use_bias", False), ("return_bias", True), ("tp_size", 2)])
def test_a_layer_with_an_attribute_of_te_lites_name_stays(name, value):
    """It would be taken for the setting: without its bias, or with a tuple in place of y."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), torch.randn(16, 64)
    setattr(model[1], name, value)
    model[0].name = "first"
    report = te.convert_to_float8_training(model, minimum_size=0)
    assert [layer.name for layer in report.converted] == ["0"]
    assert report.skipped[0].reason == f"its attribute {name!r} has another meaning in te_lite; rename it"
    assert type(model[1]) is nn.Linear and model(x).shape == (16, 32)
    assert getattr(model[1], name) is value and model[0].name == "first"
