"""Modules under recipes with several scales a tensor: token counts that fill no block, features that fill no block,
and recipe options that have no name. (tests/modules runs every named recipe.)"""

import pytest
import torch

from te_lite.testing.distributed import device_params
from tests.harness import BLOCKED, OPTIONS, check
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

DEVICES = pytest.mark.parametrize("device", device_params())
RECIPES = pytest.mark.parametrize("recipe", BLOCKED)


@DEVICES
@pytest.mark.parametrize("kind", [LINEAR, LN_LINEAR, LN_MLP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", [name for name in OPTIONS if name != "current_per_shard"])  # plain on one rank
def test_options(recipe, dtype, kind, device):
    check(Spec(kind, activation="swiglu"), recipe, dtype=dtype, device=device)


@DEVICES
@RECIPES
@pytest.mark.parametrize("m", [1, 7, 31, 33, 129, 4092])
def test_any_number_of_tokens(m, recipe, device):
    check(Spec(LINEAR), recipe, device=device, m=m)


@DEVICES
@RECIPES
@pytest.mark.parametrize("k, n", [(16, 16), (16, 144), (48, 32), (112, 128), (400, 16)])
def test_features_in_multiples_of_16(k, n, recipe, device):
    check(Spec(LINEAR), recipe, device=device, k=k, n=n)
