"""Transformer Engine's pickled scales, which are read where that is allowed. The pickles are made here, of modules with
its names, as its modules write them."""

import enum
import os
import pickle
import sys
from collections import namedtuple
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal

MAKE = {"Linear": (te.Linear, 1), "LayerNormMLP": (te.LayerNormMLP, 2)}
LENGTH, MARGIN = 8, 1
NAME = "transformer_engine.common.recipe"


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv("TE_LITE_PICKLED_STATE", "1")


@pytest.fixture
def recipes(monkeypatch):
    """A module of that name with classes of its own, which unpickling does not import."""
    module = ModuleType(NAME)
    helper = namedtuple("_FormatHelper", ["max_fwd", "max_bwd"], module=NAME)
    module._FormatHelper = helper
    module.Format = enum.Enum("Format", {"HYBRID": helper(448, 57344)}, module=NAME)

    @dataclass
    class DelayedScaling:
        margin: int = MARGIN
        fp8_format: object = module.Format.HYBRID
        amax_history_len: int = LENGTH

    @dataclass
    class Float8CurrentScaling:
        fp8_format: object = module.Format.HYBRID

    for kind in (DelayedScaling, Float8CurrentScaling):
        kind.__module__, kind.__qualname__ = NAME, kind.__name__
        setattr(module, kind.__name__, kind)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def numbers(gemms: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(gemms)
    made = {}
    for way, count in (("fwd", 3 * gemms), ("bwd", 2 * gemms)):
        made[f"amax_history_{way}"] = torch.rand(LENGTH, count, generator=generator)
        made[f"scale_{way}"] = 1 + torch.rand(count, generator=generator)
    return made


def as_uint8(value: object, protocol: int = 4) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8)


def written(recipe: object, gemms: int, **extra: object) -> dict:
    variables = {"fp8_checkpoint": True, "num_gemms": gemms, "fp8_max_fwd": 448, "fp8_max_bwd": 57344, **extra}
    return {"recipe": recipe, **numbers(gemms), "extra_fp8_variables": variables}


def module_of(kind: str) -> tuple[torch.nn.Module, int]:
    make, gemms = MAKE[kind]
    return make(64, 64, params_dtype=torch.bfloat16, device="cpu"), gemms


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("kind", MAKE)
def test_scales_and_histories_are_taken_over(kind, protocol, allowed, recipes):
    """Column for column, and used: a call by the same recipe quantizes with them."""
    module, gemms = module_of(kind)
    pickled = as_uint8(written(recipes.DelayedScaling(), gemms), protocol)
    del sys.modules[NAME]  # nothing of it is looked for
    result = module.load_state_dict(module.state_dict() | {"_extra_state": pickled})
    assert not result.missing_keys and not result.unexpected_keys
    with te.autocast(recipe=te.recipe.DelayedScaling(margin=MARGIN, amax_history_len=LENGTH)):
        module(torch.randn(16, 64, dtype=torch.bfloat16))
        live, want = module._scales._live, numbers(gemms)
        for way, short in (("forward", "fwd"), ("backward", "bwd")):
            assert_bitwise_equal(f"{way} scales", live[way].scale, want[f"scale_{short}"])
            assert_bitwise_equal(f"{way} history", live[way].history[1:], want[f"amax_history_{short}"][1:])


def test_a_margin_is_part_of_the_scales(allowed, recipes):
    """Under another margin the same amaxes give other scales, by that power of two."""
    module, gemms = module_of("Linear")
    module.load_state_dict(module.state_dict() | {"_extra_state": as_uint8(written(recipes.DelayedScaling(), gemms))})
    with te.autocast(recipe=te.recipe.DelayedScaling(margin=MARGIN + 2, amax_history_len=LENGTH)):
        module(torch.randn(16, 64, dtype=torch.bfloat16))
        scale = module._scales._live["forward"].scale
        assert_bitwise_equal("a quarter", scale, numbers(gemms)["scale_fwd"] / 4)


def test_other_recipes_have_no_scales(allowed, recipes):
    module, _ = module_of("Linear")
    pickled = as_uint8({"recipe": recipes.Float8CurrentScaling(), "extra_fp8_variables": {"num_gemms": 1}})
    module.load_state_dict(module.state_dict() | {"_extra_state": pickled})
    assert module.get_extra_state().numel() == 0


def test_an_older_state_without_a_recipe(allowed):
    module, gemms = module_of("Linear")
    state = written(None, gemms)
    del state["recipe"]
    module.load_state_dict(module.state_dict() | {"_extra_state": as_uint8(state)})
    assert module.get_extra_state()[4:6].tolist() == [448.0, 57344.0]


def test_it_is_refused_where_it_is_not_allowed(recipes):
    module, gemms = module_of("Linear")
    with pytest.raises(TypeError, match=r"TE_LITE_PICKLED_STATE=1 alone\); drop"):
        module.load_state_dict(
            module.state_dict() | {"_extra_state": as_uint8(written(recipes.DelayedScaling(), gemms))}
        )


class Runs:
    """Unpickled, it would be noticed."""

    def __reduce__(self):
        return os.putenv, ("TE_LITE_TEST_RAN", "1")


@pytest.mark.parametrize("state", [
    as_uint8(Runs()), as_uint8({"scale_fwd": Runs()}), as_uint8({"scale_fwd": torch.ones(3)}), as_uint8([1]),
    torch.arange(40, dtype=torch.uint8), as_uint8({"scale_fwd": torch.optim.SGD}),
], ids=["code", "code in a state", "half a state", "a list", "no pickle", "a class"])  # fmt: skip
def test_what_transformer_engine_does_not_write_is_refused_and_never_run(state, allowed, monkeypatch):
    ran = []
    monkeypatch.setattr(os, "putenv", lambda *args: ran.append(args))
    module, _ = module_of("Linear")
    with pytest.raises(ValueError, match="no pickle of Transformer Engine's scales.*drop the"):
        module.set_extra_state(state)
    assert not ran


def test_a_state_of_another_module_is_refused(allowed, recipes):
    module, _ = module_of("Linear")
    with pytest.raises(ValueError, match="load it into a module of the class"):
        module.set_extra_state(as_uint8(written(recipes.DelayedScaling(), 2)))
