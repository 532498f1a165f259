"""What modules and autocast warn of: fp8 that was asked for and does not run. Once, and pointing at the caller."""

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.tables import warn_once
from te_lite.testing.distributed import device_params

BF16 = torch.bfloat16
HERE = Path(__file__)


@pytest.fixture
def caught():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def texts(caught):
    """The messages so far, each of which points at this file."""
    assert all(Path(warning.filename) == HERE and warning.category is UserWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def make(kind, k, n, device="cpu", **extra):
    return getattr(te, kind)(k, n, params_dtype=BF16, device=device, **extra)


def train(module, recipe, k, device="cpu"):
    x = torch.randn(16, k, dtype=BF16, device=device, requires_grad=True)
    with te.autocast(recipe=recipe):
        out = module(x)
    out.sum().backward()
    return out


# (kind, in, out, what the warning names)
MISFITS = [
    ("Linear", 40, 64, "Linear(name='net') runs in torch.bfloat16, not by 'RECIPE': features (40, 64) are not"),
    ("Linear", 64, 40, "Linear(name='net') runs in torch.bfloat16, not by 'RECIPE': features (64, 40) are not"),
    ("LayerNormLinear", 64, 40, "LayerNormLinear(name='net') runs"),
    ("LayerNormMLP", 64, 40, "LayerNormMLP(name='net').fc1 runs in"),
]


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize(("kind", "k", "n", "says"), MISFITS)
def test_features_that_do_not_fit(caught, kind, k, n, says, recipe, device):
    """One warning a linear: not one a step, not one a plan, and none where the caller wants no fp8."""
    module = make(kind, k, n, device, name="net")
    module(torch.randn(16, k, dtype=BF16, device=device))
    with te.autocast(enabled=False):
        module(torch.randn(16, k, dtype=BF16, device=device))
    with te.autocast(enabled=False, calibrating=True):
        module(torch.randn(16, k, dtype=BF16, device=device))
    assert texts(caught) == []
    for _ in range(3):
        train(module, recipe, k, device)
        module.to(device)  # the next call builds the plan anew
        with te.collect_statistics():
            train(module, recipe, k, device)
    linears = 2 if kind == "LayerNormMLP" else 1
    found = texts(caught)
    assert len(found) == linears and says.replace("RECIPE", recipe) in found[0]
    assert all("multiples of 16; pad them, or use te.autocast(enabled=False)" in text for text in found)
    train(make(kind, k, n, device, name="net"), recipe, k, device)
    train(copy.deepcopy(module), recipe, k, device)
    assert len(texts(caught)) == 3 * linears  # a warning for each object


@pytest.mark.parametrize("recipe", ["delayed", "current", "bf16"])
def test_features_that_fit_or_need_not(caught, recipe):
    train(make("Linear", 64, 64), recipe, 64)
    if recipe == "bf16":
        train(make("Linear", 40, 40), recipe, 40)
    assert texts(caught) == []


def test_it_points_at_the_caller_through_torchs_own_modules(caught):
    model = torch.nn.Sequential(torch.nn.Sequential(make("Linear", 40, 64)))
    model.register_forward_hook(lambda *_: None)
    line = 2 + sys._getframe().f_lineno
    with te.autocast(recipe="current"):
        te.checkpoint(model, torch.randn(16, 40, dtype=BF16, requires_grad=True), use_reentrant=False)
    (warning,) = caught
    assert (Path(warning.filename), warning.lineno) == (HERE, line)


def test_a_warning_keeps_no_module_alive(caught):
    module = make("Linear", 40, 64)
    train(module, "current", 40)
    watched = weakref.ref(module)
    del module
    gc.collect()
    assert watched() is None and len(texts(caught)) == 1


def test_a_calibration_that_records_nothing(caught):
    warn_once.cache_clear()
    for _ in range(2):
        with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe="current"):
            make("Linear", 64, 64)(torch.randn(16, 64, dtype=BF16))
    (text,) = texts(caught)
    assert "calibrating=True does nothing" in text and "'current'" in text


SCRIPT = """\
import sys, torch, te_lite as te
x, layer = torch.randn(16, 64), torch.nn.Linear(64, 64)
if sys.argv[1] == "converted":
    te.convert_to_float8_training(layer, minimum_size=0)
for enabled in (False, True, True):
    with te.autocast(enabled, recipe="current"):
        layer(x)
"""


@pytest.mark.parametrize("kind", ["nn", "converted"])
def test_an_autocast_in_which_nothing_of_te_lite_ran(kind):
    """nn.Linear under te.autocast stays as it is; in a process of its own, where nothing has run before."""
    run = [sys.executable, "-W", "always", "-c", SCRIPT, kind]
    said = subprocess.run(run, capture_output=True, text=True, check=True, cwd=HERE.parents[2]).stderr
    assert said.count("no te_lite linear ran in te.autocast") == (kind == "nn"), said
    assert kind != "nn" or ("te.convert_to_float8_training" in said and "<string>:6" in said)
