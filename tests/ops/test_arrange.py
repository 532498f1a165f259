"""Scales in another order, as views that wires and GEMMs have of them."""

import pytest
import torch

from te_lite.ops import arrange
from te_lite.testing.numerics import assert_bitwise_equal
from tests.ops.interpreted import run_interpreted
from tests.ops.paths import PATHS, device_of


class Interpreted(torch.Tensor):
    """Takes the way of a GPU's tensors."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2048), (40, 33), (257, 8)])
def test_interpreted_and_not_it_holds_the_same_values(shape, path, monkeypatch):
    stored = torch.randn(shape[0] + 8, shape[1] + 4).to(device_of(path))
    views = {
        "transposed": stored.t(),
        "rows of the transposed": stored.t()[1 : shape[1]],
        "columns": stored[3 : 3 + shape[0], 1 : 1 + shape[1]],
        "all": stored,
    }
    launched, launch = [], arrange.launch
    monkeypatch.setattr(arrange, "launch", lambda *args: (launched.append(args), launch(*args)))
    for name, view in views.items():
        given = view.as_subclass(Interpreted) if path == "interpreted" else view
        got = arrange.contiguous(given).as_subclass(torch.Tensor)
        assert got.is_contiguous()
        assert_bitwise_equal(name, got, view.contiguous())
    copied = sum(not view.is_contiguous() for view in views.values())
    assert copied and len(launched) == (0 if path == "cpu" else copied)
    assert arrange.contiguous(stored) is stored
    assert_bitwise_equal("bytes", arrange.contiguous(stored.view(torch.uint8).t()), stored.view(torch.uint8).t())


def test_in_the_interpreter():
    run_interpreted(__file__)
